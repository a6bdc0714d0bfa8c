//! Statistics of a feature store.

use serde::Serialize;

/// Counters since the start and current gauges, of this process only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FeatureStats {
    /// Samples of this producer that can be read.
    pub live: u64,
    /// Active puts.
    pub putting: u64,
    /// Puts that wait for room.
    pub waiting: u64,
    /// Generations whose freeing failed and is being retried.
    pub parked: u64,
    /// Maximum of `parked`.
    pub parked_most: u64,
    /// Bytes of the store that this producer's samples take, stored or reserved: whole slots, with
    /// their notes.
    pub resident_bytes: u64,
    /// Maximum of `resident_bytes`.
    pub resident_most_bytes: u64,
    /// Samples put.
    pub puts: u64,
    /// Their bytes.
    pub put_bytes: u64,
    /// Puts that failed.
    pub puts_failed: u64,
    /// Puts refused or cancelled because the budget was used up or the store was full.
    pub puts_over_budget: u64,
    /// Samples read.
    pub gets: u64,
    /// Their bytes.
    pub get_bytes: u64,
    /// Gets of samples that were gone.
    pub gets_gone: u64,
    /// Gets that failed because a tensor was short or damaged.
    pub gets_damaged: u64,
    /// Refs, tensors and notes that were refused as forged or altered.
    pub forged: u64,
    /// Samples released here.
    pub released: u64,
    /// Releases that kept the sample for further epochs.
    pub retained: u64,
    /// Samples aborted here.
    pub aborted: u64,
    /// Generations replaced by later puts.
    pub superseded: u64,
    /// Samples of this producer that others have consumed or aborted.
    pub consumed_elsewhere: u64,
    /// Samples that were not released in time.
    pub expired: u64,
    /// Samples found again after a restart.
    pub restored: u64,
    /// Generations whose bytes this process has freed.
    pub freed: u64,
    /// Generations among them that were freed by a retry.
    pub recovered: u64,
    /// Retries of failed frees.
    pub retries: u64,
    /// Other producers' generations that were dropped because too many were parked; their producers
    /// free them eventually.
    pub abandoned: u64,
    /// The oldest sample of this producer.
    pub oldest: Option<OldestSample>,
}

/// A sample that waits to be consumed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OldestSample {
    /// Its key.
    pub key: String,
    /// Its age.
    pub age_ms: u64,
}
