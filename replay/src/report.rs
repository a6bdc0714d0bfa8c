//! Report of a replay. It is a function of trace and configuration; the caller adds figures that
//! depend on the replaying machine.

use std::fmt;

use serde::Serialize;

use crate::config::Config;
use crate::human;
use crate::prices::Spend;
use crate::slo::Goodput;
use crate::verdict::Verdict;

/// Report of a replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Replayed configuration.
    pub config: Config,
    /// Bottleneck and suggestions.
    pub verdict: Verdict,
    /// Requests of the trace.
    pub requests: u64,
    /// Requests that got all their tokens.
    pub finished: u64,
    /// Requests that failed during execution.
    pub failed: u64,
    /// Requests too long for every worker's device.
    pub refused: u64,
    /// Time from the first arrival to the last token.
    pub virtual_s: f64,
    /// Tokens of all admitted prompts.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub output_tokens: u64,
    /// Computed tokens of prompts and of retracted requests.
    pub computed_tokens: u64,
    /// Prompt tokens per second, computed or reused.
    pub prompt_tokens_per_s: f64,
    /// Generated tokens per second.
    pub output_tokens_per_s: f64,
    /// Shares of the prompt tokens by source.
    pub reuse: Reuse,
    /// Prompt tokens by source.
    pub reuse_tokens: ReuseTokens,
    /// Time from arrival to the first token. Like all times below, of requests after the warm-up.
    pub ttft_ms: Distribution,
    /// Time between consecutive tokens of a request, from the end of the warm-up on.
    pub itl_ms: Distribution,
    /// Mean time per token after the first, by request.
    pub tpot_ms: Distribution,
    /// Time from arrival to the last token.
    pub e2e_ms: Distribution,
    /// Time from arrival to the first admission.
    pub queue_ms: Distribution,
    /// Time from the first arrival after the warm-up to the last token.
    pub measured_s: f64,
    /// Requests that met the SLO, if there is one.
    pub goodput: Option<Goodput>,
    /// Costs.
    pub spend: Spend,
    /// Distribution behind `ttft_ms`.
    pub ttft_curve: Vec<CurvePoint>,
    /// Distribution behind `itl_ms`.
    pub itl_curve: Vec<CurvePoint>,
    /// Bytes moved by kind of link, over all workers.
    pub bytes_moved: BytesMoved,
    /// Usage of each link: those of the workers first, then the two of the store.
    pub links: Vec<LinkUse>,
    /// Usage of the shared store, if there is one.
    pub store: Option<StoreUse>,
    /// Usage of each worker.
    pub workers: Vec<WorkerUse>,
    /// Time series.
    pub series: Series,
    /// Up to ten requests with the longest time to first token, longest first.
    pub slowest: Vec<SlowRequest>,
}

impl Report {
    /// Returns a line with the workers and the sizes of tiers.
    #[must_use]
    pub fn tiers(&self) -> String {
        let config = &self.config;
        let cache = &config.scheduler.cache;
        let size = |pages: u64| {
            let tokens = pages * u64::from(cache.page_size);
            let weight = human::bytes((tokens * config.kv_bytes_per_token) as f64);
            format!("{} tokens ({weight})", human::count(tokens as f64))
        };
        let workers = match (config.workers_in_all(), config.also.len()) {
            (1, _) => "one worker".to_owned(),
            (workers, 0) => format!("{workers} workers"),
            (workers, others) => format!("{workers} workers of {} kinds, the first", others + 1),
        };
        let host = match cache.host_pages {
            0 => "no host".to_owned(),
            pages => format!("host {}", size(pages.into())),
        };
        let l3 = match (self.store, config.store.pages_max) {
            (None, _) => "no L3".to_owned(),
            (Some(_), Some(pages)) => format!("L3 {}", size(pages)),
            (Some(store), None) => format!("unlimited L3, peak {}", size(store.pages_peak)),
        };
        let device = size(cache.device_pages.into());
        format!("{workers}, pages of {} tokens: device {device}, {host}, {l3}", cache.page_size)
    }

    /// Returns the mean share of time in which workers computed.
    #[must_use]
    pub fn busy(&self) -> f64 {
        let sum = self.workers.iter().map(|worker| worker.busy).sum::<f64>();
        sum / self.workers.len().max(1) as f64
    }
}

impl LinkName {
    /// Returns a readable name.
    #[must_use]
    pub fn in_words(self) -> &'static str {
        match self {
            Self::HostToDevice => "host to device",
            Self::DeviceToHost => "device to host",
            Self::L3ToHost => "L3 to host",
            Self::HostToL3 => "host to L3",
            Self::StoreRead => "out of the store",
            Self::StoreWrite => "into the store",
        }
    }
}

/// Shares of the prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Reuse {
    /// Found on device.
    pub device: f64,
    /// Loaded from host.
    pub host: f64,
    /// Fetched from L3.
    pub l3: f64,
    /// Total.
    pub total: f64,
    /// Upper bound: the share that an unlimited cache could have reused.
    pub ceiling: f64,
}

/// Prompt tokens by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReuseTokens {
    /// Found on device.
    pub device: u64,
    /// Loaded from host.
    pub host: u64,
    /// Fetched from L3.
    pub l3: u64,
    /// Total.
    pub total: u64,
    /// Upper bound: the tokens that an unlimited cache could have reused.
    pub ceiling: u64,
}

/// Summary of a distribution. Percentiles are exact to 0.4 %; mean and maximum are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// Number of samples.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum.
    pub max: f64,
}

impl Distribution {
    /// Summarises times in nanoseconds, in milliseconds; all values are exact.
    #[must_use]
    pub fn of_ns(mut samples_ns: Vec<u64>) -> Self {
        samples_ns.sort_unstable();
        let Some(&max) = samples_ns.last() else { return Self::default() };
        let ms = |ns: u64| ns as f64 / 1e6;
        let at = |percent: usize| ms(samples_ns[(samples_ns.len() * percent).div_ceil(100) - 1]);
        let sum: u64 = samples_ns.iter().sum();
        Self {
            count: samples_ns.len() as u64,
            mean: ms(sum) / samples_ns.len() as f64,
            p50: at(50),
            p90: at(90),
            p99: at(99),
            max: ms(max),
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [mean, p50, p90, p99, max] =
            [self.mean, self.p50, self.p90, self.p99, self.max].map(human::milliseconds);
        write!(f, "mean {mean}, p50 {p50}, p90 {p90}, p99 {p99}, max {max}")
    }
}

/// A point of a cumulative distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    /// A value in milliseconds.
    pub ms: f64,
    /// Share of samples that are not above it.
    pub share: f64,
}

/// Bytes moved by kind of link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BytesMoved {
    /// Load-backs.
    pub host_to_device: u64,
    /// Write-backs.
    pub device_to_host: u64,
    /// Prefetches.
    pub l3_to_host: u64,
    /// Backups.
    pub host_to_l3: u64,
}

/// Kind of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkName {
    /// Load-backs of a worker.
    HostToDevice,
    /// Write-backs of a worker.
    DeviceToHost,
    /// Prefetches of a worker.
    L3ToHost,
    /// Backups of a worker.
    HostToL3,
    /// Reads of all workers from the store.
    StoreRead,
    /// Writes of all workers to the store.
    StoreWrite,
}

/// Usage of a link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkUse {
    /// Kind.
    pub link: LinkName,
    /// Worker; none for the store.
    pub worker: Option<u32>,
    /// Number of transfers.
    pub transfers: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Time during which the link was occupied. A link that is faster than the source of its bytes
    /// is free for the rest of the time.
    pub busy_s: f64,
    /// Same, as a share of the whole time.
    pub busy: f64,
    /// Mean time that transfers waited for earlier ones.
    pub wait_ms_mean: f64,
}

/// Usage of the shared store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreUse {
    /// Pages at the end.
    pub pages: u64,
    /// Largest number of pages.
    pub pages_peak: u64,
    /// Evicted pages.
    pub evicted_pages: u64,
    /// Number of lookups.
    pub probes: u64,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes.
    pub writes: u64,
    /// Lookups, reads and writes that failed or were short.
    pub failures: u64,
}

/// Usage of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkerUse {
    /// Requests sent to it.
    pub requests: u64,
    /// Executed steps.
    pub steps: u64,
    /// Share of time in which it computed.
    pub busy: f64,
    /// Mean number of decoding requests in a step.
    pub decodes_per_step: f64,
    /// Largest number of running requests.
    pub running_peak: u32,
    /// Largest number of waiting requests, at its scheduler and in front of it.
    pub waiting_peak: u32,
    /// Largest number of used device pages.
    pub device_pages_peak: u64,
    /// Largest number of used host pages.
    pub host_pages_peak: u64,
    /// Statistics of its scheduler.
    pub scheduler: terrace_scheduler::Stats,
}

/// Time series: columns of equal length with one value per interval. Counts and bytes are sums over
/// the interval and over all workers; bytes count while their link is occupied by them. Occupancy
/// and requests by state are means of samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    /// Length of an interval.
    pub interval_s: f64,
    /// Requests that arrived.
    pub arrivals: Vec<u64>,
    /// Requests that got their first token.
    pub first_tokens: Vec<u64>,
    /// Mean time to first token of those.
    pub ttft_ms_mean: Vec<f64>,
    /// Longest time to first token of those.
    pub ttft_ms_max: Vec<f64>,
    /// Prompt tokens of those requests, to which hits and ceiling refer as well.
    pub prompt_tokens: Vec<u64>,
    /// Tokens found on device.
    pub device_hit_tokens: Vec<u64>,
    /// Tokens loaded from host.
    pub host_hit_tokens: Vec<u64>,
    /// Tokens fetched from L3.
    pub l3_hit_tokens: Vec<u64>,
    /// Upper bound: tokens that an unlimited cache could have reused.
    pub ceiling_tokens: Vec<u64>,
    /// Generated tokens.
    pub output_tokens: Vec<u64>,
    /// Mean gap between tokens.
    pub itl_ms_mean: Vec<f64>,
    /// Share of time in which workers computed.
    pub busy: Vec<f64>,
    /// Bytes of load-backs.
    pub host_to_device_bytes: Vec<u64>,
    /// Bytes of write-backs.
    pub device_to_host_bytes: Vec<u64>,
    /// Bytes of prefetches.
    pub l3_to_host_bytes: Vec<u64>,
    /// Bytes of backups.
    pub host_to_l3_bytes: Vec<u64>,
    /// Share of time in which links carried load-backs.
    pub host_to_device_busy: Vec<f64>,
    /// Share of time in which links carried write-backs.
    pub device_to_host_busy: Vec<f64>,
    /// Share of time in which links carried prefetches.
    pub l3_to_host_busy: Vec<f64>,
    /// Share of time in which links carried backups.
    pub host_to_l3_busy: Vec<f64>,
    /// Share of device pages in use.
    pub device_used: Vec<f64>,
    /// Share of device pages pinned by running requests and transfers.
    pub device_pinned: Vec<f64>,
    /// Share of host pages in use.
    pub host_used: Vec<f64>,
    /// Share of host pages that are pinned.
    pub host_pinned: Vec<f64>,
    /// Pages in L3.
    pub l3_pages: Vec<f64>,
    /// Requests that wait for L3, another request or memory.
    pub waiting: Vec<f64>,
    /// Requests among these with a prefetch in flight.
    pub prefetching: Vec<f64>,
    /// Requests that compute their prompt or wait for its load-back.
    pub prefilling: Vec<f64>,
    /// Requests that decode.
    pub decoding: Vec<f64>,
    /// Requests that only wait for their write-back.
    pub draining: Vec<f64>,
}

/// Phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Waits for an L3 lookup, another request or memory.
    Waiting,
    /// Its prefetch is in flight.
    Fetching,
    /// Its prefetch is complete, and it waits for memory.
    Fetched,
    /// Its load-back is in flight, or the step before its first has not ended.
    Loading,
    /// Computes its prompt.
    Prefilling,
    /// Decodes.
    Decoding,
    /// Preempted: its memory was taken away, and it waits.
    Retracted,
    /// Has its first token, and its pages move to the worker that decodes it.
    Moving,
}

/// One phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Span {
    /// Phase.
    pub phase: Phase,
    /// Start, relative to its arrival.
    pub from_ms: f64,
    /// End, relative to its arrival.
    pub to_ms: f64,
}

/// A slow request and its phases.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlowRequest {
    /// Index in the trace, by arrival.
    pub request: u64,
    /// Worker.
    pub worker: u32,
    /// Arrival time.
    pub arrival_s: f64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    /// Prompt tokens found on device.
    pub device_hit_tokens: u32,
    /// Prompt tokens loaded from host.
    pub host_hit_tokens: u32,
    /// Prompt tokens fetched from L3.
    pub l3_hit_tokens: u32,
    /// Upper bound: prompt tokens that an unlimited cache could have reused.
    pub ceiling_tokens: u32,
    /// Time from arrival to the first token.
    pub ttft_ms: f64,
    /// Time from arrival to the last token.
    pub e2e_ms: f64,
    /// Phases in order; the first ones, if there are very many.
    pub spans: Vec<Span>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summarises_samples() {
        let spread = Distribution::of_ns((1..=1000).rev().map(|n| n * 1_000_000).collect());
        assert_eq!((spread.p50, spread.p90, spread.p99), (500.0, 900.0, 990.0));
        assert_eq!((spread.count, spread.mean, spread.max), (1000, 500.5, 1000.0));
        assert_eq!(Distribution::of_ns(vec![7]).p99, 7e-6);
        assert_eq!(Distribution::of_ns(Vec::new()), Distribution::default());
        let text = "mean 500 ms, p50 500 ms, p90 900 ms, p99 990 ms, max 1.00 s";
        assert_eq!(spread.to_string(), text);
    }
}
