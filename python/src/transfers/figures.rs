//! Statistics of transfers, for the engine's metrics.

use std::collections::BTreeMap;

use serde::Serialize;

use super::board::Ended;
use super::job::{FAILED, Kind};

/// Upper bounds of the latency buckets, in seconds.
pub(crate) const BUCKETS: [f64; 12] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// Counters since the start, by kind of job.
#[derive(Clone, Default, Serialize)]
pub(super) struct Figures {
    put: Operation,
    get: Operation,
    exists: Operation,
    remove: Operation,
}

#[derive(Clone, Default, Serialize)]
struct Operation {
    jobs: u64,
    objects: u64,
    /// Objects stored, read, found or removed.
    hits: u64,
    /// Objects known to be absent.
    misses: u64,
    /// Other failures, by kind.
    failures: BTreeMap<&'static str, u64>,
    bytes: u64,
    seconds: f64,
    /// Jobs per latency bucket; the last bucket is unbounded.
    buckets: [u64; BUCKETS.len() + 1],
}

impl Figures {
    pub(super) fn note(&mut self, ended: &Ended, failures: &[&'static str]) {
        let operation = match ended.kind {
            Kind::Put => &mut self.put,
            Kind::Get => &mut self.get,
            Kind::Exists => &mut self.exists,
            Kind::Remove => &mut self.remove,
        };
        operation.jobs += 1;
        operation.objects += ended.codes.len() as u64;
        operation.bytes += ended.bytes;
        operation.seconds += ended.seconds;
        let bucket = BUCKETS.iter().position(|end| ended.seconds <= *end).unwrap_or(BUCKETS.len());
        operation.buckets[bucket] += 1;
        for &code in &ended.codes {
            match (ended.kind, code) {
                (_, FAILED) => {}
                (Kind::Exists, 0) => operation.misses += 1,
                (Kind::Put | Kind::Get | Kind::Exists | Kind::Remove, _) => operation.hits += 1,
            }
        }
        for &failure in failures {
            if failure == "missing" {
                operation.misses += 1;
            } else {
                *operation.failures.entry(failure).or_default() += 1;
            }
        }
    }
}
