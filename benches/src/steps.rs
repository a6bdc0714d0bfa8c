//! A complete scheduler under decode-heavy load: admissions, decode steps, and repetitions of the
//! same prompts.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_kit::{median, middle_by};
use terrace_scheduler::{
    Config, ConfigError, Event, Plan, Request, RequestId, Scheduler, StepId, StepResult, Time,
    Token,
};

use crate::figures::{Distribution, nanos};

/// Parameters of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct StepWorkload {
    /// Running requests.
    pub running: u32,
    /// Tokens in each prompt.
    pub context: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Device pages.
    pub device_pages: u32,
    /// Shared part of each prompt, in percent.
    pub shared_percent: u32,
    /// Number of decode steps.
    pub decode_steps: u32,
    /// Steps in flight: with 2, decoding is measured with one and with two.
    pub in_flight: u32,
    /// Returns the allocations of this thread so far.
    pub allocations: fn() -> u64,
}

/// Number of repetitions of the same prompts; the median counts.
const REHIT_WAVES: usize = 9;

/// Results of the benchmark.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepFigures {
    /// Time to plan a decode step.
    pub plan_us: Distribution,
    /// Time to process its results.
    pub advance_us: Distribution,
    /// Time to submit a request, which includes hashing its prompt.
    pub submit_us_per_request: f64,
    /// Time to plan the prefill of a request of which only the shared part is cached, and to
    /// process its results.
    pub admit_us_per_request: f64,
    /// Same for a fully cached request, which then ends.
    pub rehit_us_per_request: f64,
    /// Of that, the time of the plans that admit it.
    pub full_hit_admission_us_per_request: f64,
    /// Time to end a request.
    pub finish_us_per_request: f64,
    /// Time to read the counters.
    pub stats_us: f64,
    /// Mean allocations of a decode step, plan and results together.
    pub allocations_per_step: f64,
    /// Decoding with two steps in flight; all other figures are for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead: Option<AheadFigures>,
}

/// Results with two steps in flight, measured in turn with one.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct AheadFigures {
    /// Time to plan a decode step while the one before it is in flight.
    pub plan_us: Distribution,
    /// Time to process the results of a step while the next is in flight.
    pub advance_us: Distribution,
    /// Mean allocations of a decode step, plan and results together.
    pub allocations_per_step: f64,
    /// Cost of a step, plan and results together, relative to one step in flight: the median of all
    /// turns.
    pub cost_ratio: f64,
}

/// A scheduler with a simulated engine.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) scheduler: Scheduler,
    pub(crate) plan: Plan,
    pub(crate) now: Time,
    next_request: u64,
    in_flight: VecDeque<Launched>,
}

/// A planned step whose results are not reported.
#[derive(Debug)]
struct Launched {
    step: StepId,
    results: Vec<StepResult<'static>>,
}

/// Times of decode steps.
#[derive(Debug, Default)]
struct Decoded {
    plans: Vec<u64>,
    advances: Vec<u64>,
    allocations: u64,
    /// Plans and results of each turn.
    turns: Vec<u64>,
}

impl Decoded {
    /// Allocates memory for `steps` steps.
    fn of(steps: u32) -> Self {
        let memory = || Vec::with_capacity(steps as usize);
        Self { plans: memory(), advances: memory(), turns: memory(), allocations: 0 }
    }

    fn allocations_per_step(&self) -> f64 {
        self.allocations as f64 / self.plans.len().max(1) as f64
    }
}

/// Times of requests from submission until all of them decode or have ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wave {
    /// Time of submission.
    pub(crate) submit: Duration,
    /// Visited nodes of submission.
    pub(crate) submit_nodes: u64,
    /// Time of plans with prefills, which admit the requests.
    pub(crate) admission: Duration,
    /// Time of all plans, including those, and of processing their results.
    pub(crate) steps: Duration,
}

impl StepWorkload {
    /// Runs the prompts, and then repeats them.
    ///
    /// # Errors
    /// Fails if the scheduler cannot be configured.
    ///
    /// # Panics
    /// Panics if the prompts do not fit the device.
    pub fn run(&self) -> Result<StepFigures, ConfigError> {
        let shared = self.context * self.shared_percent / 100 / self.page_size * self.page_size;
        let prompts = prompts_with_common_part(self.running, self.context, shared);
        let (mut bench, admit) = self.begin(&prompts, shared, 1)?;
        let mut ahead = match self.in_flight {
            1 => None,
            in_flight => Some(self.begin(&prompts, shared, in_flight)?.0),
        };
        let (decoded, decoded_ahead) = self.decode_in_turns(&mut bench, ahead.as_mut());
        let stats = time(|| {
            for _ in 0..1000 {
                std::hint::black_box(bench.scheduler.stats());
            }
        });
        let finish = bench.finish(self.running);
        let rehits = std::array::from_fn::<_, REHIT_WAVES, _>(|_| bench.wave(&prompts, 1));
        let rehit = |of: fn(&Wave) -> Duration| {
            middle_by(rehits.each_ref().map(of), Ord::cmp).unwrap_or_default()
        };
        let each = |took: Duration| took.as_nanos() as f64 / 1000.0 / f64::from(self.running);
        Ok(StepFigures {
            submit_us_per_request: each(admit.submit),
            admit_us_per_request: each(admit.steps),
            rehit_us_per_request: each(rehit(|wave| wave.steps)),
            full_hit_admission_us_per_request: each(rehit(|wave| wave.admission)),
            finish_us_per_request: each(finish),
            stats_us: stats.as_nanos() as f64 / 1e6,
            allocations_per_step: decoded.allocations_per_step(),
            ahead: ahead.is_some().then(|| ahead_figures(decoded_ahead, &decoded)),
            plan_us: Distribution::of(decoded.plans),
            advance_us: Distribution::of(decoded.advances),
        })
    }

    /// Returns the tokens of a request at its end. One comes with the prefill and one with the step
    /// that shows that all have started, and one step may be planned ahead: no request ends in a
    /// measured step.
    #[must_use]
    pub fn tokens_max(&self) -> u32 {
        self.context + self.new_tokens()
    }

    fn new_tokens(&self) -> u32 {
        self.decode_steps + 4
    }

    /// Creates a scheduler in which all prompts decode, and returns the cost.
    fn begin(
        &self,
        prompts: &[Vec<Token>],
        shared: u32,
        in_flight: u32,
    ) -> Result<(Bench, Wave), ConfigError> {
        let mut bench = Bench::new(self.page_size, self.device_pages, self.running, in_flight)?;
        if shared > 0 {
            bench.wave(&[prompts[0][..shared as usize].to_vec()], 1);
            bench.finish(1);
        }
        let wave = bench.wave(prompts, self.new_tokens());
        Ok((bench, wave))
    }

    /// Decodes with one step in flight and, if there is a bench for it, with more. Every turn
    /// includes one page end.
    fn decode_in_turns(
        &self,
        one: &mut Bench,
        mut ahead: Option<&mut Bench>,
    ) -> (Decoded, Decoded) {
        let (mut decoded, mut decoded_ahead) =
            (Decoded::of(self.decode_steps), Decoded::of(self.decode_steps));
        if let Some(ahead) = &mut ahead {
            ahead.next_plan();
            ahead.launch(Vec::with_capacity(self.running as usize));
        }
        let mut left = self.decode_steps;
        while left > 0 {
            let steps = left.min(self.page_size);
            self.decode(one, steps, &mut decoded);
            if let Some(ahead) = &mut ahead {
                self.decode(ahead, steps, &mut decoded_ahead);
            }
            left -= steps;
        }
        if let Some(ahead) = ahead {
            ahead.report_oldest();
        }
        (decoded, decoded_ahead)
    }

    /// Plans `steps` steps, and reports the oldest in flight after each plan.
    fn decode(&self, bench: &mut Bench, steps: u32, decoded: &mut Decoded) {
        let mut results = Vec::with_capacity(self.running as usize);
        let mut turn = 0;
        for _ in 0..steps {
            let before = (self.allocations)();
            let plan = nanos(bench.next_plan());
            bench.launch(results);
            let (advance, reported) = bench.report_oldest();
            decoded.allocations += (self.allocations)() - before;
            decoded.plans.push(plan);
            decoded.advances.push(nanos(advance));
            turn += plan + nanos(advance);
            results = reported;
        }
        decoded.turns.push(turn);
    }
}

fn ahead_figures(ahead: Decoded, one: &Decoded) -> AheadFigures {
    let ratios = ahead.turns.iter().zip(&one.turns).map(|(&ahead, &one)| ahead as f64 / one as f64);
    AheadFigures {
        cost_ratio: median(ratios),
        allocations_per_step: ahead.allocations_per_step(),
        plan_us: Distribution::of(ahead.plans),
        advance_us: Distribution::of(ahead.advances),
    }
}

/// Creates `count` prompts of `tokens` tokens, of which the first `shared` are equal.
pub(crate) fn prompts_with_common_part(count: u32, tokens: u32, shared: u32) -> Vec<Vec<Token>> {
    let prompt = |number| {
        let first = 1_000_000_u32.wrapping_mul(number + 1);
        let own = (shared..tokens).map(move |place| first.wrapping_add(place));
        (0..shared).chain(own).collect()
    };
    (0..count).map(prompt).collect()
}

impl Bench {
    /// Creates an idle scheduler whose steps are either prefills or decodes, prefills first.
    pub(crate) fn new(
        page_size: u32,
        device_pages: u32,
        running: u32,
        steps_in_flight: u32,
    ) -> Result<Self, ConfigError> {
        let mut config =
            Config::builder().page_size(page_size).device_pages(device_pages).build()?;
        config.batch.running_max = running;
        config.batch.steps_in_flight_max = steps_in_flight;
        config.batch.step_tokens_max = running.max(8192);
        // All requests arrive at once.
        config.batch.chunk_tokens_min = config.batch.step_tokens_max;
        config.batch.mixed = false;
        config.batch.prefill_streak_max = u32::MAX;
        config.queue.window = running.max(64);
        let scheduler = Scheduler::new(config)?;
        let (plan, in_flight) = (Plan::default(), VecDeque::with_capacity(2));
        Ok(Self { scheduler, plan, now: Time(0), next_request: 0, in_flight })
    }

    /// Submits the prompts and computes until all of them decode or have ended.
    pub(crate) fn wave(&mut self, prompts: &[Vec<Token>], new_tokens: u32) -> Wave {
        let requests: Vec<Request> = prompts
            .iter()
            .map(|prompt| {
                self.next_request += 1;
                Request::new(self.next_request, prompt.clone(), new_tokens)
            })
            .collect();
        let visits = self.scheduler.stats().node_visits;
        let submit = time(|| {
            for request in requests {
                self.scheduler.submit(self.now, request).expect("the prompts fit the device");
            }
        });
        let submit_nodes = self.scheduler.stats().node_visits - visits;
        let mut wave = Wave { submit, submit_nodes, ..Wave::default() };
        loop {
            let stats = self.scheduler.stats();
            let prefilled = self.plan.step.is_some() && self.plan.prefills.is_empty();
            if stats.waiting == 0 && (prefilled || stats.running == 0) {
                break;
            }
            let plan = self.next_plan();
            if !self.plan.prefills.is_empty() {
                wave.admission += plan;
            }
            let results: Vec<StepResult<'_>> = self.producers().collect();
            wave.steps += plan + self.advance(&results);
        }
        if self.scheduler.stats().running == 0 {
            // The plan after the last results reports the ended requests.
            wave.steps += self.next_plan();
        }
        wave
    }

    pub(crate) fn next_plan(&mut self) -> Duration {
        self.now = Time(self.now.0 + 10_000);
        let Self { scheduler, plan, now, .. } = self;
        time(|| scheduler.plan_into(*now, plan))
    }

    pub(crate) fn producers(&self) -> impl Iterator<Item = StepResult<'static>> + use<'_> {
        let last_chunks = self.plan.prefills.iter().filter(|prefill| prefill.produces_token);
        let requests =
            last_chunks.map(|p| p.request).chain(self.plan.decodes.iter().map(|d| d.request));
        requests.map(|request| StepResult { request, tokens: &[7], finished: false })
    }

    pub(crate) fn advance(&mut self, results: &[StepResult<'_>]) -> Duration {
        let Some(step) = self.plan.step else { return Duration::ZERO };
        self.report(step, results)
    }

    fn report(&mut self, step: StepId, results: &[StepResult<'_>]) -> Duration {
        let event = Event::StepDone { step, results, failed: &[] };
        let Self { scheduler, now, .. } = self;
        time(|| scheduler.advance(*now, event).expect("the results fit the step"))
    }

    /// Launches the planned step; its results are stored in `results`, whose memory is reused.
    fn launch(&mut self, mut results: Vec<StepResult<'static>>) {
        results.clear();
        results.extend(self.producers());
        let step = self.plan.step.expect("there is something to compute");
        self.in_flight.push_back(Launched { step, results });
    }

    /// Reports the oldest step in flight, and returns the memory of its results.
    fn report_oldest(&mut self) -> (Duration, Vec<StepResult<'static>>) {
        let Launched { step, results } = self.in_flight.pop_front().expect("a step in flight");
        (self.report(step, &results), results)
    }

    /// Computes `steps` steps, in which running requests decode.
    pub(crate) fn decode(&mut self, steps: u32) {
        for _ in 0..steps {
            self.next_plan();
            let results: Vec<StepResult<'_>> = self.producers().collect();
            self.advance(&results);
        }
    }

    /// Ends the latest `count` requests, if they have not ended.
    pub(crate) fn finish(&mut self, count: u32) -> Duration {
        let ids = self.next_request + 1 - u64::from(count)..=self.next_request;
        let Self { scheduler, now, plan, .. } = self;
        let took = time(|| {
            for id in ids {
                // It may already have ended.
                let _ = scheduler.abort(*now, RequestId(id));
            }
        });
        scheduler.plan_into(*now, plan);
        took
    }
}

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_measured() {
        let workload = StepWorkload {
            running: 8,
            context: 64,
            page_size: 16,
            device_pages: 128,
            shared_percent: 50,
            decode_steps: 20,
            in_flight: 2,
            allocations: || 0,
        };
        let figures = workload.run().expect("it can work");
        for figure in [
            figures.plan_us.p50,
            figures.advance_us.p50,
            figures.submit_us_per_request,
            figures.admit_us_per_request,
            figures.full_hit_admission_us_per_request,
            figures.finish_us_per_request,
        ] {
            assert!(figure > 0.0, "{figures:?}");
        }
        let StepFigures { rehit_us_per_request: whole, .. } = figures;
        let admission = figures.full_hit_admission_us_per_request;
        assert!(whole > admission, "taking in results takes time, too: {figures:?}");
        let ahead = figures.ahead.expect("two steps were in flight");
        for figure in [ahead.plan_us.p50, ahead.advance_us.p50, ahead.cost_ratio] {
            assert!(figure > 0.0, "{figures:?}");
        }
    }

    #[test]
    fn runs_without_a_shared_prefix() {
        let workload = StepWorkload {
            running: 2,
            context: 64,
            page_size: 16,
            device_pages: 128,
            shared_percent: 0,
            decode_steps: 1,
            in_flight: 1,
            allocations: || 0,
        };
        let figures = workload.run().expect("it can work");
        assert!(figures.full_hit_admission_us_per_request > 0.0, "{figures:?}");
        assert!(figures.ahead.is_none(), "one step was in flight: {figures:?}");
    }

    /// The second step is planned before the first is reported, and starts from its tokens.
    #[test]
    fn steps_are_planned_ahead() {
        let mut bench = Bench::new(16, 128, 2, 2).expect("it can work");
        bench.wave(&prompts_with_common_part(2, 64, 0), 8);
        bench.next_plan();
        bench.launch(Vec::new());
        let first = bench.plan.step;
        bench.next_plan();
        bench.launch(Vec::new());
        let inputs = bench.plan.decodes.iter().map(|decode| decode.input);
        assert_eq!(
            (bench.plan.behind, inputs.collect::<Vec<_>>()),
            (first, vec![Some(0), Some(1)])
        );
        assert_eq!(bench.in_flight.len(), 2);
        bench.report_oldest();
        bench.report_oldest();
    }
}
