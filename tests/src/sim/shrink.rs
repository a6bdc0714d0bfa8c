//! Minimisation of lists of actions that cause a violation.

use std::mem::Discriminant;
use std::panic::{AssertUnwindSafe, catch_unwind};

use terrace_scheduler::Config;

use super::action::Action;
use super::simulation::panic_message;
use super::stage::{Stage, Violation};

/// Performs a list of actions in a new world. Returns the violation, and the number of actions
/// performed.
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

/// Largest number of replays of a minimisation.
const REPLAYS_MAX: usize = 6_000;

/// Returns a shorter list of actions with the same kind of violation, if the list causes one.
/// Violations that occur only in the calm phase are not reproduced by a list, only by their seed.
#[must_use]
pub fn shrink(config: &Config, actions: &[Action]) -> Option<Vec<Action>> {
    let (violation, place) = replay_actions(config, actions)?;
    let mut shrinking = Shrinking {
        config,
        kind: std::mem::discriminant(&violation),
        shortest: actions[..=place].to_vec(),
        replays: 0,
    };
    // A pass may make further actions dispensable.
    loop {
        let length = shrinking.shortest.len();
        shrinking.pass();
        if shrinking.shortest.len() == length || shrinking.replays >= REPLAYS_MAX {
            return Some(shrinking.shortest);
        }
    }
}

struct Shrinking<'a> {
    config: &'a Config,
    kind: Discriminant<Violation>,
    shortest: Vec<Action>,
    replays: usize,
}

impl Shrinking<'_> {
    /// Tries to omit ever smaller parts.
    fn pass(&mut self) {
        let mut chunk = self.shortest.len().div_ceil(2);
        while chunk > 0 && self.replays < REPLAYS_MAX {
            let mut start = 0;
            while start < self.shortest.len() {
                let end = (start + chunk).min(self.shortest.len());
                let shorter = [&self.shortest[..start], &self.shortest[end..]].concat();
                if !self.accept(&shorter) {
                    start = end;
                }
            }
            chunk /= 2;
        }
    }

    /// Accepts the list if it causes the same violation.
    fn accept(&mut self, actions: &[Action]) -> bool {
        self.replays += 1;
        match replay_actions(self.config, actions) {
            Some((violation, place)) if std::mem::discriminant(&violation) == self.kind => {
                self.shortest = actions[..=place].to_vec();
                true
            }
            Some(_) | None => false,
        }
    }
}
