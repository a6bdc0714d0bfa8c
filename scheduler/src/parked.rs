//! Deferred requests: those that could be admitted but for something that an event brings. They are outside the line
//! until it does, so that they neither fill the admission window nor are polled.

use std::collections::BTreeSet;

use crate::adapters::AdapterId;
use crate::requests::Handle;

/// Event that puts a deferred request back in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// Another request has brought the pages before this one, or brings none any more.
    Provider { provider: Handle, page: u32 },
    /// A load-back has ended, and its part of the share is free.
    Share,
    /// A load-back has ended, and what it brought is on the device.
    Arrival,
    /// An adapter has left the batch, or its own has joined it.
    Adapter(AdapterId),
}

/// Deferred requests by the event that wakes them.
#[derive(Debug, Default)]
pub(crate) struct Parked {
    followers: BTreeSet<(Handle, u32, Handle)>,
    for_load_backs: BTreeSet<Handle>,
    for_adapters: BTreeSet<Handle>,
    by_adapter: BTreeSet<(AdapterId, Handle)>,
}

impl Parked {
    pub(crate) fn insert(&mut self, handle: Handle, wake: Wake) {
        match wake {
            Wake::Provider { provider, page } => {
                _ = self.followers.insert((provider, page, handle))
            }
            Wake::Share | Wake::Arrival => _ = self.for_load_backs.insert(handle),
            Wake::Adapter(adapter) => {
                self.for_adapters.insert(handle);
                self.by_adapter.insert((adapter, handle));
            }
        }
    }

    pub(crate) fn remove(&mut self, handle: Handle, wake: Wake) {
        match wake {
            Wake::Provider { provider, page } => {
                _ = self.followers.remove(&(provider, page, handle))
            }
            Wake::Share | Wake::Arrival => _ = self.for_load_backs.remove(&handle),
            Wake::Adapter(adapter) => {
                self.for_adapters.remove(&handle);
                self.by_adapter.remove(&(adapter, handle));
            }
        }
    }

    /// Returns a request that waits for pages of this provider up to `page`.
    pub(crate) fn follower(&self, provider: Handle, page: u32) -> Option<Handle> {
        let first = (provider, 0, Handle::FIRST);
        self.followers.range(first..=(provider, page, Handle::LAST)).next().map(|&(_, _, it)| it)
    }

    /// Returns a request that waits for load-backs to end.
    pub(crate) fn first_for_load_back(&self) -> Option<Handle> {
        self.for_load_backs.first().copied()
    }

    /// Returns the request that has waited longest for a place for its adapter.
    pub(crate) fn first_for_adapter(&self) -> Option<Handle> {
        self.for_adapters.first().copied()
    }

    /// Returns a request that waits for this adapter.
    pub(crate) fn first_with_adapter(&self, adapter: AdapterId) -> Option<Handle> {
        let range = (adapter, Handle::FIRST)..=(adapter, Handle::LAST);
        self.by_adapter.range(range).next().map(|&(_, handle)| handle)
    }

    /// Number of deferred requests.
    pub(crate) fn len(&self) -> usize {
        self.followers.len() + self.for_load_backs.len() + self.for_adapters.len()
    }
}
