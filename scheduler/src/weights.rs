//! New weights while requests live: KV of the old ones is of no use to anybody from then on.

use terrace_cache::Cursor;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, Handover, State, StateName, Time};

use crate::error::StepsInFlight;
use crate::namespaces::Namespaces;
use crate::requests::Handle;
use crate::scheduler::Scheduler;
use crate::waiting::Waiting;

impl Scheduler {
    /// The model computes with other weights from here on; `fingerprint` names them as
    /// [`ModelConfig::fingerprint`](crate::ModelConfig::fingerprint) does. Whoever runs gives up its pages and computes
    /// its tokens again, prompt and answer, in its turn; nothing that was computed or fetched before is matched
    /// any more, on any tier. Its pages leave as soon as no operation holds them, and are not stored in L3. Those
    /// who have all their tokens end as they would have.
    ///
    /// # Errors
    /// When a step is in flight: report it first. Nothing has changed then.
    pub fn replace_weights(&mut self, now: Time, fingerprint: &str) -> Result<(), StepsInFlight> {
        if self.steps.are_owed() {
            return Err(StepsInFlight);
        }
        self.now = self.now.max(now);
        self.end_steps_without_load_backs();
        fingerprint.clone_into(&mut self.config.model.fingerprint);
        self.namespaces = Namespaces::new(&self.config);
        let live: Vec<Handle> = self.requests.iter().map(|entry| entry.handle).collect();
        for handle in live {
            if self.let_go_of_kv(handle) {
                self.begin_anew(handle);
            }
        }
        self.batch.forget_who_left(&self.requests);
        self.forget_drains();
        while self.skip_oldest_backup() {}
        if !planted(Bug::KeepPagesOfOldWeights) {
            self.operations.make_all_stale();
        }
        self.cache.clear();
        Ok(())
    }

    /// Lets a request give up all KV that it holds or waits for. False if it needs none any more.
    fn let_go_of_kv(&mut self, handle: Handle) -> bool {
        match self.requests[handle].life.state() {
            State::Prefilling(computing) | State::Decoding(computing) => {
                self.stats.retractions += 1;
                let kept = Handover::of(self.cache.pin_host_along(&computing.path));
                self.abandon_operation(handle);
                self.leave_batch(handle);
                self.happen(handle, &LifeEvent::Retracted { kept, write_back: None });
            }
            State::Retracted { write_back: Some(_), .. } => {
                // The copy goes on, and is not kept for this request any more.
                self.abandon_operation(handle);
                let nothing =
                    self.cache.pin_host(self.requests[handle].sequence.root(), Cursor::START);
                self.happen(handle, &LifeEvent::Kept(Handover::of(nothing)));
            }
            State::Submitted { .. }
            | State::Prefetching { .. }
            | State::PrefetchDone { .. }
            | State::Retracted { write_back: None, .. } => {
                if let Waiting::Asking { .. } | Waiting::Fetching { .. } =
                    self.requests[handle].waiting()
                {
                    self.stop_waiting(handle);
                } else if self.requests[handle].state() == StateName::Prefetching {
                    self.stop_fetching(handle);
                }
            }
            State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_)
            | State::Left => return false,
        }
        if self.requests[handle].holds_while_waiting() {
            self.happen(handle, &LifeEvent::PinsYielded);
        }
        true
    }

    /// A request is as if it had just come, with the tokens that it has.
    fn begin_anew(&mut self, handle: Handle) {
        self.release_fetched(handle);
        let adapter = self.adapter(self.requests[handle].adapter).unwrap_or_default();
        let root = self.namespace_of(adapter, &self.requests[handle].salt);
        let entry = &mut self.requests[handle];
        if !planted(Bug::KeepOldKeys) {
            entry.sequence = entry.sequence.under(root);
        }
        entry.sharing = None;
        entry.forget_lookups();
        self.requests.wait(handle, Waiting::IN_LINE);
    }
}
