//! Workloads that measure Terrace. `terrace-bench` runs them and prints what they return; `cargo bench`
//! measures the [hot paths](hot_paths) alone.
//!
//! They measure time, so figures depend on the machine and on what else it does: only ratios within
//! one run travel.

mod cache;
mod features;
mod figures;
pub mod hot_paths;
mod l3;
mod lifetimes;
mod mooncake;
mod nodes;
mod scaling;
mod steps;
mod trace;

pub use cache::{CacheFigures, CacheWorkload, PerPage};
pub use features::{FeaturesFigures, FeaturesWorkload, Residency};
pub use figures::Distribution;
pub use l3::{L3Backend, L3Figures, L3Workload};
pub use lifetimes::{LifetimesFigures, LifetimesWorkload};
pub use mooncake::{MooncakeFigures, MooncakeOverhead, MooncakeWorkload};
pub use nodes::{Comparison, NodesFigures, NodesWorkload, TransferFigures};
pub use scaling::{
    Cost, FullPoolFigures, PageEnds, ScalingFigures, ScalingWorkload, StepCost, StepWork, Sweep,
};
pub use steps::{StepFigures, StepWorkload};
pub use trace::{Trace, TraceError};
