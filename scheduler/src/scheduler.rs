//! The scheduler's surface: submit, abort, plan, advance, deadline, stats.

use std::collections::VecDeque;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{
    Cache, DevicePage, Freed, HashedMap, KvEvent, Namespace, NodeView, PageKey, Sequence, Token,
    Tokens,
};
use terrace_fsm::{
    Event as LifeEvent, OpId, RequestId, Slot, State, StateName, Time, Transition,
};

use crate::backup::PendingBackup;
use crate::config::{Config, ms};
use crate::error::{ConfigError, EventError, SubmitError, UnknownRequest};
use crate::event::{Event, Outcome};
use crate::forward::Step;
use crate::line::Candidate;
use crate::operations::{Operations, Reported, Work};
use crate::plan::{Ended, Plan, StepId};
use crate::prefetch::Reading;
use crate::prefill::Short;
use crate::rates::Rates;
use crate::request::{Prompt, Request};
use crate::requests::{Entry, Handle, Requests};
use crate::stats::{Hits, Stats};
use crate::store_health::Backoff;
use crate::waiting::Waiting;

/// How much of a prompt the cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Pages on device, from the first.
    pub device_pages: u32,
    /// Pages behind those that are on host.
    pub host_pages: u32,
}

/// Decides what an engine computes next and which KV pages move. See the [crate] for the loop.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) namespace: Namespace,
    pub(crate) cache: Cache,
    pub(crate) requests: Requests,
    /// Requests with a slot, by admission; some may have ended since the last plan.
    pub(crate) running: Vec<Handle>,
    /// Whether some have.
    pub(crate) some_left_batch: bool,
    /// How many of them prefill.
    pub(crate) prefilling: usize,
    pub(crate) free_slots: Vec<Slot>,
    /// Who has a slot, or had it last.
    pub(crate) slot_holders: Vec<Option<Handle>>,
    /// Requests whose prefill others may wait for, by the page that they compute next.
    pub(crate) computing: HashedMap<PageKey, Handle>,
    pub(crate) step: Option<Step>,
    pub(crate) spare_step: Option<Step>,
    pub(crate) next_step: u64,
    pub(crate) prefill_streak: u32,
    pub(crate) operations: Operations,
    /// Requests that have ended and whose pages may be copied to host.
    pub(crate) drains: VecDeque<Handle>,
    /// What L3 reading needs; nothing without L3.
    pub(crate) reading: Option<Reading>,
    /// Paths whose host pages are to be stored in L3.
    pub(crate) backups: VecDeque<PendingBackup>,
    pub(crate) backup_backoff: Backoff,
    pub(crate) rates: Rates,
    pub(crate) stats: Stats,
    pub(crate) now: Time,
    pub(crate) cancelled: Vec<OpId>,
    pub(crate) ended: Vec<Ended>,
    trace: VecDeque<Transition>,
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) by_turn: Vec<Handle>,
    /// Whether somebody's prompt is not computed to its end in the step that is planned.
    pub(crate) is_part_left: bool,
    pub(crate) shortest: Vec<Short>,
}

impl Scheduler {
    /// An idle scheduler with an empty cache.
    ///
    /// # Errors
    /// What about the configuration cannot work, and what to change.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        let (backoff_base_ms, backoff_max_ms) =
            config.l3.as_ref().map_or((0, 0), |l3| (l3.backoff_base_ms, l3.backoff_max_ms));
        Ok(Self {
            namespace: config.namespace(),
            cache: Cache::new(&config.cache),
            requests: Requests::default(),
            running: Vec::new(),
            some_left_batch: false,
            prefilling: 0,
            free_slots: (0..config.batch.running_max).rev().map(Slot).collect(),
            slot_holders: vec![None; config.batch.running_max as usize],
            computing: HashedMap::default(),
            step: None,
            spare_step: None,
            next_step: 0,
            prefill_streak: 0,
            operations: Operations::new(config.model.ranks),
            drains: VecDeque::new(),
            reading: config.l3.as_ref().map(Reading::new),
            backups: VecDeque::new(),
            backup_backoff: Backoff::new(ms(backoff_base_ms), ms(backoff_max_ms)),
            rates: Rates::new(&config.rates),
            stats: Stats::default(),
            now: Time::default(),
            cancelled: Vec::new(),
            ended: Vec::new(),
            trace: VecDeque::new(),
            candidates: Vec::new(),
            by_turn: Vec::new(),
            is_part_left: false,
            shortest: Vec::new(),
            config,
        })
    }

    // ---- inputs ----

    /// Takes a request. It is considered from the next plan on.
    ///
    /// # Errors
    /// Why it cannot be taken; nothing has changed then.
    pub fn submit<P: Prompt>(&mut self, now: Time, request: Request<P>) -> Result<(), SubmitError> {
        let Request { id, prompt, max_new_tokens: max_new, .. } = request;
        let Request { priority, adapter, salt, computes_prompt, .. } = request;
        self.check_request(id, prompt.tokens() as u64, max_new)?;
        self.now = self.now.max(now);
        let namespace = self.namespace_of(&adapter, &salt);
        let (page_size, now) = (self.config.cache.page_size, self.now);
        let handle = self.requests.insert(|handle| {
            let sequence = prompt.hashed(namespace, page_size);
            let mut entry = Entry::new(id, handle, priority, sequence, max_new, now);
            entry.computes_prompt = computes_prompt;
            entry
        });
        if self.config.queue.start_timeout_ms > 0 {
            let start_by = now.after(ms(self.config.queue.start_timeout_ms));
            self.requests.limit_start(handle, Some(start_by));
        }
        self.stats.submitted += 1;
        match &mut self.reading {
            Some(reading) => reading.to_ask.push_back(handle),
            None => self.requests.wait(handle, Waiting::IN_LINE),
        }
        Ok(())
    }

    fn check_request(
        &self,
        id: RequestId,
        prompt_tokens: u64,
        max_new_tokens: u32,
    ) -> Result<(), SubmitError> {
        if prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt(id));
        }
        if max_new_tokens == 0 {
            return Err(SubmitError::NoNewTokens(id));
        }
        // The KV of the last token is never needed.
        let tokens = prompt_tokens + u64::from(max_new_tokens) - 1;
        let needed_pages = tokens.div_ceil(self.config.cache.page_size.into());
        let device_pages = self.config.cache.device_pages;
        if needed_pages > device_pages.into() || tokens > u64::from(u32::MAX / 2) {
            return Err(SubmitError::NeverFits { request: id, needed_pages, device_pages });
        }
        if self.requests.knows(id) {
            return Err(SubmitError::DuplicateId(id));
        }
        // Those that have ended count until a plan has told so.
        let requests_max = self.config.queue.requests_max;
        if self.requests.len() + self.ended.len() >= requests_max as usize {
            return Err(SubmitError::QueueFull { requests_max });
        }
        Ok(())
    }

    /// Calls a request off, whatever it is doing. Operations in flight settle by themselves, and
    /// what they bring, if sound, is kept.
    ///
    /// # Errors
    /// If there is no such request, or it has ended.
    pub fn abort(&mut self, now: Time, id: RequestId) -> Result<(), UnknownRequest> {
        let handle = self.requests.find(id).ok_or(UnknownRequest(id))?;
        self.now = self.now.max(now);
        self.end(handle, &LifeEvent::Abort);
        Ok(())
    }

    /// Takes in something that has happened outside. Late and repeated reports are counted and
    /// otherwise ignored.
    ///
    /// # Errors
    /// What about the event cannot be; nothing has changed then.
    pub fn advance(&mut self, now: Time, event: Event<'_>) -> Result<(), EventError> {
        match event {
            Event::StepDone { step, results } => {
                let Some(step) =
                    self.take_step(step, |this, step| this.check_results(step, results))?
                else {
                    return Ok(());
                };
                self.now = self.now.max(now);
                self.step_done(step, results);
            }
            Event::StepFailed { step } => {
                let Some(step) = self.take_step(step, |_, _| Ok(()))? else { return Ok(()) };
                self.now = self.now.max(now);
                self.step_failed(step);
            }
            Event::Operation { op, rank, outcome } => {
                self.operation_reported(now, op, rank, outcome)?
            }
        }
        Ok(())
    }

    /// The step in flight, if that is the one and it passes `check`; nothing for a repeated report.
    fn take_step(
        &mut self,
        id: StepId,
        check: impl FnOnce(&Self, &Step) -> Result<(), EventError>,
    ) -> Result<Option<Step>, EventError> {
        if id.0 >= self.next_step {
            return Err(EventError::UnknownStep(id));
        }
        match &self.step {
            Some(step) if step.id == id => {
                check(self, step)?;
                Ok(self.step.take())
            }
            Some(_) | None => {
                self.stats.ignored_steps += 1;
                Ok(None)
            }
        }
    }

    fn operation_reported(
        &mut self,
        now: Time,
        op: OpId,
        rank: u32,
        outcome: Outcome,
    ) -> Result<(), EventError> {
        let owner = self.operations.owner(op);
        let reported = self.operations.report(op, rank, outcome, &mut self.stats)?;
        self.now = self.now.max(now);
        match reported {
            Reported::Ignored => {}
            // What one rank has found out is not read again while others are still at it.
            Reported::Pending => self.distrust_source(op),
            Reported::TimedOut => {
                if let Some(owner) = owner {
                    self.waited_in_vain(owner);
                }
            }
            Reported::Ended(operation) => {
                self.cancelled.retain(|&cancelled| cancelled != op);
                match &operation.work {
                    Work::Probe { .. } => self.probe_ended(op, operation),
                    Work::Prefetch { .. } => self.prefetch_ended(op, operation),
                    Work::LoadBack { .. } => self.load_back_ended(op, operation),
                    Work::WriteBack { .. } => self.write_back_ended(op, operation),
                    Work::Backup { .. } => self.backup_ended(operation),
                }
            }
        }
        Ok(())
    }

    // ---- outputs ----

    /// What to do next. Allocates; engines that care use [`plan_into`](Self::plan_into).
    pub fn plan(&mut self, now: Time) -> Plan {
        let mut plan = Plan::default();
        self.plan_into(now, &mut plan);
        plan
    }

    /// Writes what to do next into a plan, whose memory is used again.
    ///
    /// While a step is in flight the plan has no step, but may move pages.
    pub fn plan_into(&mut self, now: Time, plan: &mut Plan) {
        plan.clear();
        self.now = self.now.max(now);
        self.forget_who_left();
        // However late a plan comes, what it can begin is not given up.
        self.plan_prefetches(plan);
        while let Some(handle) = self.requests.next_expired(self.now) {
            self.expire(handle);
        }
        self.plan_probes(plan);
        // Those that have just ended come first: what is copied for them makes room.
        self.plan_drains(plan);
        if self.step.is_none() {
            self.plan_forward(plan);
        }
        self.plan_backups(plan);
        self.cache.replenish();
        self.cancelled.sort_unstable();
        plan.cancelled.append(&mut self.cancelled);
        self.ended.iter().for_each(|ended| self.requests.end_told(ended.request));
        plan.ended.append(&mut self.ended);
    }

    /// When to plan again even if nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        let backup = (!self.backups.is_empty() && !self.backup_backoff.allows(self.now))
            .then(|| self.backup_backoff.until());
        [self.requests.next_timer(), backup].into_iter().flatten().min()
    }

    /// Counters and gauges, in constant time.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let running = self.config.batch.running_max - self.free_slots.len() as u32;
        let draining = self.stats.draining;
        Stats {
            running,
            waiting: self.requests.len() as u32 - running - draining,
            backups_waiting: self.backups.len() as u32,
            node_visits: self.cache.node_visits(),
            cache: self.cache.usage(),
            ..self.stats
        }
    }

    /// The tokens of a live request: its prompt and what it has produced.
    #[must_use]
    pub fn tokens(&self, id: RequestId) -> Option<Tokens<'_>> {
        self.requests.find(id).map(|handle| self.requests[handle].sequence.tokens())
    }

    /// The whole row of a running request, for an engine that has lost its page table. Plans tell
    /// only what changes.
    #[must_use]
    pub fn row(&self, id: RequestId) -> Option<Vec<DevicePage>> {
        let computing = self.requests[self.requests.find(id)?].life.state().computing()?;
        let mut pages = Vec::new();
        self.cache.device_pages(&computing.path, 0, &mut pages);
        pages.extend_from_slice(computing.tail.as_slice());
        Some(pages)
    }

    /// Where a live request is in its life.
    #[must_use]
    pub fn state(&self, id: RequestId) -> Option<StateName> {
        self.requests.find(id).map(|handle| self.requests[handle].state())
    }

    /// What of a live request's prompt was found when it was first admitted: what had to be loaded
    /// counts once it has been, so the figures are complete when the first token is there.
    #[must_use]
    pub fn hits(&self, id: RequestId) -> Option<Hits> {
        self.requests.find(id).map(|handle| self.requests[handle].hits)
    }

    /// The first nodes of what the cache holds in some namespaces ([`namespace_of`]), parents before
    /// their children, for people to look at. Costs as much as it returns.
    ///
    /// [`namespace_of`]: Self::namespace_of
    #[must_use]
    pub fn tree(&self, namespaces: &[PageKey], nodes_max: usize) -> Vec<NodeView> {
        self.cache.view(namespaces, nodes_max)
    }

    /// How much of a prompt the cache holds, under an adapter and a tenant's salt. Changes nothing.
    #[must_use]
    pub fn cached(&self, tokens: &[Token], adapter: &str, salt: &str) -> Cached {
        let namespace = self.namespace_of(adapter, salt);
        let sequence = Sequence::new(namespace, self.config.cache.page_size, tokens.to_vec());
        let found = self.cache.lookup(&sequence, u32::MAX);
        Cached {
            device_pages: found.device.depth,
            host_pages: found.host.depth - found.device.depth,
        }
    }

    /// The start of all page keys under an adapter and a tenant's salt; KV events name it.
    #[must_use]
    pub fn namespace_of(&self, adapter: &str, salt: &str) -> PageKey {
        self.namespace.digest_with(adapter, salt)
    }

    /// The configuration it was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The KV events since the last call, oldest first.
    pub fn drain_kv_events(&mut self) -> impl Iterator<Item = KvEvent> + '_ {
        self.cache.drain_events()
    }

    /// The state transitions since the last call, oldest first. If more happened than
    /// `trace_max`, the oldest are missing.
    pub fn drain_trace(&mut self) -> impl Iterator<Item = Transition> + '_ {
        self.trace.drain(..)
    }

    /// Forgets every cached page that no request and no operation holds, and says how many that were.
    /// What is held stays, and may be found again when it is let go.
    pub fn clear_cache(&mut self) -> Freed {
        self.cache.clear()
    }

    // ---- the life of a request ----

    /// Lets something happen to a request that stays alive.
    pub(crate) fn happen(&mut self, handle: Handle, event: &LifeEvent<'_>) {
        let entry = self.requests.get_mut(handle).expect("a live request");
        let (from, to) = entry.life.handle(event, &mut self.cache);
        if from != to && self.config.trace_max > 0 {
            if self.trace.len() == self.config.trace_max as usize {
                self.trace.pop_front();
            }
            let (at, request) = (self.now, entry.id);
            self.trace.push_back(Transition { at, request, from, event: event.name(), to });
        }
    }

    /// Lets a request's life end, and takes it out of everything it is part of.
    pub(crate) fn end(&mut self, handle: Handle, event: &LifeEvent<'_>) {
        self.abandon_operation(handle);
        self.release_fetched(handle);
        self.leave_batch(handle);
        match self.requests[handle].state() {
            StateName::Draining | StateName::WritingBack => self.stats.draining -= 1,
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
        let (request, state) = (entry.id, entry.state());
        match state {
            StateName::Finished => self.stats.finished += 1,
            StateName::Aborted => self.stats.aborted += 1,
            StateName::Failed => self.stats.failed += 1,
            other => unreachable!("{other:?} is no end"),
        }
        self.ended.push(Ended { request, state, reason });
        self.requests.remove(handle);
    }

    /// Nobody waits for the request's operation any more. Copies to host go on for the cache's
    /// sake; the others may be stopped.
    pub(crate) fn abandon_operation(&mut self, handle: Handle) {
        let state = self.requests[handle].life.state();
        let Some(op) = state.operation() else { return };
        match state {
            State::Submitted { .. }
            | State::Prefetching { .. }
            | State::Prefilling(_)
            | State::Retracted { probe: Some(_), .. } => self.cancelled.push(op),
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
        self.operations.abandon(op, &mut self.stats);
        if planted(Bug::ReuseAfterDeadline)
            && let Some(pages) = self.operations.take_destination(op)
        {
            self.cache.give_host_pages(pages);
        }
    }

    /// Frees the slot of a request that computes; its memory is the caller's business.
    pub(crate) fn leave_batch(&mut self, handle: Handle) {
        self.stop_sharing(handle);
        let state = self.requests[handle].life.state();
        if let Some(computing) = state.computing() {
            self.free_slots.push(computing.slot);
            // It has used its pages up to this moment: they are no older than those of whoever came
            // and went meanwhile.
            if !planted(Bug::RankByAdmission) {
                self.cache.touch(&computing.path, false, self.requests[handle].priority);
            }
            self.prefilling -= usize::from(state.name() == StateName::Prefilling);
            self.some_left_batch = true;
        }
    }

    /// Those that no longer compute are not running.
    pub(crate) fn forget_who_left(&mut self) {
        if std::mem::take(&mut self.some_left_batch) {
            let requests = &self.requests;
            let computes = |entry: &Entry| entry.life.state().computing().is_some();
            self.running.retain(|&handle| requests.get(handle).is_some_and(computes));
        }
    }
}
