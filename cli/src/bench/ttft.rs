//! `terrace bench ttft`: the time to the first token of a long prompt, by where its KV comes from.

use std::error::Error;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use terrace_engine::{Engine, Generate, Update};
use terrace_kit::median;
use terrace_replay::human;
use terrace_scheduler::{Hits, Token};
use terrace_server::{Config, L3Choice, Size, launch};

const PATIENCE: Duration = Duration::from_secs(60);
const PAGE_SIZE: u32 = 16;

/// Parameters of the measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    /// The prompt's length.
    pub(crate) tokens: usize,
    /// Number of rounds; the median is reported.
    pub(crate) rounds: usize,
}

/// Times to the first token, in milliseconds: medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    tokens: usize,
    rounds: usize,
    computed_ms: f64,
    device_ms: f64,
    host_ms: f64,
    /// From disk, after a restart.
    l3_ms: f64,
    /// Time of the fetch from disk as a share of the time of computing.
    l3_share: f64,
}

struct Round {
    computed: Duration,
    device: Duration,
    host: Duration,
    l3: Duration,
}

impl Workload {
    pub(crate) fn run(&self) -> Result<Figures, Box<dyn Error>> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let mut rounds = Vec::new();
        let progress = Progress::new(self.rounds)?;
        for round in 0..self.rounds {
            rounds.push(runtime.block_on(self.round(round, &progress))?);
        }
        progress.end();
        let median_of = |of: fn(&Round) -> f64| median(rounds.iter().map(of));
        let (computed_ms, l3_ms) =
            (median_of(|round| ms(round.computed)), median_of(|round| ms(round.l3)));
        Ok(Figures {
            tokens: self.tokens,
            rounds: self.rounds,
            computed_ms,
            device_ms: median_of(|round| ms(round.device)),
            host_ms: median_of(|round| ms(round.host)),
            l3_ms,
            l3_share: l3_ms / computed_ms,
        })
    }

    async fn round(&self, round: usize, progress: &Progress) -> Result<Round, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let prompt = self.prompt(round);
        progress.begin(round, 0);
        let engine = start(folder.path(), self.tokens)?;
        let (computed, hits) = first_token(&engine, &prompt).await?;
        expect(hits.total() == 0, "computed", hits)?;
        progress.begin(round, 1);
        let (device, hits) = first_token(&engine, &prompt).await?;
        expect(hits.device_tokens > 0, "found on device", hits)?;
        progress.begin(round, 2);
        let host = self.push_off_device(&engine, &prompt).await?;
        progress.begin(round, 3);
        engine.shutdown(PATIENCE).await;
        let engine = start(folder.path(), self.tokens)?;
        let (l3, hits) = first_token(&engine, &prompt).await?;
        expect(hits.l3_tokens > 0, "found in L3", hits)?;
        engine.shutdown(PATIENCE).await;
        Ok(Round { computed, device, host, l3 })
    }

    /// Asks for so much else that the prompt's KV is on host only, and then for the prompt.
    async fn push_off_device(
        &self,
        engine: &Engine,
        prompt: &[Token],
    ) -> Result<Duration, Box<dyn Error>> {
        for other in 0.. {
            first_token(engine, &self.prompt(1_000_000 + other)).await?;
            let figures = engine.figures().await.ok_or("the engine has ended")?;
            let device = figures.scheduler.cache.device;
            // The prompt's pages are the least recently used.
            if device.evicted_pages as usize >= self.tokens.div_ceil(PAGE_SIZE as usize) {
                break;
            }
        }
        let (host, hits) = first_token(engine, prompt).await?;
        expect(hits.host_tokens > 0, "found on host", hits)?;
        Ok(host)
    }

    /// Prompts of different seeds share nothing.
    fn prompt(&self, seed: usize) -> Vec<Token> {
        let head = format!("{seed:08} ");
        let text = head.bytes().chain("a long document about caches, ".bytes().cycle());
        text.take(self.tokens).map(Token::from).collect()
    }
}

/// Progress: a bar on a terminal, lines elsewhere.
struct Progress {
    bar: ProgressBar,
    rounds: usize,
}

impl Progress {
    /// The parts of a round.
    const PARTS: [&str; 4] = [
        "computing the prompt",
        "loading it from device",
        "evicting it from the device, then loading it from host",
        "restarting, then loading it from disk",
    ];

    fn new(rounds: usize) -> Result<Self, Box<dyn Error>> {
        let parts = (rounds * Self::PARTS.len()) as u64;
        let bar = ProgressBar::with_draw_target(Some(parts), ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template("{bar:20} {elapsed} {msg}")?);
        bar.enable_steady_tick(Duration::from_millis(200));
        Ok(Self { bar, rounds })
    }

    fn begin(&self, round: usize, part: usize) {
        let text = format!("round {} of {}: {}", round + 1, self.rounds, Self::PARTS[part]);
        // Indicatif draws nothing where there is no terminal.
        if self.bar.is_hidden() {
            eprintln!("{text}");
        }
        self.bar.set_position((round * Self::PARTS.len() + part) as u64);
        self.bar.set_message(text);
    }

    fn end(self) {
        self.bar.finish_and_clear();
    }
}

/// Starts an engine whose device holds the prompt, and so little else that it is soon evicted.
fn start(folder: &Path, tokens: usize) -> Result<Engine, Box<dyn Error>> {
    /// KV size of the model with random weights.
    const KV_BYTES_PER_TOKEN: u64 = 8 << 10;
    const DEVICE_PROMPTS: u64 = 2;
    let device_bytes = DEVICE_PROMPTS * tokens as u64 * KV_BYTES_PER_TOKEN;
    let config = Config {
        l3: Some(L3Choice::Disk(folder.to_owned())),
        random_model: true,
        page_size: PAGE_SIZE,
        device_memory: Some(Size(device_bytes).max(Size::mib(16))),
        ..Config::default()
    };
    Ok(launch(&config)?.engine)
}

/// The time to the first token, measured where the request is made.
async fn first_token(
    engine: &Engine,
    prompt: &[Token],
) -> Result<(Duration, Hits), Box<dyn Error>> {
    let began = Instant::now();
    let mut generation = engine.submit(Generate::new(prompt.to_vec(), 1)).await?;
    let mut found = Hits::default();
    while let Some(update) = generation.next().await {
        match update {
            Update::Started(hits) => found = hits,
            Update::Prompt(_) | Update::Logprobs(_) => {}
            Update::Token(_) => {
                let took = began.elapsed();
                wait_for_copies(engine).await;
                return Ok((took, found));
            }
            Update::Ended(ending) => return Err(format!("it ended: {:?}", ending.reason).into()),
        }
    }
    Err("the engine has ended".into())
}

/// Waits for the transfers of one request, which would slow down the next.
async fn wait_for_copies(engine: &Engine) {
    while let Some(figures) = engine.figures().await {
        let stats = figures.scheduler;
        let moving = stats.write_backs.in_flight + stats.backups.in_flight + stats.backups_waiting;
        if moving + stats.draining == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn expect(holds: bool, what: &str, hits: Hits) -> Result<(), Box<dyn Error>> {
    if holds { Ok(()) } else { Err(format!("the prompt should be {what}: {hits:?}").into()) }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, computed_ms, device_ms, host_ms, l3_ms, l3_share, .. } = self;
        let line = |place: &str, ms: f64| format!("  {place:<26}{:>9}", human::milliseconds(ms));
        writeln!(f, "TTFT of a prompt of {tokens} tokens, by where its KV is")?;
        writeln!(f, "{}", line("computed", *computed_ms))?;
        writeln!(f, "{}", line("on device", *device_ms))?;
        writeln!(f, "{}", line("on host", *host_ms))?;
        let disk = line("on disk, after a restart", *l3_ms);
        writeln!(f, "{disk}, {} of computing it", human::percent(*l3_share))
    }
}
