//! Events of a request's lifecycle, and the transition table.

use serde::{Deserialize, Serialize};
use terrace_cache::{DevicePages, DevicePin, HostPin, PageRun, Published};

use crate::ids::OpId;
use crate::state::{Computing, FailReason, StateName};

/// An event, with the resources that it hands to the request.
#[derive(Debug)]
pub enum Event<'a> {
    /// A probe of L3 has started.
    ProbeStarted(OpId),
    /// The probe has ended, or the request no longer waits for it.
    ProbeEnded,
    /// A prefetch from L3 has started.
    PrefetchStarted {
        /// The prefetch.
        op: OpId,
        /// Index of its first page.
        start_page: u32,
        /// Pin of the pages before it.
        path: HostPin,
    },
    /// The wait for the prefetch is over.
    PrefetchEnded {
        /// Pin of the path as far as it is on host; with `None` the previous pin stays.
        path: Option<HostPin>,
    },
    /// The host pins are released, because they are not needed or their pages are needed elsewhere.
    PinsYielded,
    /// The request has a slot and memory.
    Admitted(Computing),
    /// The request takes more device pages of its own, if that many are free.
    /// Returns [`Output::Grown`].
    Grow {
        /// Number of pages.
        pages: usize,
    },
    /// The first pages of its own are computed and become visible to other requests.
    /// Returns [`Output::Published`].
    Computed {
        /// Keys and tokens of the pages.
        run: PageRun<'a>,
        /// Priority of the request.
        priority: i32,
    },
    /// A further load-back from host has started.
    /// Returns its destination pages in [`Output::Pages`].
    LoadBackStarted {
        /// The load-back.
        op: OpId,
        /// Number of the request's own pages that it writes to.
        pages: usize,
    },
    /// The wait for the load-back is over.
    LoadBackEnded {
        /// Pin of the path as far as it is on device; with `None` the previous pin stays.
        path: Option<DevicePin>,
    },
    /// The prompt is computed and the first token is known.
    PrefillEnded,
    /// The request gives up its device memory.
    /// Returns the pin of its device pages in [`Output::Path`] if a write-back takes it over.
    Retracted {
        /// Pin of the pages that are on host.
        kept: HostPin,
        /// Write-back of the other pages.
        write_back: Option<OpId>,
    },
    /// The write-back of a retracted request has ended; the pin covers its pages on host.
    Kept(HostPin),
    /// The request has all its tokens.
    Completed,
    /// The write-back of a completed request has started.
    /// Returns the pin of its device pages in [`Output::Path`].
    WriteBackStarted(OpId),
    /// No page is left to copy.
    Drained,
    /// The client has aborted the request.
    Abort,
    /// The request cannot continue.
    Fail(FailReason),
}

/// Result of an event: resources that the request hands out.
#[derive(Debug)]
pub enum Output {
    /// The event has no result.
    Nothing,
    /// True if the request got the pages that it asked for.
    Grown(bool),
    /// Pages that were published.
    Published(Published),
    /// Device pages that the request no longer owns.
    Pages(DevicePages),
    /// Pin that the request no longer owns.
    Path(DevicePin),
}

impl Output {
    /// Returns true if the request got the pages that it asked for.
    #[must_use]
    pub fn grown(&self) -> bool {
        matches!(self, Self::Grown(true))
    }

    /// Pages that were published.
    #[must_use]
    pub fn published(&self) -> Option<Published> {
        if let Self::Published(published) = self { Some(*published) } else { None }
    }

    /// Device pages that the request hands out.
    ///
    /// # Panics
    /// If the event hands out none.
    pub fn into_pages(self) -> DevicePages {
        if let Self::Pages(pages) = self { pages } else { panic!("no pages in {self:?}") }
    }

    /// Pin that the request hands out.
    ///
    /// # Panics
    /// If the event hands out none.
    pub fn into_path(self) -> DevicePin {
        if let Self::Path(path) = self { path } else { panic!("no pin in {self:?}") }
    }
}

/// Name of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each is documented at the event of the same name")]
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
    /// Name of the event.
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
            Self::WriteBackStarted(_) => EventName::WriteBackStarted,
            Self::Drained => EventName::Drained,
            Self::Abort => EventName::Abort,
            Self::Fail(_) => EventName::Fail,
        }
    }
}

impl StateName {
    /// State after an event; `None` if the event is illegal in this state. This is the only transition table: the
    /// state machine checks every event against it.
    #[must_use]
    #[inline]
    pub fn after(self, event: EventName) -> Option<StateName> {
        AFTER[event as usize][self as usize]
    }
}

/// States after each event, by event and state.
const AFTER: [[Option<StateName>; StateName::ALL.len()]; EventName::ALL.len()] = {
    let mut after = [[None; StateName::ALL.len()]; EventName::ALL.len()];
    let mut event = 0;
    while event < after.len() {
        let transitions = EventName::ALL[event].transitions();
        let mut nth = 0;
        while nth < transitions.len() {
            let (from, to) = transitions[nth];
            after[EventName::ALL[event] as usize][from as usize] = Some(to);
            nth += 1;
        }
        event += 1;
    }
    after
};

impl EventName {
    /// States in which the event is legal, each with the state after it.
    const fn transitions(self) -> &'static [(StateName, StateName)] {
        use StateName as S;
        match self {
            Self::ProbeStarted | Self::ProbeEnded => {
                &[(S::Submitted, S::Submitted), (S::Retracted, S::Retracted)]
            }
            Self::PrefetchStarted => &[
                (S::Submitted, S::Prefetching),
                (S::PrefetchDone, S::Prefetching),
                (S::Retracted, S::Prefetching),
                (S::Prefilling, S::Prefilling),
            ],
            Self::PrefetchEnded => {
                &[(S::Prefetching, S::PrefetchDone), (S::Prefilling, S::Prefilling)]
            }
            Self::PinsYielded => &[
                (S::Prefetching, S::Prefetching),
                (S::PrefetchDone, S::PrefetchDone),
                (S::Prefilling, S::Prefilling),
                (S::Retracted, S::Retracted),
            ],
            Self::Admitted => &[
                (S::Submitted, S::Prefilling),
                (S::PrefetchDone, S::Prefilling),
                (S::Retracted, S::Prefilling),
            ],
            Self::Grow | Self::Computed => {
                &[(S::Decoding, S::Decoding), (S::Prefilling, S::Prefilling)]
            }
            Self::LoadBackStarted | Self::LoadBackEnded => &[(S::Prefilling, S::Prefilling)],
            Self::PrefillEnded => &[(S::Prefilling, S::Decoding)],
            Self::Retracted => &[(S::Prefilling, S::Retracted), (S::Decoding, S::Retracted)],
            Self::Kept => &[(S::Retracted, S::Retracted)],
            Self::Completed => &[(S::Prefilling, S::Draining), (S::Decoding, S::Draining)],
            Self::WriteBackStarted => &[(S::Draining, S::WritingBack)],
            Self::Drained => &[(S::Draining, S::Finished), (S::WritingBack, S::Finished)],
            Self::Abort => &[
                (S::Submitted, S::Aborted),
                (S::Prefetching, S::Aborted),
                (S::PrefetchDone, S::Aborted),
                (S::Prefilling, S::Aborted),
                (S::Decoding, S::Aborted),
                (S::Retracted, S::Aborted),
                (S::Draining, S::Aborted),
                (S::WritingBack, S::Aborted),
            ],
            Self::Fail => &[
                (S::Submitted, S::Failed),
                (S::Prefetching, S::Failed),
                (S::PrefetchDone, S::Failed),
                (S::Prefilling, S::Failed),
                (S::Decoding, S::Failed),
                (S::Retracted, S::Failed),
                (S::Draining, S::Failed),
                (S::WritingBack, S::Failed),
            ],
        }
    }
}
