//! Drives a scheduler.

mod batch;
mod cpu;
mod device;
mod model;

pub use batch::{Batch, PageTable, Span};
pub use cpu::{CpuDevice, CpuMemory, StepPages};
pub use device::{CopyError, CopyJob, Device};
pub use model::{KvShape, Model, ModelError};
