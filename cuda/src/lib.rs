//! A CUDA device for the engine: KV pages in GPU memory, host pages in pinned memory, and copies between them that
//! run beside steps.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use terrace_cuda::{Context, CudaConfig, CudaDevice};
//! use terrace_engine::{Device, KvLayout, KvType};
//!
//! let context = Context::open(0)?;
//! let layout = KvLayout::keys_and_values(KvType::Bf16, 32, 8, 128).pages(16)?;
//! let config = CudaConfig { device_pages: 4096, host_pages: 16384, layout, canary: None, ways: None };
//! let device = CudaDevice::new(&context, config)?;
//! println!("{}: {} pages, {:?}", context.name(), device.pages(), device.ways());
//! # Ok(())
//! # }
//! ```
//!
//! The library of the driver is loaded when a [`Context`] is opened, and the compiler of kernels when a device is made:
//! a program that has this crate in it starts on machines without either, and [`CudaError`] says what is missing.
//!
//! # What a model does with it
//!
//! Everything that a model has the GPU do goes into streams of its own, made by [`Context::create_stream`] with
//! [`Priority::High`](driver::Priority::High): copies have low priority, which is what CUDA calls the default. A thread that
//! calls CUDA calls [`Context::bind`] first, once.
//!
//! - KV lies where [`CudaMemory::address`] says, or `base + page * page_bytes`, and in a page as its
//!   [layout](CudaMemory::layout) says.
//! - Behind each step it records a fence, which is what the step's ticket gives:
//!   `let fence = memory.fence()?; fence.record(stream)?;`. Copies wait for it on the device.
//! - Before a step reads a layer of what is still arriving, it calls
//!   [`memory.wait_for_layer(stream, progress, layer)`](CudaMemory::wait_for_layer) for each of the batch's
//!   [`arriving`](terrace_engine::Batch::arriving): what it hands to the stream after that comes when the layer is there, and
//!   no thread waits. Layers arrive in groups, so most of these calls add nothing to what the stream waits for already;
//!   calling it for every layer is cheap. When it fails, the step fails.
//!
//! # What happens to copies
//!
//! Each direction has a stream and a thread ([`CudaDevice`]). The thread takes copies in order, lends their host pages,
//! uploads the list of addresses, and hands the copy to the stream behind its fence, large ones in portions, so that the
//! next pages are prepared and the last ones given back while the device copies. Pieces below a measured size by a
//! kernel that reads and writes pinned memory itself, larger ones by the copy engines ([`CopyWays`]). Then it sleeps until
//! events of the stream are passed. A call that fails fails its copy and all that come after it, since nothing is known of
//! a device that has failed; no copy is left without an end.
//!
//! With a [`CanaryConfig`](canary::CanaryConfig) some of the pages are compared on both sides after they were copied.
//!
//! The crate never looks at what pages hold, and it decides nothing: which pages are copied, and when they may be used again,
//! is the scheduler's business.

pub mod canary;
mod context;
mod device;
pub mod driver;
mod error;
#[cfg(test)]
mod fake;
mod fence;
mod groups;
mod lane;
mod lists;
mod memory;
pub mod model;
pub mod nvrtc;
mod pinned;
mod portions;
mod real;
mod room;
mod stats;
mod transfer;
mod ways;

pub use context::{Context, wait_until_closed};
pub use device::{CudaConfig, CudaDevice};
pub use error::CudaError;
pub use fence::CudaFence;
pub use memory::CudaMemory;
pub use model::{CudaLlama, CudaTicket};
pub use pinned::Pinned;
pub use room::Room;
pub use stats::{CudaStats, LinkStats};
pub use ways::CopyWays;
