//! A whole scheduler under decode-heavy load: admissions, decode steps, the same prompts again.

use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_scheduler::{
    Config, ConfigError, Event, Plan, Request, RequestId, Scheduler, StepResult, Time, Token,
};

use crate::figures::{Distribution, nanos};

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct StepWorkload {
    /// Requests that run at once.
    pub running: u32,
    /// Tokens of each prompt.
    pub context: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Pages of the device.
    pub device_pages: u32,
    /// How much of each prompt all have in common, in percent.
    pub shared_percent: u32,
    /// Decode steps to measure.
    pub decode_steps: u32,
    /// Counts the allocations of this thread so far.
    pub allocations: fn() -> u64,
}

/// The same prompts come again so often; the wave in the middle counts.
const REHIT_WAVES: usize = 9;

/// What was measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepFigures {
    /// Planning a decode step.
    pub plan_us: Distribution,
    /// Taking in its results.
    pub advance_us: Distribution,
    /// Submitting a request, which hashes its prompt.
    pub submit_us_per_request: f64,
    /// Planning the prefill of a request whose common part alone is cached, and taking in its
    /// results.
    pub admit_us_per_request: f64,
    /// The same for a request all of whose pages are cached, which then ends.
    pub rehit_us_per_request: f64,
    /// Of that, the plans that admit it.
    pub full_hit_admission_us_per_request: f64,
    /// Letting a request end.
    pub finish_us_per_request: f64,
    /// Reading the counters.
    pub stats_us: f64,
    /// Allocations of a decode step, plan and results together, on average.
    pub allocations_per_step: f64,
}

/// A scheduler with an engine that computes nothing.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) scheduler: Scheduler,
    pub(crate) plan: Plan,
    pub(crate) now: Time,
    next_request: u64,
}

/// What requests took from their submission until all of them decoded, or had ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wave {
    /// Submitting them.
    pub(crate) submit: Duration,
    /// Nodes of the tree that submitting them looked at.
    pub(crate) submit_nodes: u64,
    /// The plans with prefills, which admit them.
    pub(crate) admission: Duration,
    /// All plans, those included, and taking in their results.
    pub(crate) steps: Duration,
}

impl StepWorkload {
    /// Lets the prompts decode, and then come again.
    ///
    /// # Errors
    /// If the scheduler cannot be configured so.
    ///
    /// # Panics
    /// If the prompts do not fit the device.
    pub fn run(&self) -> Result<StepFigures, ConfigError> {
        let mut bench = Bench::new(self.page_size, self.device_pages, self.running)?;
        let shared = self.context * self.shared_percent / 100 / self.page_size * self.page_size;
        let prompts = prompts_with_common_part(self.running, self.context, shared);
        if shared > 0 {
            bench.wave(&[prompts[0][..shared as usize].to_vec()], 1);
            bench.finish(1);
        }
        // One comes with the prefill and one with the step that shows that all have begun; nobody ends in a
        // step that is measured.
        let new_tokens = self.decode_steps + 3;
        let admit = bench.wave(&prompts, new_tokens);
        let (plan_us, advance_us, allocations) = self.decode(&mut bench);
        let stats = time(|| {
            for _ in 0..1000 {
                std::hint::black_box(bench.scheduler.stats());
            }
        });
        let finish = bench.finish(self.running);
        let rehits = std::array::from_fn::<_, REHIT_WAVES, _>(|_| bench.wave(&prompts, 1));
        let rehit = |of: fn(&Wave) -> Duration| median(rehits.each_ref().map(of));
        let each = |took: Duration| took.as_nanos() as f64 / 1000.0 / f64::from(self.running);
        Ok(StepFigures {
            plan_us,
            advance_us,
            submit_us_per_request: each(admit.submit),
            admit_us_per_request: each(admit.steps),
            rehit_us_per_request: each(rehit(|wave| wave.steps)),
            full_hit_admission_us_per_request: each(rehit(|wave| wave.admission)),
            finish_us_per_request: each(finish),
            stats_us: stats.as_nanos() as f64 / 1e6,
            allocations_per_step: allocations as f64 / f64::from(self.decode_steps.max(1)),
        })
    }

    fn decode(&self, bench: &mut Bench) -> (Distribution, Distribution, u64) {
        let (mut plans, mut advances, mut allocations) = (Vec::new(), Vec::new(), 0);
        let mut results = Vec::with_capacity(self.running as usize);
        plans.reserve(self.decode_steps as usize);
        advances.reserve(self.decode_steps as usize);
        for _ in 0..self.decode_steps {
            let before = (self.allocations)();
            plans.push(nanos(bench.next_plan()));
            results.clear();
            results.extend(bench.producers());
            let took = bench.advance(&results);
            allocations += (self.allocations)() - before;
            advances.push(nanos(took));
        }
        (Distribution::of(plans), Distribution::of(advances), allocations)
    }
}

/// So many prompts of so many tokens, the first `shared` of which are the same in all.
pub(crate) fn prompts_with_common_part(count: u32, tokens: u32, shared: u32) -> Vec<Vec<Token>> {
    let prompt = |number| {
        let first = 1_000_000_u32.wrapping_mul(number + 1);
        let own = (shared..tokens).map(move |place| first.wrapping_add(place));
        (0..shared).chain(own).collect()
    };
    (0..count).map(prompt).collect()
}

impl Bench {
    /// An idle one, whose steps are either prefills or decodes, prefills first.
    pub(crate) fn new(
        page_size: u32,
        device_pages: u32,
        running: u32,
    ) -> Result<Self, ConfigError> {
        let mut config =
            Config::builder().page_size(page_size).device_pages(device_pages).build()?;
        config.batch.running_max = running;
        config.batch.step_tokens_max = running.max(8192);
        // All come at once, and then nobody.
        config.batch.chunk_tokens_min = config.batch.step_tokens_max;
        config.batch.mixed = false;
        config.batch.prefill_streak_max = u32::MAX;
        config.queue.window = running.max(64);
        let scheduler = Scheduler::new(config)?;
        Ok(Self { scheduler, plan: Plan::default(), now: Time(0), next_request: 0 })
    }

    /// Submits the prompts and computes until all of them decode, or have ended.
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
            // The plan after the last results takes leave of those that ended.
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
        let event = Event::StepDone { step, results, failed: &[] };
        let Self { scheduler, now, .. } = self;
        time(|| scheduler.advance(*now, event).expect("the results fit the step"))
    }

    /// Computes so many steps, in which those that run decode.
    pub(crate) fn decode(&mut self, steps: u32) {
        for _ in 0..steps {
            self.next_plan();
            let results: Vec<StepResult<'_>> = self.producers().collect();
            self.advance(&results);
        }
    }

    /// Lets the latest `count` requests end, if they have not.
    pub(crate) fn finish(&mut self, count: u32) -> Duration {
        let ids = self.next_request + 1 - u64::from(count)..=self.next_request;
        let Self { scheduler, now, plan, .. } = self;
        let took = time(|| {
            for id in ids {
                // It may have produced all its tokens already.
                let _ = scheduler.abort(*now, RequestId(id));
            }
        });
        scheduler.plan_into(*now, plan);
        took
    }
}

fn median<const N: usize>(mut times: [Duration; N]) -> Duration {
    times.sort_unstable();
    times[N / 2]
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
    }

    #[test]
    fn prompts_need_not_have_anything_in_common() {
        let workload = StepWorkload {
            running: 2,
            context: 64,
            page_size: 16,
            device_pages: 128,
            shared_percent: 0,
            decode_steps: 1,
            allocations: || 0,
        };
        let figures = workload.run().expect("it can work");
        assert!(figures.full_hit_admission_us_per_request > 0.0, "{figures:?}");
    }
}
