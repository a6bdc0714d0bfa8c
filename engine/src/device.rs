//! What the engine asks of a device: memory, and copies that run while it computes.

use terrace_l3::Arena;
use terrace_scheduler::{CopyDirection, DevicePage, HostPage, StepId};

/// Memory of two tiers and copies between them.
pub trait Device: Send + Sync + 'static {
    /// The device's own memory, which models compute in.
    type Memory: Send + Sync + 'static;

    /// How many pages the device's own memory has.
    fn pages(&self) -> u32;

    /// The size of a page.
    fn page_bytes(&self) -> usize;

    /// The device's own memory.
    fn memory(&self) -> &Self::Memory;

    /// The host pages, in memory that the device can copy from and to; none without a host tier.
    fn host(&self) -> Option<&Arena>;

    /// Starts a copy and returns at once. The copy calls `done` when it has let go of all its pages.
    ///
    /// The copy reads device pages only after the step [`CopyJob::after`] has ended.
    fn start_copy(&self, job: CopyJob);

    /// Tells that a step has ended: what it wrote may be copied.
    fn step_ended(&self, step: StepId);
}

/// A copy of whole pages.
pub struct CopyJob {
    /// Which way.
    pub direction: CopyDirection,
    /// The pages of both tiers; the n-th belong together.
    pub device_pages: Vec<DevicePage>,
    /// The host pages.
    pub host_pages: Vec<HostPage>,
    /// The last step that may have written to the device pages, if any has run.
    pub after: Option<StepId>,
    /// Called once, from any thread: whether all bytes have been copied.
    pub done: Box<dyn FnOnce(Result<(), CopyError>) + Send>,
}

impl std::fmt::Debug for CopyJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {} pages", self.direction, self.device_pages.len())
    }
}

/// A copy that did not work; nothing of it is to be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a copy between device and host failed: {0}")]
pub struct CopyError(pub String);
