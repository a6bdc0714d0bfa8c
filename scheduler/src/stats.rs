//! Counters and gauges, all kept up to date, so that reading them costs nothing.

use serde::{Deserialize, Serialize};
use terrace_cache::CacheUse;

/// How the scheduler is doing. Counters only grow; gauges say how it is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Requests taken.
    pub submitted: u64,
    /// Requests that came to their end.
    pub finished: u64,
    /// Requests called off.
    pub aborted: u64,
    /// Requests that could not go on.
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
    /// Of those, tokens whose KV was on device.
    pub device_hit_tokens: u64,
    /// Of those, tokens whose KV was loaded from host.
    pub host_hit_tokens: u64,
    /// Of those, tokens whose KV was fetched from L3 for this request.
    pub l3_hit_tokens: u64,
    /// Tokens of prompts, and of retracted requests again, that were computed.
    pub prefilled_tokens: u64,
    /// Tokens produced.
    pub generated_tokens: u64,
    /// Running requests that had to give up their device memory.
    pub retractions: u64,
    /// Times that a decode sat out a step for want of memory.
    pub stalls: u64,
    /// Requests that waited for another that computed or loaded their prefix.
    pub shared_waits: u64,

    /// Questions asked.
    pub probes: OperationStats,
    /// Transfers from L3 to host.
    pub prefetches: OperationStats,
    /// Transfers from host to device.
    pub load_backs: OperationStats,
    /// Transfers from device to host.
    pub write_backs: OperationStats,
    /// Transfers from host to L3.
    pub backups: OperationStats,
    /// Outcomes that came after their operation had ended, or twice.
    pub ignored_outcomes: u64,
    /// Step results that came twice.
    pub ignored_steps: u64,
    /// Pages that L3 had but that found no room on host.
    pub prefetch_shortened_pages: u64,
    /// Prefetches that were not begun because computing is faster.
    pub prefetches_priced_out: u64,
    /// Pages that L3 was not asked for because it failed to deliver them lately.
    pub negative_hits: u64,
    /// Pages that were to be copied to host and found no room, or gave way.
    pub write_backs_skipped_pages: u64,
    /// Gauge: backups that wait for their turn.
    pub backups_waiting: u32,
    /// Backups that gave way.
    pub backups_skipped: u64,

    /// Nodes of the tree that changes have looked at: the cache's cost in a unit that does not depend
    /// on the machine.
    pub node_visits: u64,
    /// Gauge: how full the tiers are.
    pub cache: CacheUse,
}

impl Stats {
    /// Transfers that have not ended, and backups that wait for their turn.
    #[must_use]
    pub fn transfers_under_way(&self) -> u32 {
        let kinds = [&self.prefetches, &self.load_backs, &self.write_backs, &self.backups];
        kinds.iter().map(|kind| kind.in_flight).sum::<u32>() + self.backups_waiting
    }
}

/// What of a prompt the cache held when the request was first admitted.
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
    /// Tokens that did not have to be computed.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.device_tokens + self.host_tokens + self.l3_tokens
    }
}

/// How the operations of one kind are doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStats {
    /// Operations begun.
    pub started: u64,
    /// Gauge: operations without a final outcome.
    pub in_flight: u32,
    /// Gauge: their pages.
    pub in_flight_pages: u32,
    /// Gauge: of those, pages of operations whose request has stopped waiting.
    pub quarantined_pages: u32,
    /// Pages that arrived sound; for probes, pages found.
    pub sound_pages: u64,
    /// Pages that did not, of operations that were not called off.
    pub unsound_pages: u64,
    /// Operations that the driver stopped because nobody waited for them any more.
    #[serde(default)]
    pub called_off: u64,
    /// Outcomes that said failed, corrupt or timed out.
    pub failures: u64,
}
