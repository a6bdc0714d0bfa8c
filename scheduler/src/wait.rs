//! Waits of a request: reason, timer and the event that ends each one. The lifecycle state
//! ([`StateName`]) tells what the request owns meanwhile.

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{StateName, Time};

use crate::deferred::Wake;

/// Wait of a live request: its reason and its timer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    /// Queued for a probe of L3. It has no timer: the probes before it have theirs.
    ProbeQueued,
    /// Waits for the outcome of a probe.
    Probe { until: Time },
    /// Waits for a share of the host memory to prefetch a hit in L3. When the time is over, the prefetch may
    /// still start, but does not hold back the request.
    PrefetchQueued { until: Time },
    /// Waits for pages from L3; it does not run without them before this time.
    Prefetch { until: Time },
    /// Queued for admission. With `recheck`, copies are expected to make room by then.
    Admission { recheck: Option<Time> },
    /// Not admitted before an event or this time, whichever is first.
    Deferred { until: Option<Time>, wake: Wake },
    /// Waits for pages from host; it computes them after this time.
    LoadBack { until: Time },
    /// Part of steps. If it sits out a step for lack of memory, copies are expected to make room by `room_by`.
    Step { room_by: Option<Time> },
    /// Waits for the copy of its pages to host; it ends without the copy after this time.
    WriteBack { until: Time },
}

/// Pages of a request that L3 reported to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) start_page: u32,
    pub(crate) pages: u32,
}

impl Found {
    pub(crate) fn end_page(&self) -> u32 {
        self.start_page + self.pages
    }
}

impl Wait {
    /// Queued for admission without a timer.
    pub(crate) const ADMISSION: Self = Self::Admission { recheck: None };
    /// Part of steps without a timer.
    pub(crate) const STEP: Self = Self::Step { room_by: None };

    /// Time at which the wait ends without its event.
    pub(crate) fn until(&self) -> Option<Time> {
        match self {
            Self::ProbeQueued => None,
            Self::Probe { until }
            | Self::PrefetchQueued { until }
            | Self::Prefetch { until }
            | Self::LoadBack { until }
            | Self::WriteBack { until } => Some(*until),
            Self::Step { room_by: until }
            | Self::Admission { recheck: until }
            | Self::Deferred { until, .. } => *until,
        }
    }

    /// Returns true if the request may be admitted.
    pub(crate) fn is_queued(&self) -> bool {
        matches!(self, Self::Admission { .. })
    }

    /// Event that ends the wait of a deferred request.
    pub(crate) fn wake(&self) -> Option<Wake> {
        match self {
            Self::Deferred { wake, .. } => Some(*wake),
            Self::ProbeQueued
            | Self::Probe { .. }
            | Self::PrefetchQueued { .. }
            | Self::Prefetch { .. }
            | Self::Admission { .. }
            | Self::LoadBack { .. }
            | Self::Step { .. }
            | Self::WriteBack { .. } => None,
        }
    }

    /// Returns true if the request may provide pages to others: it probes, prefetches, loads or computes them.
    pub(crate) fn may_provide(&self) -> bool {
        match self {
            Self::ProbeQueued
            | Self::Probe { .. }
            | Self::PrefetchQueued { .. }
            | Self::Prefetch { .. }
            | Self::LoadBack { .. }
            | Self::Step { .. } => true,
            Self::Admission { .. } | Self::Deferred { .. } | Self::WriteBack { .. } => false,
        }
    }

    /// Returns true if a request with a slot can be part of a step.
    pub(crate) fn may_compute(&self) -> bool {
        match self {
            Self::LoadBack { .. } | Self::Step { .. } => true,
            Self::ProbeQueued
            | Self::Probe { .. }
            | Self::PrefetchQueued { .. }
            | Self::Prefetch { .. }
            | Self::Admission { .. }
            | Self::Deferred { .. }
            | Self::WriteBack { .. } => false,
        }
    }

    /// Returns true if a request in this state can have this wait.
    pub(crate) fn fits(&self, state: StateName) -> bool {
        use StateName as S;
        match self {
            Self::ProbeQueued | Self::Probe { .. } => matches!(state, S::Submitted | S::Retracted),
            Self::PrefetchQueued { .. } => {
                matches!(state, S::Submitted | S::Retracted | S::Prefilling)
            }
            Self::Prefetch { .. } if planted(Bug::WaitOutDeadlines) => {
                matches!(state, S::Prefetching | S::PrefetchDone | S::Prefilling)
            }
            Self::Prefetch { .. } => matches!(state, S::Prefetching | S::Prefilling),
            Self::Admission { .. } | Self::Deferred { .. } => {
                matches!(state, S::Submitted | S::Prefetching | S::PrefetchDone | S::Retracted)
            }
            Self::LoadBack { .. } => state == S::Prefilling,
            Self::Step { .. } => matches!(state, S::Prefilling | S::Decoding),
            Self::WriteBack { .. } => matches!(state, S::Draining | S::WritingBack),
        }
    }
}
