//! The story of one seed, for people.

use std::fmt::Write;

use super::action::Action;
use super::simulation::{Fate, live};
use super::stage::Stage;
use crate::script::describe;

/// Everything that happens in the world of a seed, line by line.
///
/// # Panics
/// If a plan cannot be told, which does not happen.
#[must_use]
pub fn tell(seed: u64, steps: u64) -> String {
    let life = live(Fate::of(seed, steps));
    let mut config = life.swarm.config.clone();
    config.trace_max = 10_000;
    let settings = serde_json::to_string(&config).expect("plain data");
    let mut story = format!("seed {seed}\nconfiguration {settings}\n");
    let mut stage = Stage::new(config);
    for action in &life.actions {
        let at = stage.world.now.0;
        let performed =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stage.perform(action)));
        if !matches!(action, Action::Wait(_)) {
            writeln!(story, "{at:>9} us  {action}").expect("writing to a string");
        }
        if *action == Action::Plan {
            story.push_str(&describe(stage.world.last_plan()));
        }
        for transition in stage.world.scheduler.drain_trace() {
            writeln!(story, "  {transition}").expect("writing to a string");
        }
        if !matches!(performed, Ok(Ok(()))) {
            break;
        }
    }
    match life.violation {
        Some(violation) => writeln!(story, "VIOLATION: {violation}"),
        None => writeln!(story, "all is well after {} steps", life.steps),
    }
    .expect("writing to a string");
    story
}
