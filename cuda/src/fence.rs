//! Points in the order of what the device does.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::driver::{CallError, Driver, Event, EventKind, Stream};
use crate::error::CudaError;

/// A point in a stream, which other streams and threads wait for. Clones are the same point.
///
/// One that was not recorded, because what was to come before it never came to the device, is waited for by nobody:
/// who tries is told ([`CudaError::NeverRecorded`]).
#[derive(Clone)]
pub struct CudaFence(Arc<Point>);

struct Point {
    pool: EventPool,
    event: Event,
    is_recorded: AtomicBool,
}

impl CudaFence {
    /// Makes it the point behind all that was handed to the stream.
    ///
    /// # Errors
    /// When the device is lost; the fence is then as one that was never recorded.
    pub fn record(&self, stream: Stream) -> Result<(), CudaError> {
        let recorded = self.driver().record(self.0.event, stream);
        self.0.is_recorded.store(recorded.is_ok(), Ordering::Release);
        Ok(recorded?)
    }

    /// What is handed to the stream from here on is done behind it. Nobody waits on the host.
    ///
    /// # Errors
    /// When it was never recorded, or the device is lost.
    pub fn wait_on(&self, stream: Stream) -> Result<(), CudaError> {
        self.check()?;
        Ok(self.driver().wait(stream, self.0.event)?)
    }

    /// The calling thread sleeps until everything before it has been done.
    ///
    /// # Errors
    /// When it was never recorded, or something before it failed.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.check()?;
        self.driver().bind_thread()?;
        Ok(self.driver().sleep_until(self.0.event)?)
    }

    /// Whether everything before it has been done.
    ///
    /// # Errors
    /// When it was never recorded, or something before it failed.
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

/// Events that are used again and again. Clones are the same pool.
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

    /// A fence that is still to be recorded.
    pub(crate) fn fence(&self) -> Result<CudaFence, CallError> {
        let spare = self.0.spare.lock().pop();
        let event = match spare {
            Some(event) => event,
            None => self.0.driver.create_event(EventKind::Order)?,
        };
        let is_recorded = AtomicBool::new(false);
        Ok(CudaFence(Arc::new(Point { pool: self.clone(), event, is_recorded })))
    }

    /// A fence behind all that was handed to the stream.
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
