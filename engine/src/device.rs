//! What the engine asks of a device: memory, and copies that run while it computes.

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
    /// The device's own memory, which models compute in.
    type Memory: Send + Sync + 'static;
    /// A point in the order of what the device does, which steps leave behind
    /// ([`StepTicket::fence`](crate::StepTicket::fence)): everything before it has been done when it is
    /// passed.
    type Fence: Clone + Send + 'static;

    /// How many pages the device's own memory has.
    fn pages(&self) -> u32;

    /// How KV lies in a page.
    fn layout(&self) -> &PageLayout;

    /// The device's own memory.
    fn memory(&self) -> &Self::Memory;

    /// The host pages, in memory that the device can copy from and to; none without a host tier.
    fn host(&self) -> Option<&Arena>;

    /// Starts a copy and returns at once. The copy calls `done` when it has let go of all its pages.
    ///
    /// The copy touches device pages only behind the fence [`CopyJob::after`]. Copies of one direction do
    /// not wait for those of the other. A load-back says how far it has come ([`CopyProgress::arrive`]),
    /// and a copy that was called off before it has begun does not begin
    /// ([`CopyProgress::is_called_off`]).
    fn start_copy(&self, job: CopyJob<Self::Fence>);

    /// The reason why the device can do nothing more, once it has failed for good. The engine asks after a step or a
    /// copy has failed, and ends if there is a reason: it does not retry on a device that is lost.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Longest time that a step may take; none where steps have no bound. A device that hangs reports no failure: the
    /// engine takes it for lost, and ends, when a step takes longer.
    fn step_timeout(&self) -> Option<Duration> {
        None
    }
}

/// A copy of whole pages.
pub struct CopyJob<F> {
    /// Which way.
    pub direction: CopyDirection,
    /// The pages of both tiers; the n-th belong together.
    pub device_pages: Vec<DevicePage>,
    /// The host pages.
    pub host_pages: Vec<HostPage>,
    /// Behind the last step that may have used the device pages, if any has.
    pub after: Option<F>,
    /// How far it has come, for those who wait for some of it.
    pub progress: CopyProgress,
    /// Called once, from any thread: whether all bytes have been copied.
    pub done: Box<dyn FnOnce(Result<(), CopyError>) + Send>,
}

impl<F> std::fmt::Debug for CopyJob<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {} pages", self.direction, self.device_pages.len())
    }
}

/// A copy that did not work; nothing of it is to be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// It did not begin, because nobody waits for it any more.
    #[error("a copy between device and host was cancelled")]
    CalledOff,
    /// It failed.
    #[error("a copy between device and host failed: {0}")]
    Failed(String),
}

/// Where, in the order of what a device does, the layers of a load-back have arrived: in the words of that device, which
/// models for it know.
pub type LayerMarks = Arc<dyn Any + Send + Sync>;

/// How far a copy has come, layer by layer: a model may begin with the first layers of what is loaded while
/// the others arrive. Clones are of the same copy.
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
    /// The first so many layers of all pages are there.
    layers: usize,
    /// Where on the device they will be.
    marks: Option<LayerMarks>,
    /// What came of it, once it has ended.
    ended: Option<Result<(), CopyError>>,
}

impl CopyProgress {
    /// Of a copy that has not begun.
    #[must_use]
    pub fn new(op: OpId) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Progress { op, call_off: CallOff::default(), state, changed }))
    }

    /// The operation.
    #[must_use]
    pub fn op(&self) -> OpId {
        self.0.op
    }

    /// The device says that the first `layers` layers of all pages have arrived.
    pub fn arrive(&self, layers: usize) {
        let mut state = self.0.state.lock();
        state.layers = state.layers.max(layers);
        self.0.changed.notify_all();
    }

    /// How many of the first layers have arrived.
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
    /// When it does not: the copy has failed or was called off.
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

    /// The device has begun with the copy, and says where in its own order layers will have arrived: a model
    /// whose steps are ordered there has no need to wait for them on the host.
    pub fn mark(&self, marks: LayerMarks) {
        self.0.state.lock().marks = Some(marks);
        self.0.changed.notify_all();
    }

    /// Waits until the device has begun with the copy, and returns its marks; none if it has ended without. Only for
    /// devices that [give marks](CopyProgress::mark): with others it waits for the end.
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

    /// Nobody waits for the copy any more. One that has begun goes on: what it brings is kept.
    pub fn call_off(&self) {
        self.0.call_off.call_off();
    }

    /// Whether nobody waits for the copy any more.
    #[must_use]
    pub fn is_called_off(&self) -> bool {
        self.0.call_off.is_called_off()
    }

    /// What calls this copy off.
    pub(crate) fn calls_off(&self) -> &CallOff {
        &self.0.call_off
    }

    /// The copy has ended.
    pub fn end(&self, result: Result<(), CopyError>) {
        self.0.state.lock().ended = Some(result);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_waited_for_one_by_one() {
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
    fn marks_are_waited_for_until_there_are_any_or_never_will_be() {
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
    fn whoever_waits_for_a_layer_hears_of_the_end() {
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
