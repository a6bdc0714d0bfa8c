//! Tables of lengths: Azure's and BurstGPT's. They have no prompts, so nothing is shared, except
//! within BurstGPT's sessions: a prompt that is long enough is assumed to contain the earlier
//! exchange.

use std::collections::HashMap;
use std::io::BufRead;

use super::super::TraceError;
use super::{Conversation, Length, Sink, time};

/// Header of a table: the places of its columns.
struct Columns {
    names: Vec<String>,
}

impl Columns {
    /// Reads the header, and records ignored columns.
    fn read(
        input: &mut impl BufRead,
        used: &[&str],
        sink: &mut Sink<'_>,
    ) -> Result<Self, TraceError> {
        let mut first = String::new();
        input.read_line(&mut first).map_err(|error| sink.input_error(error))?;
        let first = first.trim_start_matches('\u{feff}');
        let names: Vec<String> =
            cells(first).into_iter().map(|name| name.trim().to_owned()).collect();
        let is_used = |name: &str| used.iter().any(|used| used.eq_ignore_ascii_case(name));
        sink.ignore(names.iter().map(String::as_str).filter(|name| !is_used(name)));
        Ok(Self { names })
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|other| other.eq_ignore_ascii_case(name))
    }

    /// Returns the place of a required column.
    fn needed(&self, name: &str, sink: &mut Sink<'_>) -> Result<usize, TraceError> {
        match self.find(name) {
            Some(place) => Ok(place),
            None => {
                let problem =
                    format!("there is no column {name:?}, only {}", self.names.join(", "));
                let file = sink.file.clone();
                Err(TraceError::NothingLeft(super::BadLine { file, line: 1, problem }))
            }
        }
    }
}

/// Splits a line into cells; commas may be quoted.
fn cells(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut is_quoted = false;
    for letter in line.trim_end_matches(['\r', '\n']).chars() {
        match letter {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => cells.push(String::new()),
            other => cells.last_mut().expect("one at least").push(other),
        }
    }
    cells
}

fn cell(row: &[String], place: usize) -> Result<&str, String> {
    row.get(place).map(|text| text.trim()).ok_or_else(|| format!("only {} columns", row.len()))
}

fn count(row: &[String], place: usize, name: &str) -> Result<u32, String> {
    let text = cell(row, place)?;
    let number = text.parse::<f64>().ok().filter(|number| (0.0..4e9).contains(number));
    number.map(|number| number as u32).ok_or_else(|| format!("{name} {text:?} is not a count"))
}

fn moment(row: &[String], place: usize) -> Result<u64, String> {
    let text = cell(row, place)?;
    time::microseconds(text).ok_or_else(|| format!("{text:?} is not a time"))
}

/// Passes each further line to `take`, and records invalid ones.
fn rows(
    input: impl BufRead,
    sink: &mut Sink<'_>,
    mut take: impl FnMut(&[String], &mut Sink<'_>) -> Result<(), String>,
) -> Result<(), TraceError> {
    for (number, line) in (2..).zip(input.lines()) {
        let line = line.map_err(|error| sink.input_error(error))?;
        if line.trim().is_empty() {
            continue;
        }
        sink.line = number;
        if let Err(problem) = take(&cells(&line), sink) {
            sink.turn_down(number, problem)?;
        }
    }
    Ok(())
}

/// Reads one request per line: arrival time, and tokens of prompt and answer.
pub(super) fn read_azure(mut input: impl BufRead, sink: &mut Sink<'_>) -> Result<(), TraceError> {
    let used = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];
    let columns = Columns::read(&mut input, &used, sink)?;
    let [at, context, generated] = used;
    let at = columns.needed(at, sink)?;
    let context = columns.needed(context, sink)?;
    let generated = columns.needed(generated, sink)?;
    rows(input, sink, |row, sink| {
        let turn = Length {
            at_us: Some(moment(row, at)?),
            input_tokens: count(row, context, "ContextTokens")?,
            output_tokens: count(row, generated, "GeneratedTokens")?,
        };
        if turn.input_tokens == 0 {
            return Err("a prompt without tokens".to_owned());
        }
        sink.push(Conversation { turns: vec![turn], ..Conversation::default() });
        Ok(())
    })
}

/// Reads one request per line; some versions have sessions. Requests without an answer failed and
/// are skipped.
pub(super) fn read_burst_gpt(
    mut input: impl BufRead,
    sink: &mut Sink<'_>,
) -> Result<(), TraceError> {
    let used = ["Timestamp", "Request tokens", "Response tokens", "Session ID"];
    let columns = Columns::read(&mut input, &used, sink)?;
    let at = columns.needed("Timestamp", sink)?;
    let request = columns.needed("Request tokens", sink)?;
    let response = columns.needed("Response tokens", sink)?;
    let session = columns.find("Session ID");
    let mut sessions: HashMap<String, u64> = HashMap::new();
    // The current conversation of a session, and its length with its latest answer.
    let mut latest: HashMap<u64, (usize, u32)> = HashMap::new();
    rows(input, sink, |row, sink| {
        let turn = Length {
            at_us: Some(moment(row, at)?),
            input_tokens: count(row, request, "Request tokens")?,
            output_tokens: count(row, response, "Response tokens")?,
        };
        if turn.input_tokens == 0 || turn.output_tokens == 0 {
            sink.skipped_lines += 1;
            return Ok(());
        }
        let name = session.map(|place| cell(row, place)).transpose()?.unwrap_or("");
        let next = sessions.len() as u64;
        let session = match name {
            "" => None,
            name => Some(*sessions.entry(name.to_owned()).or_insert(next)),
        };
        let whole = turn.input_tokens.saturating_add(turn.output_tokens);
        if let Some(number) = session
            && let Some((place, length)) = latest.get_mut(&number)
            && turn.input_tokens > *length
        {
            *length = whole;
            sink.conversations[*place].turns.push(turn);
            return Ok(());
        }
        if let Some(number) = session {
            latest.insert(number, (sink.conversations.len(), whole));
        }
        sink.push(Conversation { session, turns: vec![turn], ..Conversation::default() });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{import, lengths};

    #[test]
    fn imports_azure() {
        let reading = import(
            "TIMESTAMP,ContextTokens,GeneratedTokens,Region\n\
             2023-11-16 18:15:46.6805900,374,44,x\n\
             2023-11-16 18:15:50.9951690,396,109,y\n",
        )
        .unwrap();
        assert_eq!(lengths(&reading.trace), [(374, 44), (396, 109)]);
        assert_eq!(reading.trace.requests()[1].arrival_us, 4_314_579);
        assert_eq!(reading.ignored, ["Region"]);
        assert_eq!(reading.trace.ceiling(16).reusable_tokens, 0, "no prompt shares a prefix");
    }

    #[test]
    fn errors_name_columns_and_lines() {
        let refused = |text: &str| import(text).unwrap_err().to_string();
        let missing = refused("TIMESTAMP,ContextTokens,Tokens\n1,2,3\n");
        assert!(missing.contains("no column \"GeneratedTokens\", only TIMESTAMP"), "{missing}");
        let huge = refused("TIMESTAMP,ContextTokens,GeneratedTokens\n5,6,7\n5,6,99999999\n");
        assert!(huge.starts_with("traffic, line 3: an output of 99999999 tokens"), "{huge}");
        let bad = refused("TIMESTAMP,ContextTokens,GeneratedTokens\n5,6,7\n5,six,7\n");
        assert!(bad.starts_with("traffic, line 3: ContextTokens \"six\" is not a count"), "{bad}");
    }

    #[test]
    fn imports_burst_gpt_sessions() {
        let reading = import(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
             5,a,1.2,ChatGPT,100,50,150,Conversation log\n\
             45,a,1.2,ChatGPT,200,50,250,Conversation log\n\
             50,,1.2,GPT-4,300,0,300,API log\n\
             60,a,1.2,ChatGPT,40,10,50,Conversation log\n",
        )
        .unwrap();
        assert_eq!(lengths(&reading.trace), [(100, 50), (200, 50), (40, 10)]);
        assert_eq!((reading.skipped_lines, reading.ignored.len()), (1, 4));
        // The second prompt contains the whole first exchange; the third starts anew.
        assert_eq!(reading.trace.ceiling(1).by_request, [0, 149, 0]);
        assert!(reading.trace.has_sessions());
    }
}
