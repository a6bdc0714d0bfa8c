//! Statistics of promotions.

use serde::Serialize;
use terrace_l3::Figure;

/// Statistics of promotions from disk to memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromotionStats {
    /// Gets served from memory.
    pub gets_from_memory: u64,
    /// Gets among them that waited for a promotion.
    pub gets_after_waiting: u64,
    /// Gets served from disk.
    pub gets_from_disk: u64,
    /// Batches whose wait for promotions timed out.
    pub waits_expired: u64,
    /// Promotions started.
    pub triggered: u64,
    /// Requests for a promotion that was active or finished recently.
    pub deduplicated: u64,
    /// Requests refused during a cooldown.
    pub cooled_down: u64,
    /// Requests refused because the queue was full.
    pub queue_full: u64,
    /// Promotions that moved the object to memory.
    pub done: u64,
    /// Promotions that found the object in memory.
    pub already_resident: u64,
    /// Promotions that did not find the object on disk.
    pub vanished: u64,
    /// Promotions that found no memory.
    pub no_memory: u64,
    /// Promotions that failed for another reason.
    pub failed: u64,
    /// Promotions queued or running.
    pub active: u64,
    /// Finished promotions that are remembered.
    pub remembered: u64,
}

impl PromotionStats {
    /// Metrics of all counters.
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
