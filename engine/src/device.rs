//! The interface of a device: memory, and copies that run beside computation.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use terrace_l3::Arena;
use terrace_scheduler::{CopyDirection, DevicePage, HostPage, OpId};

use crate::call_off::CallOff;
use crate::layout::PageLayout;

/// Memory of two tiers and copies between them.
pub trait Device: Send + Sync + 'static {
    /// Device memory that models compute in.
    type Memory: Send + Sync + 'static;
    /// A point in the execution order of the device. Each step leaves one
    /// ([`StepTicket::fence`](crate::StepTicket::fence)). All work before the fence is done once it
    /// has passed.
    type Fence: Clone + Send + 'static;

    /// Returns the number of pages in device memory.
    fn pages(&self) -> u32;

    /// Returns the KV layout of a page.
    fn layout(&self) -> &PageLayout;

    /// Returns the device memory.
    fn memory(&self) -> &Self::Memory;

    /// Returns the host pages, in memory that the device can copy from and to; none without a host
    /// tier.
    fn host(&self) -> Option<&Arena>;

    /// Starts a copy and returns at once. The device calls [`CopyJob::done`] after it has released
    /// all pages of the copy.
    ///
    /// The copy touches device pages only behind the fence [`CopyJob::after`]. Copies of one
    /// direction do not wait for copies of the other. A load-back reports its progress
    /// ([`CopyProgress::arrive`]). A copy that is cancelled before it starts does not start
    /// ([`CopyProgress::is_called_off`]).
    fn start_copy(&self, job: CopyJob<Self::Fence>);

    /// Returns the reason why the device is lost, if it has failed permanently. The engine asks
    /// after a failed step or copy. If there is a reason, the engine ends instead of retrying.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Returns the longest time that a step may take; none if steps are unbounded. A device that
    /// hangs reports no failure, so the engine treats it as lost when a step takes longer.
    fn step_timeout(&self) -> Option<Duration> {
        None
    }
}

/// A copy of whole pages.
pub struct CopyJob<F> {
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Device pages; the n-th belongs to the n-th host page.
    pub device_pages: Vec<DevicePage>,
    /// The host pages.
    pub host_pages: Vec<HostPage>,
    /// Fence of the last step that may have used the device pages, if any.
    pub after: Option<F>,
    /// Progress of the copy, shared with the steps that wait for it.
    pub progress: CopyProgress,
    /// Called once, from any thread, with the result.
    pub done: Box<dyn FnOnce(Result<(), CopyError>) + Send>,
}

impl<F> std::fmt::Debug for CopyJob<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {} pages", self.direction, self.device_pages.len())
    }
}

/// A copy that did not complete. The content of its target pages is undefined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The copy was cancelled before it started.
    #[error("a copy between device and host was cancelled")]
    CalledOff,
    /// The copy failed.
    #[error("a copy between device and host failed: {0}")]
    Failed(String),
}

/// The points in the device's execution order at which the layers of a load-back arrive. The type
/// belongs to the device; models for that device know it.
pub type LayerMarks = Arc<dyn Any + Send + Sync>;

/// Progress of a copy, layer by layer. A model may start with the first layers of a load-back while
/// the others arrive. Clones share the state.
#[derive(Clone, Debug)]
pub struct CopyProgress(Arc<Progress>);

#[derive(Debug)]
struct Progress {
    op: OpId,
    call_off: CallOff,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of leading layers that have arrived in all pages.
    layers: usize,
    /// Points in the device's order at which layers arrive.
    marks: Option<LayerMarks>,
    /// Result, once the copy has ended.
    ended: Option<Result<(), CopyError>>,
}

impl CopyProgress {
    /// Creates the progress of a copy that has not started.
    #[must_use]
    pub fn new(op: OpId) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Progress { op, call_off: CallOff::default(), state, changed }))
    }

    /// Returns the id of the operation.
    #[must_use]
    pub fn op(&self) -> OpId {
        self.0.op
    }

    /// Records that the first `layers` layers of all pages have arrived. Called by the device.
    pub fn arrive(&self, layers: usize) {
        let mut state = self.0.state.lock();
        state.layers = state.layers.max(layers);
        self.0.changed.notify_all();
    }

    /// Returns the number of leading layers that have arrived.
    #[must_use]
    pub fn layers_arrived(&self) -> usize {
        match self.0.state.lock() {
            state if state.ended == Some(Ok(())) => usize::MAX,
            state => state.layers,
        }
    }

    /// Waits until a layer has arrived.
    ///
    /// # Errors
    /// Returns the error if the copy fails or is cancelled.
    pub fn wait_for(&self, layer: usize) -> Result<(), CopyError> {
        let mut state = self.0.state.lock();
        loop {
            if state.layers > layer {
                return Ok(());
            }
            if let Some(ended) = &state.ended {
                return ended.clone();
            }
            self.0.changed.wait(&mut state);
        }
    }

    /// Records that the copy has started, and the points in the device's order at which layers will
    /// arrive. A model whose steps run in the same order then need not wait on the host.
    pub fn mark(&self, marks: LayerMarks) {
        self.0.state.lock().marks = Some(marks);
        self.0.changed.notify_all();
    }

    /// Waits until the copy has started, and returns its marks; none if it has ended without. Only
    /// for devices that [set marks](CopyProgress::mark): with other devices it waits for the end.
    #[must_use]
    pub fn marks(&self) -> Option<LayerMarks> {
        let mut state = self.0.state.lock();
        while state.marks.is_none() && state.ended.is_none() {
            self.0.changed.wait(&mut state);
        }
        state.marks.clone()
    }

    /// Waits until the copy has ended.
    pub(crate) fn wait_for_end(&self) {
        let mut state = self.0.state.lock();
        while state.ended.is_none() {
            self.0.changed.wait(&mut state);
        }
    }

    /// Cancels the copy if it has not started. A copy that has started goes on, and its data is
    /// kept.
    pub fn call_off(&self) {
        self.0.call_off.call_off();
    }

    /// Returns whether the copy was cancelled.
    #[must_use]
    pub fn is_called_off(&self) -> bool {
        self.0.call_off.is_called_off()
    }

    /// Returns the cancellation flag of the copy.
    pub(crate) fn calls_off(&self) -> &CallOff {
        &self.0.call_off
    }

    /// Records the result of the copy.
    pub fn end(&self, result: Result<(), CopyError>) {
        self.0.state.lock().ended = Some(result);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_for_each_layer() {
        let progress = CopyProgress::new(OpId(1));
        progress.arrive(2);
        progress.arrive(1);
        assert_eq!(progress.layers_arrived(), 2, "what has arrived stays");
        assert_eq!((progress.wait_for(0), progress.wait_for(1)), (Ok(()), Ok(())));
        let waits = std::thread::spawn({
            let progress = progress.clone();
            move || progress.wait_for(2)
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished(), "the third has not arrived");
        progress.arrive(3);
        assert_eq!(waits.join().unwrap(), Ok(()));
    }

    #[test]
    fn waits_for_marks_until_the_copy_starts_or_ends() {
        let marked = CopyProgress::new(OpId(1));
        let waits = std::thread::spawn({
            let marked = marked.clone();
            move || marked.marks().and_then(|marks| marks.downcast::<u8>().ok())
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished(), "the copy has not begun");
        marked.mark(Arc::new(7_u8));
        assert_eq!(waits.join().unwrap().as_deref(), Some(&7));
        let never = CopyProgress::new(OpId(2));
        never.end(Err(CopyError::CalledOff));
        assert!(never.marks().is_none());
    }

    #[test]
    fn wait_for_a_layer_ends_with_the_copy() {
        let failed = Err(CopyError::Failed("no".to_owned()));
        for (end, expected) in [(Ok(()), Ok(())), (failed.clone(), failed)] {
            let progress = CopyProgress::new(OpId(1));
            progress.arrive(1);
            let waits = std::thread::spawn({
                let progress = progress.clone();
                move || (progress.wait_for(0), progress.wait_for(5))
            });
            progress.end(end);
            assert_eq!(waits.join().unwrap(), (Ok(()), expected), "a layer that came has come");
        }
    }
}
