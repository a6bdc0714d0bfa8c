//! Statistics of requests: latencies, hits, phases, the slowest.

use terrace_scheduler::{Hits, RequestId, Slot, StateName, Transition};

use crate::config::{Config, WarmUp};
use crate::histogram::Histogram;
use crate::report::{Phase, SlowRequest, Span};
use crate::router::Route;
use crate::series::Timeline;
use crate::slo::{GoodputCounter, Slo};
use crate::trace::{Ceiling, Trace};

/// Number of slow requests to report.
const SLOWEST_MAX: usize = 10;
/// Largest number of phases kept of one request.
const PHASES_MAX: usize = 64;
/// Marks a request that is not live.
const NOWHERE: u32 = u32::MAX;

/// Statistics of requests, over all workers.
#[derive(Debug)]
pub(crate) struct Tally<'a> {
    trace: &'a Trace,
    ceiling: &'a Ceiling,
    pub(crate) timeline: Timeline,
    pub(crate) ttft: Histogram,
    pub(crate) itl: Histogram,
    pub(crate) e2e: Histogram,
    pub(crate) queue: Histogram,
    /// Mean time per token after the first, by request.
    pub(crate) tpot: Histogram,
    pub(crate) goods: GoodputCounter,
    slo: Slo,
    warm_up: WarmUp,
    arrivals: u64,
    /// Arrival of the first measured request.
    measured_from_us: Option<u64>,
    pub(crate) hit_tokens: [u64; 3],
    pub(crate) output_tokens: u64,
    pub(crate) finished: u64,
    pub(crate) failed: u64,
    pub(crate) refused: u64,
    pub(crate) last_token_us: u64,
    /// Index of each request of the trace in `live`.
    places: Vec<u32>,
    live: Vec<Live>,
    free: Vec<u32>,
    slowest: Vec<SlowRequest>,
}

/// Effect of a change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The request was admitted for the first time.
    Admitted,
    /// The request has all its tokens.
    Answered,
    Other,
}

/// End of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    /// True if it ended without a complete answer.
    pub(crate) was_waited_for: bool,
    pub(crate) was_admitted: bool,
    pub(crate) has_started: bool,
    pub(crate) route: Option<Route>,
    /// True if it continues at another worker.
    pub(crate) is_handed_over: bool,
}

/// A live request.
#[derive(Debug, Default)]
struct Live {
    request: u32,
    arrival_us: u64,
    route: Option<Route>,
    is_waited_for: bool,
    slot: u32,
    hits: Hits,
    first_token_us: Option<u64>,
    last_token_us: u64,
    is_admitted: bool,
    /// True if it has had a token from its current worker.
    has_started: bool,
    is_measured: bool,
    /// True if another worker is to decode it.
    is_handed_over: bool,
    /// True if it has restarted or moved to another worker, so that its waiting time has been
    /// counted.
    was_elsewhere: bool,
    phases: Vec<(Phase, u64)>,
}

impl<'a> Tally<'a> {
    pub(crate) fn new(trace: &'a Trace, ceiling: &'a Ceiling, config: &Config) -> Self {
        Self {
            trace,
            ceiling,
            timeline: Timeline::new(),
            ttft: Histogram::default(),
            itl: Histogram::default(),
            e2e: Histogram::default(),
            queue: Histogram::default(),
            tpot: Histogram::default(),
            goods: GoodputCounter::default(),
            slo: config.slo,
            warm_up: config.warm_up,
            arrivals: 0,
            measured_from_us: None,
            hit_tokens: [0; 3],
            output_tokens: 0,
            finished: 0,
            failed: 0,
            refused: 0,
            last_token_us: 0,
            places: vec![NOWHERE; trace.requests().len()],
            live: Vec::new(),
            free: Vec::new(),
            slowest: Vec::new(),
        }
    }

    /// Records an arrival; `is_handed_over` if another worker is to decode it.
    pub(crate) fn arrived(&mut self, request: u32, is_handed_over: bool, now_us: u64) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.live.push(Live::default());
            self.live.len() as u32 - 1
        });
        self.places[request as usize] = place;
        let is_measured = self.is_measured(now_us);
        self.arrivals += 1;
        self.goods.requests += u64::from(is_measured);
        if is_measured {
            self.measured_from_us.get_or_insert(now_us);
        }
        let live = &mut self.live[place as usize];
        let mut phases = std::mem::take(&mut live.phases);
        phases.clear();
        phases.push((Phase::Waiting, now_us));
        *live = Live {
            request,
            arrival_us: now_us,
            is_waited_for: true,
            is_measured,
            is_handed_over,
            phases,
            ..Live::default()
        };
        self.timeline.at(now_us).arrivals += 1;
    }

    /// Records that a request is sent to a worker.
    pub(crate) fn sent(&mut self, request: u32, route: Route) {
        self.of(RequestId(request.into())).route = Some(route);
    }

    /// Moves a request to another worker; without a route it restarts.
    pub(crate) fn move_to(&mut self, request: u32, route: Option<Route>) {
        let live = self.of(RequestId(request.into()));
        live.route = route;
        live.is_admitted = false;
        live.has_started = false;
        live.is_handed_over = route.is_none();
        live.was_elsewhere = true;
    }

    /// Removes the requests of a failed worker, in the order of the trace, with their routes and
    /// whether they had started: they restart. First tokens that users have seen still count.
    pub(crate) fn remove_unfinished(
        &mut self,
        worker: usize,
        last_token_at: &[u64],
        is_handed_over: impl Fn(u32) -> bool,
        now_us: u64,
    ) -> Vec<(u32, Route, bool)> {
        let mut unfinished = Vec::new();
        // Requests that are not live have no route.
        let of_worker = |live: &&mut Live| live.route.is_some_and(|route| route.worker == worker);
        for live in self.live.iter_mut().filter(of_worker).filter(|live| live.is_waited_for) {
            let Some(route) = live.route.take() else { continue };
            unfinished.push((live.request, route, live.has_started));
            if live.has_started {
                live.last_token_us = last_token_at[live.slot as usize];
            }
            live.was_elsewhere |= live.is_admitted;
            live.is_admitted = false;
            live.has_started = false;
            live.is_handed_over = is_handed_over(live.request);
            live.enter(Phase::Waiting, now_us);
        }
        unfinished.sort_unstable_by_key(|(request, _, _)| *request);
        unfinished
    }

    /// Removes answered requests whose write-back was lost with their worker.
    pub(crate) fn drop_answered(&mut self, worker: usize) {
        for place in 0..self.live.len() as u32 {
            let live = &mut self.live[place as usize];
            if live.route.is_some_and(|route| route.worker == worker) {
                live.route = None;
                self.places[live.request as usize] = NOWHERE;
                self.free.push(place);
            }
        }
    }

    /// Returns whether the arriving request is measured.
    fn is_measured(&self, now_us: u64) -> bool {
        match self.warm_up {
            WarmUp::Share(share) => {
                self.arrivals >= (share * self.trace.requests().len() as f64) as u64
            }
            WarmUp::Until { time_us } => now_us >= time_us,
        }
    }

    /// Returns the time from the first measured arrival to the last token.
    pub(crate) fn measured_us(&self) -> u64 {
        let from_us = self.measured_from_us.unwrap_or(self.last_token_us);
        self.last_token_us.saturating_sub(from_us)
    }

    /// Records a request that no worker can run.
    pub(crate) fn refused(&mut self, request: u32) -> End {
        self.refused += 1;
        self.of(RequestId(request.into())).is_handed_over = false;
        self.ended(RequestId(request.into()), false)
    }

    /// Returns the number of live requests.
    pub(crate) fn live(&self) -> u64 {
        (self.live.len() - self.free.len()) as u64
    }

    fn of(&mut self, request: RequestId) -> &mut Live {
        &mut self.live[self.places[request.0 as usize] as usize]
    }

    /// Records a change of state.
    pub(crate) fn changed(&mut self, transition: &Transition, last_token_at: &[u64]) -> Change {
        let now_us = transition.at.0;
        let live = self.of(transition.request);
        let phase = match transition.to {
            StateName::Submitted => Phase::Waiting,
            StateName::Prefetching => Phase::Fetching,
            StateName::PrefetchDone => Phase::Fetched,
            StateName::Prefilling => {
                if !std::mem::replace(&mut live.is_admitted, true) {
                    let waited = now_us - live.arrival_us;
                    let times = u64::from(live.is_measured && !live.was_elsewhere);
                    live.enter(Phase::Loading, now_us);
                    self.queue.record(waited, times);
                    return Change::Admitted;
                }
                Phase::Loading
            }
            StateName::Decoding => Phase::Decoding,
            StateName::Retracted => {
                live.last_token_us = last_token_at[live.slot as usize];
                Phase::Retracted
            }
            StateName::Draining if live.is_handed_over => {
                live.enter(Phase::Moving, now_us);
                return Change::Other;
            }
            StateName::Draining => {
                live.is_waited_for = false;
                let (request, took) = (transition.request, now_us - live.arrival_us);
                let (is_measured, index) = (live.is_measured, live.request as usize);
                let first_us = live.first_token_us.unwrap_or(now_us);
                let ttft = first_us - live.arrival_us;
                self.finished += 1;
                if is_measured {
                    let gaps = u64::from(self.trace.requests()[index].output_tokens) - 1;
                    // A counted first token may have been lost with its worker.
                    let rest_us = now_us.saturating_sub(first_us);
                    let tpot = (gaps > 0).then(|| rest_us as f64 / gaps as f64);
                    self.e2e.record(took, 1);
                    self.goods.answered(&self.slo, ttft, tpot);
                    if let Some(tpot) = tpot {
                        self.tpot.record(tpot.round() as u64, 1);
                    }
                }
                self.last_token_us = self.last_token_us.max(now_us);
                self.consider_slow(request, now_us);
                return Change::Answered;
            }
            StateName::WritingBack
            | StateName::Finished
            | StateName::Aborted
            | StateName::Failed => return Change::Other,
        };
        live.enter(phase, now_us);
        Change::Other
    }

    /// Records that a step computes a part of the request's prompt.
    pub(crate) fn chunk_begins(&mut self, request: RequestId, now_us: u64) {
        let live = self.of(request);
        if matches!(live.phases.last(), Some((Phase::Loading, _))) {
            live.enter(Phase::Prefilling, now_us);
        }
    }

    /// Records a prefill that ends with a token at `end_us`. Returns the route if it is the first
    /// token from this worker.
    pub(crate) fn prefill_ends(
        &mut self,
        request: RequestId,
        slot: Slot,
        hits: Hits,
        end_us: u64,
    ) -> Option<Route> {
        let (trace, ceiling) = (self.trace, self.ceiling);
        self.output_tokens += 1;
        let live = self.of(request);
        live.slot = slot.0;
        let route = live.route.filter(|_| !std::mem::replace(&mut live.has_started, true));
        if live.first_token_us.is_some() {
            // The request was retracted or moved: this is the gap after its last token.
            let gap = end_us.saturating_sub(live.last_token_us);
            self.gaps(gap, 1, end_us);
            return route;
        }
        live.first_token_us = Some(end_us);
        live.last_token_us = end_us;
        live.hits = hits;
        let (ttft, index) = (end_us - live.arrival_us, live.request as usize);
        let times = u64::from(live.is_measured);
        self.ttft.record(ttft, times);
        let found = [hits.device_tokens, hits.host_tokens, hits.l3_tokens].map(u64::from);
        let bucket = self.timeline.at(end_us);
        bucket.first_tokens += 1;
        bucket.output_tokens += 1;
        bucket.ttft_us += ttft;
        bucket.ttft_us_max = bucket.ttft_us_max.max(ttft);
        bucket.prompt_tokens += u64::from(trace.requests()[index].input_tokens);
        bucket.ceiling_tokens += u64::from(ceiling.by_request[index]);
        for (place, tokens) in found.into_iter().enumerate() {
            bucket.hit_tokens[place] += tokens;
            self.hit_tokens[place] += tokens;
        }
        route
    }

    /// Records gaps of `times` requests before a token at `end_us`.
    pub(crate) fn gaps(&mut self, gap_us: u64, times: u64, end_us: u64) {
        if self.measured_from_us.is_some() {
            self.itl.record(gap_us, times);
        }
        let bucket = self.timeline.at(end_us);
        bucket.gaps += times;
        bucket.gap_us += gap_us * times;
        bucket.output_tokens += times;
    }

    /// Records the end of a request.
    pub(crate) fn ended(&mut self, request: RequestId, has_failed: bool) -> End {
        let live = self.of(request);
        if live.is_handed_over && !has_failed && live.first_token_us.is_some() {
            return End {
                was_waited_for: false,
                was_admitted: true,
                has_started: true,
                route: live.route.take(),
                is_handed_over: true,
            };
        }
        self.failed += u64::from(has_failed);
        let place = std::mem::replace(&mut self.places[request.0 as usize], NOWHERE);
        self.free.push(place);
        let live = &mut self.live[place as usize];
        End {
            was_waited_for: live.is_waited_for,
            was_admitted: live.is_admitted,
            has_started: live.has_started,
            route: live.route.take(),
            is_handed_over: false,
        }
    }

    /// Keeps the request if it is among the slowest to its first token. Of equals, the earlier
    /// counts as slower.
    fn consider_slow(&mut self, request: RequestId, now_us: u64) {
        let live = &self.live[self.places[request.0 as usize] as usize];
        let Some(first_us) = live.first_token_us else { return };
        let ttft_ms = (first_us - live.arrival_us) as f64 / 1000.0;
        let rank = |slow: &SlowRequest| slow.ttft_ms >= ttft_ms;
        let place = self.slowest.iter().take_while(|slow| rank(slow)).count();
        if place == SLOWEST_MAX {
            return;
        }
        let traced = &self.trace.requests()[live.request as usize];
        let slow = SlowRequest {
            request: live.request.into(),
            worker: live.route.map_or(0, |route| route.worker as u32),
            arrival_s: live.arrival_us as f64 / 1e6,
            input_tokens: traced.input_tokens,
            output_tokens: traced.output_tokens,
            device_hit_tokens: live.hits.device_tokens,
            host_hit_tokens: live.hits.host_tokens,
            l3_hit_tokens: live.hits.l3_tokens,
            ceiling_tokens: self.ceiling.by_request[live.request as usize],
            ttft_ms,
            e2e_ms: (now_us - live.arrival_us) as f64 / 1000.0,
            spans: live.spans(now_us),
        };
        self.slowest.insert(place, slow);
        self.slowest.truncate(SLOWEST_MAX);
    }

    pub(crate) fn take_slowest(&mut self) -> Vec<SlowRequest> {
        std::mem::take(&mut self.slowest)
    }
}

impl Live {
    fn enter(&mut self, phase: Phase, now_us: u64) {
        let is_new = self.phases.last().is_none_or(|(latest, _)| *latest != phase);
        if is_new && self.phases.len() < PHASES_MAX {
            self.phases.push((phase, now_us));
        }
    }

    fn spans(&self, end_us: u64) -> Vec<Span> {
        let ms = |at_us: u64| (at_us - self.arrival_us) as f64 / 1000.0;
        let ends = self.phases.iter().skip(1).map(|(_, from)| *from).chain([end_us]);
        self.phases
            .iter()
            .zip(ends)
            .filter(|((_, from), to)| from < to)
            .map(|(&(phase, from), to)| Span { phase, from_ms: ms(from), to_ms: ms(to) })
            .collect()
    }
}
