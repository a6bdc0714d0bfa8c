//! What can happen to a request, and the table of what it leads to.

use std::cell::Cell;
use std::fmt;

use serde::{Deserialize, Serialize};
use terrace_cache::{DevicePages, DevicePin, HostPin, PageRun, Published};

use crate::ids::OpId;
use crate::state::{Computing, FailReason, StateName};

/// Carries something owned into or out of a transition.
pub struct Handover<T>(Cell<Option<T>>);

impl<T> fmt::Debug for Handover<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handover")
    }
}

impl<T> Handover<T> {
    /// Something to be taken by the transition.
    pub fn of(value: T) -> Self {
        Self(Cell::new(Some(value)))
    }

    /// Room for what the transition hands out.
    #[must_use]
    pub fn empty() -> Self {
        Self(Cell::new(None))
    }

    /// Takes it.
    ///
    /// # Panics
    /// If it was taken before, or never put in.
    pub fn take(&self) -> T {
        self.0.take().expect("handed over once")
    }

    pub(crate) fn put(&self, value: T) {
        self.0.set(Some(value));
    }
}

/// Something that happens to a request.
#[derive(Debug)]
pub enum Event<'a> {
    /// L3 is being asked.
    ProbeStarted(OpId),
    /// L3 has answered, or nobody waits for its answer any more.
    ProbeEnded,
    /// Pages are coming from L3.
    PrefetchStarted {
        /// The operation that brings them.
        op: OpId,
        /// The place of the first of them.
        start_page: u32,
        /// Keeps the pages before it.
        path: Handover<HostPin>,
    },
    /// The wait for them is over.
    PrefetchEnded {
        /// Keeps the path as far as it is there now; without it the former pin stays.
        path: Option<Handover<HostPin>>,
    },
    /// The pins on host are not needed any more, or wanted elsewhere.
    PinsYielded,
    /// The request has a slot and memory.
    Admitted(Handover<Computing>),
    /// It needs more device pages of its own, and takes them if so many are free.
    Grow {
        /// How many.
        pages: usize,
        /// Whether it got them.
        grown: &'a Cell<bool>,
    },
    /// Its first own pages are computed: they become visible to others.
    Computed {
        /// The pages' keys and tokens.
        run: PageRun<'a>,
        /// The priority of the request.
        priority: i32,
        /// What became of them.
        published: &'a Cell<Option<Published>>,
    },
    /// More of its pages are coming from host.
    LoadBackStarted {
        /// The operation that brings them.
        op: OpId,
        /// How many of its own pages they go to.
        pages: usize,
        /// Those.
        destination: &'a Handover<DevicePages>,
    },
    /// The wait for its load-back is over.
    LoadBackEnded {
        /// Keeps the path as far as the device holds it now; without it the former pin stays.
        path: Option<Handover<DevicePin>>,
    },
    /// The prompt is computed and the first token is there.
    PrefillEnded,
    /// Its device memory is needed for others.
    Retracted {
        /// Keeps what is on host.
        kept: Handover<HostPin>,
        /// A copy to host, and the pin that it takes over.
        write_back: Option<(OpId, &'a Handover<DevicePin>)>,
    },
    /// The copy to host has ended.
    Kept(Handover<HostPin>),
    /// All tokens are there.
    Completed,
    /// The copy to host has begun, and takes over the pin.
    WriteBackStarted(OpId, &'a Handover<DevicePin>),
    /// Nothing remains to be copied.
    Drained,
    /// The client called it off.
    Abort,
    /// It cannot go on.
    Fail(FailReason),
}

/// An event without what it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each is explained at the event of the same name")]
pub enum EventName {
    ProbeStarted,
    ProbeEnded,
    PrefetchStarted,
    PrefetchEnded,
    PinsYielded,
    Admitted,
    Grow,
    Computed,
    LoadBackStarted,
    LoadBackEnded,
    PrefillEnded,
    Retracted,
    Kept,
    Completed,
    WriteBackStarted,
    Drained,
    Abort,
    Fail,
}

impl EventName {
    /// Every event.
    pub const ALL: [EventName; 18] = [
        Self::ProbeStarted,
        Self::ProbeEnded,
        Self::PrefetchStarted,
        Self::PrefetchEnded,
        Self::PinsYielded,
        Self::Admitted,
        Self::Grow,
        Self::Computed,
        Self::LoadBackStarted,
        Self::LoadBackEnded,
        Self::PrefillEnded,
        Self::Retracted,
        Self::Kept,
        Self::Completed,
        Self::WriteBackStarted,
        Self::Drained,
        Self::Abort,
        Self::Fail,
    ];
}

impl Event<'_> {
    /// The event without what it carries.
    #[must_use]
    pub fn name(&self) -> EventName {
        match self {
            Self::ProbeStarted(_) => EventName::ProbeStarted,
            Self::ProbeEnded => EventName::ProbeEnded,
            Self::PrefetchStarted { .. } => EventName::PrefetchStarted,
            Self::PrefetchEnded { .. } => EventName::PrefetchEnded,
            Self::PinsYielded => EventName::PinsYielded,
            Self::Admitted(_) => EventName::Admitted,
            Self::Grow { .. } => EventName::Grow,
            Self::Computed { .. } => EventName::Computed,
            Self::LoadBackStarted { .. } => EventName::LoadBackStarted,
            Self::LoadBackEnded { .. } => EventName::LoadBackEnded,
            Self::PrefillEnded => EventName::PrefillEnded,
            Self::Retracted { .. } => EventName::Retracted,
            Self::Kept(_) => EventName::Kept,
            Self::Completed => EventName::Completed,
            Self::WriteBackStarted(..) => EventName::WriteBackStarted,
            Self::Drained => EventName::Drained,
            Self::Abort => EventName::Abort,
            Self::Fail(_) => EventName::Fail,
        }
    }
}

impl StateName {
    /// The state that an event leads to; nothing if the event is illegal here.
    #[must_use]
    pub fn after(self, event: EventName) -> Option<StateName> {
        use EventName as E;
        match (self, event) {
            (state, _) if state.is_end() => None,
            (_, E::Abort) => Some(Self::Aborted),
            (_, E::Fail) => Some(Self::Failed),
            (Self::Submitted | Self::Retracted, E::ProbeStarted | E::ProbeEnded) => Some(self),
            (Self::Submitted | Self::Retracted, E::PrefetchStarted) => Some(Self::Prefetching),
            (Self::Prefetching, E::PrefetchEnded) => Some(Self::PrefetchDone),
            (Self::PrefetchDone, E::PrefetchStarted) => Some(Self::Prefetching),
            (
                Self::Prefetching | Self::PrefetchDone | Self::Prefilling | Self::Retracted,
                E::PinsYielded,
            ) => Some(self),
            (Self::Prefilling, E::PrefetchStarted | E::PrefetchEnded) => Some(self),
            (Self::Submitted | Self::PrefetchDone | Self::Retracted, E::Admitted) => {
                Some(Self::Prefilling)
            }
            (Self::Prefilling | Self::Decoding, E::Grow | E::Computed) => Some(self),
            (Self::Prefilling, E::LoadBackStarted | E::LoadBackEnded) => Some(Self::Prefilling),
            (Self::Prefilling, E::PrefillEnded) => Some(Self::Decoding),
            (Self::Prefilling | Self::Decoding, E::Retracted) => Some(Self::Retracted),
            (Self::Retracted, E::Kept) => Some(Self::Retracted),
            (Self::Prefilling | Self::Decoding, E::Completed) => Some(Self::Draining),
            (Self::Draining, E::WriteBackStarted) => Some(Self::WritingBack),
            (Self::Draining | Self::WritingBack, E::Drained) => Some(Self::Finished),
            _ => None,
        }
    }
}
