//! What tests of the engine share: a model that notices every wrong page, and devices, models and
//! stores that fail at random.

mod flaky;
mod toy;

pub use flaky::{Chance, FlakyDevice, FlakyModel, FlakyStore};
pub use toy::{PAGE_SIZE, ToyModel, toy_answer};
