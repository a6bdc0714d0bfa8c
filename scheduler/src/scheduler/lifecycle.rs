//! Lifecycle events of a request, and its end.

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Change, Event as LifeEvent, OpId, Output, State, StateName, Transition};

use super::Scheduler;
use crate::ids::Handle;
use crate::plan::Ended;

impl Scheduler {
    /// Applies a lifecycle event to a request that stays alive, and records the transition.
    pub(super) fn transition(&mut self, handle: Handle, event: LifeEvent<'_>) -> Output {
        let entry = self.requests.get_mut(handle).expect("a live request");
        let name = event.name();
        let Change { from, to, output } = entry.life.handle(event, &mut self.cache);
        if from != to && self.notices.traces() {
            let (at, request) = (self.now, entry.id);
            self.notices.trace(Transition { at, request, from, event: name, to });
        }
        output
    }

    /// Ends a request and removes it from all parts of the scheduler.
    pub(super) fn end(&mut self, handle: Handle, event: LifeEvent<'_>) {
        self.abandon_operation(handle);
        self.release_fetched(handle);
        self.leave_batch(handle);
        match self.requests[handle].state() {
            StateName::Draining | StateName::WritingBack => {
                self.pending_write_backs.request_ended()
            }
            StateName::Submitted
            | StateName::Prefetching
            | StateName::PrefetchDone
            | StateName::Prefilling
            | StateName::Decoding
            | StateName::Retracted
            | StateName::Finished
            | StateName::Aborted
            | StateName::Failed => {}
        }
        self.transition(handle, event);
        let entry = &self.requests[handle];
        let reason = match entry.life.state() {
            State::Failed(reason) => Some(*reason),
            State::Submitted { .. }
            | State::Prefetching { .. }
            | State::PrefetchDone { .. }
            | State::Prefilling(_)
            | State::Decoding(_)
            | State::Retracted { .. }
            | State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted => None,
        };
        let (request, state, adapter) = (entry.id, entry.state(), entry.adapter);
        match state {
            StateName::Finished => self.stats.finished += 1,
            StateName::Aborted => self.stats.aborted += 1,
            StateName::Failed => self.stats.failed += 1,
            other => unreachable!("{other:?} is no end"),
        }
        self.notices.note_ended(Ended { request, state, reason });
        self.requests.remove(handle);
        self.adapters.release(adapter);
    }

    /// Detaches the request's operation from the request. Copies to host continue for the cache; the other
    /// operations are cancelled.
    pub(super) fn abandon_operation(&mut self, handle: Handle) {
        let state = self.requests[handle].life.state();
        let Some(op) = state.operation() else { return };
        match state {
            // The step waits for this load-back.
            State::Prefilling(_) if self.steps.read(op) => {}
            State::Submitted { .. }
            | State::Prefetching { .. }
            | State::Prefilling(_)
            | State::Retracted { probe: Some(_), .. } => self.operations.cancel(op),
            State::PrefetchDone { .. }
            | State::Decoding(_)
            | State::Retracted { probe: None, .. }
            | State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_) => {}
        }
        self.loosen_anchor(handle, op);
        self.operations.abandon(op);
        if planted(Bug::ReuseAfterDeadline)
            && let Some(pages) = self.operations.take_destination(op)
        {
            self.cache.give_host_pages(pages);
        }
    }

    /// Returns true if the request is alive and waits for this operation.
    pub(super) fn waits_for(&self, handle: Handle, op: OpId) -> bool {
        self.requests.get(handle).is_some_and(|entry| entry.life.state().operation() == Some(op))
    }

    /// Removes a request from the batch and frees its slot. Its memory stays with its state.
    pub(super) fn leave_batch(&mut self, handle: Handle) {
        self.stop_sharing(handle);
        let entry = &mut self.requests[handle];
        let goes_ahead = self.steps.go_ahead();
        if goes_ahead {
            entry.in_flight.cancel();
        }
        entry.loading_tokens = 0;
        let state = entry.life.state();
        if let Some(computing) = state.computing() {
            if goes_ahead && let Some(step) = self.steps.last_with(entry) {
                step.keep(self.cache.pin_again(&computing.path));
            }
            self.batch.leave(handle, computing.slot, state.name() == StateName::Prefilling);
            self.adapters.stops(entry.adapter);
            // The request has used its pages until now: they are no older than those of requests that came and
            // ended meanwhile.
            if !planted(Bug::RankByAdmission) {
                self.cache.touch(&computing.path, false, entry.priority);
            }
        }
    }
}
