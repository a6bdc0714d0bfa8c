//! Points in the execution order of the device.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::driver::{CallError, Driver, Event, EventKind, Stream};
use crate::error::CudaError;

/// A point in a stream, for which other streams and threads wait. Clones share the point.
///
/// Waiting for a fence that was never recorded fails ([`CudaError::NeverRecorded`]): the work
/// before it never reached the device.
#[derive(Clone)]
pub struct CudaFence(Arc<Point>);

struct Point {
    pool: EventPool,
    event: Event,
    is_recorded: AtomicBool,
}

impl CudaFence {
    /// Records the fence behind all work submitted to the stream.
    ///
    /// # Errors
    /// Fails if the device is lost. The fence is then treated as never recorded.
    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        let recorded = self.driver().record(self.0.event, stream);
        self.0.is_recorded.store(recorded.is_ok(), Ordering::Release);
        Ok(recorded?)
    }

    /// Makes later work of the stream wait for the fence, without a wait on the host.
    ///
    /// # Errors
    /// Fails if the fence was never recorded or the device is lost.
    pub fn wait_on(&self, stream: Stream) -> Result<(), CudaError> {
        self.check()?;
        Ok(self.driver().wait(stream, self.0.event)?)
    }

    /// Blocks the calling thread until all work before the fence is done.
    ///
    /// # Errors
    /// Fails if the fence was never recorded or work before it failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.check()?;
        self.driver().bind_thread()?;
        Ok(self.driver().sleep_until(self.0.event)?)
    }

    /// Returns whether all work before the fence is done.
    ///
    /// # Errors
    /// Fails if the fence was never recorded or work before it failed.
    pub fn is_passed(&self) -> Result<bool, CudaError> {
        self.check()?;
        self.driver().bind_thread()?;
        Ok(self.driver().is_passed(self.0.event)?)
    }

    fn check(&self) -> Result<(), CudaError> {
        let is_recorded = self.0.is_recorded.load(Ordering::Acquire);
        if is_recorded { Ok(()) } else { Err(CudaError::NeverRecorded) }
    }

    fn driver(&self) -> &dyn Driver {
        &*self.0.pool.0.driver
    }
}

impl fmt::Debug for CudaFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaFence({:#x})", self.0.event.0)
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        self.pool.0.spare.lock().push(self.event);
    }
}

/// A pool of reusable events. Clones share the pool.
#[derive(Clone)]
pub(crate) struct EventPool(Arc<Pool>);

struct Pool {
    driver: Arc<dyn Driver>,
    spare: Mutex<Vec<Event>>,
}

impl EventPool {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Self {
        Self(Arc::new(Pool { driver: driver.clone(), spare: Mutex::default() }))
    }

    /// Returns a fence that is not recorded yet.
    pub(crate) fn fence(&self) -> Result<CudaFence, CallError> {
        let spare = self.0.spare.lock().pop();
        let event = match spare {
            Some(event) => event,
            None => self.0.driver.create_event(EventKind::Order)?,
        };
        let is_recorded = AtomicBool::new(false);
        Ok(CudaFence(Arc::new(Point { pool: self.clone(), event, is_recorded })))
    }

    /// Records a fence behind all work submitted to the stream.
    pub(crate) fn record(&self, stream: Stream) -> Result<CudaFence, CudaError> {
        let fence = self.fence()?;
        fence.record(stream)?;
        Ok(fence)
    }
}

impl fmt::Debug for EventPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventPool with {} to spare", self.0.spare.lock().len())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.driver.bind_thread().is_ok() {
            self.spare.get_mut().drain(..).for_each(|event| self.driver.destroy_event(event));
        }
    }
}
