//! The simulation: arrivals, plans, and ends of steps and transfers, in virtual time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace_scheduler::{PageKey, Plan, Request, Sequence, SubmitError, Token};

use crate::agenda::{Agenda, Due};
use crate::arrivals::Arrivals;
use crate::cluster::{Outage, Role, WorkerGroup};
use crate::config::{Arrival, Config};
use crate::error::ReplayError;
use crate::prices::Bill;
use crate::report::{BytesMoved, LinkName, LinkUse, Report, Reuse, ReuseTokens};
use crate::router::{Route, Router, RoutingQuery};
use crate::series::Gauge;
use crate::store::Store;
use crate::tally::Tally;
use crate::trace::{Ceiling, Trace, TraceRequest};
use crate::verdict::Verdict;
use crate::worker::{Around, Worker};

/// Largest number of state changes recorded by one plan.
const TRANSITIONS_MAX: u32 = 1 << 24;
/// Largest number of page keys buffered for the router between two plans.
const EVENT_KEYS_MAX: u32 = 1 << 24;

/// Replays a trace on a configuration, in virtual time.
///
/// ```
/// use terrace_replay::{Config, replay, trace::TraceBuilder};
///
/// let mut trace = TraceBuilder::new(512)?;
/// trace.push(0, 900, 8, &[1, 2])?;
/// trace.push(2_000_000, 1400, 8, &[1, 2, 3])?;
/// let report = replay(&trace.finish(), &Config::default())?;
/// assert_eq!(report.reuse_tokens.total, 896);
/// println!("{:.1} % reused, TTFT {:.0} ms", report.reuse.total * 100.0, report.ttft_ms.p50);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if the configuration cannot be replayed or the result is invalid.
pub fn replay(trace: &Trace, config: &Config) -> Result<Report, ReplayError> {
    replay_unless(&AtomicBool::new(false), trace, config)
}

/// Same as [`replay`], until `stop` is set.
///
/// # Errors
/// Same as [`replay`], and [`ReplayError::Stopped`] soon after `stop` was set.
pub fn replay_unless(
    stop: &AtomicBool,
    trace: &Trace,
    config: &Config,
) -> Result<Report, ReplayError> {
    // Checked first, so that a stopped sweep does not prepare its remaining replays.
    if stop.load(Ordering::Relaxed) {
        return Err(ReplayError::Stopped);
    }
    config.check()?;
    if trace.requests().is_empty() {
        return Err(ReplayError::EmptyTrace);
    }
    if let (Arrival::Trace { speed_up }, Some(last)) = (config.arrival, trace.requests().last())
        && last.arrival_us as f64 / speed_up > VIRTUAL_US_MAX
    {
        let (setting, value) = ("arrival.speed_up", speed_up.to_string());
        let limits = "the trace would take more than a century: use a higher value";
        return Err(ReplayError::Setting { setting, value, limits });
    }
    let ceiling = trace.ceiling(config.scheduler.cache.page_size);
    World::new(trace, &ceiling, config)?.run(stop)
}

/// More than a century; in nanoseconds it fits 64 bits with room for delays.
const VIRTUAL_US_MAX: f64 = 4e15;

struct World<'a> {
    trace: &'a Trace,
    config: &'a Config,
    ceiling: &'a Ceiling,
    arrivals: Arrivals<'a>,
    workers: Vec<Worker>,
    /// Plan of the worker that planned last; it is already started.
    plan: Plan,
    /// Requests in front of each worker, with their routes.
    queues: Vec<VecDeque<(u32, Route)>>,
    /// Requests for which no worker is up.
    stranded: VecDeque<u32>,
    /// Workers with events since their last plan, each once, in order.
    touched: VecDeque<usize>,
    is_touched: Vec<bool>,
    store: Store,
    router: Router,
    tally: Tally<'a>,
    agenda: Agenda,
    namespace: PageKey,
    now_us: u64,
}

impl<'a> World<'a> {
    fn new(
        trace: &'a Trace,
        ceiling: &'a Ceiling,
        config: &'a Config,
    ) -> Result<Self, ReplayError> {
        let kinds = config.kinds();
        let workers = kinds.len();
        let known = (0..).zip(&kinds);
        let known = known.map(|(number, kind)| (config.role(number), kind.cost.prefill_token_ns));
        let router = Router::new(config.router, &known.collect::<Vec<_>>());
        let is_told = trace.has_sessions();
        let build = |(number, kind): (u32, &WorkerGroup)| {
            let mut scheduler = config.scheduler_of(kind);
            scheduler.trace_max = TRANSITIONS_MAX;
            scheduler.cache.kv_event_keys_max =
                if router.wants_events() { EVENT_KEYS_MAX } else { 0 };
            Worker::new(number, config, kind, scheduler, is_told)
        };
        let built: Result<Vec<Worker>, ReplayError> = (0..).zip(&kinds).map(build).collect();
        let mut agenda = Agenda::default();
        for &Outage { worker, from_us, to_us } in &config.outages {
            agenda.add(from_us, Due::Down { worker });
            agenda.add(to_us, Due::Up { worker });
        }
        Ok(Self {
            trace,
            config,
            ceiling,
            arrivals: Arrivals::new(trace, config.arrival, config.sessions),
            workers: built?,
            plan: Plan::default(),
            queues: vec![VecDeque::new(); workers],
            touched: VecDeque::new(),
            is_touched: vec![false; workers],
            store: Store::new(&config.store, config.seed),
            router,
            tally: Tally::new(trace, ceiling, config),
            agenda,
            stranded: VecDeque::new(),
            namespace: config.scheduler.namespace().digest(),
            now_us: 0,
        })
    }

    fn run(mut self, stop: &AtomicBool) -> Result<Report, ReplayError> {
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(ReplayError::Stopped);
            }
            self.drop_needless_wakes();
            let next = [self.arrivals.next_us(self.now_us), self.agenda.next_us()];
            let Some(next_us) = next.into_iter().flatten().min() else { break };
            // Remaining outages affect no request.
            if next[0].is_none() && self.tally.live() == 0 && self.agenda.are_outages() {
                break;
            }
            if self.tally.timeline.wants_gauges(next_us) {
                self.gauge(next_us);
            }
            self.now_us = next_us;
            while let Some(request) = self.arrivals.pop(self.now_us) {
                self.arrive(request);
            }
            while let Some(due) = self.agenda.pop(self.now_us) {
                self.happen(due);
                self.drop_needless_wakes();
            }
            while let Some(number) = self.touched.pop_front() {
                self.is_touched[number] = false;
                if self.workers[number].is_up() {
                    self.plan(number);
                    self.feed(number);
                    self.hand_over(number);
                }
            }
        }
        self.gauge(self.now_us);
        match self.tally.live() {
            0 => self.report(),
            left => Err(ReplayError::Stuck { left }),
        }
    }

    /// Drops obsolete wake-ups, so that they do not advance the time. Most waits end before their
    /// deadline.
    fn drop_needless_wakes(&mut self) {
        while let Some((at_us, worker)) = self.agenda.next_wake() {
            if self.workers[worker as usize].wants_wake(at_us, &mut self.agenda) {
                return;
            }
            self.agenda.pop(at_us);
        }
    }

    /// Handles an arrival: routes the request and queues it in front of its worker.
    fn arrive(&mut self, request: u32) {
        let is_handed_over = is_handed_over(self.config, self.trace, request);
        self.tally.arrived(request, is_handed_over, self.now_us);
        self.send(request);
    }

    /// Routes a request to a worker that starts it, if one is up.
    fn send(&mut self, request: u32) {
        let traced = &self.trace.requests()[request as usize];
        let mut sequence = None;
        if self.router.wants_events() {
            sequence = Some(self.prompt(traced, 0));
        }
        let keys = sequence.as_ref().map_or(&[][..], |prompt| prompt.keys().prompt);
        let route = self.router.route(self.now_us, &self.asked(traced, keys));
        match route {
            Some(route) => self.put_on_desk(request, route),
            None => self.stranded.push_back(request),
        }
    }

    fn asked<'k>(&self, traced: &TraceRequest, keys: &'k [PageKey]) -> RoutingQuery<'k> {
        RoutingQuery {
            input_tokens: traced.input_tokens,
            page_size: self.config.scheduler.cache.page_size,
            keys,
            family: self.trace.family(traced),
        }
    }

    fn put_on_desk(&mut self, request: u32, route: Route) {
        self.tally.sent(request, route);
        self.queues[route.worker].push_back((request, route));
        self.feed(route.worker);
        self.keep_peaks(route.worker);
    }

    /// Routes computed requests to the workers that decode them.
    fn hand_over(&mut self, number: usize) {
        while let Some(request) = self.workers[number].next_handed_over() {
            let traced = &self.trace.requests()[request as usize];
            let route = self.router.route_decode(&self.asked(traced, &[]));
            self.tally.move_to(request, route);
            match route {
                Some(route) => self.put_on_desk(request, route),
                // No decoding worker is up: the request restarts when one is.
                None => self.stranded.push_back(request),
            }
        }
    }

    /// Handles a failure of a worker: its requests restart elsewhere.
    fn down(&mut self, number: usize) {
        let (config, trace) = (self.config, self.trace);
        let is_handed_over = |request| is_handed_over(config, trace, request);
        let last_token_at = self.workers[number].last_token_at();
        let unfinished =
            self.tally.remove_unfinished(number, last_token_at, is_handed_over, self.now_us);
        self.tally.drop_answered(number);
        let on_their_way = self.workers[number].die();
        self.agenda.forget(number as u32);
        self.queues[number].clear();
        self.router.down(number);
        for (request, route, has_started) in unfinished {
            self.router.ended(route, has_started);
            self.send(request);
        }
        for (_, request) in on_their_way {
            self.tally.move_to(request, None);
            self.send(request);
        }
    }

    /// Handles the recovery of a worker.
    fn up(&mut self, number: usize) {
        self.workers[number].revive();
        self.router.up(number);
        for request in std::mem::take(&mut self.stranded) {
            self.send(request);
        }
    }

    fn keep_peaks(&mut self, number: usize) {
        self.workers[number].keep_peaks(self.queues[number].len());
    }

    /// Returns a request's prompt and `answer_tokens` tokens of its answer.
    fn prompt(&self, request: &TraceRequest, answer_tokens: u32) -> Sequence {
        let page_size = self.config.scheduler.cache.page_size;
        let input_tokens = request.input_tokens;
        let tokens = (input_tokens + answer_tokens) as usize;
        let blocks = self.trace.token_blocks(request);
        if answer_tokens == 0 {
            return Sequence::from_pieces(self.namespace, page_size, tokens, blocks);
        }
        let answer = self.trace.answer_tokens(request, input_tokens..input_tokens + answer_tokens);
        let unknown = std::iter::repeat(Token::MAX);
        let all = blocks.flatten().chain(answer).chain(unknown).take(tokens);
        Sequence::from_pieces(self.namespace, page_size, tokens, [all])
    }

    /// Submits queued requests to a worker's scheduler, up to its limit.
    fn feed(&mut self, number: usize) {
        while self.workers[number].waiting() < self.config.waiting_max {
            let Some((request, route)) = self.queues[number].pop_front() else { return };
            let traced = &self.trace.requests()[request as usize];
            // If one worker prefills and another decodes, the first token is produced by the first.
            let (begun, wanted) = match self.config.role(number as u32) {
                Role::Both => (0, traced.output_tokens),
                Role::Prefill => (0, traced.output_tokens.min(1)),
                Role::Decode => (1, traced.output_tokens - 1),
            };
            let submitted = Request::hashed(request.into(), self.prompt(traced, begun), wanted);
            // Answers are measured, so a request without output is refused.
            let taken = traced.output_tokens > 0
                && match self.workers[number].submit(self.now_us, submitted) {
                    Ok(()) => true,
                    Err(
                        SubmitError::NeverFits { .. }
                        | SubmitError::QueueFull { .. }
                        | SubmitError::EmptyPrompt(_),
                    ) => false,
                    Err(other) => unreachable!("{other}"),
                };
            if taken {
                self.touch(number);
            } else {
                let end = self.tally.refused(request);
                self.router.ended(route, end.has_started);
                self.arrivals.answered(self.now_us, request);
            }
        }
    }

    fn happen(&mut self, due: Due) {
        let now_us = self.now_us;
        let worker = match due {
            Due::Step { worker } => {
                self.workers[worker as usize].step_ended(now_us, self.trace);
                worker
            }
            Due::Operation { worker, op, outcome } => {
                self.workers[worker as usize].operation_ended(now_us, op, outcome);
                worker
            }
            Due::Stored { worker, op } => {
                self.workers[worker as usize].backup_ended(now_us, op, &mut self.store);
                worker
            }
            Due::Wake { worker } => {
                self.workers[worker as usize].woken();
                worker
            }
            Due::Down { worker } => {
                self.down(worker as usize);
                worker
            }
            Due::Up { worker } => {
                self.up(worker as usize);
                worker
            }
        };
        self.touch(worker as usize);
    }

    fn touch(&mut self, number: usize) {
        if !std::mem::replace(&mut self.is_touched[number], true) {
            self.touched.push_back(number);
        }
    }

    fn plan(&mut self, number: usize) {
        let mut around = Around {
            store: &mut self.store,
            router: &mut self.router,
            tally: &mut self.tally,
            agenda: &mut self.agenda,
            arrivals: &mut self.arrivals,
            has_waiting_requests: !self.queues[number].is_empty(),
        };
        self.workers[number].plan(self.now_us, &mut self.plan, &mut around);
        self.keep_peaks(number);
    }

    fn gauge(&mut self, now_us: u64) {
        let mut sums = [0; Gauge::COUNT];
        self.workers.iter_mut().for_each(|worker| worker.gauge(&mut sums));
        sums[Gauge::L3 as usize] = self.store.pages();
        sums[Gauge::Waiting as usize] +=
            self.queues.iter().map(|queue| queue.len() as u64).sum::<u64>();
        self.tally.timeline.gauge(now_us, &sums);
    }

    // ---- report ----

    fn report(mut self) -> Result<Report, ReplayError> {
        let whole_us = self.tally.last_token_us;
        let whole_s = whole_us.max(1) as f64 / 1e6;
        let workers: Vec<_> = self.workers.iter().map(|worker| worker.report(whole_us)).collect();
        // Decode workers get only prompts that were submitted to others before.
        let takes_prompts = |number: &u32| self.config.role(*number) != Role::Decode;
        let taking = (0..).zip(&workers).filter(|(number, _)| takes_prompts(number));
        let prompt_tokens = taking.map(|(_, worker)| worker.scheduler.prompt_tokens).sum();
        let computed_tokens = workers.iter().map(|worker| worker.scheduler.prefilled_tokens).sum();
        let reuse_tokens = self.reuse_tokens()?;
        let links = self.links(whole_us);
        let kinds = self.config.kinds();
        let all = |pages: fn(&WorkerGroup) -> u32| {
            kinds.iter().map(|kind| u64::from(pages(kind))).sum::<u64>()
        };
        let (device_pages, host_pages) =
            (all(|kind| kind.device_pages), all(|kind| kind.host_pages));
        let gpus_per_hour = kinds.iter().map(|kind| f64::from(kind.gpus) * kind.gpu_hour).sum();
        let slowest = self.tally.take_slowest();
        let measured_s = self.tally.measured_us().max(1) as f64 / 1e6;
        let store = self.config.scheduler.l3.as_ref().map(|_| self.store.report());
        let page_bytes = self.config.page_bytes() as f64;
        let l3_pages = store.map(|store| self.config.store.pages_max.unwrap_or(store.pages_peak));
        let spend = self.config.prices.spend(&Bill {
            gpus_per_hour,
            host_bytes: host_pages as f64 * page_bytes,
            l3_bytes: l3_pages.unwrap_or(0) as f64 * page_bytes,
            prompt_tokens,
            output_tokens: self.tally.output_tokens,
            seconds: whole_s,
        });
        let goodput = self.tally.goods.goodput(&self.config.slo, measured_s);
        let Tally { ttft, itl, e2e, queue, tpot, timeline, .. } = self.tally;
        let mut report = Report {
            config: self.config.clone(),
            verdict: Verdict::default(),
            requests: self.trace.requests().len() as u64,
            finished: self.tally.finished,
            failed: self.tally.failed,
            refused: self.tally.refused,
            virtual_s: whole_s,
            prompt_tokens,
            output_tokens: self.tally.output_tokens,
            computed_tokens,
            prompt_tokens_per_s: prompt_tokens as f64 / whole_s,
            output_tokens_per_s: self.tally.output_tokens as f64 / whole_s,
            reuse: shares(&reuse_tokens, self.ceiling.prompt_tokens),
            reuse_tokens,
            ttft_ms: ttft.distribution_ms(),
            itl_ms: itl.distribution_ms(),
            e2e_ms: e2e.distribution_ms(),
            queue_ms: queue.distribution_ms(),
            tpot_ms: tpot.distribution_ms(),
            measured_s,
            goodput,
            spend,
            ttft_curve: ttft.curve_ms(),
            itl_curve: itl.curve_ms(),
            bytes_moved: bytes_moved(&links),
            links,
            store,
            workers,
            series: timeline.into_series(kinds.len() as u32, device_pages, host_pages),
            slowest,
        };
        report.verdict = Verdict::of(&report);
        Ok(report)
    }

    fn reuse_tokens(&self) -> Result<ReuseTokens, ReplayError> {
        let [device, host, l3] = self.tally.hit_tokens;
        let total = device + host + l3;
        // Requests overlap, so the order of computation may differ from that of arrival.
        let ceiling = self.ceiling.any_order_tokens;
        if total > ceiling {
            return Err(ReplayError::AboveCeiling {
                reused_tokens: total,
                ceiling_tokens: ceiling,
            });
        }
        Ok(ReuseTokens { device, host, l3, total, ceiling })
    }

    fn links(&self, whole_us: u64) -> Vec<LinkUse> {
        let of_workers = self.workers.iter().flat_map(|worker| worker.link_uses(whole_us));
        let of_store = [
            self.store.read_link.report(LinkName::StoreRead, None, whole_us),
            self.store.write_link.report(LinkName::StoreWrite, None, whole_us),
        ];
        of_workers.chain(of_store).collect()
    }
}

/// Returns whether one worker computes a request's prompt and another decodes it.
fn is_handed_over(config: &Config, trace: &Trace, request: u32) -> bool {
    config.prefill_workers > 0 && trace.requests()[request as usize].output_tokens > 1
}

/// Returns shares of all tokens of the trace, including refused requests.
fn shares(tokens: &ReuseTokens, prompt_tokens: u64) -> Reuse {
    let share = |part: u64| part as f64 / prompt_tokens.max(1) as f64;
    Reuse {
        device: share(tokens.device),
        host: share(tokens.host),
        l3: share(tokens.l3),
        total: share(tokens.total),
        ceiling: share(tokens.ceiling),
    }
}

fn bytes_moved(links: &[LinkUse]) -> BytesMoved {
    let sum = |name| links.iter().filter(|link| link.link == name).map(|link| link.bytes).sum();
    BytesMoved {
        host_to_device: sum(LinkName::HostToDevice),
        device_to_host: sum(LinkName::DeviceToHost),
        l3_to_host: sum(LinkName::L3ToHost),
        host_to_l3: sum(LinkName::HostToL3),
    }
}
