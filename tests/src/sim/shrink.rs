//! Shrinking: from a story that ends badly to a short one that does too.

use std::panic::{AssertUnwindSafe, catch_unwind};

use terrace_scheduler::Config;

use super::action::Action;
use super::simulation::panic_message;
use super::stage::{Stage, Violation};

/// Performs a list of actions in a new world; tells what went wrong, and how far it got.
#[must_use]
pub fn replay_actions(config: &Config, actions: &[Action]) -> Option<(Violation, usize)> {
    let mut stage = Stage::new(config.clone());
    for (place, action) in actions.iter().enumerate() {
        match catch_unwind(AssertUnwindSafe(|| stage.perform(action))) {
            Ok(Ok(())) => {}
            Ok(Err(violation)) => return Some((violation, place)),
            Err(panic) => return Some((Violation::Panic(panic_message(panic.as_ref())), place)),
        }
    }
    None
}

/// A shorter list of actions that ends in the same kind of violation, if the list ends in one at
/// all. (Those that show only when the world calms down do not: their seed tells them.)
#[must_use]
pub fn shrink(config: &Config, actions: &[Action]) -> Option<Vec<Action>> {
    let (violation, place) = replay_actions(config, actions)?;
    let kind = std::mem::discriminant(&violation);
    let mut shortest = actions[..=place].to_vec();
    let mut chunk = shortest.len().div_ceil(2);
    while chunk > 0 {
        let mut start = 0;
        while start < shortest.len() {
            let end = (start + chunk).min(shortest.len());
            let shorter = [&shortest[..start], &shortest[end..]].concat();
            match replay_actions(config, &shorter) {
                Some((violation, place)) if std::mem::discriminant(&violation) == kind => {
                    shortest = shorter[..=place].to_vec();
                }
                Some(_) | None => start = end,
            }
        }
        chunk /= 2;
    }
    Some(shortest)
}
