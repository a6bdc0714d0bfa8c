//! What a replay found. All of it follows from trace and configuration; what depends on the machine
//! that replays is the caller's to add.

use std::fmt;

use serde::Serialize;

use crate::config::Config;
use crate::human;
use crate::prices::Spend;
use crate::slo::Goodput;
use crate::verdict::Verdict;

/// What a replay found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// What was replayed on.
    pub config: Config,
    /// What it is limited by, and what to try.
    pub verdict: Verdict,
    /// Requests of the trace.
    pub requests: u64,
    /// Of those, requests that got all their tokens.
    pub finished: u64,
    /// Of those, requests that failed on the way.
    pub failed: u64,
    /// Of those, requests that no worker could have run: too long for the device.
    pub refused: u64,
    /// From the first arrival to the last token.
    pub virtual_s: f64,
    /// Tokens of all prompts that were admitted.
    pub prompt_tokens: u64,
    /// Tokens that were produced.
    pub output_tokens: u64,
    /// Tokens of prompts and of retracted requests that were computed.
    pub computed_tokens: u64,
    /// Tokens of prompts, computed or reused, that were taken in each second.
    pub prompt_tokens_per_s: f64,
    /// Tokens that were produced each second.
    pub output_tokens_per_s: f64,
    /// Which share of the prompt tokens was found where.
    pub reuse: Reuse,
    /// The same in tokens.
    pub reuse_tokens: ReuseTokens,
    /// From arrival to the first token. Like all times below, of the requests after the warm-up.
    pub ttft_ms: Distribution,
    /// Between one token of a request and the next, from the end of the warm-up on.
    pub itl_ms: Distribution,
    /// Of each request, how long its tokens took on average after the first.
    pub tpot_ms: Distribution,
    /// From arrival to the last token.
    pub e2e_ms: Distribution,
    /// From arrival to the first admission.
    pub queue_ms: Distribution,
    /// From the first arrival after the warm-up to the last token.
    pub measured_s: f64,
    /// How many got what was promised, if anything was.
    pub goodput: Option<Goodput>,
    /// What it costs.
    pub spend: Spend,
    /// The whole curve behind `ttft_ms`.
    pub ttft_curve: Vec<CurvePoint>,
    /// The whole curve behind `itl_ms`.
    pub itl_curve: Vec<CurvePoint>,
    /// Bytes that went over each kind of link, all workers together.
    pub bytes_moved: BytesMoved,
    /// Each link, those of the workers first, then the two of the store.
    pub links: Vec<LinkUse>,
    /// The store that all workers share, if there is one.
    pub store: Option<StoreUse>,
    /// What each worker did.
    pub workers: Vec<WorkerUse>,
    /// How things went over time.
    pub series: Series,
    /// The requests with the longest time to first token, longest first: ten at the most.
    pub slowest: Vec<SlowRequest>,
}

impl Report {
    /// What was replayed on, in a line: workers, and the sizes of tiers.
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

    /// The share of the time in which workers computed, on average.
    #[must_use]
    pub fn busy(&self) -> f64 {
        let sum = self.workers.iter().map(|worker| worker.busy).sum::<f64>();
        sum / self.workers.len().max(1) as f64
    }
}

impl LinkName {
    /// Where it goes from and to.
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
    /// All together.
    pub total: f64,
    /// What a cache without limits could have reused, from the trace alone.
    pub ceiling: f64,
}

/// The same in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReuseTokens {
    /// Found on device.
    pub device: u64,
    /// Loaded from host.
    pub host: u64,
    /// Fetched from L3.
    pub l3: u64,
    /// All together.
    pub total: u64,
    /// What a cache without limits could have reused.
    pub ceiling: u64,
}

/// A distribution in short. Percentiles are exact to 0.4 %; mean and maximum are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    /// How many samples.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Half are not above this.
    pub p50: f64,
    /// Nine of ten are not above this.
    pub p90: f64,
    /// 99 of 100 are not above this.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Distribution {
    /// Of times in nanoseconds, in milliseconds; all of it is exact.
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
    /// The share of samples that are not above it.
    pub share: f64,
}

/// Bytes that went over each kind of link.
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

/// Which link it is.
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
    /// What the store delivers to all workers.
    StoreRead,
    /// What the store takes from all workers.
    StoreWrite,
}

/// What a link did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkUse {
    /// Which link.
    pub link: LinkName,
    /// Whose; none for the store's.
    pub worker: Option<u32>,
    /// Transfers that it carried.
    pub transfers: u64,
    /// Bytes that it carried.
    pub bytes: u64,
    /// How long it was carrying something. A link that could carry more than what its bytes come from
    /// is free for the rest of the time.
    pub busy_s: f64,
    /// The same as a share of the whole time.
    pub busy: f64,
    /// How long transfers waited for those before them, on average.
    pub wait_ms_mean: f64,
}

/// What the shared store did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreUse {
    /// Pages that it holds at the end.
    pub pages: u64,
    /// The most pages that it held.
    pub pages_peak: u64,
    /// Pages that went to make room for others.
    pub evicted_pages: u64,
    /// Questions asked.
    pub probes: u64,
    /// Reads asked for.
    pub reads: u64,
    /// Writes asked for.
    pub writes: u64,
    /// Probes, reads and writes that failed or came short, by the dice.
    pub failures: u64,
}

/// What a worker did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkerUse {
    /// Requests that were sent to it.
    pub requests: u64,
    /// Steps that it performed.
    pub steps: u64,
    /// The share of the time in which it computed.
    pub busy: f64,
    /// Requests in a step that decode, on average.
    pub decodes_per_step: f64,
    /// The most requests that ran at once.
    pub running_peak: u32,
    /// The most requests that waited at once, at its scheduler and before it.
    pub waiting_peak: u32,
    /// The most device pages in use.
    pub device_pages_peak: u64,
    /// The most host pages in use.
    pub host_pages_peak: u64,
    /// What its scheduler counted.
    pub scheduler: terrace_scheduler::Stats,
}

/// How things went over time: columns of equal length, one value for each interval. Counts and bytes
/// are sums over the interval and over all workers, bytes while their link was taken for them; occupancy and requests by state are means of
/// samples within it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    /// How long an interval is.
    pub interval_s: f64,
    /// Requests that arrived.
    pub arrivals: Vec<u64>,
    /// Requests that got their first token.
    pub first_tokens: Vec<u64>,
    /// The mean time to first token of those.
    pub ttft_ms_mean: Vec<f64>,
    /// The longest of those.
    pub ttft_ms_max: Vec<f64>,
    /// Prompt tokens of those. Hits, and the ceiling, are of the same requests.
    pub prompt_tokens: Vec<u64>,
    /// Tokens found on device.
    pub device_hit_tokens: Vec<u64>,
    /// Tokens loaded from host.
    pub host_hit_tokens: Vec<u64>,
    /// Tokens fetched from L3.
    pub l3_hit_tokens: Vec<u64>,
    /// Tokens that a cache without limits could have had.
    pub ceiling_tokens: Vec<u64>,
    /// Tokens produced.
    pub output_tokens: Vec<u64>,
    /// The mean gap between tokens.
    pub itl_ms_mean: Vec<f64>,
    /// The share of time in which workers computed.
    pub busy: Vec<f64>,
    /// Bytes of load-backs.
    pub host_to_device_bytes: Vec<u64>,
    /// Bytes of write-backs.
    pub device_to_host_bytes: Vec<u64>,
    /// Bytes of prefetches.
    pub l3_to_host_bytes: Vec<u64>,
    /// Bytes of backups.
    pub host_to_l3_bytes: Vec<u64>,
    /// The share of time in which links carried load-backs.
    pub host_to_device_busy: Vec<f64>,
    /// The share of time in which links carried write-backs.
    pub device_to_host_busy: Vec<f64>,
    /// The share of time in which links carried prefetches.
    pub l3_to_host_busy: Vec<f64>,
    /// The share of time in which links carried backups.
    pub host_to_l3_busy: Vec<f64>,
    /// The share of device pages that hold something.
    pub device_used: Vec<f64>,
    /// The share of device pages that running requests and transfers hold.
    pub device_pinned: Vec<f64>,
    /// The share of host pages that hold something.
    pub host_used: Vec<f64>,
    /// The share of host pages that cannot be evicted.
    pub host_pinned: Vec<f64>,
    /// Pages in L3.
    pub l3_pages: Vec<f64>,
    /// Requests that wait, for L3, another request or room.
    pub waiting: Vec<f64>,
    /// Of those, requests whose pages are on their way from L3.
    pub prefetching: Vec<f64>,
    /// Requests that compute their prompt or wait for its load-back.
    pub prefilling: Vec<f64>,
    /// Requests that produce tokens.
    pub decoding: Vec<f64>,
    /// Requests that only wait for their write-back.
    pub draining: Vec<f64>,
}

/// What a request was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Asking L3, or waiting for another request or for room.
    Waiting,
    /// Its pages come from L3.
    Fetching,
    /// Its pages have come from L3, and it waits for room.
    Fetched,
    /// Its pages come from host, or the step before its first has not ended.
    Loading,
    /// It computes its prompt.
    Prefilling,
    /// It produces tokens.
    Decoding,
    /// It had to give up its memory, and waits.
    Retracted,
    /// It has its first token, and its pages go to the worker that decodes it.
    Moving,
}

/// One phase of a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Span {
    /// What it was doing.
    pub phase: Phase,
    /// Since when, counted from its arrival.
    pub from_ms: f64,
    /// Until when.
    pub to_ms: f64,
}

/// A request that took long, with its story.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlowRequest {
    /// Its place in the trace, in the order of arrival.
    pub request: u64,
    /// The worker that it was sent to.
    pub worker: u32,
    /// When it arrived.
    pub arrival_s: f64,
    /// Tokens of its prompt.
    pub input_tokens: u32,
    /// Tokens that it produced.
    pub output_tokens: u32,
    /// Prompt tokens found on device.
    pub device_hit_tokens: u32,
    /// Prompt tokens loaded from host.
    pub host_hit_tokens: u32,
    /// Prompt tokens fetched from L3.
    pub l3_hit_tokens: u32,
    /// Prompt tokens that a cache without limits could have had.
    pub ceiling_tokens: u32,
    /// From arrival to its first token.
    pub ttft_ms: f64,
    /// From arrival to its last token.
    pub e2e_ms: f64,
    /// Its phases, one after the other; of very many the first.
    pub spans: Vec<Span>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_make_a_distribution() {
        let spread = Distribution::of_ns((1..=1000).rev().map(|n| n * 1_000_000).collect());
        assert_eq!((spread.p50, spread.p90, spread.p99), (500.0, 900.0, 990.0));
        assert_eq!((spread.count, spread.mean, spread.max), (1000, 500.5, 1000.0));
        assert_eq!(Distribution::of_ns(vec![7]).p99, 7e-6);
        assert_eq!(Distribution::of_ns(Vec::new()), Distribution::default());
        let text = "mean 500 ms, p50 500 ms, p90 900 ms, p99 990 ms, max 1.00 s";
        assert_eq!(spread.to_string(), text);
    }
}
