//! A world for the scheduler: arenas with bytes, an L3 store, and an engine that checks every page
//! it reads.
//!
//! The right content of a position is a function of the namespace and of all tokens up to it, so
//! every wrong page is detected. Transfers move bytes when their outcome is reported; copies of
//! pages can also move earlier, layer by layer. Failed transfers leave invalid bytes.

mod copies;
mod memory;
mod reach;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};
use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Device, Host};
use terrace_scheduler::{
    Config, ConfigError, CopyDirection, DevicePage, Event, HostPage, L3Kind, OpId, PageKey,
    Passage, Plan, PrefixDigest, Request, RequestId, Scheduler, Sequence, StepId, StepResult,
    StepsInFlight, SubmitError, Time, Token,
};

use copies::Arrival;
pub(crate) use memory::LAYERS;
use memory::{Arena, Kv, RUBBISH, in_layer};

/// Token produced from invalid KV.
const RUBBISH_TOKEN: Token = 0xDEAD;

/// The engine read KV that does not belong to its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongPage {
    /// Reading request.
    pub request: RequestId,
    /// Position.
    pub position: u32,
}

impl fmt::Display for WrongPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} read wrong KV at position {}", self.request, self.position)
    }
}

/// An object in L3: its bytes, and the data for their verification.
#[derive(Clone, Debug)]
pub struct Object {
    key: PageKey,
    generation: u32,
    prefix: Option<PrefixDigest>,
    checksum: u64,
    kv: Kv,
}

/// Kind of a damaged read. The driver's checks detect all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Damage {
    /// Fewer bytes than requested.
    ShortRead,
    /// A flipped bit.
    FlippedBit,
    /// Another page's content.
    WrongPage,
    /// An object from before the store was wiped.
    StaleGeneration,
}

/// An operation that the world performs.
#[derive(Clone, Debug)]
pub enum Transfer {
    /// Host to device.
    LoadBack(Vec<HostPage>, Vec<DevicePage>),
    /// Device to host.
    WriteBack(Vec<DevicePage>, Vec<HostPage>),
    /// Lookup in L3.
    Probe(Vec<PageKey>),
    /// L3 to host.
    Prefetch(Vec<PageKey>, Vec<HostPage>),
    /// Host to L3.
    Backup(Vec<PageKey>, Vec<HostPage>),
}

impl Transfer {
    /// Returns the number of its pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        match self {
            Self::LoadBack(pages, _) | Self::WriteBack(_, pages) => pages.len(),
            Self::Probe(keys) | Self::Prefetch(keys, _) | Self::Backup(keys, _) => keys.len(),
        }
    }
}

/// Part of one request in a step in flight.
#[derive(Clone, Debug)]
struct Member {
    request: RequestId,
    start: u32,
    tokens: u32,
    produces: bool,
    /// Source of its first token, if it was unknown when the step was planned.
    input: Option<(StepId, u32)>,
    /// Right content of each position so far.
    expected: Vec<u64>,
    row: Vec<DevicePage>,
    /// The load-back that supplies some of its pages.
    waits_for: Option<OpId>,
    /// True if its input has failed, so that its results are invalid.
    is_invalid: bool,
    /// True if an earlier step produced its last token and has not been reported yet.
    has_ended: bool,
}

/// A launched step.
#[derive(Debug)]
struct Step {
    id: StepId,
    members: Vec<Member>,
    /// Number of layers that the device has executed.
    layers: usize,
    /// Largest number of accepted tokens when the device started it.
    accepted_tokens: u32,
    /// Tokens of each member, once the device has executed it.
    produced: Option<Vec<Vec<Token>>>,
}

/// A scheduler and its simulated environment.
#[derive(Debug)]
pub struct World {
    /// The scheduler.
    pub scheduler: Scheduler,
    /// Current time.
    pub now: Time,
    /// Requests that stop at their next tokens.
    pub finishing: BTreeSet<RequestId>,
    /// Number of tokens accepted of a decode's drafts or of repeated steps.
    pub accepted_tokens: u32,
    /// Operations without a final outcome.
    pub transfers: BTreeMap<OpId, Transfer>,
    /// The pages that L3 holds.
    pub l3: BTreeMap<PageKey, Object>,
    /// Prefix digests of pages that operations move from or to L3.
    prefixes: BTreeMap<OpId, Vec<PrefixDigest>>,
    /// Operations that have moved their bytes, by rank.
    moved: BTreeSet<(OpId, u32)>,
    /// Results of copies by rank, reported or not.
    arrivals: BTreeMap<(OpId, u32), Arrival>,
    /// Load-backs that were reported as successful though their host pages were invalid.
    misread: BTreeSet<OpId>,
    /// The load-back that each prefill was last planned to wait for.
    awaited: BTreeMap<RequestId, OpId>,
    /// Generation of new objects; objects of another generation are stale.
    generation: u32,
    page_size: usize,
    device: Arena<Device>,
    host: Arena<Host>,
    rows: Vec<Vec<DevicePage>>,
    expected: BTreeMap<RequestId, Vec<u64>>,
    /// Passages with bidirectional attention, which must be computed as a whole.
    whole: BTreeMap<RequestId, Vec<Passage>>,
    /// Requests that do not use all tiers, with their sequences.
    limited: BTreeMap<RequestId, (Request, Sequence)>,
    /// Last words of pages that some request may write, by tier.
    writable: [BTreeSet<u64>; 3],
    /// A page written to or read from a tier that the request does not use.
    overreach: Option<String>,
    /// Submitted requests.
    requests: BTreeMap<RequestId, Request>,
    /// Fingerprint of the model's weights.
    weights: String,
    /// Steps in flight, in order.
    steps: VecDeque<Step>,
    /// Tokens of the rows of the step that ended last.
    outputs: (Option<StepId>, Vec<Vec<Token>>),
    /// A row that differed from the scheduler's when its step was planned.
    wrong_row: Option<RequestId>,
    /// A request that got a token that does not follow its others.
    wrong_token: Option<RequestId>,
    plan: Plan,
}

impl World {
    /// Creates an empty world.
    ///
    /// # Errors
    /// Fails if the configuration is invalid.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let page_size = config.cache.page_size as usize;
        Ok(Self {
            device: Arena::new(config.cache.device_pages, page_size),
            host: Arena::new(config.cache.host_pages, page_size),
            rows: vec![Vec::new(); config.batch.running_max as usize],
            scheduler: Scheduler::new(config)?,
            now: Time(0),
            finishing: BTreeSet::new(),
            accepted_tokens: u32::MAX,
            transfers: BTreeMap::new(),
            l3: BTreeMap::new(),
            prefixes: BTreeMap::new(),
            moved: BTreeSet::new(),
            arrivals: BTreeMap::new(),
            misread: BTreeSet::new(),
            awaited: BTreeMap::new(),
            generation: 0,
            page_size,
            expected: BTreeMap::new(),
            whole: BTreeMap::new(),
            limited: BTreeMap::new(),
            writable: Default::default(),
            overreach: None,
            requests: BTreeMap::new(),
            weights: String::new(),
            steps: VecDeque::new(),
            outputs: (None, Vec::new()),
            wrong_row: None,
            wrong_token: None,
            plan: Plan::default(),
        })
    }

    /// Submits a request, with its siblings.
    ///
    /// # Errors
    /// Returns the error of the scheduler.
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        let expected = self.expected_of(&request, &request.prompt);
        let mut whole = request.passages.clone();
        whole.retain(|passage| passage.is_whole);
        let limited = (!request.reads.is_all() || !request.writes.is_all()).then(|| {
            let namespace = self.scheduler.namespace_of(&request.adapter, &request.salt);
            let (page_size, prompt) = (self.page_size as u32, request.prompt.clone());
            let sequence = Sequence::with_passages(namespace, page_size, prompt, &request.passages);
            sequence.ok().map(|sequence| (request.clone(), sequence))
        });
        self.scheduler.submit(self.now, request.clone())?;
        self.note_writable(&expected, 0, request.writes);
        let limited = limited.flatten();
        for id in request.ids() {
            if let Some(limited) = &limited {
                self.limited.insert(id, limited.clone());
            }
            self.requests.insert(id, request.clone());
            self.expected.insert(id, expected.clone());
            if !whole.is_empty() {
                self.whole.insert(id, whole.clone());
            }
        }
        Ok(())
    }

    /// Returns the right content of each position of a request with these tokens.
    fn expected_of(&self, request: &Request, tokens: &[Token]) -> Vec<u64> {
        // Computed independently of the scheduler's namespaces, which may be wrong.
        let namespace = format!("{}/{}/{}", self.weights, request.adapter, request.salt);
        let start = namespace.bytes().fold(1, |word, byte| mix(word, byte.into()));
        let mut expected = Vec::new();
        extend_expected(&mut expected, start, tokens, &request.passages);
        expected
    }

    /// Replaces the model's weights: the right content of all positions changes.
    ///
    /// # Errors
    /// Returns the error of the scheduler.
    pub fn replace_weights(&mut self, weights: &str) -> Result<(), StepsInFlight> {
        self.scheduler.replace_weights(self.now, weights)?;
        weights.clone_into(&mut self.weights);
        for (id, request) in std::mem::take(&mut self.requests) {
            // A request that ended in this call has computed nothing with the new weights.
            if let Some(tokens) = self.scheduler.tokens(id) {
                let expected = self.expected_of(&request, &tokens.to_vec());
                self.note_writable(&expected, 0, request.writes);
                self.expected.insert(id, expected);
                if let Some((_, sequence)) = self.limited.get_mut(&id) {
                    let root = self.scheduler.namespace_of(&request.adapter, &request.salt);
                    *sequence = sequence.under(root);
                }
            }
            self.requests.insert(id, request);
        }
        Ok(())
    }

    /// Requests a plan and starts it.
    pub fn plan(&mut self) -> &Plan {
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.plan_into(self.now, &mut plan);
        self.learn_late_tokens();
        for change in &plan.rows {
            let row = &mut self.rows[change.slot.0 as usize];
            row.truncate(change.first_entry as usize);
            assert_eq!(row.len(), change.first_entry as usize, "a row has a gap");
            row.extend_from_slice(plan.row_pages(change));
        }
        for copy in &plan.copies {
            let device = plan.device_pages(copy).to_vec();
            let host = plan.host_pages(copy).to_vec();
            let transfer = match copy.direction {
                CopyDirection::LoadBack => {
                    self.device.invalidate(&device);
                    Transfer::LoadBack(host, device)
                }
                CopyDirection::WriteBack => {
                    self.host.invalidate(&host);
                    Transfer::WriteBack(device, host)
                }
            };
            self.transfers.insert(copy.op, transfer);
        }
        for op in &plan.l3 {
            let keys = plan.l3_keys(op).to_vec();
            let pages = plan.l3_host_pages(op).to_vec();
            self.scheduler.l3_digests(op.op, self.prefixes.entry(op.op).or_default());
            let transfer = match op.kind {
                L3Kind::Probe => Transfer::Probe(keys),
                L3Kind::Prefetch => {
                    self.host.invalidate(&pages);
                    self.check_keys(op.op, &keys);
                    Transfer::Prefetch(keys, pages)
                }
                L3Kind::Backup => Transfer::Backup(keys, pages),
            };
            self.transfers.insert(op.op, transfer);
        }
        for prefill in &plan.prefills {
            match prefill.waits_for {
                Some(op) => self.awaited.insert(prefill.request, op),
                None => self.awaited.remove(&prefill.request),
            };
        }
        if let Some(id) = plan.step {
            let members = self.members(&plan);
            let is_wrong = |member: &&Member| {
                self.scheduler.row(member.request).is_none_or(|meant| meant != member.row)
            };
            self.wrong_row = members.iter().find(is_wrong).map(|member| member.request);
            self.steps.push_back(Step {
                id,
                members,
                layers: 0,
                accepted_tokens: 0,
                produced: None,
            });
        }
        self.check_reach(&plan);
        self.check_adapters(&plan);
        self.plan = plan;
        &self.plan
    }

    /// Returns the last plan.
    #[must_use]
    pub fn last_plan(&self) -> &Plan {
        &self.plan
    }

    fn members(&self, plan: &Plan) -> Vec<Member> {
        let member = |request, slot: terrace_scheduler::Slot, start, tokens, produces| Member {
            request,
            start,
            tokens,
            produces,
            input: None,
            expected: self.expected[&request].clone(),
            row: self.rows[slot.0 as usize].clone(),
            // A decode reads pages that its prefill has waited for.
            waits_for: self.awaited.get(&request).copied(),
            is_invalid: false,
            has_ended: false,
        };
        let prefills = plan
            .prefills
            .iter()
            .map(|p| member(p.request, p.slot, p.start, p.tokens, p.produces_token));
        // Repetitions of a step are like drafts that are all accepted.
        let decodes = plan.decodes.iter().map(|d| Member {
            input: plan.behind.zip(d.input),
            ..member(d.request, d.slot, d.start, d.tokens + plan.repeats_max, true)
        });
        prefills.chain(decodes).collect()
    }

    /// Drops the state of an ended request.
    pub fn forget_request(&mut self, request: RequestId) {
        self.expected.remove(&request);
        self.whole.remove(&request);
        self.limited.remove(&request);
        self.requests.remove(&request);
        self.finishing.remove(&request);
        self.awaited.remove(&request);
    }

    /// Compares the engine's rows, built from changes, with the scheduler's.
    ///
    /// # Errors
    /// Returns a running request whose row in a step differs.
    pub fn check_rows(&self) -> Result<(), RequestId> {
        if let Some(request) = self.wrong_row {
            return Err(request);
        }
        // A step behind another, or with pages in flight, may be planned with pages that turn out
        // to be shared.
        let ahead = self.scheduler.config().batch.steps_in_flight_max > 1 || self.overlaps();
        for member in self.steps.iter().filter(|_| !ahead).flat_map(|step| &step.members) {
            let meant = self.scheduler.row(member.request);
            if meant.is_some_and(|meant| meant != member.row) {
                return Err(member.request);
            }
        }
        Ok(())
    }

    /// Returns a request that got a token that does not follow its others, if any.
    #[must_use]
    pub fn wrong_token(&self) -> Option<RequestId> {
        self.wrong_token
    }

    fn overlaps(&self) -> bool {
        self.scheduler.config().copies.load_back_overlaps
    }

    /// Returns whether a step is in flight.
    #[must_use]
    pub fn in_step(&self) -> bool {
        !self.steps.is_empty()
    }

    /// Executes the first step that the device has not executed, if there is one.
    ///
    /// # Errors
    /// Returns the first wrong page that the step read.
    pub fn execute(&mut self) -> Result<(), WrongPage> {
        let Some(place) = self.next_step() else { return Ok(()) };
        while self.next_step() == Some(place) {
            self.execute_layer()?;
        }
        Ok(())
    }

    /// Returns the index of the first step that the device has not executed.
    fn next_step(&self) -> Option<usize> {
        self.steps.iter().position(|step| step.produced.is_none())
    }

    /// Executes the next layer of that step.
    ///
    /// # Errors
    /// Returns the first wrong page that the layer read.
    pub fn execute_layer(&mut self) -> Result<(), WrongPage> {
        let Some(place) = self.next_step() else { return Ok(()) };
        let Step { layers: layer, mut accepted_tokens, .. } = self.steps[place];
        let mut members = std::mem::take(&mut self.steps[place].members);
        if layer == 0 {
            accepted_tokens = self.accepted_tokens;
            members.iter_mut().for_each(|member| self.take_input(member));
        }
        // The model waits for the layers that it reads.
        if layer == 0 || !planted(Bug::WaitForFirstLayerOnly) {
            let awaited = members.iter().filter_map(|member| member.waits_for);
            awaited.for_each(|op| self.load(op, layer));
        }
        for member in members.iter().filter(|member| !member.is_invalid) {
            self.check_reads(member, layer)?;
        }
        let computed = members.iter().map(|member| self.compute(member, layer, accepted_tokens));
        let computed = computed.collect();
        let produced = (layer + 1 == LAYERS).then_some(computed);
        let id = self.steps[place].id;
        self.steps[place] = Step { id, members, layers: layer + 1, accepted_tokens, produced };
        Ok(())
    }

    /// Sets the first token of a member, once it is known.
    fn take_input(&self, member: &mut Member) {
        let Some((step, row)) = member.input.filter(|_| !member.is_invalid) else { return };
        let in_flight = self.steps.iter().find(|it| it.id == step);
        let outputs = match in_flight {
            Some(step) => step.produced.as_ref().expect("steps are executed in order"),
            None => &self.outputs.1,
        };
        assert!(in_flight.is_some() || self.outputs.0 == Some(step), "{step:?} is long over");
        let token = outputs[row as usize].first().copied().unwrap_or_default();
        let last = *member.expected.last().expect("a prompt is not empty");
        member.expected.push(mix(last, token));
    }

    /// Executes the first step in flight, unless it was executed, and reports its results.
    ///
    /// # Errors
    /// Returns the first wrong page that the step read.
    ///
    /// # Panics
    /// Panics if no step is in flight, or the scheduler refuses the results.
    pub fn finish_step(&mut self) -> Result<(), WrongPage> {
        self.finish_step_but(None)
    }

    /// Returns a member of the first step in flight, by index modulo their number.
    #[must_use]
    pub fn member(&self, nth: u32) -> Option<RequestId> {
        let members = &self.steps.front()?.members;
        Some(members[nth as usize % members.len()].request)
    }

    /// Same as [`finish_step`](Self::finish_step), except that the part of one request fails.
    ///
    /// # Errors
    /// Returns the first wrong page that the step read.
    ///
    /// # Panics
    /// Panics if no step is in flight, or the scheduler refuses the results.
    pub fn finish_step_but(&mut self, failed: Option<RequestId>) -> Result<(), WrongPage> {
        if self.steps[0].produced.is_none() {
            self.execute()?;
        }
        let Step { id: step, members, produced, .. } =
            self.steps.pop_front().expect("it was there");
        let produced = produced.expect("it was executed");
        if let Some(request) = failed {
            let its = members.iter().filter(|member| member.request == request);
            its.for_each(|member| self.spoil_written(member));
            self.invalidate_members(|member| member.request == request);
        }
        let results: Vec<StepResult<'_>> = members
            .iter()
            .zip(&produced)
            .filter(|(member, _)| member.produces && !member.is_invalid && !member.has_ended)
            .filter(|(member, _)| Some(member.request) != failed)
            .filter(|(member, _)| self.scheduler.state(member.request).is_some())
            .map(|(member, tokens)| StepResult {
                request: member.request,
                tokens,
                finished: self.finishing.contains(&member.request),
            })
            .collect();
        let event = Event::StepDone { step, results: &results, failed: failed.as_slice() };
        self.scheduler.advance(self.now, event).expect("the results fit the step");
        for member in self.steps.iter_mut().flat_map(|step| &mut step.members) {
            member.has_ended |=
                results.iter().any(|it| it.request == member.request && it.finished);
        }
        self.learn_late_tokens();
        for (member, tokens) in members.iter().zip(&produced).filter(|(it, _)| it.produces) {
            self.learn_tokens(member.request);
            if self.overlaps() {
                self.note_late_pages(member, tokens);
            }
        }
        self.outputs = (Some(step), produced);
        Ok(())
    }

    /// Reports that the first step in flight failed; its pages are invalid then.
    ///
    /// # Panics
    /// Panics if no step is in flight.
    pub fn fail_step(&mut self) {
        let Step { id: step, members, .. } = self.steps.pop_front().expect("a step is in flight");
        members.iter().for_each(|member| self.spoil_written(member));
        self.invalidate_members(|_| true);
        self.scheduler.advance(self.now, Event::StepFailed { step }).expect("it was in flight");
    }

    fn spoil_written(&mut self, member: &Member) {
        for position in member.start..member.start + member.tokens {
            (0..LAYERS).for_each(|layer| *self.word(&member.row, position, layer) = RUBBISH);
        }
    }

    /// Marks the results of members in flight as invalid.
    fn invalidate_members(&mut self, which: impl Fn(&Member) -> bool) {
        let members = self.steps.iter_mut().flat_map(|step| &mut step.members);
        members.filter(|member| which(member)).for_each(|member| member.is_invalid = true);
    }

    fn check_reads(&mut self, member: &Member, layer: usize) -> Result<(), WrongPage> {
        let ranks = self.scheduler.config().model.ranks;
        let is_owed = |op: OpId| (0..ranks).any(|rank| !self.moved.contains(&(op, rank)));
        // Pages of an unreported load-back are read only by members that wait for it.
        let loading = self.transfers.iter().filter_map(|(&op, transfer)| match transfer {
            Transfer::LoadBack(_, to) if Some(op) != member.waits_for && is_owed(op) => Some(to),
            _ => None,
        });
        let is_misled = self.is_misled(member);
        let loading: BTreeSet<u32> = loading.flatten().map(|page| page.slot()).collect();
        for position in 0..member.start {
            let page = member.row[position as usize / self.page_size];
            let expected = in_layer(layer, member.expected[position as usize]);
            let is_wrong = !is_misled && *self.word(&member.row, position, layer) != expected;
            if loading.contains(&page.slot()) || is_wrong {
                return Err(WrongPage { request: member.request, position });
            }
        }
        Ok(())
    }

    /// Writes a layer of the member's KV, and produces its tokens. Positions of rejected drafts are
    /// invalid.
    fn compute(&mut self, member: &Member, layer: usize, accepted_tokens: u32) -> Vec<Token> {
        if member.is_invalid {
            self.spoil_written(member);
            return Vec::new();
        }
        if self.is_misled(member) {
            self.spoil_written(member);
            return vec![RUBBISH_TOKEN; member.produces.into()];
        }
        let known = member.expected.len() as u32;
        let is_decode = member.start + 1 == known && member.produces;
        let produced = match (member.produces, is_decode) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => member.tokens.min(accepted_tokens).max(1),
        };
        let mut expected = member.expected.clone();
        let mut tokens = Vec::new();
        for _ in 0..produced {
            let token = next_token(*expected.last().expect("a prompt is not empty"));
            expected.push(mix(*expected.last().expect("a prompt is not empty"), token));
            tokens.push(token);
        }
        let accepted = if is_decode { member.start + produced } else { known };
        for position in member.start..member.start + member.tokens {
            let sound = position < accepted && !self.is_cut(member, position);
            *self.word(&member.row, position, layer) =
                if sound { in_layer(layer, expected[position as usize]) } else { RUBBISH };
        }
        tokens
    }

    /// Returns whether a position cannot be computed because its passage ends behind the step's
    /// part.
    fn is_cut(&self, member: &Member, position: u32) -> bool {
        let Some(whole) = self.whole.get(&member.request) else { return false };
        let end = member.start + member.tokens;
        whole
            .iter()
            .any(|passage| passage.start <= position && position < passage.end && end < passage.end)
    }

    /// Records tokens of steps whose reports were delayed.
    fn learn_late_tokens(&mut self) {
        if self.overlaps() {
            let live: Vec<RequestId> = self.expected.keys().copied().collect();
            live.into_iter().for_each(|request| self.learn_tokens(request));
        }
    }

    /// Records the tokens of a live request.
    fn learn_tokens(&mut self, request: RequestId) {
        let Some(tokens) = self.scheduler.tokens(request) else { return };
        let Some(expected) = self.expected.get_mut(&request) else { return };
        let known = expected.len() - tokens.prompt.len();
        let before = expected.len();
        for &token in &tokens.appended[known..] {
            let last = *expected.last().expect("a prompt is not empty");
            if token != next_token(last) {
                self.wrong_token = Some(request);
            }
            expected.push(mix(last, token));
        }
        let crosses = before / self.page_size < expected.len() / self.page_size;
        let words = if crosses { expected.clone() } else { return };
        self.note_writable(&words, before, self.writes_of(request));
    }

    fn word(&mut self, row: &[DevicePage], position: u32, layer: usize) -> &mut u64 {
        let (entry, offset) =
            (position as usize / self.page_size, position as usize % self.page_size);
        self.device[row[entry]].word(layer, offset)
    }
}

fn extend_expected(expected: &mut Vec<u64>, start: u64, tokens: &[Token], passages: &[Passage]) {
    for (position, &token) in (0..).zip(tokens) {
        let last = expected.last().copied().unwrap_or(start);
        let is_there = |passage: &&Passage| passage.start <= position && position < passage.end;
        let content = passages.iter().find(is_there).and_then(|passage| passage.content);
        let word = mix(last, token);
        expected.push(content.map_or(word, |content| mix(word, content.0 as Token)));
    }
}

/// Returns the right content of a position, given that of the previous one.
fn mix(before: u64, token: Token) -> u64 {
    let mut word = (before ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    word ^= word >> 29;
    word.wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// Returns the token that follows a prefix.
fn next_token(prefix: u64) -> Token {
    (prefix >> 32) as Token % 50_000 + 50_000
}
