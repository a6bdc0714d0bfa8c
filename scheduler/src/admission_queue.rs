//! Queue of the requests that may be admitted.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::admission_order::AdmissionOrder;
use crate::ids::Handle;

/// Requests that may be admitted, by priority and by arrival.
#[derive(Debug, Default)]
pub(crate) struct AdmissionQueue {
    by_priority: BTreeSet<(Reverse<i32>, Handle)>,
    by_arrival: BTreeSet<Handle>,
}

impl AdmissionQueue {
    pub(crate) fn insert(&mut self, handle: Handle, priority: i32) {
        self.by_priority.insert((Reverse(priority), handle));
        self.by_arrival.insert(handle);
    }

    pub(crate) fn remove(&mut self, handle: Handle, priority: i32) {
        self.by_priority.remove(&(Reverse(priority), handle));
        self.by_arrival.remove(&handle);
    }

    /// Queued requests by priority, highest first.
    pub(crate) fn priorities(&self) -> impl Iterator<Item = (i32, Handle)> {
        self.by_priority.iter().map(|&(Reverse(priority), handle)| (priority, handle))
    }

    /// Queued requests by arrival.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = Handle> {
        self.by_arrival.iter().copied()
    }

    /// First request in the given order.
    pub(crate) fn first(&self, order: AdmissionOrder) -> Option<Handle> {
        match order {
            AdmissionOrder::Priority => self.by_priority.first().map(|&(_, handle)| handle),
            AdmissionOrder::Arrival | AdmissionOrder::LongestPrefix => {
                self.by_arrival.first().copied()
            }
        }
    }

    /// Request of the highest priority.
    pub(crate) fn most_urgent(&self) -> Option<Handle> {
        self.first(AdmissionOrder::Priority)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_arrival.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_arrival.len()
    }
}
