//! Cost of prompt tokens in a step, and the rate of arrivals.

use std::time::Duration;

use terrace_fsm::Time;

use crate::config::BatchConfig;

/// Minimum number of observed gaps between arrivals.
const GAPS_MIN: u32 = 16;

/// Mean gap between arrivals.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    seen: u32,
    last: Time,
    /// Mean of the gaps; each further one counts for a sixteenth.
    gap_ns: u64,
}

impl Arrivals {
    pub(crate) fn observe(&mut self, now: Time) {
        let gap_ns = nanos(now.since(self.last));
        self.gap_ns = match self.seen {
            0 => 0,
            1 => gap_ns,
            _ => (self.gap_ns / 16 * 15).saturating_add(gap_ns / 16),
        };
        self.last = now;
        self.seen = self.seen.saturating_add(1);
    }

    /// Expected time until the next arrival; `None` after too few arrivals.
    pub(crate) fn gap_ns(&self, now: Time) -> Option<u64> {
        (self.seen > GAPS_MIN).then(|| self.gap_ns.max(nanos(now.since(self.last))))
    }
}

/// Cost of prompt tokens from a position on. Tokens behind many others take longer, because they attend to all of
/// them.
pub(crate) fn work(config: &BatchConfig, start: u32, tokens: u32) -> u32 {
    let context = u64::from(config.context_tokens);
    match u64::from(start) {
        start if context > 0 && start > context => {
            let work = (u64::from(tokens) * start).div_ceil(context);
            u32::try_from(work).unwrap_or(u32::MAX)
        }
        _ => tokens,
    }
}

/// Number of prompt tokens from a position on that have this cost: at least one, unless the cost is 0.
pub(crate) fn tokens_for(config: &BatchConfig, start: u32, work: u32) -> u32 {
    let context = u64::from(config.context_tokens);
    match u64::from(start) {
        start if context > 0 && start > context && work > 0 => {
            ((u64::from(work) * context / start) as u32).max(1)
        }
        _ => work,
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_far_into_a_prompt_count_for_more() {
        let config = BatchConfig { context_tokens: 1000, ..BatchConfig::default() };
        assert_eq!((work(&config, 1000, 64), tokens_for(&config, 1000, 64)), (64, 64));
        assert_eq!((work(&config, 4000, 16), tokens_for(&config, 4000, 64)), (64, 16));
        assert_eq!(tokens_for(&config, 1_000_000, 8), 1);
        let plain = BatchConfig { context_tokens: 0, ..config };
        assert_eq!((work(&plain, 4000, 16), tokens_for(&plain, 4000, 64)), (16, 64));
    }

    #[test]
    fn the_gap_between_arrivals_is_known_after_some_and_grows_while_nobody_comes() {
        let mut arrivals = Arrivals::default();
        for count in 0..17 {
            assert_eq!(arrivals.gap_ns(Time(count * 1000)), None);
            arrivals.observe(Time(count * 1000));
        }
        let gap_ns = arrivals.gap_ns(Time(16_000)).expect("seventeen have come");
        assert!((900_000..=1_000_000).contains(&gap_ns), "{gap_ns}");
        assert_eq!(arrivals.gap_ns(Time(21_000)), Some(5_000_000));
    }
}
