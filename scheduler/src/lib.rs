//! The scheduler.

#![forbid(unsafe_code)]

mod admission;
mod audit;
mod config;
mod copies;
mod error;
mod event;
mod forward;
mod l3;
mod operations;
mod plan;
mod queue;
mod rates;
mod request;
mod requests;
mod scheduler;
mod stats;
mod store_health;

pub use config::{
    AdmissionOrder, BatchConfig, Config, ConfigBuilder, CopyConfig, L3Config, ModelConfig,
    PrefetchPolicy, QueueConfig, RateConfig,
};
pub use error::{ConfigError, EventError, SubmitError, UnknownRequest};
pub use event::{Event, Outcome, StepResult};
pub use plan::{
    Copy, CopyDirection, Decode, Ended, L3Kind, L3Op, Plan, Prefill, RowChange, StepId,
};
pub use request::Request;
pub use scheduler::{Cached, Scheduler};
pub use stats::{OperationStats, Stats};
pub use terrace_cache::{
    CacheConfig, CacheUse, DevicePage, EvictionKind, HostPage, KvEvent, Namespace, PageKey,
    TierName, TierUse, Token, WritePolicy,
};
pub use terrace_fsm::{FailReason, OpId, RequestId, Slot, StateName, Time, Transition, replay};
