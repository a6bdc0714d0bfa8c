//! Counters and gauges. All are kept up to date, so reading them costs nothing.

use serde::{Deserialize, Serialize};
use terrace_cache::CacheUse;

/// Counters and gauges of the scheduler. Counters only increase; gauges are current values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Accepted requests.
    pub submitted: u64,
    /// Requests that finished.
    pub finished: u64,
    /// Requests that were aborted.
    pub aborted: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Gauge: requests that wait, retracted ones included.
    pub waiting: u32,
    /// Gauge: requests with a slot.
    pub running: u32,
    /// Gauge: requests that only wait for their write-back.
    pub draining: u32,

    /// Steps planned, and repetitions of them.
    pub steps: u64,
    /// Steps that the engine reported as failed.
    pub steps_failed: u64,
    /// Prompt tokens of admitted requests, counted once, at first admission, like the hits.
    pub prompt_tokens: u64,
    /// Prompt tokens whose KV was on device.
    pub device_hit_tokens: u64,
    /// Prompt tokens whose KV was loaded from host.
    pub host_hit_tokens: u64,
    /// Prompt tokens whose KV was fetched from L3 for this request.
    pub l3_hit_tokens: u64,
    /// Tokens of prompts, and of retracted requests again, that were computed.
    pub prefilled_tokens: u64,
    /// Tokens produced.
    pub generated_tokens: u64,
    /// Running requests that had to give up their device memory.
    pub retractions: u64,
    /// Number of times that a decode sat out a step for lack of memory.
    pub stalls: u64,
    /// Requests that waited for another that computed or loaded their prefix.
    pub shared_waits: u64,

    /// Probes of L3.
    pub probes: OperationStats,
    /// Transfers from L3 to host.
    pub prefetches: OperationStats,
    /// Transfers from host to device.
    pub load_backs: OperationStats,
    /// Transfers from device to host.
    pub write_backs: OperationStats,
    /// Transfers from host to L3.
    pub backups: OperationStats,
    /// Late and repeated outcomes of operations.
    pub ignored_outcomes: u64,
    /// Repeated reports of steps.
    pub ignored_steps: u64,
    /// Pages in L3 that were not prefetched for lack of room on host.
    pub prefetch_shortened_pages: u64,
    /// Prefetches that were not started because computing is faster.
    pub prefetches_priced_out: u64,
    /// Pages that L3 was not probed for because it failed to deliver them recently.
    pub negative_hits: u64,
    /// Pages that were not copied to host for lack of room.
    pub write_backs_skipped_pages: u64,
    /// Gauge: queued backups.
    pub backups_waiting: u32,
    /// Backups that were dropped.
    pub backups_skipped: u64,

    /// Nodes of the tree that changes have visited: the cost of the cache in a unit that does not depend on the
    /// machine.
    pub node_visits: u64,
    /// Gauge: use of the tiers.
    pub cache: CacheUse,
}

impl Stats {
    /// Number of transfers in flight and of queued backups.
    #[must_use]
    pub fn transfers_under_way(&self) -> u32 {
        let kinds = [&self.prefetches, &self.load_backs, &self.write_backs, &self.backups];
        kinds.iter().map(|kind| kind.in_flight).sum::<u32>() + self.backups_waiting
    }
}

/// Cached part of a prompt at the first admission of its request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hits {
    /// Tokens whose KV was on device.
    pub device_tokens: u32,
    /// Tokens whose KV was loaded from host.
    pub host_tokens: u32,
    /// Tokens whose KV was fetched from L3 for this request.
    pub l3_tokens: u32,
}

impl Hits {
    /// Tokens that were not computed.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.device_tokens + self.host_tokens + self.l3_tokens
    }
}

/// Counters and gauges of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStats {
    /// Operations that were started.
    pub started: u64,
    /// Gauge: operations without a final outcome.
    pub in_flight: u32,
    /// Gauge: pages of those operations.
    pub in_flight_pages: u32,
    /// Gauge: pages of operations whose request has stopped waiting.
    pub quarantined_pages: u32,
    /// Pages that arrived sound; for probes, pages found.
    pub sound_pages: u64,
    /// Pages that did not arrive sound, of operations that were not called off.
    pub unsound_pages: u64,
    /// Operations that the driver stopped because no request waited for them.
    #[serde(default)]
    pub called_off: u64,
    /// Outcomes that said failed, corrupt or timed out.
    pub failures: u64,
}
