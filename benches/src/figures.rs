//! Figures of many samples.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use terrace_replay::human;

/// How samples are spread, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Distribution {
    /// The sum over the count.
    pub mean: f64,
    /// Half are below.
    pub p50: f64,
    /// All but one in a hundred are below.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Distribution {
    /// Of samples in nanoseconds.
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

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mean, p50, p99, max } = self;
        let [mean, p50, p99, max] = [mean, p50, p99, max].map(|us| human::milliseconds(us / 1e3));
        write!(f, "mean {mean}, p50 {p50}, p99 {p99}, max {max}")
    }
}

/// Nanoseconds, as samples are kept.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The one in the middle; 0 of none.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_in_order() {
        let spread = Distribution::of((1..=1000).map(|n| n * 1000).collect());
        assert_eq!((spread.p50, spread.p99, spread.max), (500.0, 990.0, 1000.0));
        assert!((spread.mean - 500.5).abs() < 1e-9);
        assert_eq!(spread.to_string(), "mean 500 µs, p50 500 µs, p99 990 µs, max 1.00 ms");
        let long = Distribution::of(vec![3_126_541_800]);
        assert_eq!(long.to_string(), "mean 3.13 s, p50 3.13 s, p99 3.13 s, max 3.13 s");
    }
}
