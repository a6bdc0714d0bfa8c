//! How long things took lately, for people who look on: the latest times themselves, so that percentiles are
//! exact and forget what is long ago. Histograms are for those who ask again and again and can subtract.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;

/// So many times are looked back at: enough for a 99th percentile, and sorted in no time.
const TIMES_MAX: usize = 1024;

/// The latest times of one kind.
#[derive(Debug, Default)]
pub(super) struct RecentTimes(Mutex<VecDeque<Duration>>);

/// Where the latest times lie.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    /// How many they are.
    pub(crate) count: usize,
    /// Half took no longer.
    pub(crate) p50_ms: f64,
    /// 99 of 100 took no longer.
    pub(crate) p99_ms: f64,
}

impl RecentTimes {
    pub(super) fn observe(&self, time: Duration) {
        let mut times = self.0.lock();
        if times.len() == TIMES_MAX {
            times.pop_front();
        }
        times.push_back(time);
    }

    /// None before there is any.
    pub(super) fn percentiles(&self) -> Option<Percentiles> {
        let mut times: Vec<Duration> = self.0.lock().iter().copied().collect();
        times.sort_unstable();
        let at = |percent: usize| {
            let place = (times.len() * percent).div_ceil(100).checked_sub(1)?;
            Some(times[place].as_secs_f64() * 1e3)
        };
        Some(Percentiles { count: times.len(), p50_ms: at(50)?, p99_ms: at(99)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_latest_times() {
        let recent = RecentTimes::default();
        assert_eq!(recent.percentiles(), None);
        recent.observe(Duration::from_millis(7));
        let one = Percentiles { count: 1, p50_ms: 7.0, p99_ms: 7.0 };
        assert_eq!(recent.percentiles(), Some(one));
        (1..=100).rev().for_each(|ms| recent.observe(Duration::from_millis(ms)));
        let both = recent.percentiles().unwrap();
        assert_eq!((both.count, both.p50_ms, both.p99_ms), (101, 50.0, 99.0));
        (0..TIMES_MAX).for_each(|_| recent.observe(Duration::from_millis(3)));
        let latest = Percentiles { count: TIMES_MAX, p50_ms: 3.0, p99_ms: 3.0 };
        assert_eq!(recent.percentiles(), Some(latest));
    }
}
