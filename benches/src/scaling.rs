//! Growth of costs with the tree, the batch, the context, and with a full pool.
//!
//! Each sweep changes one size only. Times are noisy and depend on the machine's caches, so the
//! visited tree nodes are counted too. That count is exact: an operation that costs no more than
//! the pages that it changes has the same count at every size. The count does not include work
//! within one long node, such as moving its pages; only time shows that.

mod batch;
mod full_pool;
mod tree;

use serde::Serialize;
use terrace_scheduler::ConfigError;

use self::batch::Batch;
use self::full_pool::FullPool;
pub use self::full_pool::{FullPoolFigures, PageEnds, StepCost, StepWork};
use self::tree::Trees;

/// Parameters of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct ScalingWorkload {
    /// Uses smaller sizes and fewer repetitions: counts stay exact, times become inaccurate.
    pub quick: bool,
    /// Called with a message when a phase begins.
    pub progress: fn(&str),
    /// Returns the bytes allocated by this process so far.
    pub allocated_bytes: fn() -> u64,
}

/// Results of the benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct ScalingFigures {
    /// One sweep for each dimension.
    pub sweeps: Vec<Sweep>,
    /// A batch of one size in a full pool: variation of step times, and its causes.
    pub full_pool: Vec<FullPoolFigures>,
}

/// Costs at growing sizes of one dimension, with all else equal.
#[derive(Clone, Debug, Serialize)]
pub struct Sweep {
    /// Dimension.
    pub dimension: &'static str,
    /// Sizes.
    pub sizes: Vec<u64>,
    /// Costs of each operation.
    pub costs: Vec<Cost>,
}

/// Costs of an operation at each size.
#[derive(Clone, Debug, Serialize)]
pub struct Cost {
    /// The operation.
    pub name: &'static str,
    /// Unit of the times.
    pub unit: &'static str,
    /// Time at each size.
    pub times: Vec<f64>,
    /// Growth factor of the time for a tenfold size.
    pub growth: f64,
    /// Visited nodes at each size.
    pub nodes: Vec<f64>,
    /// Growth factor of the nodes for a tenfold size.
    pub nodes_growth: f64,
}

/// Cost of an operation at one size.
struct Reading {
    name: &'static str,
    unit: &'static str,
    time: f64,
    nodes: f64,
}

impl ScalingWorkload {
    /// Runs the benchmark.
    ///
    /// # Errors
    /// Fails if a scheduler cannot be configured.
    pub fn run(&self) -> Result<ScalingFigures, ConfigError> {
        let rounds = if self.quick { 2 } else { 16 };
        let sizes = |quick: &[u64], full: &[u64]| if self.quick { quick } else { full }.to_vec();
        let running = sizes(&[32, 128], &[32, 128, 512, 1024, 4096]);
        let contexts = sizes(&[1 << 10, 1 << 14], &[1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18]);
        let trees = sizes(&[10_000, 100_000], &[10_000, 100_000, 1_000_000, 10_000_000]);
        let by_running = self.sweep("running requests", running, |running| {
            Batch { running: running as u32, context: 1024, rounds }.by_request()
        })?;
        let by_context = self.sweep("tokens of context", contexts.clone(), |context| {
            Batch { running: 32, context: context as u32, rounds }.by_context()
        })?;
        let mut full_pool = Vec::new();
        let by_victim = self.sweep("tokens per evicted prompt", contexts, |victim_tokens| {
            let figures = self.full_pools(victim_tokens as u32)?;
            let FullPoolFigures { median, nodes_median, nodes_max, .. } = figures[0];
            let most_added = figures[0].most_added_by_eviction;
            full_pool.extend(figures);
            let step = |name, step: StepCost, nodes: u64| Reading {
                name,
                unit: "us",
                time: step.us,
                nodes: nodes as f64,
            };
            Ok(vec![
                step("decode step of 64 that evicts 4 pages", median, nodes_median),
                step("most time that eviction adds to a step", most_added, nodes_max),
            ])
        })?;
        // The largest comes last: the heap that it leaves would slow the others.
        let by_pages = self.sweep("cached pages", trees, |pages| {
            let (quick, allocated_bytes) = (self.quick, self.allocated_bytes);
            Trees { pages: pages as u32, quick, allocated_bytes }.readings()
        })?;
        Ok(ScalingFigures { sweeps: vec![by_pages, by_running, by_context, by_victim], full_pool })
    }

    /// Runs one measurement for each pattern of page ends, the most regular first.
    fn full_pools(&self, victim_tokens: u32) -> Result<Vec<FullPoolFigures>, ConfigError> {
        let measure = |page_ends| {
            let pool = FullPool {
                device_pages: 65_536,
                victim_tokens,
                running: 64,
                page_ends,
                steps: if self.quick { 64 } else { 4200 },
                rounds: if self.quick { 1 } else { 9 },
                allocated_bytes: self.allocated_bytes,
            };
            pool.figures()
        };
        PageEnds::ALL.into_iter().map(measure).collect()
    }

    fn sweep(
        &self,
        dimension: &'static str,
        sizes: Vec<u64>,
        mut measure: impl FnMut(u64) -> Result<Vec<Reading>, ConfigError>,
    ) -> Result<Sweep, ConfigError> {
        let mut costs: Vec<Cost> = Vec::new();
        for &size in &sizes {
            (self.progress)(&format!("{size} {dimension}"));
            for (place, reading) in measure(size)?.into_iter().enumerate() {
                if place == costs.len() {
                    costs.push(Cost::new(reading.name, reading.unit));
                }
                costs[place].times.push(reading.time);
                costs[place].nodes.push(reading.nodes);
            }
        }
        for cost in &mut costs {
            cost.growth = growth(&sizes, &cost.times);
            cost.nodes_growth = growth(&sizes, &cost.nodes);
        }
        Ok(Sweep { dimension, sizes, costs })
    }
}

impl Cost {
    fn new(name: &'static str, unit: &'static str) -> Self {
        let (times, nodes) = (Vec::new(), Vec::new());
        Self { name, unit, times, growth: 1.0, nodes, nodes_growth: 1.0 }
    }
}

/// Returns the growth factor of the values for a tenfold size: the slope of the best straight line
/// in a log-log plot.
fn growth(sizes: &[u64], values: &[f64]) -> f64 {
    if values.iter().all(|&value| value == values[0]) {
        return 1.0;
    }
    let log = |value: f64| value.max(1e-9).log10();
    let points = || sizes.iter().map(|&size| log(size as f64)).zip(values.iter().map(|&v| log(v)));
    let count = values.len() as f64;
    let (x, y) = points().fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
    let (mean_x, mean_y) = (x / count, y / count);
    let covariance: f64 = points().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let variance: f64 = points().map(|(x, _)| (x - mean_x).powi(2)).sum();
    10f64.powf(covariance / variance)
}

/// The median of a round of samples, in the best of several rounds: other load only slows, and
/// rarely slows half of every round.
#[derive(Debug)]
struct BestMedian {
    round: Vec<u64>,
    best: f64,
}

impl BestMedian {
    fn new() -> Self {
        Self { round: Vec::new(), best: f64::INFINITY }
    }

    fn note(&mut self, nanoseconds: u64) {
        self.round.push(nanoseconds);
    }

    fn end_round(&mut self) {
        if !self.round.is_empty() {
            let middle = self.round.len() / 2;
            let (_, &mut sample, _) = self.round.select_nth_unstable(middle);
            self.best = self.best.min(sample as f64);
            self.round.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest number of visited nodes per page that is allocated, evicted or published: its own
    /// and its parent.
    const NODES_A_PAGE_MAX: f64 = 2.0;

    #[test]
    fn growth_is_the_slope() {
        let sizes = [10, 100, 1000];
        assert_eq!(growth(&sizes, &[0.0; 3]), 1.0);
        assert!((growth(&sizes, &[3.0, 30.0, 300.0]) - 10.0).abs() < 1e-9);
        assert!((growth(&sizes, &[1.0, 2.0, 4.0]) - 2.0).abs() < 1e-9);
        assert!(growth(&sizes, &[0.0, 0.0, 1.0]) > 10.0, "something where nothing was stands out");
    }

    #[test]
    fn visited_nodes_do_not_grow_with_size() {
        let figures = ScalingWorkload { quick: true, progress: |_| {}, allocated_bytes: || 0 }
            .run()
            .expect("it can work");
        for Sweep { dimension, sizes, costs } in &figures.sweeps {
            for Cost { name, nodes, times, .. } in costs {
                assert!(times.iter().all(|&time| time > 0.0), "{name}: {times:?}");
                // Of longer prompts, fewer are evicted completely.
                let is_fine = |&count: &f64| match *dimension {
                    "tokens per evicted prompt" => count <= nodes[0],
                    _ => count == nodes[0],
                };
                assert!(
                    nodes.iter().all(is_fine),
                    "{name}: {nodes:?} nodes at {sizes:?} {dimension}"
                );
            }
        }
        for pool in &figures.full_pool {
            assert_eq!(pool.slowest_with_free_pages.work.pages_evicted, 0, "{pool:?}");
            assert!(pool.nodes_max > 0 && pool.nodes_per_page_max <= NODES_A_PAGE_MAX, "{pool:?}");
        }
    }
}
