//! The steps in flight.
//!
//! A step may be planned while another runs. What it computes follows what the other computes, so the one
//! behind is worth nothing if the one before it fails; and whoever leaves the batch meanwhile leaves what
//! the steps in flight may read or write with the last of them.
//!
//! A step may begin while load-backs bring what it reads. If it is reported before they are, its report is held
//! until they are too: what it computed is worth nothing if they fail.

use std::collections::VecDeque;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Cache, Claims, DevicePin, Token};
use terrace_fsm::{OpId, RequestId, Time};

use crate::config::Config;
use crate::error::EventError;
use crate::event::StepResult;
use crate::plan::{Plan, StepId};
use crate::requests::{Entry, Handle, Requests};

/// What a request does in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) handle: Handle,
    pub(crate) request: RequestId,
    /// Where its KV begins, and where it will end if all goes well.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// How many tokens it may produce; none in the middle of a prompt.
    pub(crate) tokens_max: u32,
    pub(crate) is_decode: bool,
    /// What the request's [`Flying::epoch`] was.
    pub(crate) epoch: u16,
}

/// What the steps in flight compute of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flying {
    /// Tokens behind the computed ones whose KV they write.
    pub(crate) tokens: u32,
    /// Tokens that they produce, at least.
    pub(crate) new_tokens: u32,
    /// The step behind the last that it was part of.
    until: StepId,
    /// Its row of that last one.
    row: u32,
    /// How often what was in flight turned out to be of no use, modulo more than can be in flight.
    epoch: u16,
}

impl Flying {
    /// So much more is in flight from now on. Answers the present epoch.
    pub(crate) fn take_off(
        &mut self,
        tokens: u32,
        produces_token: bool,
        step: StepId,
        row: u32,
    ) -> u16 {
        self.tokens += tokens;
        self.new_tokens += u32::from(produces_token);
        (self.until, self.row) = (StepId(step.0 + 1), row);
        self.epoch
    }

    /// Nothing that is in flight is to be believed.
    pub(crate) fn cancel(&mut self) {
        (self.tokens, self.new_tokens) = (0, 0);
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// The row in flight that its next input token comes from, if that is not known yet.
    pub(crate) fn input(&self) -> Option<u32> {
        let row = self.row.saturating_sub(planted(Bug::InputOfAnotherRow).into());
        (self.new_tokens > 0).then_some(row)
    }
}

/// A step in flight.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) id: StepId,
    pub(crate) started: Time,
    pub(crate) repeats_max: u32,
    pub(crate) members: Vec<Member>,
    /// The load-backs that members, by their place, wait for.
    pub(crate) waits: Vec<(usize, OpId)>,
    /// The step before it has failed: whatever it reports, it wrote nothing that can be trusted.
    is_doomed: bool,
    /// What it may read of those who have left the batch.
    left: Vec<DevicePin>,
}

/// The report of a step that is held until it may take effect.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) at: Time,
    /// What it produced; nothing if it failed.
    pub(crate) done: Option<Done>,
}

/// What [`Event::StepDone`](crate::Event::StepDone) says.
#[derive(Debug)]
pub(crate) struct Done {
    results: Vec<(RequestId, Vec<Token>, bool)>,
    pub(crate) failed: Vec<RequestId>,
}

impl Report {
    pub(crate) fn done(at: Time, results: &[StepResult<'_>], failed: &[RequestId]) -> Self {
        let kept =
            |result: &StepResult<'_>| (result.request, result.tokens.to_vec(), result.finished);
        let results = results.iter().map(kept).collect();
        Self { at, done: Some(Done { results, failed: failed.to_vec() }) }
    }

    pub(crate) fn failed(at: Time) -> Self {
        Self { at, done: None }
    }

    /// Whether nothing is to be had of a request behind this step: its part has failed, or it has all its tokens.
    fn is_last_of(&self, request: RequestId) -> bool {
        let of = |done: &Done| {
            let mut results = done.results.iter();
            done.failed.contains(&request)
                || results.any(|&(its, _, finished)| its == request && finished)
        };
        self.done.as_ref().is_some_and(of)
    }

    /// Whether nobody's part in the step has failed.
    fn is_sound(&self) -> bool {
        self.done.as_ref().is_some_and(|done| done.failed.is_empty())
    }
}

impl Done {
    pub(crate) fn results(&self) -> Vec<StepResult<'_>> {
        let results = self.results.iter();
        results
            .map(|&(request, ref tokens, finished)| StepResult { request, tokens, finished })
            .collect()
    }
}

/// Results of a step by request, for those that are not in the order of its members.
#[derive(Debug, Default)]
pub(crate) struct ResultIndex {
    places: Vec<(RequestId, u32)>,
}

impl ResultIndex {
    fn fill(&mut self, results: &[StepResult<'_>]) {
        self.places.clear();
        self.places.extend(results.iter().zip(0..).map(|(result, place)| (result.request, place)));
        self.places.sort_unstable();
    }

    /// The result of a request.
    fn find<'r, 't>(
        &self,
        results: &'r [StepResult<'t>],
        request: RequestId,
    ) -> Option<&'r StepResult<'t>> {
        let found = self.places.binary_search_by_key(&request, |&(request, _)| request).ok()?;
        results.get(self.places[found].1 as usize)
    }
}

/// Reads the results of a step in the order of its members, which costs nothing where they have it.
#[derive(Debug)]
pub(crate) struct ResultReader<'r, 't> {
    results: &'r [StepResult<'t>],
    in_order: &'r [StepResult<'t>],
    index: ResultIndex,
    is_indexed: bool,
}

impl<'r, 't> ResultReader<'r, 't> {
    /// The index comes back from [`Self::into_index`], with its memory.
    pub(crate) fn new(results: &'r [StepResult<'t>], index: ResultIndex) -> Self {
        Self { results, in_order: results, index, is_indexed: false }
    }

    /// The result of the next member that is to have one.
    #[inline]
    pub(crate) fn next(&mut self, member: &Member) -> Option<&'r StepResult<'t>> {
        next_of(member, &mut self.in_order).or_else(|| self.search(member.request))
    }

    #[cold]
    fn search(&mut self, request: RequestId) -> Option<&'r StepResult<'t>> {
        if !self.is_indexed {
            self.index.fill(self.results);
            self.is_indexed = true;
        }
        self.index.find(self.results, request)
    }

    pub(crate) fn into_index(self) -> ResultIndex {
        self.index
    }
}

/// The steps in flight, in order.
#[derive(Debug)]
pub(crate) struct Steps {
    /// How many there may be.
    steps_max: usize,
    /// Whether they are planned while others are in flight, or begin before what they read has been loaded.
    go_ahead: bool,
    in_flight: VecDeque<Step>,
    /// The reports of the first of them.
    held: VecDeque<Report>,
    next: u64,
    /// Their memory is used again.
    spare: Vec<Step>,
    index: ResultIndex,
    /// When the last one ended.
    last_end: Time,
    /// Steps of prefills alone since the last of another kind.
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

    /// Whether there is one that has not been reported.
    pub(crate) fn are_owed(&self) -> bool {
        self.in_flight.len() > self.held.len()
    }

    /// Whether steps are planned while others are in flight, or what they read is still loaded. If not, nothing
    /// has to be kept of what they compute: whoever is in one stays in the batch, or ends.
    pub(crate) fn go_ahead(&self) -> bool {
        self.go_ahead
    }

    /// Whether another step may follow those in flight.
    pub(crate) fn may_follow(&self) -> bool {
        let is_free = self.in_flight.len() < self.steps_max;
        let is_doomed = self.in_flight.iter().any(|step| step.is_doomed);
        is_free && !is_doomed && self.held.iter().all(Report::is_sound)
    }

    /// Notes which kind of step a plan is.
    pub(crate) fn note_kind(&mut self, plan: &Plan) {
        let is_prefill_alone = !plan.prefills.is_empty() && plan.decodes.is_empty();
        self.prefill_streak = if is_prefill_alone { self.prefill_streak + 1 } else { 0 };
    }

    pub(crate) fn prefill_streak(&self) -> u32 {
        self.prefill_streak
    }

    /// A step without members, not yet in flight.
    pub(crate) fn new_step(&mut self, started: Time, repeats_max: u32) -> Step {
        let id = StepId(self.next);
        self.next += 1;
        match self.spare.pop() {
            Some(step) => Step { id, started, repeats_max, is_doomed: false, ..step },
            None => Step {
                id,
                started,
                repeats_max,
                members: Vec::new(),
                waits: Vec::new(),
                is_doomed: false,
                left: Vec::new(),
            },
        }
    }

    pub(crate) fn launch(&mut self, step: Step) {
        self.in_flight.push_back(step);
    }

    /// Whether this is the first step that has not been reported; if not, it was reported before.
    pub(crate) fn is_next(&self, id: StepId) -> Result<bool, EventError> {
        if id.0 >= self.next {
            return Err(EventError::UnknownStep(id));
        }
        match self.in_flight.get(self.held.len()) {
            Some(step) if step.id == id => Ok(true),
            Some(first) if first.id < id => {
                Err(EventError::StepOutOfTurn { step: id, first: first.id })
            }
            Some(_) | None => Ok(false),
        }
    }

    /// Lends the index of results, to be given back.
    pub(crate) fn take_index(&mut self) -> ResultIndex {
        std::mem::take(&mut self.index)
    }

    pub(crate) fn give_index(&mut self, index: ResultIndex) {
        self.index = index;
    }

    /// Checks that results fit the first step that has not been reported: one for each member that was to produce
    /// tokens and is still there, and no others. Results in the order of the plan are checked without a search.
    #[inline(never)]
    pub(crate) fn check(
        &mut self,
        results: &[StepResult<'_>],
        failed: &[RequestId],
        requests: &Requests,
    ) -> Result<(), EventError> {
        let step = &self.in_flight[self.held.len()];
        if step.is_doomed {
            return Ok(());
        }
        let is_no_member =
            |request: &&RequestId| step.members.iter().all(|it| it.request != **request);
        if let Some(&request) = failed.iter().find(is_no_member) {
            return Err(EventError::UnexpectedResult { step: step.id, request });
        }
        let owes_result = |member: &Member| {
            let entry = requests.get(member.handle);
            entry.is_some_and(|entry| member.counts_for(entry))
                && !failed.contains(&member.request)
                && !self.held.iter().any(|report| report.is_last_of(member.request))
        };
        let (mut in_order, mut is_ordered) = (results, true);
        for member in step.members.iter().filter(|member| member.produces_tokens()) {
            if let Some(result) = next_of(member, &mut in_order) {
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
        self.index.places.clear();
        checked
    }

    /// Whether the next report may have to wait: for load-backs, or behind one that does.
    pub(crate) fn next_may_wait(&self) -> bool {
        self.some_are_held() || self.in_flight.front().is_some_and(|step| !step.waits.is_empty())
    }

    pub(crate) fn some_are_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// A report waits until those before it have taken effect, and it may.
    pub(crate) fn hold(&mut self, report: Report) {
        self.held.push_back(report);
    }

    /// Takes the first report that is held, unless it waits for load-backs.
    pub(crate) fn take_held(&mut self, requests: &Requests) -> Option<Report> {
        let report = self.held.front()?;
        let waits = self.first_waits(requests).any(|(handle, _)| {
            let request = requests[handle].id;
            report.done.as_ref().is_some_and(|done| !done.failed.contains(&request))
        });
        if waits { None } else { self.held.pop_front() }
    }

    /// Who of the first step waits for which load-back.
    pub(crate) fn first_waits(&self, requests: &Requests) -> impl Iterator<Item = (Handle, OpId)> {
        let first = self.in_flight.front().filter(|step| !step.is_doomed);
        first.into_iter().flat_map(move |step| {
            step.waits.iter().filter_map(move |&(place, op)| {
                let member = &step.members[place];
                let entry = requests.get(member.handle)?;
                let waits = member.counts_for(entry) && entry.life.state().operation() == Some(op);
                waits.then_some((member.handle, op))
            })
        })
    }

    /// Whether a step that has not been reported reads what this load-back brings.
    pub(crate) fn read(&self, op: OpId) -> bool {
        let owed = self.in_flight.range(self.held.len()..);
        owed.flat_map(|step| &step.waits).any(|(_, awaited)| *awaited == op)
    }

    /// The last step in flight.
    pub(crate) fn last(&mut self) -> Option<&mut Step> {
        self.in_flight.back_mut()
    }

    /// The first step is over. Answers how long it took, by itself.
    pub(crate) fn end_first(&mut self, now: Time) -> (Step, std::time::Duration) {
        let step = self.in_flight.pop_front().expect("it was found");
        let began = step.started.max(std::mem::replace(&mut self.last_end, now));
        let took = now.since(began);
        (step, took)
    }

    /// Nobody needs a step that is over any more: what was left with it is let go, its memory put by.
    pub(crate) fn put_by(&mut self, mut step: Step, cache: &mut Cache) {
        step.left.drain(..).for_each(|pin| cache.unpin_device(pin));
        step.members.clear();
        step.waits.clear();
        self.spare.push(step);
    }

    /// The steps behind a failed one fail with it.
    pub(crate) fn doom_all(&mut self) -> impl Iterator<Item = &Member> {
        self.in_flight.iter_mut().flat_map(|step| {
            step.is_doomed = true;
            step.members.iter()
        })
    }

    /// The last step that may touch pages of a request, if any does.
    pub(crate) fn last_with(&mut self, entry: &Entry) -> Option<&mut Step> {
        self.in_flight.iter_mut().find(|step| step.id.0 + 1 == entry.flying.until.0)
    }

    /// Whether a step in flight has the request in it.
    pub(crate) fn have(&self, entry: &Entry) -> bool {
        self.in_flight.front().is_some_and(|first| first.id < entry.flying.until)
    }

    /// Whether one has, and is of no use to it.
    pub(crate) fn is_in_vain_for(&self, entry: &Entry) -> bool {
        entry.flying.tokens == 0 && self.have(entry)
    }

    /// Until which step device pages that come back have to cool: the last in flight, if others can be
    /// planned before it has ended.
    pub(crate) fn cool_until(&self) -> Option<u64> {
        self.in_flight.back().filter(|_| self.go_ahead()).map(|step| step.id.0)
    }

    pub(crate) fn claim(&self, claims: &mut Claims) {
        self.in_flight.iter().flat_map(|step| &step.left).for_each(|pin| claims.device_pin(pin));
    }
}

impl Step {
    pub(crate) fn is_doomed(&self) -> bool {
        self.is_doomed
    }

    fn check_unordered(
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

    /// What a request leaves behind that this step may still read.
    pub(crate) fn keep(&mut self, path: DevicePin) {
        self.left.push(path);
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

    pub(crate) fn produces_tokens(&self) -> bool {
        self.tokens_max > 0
    }

    /// Whether the step's results are the request's.
    pub(crate) fn counts_for(&self, entry: &Entry) -> bool {
        entry.flying.epoch == self.epoch
    }

    /// What it computed is not in flight any more.
    pub(crate) fn lands(&self, flying: &mut Flying) {
        flying.tokens -= self.end - self.start;
        flying.new_tokens -= u32::from(self.produces_tokens());
    }
}

/// Takes the next result if it is the member's.
fn next_of<'r, 't>(
    member: &Member,
    results: &mut &'r [StepResult<'t>],
) -> Option<&'r StepResult<'t>> {
    let (first, rest) = results.split_first()?;
    (first.request == member.request).then(|| {
        *results = rest;
        first
    })
}
