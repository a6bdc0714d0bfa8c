//! The steps in flight.
//!
//! A step may be planned while another runs. If a step fails, the steps behind it are void, because they depend
//! on its results. A request that leaves the batch meanwhile keeps the pages that steps in flight may read or
//! write pinned until the last of them has ended.
//!
//! A step may start before the load-backs that it reads from have ended. If it is reported before they are, its
//! report is held back until then: its results are void if they fail.

use std::collections::VecDeque;
use std::time::Duration;

use terrace_cache::{Cache, Claims};
use terrace_fsm::{OpId, RequestId, Time};

use crate::config::Config;
use crate::error::EventError;
use crate::event::StepResult;
use crate::ids::{Handle, StepId};
use crate::plan::Plan;
use crate::requests::{Entry, Requests};
use crate::results::{Report, ResultIndex, take_next};
use crate::step::{Member, Step};

/// The steps in flight, in order.
#[derive(Debug)]
pub(crate) struct Steps {
    /// Maximum number of steps in flight.
    steps_max: usize,
    /// True if steps are planned while others are in flight, or start before their load-backs have ended.
    go_ahead: bool,
    in_flight: VecDeque<Step>,
    /// Reports of the first steps, held back.
    held: VecDeque<Report>,
    next: u64,
    /// Ended steps, whose memory is reused.
    spare: Vec<Step>,
    index: ResultIndex,
    /// End of the last step.
    last_end: Time,
    /// Number of steps with prefills alone since the last other step.
    prefill_streak: u32,
}

impl Steps {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            steps_max: config.batch.steps_in_flight_max as usize,
            go_ahead: config.batch.steps_in_flight_max > 1 || config.copies.load_back_overlaps,
            in_flight: VecDeque::new(),
            held: VecDeque::new(),
            next: 0,
            spare: Vec::new(),
            index: ResultIndex::default(),
            last_end: Time::default(),
            prefill_streak: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns true if a step has not been reported.
    pub(crate) fn has_unreported(&self) -> bool {
        self.in_flight.len() > self.held.len()
    }

    /// Returns true if steps are planned while others are in flight, or start before their load-backs have ended.
    /// Otherwise the work in flight is not tracked: a member stays in the batch, or ends.
    pub(crate) fn go_ahead(&self) -> bool {
        self.go_ahead
    }

    /// Returns true if another step may be planned.
    pub(crate) fn may_follow(&self) -> bool {
        let is_free = self.in_flight.len() < self.steps_max;
        let has_void = self.in_flight.iter().any(|step| step.is_void());
        is_free && !has_void && self.held.iter().all(Report::is_sound)
    }

    /// Counts consecutive steps with prefills alone.
    pub(crate) fn note_kind(&mut self, plan: &Plan) {
        let is_prefill_alone = !plan.prefills.is_empty() && plan.decodes.is_empty();
        self.prefill_streak = if is_prefill_alone { self.prefill_streak + 1 } else { 0 };
    }

    pub(crate) fn prefill_streak(&self) -> u32 {
        self.prefill_streak
    }

    /// Makes a step without members that is not in flight yet.
    pub(crate) fn new_step(&mut self, started: Time, repeats_max: u32) -> Step {
        let id = StepId(self.next);
        self.next += 1;
        Step::new(id, started, repeats_max, self.spare.pop())
    }

    /// Adds a step to those in flight.
    pub(crate) fn launch(&mut self, step: Step) {
        self.in_flight.push_back(step);
    }

    /// Returns true if this is the first step that has not been reported, false if it was reported before.
    pub(crate) fn is_next(&self, id: StepId) -> Result<bool, EventError> {
        if id.0 >= self.next {
            return Err(EventError::UnknownStep(id));
        }
        match self.in_flight.get(self.held.len()) {
            Some(step) if step.id() == id => Ok(true),
            Some(first) if first.id() < id => {
                Err(EventError::StepOutOfTurn { step: id, first: first.id() })
            }
            Some(_) | None => Ok(false),
        }
    }

    /// Takes the memory for an index of results.
    pub(crate) fn take_index(&mut self) -> ResultIndex {
        std::mem::take(&mut self.index)
    }

    /// Returns the memory for an index of results.
    pub(crate) fn give_index(&mut self, index: ResultIndex) {
        self.index = index;
    }

    /// Checks that results fit the first step that has not been reported: one for each member that produces tokens
    /// and is still in the batch, and no others. Results in the order of the plan are checked without a search.
    #[inline(never)]
    pub(crate) fn check(
        &mut self,
        results: &[StepResult<'_>],
        failed: &[RequestId],
        requests: &Requests,
    ) -> Result<(), EventError> {
        let step = &self.in_flight[self.held.len()];
        if step.is_void() {
            return Ok(());
        }
        let is_no_member =
            |request: &&RequestId| step.members().iter().all(|it| it.request != **request);
        if let Some(&request) = failed.iter().find(is_no_member) {
            return Err(EventError::UnexpectedResult { step: step.id(), request });
        }
        let owes_result = |member: &Member| {
            let entry = requests.get(member.handle);
            entry.is_some_and(|entry| member.counts_for(entry))
                && !failed.contains(&member.request)
                && !self.held.iter().any(|report| report.is_last_of(member.request))
        };
        let (mut in_order, mut is_ordered) = (results, true);
        for member in step.members().iter().filter(|member| member.produces_tokens()) {
            if let Some(result) = take_next(member.request, &mut in_order) {
                member.check(result)?;
            } else if owes_result(member) {
                is_ordered = false;
                break;
            }
        }
        if is_ordered && in_order.is_empty() {
            return Ok(());
        }
        self.index.fill(results);
        let checked = step.check_unordered(results, &self.index, owes_result);
        self.index.clear();
        checked
    }

    /// Returns true if the next report may have to wait for load-backs or for an earlier report.
    pub(crate) fn next_may_wait(&self) -> bool {
        self.some_are_held() || self.in_flight.front().is_some_and(Step::has_waits)
    }

    pub(crate) fn some_are_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Holds a report back until those before it have taken effect, and its load-backs have ended.
    pub(crate) fn hold(&mut self, report: Report) {
        self.held.push_back(report);
    }

    /// Takes the first report that is held back, unless it waits for load-backs.
    pub(crate) fn take_held(&mut self, requests: &Requests) -> Option<Report> {
        let report = self.held.front()?;
        let has_load_back = |(handle, _)| report.succeeded_for(requests[handle].id);
        let waits = self.first_waits(requests).any(has_load_back);
        if waits { None } else { self.held.pop_front() }
    }

    /// Members of the first step that wait for load-backs, and these load-backs.
    pub(crate) fn first_waits(&self, requests: &Requests) -> impl Iterator<Item = (Handle, OpId)> {
        let first = self.in_flight.front().filter(|step| !step.is_void());
        first.into_iter().flat_map(move |step| {
            step.waits().filter_map(move |(member, op)| {
                let entry = requests.get(member.handle)?;
                let waits = member.counts_for(entry) && entry.life.state().operation() == Some(op);
                waits.then_some((member.handle, op))
            })
        })
    }

    /// Returns true if a step that has not been reported reads the pages of this load-back.
    pub(crate) fn read(&self, op: OpId) -> bool {
        let owed = self.in_flight.range(self.held.len()..);
        owed.flat_map(Step::waits).any(|(_, awaited)| awaited == op)
    }

    /// The last step in flight.
    pub(crate) fn last(&mut self) -> Option<&mut Step> {
        self.in_flight.back_mut()
    }

    /// Removes the first step and returns how long it took by itself.
    pub(crate) fn end_first(&mut self, now: Time) -> (Step, Duration) {
        let step = self.in_flight.pop_front().expect("it was found");
        let began = step.started().max(std::mem::replace(&mut self.last_end, now));
        let took = now.since(began);
        (step, took)
    }

    /// Releases the pages that an ended step kept, and keeps its memory for reuse.
    pub(crate) fn recycle(&mut self, mut step: Step, cache: &mut Cache) {
        step.clear().for_each(|pin| cache.unpin_device(pin));
        self.spare.push(step);
    }

    /// Voids all steps in flight, because the step before them has failed, and returns their members.
    pub(crate) fn void_all(&mut self) -> impl Iterator<Item = &Member> {
        self.in_flight.iter_mut().flat_map(|step| {
            step.void();
            step.members().iter()
        })
    }

    /// Last step in flight that may touch pages of the request.
    pub(crate) fn last_with(&mut self, entry: &Entry) -> Option<&mut Step> {
        self.in_flight.iter_mut().find(|step| step.id().0 + 1 == entry.in_flight.until().0)
    }

    /// Returns true if a step in flight includes the request.
    pub(crate) fn have(&self, entry: &Entry) -> bool {
        self.in_flight.front().is_some_and(|first| first.id() < entry.in_flight.until())
    }

    /// Returns true if a step in flight includes the request and its results are void.
    pub(crate) fn is_void_for(&self, entry: &Entry) -> bool {
        entry.in_flight.tokens() == 0 && self.have(entry)
    }

    /// Step until which released device pages have to cool: the last in flight, if others can be planned before it
    /// has ended.
    pub(crate) fn cool_until(&self) -> Option<u64> {
        self.in_flight.back().filter(|_| self.go_ahead()).map(|step| step.id().0)
    }

    pub(crate) fn claim(&self, claims: &mut Claims) {
        self.in_flight.iter().flat_map(Step::kept).for_each(|pin| claims.device_pin(pin));
    }
}
