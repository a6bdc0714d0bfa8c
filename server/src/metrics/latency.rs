//! How long answers take, as their clients see it.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use serde::Serialize;
use terrace_scheduler::Hits;

use super::exposition::{Exposition, Kind};
use super::recent::{Percentiles, RecentTimes};
use crate::answer::Finish;
use crate::history::History;

const FIRST_TOKEN_S: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const INTER_TOKEN_S: [f64; 13] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
const REQUEST_S: [f64; 17] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
];

/// Measures of all answers.
#[derive(Debug)]
pub(crate) struct Latency {
    pub(super) first_token: Histogram,
    pub(super) inter_token: Histogram,
    pub(super) request: Histogram,
    prompt_tokens: Histogram,
    generated_tokens: Histogram,
    stopped: Counter,
    cut_at_length: Counter,
    unfinished: Counter,
    recent_first_tokens: RecentTimes,
    recent_inter_tokens: RecentTimes,
}

/// How long tokens took lately; none before there are any.
#[derive(Debug, Serialize)]
pub(crate) struct LatestTimes {
    /// From when a request came until the first token of its answer.
    first_token: Option<Percentiles>,
    /// From a token of an answer to the next one.
    inter_token: Option<Percentiles>,
}

impl Default for Latency {
    fn default() -> Self {
        let tokens = || Histogram::new(exponential_buckets(1.0, 2.0, 18));
        Self {
            first_token: Histogram::new(FIRST_TOKEN_S),
            inter_token: Histogram::new(INTER_TOKEN_S),
            request: Histogram::new(REQUEST_S),
            prompt_tokens: tokens(),
            generated_tokens: tokens(),
            stopped: Counter::default(),
            cut_at_length: Counter::default(),
            unfinished: Counter::default(),
            recent_first_tokens: RecentTimes::default(),
            recent_inter_tokens: RecentTimes::default(),
        }
    }
}

impl Latency {
    pub(super) fn register(self: &Arc<Self>, registry: &mut Registry) {
        // The registry ends each of these with a full stop.
        let mut add = |name, help, histogram: &Histogram| {
            registry.register(name, help, histogram.clone());
        };
        add(
            "terrace_time_to_first_token_seconds",
            "Time to first token (TTFT), from receipt of the request, in seconds",
            &self.first_token,
        );
        add(
            "terrace_inter_token_seconds",
            "Inter-token latency (ITL), in seconds",
            &self.inter_token,
        );
        add(
            "terrace_request_seconds",
            "End-to-end latency of a completion, from receipt of the request, in seconds",
            &self.request,
        );
        add(
            "terrace_request_prompt_tokens",
            "Prompt tokens per finished completion",
            &self.prompt_tokens,
        );
        add(
            "terrace_request_generated_tokens",
            "Output tokens per finished completion",
            &self.generated_tokens,
        );
        registry.register_collector(Box::new(AnswersEnded(self.clone())));
    }

    /// How long tokens took lately.
    pub(crate) fn latest(&self) -> LatestTimes {
        LatestTimes {
            first_token: self.recent_first_tokens.percentiles(),
            inter_token: self.recent_inter_tokens.percentiles(),
        }
    }

    /// How answers have ended.
    pub(super) fn ended(&self) -> [(&'static str, u64); 3] {
        [
            ("stop", self.stopped.get()),
            ("length", self.cut_at_length.get()),
            ("abort", self.unfinished.get()),
        ]
    }
}

#[derive(Debug)]
struct AnswersEnded(Arc<Latency>);

impl Collector for AnswersEnded {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        Exposition::new(encoder).metric(
            Kind::Counter,
            "terrace_answers_total",
            "Completions that ended, by finish reason: stop, length, or aborted by the client.",
            &self.0.ended(),
            "finish",
        )
    }
}

/// Measures one answer. Dropping it before the end counts the answer as called off.
#[derive(Debug)]
pub(crate) struct AnswerClock {
    latency: Arc<Latency>,
    history: Arc<History>,
    asked_at: Instant,
    prompt_tokens: usize,
    last_token_at: Option<Instant>,
    is_complete: bool,
}

impl AnswerClock {
    pub(crate) fn new(
        latency: Arc<Latency>,
        history: Arc<History>,
        asked_at: Instant,
        prompt_tokens: usize,
    ) -> Self {
        Self { latency, history, asked_at, prompt_tokens, last_token_at: None, is_complete: false }
    }

    /// Counts the prompt, once it is known where its KV comes from.
    pub(crate) fn started(&mut self, hits: Hits) {
        self.history.prompt(self.prompt_tokens, hits);
    }

    /// A token has come.
    pub(crate) fn token(&mut self) {
        let now = Instant::now();
        let latency = &self.latency;
        let (histogram, recent, time) = match self.last_token_at.replace(now) {
            Some(before) => (&latency.inter_token, &latency.recent_inter_tokens, now - before),
            None => (&latency.first_token, &latency.recent_first_tokens, now - self.asked_at),
        };
        observe(histogram, time);
        recent.observe(time);
    }

    /// All tokens have come.
    pub(crate) fn complete(&mut self, finish: Finish, tokens: u32) {
        self.is_complete = true;
        let latency = &self.latency;
        observe(&latency.request, self.asked_at.elapsed());
        latency.prompt_tokens.observe(self.prompt_tokens as f64);
        latency.generated_tokens.observe(f64::from(tokens));
        match finish {
            Finish::Stop | Finish::ToolCalls => latency.stopped.inc(),
            Finish::Length => latency.cut_at_length.inc(),
        };
    }
}

impl Drop for AnswerClock {
    fn drop(&mut self) {
        if !self.is_complete {
            self.latency.unfinished.inc();
        }
    }
}

fn observe(histogram: &Histogram, time: Duration) {
    histogram.observe(time.as_secs_f64());
}
