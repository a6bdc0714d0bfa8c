//! Simulates a request trace in virtual time: how would this traffic perform on that configuration?
//!
//! The real scheduler drives every worker. The rest is simulated: the duration of a step
//! ([`CostModel`]), links with a bandwidth, and a store that all workers share. A replay has no
//! clock, no threads and only seeded randomness, so the same [`Trace`] and [`Config`] give a
//! byte-identical [`Report`]. It must stay that way. Only a [`Sweep`] has threads, with one replay
//! on each.
//!
//! Traces come from files, from [`trace::Synthetic`], or from a live scheduler
//! ([`TrafficRecorder`]). A decision log of a live scheduler can be re-run call by call
//! ([`DecisionRecorder`], [`check_decisions`]).

#![forbid(unsafe_code)]

mod agenda;
mod arrivals;
mod calibrate;
pub mod chart;
mod cluster;
mod config;
mod copies;
mod cost;
pub mod csv;
mod draws;
mod error;
mod fit;
mod histogram;
pub mod html;
pub mod human;
mod links;
mod lru_pages;
mod machine;
mod options;
mod page_set;
mod prices;
mod rate;
mod record;
mod report;
mod router;
mod series;
mod size;
mod slo;
mod store;
pub mod sweep;
mod tally;
pub mod trace;
mod verdict;
mod worker;
mod world;

pub use calibrate::{Accuracy, Calibration, CheckedStep, StepKind};
pub use cluster::{Outage, WorkerGroup};
pub use config::{
    Arrival, Config, Copies, DEFAULT_GPU, DEFAULT_GPUS, DEFAULT_MODEL, LinkConfig, LinksConfig,
    RouterConfig, Routing, Sessions, StoreConfig, TIER_TOKENS_MAX, WORKERS_MAX, WarmUp,
};
pub use copies::CopyWay;
pub use cost::{CostModel, StepShape};
pub use error::ReplayError;
pub use fit::{Fit, Measurement};
pub use machine::{Gpu, ModelSpec};
pub use options::{OptionError, Options, Setting, page_size};
pub use prices::{Prices, Spend};
pub use rate::{RateSearch, TriedRate, find_rate};
pub use record::{
    Checked, DecisionError, DecisionRecorder, Difference, Refusal, TrafficRecorder, check_decisions,
};
pub use report::{
    BytesMoved, CurvePoint, Distribution, LinkName, LinkUse, Phase, Report, Reuse, ReuseTokens,
    Series, SlowRequest, Span, StoreUse, WorkerUse,
};
pub use size::Size;
pub use slo::{Goodput, Slo};
pub use sweep::{Axis, Confidence, Sweep, SweepError, SweepPoint};
pub use trace::{Ceiling, Trace, TraceError, TraceRequest};
pub use verdict::{Limit, Verdict};
pub use world::{replay, replay_unless};
