//! What a GPU tells of itself while it serves.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

/// A GPU's figures. Counters begin with the server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GpuFigures {
    /// What it is called.
    pub name: String,
    /// The memory that it has; 0 when it is lost.
    pub memory_bytes: u64,
    /// What of that is in use, by whomever.
    pub memory_used_bytes: u64,
    /// Copies from host to device.
    pub to_device: LinkFigures,
    /// Copies from device to host.
    pub to_host: LinkFigures,
}

/// What has gone over the link one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LinkFigures {
    /// Bytes of copies that were done.
    pub bytes: u64,
    /// How long copies were under way.
    pub busy_us: u64,
    /// Parts of copies that the copy kernel has done.
    pub by_kernel: u64,
    /// Parts of copies that copy engines have done.
    pub by_batch: u64,
    /// Copies that failed.
    pub failed: u64,
    /// Pages that were compared on both sides.
    pub pages_compared: u64,
    /// Pages that were not the same on both sides.
    pub pages_corrupt: u64,
}

/// Asks a GPU for its figures. Clones ask the same one.
#[derive(Clone)]
pub struct GpuWatch(Arc<dyn Fn() -> Option<GpuFigures> + Send + Sync>);

impl GpuWatch {
    /// With what asks it; it gets no answer once the GPU is used no more.
    pub fn new(ask: impl Fn() -> Option<GpuFigures> + Send + Sync + 'static) -> Self {
        Self(Arc::new(ask))
    }

    /// The figures of this moment; none once the GPU is used no more.
    #[must_use]
    pub fn figures(&self) -> Option<GpuFigures> {
        (self.0)()
    }
}

impl fmt::Debug for GpuWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuWatch").finish_non_exhaustive()
    }
}
