//! Measured speeds: the price of loading against the price of recomputing.

use std::time::Duration;

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::Time;

use crate::config::RateConfig;

/// Running mean that forgets an eighth of its samples with each further one. A sample of many items counts more than
/// one of few: a single page that waited behind a thousand says little.
#[derive(Clone, Copy, Debug)]
struct Mean {
    ns: u64,
    /// Number of items, in 1/1024.
    count: u64,
    /// True until the first measurement.
    is_assumed: bool,
}

impl Mean {
    fn new(ns_each: u64) -> Self {
        Self { ns: ns_each, count: 1024, is_assumed: true }
    }

    fn each(self) -> u64 {
        (u128::from(self.ns) * 1024 / u128::from(self.count.max(1))) as u64
    }

    fn observe(&mut self, ns: u64, count: u32) {
        if self.is_assumed {
            // The assumption counts as eight samples like the first.
            self.ns = self.ns.saturating_mul(8 * u64::from(count));
            self.count = 8 * 1024 * u64::from(count);
            self.is_assumed = false;
        }
        (self.ns, self.count) = (self.ns / 8 * 7, self.count / 8 * 7);
        self.extend_sample(ns, count);
    }

    /// Adds to the latest sample without forgetting.
    fn extend_sample(&mut self, ns: u64, count: u32) {
        self.ns = self.ns.saturating_add(ns);
        self.count = self.count.saturating_add(u64::from(count) * 1024);
    }

    fn drift_to(&mut self, assumed: u64) {
        let each = (self.each().saturating_mul(15).saturating_add(assumed)) / 16;
        self.ns =
            u64::try_from(u128::from(each) * u128::from(self.count) / 1024).unwrap_or(u64::MAX);
    }
}

/// Transfers of one kind, which share a link. Their price is the time in which the link is busy, without queueing.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// End of the latest transfer.
    busy_until: Time,
    /// First end among those of the latest sample. All that had started by then belong to it.
    sample_began: Time,
}

/// The part of a lane's busy time that one transfer accounts for.
#[derive(Clone, Copy, Debug)]
struct Slice {
    ns: u64,
    /// True if the lane was idle when the transfer started.
    was_idle: bool,
    /// True if the transfer starts a sample.
    begins_sample: bool,
}

impl Lane {
    fn transfer_ended(&mut self, started: Time, now: Time) -> Slice {
        let was_idle = started >= self.busy_until;
        let begins_sample = started >= self.sample_began;
        let began = match was_idle || planted(Bug::PriceQueueing) {
            true => started,
            false => self.busy_until,
        };
        self.busy_until = now;
        if begins_sample {
            self.sample_began = now;
        }
        Slice { ns: nanos(now.since(began)), was_idle, begins_sample }
    }
}

/// Measured speeds, starting from assumed ones.
#[derive(Clone, Debug)]
pub(crate) struct Rates {
    assumed: RateConfig,
    prefill_ns_per_token: Mean,
    /// Time per token as tokens count in a step.
    work_ns: Mean,
    load_back_ns_per_page: Mean,
    prefetch_ns_per_page: Mean,
    load_backs: Lane,
    prefetches: Lane,
    /// Time of a step with decodes alone.
    decode_step_ns: Mean,
}

impl Rates {
    pub(crate) fn new(assumed: &RateConfig) -> Self {
        Self {
            prefill_ns_per_token: Mean::new(assumed.prefill_ns_per_token),
            work_ns: Mean::new(assumed.prefill_ns_per_token),
            load_back_ns_per_page: Mean::new(assumed.load_back_ns_per_page),
            prefetch_ns_per_page: Mean::new(assumed.prefetch_ns_per_page),
            load_backs: Lane::default(),
            prefetches: Lane::default(),
            decode_step_ns: Mean::new(0),
            assumed: assumed.clone(),
        }
    }

    /// Notes a step with prompt tokens and their cost. The time that its decodes would have taken alone is not
    /// counted.
    pub(crate) fn observe_prefill(
        &mut self,
        tokens: u32,
        work: u32,
        took: Duration,
        beside_decodes: bool,
    ) {
        let decodes = if beside_decodes { self.decode_step_ns.each() } else { 0 };
        let took = nanos(took).saturating_sub(decodes);
        observe(&mut self.prefill_ns_per_token, took, tokens);
        observe(&mut self.work_ns, took, work);
    }

    /// Cost of prompt tokens that is computed in a time.
    pub(crate) fn work_within(&self, ns: u64) -> u32 {
        u32::try_from(ns / self.work_ns.each().max(1)).unwrap_or(u32::MAX)
    }

    /// Notes a step with decodes alone, and its repetitions.
    pub(crate) fn observe_decodes(&mut self, took: Duration, repeated: u64) {
        let steps = u32::try_from(repeated + 1).unwrap_or(u32::MAX);
        observe(&mut self.decode_step_ns, nanos(took), steps);
    }

    /// Notes the end of a load-back. `pages` is the number of pages that arrived, if that measures the link.
    pub(crate) fn load_back_ended(&mut self, started: Time, now: Time, pages: Option<u32>) {
        let slice = self.load_backs.transfer_ended(started, now);
        observe_slice(&mut self.load_back_ns_per_page, slice, slice.ns, pages);
    }

    /// Notes the end of a prefetch. `pages` is the number of pages that arrived, if that measures L3.
    pub(crate) fn prefetch_ended(&mut self, started: Time, now: Time, pages: Option<u32>) {
        let slice = self.prefetches.transfer_ended(started, now);
        let latency = if slice.was_idle { self.assumed.prefetch_latency_us * 1000 } else { 0 };
        let ns = slice.ns.saturating_sub(latency);
        observe_slice(&mut self.prefetch_ns_per_page, slice, ns, pages);
    }

    /// Moves the estimate towards the assumption after a prefetch that did not pay. Otherwise one slow hour would
    /// turn prefetching off for good, because only prefetches measure it.
    pub(crate) fn decay_prefetch_estimate(&mut self) {
        if planted(Bug::PriceOutForGood) {
            return;
        }
        self.prefetch_ns_per_page.drift_to(self.assumed.prefetch_ns_per_page);
    }

    /// Moves the estimate towards the assumption after a load-back that did not pay; see
    /// [`Rates::decay_prefetch_estimate`].
    pub(crate) fn decay_load_back_estimate(&mut self) {
        self.load_back_ns_per_page.drift_to(self.assumed.load_back_ns_per_page);
    }

    /// Number of pages that are loaded during a step of decodes.
    pub(crate) fn pages_loaded_within_step(&self) -> u32 {
        let pages = self.decode_step_ns.each() / self.load_back_ns_per_page.each().max(1);
        u32::try_from(pages).unwrap_or(u32::MAX)
    }

    pub(crate) fn load_back_pays(&self, pages: u32, tokens: u32) -> bool {
        self.load_back_ns(pages) < self.prefill_ns(tokens)
    }

    pub(crate) fn prefetch_pays(&self, pages: u32, tokens: u32) -> bool {
        let load = self.prefetch_ns(pages).saturating_add(self.load_back_ns(pages));
        load < self.prefill_ns(tokens)
    }

    /// Expected time of a prefetch.
    pub(crate) fn prefetch_time(&self, pages: u32) -> Duration {
        Duration::from_nanos(self.prefetch_ns(pages))
    }

    fn prefetch_ns(&self, pages: u32) -> u64 {
        let fetch = u64::from(pages).saturating_mul(self.prefetch_ns_per_page.each());
        fetch.saturating_add(self.assumed.prefetch_latency_us * 1000)
    }

    fn load_back_ns(&self, pages: u32) -> u64 {
        u64::from(pages).saturating_mul(self.load_back_ns_per_page.each())
    }

    fn prefill_ns(&self, tokens: u32) -> u64 {
        u64::from(tokens).saturating_mul(self.prefill_ns_per_token.each())
    }
}

fn observe(mean: &mut Mean, ns: u64, count: u32) {
    if count > 0 {
        mean.observe(ns, count);
    }
}

fn observe_slice(mean: &mut Mean, slice: Slice, ns: u64, pages: Option<u32>) {
    match pages {
        None | Some(0) => {}
        Some(pages) if slice.begins_sample || mean.is_assumed => mean.observe(ns, pages),
        Some(pages) => mean.extend_sample(ns, pages),
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_store_is_priced_out_and_comes_back_in_time() {
        let mut rates = Rates::new(&RateConfig {
            prefill_ns_per_token: 1_000,
            load_back_ns_per_page: 100,
            prefetch_ns_per_page: 1_000,
            prefetch_latency_us: 1,
        });
        assert!(rates.prefetch_pays(10, 160));
        for nth in 0..8 {
            rates.prefetch_ended(Time(nth * 10_000), Time(nth * 10_000 + 10_000), Some(10));
        }
        assert!(!rates.prefetch_pays(10, 160));
        let declined = (0..1000)
            .take_while(|_| {
                rates.decay_prefetch_estimate();
                !rates.prefetch_pays(10, 160)
            })
            .count();
        assert!((1..100).contains(&declined), "{declined}");
    }

    #[test]
    fn one_page_that_queued_does_not_price_out_the_others() {
        let mut rates = Rates::new(&RateConfig {
            prefill_ns_per_token: 10_000,
            load_back_ns_per_page: 10_000,
            prefetch_ns_per_page: 20_000,
            prefetch_latency_us: 400,
        });
        rates.prefetch_ended(Time(0), Time(20_000), Some(1_000));
        rates.load_back_ended(Time(0), Time(10_000), Some(1_000));
        rates.prefetch_ended(Time(20_000), Time(40_000), Some(1));
        rates.load_back_ended(Time(10_000), Time(20_000), Some(1));
        assert!(rates.prefetch_pays(1_000, 16_000));
        assert!(rates.load_back_pays(1_000, 16_000));
    }

    #[test]
    fn transfers_that_queue_are_priced_by_the_time_in_which_the_link_is_busy() {
        let assumed = RateConfig { load_back_ns_per_page: 1_000_000, ..RateConfig::default() };
        let mut rates = Rates::new(&assumed);
        // 64 start together, and every millisecond one of ten pages ends.
        for nth in 1..=64 {
            rates.load_back_ended(Time(0), Time(nth * 1_000), Some(10));
        }
        let each = rates.load_back_ns(1);
        assert!((90_000..250_000).contains(&each), "{each} ns a page, of which 100,000 are true");
        // They start one after the other, and end at one moment: the link was busy once.
        for nth in 0..64 {
            rates.load_back_ended(Time(100_000 + nth), Time(164_000), Some(10));
        }
        let each = rates.load_back_ns(1);
        assert!((90_000..150_000).contains(&each), "{each} ns a page, of which 100,000 are true");
    }

    #[test]
    fn prefills_beside_decodes_are_measured_without_the_decodes() {
        let mut rates = Rates::new(&RateConfig {
            prefill_ns_per_token: 50_000,
            load_back_ns_per_page: 20_000,
            ..RateConfig::default()
        });
        for _ in 0..50 {
            rates.observe_decodes(Duration::from_millis(40), 3);
            rates.observe_prefill(1000, 1000, Duration::from_millis(11), true);
        }
        assert!(rates.load_back_pays(1, 25), "25 tokens take 25 us");
        assert!(!rates.load_back_pays(1, 15), "15 tokens take 15 us");
    }

    #[test]
    fn measured_speed_replaces_the_assumed_one() {
        let mut rates = Rates::new(&RateConfig::default());
        assert!(rates.load_back_pays(1, 16));
        for _ in 0..50 {
            rates.observe_prefill(1000, 1000, Duration::from_micros(10), false);
        }
        assert!(!rates.load_back_pays(1, 16), "computing 16 tokens takes 160 ns");
    }
}
