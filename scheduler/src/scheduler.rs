//! The scheduler's surface: submit, abort, plan, advance, deadline, stats.

use std::collections::BTreeSet;
use std::sync::Arc;

use terrace_cache::{
    Cache, DevicePage, Freed, KvEvents, NodeView, PageKey, Passage, Sequence, Token, Tokens,
};
use terrace_fsm::{Event as LifeEvent, OpId, RequestId, StateName, Time, Transition};

use crate::adapters::Adapters;
use crate::backfill::Backfill;
use crate::backup::Backups;
use crate::batch::Batch;
use crate::config::{Config, ms};
use crate::error::{ConfigError, EventError, SubmitError, UnknownRequest};
use crate::event::{Event, Outcome};
use crate::life::News;
use crate::line::Candidate;
use crate::namespaces::Namespaces;
use crate::operations::{Operations, Reported, Work};
use crate::pace::Arrivals;
use crate::plan::{Plan, StepId};
use crate::prefill::ShareOut;
use crate::rates::Rates;
use crate::reading::Reading;
use crate::request::{Prompt, Request};
use crate::requests::{Entry, Handle, Requests};
use crate::sharing::Announced;
use crate::stats::{Hits, Stats};
use crate::step::{Report, Steps};
use crate::waiting::Waiting;
use crate::write_back::Drains;

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
    pub(crate) namespaces: Namespaces,
    pub(crate) cache: Cache,
    pub(crate) requests: Requests,
    /// Who computes.
    pub(crate) batch: Batch,
    pub(crate) steps: Steps,
    /// Who waits for whom.
    pub(crate) announced: Announced,
    pub(crate) adapters: Adapters,
    pub(crate) operations: Operations,
    /// Whether steps begin before the load-backs that they wait for have ended.
    pub(crate) overlaps: bool,
    pub(crate) drains: Drains,
    /// What L3 reading needs; nothing without L3.
    pub(crate) reading: Option<Reading>,
    pub(crate) backups: Backups,
    pub(crate) rates: Rates,
    pub(crate) news: News,
    /// What no part of these counts itself.
    pub(crate) stats: Stats,
    pub(crate) now: Time,
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) backfill: Backfill,
    pub(crate) share_out: ShareOut,
    pub(crate) arrivals: Arrivals,
}

impl Scheduler {
    /// An idle scheduler with an empty cache.
    ///
    /// # Errors
    /// What about the configuration cannot work, and what to change.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            namespaces: Namespaces::new(&config),
            cache: Cache::new(&config.cache),
            requests: Requests::default(),
            batch: Batch::new(config.batch.running_max),
            steps: Steps::new(&config),
            announced: Announced::default(),
            adapters: Adapters::default(),
            operations: Operations::new(config.model.ranks),
            overlaps: config.copies.load_back_overlaps,
            drains: Drains::default(),
            reading: config.l3.as_ref().map(Reading::new),
            backups: Backups::new(config.l3.as_ref()),
            rates: Rates::new(&config.rates),
            news: News::new(config.trace_max),
            stats: Stats::default(),
            now: Time::default(),
            candidates: Vec::new(),
            backfill: Backfill::default(),
            share_out: ShareOut::default(),
            arrivals: Arrivals::default(),
            config,
        })
    }

    // ---- inputs ----

    /// Takes a request, with its [siblings](Request::siblings). They are considered from the next plan on.
    ///
    /// # Errors
    /// Why it, or one of its siblings, cannot be taken; nothing has changed then.
    pub fn submit<P: Prompt>(&mut self, now: Time, request: Request<P>) -> Result<(), SubmitError> {
        let Request { id, prompt, max_new_tokens: max_new, .. } = request;
        let Request { priority, adapter, salt, computes_prompt, waits_for_tokens, .. } = request;
        let (passages, reads, writes) = (request.passages, request.reads, request.writes);
        let siblings = request.siblings;
        self.check_request(id, prompt.tokens() as u64, max_new)?;
        self.check_names(id, &siblings)?;
        self.check_passages(id, &passages, prompt.tokens())?;
        self.now = self.now.max(now);
        let namespace = self.namespace_of(&adapter, &salt);
        let (page_size, now) = (self.config.cache.page_size, self.now);
        let adapter = self.adapters.came(adapter);
        let handle = self.requests.insert(|_, handle| {
            let sequence = prompt.hashed(namespace, page_size, &passages);
            let mut entry = Entry::new(id, handle, priority, sequence, max_new, now);
            entry.computes_prompt = computes_prompt;
            entry.waits_for_tokens = waits_for_tokens;
            (entry.reads, entry.writes) = (reads, writes);
            (entry.adapter, entry.salt) = (adapter, salt.into());
            entry
        });
        self.arrivals.observe(now);
        self.has_come(handle);
        match &mut self.reading {
            Some(reading) => reading.ask_about(handle),
            None => self.requests.wait(handle, Waiting::IN_LINE),
        }
        if !siblings.is_empty() {
            self.add_siblings(handle, &siblings);
        }
        Ok(())
    }

    /// The other answers to a request's prompt come. L3 is asked about the first, and the others find
    /// what that brings when they are looked at.
    fn add_siblings(&mut self, first: Handle, ids: &[RequestId]) {
        let mut handles = vec![first];
        for &id in ids {
            let handle = self.requests.insert(|known, handle| known[first].sibling(id, handle));
            self.adapters.came_again(self.requests[first].adapter);
            self.has_come(handle);
            self.requests.wait(handle, Waiting::IN_LINE);
            handles.push(handle);
        }
        let siblings: Arc<[Handle]> = handles.into();
        for &handle in &*siblings {
            self.requests[handle].siblings = Some(siblings.clone());
        }
    }

    fn has_come(&mut self, handle: Handle) {
        if self.config.queue.start_timeout_ms > 0 {
            let start_by = self.now.after(ms(self.config.queue.start_timeout_ms));
            self.requests.limit_start(handle, Some(start_by));
        }
        self.stats.submitted += 1;
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
        // The KV of the last token that is produced is never needed.
        let tokens = prompt_tokens + u64::from(max_new_tokens.saturating_sub(1));
        let needed_pages = tokens.div_ceil(self.config.cache.page_size.into());
        let device_pages = self.config.cache.device_pages;
        if needed_pages > device_pages.into() || tokens > u64::from(u32::MAX / 2) {
            return Err(SubmitError::NeverFits { request: id, needed_pages, device_pages });
        }
        Ok(())
    }

    /// Whether there is a place for each of these, and no other request of its name.
    fn check_names(&self, id: RequestId, siblings: &[RequestId]) -> Result<(), SubmitError> {
        if self.requests.knows(id) {
            return Err(SubmitError::DuplicateId(id));
        }
        // Those that have ended count until a plan has told so.
        let requests_max = self.config.queue.requests_max;
        let others = self.requests.len() + self.news.ends_untold() + siblings.len();
        if others >= requests_max as usize {
            return Err(SubmitError::QueueFull { requests_max });
        }
        if siblings.is_empty() {
            return Ok(());
        }
        let mut names = BTreeSet::from([id]);
        match siblings.iter().find(|&&name| self.requests.knows(name) || !names.insert(name)) {
            Some(&taken) => Err(SubmitError::DuplicateId(taken)),
            None => Ok(()),
        }
    }

    fn check_passages(
        &self,
        request: RequestId,
        passages: &[Passage],
        prompt_tokens: usize,
    ) -> Result<(), SubmitError> {
        let checked = Passage::check_all(passages, prompt_tokens);
        checked.map_err(|error| SubmitError::BadPassage { request, error })?;
        let tokens_max = self.config.batch.passage_tokens_max();
        let whole = passages.iter().filter(|passage| passage.is_whole).map(Passage::len);
        match whole.max() {
            Some(tokens) if tokens > tokens_max => {
                Err(SubmitError::PassageTooLong { request, tokens, tokens_max })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Calls a request off, whatever it is doing. Operations in flight settle by themselves, and
    /// what they bring, if sound, is kept. What it has computed is copied to host as at any other end.
    ///
    /// # Errors
    /// If there is no such request, or it has ended.
    pub fn abort(&mut self, now: Time, id: RequestId) -> Result<(), UnknownRequest> {
        let handle = self.requests.find(id).ok_or(UnknownRequest(id))?;
        self.now = self.now.max(now);
        self.drain_aborted(handle);
        self.end(handle, &LifeEvent::Abort);
        Ok(())
    }

    /// Changes how urgent a request is, whatever it is doing: from now on it counts as if it had been
    /// submitted so.
    ///
    /// # Errors
    /// If there is no such request, or it has ended.
    pub fn set_priority(&mut self, id: RequestId, priority: i32) -> Result<(), UnknownRequest> {
        let handle = self.requests.find(id).ok_or(UnknownRequest(id))?;
        self.requests.set_priority(handle, priority);
        Ok(())
    }

    /// Takes in something that has happened outside. Late and repeated reports are counted and
    /// otherwise ignored.
    ///
    /// # Errors
    /// What about the event cannot be; nothing has changed then.
    pub fn advance(&mut self, now: Time, event: Event<'_>) -> Result<(), EventError> {
        match event {
            Event::StepDone { step, results, failed } => {
                let check =
                    |steps: &mut Steps, requests: &Requests| steps.check(results, failed, requests);
                if self.step_reported(now, step, check)? {
                    if self.steps.next_may_wait() {
                        self.steps.hold(Report::done(self.now, results, failed));
                    } else {
                        let (step, took) = self.steps.end_first(self.now);
                        self.step_done(step, took, results, failed);
                    }
                }
            }
            Event::StepFailed { step } => {
                if self.step_reported(now, step, |_, _| Ok(()))? {
                    if self.steps.some_are_held() {
                        self.steps.hold(Report::failed(self.now));
                    } else {
                        let (step, _) = self.steps.end_first(self.now);
                        self.step_failed(step);
                    }
                }
            }
            Event::Operation { op, rank, outcome } => {
                self.operation_reported(now, op, rank, outcome)?
            }
        }
        self.end_held_steps();
        Ok(())
    }

    /// Whether the report is news, if it passes `check`.
    fn step_reported(
        &mut self,
        now: Time,
        id: StepId,
        check: impl FnOnce(&mut Steps, &Requests) -> Result<(), EventError>,
    ) -> Result<bool, EventError> {
        if !self.steps.is_next(id)? {
            self.stats.ignored_steps += 1;
            return Ok(false);
        }
        check(&mut self.steps, &self.requests)?;
        self.now = self.now.max(now);
        Ok(true)
    }

    fn operation_reported(
        &mut self,
        now: Time,
        op: OpId,
        rank: u32,
        outcome: Outcome,
    ) -> Result<(), EventError> {
        let owner = self.operations.owner(op);
        let reported = self.operations.report(op, rank, outcome)?;
        self.now = self.now.max(now);
        match reported {
            Reported::Ignored => self.stats.ignored_outcomes += 1,
            // What one rank has found out is not read again while others are still at it.
            Reported::Pending => self.distrust_source(op),
            Reported::TimedOut => {
                if let Some(owner) = owner {
                    self.waited_in_vain(owner);
                }
            }
            Reported::Ended(operation) => match &operation.work {
                Work::Probe { .. } => self.probe_ended(op, operation),
                Work::Prefetch { .. } => self.prefetch_ended(op, operation),
                Work::LoadBack { .. } => self.load_back_ended(op, operation),
                Work::WriteBack { .. } => self.write_back_ended(op, operation),
                Work::Backup { .. } => self.backup_ended(operation),
            },
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
    /// While as many steps are in flight as may be the plan has no step, but may move pages.
    pub fn plan_into(&mut self, now: Time, plan: &mut Plan) {
        plan.clear();
        self.now = self.now.max(now);
        // However late a plan comes, what it can begin is not given up.
        self.plan_prefetches(plan);
        while let Some(handle) = self.requests.next_expired(self.now) {
            self.expire(handle);
        }
        self.end_held_steps();
        self.batch.forget_who_left(&self.requests);
        self.operations.forget_late_room(self.now);
        self.plan_probes(plan);
        // Those that have just ended come first: what is copied for them makes room.
        self.plan_drains(plan);
        if self.steps.may_follow() {
            self.plan_forward(plan);
        }
        self.plan_backups(plan);
        self.cache.replenish();
        self.operations.tell_cancelled(&mut plan.cancelled);
        self.news.tell_completed(&mut plan.completed);
        self.news.tell_ended(&mut self.requests, &mut plan.ended);
    }

    /// When to plan again even if nothing happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        [self.requests.next_timer(), self.backups.next_try(self.now)].into_iter().flatten().min()
    }

    /// Counters and gauges, in constant time.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let running = self.config.batch.running_max - self.batch.free_slots().len() as u32;
        let draining = self.drains.draining();
        let counts = self.operations.counts();
        Stats {
            running,
            draining,
            probes: counts.probes,
            prefetches: counts.prefetches,
            load_backs: counts.load_backs,
            write_backs: counts.write_backs,
            backups: counts.backups,
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

    /// The token that each decode of the latest plan starts from; none where it is [yet to be
    /// produced](crate::Decode::input).
    pub fn inputs(&self, plan: &Plan) -> impl Iterator<Item = Option<Token>> {
        plan.decodes.iter().map(|decode| {
            let entry = self.requests.get(self.batch.holder(decode.slot)?)?;
            // Somebody else may have the slot if it is an older plan.
            (entry.id == decode.request).then(|| entry.sequence.token(decode.start as usize))?
        })
    }

    /// The whole row of a running request, for an engine that has lost its page table. Plans tell
    /// only what changes.
    #[must_use]
    pub fn row(&self, id: RequestId) -> Option<Vec<DevicePage>> {
        let computing = self.requests[self.requests.find(id)?].life.state().computing()?;
        let mut pages = Vec::new();
        self.cache.device_pages(&computing.path, 0, &mut pages);
        pages.extend_from_slice(self.operations.loading(computing));
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
        let page_size = self.config.cache.page_size;
        self.cached_of(&Sequence::new(namespace, page_size, tokens.to_vec()))
    }

    /// How much of a sequence the cache holds. Changes nothing.
    #[must_use]
    pub fn cached_of(&self, sequence: &Sequence) -> Cached {
        let found = self.cache.lookup(sequence, u32::MAX);
        Cached {
            device_pages: found.device.depth,
            host_pages: found.host.depth - found.device.depth,
        }
    }

    /// The start of all page keys under an adapter and a tenant's salt; KV events name it.
    #[must_use]
    pub fn namespace_of(&self, adapter: &str, salt: &str) -> PageKey {
        self.namespaces.digest(adapter, salt)
    }

    /// The configuration it was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Writes the KV events since the last call into `into`, whose memory is used again. The first time,
    /// and when more has happened than `cache.kv_event_keys_max` has room for, it is a snapshot instead.
    pub fn drain_kv_events(&mut self, into: &mut KvEvents) {
        self.cache.drain_events(into);
    }

    /// Writes everything that the cache holds into `into`, whose memory is used again: what somebody
    /// begins with who follows the same KV events as others. Costs as much as it writes.
    pub fn kv_snapshot(&self, into: &mut KvEvents) {
        self.cache.snapshot(into);
    }

    /// Nobody follows the KV events any more: nothing is recorded until they are drained again.
    pub fn stop_kv_events(&mut self) {
        self.cache.stop_events();
    }

    /// The state transitions since the last call, oldest first. If more happened than
    /// `trace_max`, the oldest are missing.
    pub fn drain_trace(&mut self) -> impl Iterator<Item = Transition> + '_ {
        self.news.drain_trace()
    }

    /// Forgets every cached page that no request and no operation holds, and says how many that were.
    /// What is held stays, and may be found again when it is let go.
    pub fn clear_cache(&mut self) -> Freed {
        self.cache.clear()
    }

    /// Forgets every cached page on the device that no request and no operation holds. Host copies stay.
    pub fn clear_device(&mut self) -> Freed {
        self.cache.clear_device()
    }
}
