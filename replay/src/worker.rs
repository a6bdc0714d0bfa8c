//! A worker: a scheduler, and a model of the machine that executes its plans.

use std::collections::VecDeque;

use terrace_cache::TierUse;
use terrace_scheduler::{
    Config as SchedulerConfig, CopyDirection, Event, KvEvents, L3Kind, L3Path, OpId, Outcome, Plan,
    Request, RequestId, Scheduler, Sequence, StateName, Stats, StepId, StepResult, SubmitError,
    Time, Token,
};

use crate::agenda::{Agenda, Due};
use crate::arrivals::Arrivals;
use crate::cluster::WorkerGroup;
use crate::config::Config;
use crate::cost::{StepCost, StepShape};
use crate::error::ReplayError;
use crate::links::Link;
use crate::report::{LinkName, LinkUse, WorkerUse};
use crate::router::Router;
use crate::series::{Gauge, LinkColumn};
use crate::store::Store;
use crate::tally::{Change, Tally};
use crate::trace::Trace;

/// Tokens of generated answers that no later prompt contains. No prompt has this token, so such
/// answers never match. A step and its repetitions fill at most a page.
const PRODUCED: &[Token] = &[Token::MAX; 256];

/// A worker.
#[derive(Debug)]
pub(crate) struct Worker {
    number: u32,
    scheduler: Scheduler,
    /// Scheduler configuration after a failure of the worker.
    scheduler_config: SchedulerConfig,
    /// Statistics of the schedulers before each failure.
    lost: Vec<Stats>,
    is_up: bool,
    /// Number of completed backups since the last failure.
    backups_ended: u64,
    /// Backups in flight that will fail.
    failing_backups: Vec<OpId>,
    /// Requests that another worker is to decode, with the number of completed backups at which
    /// their pages are in L3.
    to_hand_over: VecDeque<(u64, u32)>,
    kv_events: KvEvents,
    cost: StepCost,
    page_bytes: u64,
    step: Option<StepId>,
    /// Requests that get tokens from the running step, with their positions.
    producing: Vec<(RequestId, u32)>,
    /// Number of tokens that each of them gets.
    tokens_each: u32,
    /// True if later prompts contain answers, so that answers are looked up.
    answers_are_told: bool,
    /// Time of the latest token of the request in each slot.
    last_token_at: Vec<u64>,
    step_ended_us: u64,
    wakes_at_us: u64,
    links: WorkerLinks,
    /// Requests that were submitted and not admitted yet.
    waiting: u32,
    requests: u64,
    busy_us: u64,
    /// Decoding requests of the latest step.
    decoding: u64,
    decoded_rows: u64,
    peaks: Peaks,
}

#[derive(Debug)]
struct WorkerLinks {
    host_to_device: Link,
    device_to_host: Link,
    l3_to_host: Link,
    host_to_l3: Link,
}

#[derive(Debug, Default)]
struct Peaks {
    running: u32,
    waiting: u32,
    device_pages: u64,
    host_pages: u64,
}

/// The environment of a worker's plans and events.
pub(crate) struct Around<'w, 'a> {
    pub(crate) store: &'w mut Store,
    pub(crate) router: &'w mut Router,
    pub(crate) tally: &'w mut Tally<'a>,
    pub(crate) agenda: &'w mut Agenda,
    pub(crate) arrivals: &'w mut Arrivals<'a>,
    /// True if requests wait in front of the worker.
    pub(crate) has_waiting_requests: bool,
}

impl Worker {
    pub(crate) fn new(
        number: u32,
        config: &Config,
        kind: &WorkerGroup,
        scheduler: SchedulerConfig,
        answers_are_told: bool,
    ) -> Result<Self, ReplayError> {
        let slots = scheduler.batch.running_max as usize;
        Ok(Self {
            number,
            scheduler: Scheduler::new(scheduler.clone())?,
            scheduler_config: scheduler,
            lost: Vec::new(),
            is_up: true,
            backups_ended: 0,
            failing_backups: Vec::new(),
            to_hand_over: VecDeque::new(),
            kv_events: KvEvents::default(),
            cost: kind.cost.in_femtoseconds(),
            page_bytes: config.page_bytes(),
            step: None,
            producing: Vec::new(),
            tokens_each: 0,
            answers_are_told,
            last_token_at: vec![0; slots],
            step_ended_us: 0,
            wakes_at_us: u64::MAX,
            links: WorkerLinks {
                host_to_device: Link::new(&kind.links.host_to_device),
                device_to_host: Link::new(&kind.links.device_to_host),
                l3_to_host: Link::new(&kind.links.l3_to_host),
                host_to_l3: Link::new(&kind.links.host_to_l3),
            },
            waiting: 0,
            requests: 0,
            busy_us: 0,
            decoding: 0,
            decoded_rows: 0,
            peaks: Peaks::default(),
        })
    }

    // ---- input ----

    pub(crate) fn submit(
        &mut self,
        now_us: u64,
        request: Request<Sequence>,
    ) -> Result<(), SubmitError> {
        self.scheduler.submit(Time(now_us), request)?;
        self.requests += 1;
        self.waiting += 1;
        Ok(())
    }

    pub(crate) fn step_ended(&mut self, now_us: u64, trace: &Trace) {
        let step = self.step.take().expect("a step was running");
        self.step_ended_us = now_us;
        let each = self.tokens_each as usize;
        let mut answers = Vec::new();
        if self.answers_are_told {
            for (place, &(request, position)) in self.producing.iter().enumerate() {
                let traced = &trace.requests()[request.0 as usize];
                let positions = position..position + self.tokens_each;
                answers.extend(trace.answer_tokens(traced, positions));
                answers.resize((place + 1) * each, Token::MAX);
            }
        }
        let unknown = || PRODUCED.chunks_exact(each).cycle();
        let tokens = answers.chunks_exact(each).chain(unknown());
        let result = |(&(request, _), tokens)| StepResult { request, tokens, finished: false };
        let results: Vec<StepResult<'_>> = self.producing.iter().zip(tokens).map(result).collect();
        let event = Event::StepDone { step, results: &results, failed: &[] };
        self.scheduler.advance(Time(now_us), event).expect("the results are those of the plan");
    }

    pub(crate) fn operation_ended(&mut self, now_us: u64, op: OpId, outcome: Outcome) {
        if let Some(place) = self.failing_backups.iter().position(|&failing| failing == op) {
            self.failing_backups.swap_remove(place);
            self.backups_ended += 1;
        }
        let event = Event::Operation { op, rank: 0, outcome };
        self.scheduler.advance(Time(now_us), event).expect("the operation was planned");
    }

    /// Fails: the content of device and host and all operations in flight are lost. Results that
    /// were determined at the start of a step stay counted. Returns the requests whose pages were
    /// being transferred to other workers.
    pub(crate) fn die(&mut self) -> VecDeque<(u64, u32)> {
        let fresh = Scheduler::new(self.scheduler_config.clone()).expect("it began with the same");
        self.lost.push(self.scheduler.stats());
        self.scheduler = fresh;
        self.is_up = false;
        self.step = None;
        self.wakes_at_us = u64::MAX;
        self.waiting = 0;
        self.decoding = 0;
        self.backups_ended = 0;
        self.failing_backups.clear();
        std::mem::take(&mut self.to_hand_over)
    }

    /// Recovers.
    pub(crate) fn revive(&mut self) {
        self.is_up = true;
    }

    pub(crate) fn is_up(&self) -> bool {
        self.is_up
    }

    /// Returns the times of the requests' latest tokens, by slot.
    pub(crate) fn last_token_at(&self) -> &[u64] {
        &self.last_token_at
    }

    /// Returns the next request that another worker can continue.
    pub(crate) fn next_handed_over(&mut self) -> Option<u32> {
        let (backups, request) = *self.to_hand_over.front()?;
        // Under memory pressure backups are dropped; they are not waited for.
        if backups > self.backups_ended && self.backups_under_way() > 0 {
            return None;
        }
        self.to_hand_over.pop_front();
        Some(request)
    }

    /// Schedules a request to be decoded by another worker once its pages are in L3.
    fn hand_over(&mut self, request: RequestId) {
        let backups = self.backups_ended + self.backups_under_way();
        self.to_hand_over.push_back((backups, request.0 as u32));
    }

    fn backups_under_way(&self) -> u64 {
        let stats = self.scheduler.stats();
        u64::from(stats.backups.in_flight) + u64::from(stats.backups_waiting)
    }

    /// Records that a backup is in the store.
    pub(crate) fn backup_ended(&mut self, now_us: u64, op: OpId, store: &mut Store) {
        store.insert(&self.l3_path(op));
        self.backups_ended += 1;
        self.operation_ended(now_us, op, Outcome::Done);
    }

    fn l3_path(&self, op: OpId) -> L3Path<'_> {
        self.scheduler.l3_path(op).expect("an operation with L3 that is in flight")
    }

    /// Returns whether a requested wake-up is still due at this time. If it has moved later,
    /// schedules it.
    pub(crate) fn wants_wake(&mut self, at_us: u64, agenda: &mut Agenda) -> bool {
        if self.wakes_at_us != at_us {
            return false;
        }
        match self.scheduler.deadline() {
            Some(deadline) if deadline.0 <= at_us => true,
            Some(deadline) => {
                self.wake_at(deadline.0, agenda);
                false
            }
            None => {
                self.wakes_at_us = u64::MAX;
                false
            }
        }
    }

    /// Records a wake-up.
    pub(crate) fn woken(&mut self) {
        self.wakes_at_us = u64::MAX;
    }

    fn wake_at(&mut self, at_us: u64, agenda: &mut Agenda) {
        self.wakes_at_us = at_us;
        agenda.add(at_us, Due::Wake { worker: self.number });
    }

    // ---- plan ----

    /// Requests a plan and starts it. The memory of `plan` is reused.
    pub(crate) fn plan(&mut self, now_us: u64, plan: &mut Plan, around: &mut Around<'_, '_>) {
        self.scheduler.plan_into(Time(now_us), plan);
        for transition in self.scheduler.drain_trace() {
            match around.tally.changed(&transition, &self.last_token_at) {
                Change::Admitted => self.waiting -= 1,
                Change::Answered => around.arrivals.answered(now_us, transition.request.0 as u32),
                Change::Other => {}
            }
        }
        for ended in &plan.ended {
            let has_failed = ended.state == StateName::Failed;
            let end = around.tally.ended(ended.request, has_failed);
            if end.was_waited_for {
                around.arrivals.answered(now_us, ended.request.0 as u32);
            }
            self.waiting -= u32::from(!end.was_admitted);
            if let Some(route) = end.route {
                around.router.ended(route, end.has_started);
            }
            if end.is_handed_over {
                self.hand_over(ended.request);
            }
        }
        if around.router.wants_events() {
            let worker = self.number as usize;
            self.scheduler.drain_kv_events(&mut self.kv_events);
            around.router.tell(now_us, worker, &mut self.kv_events);
        }
        self.start_copies(plan, now_us, around);
        self.start_l3(plan, now_us, around);
        if let Some(step) = plan.step {
            self.start_step(step, plan, now_us, around);
        }
        if let Some(deadline) = self.scheduler.deadline() {
            // A plan was made for this time; the next is for a later one.
            let at_us = deadline.0.max(now_us + 1);
            if at_us < self.wakes_at_us {
                self.wake_at(at_us, around.agenda);
            }
        }
    }

    fn start_copies(&mut self, plan: &Plan, now_us: u64, around: &mut Around<'_, '_>) {
        for copy in &plan.copies {
            let bytes = plan.device_pages(copy).len() as u64 * self.page_bytes;
            let (link, column) = match copy.direction {
                CopyDirection::LoadBack => {
                    (&mut self.links.host_to_device, LinkColumn::HostToDevice)
                }
                CopyDirection::WriteBack => {
                    (&mut self.links.device_to_host, LinkColumn::DeviceToHost)
                }
            };
            let carried = link.carry(now_us, bytes);
            around.tally.timeline.carried(column, carried, bytes);
            let at_us = carried.arrival_us(link.latency_us());
            self.expect(at_us, copy.op, Outcome::Done, around.agenda);
        }
    }

    fn start_l3(&mut self, plan: &Plan, now_us: u64, around: &mut Around<'_, '_>) {
        for op in &plan.l3 {
            let path = self.l3_path(op.op);
            debug_assert!(path.asked().eq(plan.l3_keys(op).iter().copied()), "what the plan says");
            let asked = path.pages() as u64;
            match op.kind {
                L3Kind::Probe => {
                    let outcome = around.store.probe(&path);
                    let at_us = now_us + around.store.probe_latency_us();
                    self.expect(at_us, op.op, outcome, around.agenda);
                }
                L3Kind::Prefetch => {
                    let outcome = around.store.read(&path);
                    let pages = match outcome {
                        Outcome::Done => asked,
                        Outcome::Partial(pages)
                        | Outcome::CorruptAfter(pages)
                        | Outcome::CalledOff(pages) => pages.into(),
                        Outcome::Missing
                        | Outcome::Failed
                        | Outcome::Corrupt
                        | Outcome::TimedOut => 0,
                    };
                    let bytes = pages * self.page_bytes;
                    let read = around.store.read_link.carry(now_us, bytes);
                    let link = &mut self.links.l3_to_host;
                    let came = link.carry_behind(now_us, read, bytes);
                    let latency_us = link.latency_us() + around.store.read_link.latency_us();
                    let column = LinkColumn::L3ToHost;
                    around.tally.timeline.carried(column, came, bytes);
                    self.expect(came.arrival_us(latency_us), op.op, outcome, around.agenda);
                }
                L3Kind::Backup => {
                    let bytes = asked * self.page_bytes;
                    let link = &mut self.links.host_to_l3;
                    let sent = link.carry(now_us, bytes);
                    let written = around.store.write_link.carry_behind(now_us, sent, bytes);
                    let latency_us = link.latency_us() + around.store.write_link.latency_us();
                    let column = LinkColumn::HostToL3;
                    around.tally.timeline.carried(column, sent, bytes);
                    let at_us = written.arrival_us(latency_us);
                    if around.store.accepts_write() {
                        let stored = Due::Stored { worker: self.number, op: op.op };
                        around.agenda.add(at_us, stored);
                    } else {
                        self.failing_backups.push(op.op);
                        self.expect(at_us, op.op, Outcome::Failed, around.agenda);
                    }
                }
            }
        }
    }

    fn expect(&self, at_us: u64, op: OpId, outcome: Outcome, agenda: &mut Agenda) {
        agenda.add(at_us, Due::Operation { worker: self.number, op, outcome });
    }

    /// Starts a step, and repeats it as long as no event can occur before it ends. Its end, and the
    /// tokens that it produces, are determined at once.
    fn start_step(&mut self, id: StepId, plan: &Plan, now_us: u64, around: &mut Around<'_, '_>) {
        let mut shape = StepShape::default();
        for prefill in &plan.prefills {
            shape.add_chunk(prefill.start, prefill.tokens);
            around.tally.chunk_begins(prefill.request, now_us);
        }
        let rows = plan.decodes.len() as u64;
        shape.decode_rows = rows;
        shape.decode_context = plan.decodes.iter().map(|decode| u64::from(decode.start) + 1).sum();
        let mut end_us = now_us + self.cost.step_us(&shape);
        self.count_gaps(plan, end_us, around.tally);
        let quiet_until_us = self.quiet_until_us(now_us, around);
        let mut steps = 1;
        while steps <= plan.repeats_max
            && end_us < quiet_until_us
            && !around.tally.timeline.wants_gauges(end_us)
        {
            shape.decode_context += rows;
            let took_us = self.cost.step_us(&shape);
            end_us += took_us;
            around.tally.gaps(took_us, rows, end_us);
            steps += 1;
        }
        around.tally.output_tokens += rows * u64::from(steps);
        for prefill in plan.prefills.iter().filter(|prefill| prefill.produces_token) {
            let hits = self.scheduler.hits(prefill.request).unwrap_or_default();
            let first = around.tally.prefill_ends(prefill.request, prefill.slot, hits, end_us);
            if let Some(route) = first {
                around.router.started(route);
            }
        }
        around.tally.timeline.computed(now_us, end_us);
        self.note_tokens(plan, steps, end_us);
        self.step = Some(id);
        self.busy_us += end_us - now_us;
        self.decoding = rows;
        self.decoded_rows += rows * u64::from(steps);
        around.agenda.add(end_us, Due::Step { worker: self.number });
    }

    /// Returns the time until which only step ends affect this worker.
    fn quiet_until_us(&self, now_us: u64, around: &Around<'_, '_>) -> u64 {
        let deadline_us = self.scheduler.deadline().map(|deadline| deadline.0);
        let next = [around.arrivals.next_us(now_us), around.agenda.next_us(), deadline_us];
        let next_us = next.into_iter().flatten().min().unwrap_or(u64::MAX);
        if around.has_waiting_requests { now_us } else { next_us }
    }

    /// Records the gaps of decoding requests before the tokens of a step.
    fn count_gaps(&self, plan: &Plan, end_us: u64, tally: &mut Tally<'_>) {
        // Most of them got their latest token when the step before ended.
        let mut usual = 0;
        for decode in &plan.decodes {
            let last_us = self.last_token_at[decode.slot.0 as usize];
            if last_us == self.step_ended_us {
                usual += 1;
            } else {
                tally.gaps(end_us - last_us, 1, end_us);
            }
        }
        tally.gaps(end_us - self.step_ended_us, usual, end_us);
    }

    /// Records the requests that get tokens, and the time.
    fn note_tokens(&mut self, plan: &Plan, steps: u32, end_us: u64) {
        let prefills = plan.prefills.iter().filter(|prefill| prefill.produces_token);
        let prefills = prefills.map(|of| (of.request, of.slot, of.start + of.tokens));
        let decodes = plan.decodes.iter().map(|of| (of.request, of.slot, of.start + 1));
        self.tokens_each = steps;
        self.producing.clear();
        for (request, slot, position) in prefills.chain(decodes) {
            self.producing.push((request, position));
            self.last_token_at[slot.0 as usize] = end_us;
        }
    }

    // ---- statistics ----

    /// Returns the requests that were submitted and not admitted yet.
    pub(crate) fn waiting(&self) -> u32 {
        self.waiting
    }

    /// Adds the fill of its tiers and its requests by state.
    pub(crate) fn gauge(&mut self, sums: &mut [u64; Gauge::COUNT]) {
        let stats = self.scheduler.stats();
        let (device, host) = (stats.cache.device, stats.cache.host);
        let device_used = (device.total_pages - device.free_pages) as u64;
        let host_used = (host.total_pages - host.free_pages) as u64;
        let decoding = u64::from(stats.running).min(self.decoding);
        let mut add = |gauge: Gauge, value: u64| sums[gauge as usize] += value;
        add(Gauge::DeviceUsed, device_used);
        add(Gauge::DevicePinned, device_used - device.evictable_pages as u64);
        add(Gauge::HostUsed, host_used);
        add(Gauge::HostPinned, host_used - host.evictable_pages as u64);
        add(Gauge::Waiting, stats.waiting.into());
        add(Gauge::Prefetching, stats.prefetches.in_flight.into());
        add(Gauge::Prefilling, u64::from(stats.running) - decoding);
        add(Gauge::Decoding, decoding);
        add(Gauge::Draining, stats.draining.into());
    }

    /// Updates the peaks, with `waiting_before` requests in front of the worker. Requests and pages
    /// increase on arrivals and plans, so it is called after both.
    pub(crate) fn keep_peaks(&mut self, waiting_before: usize) {
        let stats = self.scheduler.stats();
        let used = |tier: TierUse| (tier.total_pages - tier.free_pages) as u64;
        let peaks = &mut self.peaks;
        peaks.running = peaks.running.max(stats.running);
        peaks.waiting = peaks.waiting.max(stats.waiting + waiting_before as u32);
        peaks.device_pages = peaks.device_pages.max(used(stats.cache.device));
        peaks.host_pages = peaks.host_pages.max(used(stats.cache.host));
    }

    pub(crate) fn report(&self, whole_us: u64) -> WorkerUse {
        let mut stats = self.scheduler.stats();
        for lost in &self.lost {
            stats.steps += lost.steps;
            stats.prompt_tokens += lost.prompt_tokens;
            stats.prefilled_tokens += lost.prefilled_tokens;
            stats.generated_tokens += lost.generated_tokens;
            stats.retractions += lost.retractions;
        }
        WorkerUse {
            requests: self.requests,
            steps: stats.steps,
            busy: self.busy_us as f64 / whole_us.max(1) as f64,
            decodes_per_step: self.decoded_rows as f64 / stats.steps.max(1) as f64,
            running_peak: self.peaks.running,
            waiting_peak: self.peaks.waiting,
            device_pages_peak: self.peaks.device_pages,
            host_pages_peak: self.peaks.host_pages,
            scheduler: stats,
        }
    }

    pub(crate) fn link_uses(&self, whole_us: u64) -> [LinkUse; 4] {
        let of = |link: &Link, name| link.report(name, Some(self.number), whole_us);
        [
            of(&self.links.host_to_device, LinkName::HostToDevice),
            of(&self.links.device_to_host, LinkName::DeviceToHost),
            of(&self.links.l3_to_host, LinkName::L3ToHost),
            of(&self.links.host_to_l3, LinkName::HostToL3),
        ]
    }
}
