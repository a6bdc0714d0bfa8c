//! What a feature store tells about itself.

use serde::Serialize;

/// Counters since the start and gauges of the moment, of this process alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FeatureStats {
    /// Samples of this producer that can be read.
    pub live: u64,
    /// Puts under way.
    pub putting: u64,
    /// Puts that wait for room.
    pub waiting: u64,
    /// Generations whose freeing failed and is being repeated.
    pub parked: u64,
    /// The most that ever were.
    pub parked_most: u64,
    /// What this producer's samples that are there, or are about to be, take of the store: whole slots, with their notes.
    pub resident_bytes: u64,
    /// The most that ever were.
    pub resident_most_bytes: u64,
    /// Samples put.
    pub puts: u64,
    /// Their bytes.
    pub put_bytes: u64,
    /// Puts that failed.
    pub puts_failed: u64,
    /// Puts refused, or given up, because the budget was used up or the store was full.
    pub puts_over_budget: u64,
    /// Samples read.
    pub gets: u64,
    /// Their bytes.
    pub get_bytes: u64,
    /// Gets of what was gone.
    pub gets_gone: u64,
    /// Gets that failed because a tensor was short or damaged.
    pub gets_damaged: u64,
    /// Refs, tensors and notes that were refused as forged or altered.
    pub forged: u64,
    /// Samples released here.
    pub released: u64,
    /// Releases that left the sample, for further epochs.
    pub retained: u64,
    /// Samples aborted here.
    pub aborted: u64,
    /// Generations that later puts have replaced.
    pub superseded: u64,
    /// Samples of this producer that others have consumed or aborted.
    pub consumed_elsewhere: u64,
    /// Samples that nobody released in time.
    pub expired: u64,
    /// Samples found again after a restart.
    pub restored: u64,
    /// Generations whose bytes this process has freed.
    pub freed: u64,
    /// Of these, after a failure.
    pub recovered: u64,
    /// Tries to free what had failed before.
    pub retries: u64,
    /// Other producers' generations that were given up because too many were parked; they free them in
    /// the end.
    pub abandoned: u64,
    /// The sample of this producer that is there longest, and for how long.
    pub oldest: Option<OldestSample>,
}

/// A sample that waits to be consumed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OldestSample {
    /// Its key.
    pub key: String,
    /// For how long.
    pub age_ms: u64,
}
