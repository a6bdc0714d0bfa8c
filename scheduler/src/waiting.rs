//! What a request waits for. Every wait has one reason, one timer and one event that ends it; where a
//! request stands in its life ([`StateName`]) says what it owns meanwhile.

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, FailReason, StateName, Time};

use crate::parked::Wake;
use crate::requests::Handle;
use crate::scheduler::Scheduler;

/// What a live request waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waiting {
    /// For its turn to be asked about in L3. It needs no timer: those who were asked about before it
    /// have theirs.
    ToAsk,
    /// For L3's answer.
    Asking { until: Time },
    /// For a share of the host, since L3 has something of it. When its time is over the share may still come,
    /// but the request does not wait for it any more.
    Told { until: Time },
    /// For pages from L3; it does not run without them before this moment.
    Fetching { until: Time },
    /// To be admitted. With `recheck`, copies make room for it by then, or are not counted on any more.
    InLine { recheck: Option<Time> },
    /// For an event without which it is not admitted before this moment.
    Parked { until: Option<Time>, wake: Wake },
    /// For pages from host; then it computes them.
    Loading { until: Time },
    /// For nothing but the steps that compute it. If it sits one out, copies make room by this moment.
    Computing { room_by: Option<Time> },
    /// For the copy of its pages to host; then it ends without.
    Draining { until: Time },
}

/// What L3 said it has of a request.
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

impl Waiting {
    /// To be admitted as soon as it can be.
    pub(crate) const IN_LINE: Self = Self::InLine { recheck: None };
    /// For the next step.
    pub(crate) const COMPUTING: Self = Self::Computing { room_by: None };

    /// When the wait is given up.
    pub(crate) fn until(&self) -> Option<Time> {
        match self {
            Self::ToAsk => None,
            Self::Asking { until }
            | Self::Told { until }
            | Self::Fetching { until }
            | Self::Loading { until }
            | Self::Draining { until } => Some(*until),
            Self::Computing { room_by: until }
            | Self::InLine { recheck: until }
            | Self::Parked { until, .. } => *until,
        }
    }

    /// Whether it could be admitted.
    pub(crate) fn is_in_line(&self) -> bool {
        matches!(self, Self::InLine { .. })
    }

    /// The event that ends the wait of a deferred request.
    pub(crate) fn wake(&self) -> Option<Wake> {
        match self {
            Self::Parked { wake, .. } => Some(*wake),
            Self::ToAsk
            | Self::Asking { .. }
            | Self::Told { .. }
            | Self::Fetching { .. }
            | Self::InLine { .. }
            | Self::Loading { .. }
            | Self::Computing { .. }
            | Self::Draining { .. } => None,
        }
    }

    /// Whether other requests may get pages from one that waits for this: it asks L3 for them, fetches, loads or
    /// computes them.
    pub(crate) fn may_bring(&self) -> bool {
        match self {
            Self::ToAsk
            | Self::Asking { .. }
            | Self::Told { .. }
            | Self::Fetching { .. }
            | Self::Loading { .. }
            | Self::Computing { .. } => true,
            Self::InLine { .. } | Self::Parked { .. } | Self::Draining { .. } => false,
        }
    }

    /// Whether one that has a slot can be part of a step.
    pub(crate) fn may_compute(&self) -> bool {
        match self {
            Self::Loading { .. } | Self::Computing { .. } => true,
            Self::ToAsk
            | Self::Asking { .. }
            | Self::Told { .. }
            | Self::Fetching { .. }
            | Self::InLine { .. }
            | Self::Parked { .. }
            | Self::Draining { .. } => false,
        }
    }

    /// Whether one in this state of its life can wait for that.
    pub(crate) fn fits(&self, state: StateName) -> bool {
        use StateName as S;
        match self {
            Self::ToAsk | Self::Asking { .. } => matches!(state, S::Submitted | S::Retracted),
            Self::Told { .. } => matches!(state, S::Submitted | S::Retracted | S::Prefilling),
            Self::Fetching { .. } if planted(Bug::WaitOutDeadlines) => {
                matches!(state, S::Prefetching | S::PrefetchDone | S::Prefilling)
            }
            Self::Fetching { .. } => matches!(state, S::Prefetching | S::Prefilling),
            Self::InLine { .. } | Self::Parked { .. } => {
                matches!(state, S::Submitted | S::Prefetching | S::PrefetchDone | S::Retracted)
            }
            Self::Loading { .. } => state == S::Prefilling,
            Self::Computing { .. } => matches!(state, S::Prefilling | S::Decoding),
            Self::Draining { .. } => matches!(state, S::Draining | S::WritingBack),
        }
    }
}

impl Scheduler {
    /// A request's timer has run out.
    pub(crate) fn expire(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        if entry.start_by().is_some_and(|start_by| start_by <= self.now) {
            self.end(handle, &LifeEvent::Fail(FailReason::TimedOut));
            return;
        }
        match entry.waiting() {
            // It is tried again.
            Waiting::InLine { .. } => self.requests.wait(handle, Waiting::IN_LINE),
            Waiting::Parked { wake, .. } => {
                self.requests[handle].waited_for_share |= wake == Wake::Share;
                self.requests.wait(handle, Waiting::IN_LINE);
            }
            // It runs when there is room, whatever its prefetch has brought by then.
            Waiting::Fetching { .. } if self.fetches_in_line(handle) => {
                self.requests.wait(handle, Waiting::IN_LINE);
            }
            Waiting::ToAsk
            | Waiting::Asking { .. }
            | Waiting::Told { .. }
            | Waiting::Fetching { .. }
            | Waiting::Loading { .. }
            | Waiting::Computing { .. }
            | Waiting::Draining { .. } => self.waited_in_vain(handle),
        }
    }

    /// What the request waits for takes too long.
    pub(crate) fn waited_in_vain(&mut self, handle: Handle) {
        self.l3_is_late(handle);
        self.stop_waiting(handle);
    }

    /// The request goes on without what it waits for.
    pub(crate) fn stop_waiting(&mut self, handle: Handle) {
        match self.requests[handle].waiting() {
            Waiting::ToAsk => self.requests.wait(handle, Waiting::IN_LINE),
            Waiting::Told { .. } => self.stop_waiting_for_share(handle),
            Waiting::Asking { .. } => {
                self.abandon_operation(handle);
                self.happen(handle, &LifeEvent::ProbeEnded);
                self.requests.wait(handle, Waiting::IN_LINE);
            }
            Waiting::Fetching { .. } | Waiting::InLine { .. } | Waiting::Parked { .. } => {
                self.stop_fetching(handle);
            }
            Waiting::Loading { .. } => self.compute_instead_of_loading(handle),
            Waiting::Computing { .. } => self.requests.wait(handle, Waiting::COMPUTING),
            Waiting::Draining { .. } => self.stop_draining(handle),
        }
    }

    /// The request goes on without what L3 was to bring.
    pub(crate) fn stop_fetching(&mut self, handle: Handle) {
        match self.requests[handle].state() {
            StateName::Prefetching | StateName::Prefilling => {
                self.abandon_operation(handle);
                self.requests[handle].found = None;
                self.happen(handle, &LifeEvent::PrefetchEnded { path: None });
                self.fetch_is_over(handle);
            }
            StateName::Submitted
            | StateName::PrefetchDone
            | StateName::Decoding
            | StateName::Retracted
            | StateName::Draining
            | StateName::WritingBack
            | StateName::Finished
            | StateName::Aborted
            | StateName::Failed => self.requests.wait(handle, Waiting::IN_LINE),
        }
    }

    /// A request whose admission is deferred leaves the line until an event, or a moment.
    pub(crate) fn park(&mut self, handle: Handle, until: Option<Time>, wake: Wake) {
        let waiting = match planted(Bug::DeferredFillWindow) {
            true => Waiting::InLine { recheck: until },
            false => Waiting::Parked { until, wake },
        };
        self.requests.wait(handle, waiting);
    }

    /// One in line, or one that sits out a step, is looked at again by then at the latest.
    pub(crate) fn look_again(&mut self, handle: Handle, until: Time) {
        match self.requests[handle].waiting() {
            Waiting::InLine { recheck: None } => {
                self.requests.wait(handle, Waiting::InLine { recheck: Some(until) });
            }
            Waiting::Computing { room_by: None } => {
                self.requests.wait(handle, Waiting::Computing { room_by: Some(until) });
            }
            // It has a timer, and is looked at when that runs out.
            Waiting::InLine { recheck: Some(_) } | Waiting::Computing { room_by: Some(_) } => {}
            Waiting::ToAsk
            | Waiting::Asking { .. }
            | Waiting::Told { .. }
            | Waiting::Fetching { .. }
            | Waiting::Parked { .. }
            | Waiting::Loading { .. }
            | Waiting::Draining { .. } => unreachable!("only who could go on is looked at"),
        }
    }
}
