//! What users are promised, and how many of them get it.

use serde::{Deserialize, Serialize};

/// What users are promised. A request that keeps all of it is a good one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slo {
    /// The longest time to the first token.
    pub ttft_ms: Option<f64>,
    /// The longest time between tokens, on average over an answer.
    pub tpot_ms: Option<f64>,
    /// The share of requests that must be good for the promise to be kept.
    pub share: f64,
}

/// How many requests were good.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// Requests that were looked at: those that arrived after the warm-up.
    pub requests: u64,
    /// Of those, requests that were good. Whoever failed or was refused was not.
    pub good: u64,
    /// The same as a share.
    pub share: f64,
    /// Good requests in a second.
    pub requests_per_s: f64,
    /// The share whose first token came in time.
    pub ttft_share: f64,
    /// The share whose tokens came fast enough.
    pub tpot_share: f64,
    /// Whether enough of them were good.
    pub is_kept: bool,
}

impl Default for Slo {
    fn default() -> Self {
        Self { ttft_ms: None, tpot_ms: None, share: 0.9 }
    }
}

impl Slo {
    /// Whether anything is promised.
    #[must_use]
    pub fn promises(&self) -> bool {
        self.ttft_ms.is_some() || self.tpot_ms.is_some()
    }
}

impl Goodput {
    /// Of the same requests replayed on several days; none without a day.
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

/// The mean of at least one figure.
pub(crate) fn mean(figures: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = figures.len() as f64;
    figures.sum::<f64>() / count
}

/// Counts good requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Goods {
    pub(crate) requests: u64,
    good: u64,
    first_in_time: u64,
    fast_enough: u64,
}

impl Goods {
    /// A request has its answer; an answer of one token has no time between tokens.
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
    fn a_good_request_keeps_both_promises() {
        let slo = Slo { ttft_ms: Some(500.0), tpot_ms: Some(20.0), share: 0.5 };
        let mut goods = Goods { requests: 5, ..Goods::default() };
        goods.answered(&slo, 500_000, Some(20_000.0));
        goods.answered(&slo, 500_001, Some(1.0));
        goods.answered(&slo, 10, Some(20_001.0));
        goods.answered(&slo, 10, None);
        // The fifth never had an answer.
        let found = goods.goodput(&slo, 2.0).expect("something is promised");
        assert_eq!((found.good, found.share, found.requests_per_s), (2, 0.4, 1.0));
        assert_eq!((found.ttft_share, found.tpot_share, found.is_kept), (0.6, 0.6, false));
        assert_eq!(goods.goodput(&Slo::default(), 2.0), None);
    }
}
