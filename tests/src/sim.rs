//! The simulator: random worlds with load and faults, in which every byte that an engine reads is
//! checked.

mod action;
mod decode;
mod faults;
mod pressure;
mod regression;
mod router;
mod shrink;
mod simulation;
mod stage;
mod story;
mod swarm;
mod useful;

pub use action::{Action, Opening};
pub use decode::decode;
pub use faults::{FaultCounts, FaultKind};
pub use regression::{read_story, write_story};
pub use shrink::{replay_actions, shrink};
pub use simulation::{RunOptions, RunResult, panic_message, run_world};
pub use stage::{Stage, Violation};
pub use story::trace_seed;
pub use swarm::{Load, Swarm};
