//! `terrace bench clients`: many streaming clients on a server that runs elsewhere.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use terrace_replay::{Distribution, human};

use super::http::{Failure, Server};

/// What to measure.
#[derive(Clone, Debug)]
pub(crate) struct Workload {
    /// Host and port.
    pub(crate) address: String,
    /// The operator's or a client's key.
    pub(crate) key: Option<String>,
    /// Clients at a time.
    pub(crate) clients: u64,
    /// How long.
    pub(crate) run: Duration,
    /// Characters of the prompt's common part and of its own.
    pub(crate) shared: usize,
    pub(crate) own: usize,
    /// Tokens of an answer.
    pub(crate) answer: u32,
}

/// What clients and server saw.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Figures {
    answers: u64,
    errors: u64,
    tokens: u64,
    tokens_per_second: f64,
    first_token_ms: Distribution,
    between_tokens_ms: Distribution,
    /// What the server says of itself: overhead, hits, memory.
    server: BTreeMap<String, f64>,
    /// Its memory when half of the time was over, and at the end.
    memory_middle_bytes: f64,
    memory_end_bytes: f64,
    /// The first thing that went wrong.
    first_error: Option<String>,
}

/// A piece of an answer, as far as it matters when it came. The last one says why the answer ended and
/// has no text; nothing was produced for it.
#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
}

impl Chunk {
    fn parse(event: &str) -> Result<Self, String> {
        let chunk: Self =
            serde_json::from_str(event).map_err(|error| format!("{error}: {event}"))?;
        match chunk.error {
            Some(_) => Err(event.to_owned()),
            None => Ok(chunk),
        }
    }

    fn has_text(&self) -> bool {
        self.choices.iter().any(|choice| !choice.text.is_empty())
    }
}

/// What all clients write down.
#[derive(Default)]
struct Notes {
    answers: AtomicU64,
    tokens: AtomicU64,
    errors: AtomicU64,
    first_error: Mutex<Option<String>>,
    first_token_ns: Mutex<Vec<u64>>,
    between_tokens_ns: Mutex<Vec<u64>>,
}

impl Workload {
    pub(crate) fn run(&self) -> Result<Figures, Box<dyn Error>> {
        let figures: Result<Figures, Failure> = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?
            .block_on(self.run_clients());
        figures.map_err(|error| -> Box<dyn Error> { error })
    }

    async fn run_clients(&self) -> Result<Figures, Failure> {
        let server = Server::new(&self.address, self.key.as_deref());
        let before = metrics(&server).await?;
        let model = model(&server).await?;
        let notes = Arc::new(Notes::default());
        let began = Instant::now();
        let ends = began + self.run;
        let mut clients = tokio::task::JoinSet::new();
        for client in 0..self.clients {
            let (workload, notes) = (self.clone(), notes.clone());
            let (server, model) = (server.clone(), model.clone());
            clients.spawn(async move {
                for turn in 0.. {
                    if Instant::now() >= ends {
                        return;
                    }
                    if let Err(error) = workload.ask(&server, &model, client, turn, &notes).await {
                        notes.errors.fetch_add(1, Ordering::Relaxed);
                        notes.first_error.lock().get_or_insert(error.to_string());
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            });
        }
        tokio::time::sleep(self.run / 2).await;
        let middle = metrics(&server).await?;
        clients.join_all().await;
        let took = began.elapsed();
        let end = metrics(&server).await?;
        let tokens = notes.tokens.load(Ordering::Relaxed);
        Ok(Figures {
            answers: notes.answers.load(Ordering::Relaxed),
            errors: notes.errors.load(Ordering::Relaxed),
            tokens,
            tokens_per_second: tokens as f64 / took.as_secs_f64(),
            first_token_ms: Distribution::of_ns(std::mem::take(&mut notes.first_token_ns.lock())),
            between_tokens_ms: Distribution::of_ns(std::mem::take(
                &mut notes.between_tokens_ns.lock(),
            )),
            server: differences(&before, &end),
            memory_middle_bytes: memory(&middle),
            memory_end_bytes: memory(&end),
            first_error: notes.first_error.lock().clone(),
        })
    }

    async fn ask(
        &self,
        server: &Server,
        model: &str,
        client: u64,
        turn: u64,
        notes: &Notes,
    ) -> Result<(), Failure> {
        let filler = "Pages move between the tiers while others are computed. ";
        let shared: String = filler.chars().cycle().take(self.shared).collect();
        let own: String =
            format!("{client} {turn} {filler}").chars().cycle().take(self.own).collect();
        let body = json!({
            "model": model,
            "prompt": shared + &own,
            "max_tokens": self.answer,
            "stream": true,
            "ignore_eos": true,
        });
        let began = Instant::now();
        let mut lines = server.post("/v1/completions", body.to_string()).await?;
        let (mut is_first, mut last, mut is_done) = (true, began, false);
        while let Some(line) = lines.next().await? {
            let Some(event) = line.strip_prefix("data: ") else { continue };
            is_done = event == "[DONE]";
            if is_done {
                break;
            }
            if !Chunk::parse(event)?.has_text() {
                continue;
            }
            let now = Instant::now();
            let list = if is_first { &notes.first_token_ns } else { &notes.between_tokens_ns };
            list.lock().push((now - last).as_nanos() as u64);
            (is_first, last) = (false, now);
        }
        if !is_done {
            return Err("a stream ended early".into());
        }
        notes.answers.fetch_add(1, Ordering::Relaxed);
        notes.tokens.fetch_add(u64::from(self.answer), Ordering::Relaxed);
        Ok(())
    }
}

async fn model(server: &Server) -> Result<String, Failure> {
    let models: Value = serde_json::from_str(&server.get("/v1/models").await?)?;
    Ok(models["data"][0]["id"].as_str().ok_or("the server has no model")?.to_owned())
}

/// Every sample of the server's metrics, by name and labels.
async fn metrics(server: &Server) -> Result<BTreeMap<String, f64>, Failure> {
    let text = server.get("/metrics").await?;
    let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    });
    Ok(samples.collect())
}

fn memory(metrics: &BTreeMap<String, f64>) -> f64 {
    metrics.get("process_resident_memory_bytes").copied().unwrap_or(0.0)
}

/// What the run added to the counters, as far as people ask for them.
fn differences(
    before: &BTreeMap<String, f64>,
    end: &BTreeMap<String, f64>,
) -> BTreeMap<String, f64> {
    let grown = |name: &str| {
        let value = |metrics: &BTreeMap<String, f64>| metrics.get(name).copied().unwrap_or(0.0);
        value(end) - value(before)
    };
    let (busy, model) = (grown("terrace_busy_seconds_total"), grown("terrace_model_seconds_total"));
    let steps = grown("terrace_steps_total");
    let mut differences = BTreeMap::from([
        ("overhead_ratio".to_owned(), if busy > 0.0 { 1.0 - model / busy } else { 0.0 }),
        ("step_ms".to_owned(), if steps > 0.0 { 1e3 * busy / steps } else { 0.0 }),
        ("steps".to_owned(), steps),
    ]);
    for tier in ["device", "host", "l3", "computed"] {
        let name = format!("terrace_prompt_tokens_total{{tier=\"{tier}\"}}");
        differences.insert(format!("prompt_tokens_{tier}"), grown(&name));
    }
    differences
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answers, errors, tokens, tokens_per_second, .. } = self;
        writeln!(
            f,
            "{answers} requests, {errors} errors, {tokens} output tokens, {tokens_per_second:.0} tokens/s"
        )?;
        writeln!(f, "TTFT: {}", self.first_token_ms)?;
        writeln!(f, "ITL:  {}", self.between_tokens_ms)?;
        let server = |name: &str| self.server.get(name).copied().unwrap_or(0.0);
        writeln!(
            f,
            "server: {:.0} steps of {}, overhead {:.2} %",
            server("steps"),
            human::milliseconds(server("step_ms")),
            100.0 * server("overhead_ratio")
        )?;
        writeln!(
            f,
            "prompt tokens: {:.0} on device, {:.0} on host, {:.0} in L3, {:.0} computed",
            server("prompt_tokens_device"),
            server("prompt_tokens_host"),
            server("prompt_tokens_l3"),
            server("prompt_tokens_computed")
        )?;
        writeln!(
            f,
            "memory: {:.0} MiB halfway, {:.0} MiB at the end",
            self.memory_middle_bytes / f64::from(1 << 20),
            self.memory_end_bytes / f64::from(1 << 20)
        )?;
        match &self.first_error {
            Some(error) => writeln!(f, "first error: {error}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_chunks_with_text_are_tokens() {
        let has_text = |event: &str| Chunk::parse(event).map(|chunk| chunk.has_text());
        assert_eq!(has_text(r#"{"choices":[{"text":"an \"error\"","index":0}]}"#), Ok(true));
        let last = r#"{"choices":[{"text":"","index":0,"finish_reason":"length"}]}"#;
        assert_eq!(has_text(last), Ok(false));
        assert_eq!(has_text(r#"{"choices":[],"usage":{"completion_tokens":8}}"#), Ok(false));
        assert!(has_text(r#"{"error":{"message":"no"}}"#).is_err());
        assert!(has_text("nonsense").is_err());
    }
}
