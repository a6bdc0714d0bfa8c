//! A histogram whose buckets grow with the value: bounded memory and a fixed relative precision.

use crate::report::{CurvePoint, Distribution};

/// Bits of sub-buckets for each power of two: neighbours differ by at most 0.4 %.
const SUB_BITS: u32 = 8;
const SUB: u64 = 1 << SUB_BITS;
/// Largest number of points of a curve.
const CURVE_POINTS_MAX: usize = 200;

/// Counts of values in microseconds. Exact up to 256.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum: u128,
    max: u64,
}

impl Histogram {
    pub(crate) fn record(&mut self, value_us: u64, times: u64) {
        if times == 0 {
            return;
        }
        let bucket = bucket_of(value_us);
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += times;
        self.count += times;
        self.sum += u128::from(value_us) * u128::from(times);
        self.max = self.max.max(value_us);
    }

    pub(crate) fn distribution_ms(&self) -> Distribution {
        if self.count == 0 {
            return Distribution::default();
        }
        Distribution {
            count: self.count,
            mean: self.sum as f64 / self.count as f64 / 1000.0,
            p50: self.quantile_ms(50),
            p90: self.quantile_ms(90),
            p99: self.quantile_ms(99),
            max: self.max as f64 / 1000.0,
        }
    }

    /// Returns the cumulative distribution at the non-empty buckets, thinned out if there are many.
    pub(crate) fn curve_ms(&self) -> Vec<CurvePoint> {
        let filled = self.counts.iter().filter(|count| **count > 0).count();
        let mut points = Vec::new();
        let (mut below, mut seen) = (0, 0);
        for (bucket, &count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            below += count;
            seen += 1;
            // A point is kept if it starts a new part of the curve; the last point always is.
            let part = |nth: usize| nth * (CURVE_POINTS_MAX - 1) / filled;
            if seen == 1 || seen == filled || part(seen) > part(seen - 1) {
                let share = below as f64 / self.count as f64;
                points.push(CurvePoint { ms: self.top_us(bucket) as f64 / 1000.0, share });
            }
        }
        points
    }

    fn quantile_ms(&self, percent: u64) -> f64 {
        let wanted = (u128::from(self.count) * u128::from(percent)).div_ceil(100) as u64;
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= wanted {
                return self.top_us(bucket) as f64 / 1000.0;
            }
        }
        self.max as f64 / 1000.0
    }

    /// Returns the upper bound of the bucket, or the largest recorded value.
    fn top_us(&self, bucket: usize) -> u64 {
        (first_of(bucket + 1) - 1).min(self.max)
    }
}

fn bucket_of(value: u64) -> usize {
    if value < SUB {
        return value as usize;
    }
    let power = value.ilog2() - SUB_BITS;
    ((u64::from(power) + 1) * SUB + (value >> power) - SUB) as usize
}

fn first_of(bucket: usize) -> u64 {
    let (power, sub) = (bucket as u64 / SUB, bucket as u64 % SUB);
    match power {
        0 => sub,
        _ => (SUB + sub) << (power - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_in_their_buckets() {
        for value in (0..100_000).chain([1 << 40, (1 << 40) - 1, u64::MAX >> 3]) {
            let bucket = bucket_of(value);
            assert!(first_of(bucket) <= value && value < first_of(bucket + 1), "{value}");
        }
    }

    #[test]
    fn percentiles_are_exact_to_four_in_a_thousand() {
        let mut histogram = Histogram::default();
        for value in 1..=100_000 {
            histogram.record(value * 10, 1);
        }
        let found = histogram.distribution_ms();
        for (found, exact) in
            [(found.p50, 500.0), (found.p90, 900.0), (found.p99, 990.0), (found.max, 1000.0)]
        {
            assert!((found / exact - 1.0).abs() < 0.004, "{found} for {exact}");
        }
        assert!((found.mean - 500.005).abs() < 1e-6);
        let curve = histogram.curve_ms();
        assert!(curve.len() <= CURVE_POINTS_MAX, "{}", curve.len());
        assert!(curve.is_sorted_by(|a, b| a.ms < b.ms && a.share < b.share));
        assert_eq!(curve.last().map(|point| (point.ms, point.share)), Some((1000.0, 1.0)));
    }

    #[test]
    fn counts_repeated_values() {
        let mut histogram = Histogram::default();
        histogram.record(100, 99);
        histogram.record(5000, 1);
        let found = histogram.distribution_ms();
        assert_eq!((found.count, found.p99, found.max), (100, 0.1, 5.0));
    }
}
