//! Rate of arrivals.

use std::time::Duration;

use terrace_fsm::Time;

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

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_gap_needs_samples_and_grows_without_arrivals() {
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
