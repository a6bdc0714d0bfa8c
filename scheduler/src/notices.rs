//! Completions, ends and transitions of requests that have not been reported yet.

use std::collections::VecDeque;

use terrace_fsm::{RequestId, Transition};

use crate::plan::{Ended, Plan};
use crate::requests::Requests;

/// Completions and ends for the next plan, and the recorded transitions.
#[derive(Debug)]
pub(crate) struct Notices {
    completed: Vec<RequestId>,
    ended: Vec<Ended>,
    trace: VecDeque<Transition>,
    trace_max: usize,
}

impl Notices {
    pub(crate) fn new(trace_max: u32) -> Self {
        Self {
            completed: Vec::new(),
            ended: Vec::new(),
            trace: VecDeque::new(),
            trace_max: trace_max as usize,
        }
    }

    /// Notes that a request has all its tokens.
    pub(crate) fn note_completed(&mut self, request: RequestId) {
        self.completed.push(request);
    }

    /// Notes the end of a request.
    pub(crate) fn note_ended(&mut self, ended: Ended) {
        self.ended.push(ended);
    }

    /// Moves all completions and ends to the plan. The ids of ended requests may be used again.
    pub(crate) fn report(&mut self, requests: &mut Requests, plan: &mut Plan) {
        plan.completed.append(&mut self.completed);
        self.ended.iter().for_each(|ended| requests.free_id(ended.request));
        plan.ended.append(&mut self.ended);
    }

    /// Number of ends that no plan has reported yet.
    pub(crate) fn unreported_ends(&self) -> usize {
        self.ended.len()
    }

    /// Returns true if transitions are recorded.
    pub(crate) fn traces(&self) -> bool {
        self.trace_max > 0
    }

    /// Records a transition; the oldest one is dropped if there are too many.
    pub(crate) fn trace(&mut self, transition: Transition) {
        if self.trace.len() == self.trace_max {
            self.trace.pop_front();
        }
        self.trace.push_back(transition);
    }

    pub(crate) fn drain_trace(&mut self) -> impl Iterator<Item = Transition> + '_ {
        self.trace.drain(..)
    }
}
