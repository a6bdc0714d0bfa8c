//! Steps of a constant batch in a pool without free pages: every allocation evicts.

use serde::Serialize;
use terrace_kit::{middle_by, mixed};
use terrace_scheduler::{ConfigError, Decode, Stats, StepResult, Token};

use crate::figures::nanos;
use crate::steps::Bench;

const PAGE_SIZE: u32 = 16;
const CONTEXT: u32 = 1024;

/// A batch that decodes in a full pool, and the same batch with free pages.
#[derive(Clone, Debug, Serialize)]
pub struct FullPoolFigures {
    /// Tokens in each ended prompt, whose pages are evicted.
    pub victim_tokens: u32,
    /// Pattern of page ends.
    pub page_ends: PageEnds,
    /// Step of median time.
    pub median: StepCost,
    /// The slowest step.
    pub slowest: StepCost,
    /// Ratio of the slowest to the median.
    pub slowest_over_median: f64,
    /// Number of steps above five times the median.
    pub steps_over_5_medians: usize,
    /// Number of steps.
    pub steps: usize,
    /// The slowest step of the same batch with free pages, without evictions.
    pub slowest_with_free_pages: StepCost,
    /// The step with the largest increase by eviction, and only the increase: the same step is
    /// measured with a full pool and with free pages.
    pub most_added_by_eviction: StepCost,
    /// Median of visited nodes.
    pub nodes_median: u64,
    /// Largest number of visited nodes.
    pub nodes_max: u64,
    /// Visited nodes per changed page, in the step that visited most.
    pub nodes_per_page_max: f64,
}

/// Pattern in which the requests of a batch reach page ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PageEnds {
    /// Equally many in every step; all requests started at the same time.
    Spread,
    /// At random: requests arrived one after the other.
    Drawn,
    /// All in the same step, which then allocates as many pages as possible; other steps allocate
    /// none.
    Together,
}

/// Time and work of one step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepCost {
    /// Time of plan and results.
    pub us: f64,
    /// Work.
    pub work: StepWork,
}

/// Work of a step: the same in every repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepWork {
    /// Pages allocated.
    pub pages_taken: u64,
    /// Pages evicted.
    pub pages_evicted: u64,
    /// Pages completed and inserted into the tree.
    pub pages_published: u64,
    /// Visited nodes.
    pub nodes: u64,
    /// Bytes requested of the allocator: lists that outgrow their memory are moved.
    pub allocated_bytes: u64,
}

impl StepWork {
    /// Returns visited nodes per changed page; infinite if nodes were visited without a change.
    fn nodes_per_page(&self) -> f64 {
        match self.pages_taken + self.pages_evicted + self.pages_published {
            0 if self.nodes == 0 => 0.0,
            pages => self.nodes as f64 / pages as f64,
        }
    }
}

/// A pool full of ended prompts, and decoding requests.
#[derive(Clone, Copy)]
pub(super) struct FullPool {
    pub(super) device_pages: u32,
    /// Tokens in each ended prompt.
    pub(super) victim_tokens: u32,
    pub(super) running: u32,
    pub(super) page_ends: PageEnds,
    pub(super) steps: u32,
    /// Number of repetitions; the median of each step counts. Equal inputs give equal steps, so
    /// other load drops out and the cost of the step remains.
    pub(super) rounds: u32,
    /// Returns the bytes allocated by this process so far.
    pub(super) allocated_bytes: fn() -> u64,
}

impl PageEnds {
    /// All patterns.
    pub(super) const ALL: [Self; 3] = [Self::Spread, Self::Drawn, Self::Together];

    /// Returns the additional tokens of a prompt.
    fn longer_by(self, request: u32) -> u32 {
        match self {
            Self::Spread => request % PAGE_SIZE,
            Self::Drawn | Self::Together => 0,
        }
    }

    /// Returns the number of steps before the next request arrives.
    fn steps_until_next(self, request: u32) -> u32 {
        match self {
            Self::Drawn => (mixed(request.into()) % u64::from(2 * PAGE_SIZE)) as u32,
            Self::Spread | Self::Together => 0,
        }
    }
}

impl FullPool {
    pub(super) fn figures(&self) -> Result<FullPoolFigures, ConfigError> {
        let full = self.measure_with_pages(self.device_pages)?;
        let free = self.measure_with_pages(2 * self.device_pages)?;
        let added = full.iter().zip(&free).map(|(full, free)| {
            assert_eq!(full.work.pages_taken, free.work.pages_taken, "the same batch");
            // Noise may exceed the increase by eviction.
            StepCost { us: (full.us - free.us).max(0.001), work: full.work }
        });
        let most_added_by_eviction = slowest(added.filter(|step| step.work.pages_evicted > 0));
        let slowest_with_free_pages = slowest(free.into_iter());
        let steps = in_order(full);
        let (median, slowest) = (steps[steps.len() / 2], steps[steps.len() - 1]);
        let nodes = nodes_in_order(&steps);
        let nodes_per_page = steps.iter().map(|step| step.work.nodes_per_page());
        Ok(FullPoolFigures {
            victim_tokens: self.victim_tokens,
            page_ends: self.page_ends,
            median,
            slowest,
            slowest_over_median: slowest.us / median.us,
            steps_over_5_medians: steps.iter().filter(|step| step.us > 5.0 * median.us).count(),
            steps: steps.len(),
            slowest_with_free_pages,
            most_added_by_eviction,
            nodes_median: nodes[nodes.len() / 2],
            nodes_max: nodes[nodes.len() - 1],
            nodes_per_page_max: nodes_per_page.fold(0.0, f64::max),
        })
    }

    /// Returns the steps, fastest first.
    pub(super) fn measure(&self) -> Result<Vec<StepCost>, ConfigError> {
        Ok(in_order(self.measure_with_pages(self.device_pages)?))
    }

    fn measure_with_pages(&self, device_pages: u32) -> Result<Vec<StepCost>, ConfigError> {
        let (first, work) = self.round(device_pages)?;
        let mut rounds = vec![first];
        for _ in 1..self.rounds {
            let (times, again) = self.round(device_pages)?;
            assert_eq!(again, work, "the same inputs give the same steps");
            rounds.push(times);
        }
        let median_us = |step: usize| {
            let times = rounds.iter().map(|times| times[step]);
            middle_by(times, Ord::cmp).unwrap_or_default() as f64 / 1000.0
        };
        let cost = |(step, work): (usize, StepWork)| {
            let is_full = device_pages == self.device_pages;
            let evicted = if is_full { work.pages_taken } else { 0 };
            assert_eq!(work.pages_evicted, evicted, "each page is another's, or none is");
            StepCost { us: median_us(step), work }
        };
        Ok(work.into_iter().enumerate().map(cost).collect())
    }

    /// Returns time and work of each step.
    fn round(&self, device_pages: u32) -> Result<(Vec<u64>, Vec<StepWork>), ConfigError> {
        let mut bench = self.decoding(device_pages)?;
        let mut results: Vec<StepResult<'_>> = Vec::with_capacity(self.running as usize);
        let steps = self.steps as usize;
        let (mut times, mut work) = (Vec::with_capacity(steps), Vec::with_capacity(steps));
        for step in 0..PAGE_SIZE + self.steps {
            let (before, bytes) = (bench.scheduler.stats(), (self.allocated_bytes)());
            let plan = bench.next_plan();
            results.clear();
            results.extend(bench.producers());
            let advance = bench.advance(&results);
            let allocated_bytes = (self.allocated_bytes)() - bytes;
            // The first page that a request publishes starts a node, which the others extend.
            if step >= PAGE_SIZE {
                let after = bench.scheduler.stats();
                let evicted = |stats: Stats| stats.cache.device.evicted_pages;
                let at_end = |decode: &&Decode| decode.start % PAGE_SIZE == PAGE_SIZE - 1;
                times.push(nanos(plan + advance));
                work.push(StepWork {
                    pages_taken: bench.plan.rows.len() as u64,
                    pages_evicted: evicted(after) - evicted(before),
                    pages_published: bench.plan.decodes.iter().filter(at_end).count() as u64,
                    nodes: after.node_visits - before.node_visits,
                    allocated_bytes,
                });
            }
        }
        Ok((times, work))
    }

    fn decoding(&self, device_pages: u32) -> Result<Bench, ConfigError> {
        let mut bench = Bench::new(PAGE_SIZE, device_pages, self.running, 1)?;
        let victims = (self.device_pages * PAGE_SIZE).div_ceil(self.victim_tokens) + 1;
        for number in 0..victims {
            bench.wave(&[prompt(number, self.victim_tokens)], 1);
        }
        let waits = || (0..self.running).map(|request| self.page_ends.steps_until_next(request));
        // Each arrival takes two steps: a prefill and the first decode.
        let new_tokens = waits().sum::<u32>() + 2 * self.running + self.steps + 2 * PAGE_SIZE;
        let prompts: Vec<_> = (0..self.running)
            .map(|request| prompt(victims + request, CONTEXT + self.page_ends.longer_by(request)))
            .collect();
        match self.page_ends {
            PageEnds::Spread | PageEnds::Together => {
                bench.wave(&prompts, new_tokens);
            }
            PageEnds::Drawn => {
                for (prompt, wait) in prompts.iter().zip(waits()) {
                    bench.wave(std::slice::from_ref(prompt), new_tokens);
                    bench.decode(wait);
                }
            }
        }
        Ok(bench)
    }
}

/// Sorts steps, fastest first.
fn in_order(mut steps: Vec<StepCost>) -> Vec<StepCost> {
    steps.sort_by(|a, b| a.us.total_cmp(&b.us));
    steps
}

fn slowest(steps: impl Iterator<Item = StepCost>) -> StepCost {
    steps.max_by(|a, b| a.us.total_cmp(&b.us)).expect("there are steps")
}

/// Returns the visited nodes of the steps, fewest first.
pub(super) fn nodes_in_order(steps: &[StepCost]) -> Vec<u64> {
    let mut nodes: Vec<u64> = steps.iter().map(|step| step.work.nodes).collect();
    nodes.sort_unstable();
    nodes
}

/// Returns a prompt with a unique first token.
fn prompt(number: u32, tokens: u32) -> Vec<Token> {
    let first = number.wrapping_mul(0x9E37_79B9);
    (0..tokens).map(|place| first.wrapping_add(place)).collect()
}
