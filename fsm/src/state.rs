//! States of a request and the resources that each of them owns.

use serde::{Deserialize, Serialize};
use terrace_cache::{Cache, Claims, DevicePages, DevicePin, HostPin};

use crate::ids::{OpId, Slot};

/// Lifecycle state of a request, with the resources that it owns.
#[derive(Debug)]
pub enum State {
    /// In the queue; a probe of L3 may be in flight.
    Submitted {
        /// The probe in flight.
        probe: Option<OpId>,
    },
    /// Waits for pages from L3. The prefetch owns its destination pages; the request pins the path before them.
    Prefetching {
        /// The prefetch in flight.
        op: OpId,
        /// Index of its first page.
        start_page: u32,
        /// Pin of the pages before it.
        path: Option<HostPin>,
    },
    /// In the queue again, with the prefetched pages on host.
    PrefetchDone {
        /// Pin of the path as far as it is on host.
        path: Option<HostPin>,
    },
    /// Computes its prompt, chunk by chunk.
    Prefilling(Computing),
    /// Produces tokens.
    Decoding(Computing),
    /// Gave up its device memory; in the queue again. A probe of L3 for the lost pages may be in flight.
    Retracted {
        /// Pin of the pages that are on host.
        kept: Option<HostPin>,
        /// The write-back in flight.
        write_back: Option<OpId>,
        /// The probe in flight; only without a write-back.
        probe: Option<OpId>,
    },
    /// Has all its tokens; its pages may still be copied to host.
    Draining {
        /// Pin of its device pages.
        path: DevicePin,
    },
    /// Waits for its write-back, which owns its pins and pages.
    WritingBack {
        /// The write-back in flight.
        op: OpId,
    },
    /// Ended with all its tokens.
    Finished,
    /// Ended by the client.
    Aborted,
    /// Ended by a failure.
    Failed(FailReason),
}

/// Resources of a request while the engine computes it.
#[derive(Debug)]
pub struct Computing {
    /// Row in the engine's page table.
    pub slot: Slot,
    /// Pin of the pages that are published in the tree.
    pub path: DevicePin,
    /// Pages behind those, which no other request sees.
    pub tail: DevicePages,
    /// Load-back or prefetch that the request waits for.
    pub transfer: Option<OpId>,
    /// Pin of the host pages that are still to be loaded.
    pub unloaded: Option<HostPin>,
}

impl Computing {
    /// Number of device pages: published ones and its own.
    #[must_use]
    pub fn device_pages(&self) -> u32 {
        self.path.depth() + self.tail.len() as u32
    }
}

/// Reason of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailReason {
    /// The request took longer than the configured limit.
    TimedOut,
    /// The engine failed to compute the request too often.
    StepFailed,
}

/// Name of a state.
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
    /// Every state, in the order of a lifecycle without failures.
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

    /// Returns true for the states in which a request has ended.
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
    /// Name of the state.
    #[must_use]
    #[inline]
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
        }
    }

    /// Resources of a computing request.
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
            | Self::Failed(_) => None,
        }
    }

    /// Pin of a draining request.
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
            | Self::Failed(_) => None,
        }
    }

    /// Operation that the request waits for.
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
            | Self::Failed(_) => None,
        }
    }

    /// Adds the resources of the state to the claims of an audit.
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
            | Self::Failed(_) => {}
        }
    }
}

impl Computing {
    /// Returns all resources to the cache.
    pub fn release(mut self, cache: &mut Cache) {
        self.keep_unloaded(None, cache);
        cache.unpin_device(self.path);
        cache.give_device_pages(self.tail);
    }

    /// Replaces the pin of the host pages that are still to be loaded.
    pub(crate) fn keep_unloaded(&mut self, unloaded: Option<HostPin>, cache: &mut Cache) {
        if let Some(before) = std::mem::replace(&mut self.unloaded, unloaded) {
            cache.unpin_host(before);
        }
    }

    /// Adds the resources to the claims of an audit.
    pub fn claim(&self, claims: &mut Claims) {
        claims.device_pin(&self.path);
        claims.device_pages(&self.tail);
        if let Some(unloaded) = &self.unloaded {
            claims.host_pin(unloaded);
        }
    }
}
