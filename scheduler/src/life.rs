//! The life of a request: what happens to it, how it ends, and what is told of that.

use std::collections::VecDeque;

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, OpId, RequestId, State, StateName, Transition};

use crate::plan::Ended;
use crate::requests::{Handle, Requests};
use crate::scheduler::Scheduler;

/// What has happened to requests and has not been told yet.
#[derive(Debug)]
pub(crate) struct News {
    completed: Vec<RequestId>,
    ended: Vec<Ended>,
    trace: VecDeque<Transition>,
    trace_max: usize,
}

impl News {
    pub(crate) fn new(trace_max: u32) -> Self {
        Self {
            completed: Vec::new(),
            ended: Vec::new(),
            trace: VecDeque::new(),
            trace_max: trace_max as usize,
        }
    }

    /// The request has all that it was to have.
    pub(crate) fn completed(&mut self, request: RequestId) {
        self.completed.push(request);
    }

    pub(crate) fn tell_completed(&mut self, into: &mut Vec<RequestId>) {
        into.append(&mut self.completed);
    }

    /// Tells who has ended; their ids may be used again.
    pub(crate) fn tell_ended(&mut self, requests: &mut Requests, into: &mut Vec<Ended>) {
        self.ended.iter().for_each(|ended| requests.end_told(ended.request));
        into.append(&mut self.ended);
    }

    /// How many ends have not been told.
    pub(crate) fn ends_untold(&self) -> usize {
        self.ended.len()
    }

    pub(crate) fn drain_trace(&mut self) -> impl Iterator<Item = Transition> + '_ {
        self.trace.drain(..)
    }

    fn trace(&mut self, transition: Transition) {
        if self.trace.len() == self.trace_max {
            self.trace.pop_front();
        }
        self.trace.push_back(transition);
    }
}

impl Scheduler {
    /// Lets something happen to a request that stays alive.
    pub(crate) fn happen(&mut self, handle: Handle, event: &LifeEvent<'_>) {
        let entry = self.requests.get_mut(handle).expect("a live request");
        let (from, to) = entry.life.handle(event, &mut self.cache);
        if from != to && self.news.trace_max > 0 {
            let (at, request) = (self.now, entry.id);
            self.news.trace(Transition { at, request, from, event: event.name(), to });
        }
    }

    /// Lets a request's life end, and takes it out of everything it is part of.
    pub(crate) fn end(&mut self, handle: Handle, event: &LifeEvent<'_>) {
        self.abandon_operation(handle);
        self.release_fetched(handle);
        self.leave_batch(handle);
        match self.requests[handle].state() {
            StateName::Draining | StateName::WritingBack => self.drains.one_ended(),
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
        self.happen(handle, event);
        let entry = &self.requests[handle];
        let reason = match entry.life.state() {
            State::Failed(reason) => Some(*reason),
            _ => None,
        };
        let (request, state, adapter) = (entry.id, entry.state(), entry.adapter);
        match state {
            StateName::Finished => self.stats.finished += 1,
            StateName::Aborted => self.stats.aborted += 1,
            StateName::Failed => self.stats.failed += 1,
            other => unreachable!("{other:?} is no end"),
        }
        self.news.ended.push(Ended { request, state, reason });
        self.requests.remove(handle);
        self.adapters.went(adapter);
    }

    /// Nobody waits for the request's operation any more. Copies to host go on for the cache's
    /// sake; the others may be stopped.
    pub(crate) fn abandon_operation(&mut self, handle: Handle) {
        let state = self.requests[handle].life.state();
        let Some(op) = state.operation() else { return };
        match state {
            // Others in the step would wait in vain for what is called off.
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
            | State::Failed(_)
            | State::Left => {}
        }
        self.loosen_anchor(handle, op);
        self.operations.abandon(op);
        if planted(Bug::ReuseAfterDeadline)
            && let Some(pages) = self.operations.take_destination(op)
        {
            self.cache.give_host_pages(pages);
        }
    }

    /// Whether the request is alive and waits for this operation.
    pub(crate) fn waits_for(&self, handle: Handle, op: OpId) -> bool {
        self.requests.get(handle).is_some_and(|entry| entry.life.state().operation() == Some(op))
    }
}
