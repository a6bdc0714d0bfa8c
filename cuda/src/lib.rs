//! A CUDA device for the engine: KV pages in GPU memory, host pages in pinned memory, and copies
//! between them that run in parallel with steps.
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
//! The driver library is loaded when a [`Context`] is opened, and the kernel compiler when a device
//! is created. So a program with this crate starts on machines without either, and [`CudaError`]
//! says what is missing.
//!
//! # How a model uses the device
//!
//! A model submits all its GPU work to its own streams, created by [`Context::create_stream`] with
//! [`Priority::High`](driver::Priority::High). Copies have low priority, which is CUDA's default. A
//! thread that calls CUDA calls [`Context::bind`] first, once.
//!
//! - KV is at [`CudaMemory::address`], or `base + page * page_bytes`, arranged in a page as its
//!   [layout](CudaMemory::layout) says.
//! - After each step, the model records a fence, which the step's ticket returns: `let fence =
//!   memory.fence()?; fence.record(stream)?;`. Copies wait for it on the device.
//! - Before a step reads a layer of pages that are still arriving, the model calls
//!   [`memory.wait_for_layer(stream, progress, layer)`](CudaMemory::wait_for_layer) for each entry
//!   of the batch's [`arriving`](terrace_engine::Batch::arriving). Work that it submits to the
//!   stream after that runs when the layer has arrived, and no thread waits. Layers arrive in
//!   groups, so most of these calls add nothing to what the stream already waits for; calling it
//!   for every layer is cheap. If it fails, the step fails.
//!
//! # How copies run
//!
//! Each direction has a stream and a thread ([`CudaDevice`]). The thread takes copies in order,
//! borrows their host pages, uploads the list of addresses, and submits the copy to the stream
//! behind its fence. Large copies are submitted in portions, so that the next pages are prepared
//! and the last ones are released while the device copies. Pieces below a measured size are copied
//! by a kernel that accesses pinned memory directly, larger ones by the copy engines
//! ([`CopyWays`]). Then the thread sleeps until the events of the stream have passed. A failed call
//! fails its copy and all later ones, because the state of a failed device is unknown. Every copy
//! gets an end.
//!
//! With a [`CanaryConfig`](canary::CanaryConfig), some pages are verified on both sides after they
//! were copied.
//!
//! The crate does not read the content of pages and makes no decisions: the scheduler decides which
//! pages are copied and when they may be reused.

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
