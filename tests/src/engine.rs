//! Shared parts of the engine's tests: a model that detects every wrong page, and devices, models
//! and stores that fail at random.

use std::time::{Duration, Instant};

use terrace_engine::{Engine, Figures};

mod flaky;
mod toy;

pub use flaky::{Chance, FlakyDevice, FlakyModel, FlakyStore, LateDevice};
pub use toy::{PAGE_SIZE, ToyModel, toy_answer};

/// Waits until the engine's figures satisfy a condition, and returns them.
pub async fn figures_when(
    engine: &Engine,
    what: &str,
    holds: impl Fn(&Figures) -> bool,
) -> Figures {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let figures = engine.figures().await.expect("an engine that runs");
        if holds(&figures) {
            return figures;
        }
        assert!(Instant::now() < until, "{what} did not come about: {figures:#?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
