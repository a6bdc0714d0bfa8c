//! Replacement of the weights while requests are live. KV of the old weights is of no use.

use terrace_cache::Cursor;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, State, StateName, Time};

use super::Scheduler;
use crate::error::StepsInFlight;
use crate::ids::Handle;
use crate::namespaces::Namespaces;
use crate::wait::Wait;

impl Scheduler {
    /// Replaces the weights of the model; `fingerprint` names them like
    /// [`ModelConfig::fingerprint`](crate::ModelConfig::fingerprint). Running requests give up their pages and
    /// compute all their tokens again, prompt and answer, in their turn. Nothing that was computed or fetched before
    /// is matched any more on any tier. Such pages are removed when no operation holds them, and are not stored in
    /// L3. Requests that have all their tokens end as usual.
    ///
    /// # Errors
    /// If a step is in flight: report it first. Nothing has changed then.
    pub fn replace_weights(&mut self, now: Time, fingerprint: &str) -> Result<(), StepsInFlight> {
        if self.steps.has_unreported() {
            return Err(StepsInFlight);
        }
        self.now = self.now.max(now);
        self.end_steps_without_load_backs();
        fingerprint.clone_into(&mut self.config.model.fingerprint);
        self.namespaces = Namespaces::new(&self.config);
        let live: Vec<Handle> = self.requests.iter().map(|entry| entry.handle).collect();
        for handle in live {
            if self.release_kv(handle) {
                self.restart(handle);
            }
        }
        self.batch.remove_departed(&self.requests);
        self.forget_drains();
        while self.skip_oldest_backup() {}
        if !planted(Bug::KeepPagesOfOldWeights) {
            self.operations.make_all_stale();
        }
        self.cache.clear();
        Ok(())
    }

    /// Releases all KV that a request holds or waits for. Returns false if the request needs no KV any more.
    fn release_kv(&mut self, handle: Handle) -> bool {
        match self.requests[handle].life.state() {
            State::Prefilling(computing) | State::Decoding(computing) => {
                self.stats.retractions += 1;
                let kept = self.cache.pin_host_along(&computing.path);
                self.abandon_operation(handle);
                self.leave_batch(handle);
                self.transition(handle, LifeEvent::Retracted { kept, write_back: None });
            }
            State::Retracted { write_back: Some(_), .. } => {
                // The copy continues without the request.
                self.abandon_operation(handle);
                let nothing =
                    self.cache.pin_host(self.requests[handle].sequence.root(), Cursor::START);
                self.transition(handle, LifeEvent::Kept(nothing));
            }
            State::Submitted { .. }
            | State::Prefetching { .. }
            | State::PrefetchDone { .. }
            | State::Retracted { write_back: None, .. } => {
                if let Wait::Probe { .. } | Wait::Prefetch { .. } = self.requests[handle].wait() {
                    self.end_wait(handle);
                } else if self.requests[handle].state() == StateName::Prefetching {
                    self.stop_fetching(handle);
                }
            }
            State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_) => return false,
        }
        if self.requests[handle].holds_while_waiting() {
            self.transition(handle, LifeEvent::PinsYielded);
        }
        true
    }

    /// Restarts a request with the tokens that it has.
    fn restart(&mut self, handle: Handle) {
        self.release_fetched(handle);
        let adapter = self.adapter(self.requests[handle].adapter).unwrap_or_default();
        let root = self.namespace_of(adapter, &self.requests[handle].salt);
        let entry = &mut self.requests[handle];
        if !planted(Bug::KeepOldKeys) {
            entry.sequence = entry.sequence.under(root);
        }
        entry.patience.set_for_producer(None);
        entry.reset_lookups();
        self.requests.wait(handle, Wait::ADMISSION);
    }
}
