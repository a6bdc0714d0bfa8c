//! The scheduler: its parts, and the order in which a plan uses them.

use terrace_cache::{
    Cache, DevicePage, Freed, KvEvents, NodeView, PageKey, Sequence, Token, Tokens,
};
use terrace_fsm::{Event as LifeEvent, RequestId, StateName, Time, Transition};

use crate::adapters::Adapters;
use crate::arrivals::Arrivals;
use crate::backfill::Backfill;
use crate::backups::Backups;
use crate::batch::Batch;
use crate::candidates::Candidate;
use crate::config::Config;
use crate::error::{ConfigError, UnknownRequest};
use crate::ids::{AdapterId, Handle};
use crate::l3_reads::L3Reads;
use crate::namespaces::Namespaces;
use crate::notices::Notices;
use crate::operations::Operations;
use crate::plan::Plan;
use crate::producers::Producers;
use crate::rates::Rates;
use crate::requests::Requests;
use crate::stats::{Hits, Stats};
use crate::steps::Steps;
use crate::write_backs::PendingWriteBacks;

mod adapters;
mod admission;
mod advance;
mod audit;
mod backfill;
mod backup;
mod forward;
mod l3_path;
mod lifecycle;
mod load_back;
mod prefetch;
mod prefill;
mod probe;
mod room;
mod sharing;
mod submit;
mod waits;
mod weights;
mod write_back;

/// Cached part of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Pages on device, from the first page on.
    pub device_pages: u32,
    /// Pages on host, behind those on device.
    pub host_pages: u32,
}

/// Decides what an engine computes next and which KV pages move. See the [crate] for the loop.
#[derive(Debug)]
pub struct Scheduler {
    config: Config,
    namespaces: Namespaces,
    cache: Cache,
    requests: Requests,
    batch: Batch,
    steps: Steps,
    producers: Producers,
    adapters: Adapters,
    operations: Operations,
    /// True if steps may start before the load-backs that they wait for have ended.
    overlaps: bool,
    pending_write_backs: PendingWriteBacks,
    /// State of reading from L3; `None` without L3.
    l3_reads: Option<L3Reads>,
    backups: Backups,
    rates: Rates,
    arrivals: Arrivals,
    backfill: Backfill,
    /// Prompt that was passed over because its passage did not fit the rest of a step. It is first in the next.
    passed_over: Option<Handle>,
    notices: Notices,
    /// Counters that no part keeps itself.
    stats: Stats,
    now: Time,
    // Memory that is reused from plan to plan.
    candidates: Vec<Candidate>,
    prefill_turns: Vec<Handle>,
    /// Prompts by the tokens that are left to compute.
    shortest_prefills: Vec<(u32, Handle)>,
}

impl Scheduler {
    /// Makes an idle scheduler with an empty cache.
    ///
    /// # Errors
    /// If the configuration cannot work. The error says what to change.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            namespaces: Namespaces::new(&config),
            cache: Cache::new(&config.cache),
            requests: Requests::default(),
            batch: Batch::new(config.batch.running_max),
            steps: Steps::new(&config),
            producers: Producers::default(),
            adapters: Adapters::default(),
            operations: Operations::new(config.model.ranks),
            overlaps: config.copies.load_back_overlaps,
            pending_write_backs: PendingWriteBacks::default(),
            l3_reads: config.l3.as_ref().map(L3Reads::new),
            backups: Backups::new(config.l3.as_ref()),
            rates: Rates::new(&config.rates),
            arrivals: Arrivals::default(),
            backfill: Backfill::default(),
            passed_over: None,
            notices: Notices::new(config.trace_max),
            stats: Stats::default(),
            now: Time::default(),
            candidates: Vec::new(),
            prefill_turns: Vec::new(),
            shortest_prefills: Vec::new(),
            config,
        })
    }

    // ---- inputs ----

    /// Aborts a request in any state. Its operations in flight continue, and sound pages that they bring are kept.
    /// Computed pages are copied to host as at any other end.
    ///
    /// # Errors
    /// If there is no live request with this id.
    pub fn abort(&mut self, now: Time, id: RequestId) -> Result<(), UnknownRequest> {
        let handle = self.requests.find(id).ok_or(UnknownRequest(id))?;
        self.now = self.now.max(now);
        self.drain_aborted(handle);
        self.end(handle, LifeEvent::Abort);
        Ok(())
    }

    /// Changes the priority of a request in any state, as if it had been submitted with it.
    ///
    /// # Errors
    /// If there is no live request with this id.
    pub fn set_priority(&mut self, id: RequestId, priority: i32) -> Result<(), UnknownRequest> {
        let handle = self.requests.find(id).ok_or(UnknownRequest(id))?;
        self.requests.set_priority(handle, priority);
        Ok(())
    }

    // ---- outputs ----

    /// Returns the next plan. Allocates; [`plan_into`](Self::plan_into) does not.
    pub fn plan(&mut self, now: Time) -> Plan {
        let mut plan = Plan::default();
        self.plan_into(now, &mut plan);
        plan
    }

    /// Writes the next plan into `plan`, whose memory is reused.
    ///
    /// While the maximum number of steps is in flight, the plan has no step, but may move pages.
    pub fn plan_into(&mut self, now: Time, plan: &mut Plan) {
        plan.clear();
        self.now = self.now.max(now);
        // Before timers run out: a late plan must not give up what it can still start.
        self.plan_prefetches(plan);
        while let Some(handle) = self.requests.next_expired(self.now) {
            self.expire(handle);
        }
        self.end_held_steps();
        self.batch.remove_departed(&self.requests);
        self.operations.forget_late_room(self.now);
        self.plan_probes(plan);
        // Write-backs of requests that have just ended are first: they make room.
        self.plan_drains(plan);
        if self.steps.may_follow() {
            self.plan_forward(plan);
        }
        self.plan_backups(plan);
        self.cache.replenish();
        self.operations.tell_cancelled(&mut plan.cancelled);
        self.notices.report(&mut self.requests, plan);
    }

    /// Time at which to plan again even if no event arrives.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        [self.requests.next_timer(), self.backups.next_try(self.now)].into_iter().flatten().min()
    }

    /// Returns all counters and gauges, in constant time.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let running = self.config.batch.running_max - self.batch.free_slots().len() as u32;
        let draining = self.pending_write_backs.draining();
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

    /// Tokens of a live request: its prompt and its answer so far.
    #[must_use]
    pub fn tokens(&self, id: RequestId) -> Option<Tokens<'_>> {
        self.requests.find(id).map(|handle| self.requests[handle].sequence.tokens())
    }

    /// The token that each decode of the latest plan starts from; none where it is [yet to be
    /// produced](crate::Decode::input).
    pub fn inputs(&self, plan: &Plan) -> impl Iterator<Item = Option<Token>> {
        plan.decodes.iter().map(|decode| {
            let entry = self.requests.get(self.batch.holder(decode.slot)?)?;
            // Another request may have the slot if the plan is not the latest.
            (entry.id == decode.request).then(|| entry.sequence.token(decode.start as usize))?
        })
    }

    /// The whole page-table row of a running request, for an engine that has lost its page table. Plans contain
    /// only changes.
    #[must_use]
    pub fn row(&self, id: RequestId) -> Option<Vec<DevicePage>> {
        let computing = self.requests[self.requests.find(id)?].life.state().computing()?;
        let mut pages = Vec::new();
        self.cache.device_pages(&computing.path, 0, &mut pages);
        pages.extend_from_slice(self.operations.loading(computing));
        pages.extend_from_slice(computing.tail.as_slice());
        Some(pages)
    }

    /// Lifecycle state of a live request.
    #[must_use]
    pub fn state(&self, id: RequestId) -> Option<StateName> {
        self.requests.find(id).map(|handle| self.requests[handle].state())
    }

    /// Tokens of a live request's prompt that were cached at its first admission. Loaded tokens count when their
    /// load-back has ended, so the figures are complete with the first token.
    #[must_use]
    pub fn hits(&self, id: RequestId) -> Option<Hits> {
        self.requests.find(id).map(|handle| self.requests[handle].hit_count.hits())
    }

    /// Returns the first nodes of the cache's tree in some namespaces ([`namespace_of`]), parents before their
    /// children, for display. Takes time proportional to what it returns.
    ///
    /// [`namespace_of`]: Self::namespace_of
    #[must_use]
    pub fn tree(&self, namespaces: &[PageKey], nodes_max: usize) -> Vec<NodeView> {
        self.cache.view(namespaces, nodes_max)
    }

    /// Returns how much of a prompt is cached under an adapter and a tenant's salt. Changes nothing.
    #[must_use]
    pub fn cached(&self, tokens: &[Token], adapter: &str, salt: &str) -> Cached {
        let namespace = self.namespace_of(adapter, salt);
        let page_size = self.config.cache.page_size;
        self.cached_of(&Sequence::new(namespace, page_size, tokens.to_vec()))
    }

    /// Returns how much of a sequence is cached. Changes nothing.
    #[must_use]
    pub fn cached_of(&self, sequence: &Sequence) -> Cached {
        let found = self.cache.lookup(sequence, u32::MAX);
        Cached {
            device_pages: found.device.depth,
            host_pages: found.host.depth - found.device.depth,
        }
    }

    /// Name of an adapter that a live request uses; `None` for no adapter and for any other number.
    #[must_use]
    pub fn adapter(&self, adapter: AdapterId) -> Option<&str> {
        self.adapters.name(adapter)
    }

    /// Digest at the start of all page keys under an adapter and a tenant's salt. KV events carry it.
    #[must_use]
    pub fn namespace_of(&self, adapter: &str, salt: &str) -> PageKey {
        self.namespaces.digest(adapter, salt)
    }

    /// Configuration of the scheduler.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Writes the KV events since the last call into `into`, whose memory is reused. The first call, and one after
    /// more events than `cache.kv_event_keys_max` has room for, write a snapshot instead.
    pub fn drain_kv_events(&mut self, into: &mut KvEvents) {
        self.cache.drain_events(into);
    }

    /// Writes a snapshot of the cache into `into`, whose memory is reused: the start for a further consumer of
    /// the KV events. Takes time proportional to what it writes.
    pub fn kv_snapshot(&self, into: &mut KvEvents) {
        self.cache.snapshot(into);
    }

    /// Stops recording KV events until they are drained again.
    pub fn stop_kv_events(&mut self) {
        self.cache.stop_events();
    }

    /// Removes and returns the recorded state transitions, oldest first. If there were more than `trace_max`, the
    /// oldest are missing.
    pub fn drain_trace(&mut self) -> impl Iterator<Item = Transition> + '_ {
        self.notices.drain_trace()
    }

    /// Removes every cached page that no request and no operation holds, and returns their number. Pages that
    /// are held stay cached.
    pub fn clear_cache(&mut self) -> Freed {
        self.cache.clear()
    }

    /// Forgets every cached page on the device that no request and no operation holds. Host copies stay.
    pub fn clear_device(&mut self) -> Freed {
        self.cache.clear_device()
    }
}
