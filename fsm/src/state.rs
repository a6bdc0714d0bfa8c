//! The states and what each of them owns.

use serde::{Deserialize, Serialize};
use terrace_cache::{Cache, Claims, DevicePages, DevicePin, HostPin};

use crate::ids::{OpId, Slot};

/// Where a request is in its life, and what it owns there.
#[derive(Debug)]
pub enum State {
    /// In the queue; a probe of L3 may be in flight.
    Submitted {
        /// The probe in flight.
        probe: Option<OpId>,
    },
    /// Waits for pages from L3. The operation owns its destination pages; the request keeps the
    /// path that they will continue.
    Prefetching {
        /// The prefetch in flight.
        op: OpId,
        /// The place of its first page.
        start_page: u32,
        /// Keeps the pages before it.
        path: Option<HostPin>,
    },
    /// In the queue again, with the prefetched pages on host.
    PrefetchDone {
        /// Keeps the path as far as it is on host.
        path: Option<HostPin>,
    },
    /// Computes its prompt, chunk by chunk.
    Prefilling(Computing),
    /// Produces tokens.
    Decoding(Computing),
    /// Gave up its device memory; in the queue again. L3 may be asked for what it has lost.
    Retracted {
        /// Keeps what is on host.
        kept: Option<HostPin>,
        /// The copy to host that is still in flight.
        write_back: Option<OpId>,
        /// The probe in flight, once no copy is.
        probe: Option<OpId>,
    },
    /// Has all its tokens; its pages may yet be copied to host.
    Draining {
        /// Keeps its pages on device.
        path: DevicePin,
    },
    /// Waits for its write-back, which owns the pins and pages.
    WritingBack {
        /// The write-back in flight.
        op: OpId,
    },
    /// Came to its end.
    Finished,
    /// Was called off.
    Aborted,
    /// Could not go on.
    Failed(FailReason),
    /// What a state is for the moment between handing its things on and being replaced.
    Left,
}

/// What a request owns while the engine works on it.
#[derive(Debug)]
pub struct Computing {
    /// Its row in the engine's page table.
    pub slot: Slot,
    /// Keeps the pages that are published in the tree.
    pub path: DevicePin,
    /// The pages behind those, its own alone.
    pub tail: DevicePages,
    /// The load-back or the prefetch that it waits for.
    pub transfer: Option<OpId>,
    /// Keeps the pages on host that it has still to load.
    pub unloaded: Option<HostPin>,
}

impl Computing {
    /// How many pages it has on device: published ones and its own.
    #[must_use]
    pub fn device_pages(&self) -> u32 {
        self.path.depth() + self.tail.len() as u32
    }
}

/// Why a request could not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailReason {
    /// It took longer than the configured limit.
    TimedOut,
    /// The engine failed to compute it too often.
    StepFailed,
}

/// A state without what it owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StateName {
    /// See [`State::Submitted`].
    Submitted,
    /// See [`State::Prefetching`].
    Prefetching,
    /// See [`State::PrefetchDone`].
    PrefetchDone,
    /// See [`State::Prefilling`].
    Prefilling,
    /// See [`State::Decoding`].
    Decoding,
    /// See [`State::Retracted`].
    Retracted,
    /// See [`State::Draining`].
    Draining,
    /// See [`State::WritingBack`].
    WritingBack,
    /// See [`State::Finished`].
    Finished,
    /// See [`State::Aborted`].
    Aborted,
    /// See [`State::Failed`].
    Failed,
}

impl StateName {
    /// Every state, in the order of a life without trouble.
    pub const ALL: [StateName; 11] = [
        Self::Submitted,
        Self::Prefetching,
        Self::PrefetchDone,
        Self::Prefilling,
        Self::Decoding,
        Self::Retracted,
        Self::Draining,
        Self::WritingBack,
        Self::Finished,
        Self::Aborted,
        Self::Failed,
    ];

    /// Whether the request's life is over.
    #[must_use]
    pub fn is_end(self) -> bool {
        match self {
            Self::Finished | Self::Aborted | Self::Failed => true,
            Self::Submitted
            | Self::Prefetching
            | Self::PrefetchDone
            | Self::Prefilling
            | Self::Decoding
            | Self::Retracted
            | Self::Draining
            | Self::WritingBack => false,
        }
    }
}

impl State {
    /// The state without what it owns.
    ///
    /// # Panics
    /// In the middle of a transition, where nobody can look.
    #[must_use]
    pub fn name(&self) -> StateName {
        match self {
            Self::Submitted { .. } => StateName::Submitted,
            Self::Prefetching { .. } => StateName::Prefetching,
            Self::PrefetchDone { .. } => StateName::PrefetchDone,
            Self::Prefilling(_) => StateName::Prefilling,
            Self::Decoding(_) => StateName::Decoding,
            Self::Retracted { .. } => StateName::Retracted,
            Self::Draining { .. } => StateName::Draining,
            Self::WritingBack { .. } => StateName::WritingBack,
            Self::Finished => StateName::Finished,
            Self::Aborted => StateName::Aborted,
            Self::Failed(_) => StateName::Failed,
            Self::Left => panic!("a state was looked at in the middle of its transition"),
        }
    }

    /// What the request owns while the engine works on it.
    #[must_use]
    pub fn computing(&self) -> Option<&Computing> {
        match self {
            Self::Prefilling(computing) | Self::Decoding(computing) => Some(computing),
            Self::Submitted { .. }
            | Self::Prefetching { .. }
            | Self::PrefetchDone { .. }
            | Self::Retracted { .. }
            | Self::Draining { .. }
            | Self::WritingBack { .. }
            | Self::Finished
            | Self::Aborted
            | Self::Failed(_)
            | Self::Left => None,
        }
    }

    /// The pages of a request that has all its tokens and whose copy to host has not begun.
    #[must_use]
    pub fn draining(&self) -> Option<&DevicePin> {
        match self {
            Self::Draining { path } => Some(path),
            Self::Submitted { .. }
            | Self::Prefetching { .. }
            | Self::PrefetchDone { .. }
            | Self::Prefilling(_)
            | Self::Decoding(_)
            | Self::Retracted { .. }
            | Self::WritingBack { .. }
            | Self::Finished
            | Self::Aborted
            | Self::Failed(_)
            | Self::Left => None,
        }
    }

    /// The operation that the request waits for.
    #[must_use]
    pub fn operation(&self) -> Option<OpId> {
        match self {
            Self::Submitted { probe } => *probe,
            Self::Retracted { write_back, probe, .. } => write_back.or(*probe),
            Self::Prefetching { op, .. } | Self::WritingBack { op } => Some(*op),
            Self::Prefilling(computing) => computing.transfer,
            Self::PrefetchDone { .. }
            | Self::Decoding(_)
            | Self::Draining { .. }
            | Self::Finished
            | Self::Aborted
            | Self::Failed(_)
            | Self::Left => None,
        }
    }

    /// Adds what the state owns to the claims of an audit.
    pub fn claim(&self, claims: &mut Claims) {
        match self {
            Self::Prefetching { path: pin, .. }
            | Self::PrefetchDone { path: pin }
            | Self::Retracted { kept: pin, .. } => {
                if let Some(pin) = pin {
                    claims.host_pin(pin);
                }
            }
            Self::Prefilling(computing) | Self::Decoding(computing) => computing.claim(claims),
            Self::Draining { path } => claims.device_pin(path),
            Self::Submitted { .. }
            | Self::WritingBack { .. }
            | Self::Finished
            | Self::Aborted
            | Self::Failed(_)
            | Self::Left => {}
        }
    }
}

impl Computing {
    /// Gives everything back.
    pub fn release(mut self, cache: &mut Cache) {
        self.keep_unloaded(None, cache);
        cache.unpin_device(self.path);
        cache.give_device_pages(self.tail);
    }

    /// Keeps other pages on host from here on, or none.
    pub(crate) fn keep_unloaded(&mut self, unloaded: Option<HostPin>, cache: &mut Cache) {
        if let Some(before) = std::mem::replace(&mut self.unloaded, unloaded) {
            cache.unpin_host(before);
        }
    }

    /// Adds what is owned to the claims of an audit.
    pub fn claim(&self, claims: &mut Claims) {
        claims.device_pin(&self.path);
        claims.device_pages(&self.tail);
        if let Some(unloaded) = &self.unloaded {
            claims.host_pin(unloaded);
        }
    }
}
