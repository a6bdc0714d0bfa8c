//! Summaries of samples.

use std::time::Duration;

use serde::Serialize;

/// Distribution of samples, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Distribution {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum.
    pub max: f64,
}

impl Distribution {
    /// Summarises samples in nanoseconds.
    #[must_use]
    pub fn of(mut samples_ns: Vec<u64>) -> Self {
        samples_ns.sort_unstable();
        let Some(&max) = samples_ns.last() else { return Self::default() };
        let us = |ns: u64| ns as f64 / 1000.0;
        let at = |share: f64| us(samples_ns[((samples_ns.len() - 1) as f64 * share) as usize]);
        let sum: u64 = samples_ns.iter().sum();
        Self { mean: us(sum) / samples_ns.len() as f64, p50: at(0.5), p99: at(0.99), max: us(max) }
    }
}

/// Converts a duration to nanoseconds.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distribution_is_ordered() {
        let spread = Distribution::of((1..=1000).map(|n| n * 1000).collect());
        assert_eq!((spread.p50, spread.p99, spread.max), (500.0, 990.0, 1000.0));
        assert!((spread.mean - 500.5).abs() < 1e-9);
    }
}
