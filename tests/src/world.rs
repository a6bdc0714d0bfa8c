//! A world for the scheduler: arenas with bytes, an L3 store, and an engine that checks every page
//! it reads.
//!
//! What belongs at a position of a sequence is a function of the namespace and of all tokens up to
//! it, so a wrong page cannot go unnoticed. Transfers move bytes when their outcome arrives, and
//! leave rubbish where they fail.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};
use terrace_scheduler::{
    Config, ConfigError, CopyDirection, DevicePage, Event, EventError, HostPage, L3Kind, OpId,
    Outcome, Output, PageKey, Plan, Request, RequestId, Scheduler, StepId, StepResult, SubmitError,
    Time, Token,
};

/// The bytes of a page: one word for each position.
type Bytes = Vec<u64>;

/// What a page holds that nothing sound was written to.
const RUBBISH: u64 = 0xDEAD;

/// The engine read something that does not belong to the tokens in hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongPage {
    /// Who read it.
    pub request: RequestId,
    /// At which position.
    pub position: u32,
}

impl fmt::Display for WrongPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} read wrong KV at position {}", self.request, self.position)
    }
}

/// What L3 stores under a key: the bytes, and what a reader needs to tell whether they are right.
#[derive(Clone, Debug)]
pub struct Object {
    key: PageKey,
    generation: u32,
    checksum: u64,
    bytes: Bytes,
}

/// How the read of one object goes wrong. The driver's checks notice all of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Damage {
    /// Fewer bytes than asked for.
    ShortRead,
    /// A bit is not what it was.
    FlippedBit,
    /// Another page lies under the key.
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
    /// Which of these L3 has.
    Probe(Vec<PageKey>),
    /// L3 to host.
    Prefetch(Vec<PageKey>, Vec<HostPage>),
    /// Host to L3.
    Backup(Vec<PageKey>, Vec<HostPage>),
}

impl Transfer {
    /// How many pages it is about.
    #[must_use]
    pub fn pages(&self) -> usize {
        match self {
            Self::LoadBack(pages, _) | Self::WriteBack(_, pages) => pages.len(),
            Self::Probe(keys) | Self::Prefetch(keys, _) | Self::Backup(keys, _) => keys.len(),
        }
    }
}

/// What one request does in a step in flight.
#[derive(Clone, Debug)]
struct Member {
    request: RequestId,
    start: u32,
    tokens: u32,
    produces: bool,
    /// Whose token it starts from, if it was not known when the step was planned.
    input: Option<Output>,
    /// What belongs at each position so far.
    expected: Vec<u64>,
    row: Vec<DevicePage>,
    /// What it follows has failed: it computes rubbish.
    in_vain: bool,
}

/// A step that was launched.
#[derive(Debug)]
struct Step {
    id: StepId,
    members: Vec<Member>,
    /// What each of them has produced, once the device is through with it.
    produced: Option<Vec<Vec<Token>>>,
}

/// The scheduler with everything around it.
#[derive(Debug)]
pub struct World {
    /// The scheduler.
    pub scheduler: Scheduler,
    /// The present moment.
    pub now: Time,
    /// Requests whose next tokens are to be their last.
    pub finishing: BTreeSet<RequestId>,
    /// How many tokens a decode accepts of those it may produce, or a step and its repetitions produce.
    pub accepted_tokens: u32,
    /// Operations without a final outcome.
    pub transfers: BTreeMap<OpId, Transfer>,
    /// The pages that L3 holds.
    pub l3: BTreeMap<PageKey, Object>,
    /// Which operations have moved their bytes, on which rank.
    moved: BTreeSet<(OpId, u32)>,
    /// The generation of what is stored from now on; objects of another are stale.
    generation: u32,
    page_size: usize,
    device: Vec<Bytes>,
    host: Vec<Bytes>,
    rows: Vec<Vec<DevicePage>>,
    expected: BTreeMap<RequestId, Vec<u64>>,
    /// Steps in flight, in order.
    steps: VecDeque<Step>,
    /// What the rows of the step that ended last have produced.
    outputs: (Option<StepId>, Vec<Vec<Token>>),
    /// A row of a step that was not what the scheduler meant when it was planned.
    wrong_row: Option<RequestId>,
    plan: Plan,
}

impl World {
    /// An empty world.
    ///
    /// # Errors
    /// If the configuration cannot work.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let page_size = config.cache.page_size as usize;
        let arena = |pages: u32| vec![vec![RUBBISH; page_size]; pages as usize];
        Ok(Self {
            device: arena(config.cache.device_pages),
            host: arena(config.cache.host_pages),
            rows: vec![Vec::new(); config.batch.running_max as usize],
            scheduler: Scheduler::new(config)?,
            now: Time(0),
            finishing: BTreeSet::new(),
            accepted_tokens: u32::MAX,
            transfers: BTreeMap::new(),
            l3: BTreeMap::new(),
            moved: BTreeSet::new(),
            generation: 0,
            page_size,
            expected: BTreeMap::new(),
            steps: VecDeque::new(),
            outputs: (None, Vec::new()),
            wrong_row: None,
            plan: Plan::default(),
        })
    }

    /// Submits a request.
    ///
    /// # Errors
    /// As the scheduler says.
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        let id = request.id;
        // Not the scheduler's own idea of a namespace: that may be what is wrong.
        let namespace = format!("{}/{}", request.adapter, request.salt);
        let start = namespace.bytes().fold(1, |word, byte| mix(word, byte.into()));
        let mut expected = Vec::new();
        extend_expected(&mut expected, start, &request.prompt);
        self.scheduler.submit(self.now, request)?;
        self.expected.insert(id, expected);
        Ok(())
    }

    /// Asks for a plan and starts what it says.
    pub fn plan(&mut self) -> &Plan {
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.plan_into(self.now, &mut plan);
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
                    spoil(&mut self.device, device.iter().map(|page| page.slot()));
                    Transfer::LoadBack(host, device)
                }
                CopyDirection::WriteBack => {
                    spoil(&mut self.host, host.iter().map(|page| page.slot()));
                    Transfer::WriteBack(device, host)
                }
            };
            self.transfers.insert(copy.op, transfer);
        }
        for op in &plan.l3 {
            let keys = plan.l3_keys(op).to_vec();
            let pages = plan.l3_host_pages(op).to_vec();
            let transfer = match op.kind {
                L3Kind::Probe => Transfer::Probe(keys),
                L3Kind::Prefetch => {
                    spoil(&mut self.host, pages.iter().map(|page| page.slot()));
                    Transfer::Prefetch(keys, pages)
                }
                L3Kind::Backup => Transfer::Backup(keys, pages),
            };
            self.transfers.insert(op.op, transfer);
        }
        if let Some(id) = plan.step {
            let members = self.members(&plan);
            let is_wrong = |member: &&Member| {
                self.scheduler.row(member.request).is_none_or(|meant| meant != member.row)
            };
            self.wrong_row = members.iter().find(is_wrong).map(|member| member.request);
            self.steps.push_back(Step { id, members, produced: None });
        }
        self.plan = plan;
        &self.plan
    }

    /// The plan that was made last.
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
            in_vain: false,
        };
        let prefills = plan
            .prefills
            .iter()
            .map(|p| member(p.request, p.slot, p.start, p.tokens, p.produces_token));
        // Repetitions of a step are like drafts of which each is right.
        let decodes = plan.decodes.iter().map(|d| Member {
            input: d.input,
            ..member(d.request, d.slot, d.start, d.tokens + plan.repeats_max, true)
        });
        prefills.chain(decodes).collect()
    }

    /// The request has ended: what was known about it is not needed any more.
    pub fn forget_request(&mut self, request: RequestId) {
        self.expected.remove(&request);
        self.finishing.remove(&request);
    }

    /// Compares the rows that the engine has built from changes with what the scheduler means.
    ///
    /// # Errors
    /// A running request whose row in a step is not what it should be.
    pub fn check_rows(&self) -> Result<(), RequestId> {
        if let Some(request) = self.wrong_row {
            return Err(request);
        }
        // A step behind another may have been planned with pages that were others' too, as it turned out.
        let ahead = self.scheduler.config().batch.steps_in_flight_max > 1;
        for member in self.steps.iter().filter(|_| !ahead).flat_map(|step| &step.members) {
            let meant = self.scheduler.row(member.request);
            if meant.is_some_and(|meant| meant != member.row) {
                return Err(member.request);
            }
        }
        Ok(())
    }

    /// Whether a step is in flight.
    #[must_use]
    pub fn in_step(&self) -> bool {
        !self.steps.is_empty()
    }

    /// The device gets through with the first step that it has not been at, if there is one.
    ///
    /// # Errors
    /// The first page that the step read and that was not what it should be.
    pub fn execute(&mut self) -> Result<(), WrongPage> {
        let Some(place) = self.steps.iter().position(|step| step.produced.is_none()) else {
            return Ok(());
        };
        let mut members = std::mem::take(&mut self.steps[place].members);
        for member in &mut members {
            self.take_input(member);
        }
        for member in members.iter().filter(|member| !member.in_vain) {
            self.check_reads(member)?;
        }
        let produced = members.iter().map(|member| self.compute(member)).collect();
        self.steps[place].members = members;
        self.steps[place].produced = Some(produced);
        Ok(())
    }

    /// A member learns the token that it starts from.
    fn take_input(&self, member: &mut Member) {
        let Some(Output { step, row }) = member.input.filter(|_| !member.in_vain) else { return };
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

    /// Performs the first step in flight, unless it was already, and reports its results.
    ///
    /// # Errors
    /// The first page that the step read and that was not what it should be.
    ///
    /// # Panics
    /// If no step is in flight, or the scheduler refuses the results.
    pub fn finish_step(&mut self) -> Result<(), WrongPage> {
        self.finish_step_but(None)
    }

    /// Who takes part in the first step in flight, by a number modulo how many there are.
    #[must_use]
    pub fn member(&self, nth: u32) -> Option<RequestId> {
        let members = &self.steps.front()?.members;
        Some(members[nth as usize % members.len()].request)
    }

    /// As [`finish_step`](Self::finish_step), except that the part of one request comes to nothing.
    ///
    /// # Errors
    /// The first page that the step read and that was not what it should be.
    ///
    /// # Panics
    /// If no step is in flight, or the scheduler refuses the results.
    pub fn finish_step_but(&mut self, failed: Option<RequestId>) -> Result<(), WrongPage> {
        if self.steps[0].produced.is_none() {
            self.execute()?;
        }
        let Step { id: step, members, produced } = self.steps.pop_front().expect("it was there");
        let produced = produced.expect("it was executed");
        if let Some(request) = failed {
            let its = members.iter().filter(|member| member.request == request);
            its.for_each(|member| self.spoil_written(member));
            self.all_in_vain(|member| member.request == request);
        }
        let results: Vec<StepResult<'_>> = members
            .iter()
            .zip(&produced)
            .filter(|(member, _)| member.produces && !member.in_vain)
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
        for member in members.iter().filter(|member| member.produces) {
            self.learn_tokens(member.request);
        }
        self.outputs = (Some(step), produced);
        Ok(())
    }

    /// Reports that the first step in flight came to nothing; its pages hold rubbish now.
    ///
    /// # Panics
    /// If no step is in flight.
    pub fn fail_step(&mut self) {
        let Step { id: step, members, .. } = self.steps.pop_front().expect("a step is in flight");
        members.iter().for_each(|member| self.spoil_written(member));
        self.all_in_vain(|_| true);
        self.scheduler.advance(self.now, Event::StepFailed { step }).expect("it was in flight");
    }

    fn spoil_written(&mut self, member: &Member) {
        for position in member.start..member.start + member.tokens {
            *self.word(&member.row, position) = RUBBISH;
        }
    }

    /// What these compute in steps in flight follows something that has failed.
    fn all_in_vain(&mut self, which: impl Fn(&Member) -> bool) {
        let members = self.steps.iter_mut().flat_map(|step| &mut step.members);
        members.filter(|member| which(member)).for_each(|member| member.in_vain = true);
    }

    /// Brings an operation to an outcome on one rank, and moves the bytes that it says were moved.
    ///
    /// # Errors
    /// As the scheduler says.
    pub fn report(&mut self, op: OpId, rank: u32, outcome: Outcome) -> Result<(), EventError> {
        let outcome = self.perform(op, rank, outcome, None);
        self.scheduler.advance(self.now, Event::Operation { op, rank, outcome })
    }

    /// Brings a transfer to its end on one rank, except that one page of it, if it is a prefetch,
    /// was damaged on the way. The driver checks what it reads, so it reports what came before.
    ///
    /// # Errors
    /// As the scheduler says.
    pub fn report_damaged(
        &mut self,
        op: OpId,
        rank: u32,
        page: usize,
        damage: Damage,
    ) -> Result<(), EventError> {
        let outcome = self.perform(op, rank, Outcome::Done, Some((page, damage)));
        self.scheduler.advance(self.now, Event::Operation { op, rank, outcome })
    }

    /// Reads an object as a driver does: whatever is not exactly right counts as missing.
    fn read(&self, key: PageKey, damage: Option<Damage>) -> Option<Bytes> {
        let mut object = self.l3.get(&key)?.clone();
        match damage {
            None => {}
            Some(Damage::ShortRead) => drop(object.bytes.pop()),
            Some(Damage::FlippedBit) => object.bytes[0] ^= 1 << 17,
            Some(Damage::WrongPage) => object.key = PageKey(key.0 ^ 1),
            Some(Damage::StaleGeneration) => object.generation = object.generation.wrapping_sub(1),
        }
        let sound = object.key == key
            && object.generation == self.generation
            && object.bytes.len() == self.page_size
            && object.checksum == checksum(&object.bytes);
        sound.then_some(object.bytes)
    }

    /// L3 is wiped. With `leftovers` its objects remain, but are of an old generation.
    pub fn restart_l3(&mut self, leftovers: bool) {
        self.generation += 1;
        if !leftovers {
            self.l3.clear();
        }
    }

    /// Moves bytes as the outcome says. A probe is answered truly where the outcome is `Done`.
    fn perform(
        &mut self,
        op: OpId,
        rank: u32,
        outcome: Outcome,
        damaged: Option<(usize, Damage)>,
    ) -> Outcome {
        let pages = self.transfers.get(&op).map_or(0, Transfer::pages);
        let sound = match outcome {
            Outcome::Done => usize::MAX,
            Outcome::Partial(claimed) | Outcome::CorruptAfter(claimed)
                if claimed as usize > pages =>
            {
                return outcome;
            }
            Outcome::Partial(pages) | Outcome::CorruptAfter(pages) => pages as usize,
            Outcome::Missing | Outcome::Failed | Outcome::Corrupt => 0,
            Outcome::TimedOut => return outcome,
        };
        // Bytes move once; a report that comes again moves nothing.
        if !self.moved.insert((op, rank)) {
            return outcome;
        }
        let rubbish = vec![RUBBISH; self.page_size];
        match self.transfers.get(&op) {
            Some(Transfer::LoadBack(from, to)) => {
                for (place, (from, to)) in from.iter().zip(to).enumerate() {
                    let source = &self.host[from.slot() as usize];
                    self.device[to.slot() as usize] =
                        if place < sound { source.clone() } else { rubbish.clone() };
                }
                if let Outcome::Corrupt | Outcome::CorruptAfter(_) = outcome {
                    // It is the host's memory that has gone bad.
                    spoil(&mut self.host, from.iter().skip(sound).map(|page| page.slot()));
                }
                outcome
            }
            Some(Transfer::WriteBack(from, to)) => {
                for (place, (from, to)) in from.iter().zip(to).enumerate() {
                    let source = &self.device[from.slot() as usize];
                    self.host[to.slot() as usize] =
                        if place < sound { source.clone() } else { rubbish.clone() };
                }
                outcome
            }
            Some(Transfer::Probe(keys)) => match outcome {
                Outcome::Done => {
                    let found = keys.iter().take_while(|key| self.l3.contains_key(key)).count();
                    if found == keys.len() { Outcome::Done } else { Outcome::Partial(found as u32) }
                }
                _ => outcome,
            },
            Some(Transfer::Prefetch(keys, to)) => {
                let mut arrived = 0;
                for (place, (&key, to)) in keys.iter().zip(to).enumerate() {
                    let damage = damaged.filter(|(page, _)| *page == place).map(|(_, how)| how);
                    let wanted = place < sound && arrived == place;
                    let source = wanted.then(|| self.read(key, damage)).flatten();
                    arrived += usize::from(source.is_some());
                    self.host[to.slot() as usize] = source.unwrap_or_else(|| rubbish.clone());
                }
                match outcome {
                    Outcome::Done | Outcome::Partial(_) | Outcome::CorruptAfter(_)
                        if arrived < sound.min(keys.len()) =>
                    {
                        Outcome::Partial(arrived as u32)
                    }
                    _ => outcome,
                }
            }
            Some(Transfer::Backup(keys, from)) => {
                for (stored, (&key, from)) in keys.iter().zip(from).take(sound).enumerate() {
                    let bytes = self.host[from.slot() as usize].clone();
                    // A driver that checks its source does not store memory that has gone bad.
                    if bytes == rubbish {
                        return Outcome::Partial(stored as u32);
                    }
                    let (generation, checksum) = (self.generation, checksum(&bytes));
                    self.l3.insert(key, Object { key, generation, checksum, bytes });
                }
                if let Outcome::Corrupt | Outcome::CorruptAfter(_) = outcome {
                    spoil(&mut self.host, from.iter().skip(sound).map(|page| page.slot()));
                }
                outcome
            }
            None => outcome,
        }
    }

    fn check_reads(&mut self, member: &Member) -> Result<(), WrongPage> {
        for position in 0..member.start {
            if *self.word(&member.row, position) != member.expected[position as usize] {
                return Err(WrongPage { request: member.request, position });
            }
        }
        Ok(())
    }

    /// Writes the member's KV and produces its tokens. Positions of drafts that were not accepted
    /// hold rubbish.
    fn compute(&mut self, member: &Member) -> Vec<Token> {
        if member.in_vain {
            self.spoil_written(member);
            return Vec::new();
        }
        let known = member.expected.len() as u32;
        let is_decode = member.start + 1 == known && member.produces;
        let produced = match (member.produces, is_decode) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => member.tokens.min(self.accepted_tokens).max(1),
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
            let sound = position < accepted;
            *self.word(&member.row, position) =
                if sound { expected[position as usize] } else { RUBBISH };
        }
        tokens
    }

    /// Notes what a live request has produced.
    fn learn_tokens(&mut self, request: RequestId) {
        let Some(tokens) = self.scheduler.tokens(request) else { return };
        let Some(expected) = self.expected.get_mut(&request) else { return };
        let known = expected.len() - tokens.prompt.len();
        for &token in &tokens.appended[known..] {
            let last = *expected.last().expect("a prompt is not empty");
            expected.push(mix(last, token));
        }
    }

    fn word(&mut self, row: &[DevicePage], position: u32) -> &mut u64 {
        let (entry, offset) =
            (position as usize / self.page_size, position as usize % self.page_size);
        &mut self.device[row[entry].slot() as usize][offset]
    }
}

/// Whoever reads these pages before something sound is written to them reads rubbish.
fn spoil(arena: &mut [Bytes], slots: impl Iterator<Item = u32>) {
    for slot in slots {
        arena[slot as usize].fill(RUBBISH);
    }
}

fn checksum(bytes: &[u64]) -> u64 {
    bytes.iter().fold(0, |sum, &word| mix(sum ^ word, 1))
}

fn extend_expected(expected: &mut Vec<u64>, start: u64, tokens: &[Token]) {
    for &token in tokens {
        let last = expected.last().copied().unwrap_or(start);
        expected.push(mix(last, token));
    }
}

/// What belongs at a position, given what belongs before it.
fn mix(before: u64, token: Token) -> u64 {
    let mut word = (before ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    word ^= word >> 29;
    word.wrapping_mul(0xBF58_476D_1CE4_E5B9)
}

/// The token that follows a prefix.
fn next_token(prefix: u64) -> Token {
    (prefix >> 32) as Token % 50_000 + 50_000
}
