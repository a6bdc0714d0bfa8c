//! A whole scheduler under decode-heavy load: admissions, decode steps, the same prompts again.

use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_scheduler::{
    Config, ConfigError, Event, Plan, Request, RequestId, Scheduler, StepResult, Time, Token,
};

use crate::figures::Distribution;

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
    /// Counts the allocations of this process so far.
    pub allocations: fn() -> u64,
}

/// What was measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepFigures {
    /// Planning a decode step.
    pub plan_us: Distribution,
    /// Taking in its results.
    pub advance_us: Distribution,
    /// Submitting and prefilling a request whose common part alone is cached.
    pub admit_us_per_request: f64,
    /// The same for a request all of whose pages are cached.
    pub rehit_us_per_request: f64,
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

impl StepWorkload {
    /// Runs two waves of the same prompts, decodes in the first.
    ///
    /// # Errors
    /// If the scheduler cannot be configured so.
    ///
    /// # Panics
    /// If the prompts do not fit the device.
    pub fn run(&self) -> Result<StepFigures, ConfigError> {
        let mut bench = Bench::new(self.page_size, self.device_pages, self.running)?;
        let shared = self.context * self.shared_percent / 100 / self.page_size * self.page_size;
        let common: Vec<Token> = (0..shared).collect();
        bench.wave(std::slice::from_ref(&common), 1);
        bench.finish(1);
        let prompts: Vec<Vec<Token>> = (0..self.running)
            .map(|request| {
                let own = (shared..self.context).map(|place| 1_000_000 * (request + 1) + place);
                common.iter().copied().chain(own).collect()
            })
            .collect();
        let new_tokens = self.decode_steps + 2;
        let admit = bench.wave(&prompts, new_tokens);
        let (plan_us, advance_us, allocations) = self.decode(&mut bench);
        let stats = time(|| {
            for _ in 0..1000 {
                std::hint::black_box(bench.scheduler.stats());
            }
        });
        let finish = bench.finish(self.running);
        let rehit = bench.wave(&prompts, 1);
        let each = |took: Duration| took.as_nanos() as f64 / 1000.0 / f64::from(self.running);
        Ok(StepFigures {
            plan_us,
            advance_us,
            admit_us_per_request: each(admit),
            rehit_us_per_request: each(rehit),
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
        config.batch.mixed = false;
        config.batch.prefill_streak_max = u32::MAX;
        config.queue.window = running.max(64);
        let scheduler = Scheduler::new(config)?;
        Ok(Self { scheduler, plan: Plan::default(), now: Time(0), next_request: 0 })
    }

    /// Submits the prompts and computes until all of them decode, or have ended.
    pub(crate) fn wave(&mut self, prompts: &[Vec<Token>], new_tokens: u32) -> Duration {
        let requests: Vec<Request> = prompts
            .iter()
            .map(|prompt| {
                self.next_request += 1;
                Request::new(self.next_request, prompt.clone(), new_tokens)
            })
            .collect();
        let mut took = time(|| {
            for request in requests {
                self.scheduler.submit(self.now, request).expect("the prompts fit the device");
            }
        });
        loop {
            let stats = self.scheduler.stats();
            let prefilled = self.plan.step.is_some() && self.plan.prefills.is_empty();
            if stats.waiting == 0 && (prefilled || stats.running == 0) {
                return took;
            }
            took += self.next_plan();
            let results: Vec<StepResult<'_>> = self.producers().collect();
            took += self.advance(&results);
        }
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

    fn advance(&mut self, results: &[StepResult<'_>]) -> Duration {
        let Some(step) = self.plan.step else { return Duration::ZERO };
        let event = Event::StepDone { step, results };
        let Self { scheduler, now, .. } = self;
        time(|| scheduler.advance(*now, event).expect("the results fit the step"))
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

fn time(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
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
            figures.admit_us_per_request,
            figures.rehit_us_per_request,
            figures.finish_us_per_request,
        ] {
            assert!(figure > 0.0, "{figures:?}");
        }
    }
}
