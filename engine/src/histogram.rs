//! Histograms of durations.

use serde::Serialize;

/// Upper bounds of the buckets, in microseconds. Longer times fall into the last bucket, which has
/// no bound.
const BOUNDS_US: [u64; 15] = [
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 10_000_000, 30_000_000, 60_000_000,
];

/// A histogram of durations. The owner alone changes it, and readers get a copy, so there is no
/// lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TimeHistogram {
    counts: [u64; BOUNDS_US.len() + 1],
    sum_us: u64,
}

impl TimeHistogram {
    /// Records a duration.
    pub fn observe(&mut self, us: u64) {
        self.counts[BOUNDS_US.partition_point(|bound| *bound < us)] += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }

    /// Iterates over upper bounds in seconds, with infinity last, and the number of durations in
    /// each bucket.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6);
        bounds.chain([f64::INFINITY]).zip(self.counts)
    }

    /// Returns the number of recorded durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of all recorded durations.
    #[must_use]
    pub fn sum_seconds(&self) -> f64 {
        self.sum_us as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_a_duration_in_one_bucket() {
        let mut histogram = TimeHistogram::default();
        for us in [0, 1_000, 1_001, 60_000_000, 60_000_001] {
            histogram.observe(us);
        }
        let filled: Vec<_> = histogram.buckets().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(0.001, 2), (0.0025, 1), (60.0, 1), (f64::INFINITY, 1)]);
        assert_eq!((histogram.count(), histogram.sum_seconds()), (5, 120.002_002));
    }
}
