//! The batch: who computes, and in which slots.

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Slot, StateName};

use crate::requests::{Entry, Handle, Requests};
use crate::scheduler::Scheduler;

/// Those who have a slot.
#[derive(Debug)]
pub(crate) struct Batch {
    /// By admission; some may have ended since the last plan.
    running: Vec<Handle>,
    /// Whether some have.
    some_left: bool,
    /// Those of them that prefill, by admission.
    prefilling: Vec<Handle>,
    free_slots: Vec<Slot>,
    /// Who has a slot, or had it last.
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

    /// A request prefills in the slot that was taken for it.
    pub(crate) fn join(&mut self, handle: Handle, slot: Slot) {
        self.holders[slot.0 as usize] = Some(handle);
        self.running.push(handle);
        self.prefilling.push(handle);
    }

    /// The request decodes from here on.
    pub(crate) fn prefill_ended(&mut self, handle: Handle) {
        self.prefilling.retain(|&other| other != handle);
    }

    fn leave(&mut self, handle: Handle, slot: Slot, prefills: bool) {
        self.free_slots.push(slot);
        if prefills {
            self.prefill_ended(handle);
        }
        self.some_left = true;
    }

    /// Those that no longer compute are not running.
    pub(crate) fn forget_who_left(&mut self, requests: &Requests) {
        if std::mem::take(&mut self.some_left) {
            let computes = |entry: &Entry| entry.life.state().computing().is_some();
            self.running.retain(|&handle| requests.get(handle).is_some_and(computes));
        }
    }

    /// Those who run, by admission.
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

    /// Who has the slot, or had it last.
    pub(crate) fn holder(&self, slot: Slot) -> Option<Handle> {
        self.holders[slot.0 as usize]
    }
}

impl Scheduler {
    /// Frees the slot of a request that computes; its memory is the caller's business.
    pub(crate) fn leave_batch(&mut self, handle: Handle) {
        self.stop_sharing(handle);
        let entry = &mut self.requests[handle];
        let goes_ahead = self.steps.go_ahead();
        if goes_ahead {
            entry.flying.cancel();
        }
        entry.loading_tokens = 0;
        let state = entry.life.state();
        if let Some(computing) = state.computing() {
            if goes_ahead && let Some(step) = self.steps.last_with(entry) {
                step.keep(self.cache.pin_again(&computing.path));
            }
            self.batch.leave(handle, computing.slot, state.name() == StateName::Prefilling);
            self.adapters.stops(entry.adapter);
            // It has used its pages up to this moment: they are no older than those of whoever came
            // and went meanwhile.
            if !planted(Bug::RankByAdmission) {
                self.cache.touch(&computing.path, false, entry.priority);
            }
        }
    }
}
