//! Service-level objectives, and the share of requests that meet them.

use serde::{Deserialize, Serialize};

/// A service-level objective. A request that meets all limits is good.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slo {
    /// Limit of the time to the first token.
    pub ttft_ms: Option<f64>,
    /// Limit of the mean time between tokens of an answer.
    pub tpot_ms: Option<f64>,
    /// Share of requests that must be good.
    pub share: f64,
}

/// Number of good requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// Measured requests: those that arrived after the warm-up.
    pub requests: u64,
    /// Good requests. Failed and refused requests are not good.
    pub good: u64,
    /// Share of good requests.
    pub share: f64,
    /// Good requests per second.
    pub requests_per_s: f64,
    /// Share of requests within the limit of the first token.
    pub ttft_share: f64,
    /// Share of requests within the limit of the time between tokens.
    pub tpot_share: f64,
    /// True if the objective is met.
    pub is_kept: bool,
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttft_ms: None, tpot_ms: None, share: 0.9 }
    }
}

impl Slo {
    /// Returns whether there is a limit.
    #[must_use]
    pub fn promises(&self) -> bool {
        self.ttft_ms.is_some() || self.tpot_ms.is_some()
    }
}

impl Goodput {
    /// Combines the goodput of several days; none without a day.
    pub(crate) fn of_days(days: &[Self], slo: &Slo) -> Option<Self> {
        if days.is_empty() {
            return None;
        }
        let requests: u64 = days.iter().map(|day| day.requests).sum();
        let good = days.iter().map(|day| day.good).sum();
        let share = good as f64 / requests.max(1) as f64;
        Some(Self {
            requests,
            good,
            share,
            requests_per_s: mean(days.iter().map(|day| day.requests_per_s)),
            ttft_share: mean(days.iter().map(|day| day.ttft_share)),
            tpot_share: mean(days.iter().map(|day| day.tpot_share)),
            is_kept: share >= slo.share,
        })
    }
}

/// Returns the mean of at least one figure.
pub(crate) fn mean(figures: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = figures.len() as f64;
    figures.sum::<f64>() / count
}

/// Counts good requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GoodputCounter {
    pub(crate) requests: u64,
    good: u64,
    first_in_time: u64,
    fast_enough: u64,
}

impl GoodputCounter {
    /// Records an answer; an answer of one token has no time between tokens.
    pub(crate) fn answered(&mut self, slo: &Slo, ttft_us: u64, tpot_us: Option<f64>) {
        let within = |limit_ms: Option<f64>, us: f64| limit_ms.is_none_or(|ms| us <= ms * 1000.0);
        let in_time = within(slo.ttft_ms, ttft_us as f64);
        let is_fast = tpot_us.is_none_or(|us| within(slo.tpot_ms, us));
        self.good += u64::from(in_time && is_fast);
        self.first_in_time += u64::from(in_time);
        self.fast_enough += u64::from(is_fast);
    }

    pub(crate) fn goodput(&self, slo: &Slo, seconds: f64) -> Option<Goodput> {
        let share = |count: u64| count as f64 / self.requests.max(1) as f64;
        slo.promises().then(|| Goodput {
            requests: self.requests,
            good: self.good,
            share: share(self.good),
            requests_per_s: self.good as f64 / seconds,
            ttft_share: share(self.first_in_time),
            tpot_share: share(self.fast_enough),
            is_kept: share(self.good) >= slo.share,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_request_meets_both_limits() {
        let slo = Slo { ttft_ms: Some(500.0), tpot_ms: Some(20.0), share: 0.5 };
        let mut goods = GoodputCounter { requests: 5, ..GoodputCounter::default() };
        goods.answered(&slo, 500_000, Some(20_000.0));
        goods.answered(&slo, 500_001, Some(1.0));
        goods.answered(&slo, 10, Some(20_001.0));
        goods.answered(&slo, 10, None);
        // The fifth request was not answered.
        let found = goods.goodput(&slo, 2.0).expect("something is promised");
        assert_eq!((found.good, found.share, found.requests_per_s), (2, 0.4, 1.0));
        assert_eq!((found.ttft_share, found.tpot_share, found.is_kept), (0.6, 0.6, false));
        assert_eq!(goods.goodput(&Slo::default(), 2.0), None);
    }
}
