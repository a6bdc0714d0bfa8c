//! What a store tells about itself.

use serde::Serialize;

use crate::mooncake::OutcomeCount;
use crate::node::NodesStats;

/// Counters since the start and gauges of the moment. What a backend or wrapper does not have is
/// `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// The memory backend, or the upper tier.
    pub memory: Option<TierStats>,
    /// The disk backend, or the lower tier.
    pub disk: Option<TierStats>,
    /// What this client has put into a cluster.
    pub remote: Option<TierStats>,
    /// How a Mooncake cluster answers.
    pub mooncake: Option<MooncakeStats>,
    /// Whether nodes answer, and what each has.
    pub nodes: Option<NodesStats>,
    /// Moves from disk to memory.
    pub promotion: Option<PromotionStats>,
    /// Deadlines, breaker, negative cache.
    pub guard: Option<GuardStats>,
    /// Freeing of consumed objects.
    pub release: Option<ReleaseStats>,
}

/// One place where objects are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierStats {
    /// Objects that can be had.
    pub objects: u64,
    /// Their payload.
    pub bytes: u64,
    /// Slots in use, including those that wait to be freed, times their payload size.
    pub resident_bytes: u64,
    /// What all slots could hold.
    pub capacity_bytes: u64,
    /// Memory that the index takes.
    pub index_bytes: u64,
    /// Arenas registered.
    pub arenas: u64,
    /// Objects with a hard pin.
    pub hard_pinned: u64,
    /// Objects with a soft pin.
    pub soft_pinned: u64,
    /// Objects stored.
    pub puts: u64,
    /// Puts of objects that were there already.
    pub puts_already_there: u64,
    /// Puts refused because nothing could be evicted.
    pub puts_full: u64,
    /// Payload stored.
    pub put_bytes: u64,
    /// Objects read.
    pub gets: u64,
    /// Gets of objects that were not there.
    pub gets_missing: u64,
    /// Payload read.
    pub get_bytes: u64,
    /// Objects asked about.
    pub exists: u64,
    /// Leases granted.
    pub leases: u64,
    /// Leases asked for and not granted, because too much was leased already.
    pub leases_refused: u64,
    /// Objects evicted.
    pub evicted: u64,
    /// Objects removed on demand.
    pub removed: u64,
    /// Objects replaced by a later generation.
    pub superseded: u64,
    /// Objects that did not verify, and were removed.
    pub corrupt: u64,
    /// Transfers that the medium failed.
    pub io_errors: u64,
    /// Bytes that had to be copied on the way because their buffer was not aligned for direct IO.
    pub bounced_bytes: u64,
    /// Rounds that made changes durable.
    pub commits: u64,
    /// Times that the disk had no room for more slots.
    pub disk_full: u64,
    /// 1 when changes cannot be made durable any more, and so none are taken.
    pub broken: u64,
}

/// How a Mooncake cluster answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MooncakeStats {
    /// Whether the cluster has been reached.
    pub is_connected: bool,
    /// Objects that nobody can have any more and that the cluster has not let go.
    pub leaving: u64,
    /// Calls that wait for a thread.
    pub waiting: u64,
    /// Pages of failed transfers that the library may still touch, and that nobody gets meanwhile.
    pub quarantined: u64,
    /// How often which call came to what.
    pub outcomes: Vec<OutcomeCount>,
}

/// How promotions from disk to memory went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromotionStats {
    /// Gets served from memory.
    pub gets_from_memory: u64,
    /// Of these, gets that waited for a promotion.
    pub gets_after_waiting: u64,
    /// Gets served from disk.
    pub gets_from_disk: u64,
    /// Batches whose wait for promotions ran out.
    pub waits_expired: u64,
    /// Promotions begun.
    pub triggered: u64,
    /// Requests for a promotion that was under way or had just ended.
    pub deduplicated: u64,
    /// Requests turned down during a cooldown.
    pub cooled_down: u64,
    /// Requests turned down because the queue was full.
    pub queue_full: u64,
    /// Promotions that ended with the object in memory.
    pub done: u64,
    /// Promotions that found the object in memory.
    pub already_resident: u64,
    /// Promotions that found the object gone from disk.
    pub vanished: u64,
    /// Promotions that found no memory.
    pub no_memory: u64,
    /// Promotions that failed otherwise.
    pub failed: u64,
    /// Promotions waiting or under way.
    pub active: u64,
    /// Ended promotions that are still remembered.
    pub remembered: u64,
}

/// What a breaker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BreakerState {
    /// All is well; calls go through.
    #[default]
    Closed,
    /// Calls are refused.
    Open,
    /// Single calls go through to see whether all is well again.
    HalfOpen,
}

/// What a guard has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GuardStats {
    /// The breaker.
    pub breaker: BreakerState,
    /// Times that the breaker opened.
    pub opened: u64,
    /// Calls refused by the breaker.
    pub refused: u64,
    /// Calls that ran into their deadline.
    pub timed_out: u64,
    /// Calls past their deadline that have not ended yet.
    pub overdue: u64,
    /// Objects not asked for because they had failed lately.
    pub negative_hits: u64,
    /// Objects remembered as failing.
    pub negative: u64,
}

/// How freeing of consumed objects goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReleaseStats {
    /// Objects released.
    pub released: u64,
    /// Objects whose removal failed and is being retried.
    pub parked: u64,
    /// The most that were ever parked at once.
    pub parked_most: u64,
    /// Retries.
    pub retries: u64,
    /// Objects removed by a retry.
    pub recovered: u64,
    /// Objects given up because too many were parked.
    pub abandoned: u64,
    /// Gets refused because the object was released.
    pub gets_refused: u64,
}
