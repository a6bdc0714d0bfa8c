//! CPU time of each plan while a trace is served from full pools, with a very long prompt in it.

use std::collections::{BTreeMap, HashSet};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use terrace_kit::mixed;
use terrace_replay::trace::Trace;
use terrace_scheduler::{
    Config, ConfigError, Event, L3Config, L3Kind, OpId, Outcome, PageKey, Plan, Request, RequestId,
    Scheduler, StepId, StepResult, Time, Token,
};

use crate::figures::Distribution;
use crate::trace;

/// Simulated duration of a step, without its prefills.
const STEP_US: u64 = 5_000;
/// Simulated time to prefill a token.
const PREFILL_US_PER_TOKEN: u64 = 20;
/// Simulated transfer time of a page between device and host.
const COPY_US_PER_PAGE: u64 = 20;
/// Simulated transfer time of a page between host and L3.
const L3_US_PER_PAGE: u64 = 60;
/// Simulated time of an L3 lookup.
const PROBE_US: u64 = 500;

/// The trace and the sizes of the tiers.
#[derive(Clone, Debug)]
pub struct PlansWorkload {
    /// The requests.
    pub trace: Trace,
    /// Tokens in a prompt that is sent twice, after one half and three quarters of the trace; 0 for
    /// none.
    pub long_prompt_tokens: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Pages of the device.
    pub device_pages: u32,
    /// Pages of the host.
    pub host_pages: u32,
    /// Number of runs. The smallest time of each plan counts, since the plans of all runs are the same.
    pub rounds: u32,
}

/// Results of [`PlansWorkload`].
#[derive(Clone, Debug, Serialize)]
pub struct PlansFigures {
    /// CPU time of a plan.
    pub plan_us: Distribution,
    /// The plan that takes longest.
    pub worst: PlanCost,
    /// Number of plans.
    pub plans: usize,
    /// Tokens found in a tier.
    pub hit_tokens: u64,
}

/// CPU time and work of a plan.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PlanCost {
    /// CPU time.
    pub us: f64,
    /// Number of plans before this one.
    pub index: usize,
    /// Pages of the copies between device and host that it starts.
    pub copied_pages: u64,
    /// Pages of the L3 operations that it starts.
    pub l3_pages: u64,
    /// Device pages that it evicts.
    pub evicted_pages: u64,
    /// Prompt tokens that its step computes.
    pub prefill_tokens: u64,
}

impl PlansWorkload {
    /// Serves the trace.
    ///
    /// # Errors
    /// Fails if the scheduler rejects the sizes.
    pub fn run(&self) -> Result<PlansFigures, ConfigError> {
        let (mut plans, hit_tokens) = self.round()?;
        for _ in 1..self.rounds {
            let (again, _) = self.round()?;
            assert_eq!(again.len(), plans.len(), "the same inputs give the same plans");
            for (plan, again) in plans.iter_mut().zip(again) {
                plan.us = plan.us.min(again.us);
            }
        }
        let by_time = |a: &&PlanCost, b: &&PlanCost| a.us.total_cmp(&b.us);
        Ok(PlansFigures {
            plan_us: Distribution::of(plans.iter().map(|plan| (plan.us * 1e3) as u64).collect()),
            worst: *plans.iter().max_by(by_time).expect("a trace has requests"),
            plans: plans.len(),
            hit_tokens,
        })
    }

    fn round(&self) -> Result<(Vec<PlanCost>, u64), ConfigError> {
        let config = Config::builder()
            .page_size(self.page_size)
            .device_pages(self.device_pages)
            .host_pages(self.host_pages)
            .l3(L3Config::default())
            .build()?;
        let mut world = World::new(Scheduler::new(config)?);
        let requests = self.trace.requests();
        let arrivals = requests.iter().zip(trace::prompts(&self.trace)).enumerate();
        for (number, (request, prompt)) in arrivals {
            world.run_until(request.arrival_us);
            if self.long_prompt_tokens > 0 && self.is_place_of_long_prompt(number) {
                let id = (requests.len() + number) as u64;
                world.submit(Request::new(id, long_prompt(self.long_prompt_tokens), 1));
            }
            world.submit(Request::new(number as u64, prompt, request.output_tokens));
        }
        world.run_until(u64::MAX);
        let stats = world.scheduler.stats();
        assert_eq!(stats.waiting + stats.running, 0, "all requests end");
        let hit_tokens = stats.device_hit_tokens + stats.host_hit_tokens + stats.l3_hit_tokens;
        Ok((world.plans, hit_tokens))
    }

    fn is_place_of_long_prompt(&self, number: usize) -> bool {
        let requests = self.trace.requests().len();
        number == requests / 2 || number == requests * 3 / 4
    }
}

/// A scheduler, and a machine that executes its plans in virtual time.
#[derive(Debug)]
struct World {
    scheduler: Scheduler,
    plan: Plan,
    now_us: u64,
    /// Events by their time and, for equal times, in the order in which they were added.
    due: BTreeMap<(u64, u64), Due>,
    /// Events added so far.
    events: u64,
    l3: HashSet<PageKey>,
    device_lane_us: u64,
    l3_lane_us: u64,
    plans: Vec<PlanCost>,
    evicted_pages: u64,
}

/// Events of the simulated machine.
#[derive(Debug)]
enum Due {
    /// A step ends, with a token for each of the requests.
    Step(StepId, Vec<RequestId>),
    Copy(OpId),
    L3(OpId, L3Kind),
}

impl World {
    fn new(scheduler: Scheduler) -> Self {
        Self {
            scheduler,
            plan: Plan::default(),
            now_us: 0,
            due: BTreeMap::new(),
            events: 0,
            l3: HashSet::new(),
            device_lane_us: 0,
            l3_lane_us: 0,
            plans: Vec::new(),
            evicted_pages: 0,
        }
    }

    fn submit(&mut self, request: Request) {
        self.scheduler.submit(Time(self.now_us), request).expect("a request of a trace");
        self.plan();
    }

    /// Processes all events that are due before `until_us`.
    fn run_until(&mut self, until_us: u64) {
        loop {
            let due_us = self.due.first_key_value().map(|(&(at_us, _), _)| at_us);
            let deadline = self.scheduler.deadline().map(|at| at.0.max(self.now_us + 1));
            let Some(next_us) = due_us.into_iter().chain(deadline).min() else { break };
            if next_us > until_us {
                break;
            }
            self.now_us = next_us;
            while let Some(entry) = self.due.first_entry() {
                if entry.key().0 > next_us {
                    break;
                }
                let due = entry.remove();
                self.happen(&due);
            }
            self.plan();
        }
        self.now_us = until_us;
    }

    fn happen(&mut self, due: &Due) {
        let now = Time(self.now_us);
        let event = match due {
            Due::Step(step, requests) => {
                let result = |&request| StepResult { request, tokens: &[7], finished: false };
                let results: Vec<StepResult<'_>> = requests.iter().map(result).collect();
                let event = Event::StepDone { step: *step, results: &results, failed: &[] };
                self.scheduler.advance(now, event).expect("the results of the plan");
                return;
            }
            &Due::Copy(op) => Event::Operation { op, rank: 0, outcome: Outcome::Done },
            &Due::L3(op, kind) => {
                let path = self.scheduler.l3_path(op).expect("an operation in flight");
                let outcome = match kind {
                    L3Kind::Backup => {
                        self.l3.extend(path.asked());
                        Outcome::Done
                    }
                    L3Kind::Probe | L3Kind::Prefetch => {
                        match path.asked().take_while(|key| self.l3.contains(key)).count() {
                            0 => Outcome::Missing,
                            found if found == path.pages() => Outcome::Done,
                            found => Outcome::Partial(found as u32),
                        }
                    }
                };
                Event::Operation { op, rank: 0, outcome }
            }
        };
        self.scheduler.advance(now, event).expect("a planned operation");
    }

    /// Measures a plan and starts it.
    fn plan(&mut self) {
        let before_ns = cpu_time_ns();
        self.scheduler.plan_into(Time(self.now_us), &mut self.plan);
        let plan_us = (cpu_time_ns() - before_ns) as f64 / 1e3;
        let evicted_pages = self.scheduler.stats().cache.device.evicted_pages;
        let plan = std::mem::take(&mut self.plan);
        let copied_pages = plan.copies.iter().map(|copy| plan.device_pages(copy).len() as u64);
        let l3_pages = plan.l3.iter().map(|op| plan.l3_keys(op).len() as u64);
        self.plans.push(PlanCost {
            us: plan_us,
            index: self.plans.len(),
            copied_pages: copied_pages.sum(),
            l3_pages: l3_pages.sum(),
            evicted_pages: evicted_pages - self.evicted_pages,
            prefill_tokens: plan.prefills.iter().map(|prefill| u64::from(prefill.tokens)).sum(),
        });
        self.evicted_pages = evicted_pages;
        self.start(&plan);
        self.plan = plan;
    }

    fn start(&mut self, plan: &Plan) {
        for copy in &plan.copies {
            let pages = plan.device_pages(copy).len() as u64;
            self.device_lane_us = self.device_lane_us.max(self.now_us) + pages * COPY_US_PER_PAGE;
            self.expect(self.device_lane_us, Due::Copy(copy.op));
        }
        for op in &plan.l3 {
            let at_us = match op.kind {
                L3Kind::Probe => self.now_us + PROBE_US,
                L3Kind::Prefetch | L3Kind::Backup => {
                    let pages = plan.l3_keys(op).len() as u64;
                    self.l3_lane_us = self.l3_lane_us.max(self.now_us) + pages * L3_US_PER_PAGE;
                    self.l3_lane_us
                }
            };
            self.expect(at_us, Due::L3(op.op, op.kind));
        }
        if let Some(step) = plan.step {
            let tokens: u64 = plan.prefills.iter().map(|prefill| u64::from(prefill.tokens)).sum();
            let prefills = plan.prefills.iter().filter(|prefill| prefill.produces_token);
            let requests = prefills.map(|prefill| prefill.request);
            let requests = requests.chain(plan.decodes.iter().map(|decode| decode.request));
            let at_us = self.now_us + STEP_US + tokens * PREFILL_US_PER_TOKEN;
            self.expect(at_us, Due::Step(step, requests.collect()));
        }
    }

    fn expect(&mut self, at_us: u64, due: Due) {
        self.events += 1;
        self.due.insert((at_us, self.events), due);
    }
}

/// A prompt with no prefix in common with those of the trace.
fn long_prompt(tokens: u32) -> Vec<Token> {
    (0..tokens)
        .map(|place| (mixed(u64::from(place) | 1 << 40) % trace::VOCABULARY) as Token)
        .collect()
}

/// CPU time of this thread.
fn cpu_time_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_long_prompt_is_a_hit() {
        let workload = PlansWorkload {
            trace: trace::conversations(),
            long_prompt_tokens: 20_000,
            page_size: 16,
            device_pages: 4096,
            host_pages: 8192,
            rounds: 1,
        };
        let without = PlansWorkload { long_prompt_tokens: 0, ..workload.clone() }.run().unwrap();
        let with = workload.run().unwrap();
        assert!(with.hit_tokens > without.hit_tokens + 15_000, "{with:?} {without:?}");
        assert!(with.worst.us >= with.plan_us.p99);
    }
}
