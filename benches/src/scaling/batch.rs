//! Costs of a step, by the number of decoding requests and the length of their contexts.

use terrace_scheduler::{ConfigError, StepResult, Token};

use super::{BestMedian, Reading};
use crate::figures::nanos;
use crate::steps::{Bench, prompts_with_common_part};

const PAGE_SIZE: u32 = 16;
/// Page boundaries that every request crosses in one round.
const PAGES_A_ROUND: u32 = 8;
/// Number of repetitions of all prompts.
const ADMISSIONS: u32 = 5;
/// Prompts that are forked.
const FORKS: u32 = 8;
/// Tokens from here on occur in no other prompt.
const OTHER: Token = 4_200_000_000;

/// Running requests with contexts of equal length.
pub(super) struct Batch {
    pub(super) running: u32,
    pub(super) context: u32,
    pub(super) rounds: u32,
}

/// One half of a step: the plan, or the processing of its results.
struct Half {
    /// Steps without page boundaries.
    between: Part,
    /// Steps in which every request allocates or publishes a page.
    at_boundary: Part,
}

struct Part {
    time: BestMedian,
    nodes: u64,
    steps: u64,
}

impl Batch {
    /// Returns the cost of a step per request.
    pub(super) fn by_request(&self) -> Result<Vec<Reading>, ConfigError> {
        let mut bench = self.decoding()?;
        let (plan, advance) = self.decode(&mut bench);
        let running = f64::from(self.running);
        let mut readings: Vec<Reading> = [
            ("plan a step between page boundaries", &plan.between),
            ("process its results", &advance.between),
            ("plan a step, each takes a page", &plan.at_boundary),
            ("process results, each publishes a page", &advance.at_boundary),
        ]
        .into_iter()
        .map(|(name, part)| Reading {
            name,
            unit: "ns per request",
            time: part.time.best / running,
            nodes: part.nodes() / running,
        })
        .collect();
        readings.push(self.step(
            "a whole step between page boundaries",
            &plan.between,
            &advance.between,
        ));
        Ok(readings)
    }

    /// Returns the costs of a step and an admission by context length.
    pub(super) fn by_context(&self) -> Result<Vec<Reading>, ConfigError> {
        let mut bench = self.decoding()?;
        let (plan, advance) = self.decode(&mut bench);
        bench.finish(self.running);
        let [submit, admit] = self.admit_again(&mut bench);
        Ok(vec![
            self.step("decode step of 32 between boundaries", &plan.between, &advance.between),
            // No step does both: a plan allocates pages, and the results of fifteen steps later
            // publish them.
            self.step(
                "the same, each takes and publishes a page",
                &plan.at_boundary,
                &advance.at_boundary,
            ),
            submit,
            admit,
            self.fork(&mut bench),
        ])
    }

    /// Nodes are per request, so that batches of all sizes are comparable.
    fn step(&self, name: &'static str, plan: &Part, advance: &Part) -> Reading {
        Reading {
            name,
            unit: "us",
            time: (plan.time.best + advance.time.best) / 1000.0,
            nodes: (plan.nodes() + advance.nodes()) / f64::from(self.running),
        }
    }

    /// Creates a scheduler whose batch has been prefilled.
    fn decoding(&self) -> Result<Bench, ConfigError> {
        let tokens = self.context + self.new_tokens() + 1;
        let pages = (self.running + FORKS) * (tokens.div_ceil(PAGE_SIZE) + 1);
        let mut bench = Bench::new(PAGE_SIZE, pages, self.running, 1)?;
        let prompts = self.prompts();
        // A prompt with another continuation gives the shared part a separate node.
        let common = prompts[0].iter().take(self.context as usize / 4).copied();
        bench.wave(&[common.chain(OTHER..=OTHER + PAGE_SIZE).collect()], 1);
        bench.finish(1);
        bench.wave(&prompts, self.new_tokens());
        // The first page that a request publishes may start a node; the others extend it.
        bench.decode(PAGE_SIZE);
        Ok(bench)
    }

    /// Creates prompts of which a quarter is shared. The last token never matches, so there is one
    /// more than whole pages.
    fn prompts(&self) -> Vec<Vec<Token>> {
        prompts_with_common_part(self.running, self.context + 1, self.context / 4)
    }

    fn new_tokens(&self) -> u32 {
        (1 + self.rounds * PAGES_A_ROUND) * PAGE_SIZE + 2
    }

    fn decode(&self, bench: &mut Bench) -> (Half, Half) {
        let (mut plan, mut advance) = (Half::new(), Half::new());
        let mut results: Vec<StepResult<'_>> = Vec::with_capacity(self.running as usize);
        for _ in 0..self.rounds {
            for _ in 0..PAGES_A_ROUND * PAGE_SIZE {
                let visits = bench.scheduler.stats().node_visits;
                let took = bench.next_plan();
                let visits_planned = bench.scheduler.stats().node_visits;
                let place = bench.plan.decodes[0].start % PAGE_SIZE;
                plan.part(place == 0).note(nanos(took), visits_planned - visits);
                results.clear();
                results.extend(bench.producers());
                let took = bench.advance(&results);
                let visits_advanced = bench.scheduler.stats().node_visits;
                let part = advance.part(place == PAGE_SIZE - 1);
                part.note(nanos(took), visits_advanced - visits_planned);
            }
            for part in [&mut plan, &mut advance] {
                part.between.time.end_round();
                part.at_boundary.time.end_round();
            }
        }
        (plan, advance)
    }

    /// Submits each cached prompt again, and computes its last token.
    fn admit_again(&self, bench: &mut Bench) -> [Reading; 2] {
        let prompts = self.prompts();
        // The first time, a node may be split where the prompt ends and its decode begins.
        bench.wave(&prompts, 1);
        bench.finish(self.running);
        let (mut submit, mut admission) = (BestMedian::new(), BestMedian::new());
        let (visits, mut submit_nodes) = (bench.scheduler.stats().node_visits, 0);
        for _ in 0..ADMISSIONS {
            for prompt in &prompts {
                let wave = bench.wave(std::slice::from_ref(prompt), 1);
                submit.note(nanos(wave.submit));
                admission.note(nanos(wave.admission));
                submit_nodes += wave.submit_nodes;
            }
            submit.end_round();
            admission.end_round();
        }
        let visits = bench.scheduler.stats().node_visits - visits;
        let each = |nodes: u64| nodes as f64 / f64::from(ADMISSIONS * self.running);
        let pages = f64::from(self.context / PAGE_SIZE);
        [
            Reading {
                name: "submit a prompt",
                unit: "ns per page",
                time: submit.best / pages,
                nodes: each(submit_nodes),
            },
            Reading {
                name: "admit it with all pages cached",
                unit: "ns per page",
                time: admission.best / pages,
                nodes: each(visits - submit_nodes),
            },
        ]
    }

    /// Submits prompts of two pages, the first of which is cached.
    fn fork(&self, bench: &mut Bench) -> Reading {
        let mut time = BestMedian::new();
        let mut nodes = 0;
        for number in 0..FORKS {
            let first = 3_000_000_000 + number * self.context;
            bench.wave(&[(first..first + self.context).collect()], 1);
            let visits = bench.scheduler.stats().node_visits;
            let fork = (first..first + PAGE_SIZE).chain(OTHER..=OTHER + PAGE_SIZE).collect();
            let wave = bench.wave(&[fork], 1);
            time.note(nanos(wave.submit + wave.steps));
            nodes += bench.scheduler.stats().node_visits - visits;
        }
        time.end_round();
        Reading {
            name: "admit 2 pages, the first of them cached",
            unit: "us",
            time: time.best / 1000.0,
            nodes: nodes as f64 / f64::from(FORKS),
        }
    }
}

impl Half {
    fn new() -> Self {
        let part = || Part { time: BestMedian::new(), nodes: 0, steps: 0 };
        Self { between: part(), at_boundary: part() }
    }

    fn part(&mut self, at_boundary: bool) -> &mut Part {
        if at_boundary { &mut self.at_boundary } else { &mut self.between }
    }
}

impl Part {
    fn note(&mut self, nanoseconds: u64, nodes: u64) {
        self.time.note(nanoseconds);
        self.nodes += nodes;
        self.steps += 1;
    }

    /// Returns the visited nodes of a step.
    fn nodes(&self) -> f64 {
        self.nodes as f64 / self.steps as f64
    }
}
