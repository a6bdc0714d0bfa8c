//! Steps: the one in flight, and whether results fit it.

use terrace_fsm::{RequestId, Time};

use crate::error::EventError;
use crate::event::StepResult;
use crate::plan::{Plan, StepId};
use crate::requests::{Handle, Requests};

/// What a request does in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) handle: Handle,
    pub(crate) request: RequestId,
    /// Where its KV will end if all goes well.
    pub(crate) end: u32,
    /// How many tokens it may produce; none in the middle of a prompt.
    pub(crate) tokens_max: u32,
    pub(crate) is_decode: bool,
}

/// A step that was planned.
#[derive(Debug)]
pub(crate) struct Step {
    id: StepId,
    pub(crate) started: Time,
    pub(crate) repeats_max: u32,
    pub(crate) members: Vec<Member>,
}

/// All steps, of which one at the most is in flight.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    in_flight: Option<Step>,
    spare_members: Vec<Member>,
    next: u64,
    /// Steps of prefills alone since the last of another kind.
    prefill_streak: u32,
}

impl Steps {
    /// An empty list for the members of the next step, whose memory is used again.
    pub(crate) fn members(&mut self) -> Vec<Member> {
        let mut members = std::mem::take(&mut self.spare_members);
        members.clear();
        members
    }

    pub(crate) fn begin(&mut self, now: Time, repeats_max: u32, members: Vec<Member>) -> StepId {
        let id = StepId(self.next);
        self.next += 1;
        self.in_flight = Some(Step { id, started: now, repeats_max, members });
        id
    }

    /// The step in flight has ended.
    pub(crate) fn end(&mut self) -> Option<Step> {
        self.in_flight.take()
    }

    /// The members of a step that has ended were dealt with.
    pub(crate) fn recycle(&mut self, step: Step) {
        self.spare_members = step.members;
    }

    /// Notes which kind of step a plan is.
    pub(crate) fn note_kind(&mut self, plan: &Plan) {
        let is_prefill_alone = !plan.prefills.is_empty() && plan.decodes.is_empty();
        self.prefill_streak = if is_prefill_alone { self.prefill_streak + 1 } else { 0 };
    }

    pub(crate) fn prefill_streak(&self) -> u32 {
        self.prefill_streak
    }

    pub(crate) fn none_in_flight(&self) -> bool {
        self.in_flight.is_none()
    }

    /// The step in flight, if that is the one; nothing for one that was reported before.
    pub(crate) fn reported(&self, id: StepId) -> Result<Option<&Step>, EventError> {
        if id.0 >= self.next {
            return Err(EventError::UnknownStep(id));
        }
        Ok(self.in_flight.as_ref().filter(|step| step.id == id))
    }
}

impl Step {
    /// Whether the results fit the step: one for each live member that was to produce tokens, and
    /// no others. Results in the order of the plan are checked without a search.
    pub(crate) fn check(
        &self,
        results: &[StepResult<'_>],
        requests: &Requests,
    ) -> Result<(), EventError> {
        let mut in_order = results;
        for member in self.members.iter().filter(|member| member.tokens_max > 0) {
            if let Some(result) = next_of(member, &mut in_order) {
                member.check(result)?;
            } else if requests.get(member.handle).is_some() {
                return self.check_unordered(results, requests);
            }
        }
        match in_order {
            [] => Ok(()),
            [..] => self.check_unordered(results, requests),
        }
    }

    fn check_unordered(
        &self,
        results: &[StepResult<'_>],
        requests: &Requests,
    ) -> Result<(), EventError> {
        let producers = || self.members.iter().filter(|member| member.tokens_max > 0);
        for (place, result) in results.iter().enumerate() {
            let request = result.request;
            let repeated = results[..place].iter().any(|earlier| earlier.request == request);
            match producers().find(|member| member.request == request) {
                Some(member) if !repeated => member.check(result)?,
                Some(_) | None => {
                    return Err(EventError::UnexpectedResult { step: self.id, request });
                }
            }
        }
        let lacks = |member: &&Member| {
            requests.get(member.handle).is_some()
                && results.iter().all(|result| result.request != member.request)
        };
        match producers().find(lacks) {
            Some(Member { request, .. }) => {
                Err(EventError::MissingResult { step: self.id, request: *request })
            }
            None => Ok(()),
        }
    }
}

impl Member {
    fn check(&self, result: &StepResult<'_>) -> Result<(), EventError> {
        let (request, tokens_max) = (self.request, self.tokens_max);
        match result.tokens.len() {
            tokens if (1..=tokens_max as usize).contains(&tokens) => Ok(()),
            tokens => Err(EventError::WrongTokenCount { request, tokens, tokens_max }),
        }
    }
}

/// Takes the next result if it is the member's.
pub(crate) fn next_of<'r, 't>(
    member: &Member,
    results: &mut &'r [StepResult<'t>],
) -> Option<&'r StepResult<'t>> {
    let (first, rest) = results.split_first()?;
    (first.request == member.request).then(|| {
        *results = rest;
        first
    })
}
