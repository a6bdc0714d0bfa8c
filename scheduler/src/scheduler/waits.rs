//! Ends of waits: timers that run out, and requests that continue without the awaited event.

use terrace_cache::HostPin;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, FailReason, State, StateName, Time};

use super::Scheduler;
use crate::deferred::Wake;
use crate::ids::Handle;
use crate::wait::Wait;

impl Scheduler {
    /// Ends the wait of a request whose timer has run out.
    pub(super) fn expire(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        if entry.start_by().is_some_and(|start_by| start_by <= self.now) {
            self.end(handle, LifeEvent::Fail(FailReason::TimedOut));
            return;
        }
        match entry.wait() {
            Wait::Admission { .. } => self.requests.wait(handle, Wait::ADMISSION),
            Wait::Deferred { wake, .. } => {
                if wake == Wake::Share {
                    self.requests[handle].patience.end_for_share();
                }
                self.requests.wait(handle, Wait::ADMISSION);
            }
            // The prefetch continues while the request is queued for admission.
            Wait::Prefetch { .. } if self.fetches_in_line(handle) => {
                self.requests.wait(handle, Wait::ADMISSION);
            }
            Wait::ProbeQueued
            | Wait::Probe { .. }
            | Wait::PrefetchQueued { .. }
            | Wait::Prefetch { .. }
            | Wait::LoadBack { .. }
            | Wait::Step { .. }
            | Wait::WriteBack { .. } => self.on_timeout(handle),
        }
    }

    /// Ends a wait that takes too long.
    pub(super) fn on_timeout(&mut self, handle: Handle) {
        self.note_late_l3(handle);
        self.end_wait(handle);
    }

    /// Lets the request continue without the event that it waits for.
    pub(super) fn end_wait(&mut self, handle: Handle) {
        match self.requests[handle].wait() {
            Wait::ProbeQueued => self.requests.wait(handle, Wait::ADMISSION),
            Wait::PrefetchQueued { .. } => self.end_prefetch_wait(handle),
            Wait::Probe { .. } => {
                self.abandon_operation(handle);
                self.transition(handle, LifeEvent::ProbeEnded);
                self.requests.wait(handle, Wait::ADMISSION);
            }
            Wait::Prefetch { .. } | Wait::Admission { .. } | Wait::Deferred { .. } => {
                self.stop_fetching(handle);
            }
            Wait::LoadBack { .. } => self.compute_instead_of_loading(handle),
            Wait::Step { .. } => self.requests.wait(handle, Wait::STEP),
            Wait::WriteBack { .. } => self.stop_draining(handle),
        }
    }

    /// Lets the request continue without its prefetch.
    pub(super) fn stop_fetching(&mut self, handle: Handle) {
        match self.requests[handle].state() {
            StateName::Prefetching | StateName::Prefilling => {
                self.abandon_operation(handle);
                self.requests[handle].l3.set_found(None);
                self.transition(handle, LifeEvent::PrefetchEnded { path: None });
                self.prefetch_settled(handle);
            }
            StateName::Submitted
            | StateName::PrefetchDone
            | StateName::Decoding
            | StateName::Retracted
            | StateName::Draining
            | StateName::WritingBack
            | StateName::Finished
            | StateName::Aborted
            | StateName::Failed => self.requests.wait(handle, Wait::ADMISSION),
        }
    }

    /// Takes a request out of the admission queue until an event or a time.
    pub(super) fn defer(&mut self, handle: Handle, until: Option<Time>, wake: Wake) {
        let waiting = match planted(Bug::DeferredFillWindow) {
            true => Wait::Admission { recheck: until },
            false => Wait::Deferred { until, wake },
        };
        self.requests.wait(handle, waiting);
    }

    /// Sets a timer for a queued request, or for one that sits out a step, unless it has one.
    pub(super) fn recheck_by(&mut self, handle: Handle, until: Time) {
        match self.requests[handle].wait() {
            Wait::Admission { recheck: None } => {
                self.requests.wait(handle, Wait::Admission { recheck: Some(until) });
            }
            Wait::Step { room_by: None } => {
                self.requests.wait(handle, Wait::Step { room_by: Some(until) });
            }
            Wait::Admission { recheck: Some(_) } | Wait::Step { room_by: Some(_) } => {}
            Wait::ProbeQueued
            | Wait::Probe { .. }
            | Wait::PrefetchQueued { .. }
            | Wait::Prefetch { .. }
            | Wait::Deferred { .. }
            | Wait::LoadBack { .. }
            | Wait::WriteBack { .. } => unreachable!("the request is not queued and in no step"),
        }
    }

    /// Starts a back-off of L3 if it keeps the request waiting, and notes the missing page.
    pub(super) fn note_late_l3(&mut self, handle: Handle) {
        let Some(reads) = &mut self.l3_reads else { return };
        let entry = &self.requests[handle];
        match entry.life.state() {
            State::Submitted { probe: Some(_) } | State::Retracted { probe: Some(_), .. } => {
                reads.note_late_probe(self.now);
                self.operations.note_late_probe();
            }
            State::Prefetching { start_page, .. } => {
                reads.note_late_prefetch(&entry.sequence, *start_page, self.now);
            }
            State::Prefilling(computing) if matches!(entry.wait(), Wait::Prefetch { .. }) => {
                let start_page =
                    computing.unloaded.as_ref().map_or(computing.path.depth(), HostPin::depth);
                reads.note_late_prefetch(&entry.sequence, start_page, self.now);
            }
            State::Submitted { probe: None }
            | State::PrefetchDone { .. }
            | State::Prefilling(_)
            | State::Decoding(_)
            | State::Retracted { probe: None, .. }
            | State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_) => {}
        }
    }
}
