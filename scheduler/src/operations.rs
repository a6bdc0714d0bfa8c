//! Operations in flight. Each owns the pins and pages that it reads and writes until every rank has reported, even if
//! its request has ended.

use std::collections::{BTreeMap, VecDeque};

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{
    Arrival, Claims, DevicePage, DevicePages, DevicePin, HostPages, HostPin, KeptRun, PageKey,
    Sequence,
};
use terrace_fsm::{Computing, OpId, Time};

use crate::error::EventError;
use crate::event::Outcome;
use crate::ids::Handle;
use crate::stats::OperationStats;

/// Kind of an operation, with the resources that it owns.
#[derive(Debug)]
pub(crate) enum Work {
    Probe {
        start_page: u32,
        first_key: PageKey,
    },
    /// The run holds the pages behind the anchor, captured at the start.
    Prefetch {
        anchor: Anchor,
        pages: HostPages,
        run: KeptRun,
        priority: i32,
    },
    LoadBack {
        source: HostPin,
        anchor: DevicePin,
        arrival: Arrival,
        pages: DevicePages,
    },
    WriteBack {
        source: DevicePin,
        arrival: Arrival,
        pages: HostPages,
    },
    Backup {
        source: HostPin,
        arrival: Arrival,
        /// Round of the cache's knowledge about L3 in which the backup was queued.
        round: u32,
        /// True if the share had no room for more of the path.
        may_have_more: bool,
        /// Number of earlier failures in a row.
        failures: u32,
    },
}

/// Path that the pages of a prefetch continue.
#[derive(Debug)]
pub(crate) enum Anchor {
    /// The path stays on host.
    Pinned(HostPin),
    /// The path may be evicted: no request waits for the prefetch, and a slow store must not hold memory that it does
    /// not touch.
    Remembered(Box<Sequence>),
}

/// An operation in flight.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) work: Work,
    /// Request that waits for the operation.
    pub(crate) owner: Option<Handle>,
    /// True if its request has stopped waiting.
    pub(crate) quarantined: bool,
    pub(crate) started: Time,
    pub(crate) pages: u32,
    /// True if its pages belong to replaced weights: none of them counts as sound.
    pub(crate) is_stale: bool,
    /// Number of pages that are sound on all ranks that have reported.
    pub(crate) sound_pages: u32,
    pub(crate) failed: bool,
    pub(crate) corrupt: bool,
    /// True if a rank has stopped because no request waited: pages that did not arrive are not missing.
    pub(crate) called_off: bool,
    /// Device pages that become evictable when it ends, as far as they are counted on.
    pub(crate) room: usize,
    /// Bit set of the ranks that have reported.
    ended_ranks: u64,
    reports: u32,
}

/// Effect of an outcome.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is moved once, to whoever settles it")]
pub(crate) enum Reported {
    /// The outcome is late or repeated.
    Ignored,
    /// Other ranks have not reported.
    Pending,
    /// A driver has stopped waiting, but may still touch the pages.
    TimedOut,
    /// All ranks have reported: the operation has ended.
    Ended(Operation),
}

/// Counters of each kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) probes: OperationStats,
    pub(crate) prefetches: OperationStats,
    pub(crate) load_backs: OperationStats,
    pub(crate) write_backs: OperationStats,
    pub(crate) backups: OperationStats,
}

#[derive(Debug)]
pub(crate) struct Operations {
    in_flight: BTreeMap<OpId, Operation>,
    counts: Counts,
    /// Operations without a waiting request that no plan has reported yet.
    cancelled: Vec<OpId>,
    /// Device pages that write-backs make evictable, without late ones.
    room: usize,
    /// Write-backs that make room, by the time at which they are late. Some may have ended.
    late_at: VecDeque<(Time, OpId)>,
    next: u64,
    ranks: u32,
}

impl Operations {
    pub(crate) fn new(ranks: u32) -> Self {
        Self {
            in_flight: BTreeMap::new(),
            counts: Counts::default(),
            cancelled: Vec::new(),
            room: 0,
            late_at: VecDeque::new(),
            next: 0,
            ranks,
        }
    }

    /// Id of the next operation.
    pub(crate) fn next_id(&self) -> OpId {
        OpId(self.next)
    }

    pub(crate) fn start(
        &mut self,
        work: Work,
        owner: Option<Handle>,
        pages: u32,
        now: Time,
    ) -> OpId {
        let counts = work.counts(&mut self.counts);
        counts.started += 1;
        counts.in_flight += 1;
        counts.in_flight_pages += pages;
        let op = OpId(self.next);
        self.next += 1;
        let operation = Operation {
            work,
            owner,
            quarantined: false,
            started: now,
            pages,
            is_stale: false,
            sound_pages: pages,
            failed: false,
            corrupt: false,
            called_off: false,
            room: 0,
            ended_ranks: 0,
            reports: 0,
        };
        self.in_flight.insert(op, operation);
        op
    }

    /// Applies the outcome of one rank. The minimum over all ranks counts.
    pub(crate) fn report(
        &mut self,
        op: OpId,
        rank: u32,
        outcome: Outcome,
    ) -> Result<Reported, EventError> {
        if op.0 >= self.next {
            return Err(EventError::UnknownOperation(op));
        }
        if rank >= self.ranks {
            return Err(EventError::UnknownRank { op, rank, ranks: self.ranks });
        }
        let Some(operation) = self.in_flight.get_mut(&op) else {
            return Ok(Reported::Ignored);
        };
        if let Outcome::Partial(claimed)
        | Outcome::CorruptAfter(claimed)
        | Outcome::CalledOff(claimed) = outcome
            && claimed > operation.pages
        {
            return Err(EventError::TooManyPages { op, pages: operation.pages, claimed });
        }
        let repeated = operation.ended_ranks & 1 << rank != 0;
        if repeated && !planted(Bug::CountRankTwice) {
            return Ok(Reported::Ignored);
        }
        let sound_pages = match outcome {
            Outcome::Done => operation.pages,
            Outcome::Partial(pages) => pages,
            Outcome::Missing => 0,
            Outcome::Failed => {
                operation.failed = true;
                0
            }
            Outcome::Corrupt => {
                operation.corrupt = true;
                0
            }
            Outcome::CorruptAfter(pages) => {
                operation.corrupt = true;
                pages
            }
            Outcome::CalledOff(pages) => {
                operation.called_off |= !planted(Bug::CalledOffIsMissing);
                pages
            }
            Outcome::TimedOut => {
                operation.failed = true;
                if !planted(Bug::ReuseAfterTimeout) {
                    return Ok(Reported::TimedOut);
                }
                0
            }
        };
        operation.sound_pages = match planted(Bug::BelieveBestRank) && operation.ended_ranks != 0 {
            true => operation.sound_pages.max(sound_pages),
            false => operation.sound_pages.min(sound_pages),
        };
        operation.ended_ranks |= 1 << rank;
        operation.reports += 1;
        let ended = match planted(Bug::CountRankTwice) {
            true => operation.reports,
            false => operation.ended_ranks.count_ones(),
        };
        if ended < self.ranks {
            return Ok(Reported::Pending);
        }
        let mut operation = self.in_flight.remove(&op).expect("it was just there");
        self.room -= operation.room;
        if operation.is_stale {
            // The outcome says nothing about the store.
            (operation.sound_pages, operation.called_off) = (0, true);
        }
        self.cancelled.retain(|&cancelled| cancelled != op);
        let counts = operation.work.counts(&mut self.counts);
        counts.in_flight -= 1;
        if !(operation.quarantined && planted(Bug::DropBudgetOfLateOperation)) {
            counts.in_flight_pages -= operation.pages;
        }
        if operation.quarantined {
            counts.quarantined_pages -= operation.pages;
        }
        counts.sound_pages += u64::from(operation.sound_pages);
        if operation.called_off {
            counts.called_off += 1;
        } else {
            counts.unsound_pages += u64::from(operation.pages - operation.sound_pages);
        }
        counts.failures += u64::from(operation.failed || operation.corrupt);
        Ok(Reported::Ended(operation))
    }

    /// Detaches an operation from its request.
    pub(crate) fn abandon(&mut self, op: OpId) {
        let Some(operation) = self.in_flight.get_mut(&op) else { return };
        if operation.owner.take().is_none() {
            return;
        }
        match operation.work {
            // A probe owns nothing, so it ends here. Otherwise lost probes would add up.
            Work::Probe { .. } => {
                self.counts.probes.in_flight -= 1;
                self.counts.probes.in_flight_pages -= operation.pages;
                self.in_flight.remove(&op);
            }
            Work::Prefetch { .. }
            | Work::LoadBack { .. }
            | Work::WriteBack { .. }
            | Work::Backup { .. } => {
                operation.quarantined = true;
                operation.work.counts(&mut self.counts).quarantined_pages += operation.pages;
            }
        }
    }

    /// Counts device pages that a write-back makes evictable if it ends by `late_at`. These times only increase.
    pub(crate) fn makes_room(&mut self, op: OpId, pages: usize, late_at: Time) {
        let Some(operation) = self.in_flight.get_mut(&op).filter(|_| pages > 0) else { return };
        operation.room = pages;
        self.room += pages;
        self.late_at.push_back((late_at, op));
    }

    /// Stops counting on the room of write-backs that are late.
    pub(crate) fn forget_late_room(&mut self, now: Time) {
        while let Some(&(_, op)) = self.late_at.front().filter(|(late_at, _)| *late_at <= now) {
            self.late_at.pop_front();
            if let Some(operation) = self.in_flight.get_mut(&op) {
                self.room -= std::mem::take(&mut operation.room);
            }
        }
    }

    /// Device pages that write-backs in flight will make evictable.
    pub(crate) fn pages_making_room(&self) -> usize {
        self.room
    }

    /// Marks all operations in flight as stale, because the weights were replaced.
    pub(crate) fn make_all_stale(&mut self) {
        self.in_flight.values_mut().for_each(|operation| operation.is_stale = true);
    }

    /// Lets the next plan cancel an operation.
    pub(crate) fn cancel(&mut self, op: OpId) {
        self.cancelled.push(op);
    }

    /// Moves the cancelled operations to a plan, in order.
    pub(crate) fn tell_cancelled(&mut self, into: &mut Vec<OpId>) {
        self.cancelled.sort_unstable();
        into.append(&mut self.cancelled);
    }

    /// Counts a probe whose request has stopped waiting.
    pub(crate) fn note_late_probe(&mut self) {
        self.counts.probes.failures += 1;
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    pub(crate) fn get(&self, op: OpId) -> Option<&Operation> {
        self.in_flight.get(&op)
    }

    /// Destination pages of a computing request's load-back, in order.
    #[inline]
    pub(crate) fn loading(&self, computing: &Computing) -> &[DevicePage] {
        computing.transfer.map_or(&[], |op| self.load_back_pages(op))
    }

    // Separate, because most computing requests load nothing.
    #[cold]
    fn load_back_pages(&self, op: OpId) -> &[DevicePage] {
        match self.in_flight.get(&op).map(|operation| &operation.work) {
            Some(Work::LoadBack { pages, .. }) => pages.as_slice(),
            Some(
                Work::Probe { .. }
                | Work::Prefetch { .. }
                | Work::WriteBack { .. }
                | Work::Backup { .. },
            )
            | None => &[],
        }
    }

    pub(crate) fn owner(&self, op: OpId) -> Option<Handle> {
        self.in_flight.get(&op).and_then(|operation| operation.owner)
    }

    /// Anchor of a prefetch in flight.
    pub(crate) fn anchor(&mut self, op: OpId) -> Option<&mut Anchor> {
        match &mut self.in_flight.get_mut(&op)?.work {
            Work::Prefetch { anchor, .. } => Some(anchor),
            Work::Probe { .. }
            | Work::LoadBack { .. }
            | Work::WriteBack { .. }
            | Work::Backup { .. } => None,
        }
    }

    /// Takes the pages of a prefetch in flight. Only a planted bug does this.
    pub(crate) fn take_destination(&mut self, op: OpId) -> Option<HostPages> {
        match &mut self.in_flight.get_mut(&op)?.work {
            Work::Prefetch { pages, .. } => Some(std::mem::take(pages)),
            Work::Probe { .. }
            | Work::LoadBack { .. }
            | Work::WriteBack { .. }
            | Work::Backup { .. } => None,
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (OpId, &Operation)> {
        self.in_flight.iter().map(|(&op, operation)| (op, operation))
    }
}

impl Operation {
    /// Returns true if its success proves that the store is healthy.
    pub(crate) fn is_telling(&self) -> bool {
        self.owner.is_some() && !self.called_off
    }
}

impl Work {
    pub(crate) fn counts<'a>(&self, counts: &'a mut Counts) -> &'a mut OperationStats {
        match self {
            Self::Probe { .. } => &mut counts.probes,
            Self::Prefetch { .. } => &mut counts.prefetches,
            Self::LoadBack { .. } => &mut counts.load_backs,
            Self::WriteBack { .. } => &mut counts.write_backs,
            Self::Backup { .. } => &mut counts.backups,
        }
    }

    pub(crate) fn claim(&self, claims: &mut Claims) {
        match self {
            Self::Probe { .. } => {}
            Self::Prefetch { anchor, pages, .. } => {
                if let Anchor::Pinned(anchor) = anchor {
                    claims.host_pin(anchor);
                }
                claims.host_pages(pages);
            }
            Self::LoadBack { source, anchor, pages, .. } => {
                claims.host_pin(source);
                claims.device_pin(anchor);
                claims.device_pages(pages);
            }
            Self::WriteBack { source, pages, .. } => {
                claims.device_pin(source);
                claims.host_pages(pages);
            }
            Self::Backup { source, .. } => claims.host_pin(source),
        }
    }
}
