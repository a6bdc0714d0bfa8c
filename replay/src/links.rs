//! Links with a bandwidth, on which transfers queue.

use serde::Serialize;

use crate::config::LinkConfig;
use crate::report::{LinkName, LinkUse};

/// A link that carries one transfer at a time.
///
/// First come, first served, as in copy engines and connections: the end of a transfer is known
/// when it starts, so no event is ever rescheduled. The total time equals that of fair sharing, and
/// the mean is no worse. The latency does not occupy the link: the next transfer's bytes follow at
/// once.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    latency_us: u64,
    bytes_per_second: u64,
    /// Time from which the link is free, in nanoseconds.
    free_at_ns: u64,
    transfers: u64,
    bytes: u64,
    busy_ns: u64,
    waited_ns: u128,
}

/// Times of a transfer on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Carried {
    pub(crate) start_ns: u64,
    /// End of the link's occupancy: later transfers can start then, even if the last bytes have not
    /// arrived from their source yet.
    pub(crate) busy_until_ns: u64,
    pub(crate) end_ns: u64,
}

impl Link {
    pub(crate) fn new(config: &LinkConfig) -> Self {
        Self {
            latency_us: config.latency_us,
            bytes_per_second: config.bytes_per_second,
            free_at_ns: 0,
            transfers: 0,
            bytes: 0,
            busy_ns: 0,
            waited_ns: 0,
        }
    }

    /// Schedules bytes behind the transfers already on the link.
    pub(crate) fn carry(&mut self, now_us: u64, bytes: u64) -> Carried {
        self.carry_behind(
            now_us,
            Carried { start_ns: now_us * 1000, busy_until_ns: 0, end_ns: 0 },
            bytes,
        )
    }

    /// Schedules bytes that arrive over another link: the start is not before that link's start,
    /// and the end not before its end. A faster link behind a slower one is occupied only for its
    /// own share of the time, so other transfers fit in between.
    pub(crate) fn carry_behind(&mut self, now_us: u64, source: Carried, bytes: u64) -> Carried {
        let start_ns = self.free_at_ns.max(source.start_ns);
        let needs_ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
        let needs_ns = u64::try_from(needs_ns).unwrap_or(u64::MAX);
        // Saturation: a link that is busy for centuries.
        let busy_until_ns = start_ns.saturating_add(needs_ns);
        self.free_at_ns = busy_until_ns;
        self.transfers += 1;
        self.bytes += bytes;
        self.busy_ns += busy_until_ns - start_ns;
        self.waited_ns += u128::from(start_ns - (now_us * 1000).min(start_ns));
        Carried { start_ns, busy_until_ns, end_ns: busy_until_ns.max(source.end_ns) }
    }

    pub(crate) fn latency_us(&self) -> u64 {
        self.latency_us
    }

    pub(crate) fn report(&self, link: LinkName, worker: Option<u32>, whole_us: u64) -> LinkUse {
        let busy_s = self.busy_ns as f64 / 1e9;
        let whole_s = whole_us.max(1) as f64 / 1e6;
        let waits = self.transfers.max(1) as f64;
        LinkUse {
            link,
            worker,
            transfers: self.transfers,
            bytes: self.bytes,
            busy_s,
            busy: (busy_s / whole_s).min(1.0),
            wait_ms_mean: self.waited_ns as f64 / 1e6 / waits,
        }
    }
}

impl Carried {
    /// Returns the arrival time of the last byte, rounded up.
    pub(crate) fn arrival_us(self, latency_us: u64) -> u64 {
        self.end_ns.div_ceil(1000) + latency_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(bytes_per_second: u64) -> Link {
        Link::new(&LinkConfig { latency_us: 50, bytes_per_second })
    }

    fn carried(start_ns: u64, end_ns: u64) -> Carried {
        Carried { start_ns, busy_until_ns: end_ns, end_ns }
    }

    #[test]
    fn later_transfers_wait() {
        let mut link = link(1_000_000_000);
        let first = link.carry(100, 1_000_000);
        assert_eq!(first, carried(100_000, 1_100_000));
        assert_eq!(first.arrival_us(link.latency_us()), 1_150);
        let second = link.carry(600, 500_000);
        assert_eq!(second, carried(1_100_000, 1_600_000));
        let after_a_pause = link.carry(9_000, 1);
        assert_eq!(after_a_pause, carried(9_000_000, 9_000_001));
        let used = link.report(LinkName::HostToDevice, Some(0), 10_000);
        assert_eq!((used.transfers, used.bytes), (3, 1_500_001));
        assert!(
            (used.busy_s - 0.001_500_001).abs() < 1e-12 && (used.busy - 0.150_000_1).abs() < 1e-9
        );
        assert!((used.wait_ms_mean - 0.5 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn two_links_take_the_time_of_the_slower() {
        for (store, network) in [(2_000_000_000, 1_000_000_000), (1_000_000_000, 2_000_000_000)] {
            let (mut store, mut network) = (link(store), link(network));
            let read = store.carry(0, 1_000_000);
            let came = network.carry_behind(0, read, 1_000_000);
            assert_eq!(came.end_ns, 1_000_000);
        }
    }

    #[test]
    fn fast_link_behind_a_slow_one_is_mostly_free() {
        let (mut slow, mut fast) = (link(1_000_000_000), link(4_000_000_000));
        let sent = slow.carry(0, 1_000_000);
        let written = fast.carry_behind(0, sent, 1_000_000);
        assert_eq!((written.busy_until_ns, written.end_ns), (250_000, 1_000_000));
        // Another worker's bytes fit beside them.
        let mut other = link(1_000_000_000);
        let sent = other.carry(0, 1_000_000);
        assert_eq!(fast.carry_behind(0, sent, 1_000_000).end_ns, 1_000_000);
        let used = fast.report(LinkName::StoreWrite, None, 1_000);
        assert!((used.busy - 0.5).abs() < 1e-9, "{used:?}");
        // Transfers that do not fit are delayed.
        let late: Vec<u64> = (0..4).map(|_| fast.carry_behind(0, sent, 1_000_000).end_ns).collect();
        assert_eq!(late, [1_000_000, 1_000_000, 1_250_000, 1_500_000]);
    }

    #[test]
    fn total_time_equals_total_bytes() {
        let mut link = link(3_000_000);
        let last = (0..100).map(|bytes| link.carry(0, bytes * 1000).end_ns).last();
        assert!(last.unwrap().abs_diff(4_950_000 * 1_000 / 3) < 100);
    }
}
