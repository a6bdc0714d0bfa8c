//! Small tools that benchmarks, replays and tests share: seeded random numbers, medians, and the memory and threads
//! of a process as Linux reports them.
//!
//! This crate has no dependencies, so that every crate can depend on it. Code that only one crate needs does not
//! belong here.
#![forbid(unsafe_code)]

mod dice;
mod median;
mod process;

pub use dice::{Dice, mixed};
pub use median::{median, middle_by};
pub use process::{Process, available_bytes};
