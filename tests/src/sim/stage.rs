//! Performs actions in a world and checks all invariants after each.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;

use terrace_scheduler::{
    Config, ContentKey, Event, OpId, Outcome, Passage, Plan, Request, RequestId, StateName, Token,
};

use super::action::{Action, Opening, PassageOption, RequestOptions};
use super::router::Router;
use crate::world::{LAYERS, Transfer, World};

/// Largest number of ended conversations that can be continued.
const CONVERSATIONS_MAX: usize = 8;
/// Number of outcomes that can be repeated.
const RECENT_MAX: usize = 16;

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The engine read KV that does not belong to its tokens.
    WrongPage(String),
    /// A page, pin, slot or budget is lost or owned twice.
    Audit(String),
    /// The engine's page table differs from the scheduler's.
    WrongRow(RequestId),
    /// A request got a token that does not follow its others.
    WrongToken(RequestId),
    /// The scheduler detected a broken invariant.
    Panic(String),
    /// Requests did not end in time without faults.
    Unending(String),
    /// A resource was not released at the end.
    NotReturned(String),
    /// A page was written to or read from a tier that the request does not use.
    TierViolation(String),
    /// The state of a router that follows the KV events is wrong.
    StaleRouter(String),
    /// Available pages were not reused, or a request waited without a reason.
    LowReuse(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongPage(what) => write!(f, "wrong page: {what}"),
            Self::Audit(what) => write!(f, "audit: {what}"),
            Self::WrongRow(request) => write!(f, "the row of {request} is wrong"),
            Self::WrongToken(request) => write!(f, "a token of {request} is wrong"),
            Self::Panic(what) => write!(f, "panic: {what}"),
            Self::Unending(what) => write!(f, "unending: {what}"),
            Self::NotReturned(what) => write!(f, "not returned: {what}"),
            Self::TierViolation(what) => write!(f, "overreach: {what}"),
            Self::StaleRouter(what) => write!(f, "a router has stale state: {what}"),
            Self::LowReuse(what) => write!(f, "low reuse: {what}"),
        }
    }
}

/// A world in which actions are performed.
#[derive(Debug)]
pub struct Stage {
    /// The world.
    pub world: World,
    /// Live requests, oldest first.
    pub live: Vec<RequestId>,
    /// Pending outcomes, oldest first.
    pub owed: Vec<(OpId, u32)>,
    /// Operations that were cancelled before their outcome.
    pub cancelled: BTreeSet<OpId>,
    /// A hash of every plan so far.
    pub fingerprint: u64,
    recent: VecDeque<(OpId, u32)>,
    conversations: VecDeque<Vec<Token>>,
    recorded: BTreeSet<RequestId>,
    next_request: u64,
    next_op: OpId,
    ranks: u32,
    router: Option<Router>,
}

impl Stage {
    /// Creates an empty stage.
    ///
    /// # Panics
    /// Panics if the configuration is invalid.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            ranks: config.model.ranks,
            router: Router::new(&config),
            world: World::new(config).expect("a legal configuration"),
            live: Vec::new(),
            owed: Vec::new(),
            cancelled: BTreeSet::new(),
            fingerprint: 0,
            recent: VecDeque::new(),
            conversations: VecDeque::new(),
            recorded: BTreeSet::new(),
            next_request: 0,
            next_op: OpId(0),
        }
    }

    /// Performs an action and checks all invariants.
    ///
    /// # Errors
    /// Returns the violated invariant.
    pub fn perform(&mut self, action: &Action) -> Result<(), Violation> {
        match action {
            Action::Submit { .. } => self.submit(action),
            Action::Abort(nth) => {
                if let Some(place) = nth_of(*nth, self.live.len()) {
                    // The request may have ended since the last plan.
                    let _ = self.world.scheduler.abort(self.world.now, self.live[place]);
                }
            }
            Action::SetPriority(nth, priority) => {
                if let Some(place) = nth_of(*nth, self.live.len()) {
                    let _ = self.world.scheduler.set_priority(self.live[place], *priority);
                }
            }
            Action::Plan => self.plan(),
            Action::Compute(accepted) => {
                if self.world.in_step() {
                    self.world.accepted_tokens = *accepted;
                    self.world.finish_step().map_err(wrong_page)?;
                    self.record_conversations();
                }
            }
            Action::FailMember(nth) => {
                if let Some(request) = self.world.member(*nth) {
                    self.world.finish_step_but(Some(request)).map_err(wrong_page)?;
                    self.record_conversations();
                }
            }
            Action::Execute => self.world.execute().map_err(wrong_page)?,
            Action::ExecuteLayer => self.world.execute_layer().map_err(wrong_page)?,
            Action::FailStep => {
                if self.world.in_step() {
                    self.world.fail_step();
                }
            }
            Action::Report(nth, outcome) => {
                self.report(*nth, *outcome);
                self.record_conversations();
            }
            Action::Arrive(nth, outcome) => {
                if let Some(place) = nth_of(*nth, self.owed.len()) {
                    let (op, rank) = self.owed[place];
                    self.world.arrive(op, rank, *outcome);
                }
            }
            Action::ArriveLayer(nth, layer, outcome) => {
                if let Some(place) = nth_of(*nth, self.owed.len()) {
                    let (op, rank) = self.owed[place];
                    self.world.arrive_layer(op, rank, *layer as usize % LAYERS, *outcome);
                }
            }
            Action::ReportDamaged(nth, page, damage) => {
                if let Some(place) = nth_of(*nth, self.owed.len()) {
                    let (op, rank) = self.owed.remove(place);
                    let pages = self.world.transfers.get(&op).map_or(1, Transfer::pages);
                    let page = *page as usize % pages;
                    let reported = self.world.report_damaged(op, rank, page, *damage);
                    reported.expect("an outcome that is owed is accepted");
                    self.remember(op, rank);
                }
            }
            Action::Repeat(nth) => {
                if let Some(place) = nth_of(*nth, self.recent.len()) {
                    let (op, rank) = self.recent[place];
                    let event = Event::Operation { op, rank, outcome: Outcome::Done };
                    let repeated = self.world.scheduler.advance(self.world.now, event);
                    repeated.expect("a repeated outcome is ignored");
                }
            }
            Action::Wait(us) => self.world.now.0 += us,
            Action::Clear => {
                self.world.scheduler.clear_cache();
            }
            Action::ReplaceWeights(nth) => {
                // With a step in flight it is refused and has no effect.
                let _ = self.world.replace_weights(&format!("weights {nth}"));
            }
            Action::RestartL3(leftovers) => self.world.restart_l3(*leftovers),
        }
        if !matches!(action, Action::Wait(_)) {
            self.check()?;
            if let Some(router) = &mut self.router {
                let followed = router.follow(&mut self.world.scheduler);
                followed.map_err(Violation::StaleRouter)?;
            }
        }
        Ok(())
    }

    /// Audits pages, pins, slots, budgets and rows.
    ///
    /// # Errors
    /// Returns the inconsistency.
    pub fn check(&self) -> Result<(), Violation> {
        let audit = self.world.scheduler.try_audit();
        audit.map_err(|fault| Violation::Audit(fault.to_string()))?;
        if let Some(what) = self.world.overreach() {
            return Err(Violation::TierViolation(what.to_owned()));
        }
        if let Some(request) = self.world.wrong_token() {
            return Err(Violation::WrongToken(request));
        }
        self.world.check_rows().map_err(Violation::WrongRow)
    }

    fn submit(&mut self, action: &Action) {
        let Action::Submit {
            opening,
            opening_tokens,
            own_tokens,
            own_start,
            new_tokens,
            priority,
            namespace,
            stops_at_once,
            ref wishes,
            siblings,
        } = *action
        else {
            return;
        };
        let mut prompt: Vec<Token> = match opening {
            Opening::Text(first) => (first..first + opening_tokens).collect(),
            Opening::Conversation(nth) => nth_of(nth, self.conversations.len())
                .map_or_else(Vec::new, |place| self.conversations[place].clone()),
        };
        prompt.extend(own_start..own_start + own_tokens);
        let mut request = Request::new(self.next_request, prompt, new_tokens);
        self.next_request += 1;
        request.siblings = (self.next_request..).map(RequestId).take(siblings as usize).collect();
        self.next_request += u64::from(siblings);
        request.priority = priority;
        request.waits_for_tokens = request.id.0 % 5 == 4;
        request.adapter = ["", "lora", ""][namespace as usize % 3].to_owned();
        request.salt = ["", "", "tenant"][namespace as usize % 3].to_owned();
        grant(wishes, &mut request);
        let (id, all) = (request.id, request.ids().collect::<Vec<_>>());
        // A prompt that does not fit and a full queue are refused.
        if self.world.submit(request).is_ok() {
            self.live.extend(all);
            if stops_at_once {
                self.world.finishing.insert(id);
            }
        }
    }

    fn plan(&mut self) {
        let plan = self.world.plan();
        self.fingerprint = fingerprint(self.fingerprint, plan);
        self.cancelled.extend(&plan.cancelled);
        let ended: Vec<RequestId> = plan.ended.iter().map(|ended| ended.request).collect();
        for request in ended {
            self.live.retain(|live| *live != request);
            self.recorded.remove(&request);
            self.world.forget_request(request);
        }
        for (&op, _) in self.world.transfers.range(self.next_op..) {
            self.owed.extend((0..self.ranks).map(|rank| (op, rank)));
            self.next_op = OpId(op.0 + 1);
        }
    }

    fn report(&mut self, nth: u32, outcome: Outcome) {
        let Some(place) = nth_of(nth, self.owed.len()) else { return };
        let (op, rank) = self.owed[place];
        if self.world.report(op, rank, outcome).is_err() {
            // It claimed more pages than there are: report it as complete.
            self.world.report(op, rank, Outcome::Done).expect("it is owed");
        }
        if outcome != Outcome::TimedOut {
            self.owed.remove(place);
            self.remember(op, rank);
        }
    }

    fn remember(&mut self, op: OpId, rank: u32) {
        if self.owed.iter().all(|(owed, _)| *owed != op) {
            self.world.transfers.remove(&op);
            self.cancelled.remove(&op);
        }
        self.recent.push_front((op, rank));
        self.recent.truncate(RECENT_MAX);
    }

    fn record_conversations(&mut self) {
        for &request in &self.live {
            let draining = self.world.scheduler.state(request) == Some(StateName::Draining);
            if draining && self.recorded.insert(request) {
                let tokens = self.world.scheduler.tokens(request).expect("it is live");
                self.conversations.push_front(tokens.to_vec());
                self.conversations.truncate(CONVERSATIONS_MAX);
            }
        }
    }
}

fn grant(wishes: &RequestOptions, request: &mut Request) {
    (request.reads, request.writes) = (wishes.reads, wishes.writes);
    if let Some(number) = wishes.adapter {
        request.adapter = format!("lora {number}");
    }
    let tokens = request.prompt.len() as u32;
    if let Some(PassageOption { start, tokens: length, content, is_whole }) = wishes.passage
        && let Some(start) = start.checked_rem(tokens)
    {
        let end = tokens.min(start + length);
        let content = Some(ContentKey(content.into())).filter(|_| content > 0);
        request.passages.push(Passage { start, end, content, is_whole });
    }
}

fn wrong_page(wrong: crate::WrongPage) -> Violation {
    Violation::WrongPage(wrong.to_string())
}

fn nth_of(nth: u32, count: usize) -> Option<usize> {
    (nth as usize).checked_rem(count)
}

/// Returns a hash of a plan.
fn fingerprint(before: u64, plan: &Plan) -> u64 {
    let mut hash = before;
    let mut mix = |word: u64| hash = (hash ^ word).wrapping_mul(0x0100_0000_01B3).rotate_left(23);
    mix(plan.step.map_or(u64::MAX, |step| step.0));
    mix(plan.repeats_max.into());
    for prefill in &plan.prefills {
        mix(prefill.request.0 << 32 | u64::from(prefill.start));
        mix(u64::from(prefill.slot.0) << 32 | u64::from(prefill.tokens));
        if let Some(op) = prefill.waits_for {
            mix(op.0);
        }
    }
    for decode in &plan.decodes {
        mix(decode.request.0 << 32 | u64::from(decode.start));
        mix(u64::from(decode.slot.0) << 32 | u64::from(decode.tokens));
        if let Some((row, step)) = decode.input.zip(plan.behind) {
            mix(step.0 << 32 | u64::from(row));
        }
    }
    for change in &plan.rows {
        mix(u64::from(change.slot.0) << 32 | u64::from(change.first_entry));
        plan.row_pages(change).iter().for_each(|page| mix(page.slot().into()));
    }
    for copy in &plan.copies {
        mix(copy.op.0 << 1 | copy.direction as u64);
        plan.device_pages(copy).iter().for_each(|page| mix(page.slot().into()));
        plan.host_pages(copy).iter().for_each(|page| mix(page.slot().into()));
    }
    for op in &plan.l3 {
        mix(op.op.0 << 2 | op.kind as u64);
        plan.l3_keys(op).iter().for_each(|key| mix(key.0 as u64));
        plan.l3_host_pages(op).iter().for_each(|page| mix(page.slot().into()));
    }
    plan.cancelled.iter().for_each(|op| mix(op.0));
    plan.ended.iter().for_each(|ended| mix(ended.request.0 << 4 | ended.state as u64));
    hash
}
