//! Time series with a bounded number of intervals.

use std::ops::Range;

use crate::links::Carried;
use crate::report::Series;

/// Number of intervals above which neighbours are merged.
const BUCKETS_MAX: usize = 400;
/// Initial length of an interval.
const FIRST_INTERVAL_US: u64 = 1000;

/// Sums over one interval. Gauges are integrals over microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bucket {
    pub(crate) arrivals: u64,
    pub(crate) first_tokens: u64,
    pub(crate) ttft_us: u64,
    pub(crate) ttft_us_max: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) hit_tokens: [u64; 3],
    pub(crate) ceiling_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) gaps: u64,
    pub(crate) gap_us: u64,
    busy_ns: u64,
    link_bytes: [u64; 4],
    link_busy_ns: [u64; 4],
    gauged_us: u64,
    gauges: [u128; Gauge::COUNT],
}

/// A sampled quantity.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gauge {
    DeviceUsed,
    DevicePinned,
    HostUsed,
    HostPinned,
    L3,
    Waiting,
    Prefetching,
    Prefilling,
    Decoding,
    Draining,
}

impl Gauge {
    pub(crate) const COUNT: usize = 10;
}

/// The four links of a worker, as columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkColumn {
    HostToDevice,
    DeviceToHost,
    L3ToHost,
    HostToL3,
}

/// Intervals of equal length that cover the replay.
#[derive(Debug)]
pub(crate) struct Timeline {
    interval_us: u64,
    buckets: Vec<Bucket>,
    /// The interval used last, with its bounds: usually also the next one, which saves a division.
    latest: usize,
    latest_us: Range<u64>,
    gauged_until_us: u64,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        Self {
            interval_us: FIRST_INTERVAL_US,
            buckets: Vec::new(),
            latest: 0,
            latest_us: 0..0,
            gauged_until_us: 0,
        }
    }

    /// Returns the interval of a time.
    pub(crate) fn at(&mut self, time_us: u64) -> &mut Bucket {
        if !self.latest_us.contains(&time_us) {
            self.go_to(time_us);
        }
        &mut self.buckets[self.latest]
    }

    fn go_to(&mut self, time_us: u64) {
        let mut place = (time_us / self.interval_us) as usize;
        while place >= BUCKETS_MAX {
            self.merge_neighbours();
            place = (time_us / self.interval_us) as usize;
        }
        if place >= self.buckets.len() {
            self.buckets.resize(place + 1, Bucket::default());
        }
        let from_us = place as u64 * self.interval_us;
        (self.latest, self.latest_us) = (place, from_us..from_us + self.interval_us);
    }

    pub(crate) fn computed(&mut self, from_us: u64, to_us: u64) {
        self.spread(from_us * 1000, to_us * 1000, |bucket, ns, _| bucket.busy_ns += ns);
    }

    /// Adds bytes carried by a link. They are spread evenly over the time for which they occupy the
    /// link, so that no interval exceeds the bandwidth.
    pub(crate) fn carried(&mut self, link: LinkColumn, carried: Carried, bytes: u64) {
        let (from_ns, to_ns) = (carried.start_ns, carried.busy_until_ns);
        if from_ns == to_ns {
            self.at(from_ns / 1000).link_bytes[link as usize] += bytes;
            return;
        }
        let whole_ns = u128::from(to_ns - from_ns);
        let mut counted = 0;
        self.spread(from_ns, to_ns, |bucket, ns, until_ns| {
            // The cumulative bytes less those of earlier intervals, so that the sum is exact.
            let gone = u128::from(bytes) * u128::from(until_ns - from_ns) / whole_ns;
            let gone = gone as u64;
            bucket.link_busy_ns[link as usize] += ns;
            bucket.link_bytes[link as usize] += gone - std::mem::replace(&mut counted, gone);
        });
    }

    /// Returns whether the gauges are due for a sample.
    pub(crate) fn wants_gauges(&self, now_us: u64) -> bool {
        now_us >= self.gauged_until_us + self.interval_us / 4
    }

    /// Adds gauge values that held since the last sample.
    pub(crate) fn gauge(&mut self, now_us: u64, values: &[u64; Gauge::COUNT]) {
        let from_us = std::mem::replace(&mut self.gauged_until_us, now_us);
        self.spread(from_us * 1000, now_us * 1000, |bucket, ns, _| {
            let us = ns / 1000;
            bucket.gauged_us += us;
            for (sum, &value) in bucket.gauges.iter_mut().zip(values) {
                *sum += u128::from(value) * u128::from(us);
            }
        });
    }

    /// Divides a time range among its intervals; `add` gets the duration within each, and its end.
    fn spread(&mut self, from_ns: u64, to_ns: u64, mut add: impl FnMut(&mut Bucket, u64, u64)) {
        if from_ns >= to_ns {
            return;
        }
        // The last interval first: it may merge intervals.
        self.at((to_ns - 1) / 1000);
        let mut start = from_ns;
        while start < to_ns {
            self.at(start / 1000);
            let end = (self.latest_us.end * 1000).min(to_ns);
            add(&mut self.buckets[self.latest], end - start, end);
            start = end;
        }
    }

    fn merge_neighbours(&mut self) {
        self.interval_us *= 2;
        let merged: Vec<Bucket> = self
            .buckets
            .chunks(2)
            .map(|pair| pair.iter().skip(1).fold(pair[0], |sum, next| sum.plus(next)))
            .collect();
        self.buckets = merged;
    }

    /// Converts to columns, given the total tier sizes of all workers.
    pub(crate) fn into_series(self, workers: u32, device_pages: u64, host_pages: u64) -> Series {
        let interval_ns = (self.interval_us * 1000 * u64::from(workers)) as f64;
        let buckets = &self.buckets;
        let counts = |of: fn(&Bucket) -> u64| buckets.iter().map(of).collect::<Vec<u64>>();
        let means = |of: fn(&Bucket) -> (u64, u64)| {
            let mean = |bucket| {
                let (sum, count) = of(bucket);
                sum as f64 / count.max(1) as f64 / 1000.0
            };
            buckets.iter().map(mean).collect::<Vec<f64>>()
        };
        let shares = |of: &dyn Fn(&Bucket) -> u64| {
            buckets.iter().map(|bucket| of(bucket) as f64 / interval_ns).collect::<Vec<f64>>()
        };
        let gauges = |gauge: Gauge, whole: u64| {
            let mean = |bucket: &Bucket| {
                let sum = bucket.gauges[gauge as usize] as f64;
                sum / bucket.gauged_us.max(1) as f64 / whole.max(1) as f64
            };
            buckets.iter().map(mean).collect::<Vec<f64>>()
        };
        let bytes = |link: LinkColumn| {
            buckets.iter().map(|bucket| bucket.link_bytes[link as usize]).collect::<Vec<u64>>()
        };
        let busy = |link: LinkColumn| shares(&|bucket| bucket.link_busy_ns[link as usize]);
        Series {
            interval_s: self.interval_us as f64 / 1e6,
            arrivals: counts(|bucket| bucket.arrivals),
            first_tokens: counts(|bucket| bucket.first_tokens),
            ttft_ms_mean: means(|bucket| (bucket.ttft_us, bucket.first_tokens)),
            ttft_ms_max: means(|bucket| (bucket.ttft_us_max, 1)),
            prompt_tokens: counts(|bucket| bucket.prompt_tokens),
            device_hit_tokens: counts(|bucket| bucket.hit_tokens[0]),
            host_hit_tokens: counts(|bucket| bucket.hit_tokens[1]),
            l3_hit_tokens: counts(|bucket| bucket.hit_tokens[2]),
            ceiling_tokens: counts(|bucket| bucket.ceiling_tokens),
            output_tokens: counts(|bucket| bucket.output_tokens),
            itl_ms_mean: means(|bucket| (bucket.gap_us, bucket.gaps)),
            busy: shares(&|bucket| bucket.busy_ns),
            host_to_device_bytes: bytes(LinkColumn::HostToDevice),
            device_to_host_bytes: bytes(LinkColumn::DeviceToHost),
            l3_to_host_bytes: bytes(LinkColumn::L3ToHost),
            host_to_l3_bytes: bytes(LinkColumn::HostToL3),
            host_to_device_busy: busy(LinkColumn::HostToDevice),
            device_to_host_busy: busy(LinkColumn::DeviceToHost),
            l3_to_host_busy: busy(LinkColumn::L3ToHost),
            host_to_l3_busy: busy(LinkColumn::HostToL3),
            device_used: gauges(Gauge::DeviceUsed, device_pages),
            device_pinned: gauges(Gauge::DevicePinned, device_pages),
            host_used: gauges(Gauge::HostUsed, host_pages),
            host_pinned: gauges(Gauge::HostPinned, host_pages),
            l3_pages: gauges(Gauge::L3, 1),
            waiting: gauges(Gauge::Waiting, 1),
            prefetching: gauges(Gauge::Prefetching, 1),
            prefilling: gauges(Gauge::Prefilling, 1),
            decoding: gauges(Gauge::Decoding, 1),
            draining: gauges(Gauge::Draining, 1),
        }
    }
}

impl Bucket {
    fn plus(mut self, other: &Self) -> Self {
        self.arrivals += other.arrivals;
        self.first_tokens += other.first_tokens;
        self.ttft_us += other.ttft_us;
        self.ttft_us_max = self.ttft_us_max.max(other.ttft_us_max);
        self.prompt_tokens += other.prompt_tokens;
        self.ceiling_tokens += other.ceiling_tokens;
        self.output_tokens += other.output_tokens;
        self.gaps += other.gaps;
        self.gap_us += other.gap_us;
        self.busy_ns += other.busy_ns;
        self.gauged_us += other.gauged_us;
        add(&mut self.hit_tokens, &other.hit_tokens);
        add(&mut self.link_bytes, &other.link_bytes);
        add(&mut self.link_busy_ns, &other.link_busy_ns);
        add(&mut self.gauges, &other.gauges);
        self
    }
}

fn add<T: Copy + std::ops::AddAssign, const N: usize>(sums: &mut [T; N], others: &[T; N]) {
    sums.iter_mut().zip(others).for_each(|(sum, &other)| *sum += other);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_intervals_keeps_sums() {
        let mut timeline = Timeline::new();
        for event in 0..10_000 {
            timeline.at(event * 7_919).arrivals += 1;
        }
        timeline.computed(500, 70_000_000);
        let series = timeline.into_series(1, 1, 1);
        assert_eq!(series.arrivals.iter().sum::<u64>(), 10_000);
        assert!((BUCKETS_MAX / 2..=BUCKETS_MAX).contains(&series.arrivals.len()));
        let busy_s: f64 = series.busy.iter().map(|busy| busy * series.interval_s).sum();
        assert!((busy_s - 69.9995).abs() < 1e-6, "{busy_s}");
        assert!(series.busy.iter().all(|busy| *busy <= 1.0));
    }

    #[test]
    fn bytes_count_in_the_interval_of_their_transfer() {
        let mut timeline = Timeline::new();
        // From 0.5 ms to 3 ms at 1 GB/s.
        let carried = Carried { start_ns: 500_000, busy_until_ns: 3_000_000, end_ns: 9_000_000 };
        timeline.carried(LinkColumn::L3ToHost, carried, 2_500_001);
        let series = timeline.into_series(1, 1, 1);
        assert_eq!(series.l3_to_host_bytes, [500_000, 1_000_000, 1_000_001]);
        assert_eq!(series.l3_to_host_busy, [0.5, 1.0, 1.0]);
    }

    #[test]
    fn gauges_are_time_weighted_means() {
        let mut timeline = Timeline::new();
        timeline.gauge(250, &[100; Gauge::COUNT]);
        timeline.gauge(1_500, &[20; Gauge::COUNT]);
        let series = timeline.into_series(1, 200, 1);
        assert_eq!(series.waiting, [40.0, 20.0]);
        assert_eq!(series.device_used, [0.2, 0.1]);
    }
}
