//! Resampling of series: more intervals than a plot has room for would be noise.

use crate::report::Series;

/// Largest number of intervals in a plot.
const INTERVALS_MAX: usize = 96;

/// Returns the series with fewer intervals: sums of counts, means of other values. Intervals after
/// the end are dropped.
pub(super) fn coarse(series: &Series, end_s: f64) -> Series {
    let length = (end_s / series.interval_s.max(1e-9)).ceil() as usize;
    let length = length.clamp(1, series.arrivals.len().max(1));
    let size = length.div_ceil(INTERVALS_MAX);
    let sums = |values: &[u64]| -> Vec<u64> {
        cut(values, length).chunks(size).map(|part| part.iter().sum()).collect()
    };
    let means = |values: &[f64]| -> Vec<f64> {
        cut(values, length)
            .chunks(size)
            .map(|part| part.iter().sum::<f64>() / part.len() as f64)
            .collect()
    };
    let weighted = |values: &[f64], weights: &[u64]| -> Vec<f64> {
        let parts = cut(values, length).chunks(size).zip(cut(weights, length).chunks(size));
        parts
            .map(|(values, weights)| {
                let weight: u64 = weights.iter().sum();
                let pairs = values.iter().zip(weights);
                pairs.map(|(value, &weight)| value * weight as f64).sum::<f64>()
                    / weight.max(1) as f64
            })
            .collect()
    };
    let maxima = |values: &[f64]| -> Vec<f64> {
        cut(values, length)
            .chunks(size)
            .map(|part| part.iter().copied().fold(0.0, f64::max))
            .collect()
    };
    Series {
        interval_s: series.interval_s * size as f64,
        arrivals: sums(&series.arrivals),
        first_tokens: sums(&series.first_tokens),
        ttft_ms_mean: weighted(&series.ttft_ms_mean, &series.first_tokens),
        ttft_ms_max: maxima(&series.ttft_ms_max),
        prompt_tokens: sums(&series.prompt_tokens),
        device_hit_tokens: sums(&series.device_hit_tokens),
        host_hit_tokens: sums(&series.host_hit_tokens),
        l3_hit_tokens: sums(&series.l3_hit_tokens),
        ceiling_tokens: sums(&series.ceiling_tokens),
        output_tokens: sums(&series.output_tokens),
        itl_ms_mean: weighted(&series.itl_ms_mean, &series.output_tokens),
        busy: means(&series.busy),
        host_to_device_bytes: sums(&series.host_to_device_bytes),
        device_to_host_bytes: sums(&series.device_to_host_bytes),
        l3_to_host_bytes: sums(&series.l3_to_host_bytes),
        host_to_l3_bytes: sums(&series.host_to_l3_bytes),
        host_to_device_busy: means(&series.host_to_device_busy),
        device_to_host_busy: means(&series.device_to_host_busy),
        l3_to_host_busy: means(&series.l3_to_host_busy),
        host_to_l3_busy: means(&series.host_to_l3_busy),
        device_used: means(&series.device_used),
        device_pinned: means(&series.device_pinned),
        host_used: means(&series.host_used),
        host_pinned: means(&series.host_pinned),
        l3_pages: means(&series.l3_pages),
        waiting: means(&series.waiting),
        prefetching: means(&series.prefetching),
        prefilling: means(&series.prefilling),
        decoding: means(&series.decoding),
        draining: means(&series.draining),
    }
}

fn cut<T>(values: &[T], length: usize) -> &[T] {
    &values[..values.len().min(length)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resampling_adds_counts_and_weights_means() {
        let length = INTERVALS_MAX * 2;
        let series = Series {
            interval_s: 1.0,
            arrivals: vec![3; length],
            first_tokens: [1, 3].repeat(INTERVALS_MAX),
            ttft_ms_mean: [100.0, 200.0].repeat(INTERVALS_MAX),
            ttft_ms_max: [100.0, 900.0].repeat(INTERVALS_MAX),
            busy: [0.0, 1.0].repeat(INTERVALS_MAX),
            ..Series::default()
        };
        let coarse = coarse(&series, 1e9);
        assert_eq!((coarse.interval_s, coarse.arrivals.len()), (2.0, INTERVALS_MAX));
        assert_eq!((coarse.arrivals[0], coarse.ttft_ms_mean[0]), (6, 175.0));
        assert_eq!((coarse.ttft_ms_max[0], coarse.busy[0]), (900.0, 0.5));
        let short = Series { arrivals: vec![1; 5], interval_s: 1.0, ..Series::default() };
        assert_eq!(super::coarse(&short, 5.0), short);
        assert_eq!(super::coarse(&short, 2.5).arrivals.len(), 3);
    }
}
