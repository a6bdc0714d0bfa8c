//! One step in flight and its members.

use terrace_cache::DevicePin;
use terrace_fsm::{OpId, RequestId, Time};

use crate::error::EventError;
use crate::event::StepResult;
use crate::ids::{Handle, StepId};
use crate::requests::Entry;
use crate::results::ResultIndex;

/// Part of a request in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) handle: Handle,
    pub(crate) request: RequestId,
    /// First position that the step computes.
    pub(crate) start: u32,
    /// End of the positions that the step computes if it succeeds.
    pub(crate) end: u32,
    /// Maximum number of tokens to produce; 0 in the middle of a prompt.
    pub(crate) tokens_max: u32,
    pub(crate) is_decode: bool,
    /// Epoch of the request's [`InFlight`](crate::in_flight::InFlight) when the step started.
    pub(crate) epoch: u16,
}

impl Member {
    /// Checks the number of tokens of a result.
    pub(crate) fn check(&self, result: &StepResult<'_>) -> Result<(), EventError> {
        let (request, tokens_max) = (self.request, self.tokens_max);
        match result.tokens.len() {
            tokens if (1..=tokens_max as usize).contains(&tokens) => Ok(()),
            tokens => Err(EventError::WrongTokenCount { request, tokens, tokens_max }),
        }
    }

    pub(crate) fn produces_tokens(&self) -> bool {
        self.tokens_max > 0
    }

    /// Number of positions that the step computes.
    pub(crate) fn tokens(&self) -> u32 {
        self.end - self.start
    }

    /// Returns true if the results of the step are valid for the request.
    pub(crate) fn counts_for(&self, entry: &Entry) -> bool {
        entry.in_flight.epoch() == self.epoch
    }
}

/// A step in flight.
#[derive(Debug)]
pub(crate) struct Step {
    id: StepId,
    started: Time,
    repeats_max: u32,
    members: Vec<Member>,
    /// Load-backs that members wait for, by the place of the member.
    waits: Vec<(usize, OpId)>,
    /// The step before it has failed: its results are not trusted.
    is_void: bool,
    /// Pages that it may read of requests that have left the batch.
    left: Vec<DevicePin>,
}

impl Step {
    /// Makes a step without members, with the memory of an earlier one if there is any.
    pub(crate) fn new(id: StepId, started: Time, repeats_max: u32, spare: Option<Self>) -> Self {
        match spare {
            Some(spare) => Self { id, started, repeats_max, is_void: false, ..spare },
            None => Self {
                id,
                started,
                repeats_max,
                members: Vec::new(),
                waits: Vec::new(),
                is_void: false,
                left: Vec::new(),
            },
        }
    }

    /// Adds members.
    pub(crate) fn extend(&mut self, members: impl Iterator<Item = Member>) {
        self.members.extend(members);
    }

    /// Adds load-backs that members wait for, by the place of the member.
    pub(crate) fn extend_waits(&mut self, waits: impl Iterator<Item = (usize, OpId)>) {
        self.waits.extend(waits);
    }

    /// Sets the epoch of each member, given its row and itself.
    pub(crate) fn set_epochs(&mut self, mut epoch: impl FnMut(u32, &Member) -> u16) {
        for (row, member) in (0..).zip(&mut self.members) {
            member.epoch = epoch(row, member);
        }
    }

    /// Keeps pages of a request that leaves the batch until the step has ended.
    pub(crate) fn keep(&mut self, path: DevicePin) {
        self.left.push(path);
    }

    /// Marks the results as not trusted: the step before has failed.
    pub(crate) fn void(&mut self) {
        self.is_void = true;
    }

    /// Clears the step for reuse and returns the pages that it kept.
    pub(crate) fn clear(&mut self) -> impl Iterator<Item = DevicePin> + '_ {
        self.members.clear();
        self.waits.clear();
        self.left.drain(..)
    }

    pub(crate) fn id(&self) -> StepId {
        self.id
    }

    pub(crate) fn started(&self) -> Time {
        self.started
    }

    pub(crate) fn repeats_max(&self) -> u32 {
        self.repeats_max
    }

    /// Members in the order of the plan: prefills before decodes.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Load-backs that members wait for.
    pub(crate) fn waits(&self) -> impl Iterator<Item = (&Member, OpId)> {
        self.waits.iter().map(|&(place, op)| (&self.members[place], op))
    }

    pub(crate) fn has_waits(&self) -> bool {
        !self.waits.is_empty()
    }

    pub(crate) fn is_void(&self) -> bool {
        self.is_void
    }

    /// Pages that the step keeps.
    pub(crate) fn kept(&self) -> &[DevicePin] {
        &self.left
    }

    /// Checks results in any order: one for each member for which `owes_result` is true, and no others.
    pub(crate) fn check_unordered(
        &self,
        results: &[StepResult<'_>],
        index: &ResultIndex,
        owes_result: impl Fn(&Member) -> bool,
    ) -> Result<(), EventError> {
        let producers = || self.members.iter().filter(|member| member.produces_tokens());
        let (mut expected, mut missing) = (0, None);
        for member in producers() {
            match index.find(results, member.request) {
                Some(result) => {
                    member.check(result)?;
                    expected += 1;
                }
                None if missing.is_none() && owes_result(member) => missing = Some(member.request),
                None => {}
            }
        }
        if expected < results.len() {
            let is_unexpected = |&(place, result): &(usize, &StepResult<'_>)| {
                producers().all(|member| member.request != result.request)
                    || results[..place].iter().any(|earlier| earlier.request == result.request)
            };
            let (_, unexpected) =
                results.iter().enumerate().find(is_unexpected).expect("there are too many");
            let request = unexpected.request;
            return Err(EventError::UnexpectedResult { step: self.id, request });
        }
        match missing {
            Some(request) => Err(EventError::MissingResult { step: self.id, request }),
            None => Ok(()),
        }
    }
}
