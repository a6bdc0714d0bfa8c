//! Errors of a replay.

use terrace_scheduler::ConfigError;
use thiserror::Error;

/// The reason for which a replay failed or its result is invalid.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The scheduler's configuration is invalid.
    #[error("scheduler.{0}")]
    Scheduler(#[from] ConfigError),
    /// Another setting is invalid.
    #[error("{setting} = {value}: {limits}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// Valid values.
        limits: &'static str,
    },
    /// The model or GPU is unknown.
    #[error("unknown {kind} {name:?}: use one of {known}, or give measurements")]
    UnknownPreset {
        /// "model" or "GPU".
        kind: &'static str,
        /// Requested name.
        name: String,
        /// Known names.
        known: String,
    },
    /// Measurements that cannot be read or used.
    #[error("measurements, line {line}: {problem}")]
    Measurement {
        /// Line, from 1.
        line: usize,
        /// Problem.
        problem: String,
    },
    /// There are too few measurements for a fit.
    #[error("{given} measurements are too few: give at least {needed} of different steps")]
    TooFewMeasurements {
        /// Number of measurements.
        given: usize,
        /// Required number.
        needed: usize,
    },
    /// The trace has no requests.
    #[error("the trace has no requests")]
    EmptyTrace,
    /// More tokens were reused than the trace allows, so the figures are wrong.
    #[error(
        "{reused_tokens} prompt tokens were reused, but the trace allows only {ceiling_tokens}: \
         this is a bug in replay, please report it with trace and configuration"
    )]
    AboveCeiling {
        /// Reused tokens.
        reused_tokens: u64,
        /// Ceiling of the trace.
        ceiling_tokens: u64,
    },
    /// Requests are left without a pending event.
    #[error(
        "{left} requests never ended: this is a bug in replay or in the scheduler, please report \
         it with trace and configuration"
    )]
    Stuck {
        /// Number of such requests.
        left: u64,
    },
    /// The caller stopped the replay.
    #[error("the replay was stopped")]
    Stopped,
}
