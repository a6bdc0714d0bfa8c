//! Runs the scheduler in simulated worlds with faults and checks its invariants.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use terrace_cache::planted::{Bug, plant};
use terrace_tests::sim::{
    FaultCounts, FaultKind, RunOptions, RunResult, run_world, shrink, trace_seed, write_story,
};

/// Run the scheduler in random simulated worlds with faults, and check its invariants
#[derive(Parser)]
#[command(name = "simulate", version)]
struct Arguments {
    /// Range of seeds, one world per seed; the end is not included
    #[arg(long, default_value = "0..500", value_parser = range)]
    seeds: Range<u64>,
    /// Run a single seed
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Steps of each world with faults; after them, the world must recover and finish
    #[arg(long, default_value_t = 4000)]
    steps: u64,
    /// Print everything that happens in the world of a single seed
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Worlds that run in parallel (default: number of cores)
    #[arg(long)]
    threads: Option<usize>,
    /// Plant a known bug, given by name, or each one in turn (`all`), and count the steps until it is detected
    #[arg(long, conflicts_with_all = ["seed", "trace"])]
    planted: Option<String>,
    /// Write a minimised list of actions for each violation to this folder
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let bounds = text.split_once("..").ok_or("write it like 0..500")?;
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text}: {error}"));
    let range = number(bounds.0)?..number(bounds.1)?;
    if range.is_empty() { Err("the range is empty".to_owned()) } else { Ok(range) }
}

#[derive(Serialize)]
struct Summary {
    seeds: u64,
    steps: u64,
    steps_per_second: u64,
    violations: usize,
    faults: BTreeMap<String, u64>,
    failing_seeds: Vec<u64>,
    /// Hash of every plan of every seed: the same on every machine and in every build.
    fingerprint: String,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // A panic is reported as a violation with its seed, without the default message.
    std::panic::set_hook(Box::new(|_| {}));
    if arguments.trace
        && let Some(seed) = arguments.seed
    {
        print!("{}", trace_seed(seed, arguments.steps));
        return ExitCode::SUCCESS;
    }
    if let Some(name) = &arguments.planted {
        return catch_planted(name, &arguments);
    }
    let seeds = arguments.seed.map_or(arguments.seeds.clone(), |seed| seed..seed + 1);
    let started = Instant::now();
    let SeedSummary { steps, faults, failures, fingerprint, .. } =
        run_all(&arguments, seeds.clone());
    let seconds = started.elapsed().as_secs_f64();
    let summary = Summary {
        seeds: seeds.end - seeds.start,
        steps,
        steps_per_second: (steps as f64 / seconds) as u64,
        violations: failures.len(),
        faults: FaultKind::ALL.iter().map(|kind| (kind.to_string(), faults.of(*kind))).collect(),
        failing_seeds: failures.iter().map(|life| life.seed).collect(),
        fingerprint: format!("{fingerprint:016x}"),
    };
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&summary).expect("plain data"));
    } else {
        print_summary(&summary, seconds);
    }
    for life in &failures {
        report(life, &arguments);
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Result of all seeds.
#[derive(Default)]
struct SeedSummary {
    steps: u64,
    /// Completed seeds.
    seeds: u64,
    faults: FaultCounts,
    failures: Vec<RunResult>,
    fingerprint: u64,
}

/// Progress lines of a long run without a terminal.
struct Log {
    seeds: u64,
    started: Instant,
    /// Seconds from the start until the next line; the interval grows with the run.
    next_s: AtomicU64,
    is_on: bool,
}

impl Log {
    fn new(seeds: u64) -> Self {
        let is_on = !std::io::stderr().is_terminal();
        Self { seeds, started: Instant::now(), next_s: AtomicU64::new(10), is_on }
    }

    fn seed_lived(&self, lived: &SeedSummary) {
        let seconds = self.started.elapsed().as_secs();
        if !self.is_on || seconds < self.next_s.load(Ordering::Relaxed) {
            return;
        }
        self.next_s.store(seconds + (seconds / 10).clamp(10, 300), Ordering::Relaxed);
        let left = (seconds + 1) * (self.seeds - lived.seeds) / lived.seeds.max(1);
        eprintln!(
            "{seconds} s: {} of {} seeds, {} steps, {} violations, about {left} s left",
            lived.seeds,
            self.seeds,
            lived.steps,
            lived.failures.len(),
        );
    }
}

/// Runs all seeds, several in parallel.
fn run_all(arguments: &Arguments, seeds: Range<u64>) -> SeedSummary {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = arguments.threads.unwrap_or(cores).max(1);
    let progress = progress(seeds.end - seeds.start);
    let next = AtomicU64::new(seeds.start);
    let lived = Mutex::new(SeedSummary::default());
    let log = Log::new(seeds.end - seeds.start);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let life = run_world(RunOptions::of(seed, arguments.steps));
                    let mut lived = lived.lock().expect("no thread panics");
                    lived.seeds += 1;
                    lived.steps += life.steps;
                    lived.faults.add(&life.faults);
                    // A sum does not depend on the order in which seeds complete.
                    lived.fingerprint = lived.fingerprint.wrapping_add(life.fingerprint);
                    if let Some(violation) = &life.violation {
                        // Printed at once, in case the run is interrupted.
                        progress.suspend(|| eprintln!("seed {seed}: {violation}"));
                        lived.failures.push(life);
                    }
                    progress.inc(1);
                    log.seed_lived(&lived);
                }
            });
        }
    });
    progress.finish_and_clear();
    let mut lived = lived.into_inner().expect("no thread panics");
    lived.failures.sort_by_key(|life| life.seed);
    lived
}

fn progress(seeds: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} seeds, {eta} left");
    let bar = ProgressBar::new(seeds).with_style(style.expect("a sound template"));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn print_summary(summary: &Summary, seconds: f64) {
    println!(
        "{} seeds, {} steps in {seconds:.1} s ({} steps per second)",
        summary.seeds, summary.steps, summary.steps_per_second
    );
    println!("injected faults:");
    for (kind, count) in &summary.faults {
        println!("  {kind:18} {count:>10}");
    }
    println!("fingerprint {}", summary.fingerprint);
    match summary.violations {
        0 => println!("no violation"),
        count => println!("{count} VIOLATIONS"),
    }
}

/// Reports a violation, its seed, and the shortest list of actions that causes it.
fn report(life: &RunResult, arguments: &Arguments) {
    let Some(violation) = &life.violation else { return };
    let (seed, steps) = (life.seed, arguments.steps);
    eprintln!("\nseed {seed} after {} steps: {violation}", life.steps);
    eprintln!(
        "  reproduce: cargo run --release -p terrace-tests --bin simulate -- --seed {seed} --steps {steps}"
    );
    match shrink(&life.swarm.config, &life.actions) {
        Some(actions) => {
            let story = write_story(&life.swarm.config, &actions);
            eprintln!("  minimised to {} actions; the file for tests/regressions:", actions.len());
            eprintln!("{story}");
            save(arguments, &format!("seed-{seed}"), &story);
        }
        None => eprintln!(
            "  (the violation appears only after the faults have ended, so it is not minimised: see --trace)"
        ),
    }
}

fn save(arguments: &Arguments, name: &str, story: &str) {
    let Some(folder) = &arguments.save else { return };
    let file = folder.join(name).with_extension("txt");
    if let Err(error) = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&file, story))
    {
        eprintln!("simulate: {}: {error}", file.display());
    }
}

/// Detection of a planted bug.
#[derive(Serialize)]
struct Detection {
    name: String,
    /// The seed that detected it, if any.
    seed: Option<u64>,
    /// Steps until then, over all seeds.
    steps: u64,
    violation: Option<String>,
}

#[derive(Serialize)]
struct PlantedSummary {
    planted: usize,
    caught: usize,
    bugs: Vec<Detection>,
}

/// Plants bugs one after the other, and runs seeds until each is detected.
fn catch_planted(name: &str, arguments: &Arguments) -> ExitCode {
    let bugs: Vec<Bug> =
        Bug::ALL.into_iter().filter(|bug| name == "all" || name == bug.to_string()).collect();
    if bugs.is_empty() {
        let names: Vec<String> = Bug::ALL.iter().map(Bug::to_string).collect();
        eprintln!("simulate: unknown bug {name}; known bugs: {}", names.join(", "));
        return ExitCode::FAILURE;
    }
    let progress = progress(bugs.len() as u64);
    let next = AtomicU64::new(0);
    let caught = Mutex::new(Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads.unwrap_or(cores).max(1) {
            scope.spawn(|| {
                while let Some(&bug) = bugs.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let one = catch(bug, arguments);
                    caught.lock().expect("no thread panics").push(one);
                    progress.inc(1);
                }
            });
        }
    });
    progress.finish_and_clear();
    let mut bugs = caught.into_inner().expect("no thread panics");
    bugs.sort_by(|a, b| a.name.cmp(&b.name));
    let caught = bugs.iter().filter(|bug| bug.seed.is_some()).count();
    let summary = PlantedSummary { planted: bugs.len(), caught, bugs };
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&summary).expect("plain data"));
    } else {
        for bug in &summary.bugs {
            let seed = bug.seed.map_or("never".to_owned(), |seed| format!("seed {seed}"));
            let how = bug.violation.as_deref().unwrap_or("NOT CAUGHT");
            println!("{:28} {seed:>10} {:>9} steps  {how:.70}", bug.name, bug.steps);
        }
        println!("{caught} of {} planted bugs caught", summary.planted);
    }
    if caught == summary.planted { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn catch(bug: Bug, arguments: &Arguments) -> Detection {
    let mut steps = 0;
    for seed in arguments.seeds.clone() {
        let life =
            run_world(RunOptions { bug: Some(bug), ..RunOptions::of(seed, arguments.steps) });
        steps += life.steps;
        if let Some(violation) = life.violation {
            if arguments.save.is_some() {
                plant(Some(bug));
                if let Some(actions) = shrink(&life.swarm.config, &life.actions) {
                    let story = write_story(&life.swarm.config, &actions);
                    save(arguments, &bug.to_string(), &story);
                }
                plant(None);
            }
            let violation = Some(violation.to_string());
            return Detection { name: bug.to_string(), seed: Some(seed), steps, violation };
        }
    }
    Detection { name: bug.to_string(), seed: None, steps, violation: None }
}
