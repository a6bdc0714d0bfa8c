//! Deferred requests: requests that wait for an event before they can be admitted. They are outside the
//! admission queue until then, so that they neither fill its window nor are polled.

use std::collections::BTreeSet;

use crate::ids::{AdapterId, Handle};

/// Event that puts a deferred request back in the admission queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The producer has the pages before `page`, or stopped producing.
    Producer { producer: Handle, page: u32 },
    /// A load-back has ended and released its share of the budget.
    Share,
    /// A load-back has ended and its pages are on device.
    Arrival,
    /// Another adapter has left the batch, or this one has joined it.
    Adapter(AdapterId),
}

/// Deferred requests by the event that wakes them.
#[derive(Debug, Default)]
pub(crate) struct Deferred {
    followers: BTreeSet<(Handle, u32, Handle)>,
    for_load_backs: BTreeSet<Handle>,
    for_adapters: BTreeSet<Handle>,
    by_adapter: BTreeSet<(AdapterId, Handle)>,
}

impl Deferred {
    pub(crate) fn insert(&mut self, handle: Handle, wake: Wake) {
        match wake {
            Wake::Producer { producer, page } => {
                _ = self.followers.insert((producer, page, handle))
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
            Wake::Producer { producer, page } => {
                _ = self.followers.remove(&(producer, page, handle))
            }
            Wake::Share | Wake::Arrival => _ = self.for_load_backs.remove(&handle),
            Wake::Adapter(adapter) => {
                self.for_adapters.remove(&handle);
                self.by_adapter.remove(&(adapter, handle));
            }
        }
    }

    /// Returns a request that waits for pages of this producer up to `page`.
    pub(crate) fn follower(&self, producer: Handle, page: u32) -> Option<Handle> {
        let first = (producer, 0, Handle::FIRST);
        self.followers.range(first..=(producer, page, Handle::LAST)).next().map(|&(_, _, it)| it)
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
