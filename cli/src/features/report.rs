//! Output of `terrace features`.

use std::error::Error;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_l3_features::{FeatureStats, GcReport};
use terrace_replay::Size;

type Failure = Box<dyn Error>;

/// Totals of a run.
#[derive(Default, Serialize)]
pub(super) struct Totals {
    pub(super) samples: u64,
    pub(super) bytes: u64,
    /// Refs whose samples were gone.
    pub(super) gone: u64,
    /// Samples with a short or damaged tensor.
    pub(super) damaged: u64,
    /// Tensors with wrong bytes.
    pub(super) wrong: u64,
    /// Refs that were not authentic.
    pub(super) forged: u64,
    pub(super) seconds: f64,
    /// Of the last turn with the store.
    pub(super) features: FeatureStats,
}

impl Totals {
    pub(super) fn count(&mut self, bytes: u64) {
        self.samples += 1;
        self.bytes += bytes;
    }
}

/// Tells on standard error how far a run is.
pub(super) struct Progress {
    json: bool,
    verb: &'static str,
    expected: Option<u64>,
    began: Instant,
    shown: Instant,
}

impl Progress {
    pub(super) fn new(json: bool, verb: &'static str, expected: Option<u64>) -> Self {
        Self { json, verb, expected, began: Instant::now(), shown: Instant::now() }
    }

    pub(super) fn show(&mut self, totals: &Totals) {
        const PAUSE: Duration = Duration::from_millis(500);
        if self.shown.elapsed() < PAUSE || !std::io::stderr().is_terminal() {
            return;
        }
        self.shown = Instant::now();
        let of = self.expected.map_or(String::new(), |expected| format!(" of {expected}"));
        eprint!("\r{} {}{of} samples, {}   ", self.verb, totals.samples, self.speed(totals));
    }

    pub(super) fn end(&self, totals: &Totals) -> Result<String, Failure> {
        if std::io::stderr().is_terminal() {
            eprint!("\r\x1b[K");
        }
        if totals.wrong + totals.damaged > 0 {
            let Totals { wrong, damaged, .. } = totals;
            return Err(
                format!("{wrong} tensors with wrong bytes, {damaged} damaged samples").into()
            );
        }
        if self.json {
            let totals = Totals {
                seconds: self.began.elapsed().as_secs_f64(),
                features: totals.features.clone(),
                ..*totals
            };
            return Ok(serde_json::to_string_pretty(&totals)? + "\n");
        }
        let gone = match totals.gone {
            0 => String::new(),
            gone => format!("; {gone} were missing"),
        };
        Ok(format!("{} {} samples, {}{gone}\n", self.verb, totals.samples, self.speed(totals)))
    }

    fn speed(&self, totals: &Totals) -> String {
        let seconds = self.began.elapsed().as_secs_f64().max(1e-9);
        let size = Size(totals.bytes);
        format!("{size} in {seconds:.1} s, {:.2} GB/s", totals.bytes as f64 / seconds / 1e9)
    }
}

/// Result of a garbage collection.
#[derive(Serialize)]
pub(super) struct GcOutcome {
    pub(super) report: GcReport,
    pub(super) features: FeatureStats,
    /// Objects in the store, whoever's they are; of a cluster, those that this producer has put.
    pub(super) objects: u64,
    /// What they take.
    pub(super) stored_bytes: u64,
}

impl GcOutcome {
    pub(super) fn print(&self, json: bool) -> Result<String, Failure> {
        if json {
            return Ok(serde_json::to_string_pretty(self)? + "\n");
        }
        let Self { report, features, objects, stored_bytes } = self;
        let oldest = match &features.oldest {
            Some(oldest) => format!("; the oldest is {}, {} ms old", oldest.key, oldest.age_ms),
            None => String::new(),
        };
        Ok(format!(
            "freed {} expired and {} consumed samples; {} left, {} bytes, {} waiting to be freed{oldest}\n\
             the store has {objects} objects in {} of slots\n",
            report.expired,
            report.consumed,
            features.live,
            features.resident_bytes,
            features.parked,
            Size(*stored_bytes)
        ))
    }
}
