//! Why a replay cannot be done.

use terrace_scheduler::ConfigError;
use thiserror::Error;

/// Why a replay cannot be done, or why its result is not to be trusted.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The scheduler's configuration cannot work.
    #[error("scheduler.{0}")]
    Scheduler(#[from] ConfigError),
    /// Something else about the configuration cannot work.
    #[error("{setting} = {value}: {limits}")]
    Setting {
        /// The setting, as in the configuration.
        setting: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        limits: &'static str,
    },
    /// No such model or GPU is known.
    #[error("unknown {kind} {name:?}: use one of {known}, or give measurements")]
    UnknownPreset {
        /// Model or GPU.
        kind: &'static str,
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// Measurements that cannot be read or used.
    #[error("measurements, line {line}: {problem}")]
    Measurement {
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// Too few measurements for what is to be fitted.
    #[error("{given} measurements are too few: give at least {needed} of different steps")]
    TooFewMeasurements {
        /// How many there are.
        given: usize,
        /// How many it takes.
        needed: usize,
    },
    /// There is nothing to replay.
    #[error("the trace has no requests")]
    EmptyTrace,
    /// More was reused than the trace allows: the figures would be wrong.
    #[error(
        "{reused_tokens} prompt tokens were reused, but the trace allows only {ceiling_tokens}: \
         this is a bug in replay, please report it with trace and configuration"
    )]
    AboveCeiling {
        /// What was counted.
        reused_tokens: u64,
        /// What the trace allows.
        ceiling_tokens: u64,
    },
    /// Requests are left that nothing will ever wake.
    #[error(
        "{left} requests never ended: this is a bug in replay or in the scheduler, please report \
         it with trace and configuration"
    )]
    Stuck {
        /// How many.
        left: u64,
    },
    /// Whoever asked for it does not want it any more.
    #[error("the replay was stopped")]
    Stopped,
}
