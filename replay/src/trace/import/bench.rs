//! Output of serving benchmarks: lengths of requests, and start times if present.

use std::io::BufRead;

use serde::Deserialize;
use serde_json::Value;
use terrace_kit::Dice;

use super::super::TraceError;
use super::{Conversation, Length, Sink};
use crate::draws::Draws;

/// A run of a benchmark.
#[derive(Deserialize)]
struct Run {
    #[serde(default)]
    input_lens: Vec<u32>,
    #[serde(default)]
    output_lens: Vec<u32>,
    /// Start times in seconds; written by newer versions of vLLM.
    start_times: Option<Vec<f64>>,
    /// Requests per second, a number or `inf`.
    request_rate: Option<Value>,
    #[serde(flatten)]
    more: serde_json::Map<String, Value>,
}

/// Reads one run in any formatting, or one run per line; runs follow each other.
pub(super) fn read(input: impl BufRead, sink: &mut Sink<'_>) -> Result<(), TraceError> {
    let mut dice = Dice::new(sink.options.seed);
    let mut begins_us = 0;
    let runs = serde_json::Deserializer::from_reader(input).into_iter::<Run>();
    for (number, run) in (1..).zip(runs) {
        let run = match run {
            Ok(run) => run,
            Err(error) if error.is_io() => return Err(sink.input_error(error.into())),
            // The remaining lines cannot be separated: a run has any number of lines.
            Err(error) => return sink.turn_down(number, error.to_string()),
        };
        sink.ignore(run.more.keys().map(String::as_str));
        match requests(&run, &mut dice, begins_us) {
            Ok(turns) => {
                begins_us = turns.iter().filter_map(|turn| turn.at_us).max().unwrap_or(begins_us);
                let alone = |turn| Conversation { turns: vec![turn], ..Conversation::default() };
                sink.line = number;
                turns.into_iter().map(alone).for_each(|request| sink.push(request));
            }
            Err(problem) => sink.turn_down(number, problem)?,
        }
    }
    Ok(())
}

fn requests(run: &Run, dice: &mut Dice, begins_us: u64) -> Result<Vec<Length>, String> {
    let count = run.input_lens.len();
    if count == 0 || run.output_lens.len() != count {
        return Err(format!(
            "{count} input_lens and {} output_lens: run the benchmark with --save-detailed (vLLM) or \
             --output-details (SGLang)",
            run.output_lens.len()
        ));
    }
    let times = start_times(run, dice)?;
    let lengths = run.input_lens.iter().zip(&run.output_lens).zip(times);
    let request = |((&input_tokens, &output_tokens), at_s): ((&u32, &u32), f64)| Length {
        at_us: Some(begins_us + (at_s * 1e6) as u64),
        input_tokens,
        output_tokens,
    };
    // Requests that failed have no tokens.
    let is_sound = |request: &Length| request.input_tokens > 0 && request.output_tokens > 0;
    Ok(lengths.map(request).filter(is_sound).collect())
}

/// Returns the seconds from the first request of a run to each: as recorded, or drawn from the
/// rate.
fn start_times(run: &Run, dice: &mut Dice) -> Result<Vec<f64>, String> {
    let count = run.input_lens.len();
    if let Some(times) = &run.start_times {
        if times.len() != count || times.iter().any(|time| !time.is_finite()) {
            return Err(format!("{} start_times for {count} requests", times.len()));
        }
        let first = times.iter().copied().fold(f64::INFINITY, f64::min);
        return Ok(times.iter().map(|time| time - first).collect());
    }
    let rate = match &run.request_rate {
        None => f64::INFINITY,
        Some(Value::String(text)) if text == "inf" => f64::INFINITY,
        Some(value) => match value.as_f64().filter(|rate| *rate > 0.0) {
            Some(rate) => rate,
            None => return Err(format!("request_rate {value}: a number above 0 or \"inf\"")),
        },
    };
    let mut at_s = 0.0;
    let mut next = |place: usize| {
        // Without a rate all start at once, as in the benchmark.
        if place > 0 && rate.is_finite() {
            at_s += dice.exponential(1.0 / rate);
        }
        at_s
    };
    Ok((0..count).map(&mut next).collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{import, lengths};

    #[test]
    fn imports_vllm_benchmarks() {
        let reading = import(
            "{\n \"date\": \"20250101\",\n \"request_rate\": 2.0,\n \"input_lens\": [10, 20, 30],\n \
             \"output_lens\": [5, 0, 7],\n \"start_times\": [100.5, 101.0, 102.5],\n \"ttfts\": [0.1]\n}",
        )
        .unwrap();
        assert_eq!(lengths(&reading.trace), [(10, 5), (30, 7)]);
        assert_eq!(reading.trace.requests()[1].arrival_us, 2_000_000);
        assert_eq!(reading.ignored, ["date", "ttfts"]);
    }

    #[test]
    fn imports_sglang_benchmarks_in_sequence() {
        let run =
            "{\"request_rate\": 4, \"input_lens\": [8, 8, 8, 8], \"output_lens\": [2, 2, 2, 2]}\n";
        let trace = import(&run.repeat(50)).unwrap().trace;
        assert_eq!(trace.requests().len(), 200);
        // Three gaps of a quarter of a second in each of 50 runs.
        let seconds = trace.requests()[199].arrival_us as f64 / 1e6;
        assert!((30.0..46.0).contains(&seconds), "{seconds}");
        let at_once = run.replace('4', "\"inf\"");
        assert_eq!(import(&at_once).unwrap().trace.requests()[3].arrival_us, 0);
    }

    #[test]
    fn error_without_details_states_the_remedy() {
        let refused = import("{\"request_rate\": 4, \"completed\": 100}").unwrap_err().to_string();
        assert!(refused.contains("--save-detailed"), "{refused}");
    }
}
