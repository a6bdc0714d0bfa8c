//! What measurements, replays and tests have in common and no crate of theirs is the home of: numbers that look
//! random and follow from a seed, the middle of figures, and what the system tells of a process.
//!
//! It depends on nothing, so that everybody can depend on it; what only one crate needs does not belong here.
#![forbid(unsafe_code)]

mod dice;
mod median;
mod process;

pub use dice::{Dice, mixed};
pub use median::{median, middle_by};
pub use process::{Process, available_bytes};
