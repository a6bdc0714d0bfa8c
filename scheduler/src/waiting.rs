//! What a request waits for. Every wait has one reason, one timer and one event that ends it; where a
//! request stands in its life ([`StateName`]) says what it owns meanwhile.

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, FailReason, StateName, Time};

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
    /// For a share of the host, since L3 has something of it. Who would not stand in line for that
    /// needs no timer: the next plan decides.
    Told { found: Found, until: Option<Time> },
    /// For pages from L3; it does not run without them before this moment.
    Fetching { until: Time },
    /// To be admitted.
    InLine { delay: Option<Delay> },
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

/// Why one in line is not admitted though it be its turn, and when somebody looks again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delay {
    pub(crate) until: Time,
    pub(crate) reason: DelayReason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DelayReason {
    /// L3 brings its pages, and may take this long: to admit it without them would be to begin
    /// prefetches in order to call them off.
    Fetch,
    /// Another computes or loads its prefix.
    Prefix,
    /// Copies to host make room.
    Room,
    /// Others load so much that the rest of its pages on host would have to be computed.
    Share,
}

impl Waiting {
    /// To be admitted as soon as it can be.
    pub(crate) const IN_LINE: Self = Self::InLine { delay: None };
    /// For the next step.
    pub(crate) const COMPUTING: Self = Self::Computing { room_by: None };

    /// When the wait is given up.
    pub(crate) fn until(&self) -> Option<Time> {
        match self {
            Self::ToAsk => None,
            Self::Asking { until }
            | Self::Fetching { until }
            | Self::Loading { until }
            | Self::Draining { until } => Some(*until),
            Self::Told { until, .. } | Self::Computing { room_by: until } => *until,
            Self::InLine { delay } => delay.map(|delay| delay.until),
        }
    }

    /// Whether it could be admitted.
    pub(crate) fn is_in_line(&self) -> bool {
        match self {
            Self::InLine { .. } => true,
            Self::ToAsk
            | Self::Asking { .. }
            | Self::Told { .. }
            | Self::Fetching { .. }
            | Self::Loading { .. }
            | Self::Computing { .. }
            | Self::Draining { .. } => false,
        }
    }

    /// Whether L3 brings its pages, and it is not admitted without.
    pub(crate) fn is_delayed_by_fetch(&self) -> bool {
        match self {
            Self::InLine { delay } => delay.is_some_and(|delay| delay.reason == DelayReason::Fetch),
            Self::ToAsk
            | Self::Asking { .. }
            | Self::Told { .. }
            | Self::Fetching { .. }
            | Self::Loading { .. }
            | Self::Computing { .. }
            | Self::Draining { .. } => false,
        }
    }

    /// Whether it is in line and there is a reason not to admit it.
    pub(crate) fn is_delayed(&self) -> bool {
        self.is_in_line() && self.until().is_some()
    }

    /// Whether one in this state of its life can wait for that.
    pub(crate) fn fits(&self, state: StateName) -> bool {
        use StateName as S;
        match self {
            Self::ToAsk | Self::Asking { .. } | Self::Told { .. } => {
                matches!(state, S::Submitted | S::Retracted)
            }
            Self::Fetching { .. } if planted(Bug::WaitOutDeadlines) => {
                matches!(state, S::Prefetching | S::PrefetchDone)
            }
            Self::Fetching { .. } => state == S::Prefetching,
            Self::InLine { .. } => {
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
            // It stays where it is; whoever admits looks at it again.
            Waiting::InLine { delay } => {
                if delay.is_some_and(|delay| delay.reason == DelayReason::Share) {
                    self.requests[handle].waited_for_share = true;
                }
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
            Waiting::ToAsk | Waiting::Told { .. } => self.requests.wait(handle, Waiting::IN_LINE),
            Waiting::Asking { .. } => {
                self.abandon_operation(handle);
                self.happen(handle, &LifeEvent::ProbeEnded);
                self.requests.wait(handle, Waiting::IN_LINE);
            }
            Waiting::Fetching { .. } | Waiting::InLine { .. } => self.stop_fetching(handle),
            Waiting::Loading { .. } => self.compute_instead_of_loading(handle),
            Waiting::Computing { .. } => self.requests.wait(handle, Waiting::COMPUTING),
            Waiting::Draining { .. } => self.stop_draining(handle),
        }
    }

    /// The request may be admitted without what L3 was to bring.
    pub(crate) fn stop_fetching(&mut self, handle: Handle) {
        if self.requests[handle].state() == StateName::Prefetching {
            self.abandon_operation(handle);
            self.stop_sharing(handle);
            self.happen(handle, &LifeEvent::PrefetchEnded { path: None });
        }
        self.requests.wait(handle, Waiting::IN_LINE);
    }

    /// One in line, or one that sits out a step, is looked at again by then at the latest.
    pub(crate) fn look_again(&mut self, handle: Handle, until: Time, reason: DelayReason) {
        match self.requests[handle].waiting() {
            Waiting::InLine { delay: None } => {
                let delay = Some(Delay { until, reason });
                self.requests.wait(handle, Waiting::InLine { delay });
            }
            Waiting::Computing { room_by: None } => {
                self.requests.wait(handle, Waiting::Computing { room_by: Some(until) });
            }
            // It has a timer, and is looked at when that runs out.
            Waiting::InLine { delay: Some(_) } | Waiting::Computing { room_by: Some(_) } => {}
            Waiting::ToAsk
            | Waiting::Asking { .. }
            | Waiting::Told { .. }
            | Waiting::Fetching { .. }
            | Waiting::Loading { .. }
            | Waiting::Draining { .. } => unreachable!("only who could go on is looked at"),
        }
    }
}
