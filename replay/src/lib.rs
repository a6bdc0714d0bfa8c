//! Replays a trace of requests in virtual time: what would this traffic do on that configuration?
//!
//! Every worker is driven by the real scheduler; only what it decides about is a model: how long a
//! step takes ([`CostModel`]), what moves over links that have a bandwidth, and a store that all
//! workers share. There is no clock, no thread and no randomness but seeded dice in a replay, so the
//! same [`Trace`] and [`Config`] give the same [`Report`], to the byte. It must stay that way; only a
//! [`Sweep`] has threads, with a replay on each.
//!
//! Traces come from files, from [`trace::Synthetic`], or from a live scheduler that was watched
//! ([`TrafficRecorder`]); one that was watched closely can be done again call by call
//! ([`DecisionRecorder`], [`check_decisions`]).

#![forbid(unsafe_code)]

mod arrivals;
mod calibrate;
mod cluster;
mod config;
mod copies;
mod cost;
pub mod csv;
mod dice;
mod error;
mod fit;
mod happenings;
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
pub use machine::{Gpu, Model};
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
