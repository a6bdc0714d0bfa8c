//! The batch: requests that compute, and their slots.

use terrace_fsm::Slot;

use crate::ids::Handle;
use crate::requests::{Entry, Requests};

/// Requests with a slot.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Running requests by admission. Some may have left since the last plan.
    running: Vec<Handle>,
    /// True if some have left.
    some_left: bool,
    /// Running requests that prefill, by admission.
    prefilling: Vec<Handle>,
    free_slots: Vec<Slot>,
    /// Current or last holder of each slot.
    holders: Vec<Option<Handle>>,
}

impl Batch {
    pub(crate) fn new(running_max: u32) -> Self {
        Self {
            running: Vec::new(),
            some_left: false,
            prefilling: Vec::new(),
            free_slots: (0..running_max).rev().map(Slot).collect(),
            holders: vec![None; running_max as usize],
        }
    }

    pub(crate) fn take_slot(&mut self) -> Option<Slot> {
        self.free_slots.pop()
    }

    /// Adds a request that prefills in a slot taken before.
    pub(crate) fn join(&mut self, handle: Handle, slot: Slot) {
        self.holders[slot.0 as usize] = Some(handle);
        self.running.push(handle);
        self.prefilling.push(handle);
    }

    /// Moves a request from prefill to decode.
    pub(crate) fn prefill_ended(&mut self, handle: Handle) {
        self.prefilling.retain(|&other| other != handle);
    }

    /// Frees the slot of a request.
    pub(crate) fn leave(&mut self, handle: Handle, slot: Slot, prefills: bool) {
        self.free_slots.push(slot);
        if prefills {
            self.prefill_ended(handle);
        }
        self.some_left = true;
    }

    /// Removes requests that no longer compute.
    pub(crate) fn remove_departed(&mut self, requests: &Requests) {
        if std::mem::take(&mut self.some_left) {
            let computes = |entry: &Entry| entry.life.state().computing().is_some();
            self.running.retain(|&handle| requests.get(handle).is_some_and(computes));
        }
    }

    /// Running requests by admission.
    pub(crate) fn running(&self) -> &[Handle] {
        &self.running
    }

    /// Requests that prefill, by admission.
    pub(crate) fn prefilling(&self) -> &[Handle] {
        &self.prefilling
    }

    pub(crate) fn free_slots(&self) -> &[Slot] {
        &self.free_slots
    }

    /// Current or last holder of a slot.
    pub(crate) fn holder(&self, slot: Slot) -> Option<Handle> {
        self.holders[slot.0 as usize]
    }
}
