//! A CUDA device.
#![allow(dead_code)] // Until the device stands on it.
pub mod canary;
mod context;
pub mod driver;
mod error;
mod fence;
mod memory;
pub mod model;
pub mod nvrtc;
mod pinned;
mod real;
pub use context::Context;
pub use error::CudaError;
pub use fence::CudaFence;
pub use memory::CudaMemory;
pub use model::{CudaLlama, CudaTicket};
pub use pinned::Pinned;
