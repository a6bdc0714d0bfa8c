//! A readable trace of one seed.

use std::fmt::Write;

use terrace_scheduler::Config;

use super::action::Action;
use super::simulation::{RunOptions, RunResult, run_world};
use super::stage::{Stage, Violation};
use super::useful::{Account, run_benign};
use crate::script::describe;

/// Returns the trace of a seed's world, line by line; of its benign world, if the violation is
/// there.
///
/// # Panics
/// Panics if a plan cannot be formatted, which does not happen.
#[must_use]
pub fn trace_seed(seed: u64, steps: u64) -> String {
    let life = run_world(RunOptions::of(seed, steps));
    let mut story = match life.violation {
        Some(Violation::LowReuse(_)) => trace_benign(seed),
        Some(_) | None => trace_run(&life),
    };
    match life.violation {
        Some(violation) => writeln!(story, "VIOLATION: {violation}"),
        None => writeln!(story, "all is well after {} steps", life.steps),
    }
    .expect("writing to a string");
    story
}

fn trace_run(life: &RunResult) -> String {
    let mut config = life.swarm.config.clone();
    let mut story = trace_header(life.seed, &mut config);
    let mut stage = Stage::new(config);
    for action in &life.actions {
        let at = stage.world.now.0;
        let performed =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stage.perform(action)));
        trace_action(&mut story, at, action, &mut stage);
        if !matches!(performed, Ok(Ok(()))) {
            break;
        }
    }
    story
}

fn trace_benign(seed: u64) -> String {
    let mut account = Account { story: Some(String::new()), ..Account::default() };
    // Its result is known.
    let _ = run_benign(seed, &mut account);
    account.story.unwrap_or_default()
}

/// Returns the header of a trace, and enables the scheduler's recording.
pub(super) fn trace_header(seed: u64, config: &mut Config) -> String {
    config.trace_max = 10_000;
    let settings = serde_json::to_string(config).expect("plain data");
    format!("seed {seed}\nconfiguration {settings}\n")
}

/// Appends an action and its effects.
pub(super) fn trace_action(story: &mut String, at: u64, action: &Action, stage: &mut Stage) {
    if !matches!(action, Action::Wait(_)) {
        writeln!(story, "{at:>9} us  {action}").expect("writing to a string");
    }
    if *action == Action::Plan {
        story.push_str(&describe(stage.world.last_plan()));
    }
    for transition in stage.world.scheduler.drain_trace() {
        writeln!(story, "  {transition}").expect("writing to a string");
    }
}
