//! How promotions go.

use serde::Serialize;
use terrace_l3::Figure;

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

impl PromotionStats {
    /// All of it, for whoever collects metrics.
    #[must_use]
    pub fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::counters(
                "terrace_l3_gets_total",
                "Objects read, by source: memory, memory after waiting for a promotion, or disk.",
                "source",
                [
                    ("memory", self.gets_from_memory - self.gets_after_waiting),
                    ("memory, awaited", self.gets_after_waiting),
                    ("disk", self.gets_from_disk),
                ],
            ),
            Figure::counter(
                "terrace_l3_waits_expired_total",
                "Reads whose wait for a promotion timed out.",
                self.waits_expired,
            ),
            Figure::counters(
                "terrace_l3_promotions_asked_total",
                "Requested promotions from disk to memory, by whether they started.",
                "outcome",
                [
                    ("begun", self.triggered),
                    ("under way or just done", self.deduplicated),
                    ("cooling down", self.cooled_down),
                    ("queue full", self.queue_full),
                ],
            ),
            Figure::counters(
                "terrace_l3_promotions_total",
                "Finished promotions from disk to memory, by outcome.",
                "outcome",
                [
                    ("done", self.done),
                    ("in memory already", self.already_resident),
                    ("gone from disk", self.vanished),
                    ("no memory", self.no_memory),
                    ("failed", self.failed),
                ],
            ),
            Figure::gauge(
                "terrace_l3_promotions_active",
                "Promotions from disk to memory that are queued or running.",
                self.active,
            ),
            Figure::gauge(
                "terrace_l3_promotions_remembered",
                "Finished promotions that are remembered so that they do not start again at once.",
                self.remembered,
            ),
        ]
    }
}
