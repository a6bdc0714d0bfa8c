//! Benchmarks of Terrace. `terrace-bench` runs them and prints their results; `cargo bench` measures only
//! the [hot paths](hot_paths).
//!
//! They measure time, so the results depend on the machine and on its load. Only ratios within one run
//! can be compared between machines.

mod cache;
#[cfg(feature = "program")]
mod direct_file;
#[cfg(feature = "program")]
mod features;
mod figures;
#[cfg(feature = "program")]
mod gap;
pub mod hot_paths;
mod keys;
#[cfg(feature = "program")]
mod l3;
#[cfg(feature = "program")]
mod lifetimes;
#[cfg(feature = "program")]
mod mooncake;
#[cfg(feature = "program")]
mod nodes;
#[cfg(feature = "program")]
mod plans;
#[cfg(feature = "program")]
mod recovery;
mod scaling;
mod steps;
#[cfg(feature = "program")]
pub mod trace;

pub use cache::{CacheFigures, CacheWorkload, PerPage};
#[cfg(feature = "program")]
pub use features::{FeaturesFigures, FeaturesWorkload, Residency};
pub use figures::Distribution;
#[cfg(feature = "program")]
pub use gap::{GapFigures, GapWorkload};
pub use keys::{KeyCost, KeysFigures, KeysWorkload};
#[cfg(feature = "program")]
pub use l3::{L3Backend, L3Figures, L3Workload};
#[cfg(feature = "program")]
pub use lifetimes::{LifetimesFigures, LifetimesWorkload};
#[cfg(feature = "program")]
pub use mooncake::{MooncakeFigures, MooncakeWorkload};
#[cfg(feature = "program")]
pub use nodes::{Comparison, NodesFigures, NodesWorkload, TransferFigures};
#[cfg(feature = "program")]
pub use plans::{PlanCost, PlansFigures, PlansWorkload};
#[cfg(feature = "program")]
pub use recovery::{RecoveryFigures, RecoveryWorkload};
pub use scaling::{
    Cost, FullPoolFigures, PageEnds, ScalingFigures, ScalingWorkload, StepCost, StepWork, Sweep,
};
pub use steps::{AheadFigures, StepFigures, StepWorkload};
