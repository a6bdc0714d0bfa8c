//! Device memory, as models see it.

#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use terrace_engine::{CopyProgress, PageLayout};
use terrace_scheduler::DevicePage;

use crate::driver::{CallError, DeviceAddress, Driver, Stream};
use crate::error::CudaError;
use crate::fence::{CudaFence, EventPool};

/// The KV pages of a device: one contiguous range of pages, each arranged by its
/// [layout](PageLayout). Clones share the memory.
#[derive(Clone)]
pub struct CudaMemory {
    base: DeviceAddress,
    /// Owner that keeps the memory alive.
    _owner: Arc<dyn Any + Send + Sync>,
    pages: u32,
    layout: PageLayout,
    events: EventPool,
}

impl CudaMemory {
    pub(crate) fn new(
        driver: &Arc<dyn Driver>,
        pages: u32,
        layout: PageLayout,
    ) -> Result<Self, CudaError> {
        let bytes = (pages as usize).checked_mul(layout.bytes()).filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or(CudaError::Config("a device needs at least one page"))?;
        let allocation = Allocation::new(driver, bytes)?;
        Ok(Self::at(driver, allocation.at, pages, layout, Arc::new(allocation)))
    }

    /// Creates pages in memory that `owner` keeps alive.
    pub(crate) fn at(
        driver: &Arc<dyn Driver>,
        base: DeviceAddress,
        pages: u32,
        layout: PageLayout,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { base, _owner: owner, pages, layout, events: EventPool::new(driver) }
    }

    /// Returns the address of the first page.
    #[must_use]
    pub fn base(&self) -> DeviceAddress {
        self.base
    }

    /// Returns the address of a page.
    ///
    /// # Panics
    /// Panics if the page does not exist.
    #[must_use]
    pub fn address(&self, page: DevicePage) -> DeviceAddress {
        assert!(page.slot() < self.pages, "the device has no {page:?}");
        self.base().offset(page.slot() as usize * self.page_bytes())
    }

    /// Returns the number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Returns the size of a page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// Returns the KV layout of a page.
    #[must_use]
    pub fn layout(&self) -> &PageLayout {
        &self.layout
    }

    /// Creates a fence for a step, to be [recorded](CudaFence::record) behind it.
    ///
    /// # Errors
    /// Fails if the device is lost.
    pub fn fence(&self) -> Result<CudaFence, CudaError> {
        Ok(self.events.fence()?)
    }

    /// Makes later work of the stream wait until a layer of a load-back has arrived. The host waits
    /// only while the copy is queued behind other copies and has not been submitted to the device.
    ///
    /// # Errors
    /// Fails if the copy has failed or was cancelled. A later failure is reported only by the end
    /// of the copy, and results that depend on it are discarded.
    pub fn wait_for_layer(
        &self,
        stream: Stream,
        progress: &CopyProgress,
        layer: usize,
    ) -> Result<(), CudaError> {
        if progress.layers_arrived() > layer {
            return Ok(());
        }
        let marks = progress.marks().and_then(|marks| marks.downcast::<LayerMarks>().ok());
        match marks {
            Some(marks) => marks.wait_on(stream, layer),
            None => Ok(progress.wait_for(layer)?),
        }
    }

    pub(crate) fn events(&self) -> &EventPool {
        &self.events
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { base, pages, .. } = self;
        write!(f, "CudaMemory of {pages} x {} bytes at {:#x}", self.page_bytes(), base.0)
    }
}

/// The points in a stream at which the layers of a load-back have arrived, by group.
#[derive(Debug)]
pub(crate) struct LayerMarks {
    /// Number of leading layers that have arrived behind each fence, in order; the last covers all
    /// layers.
    groups: Vec<(usize, CudaFence)>,
}

impl LayerMarks {
    pub(crate) fn new(groups: Vec<(usize, CudaFence)>) -> Self {
        Self { groups }
    }

    fn wait_on(&self, stream: Stream, layer: usize) -> Result<(), CudaError> {
        let group = self.groups.partition_point(|(layers, _)| *layers <= layer);
        let (_, fence) =
            self.groups.get(group).or(self.groups.last()).ok_or(CudaError::NeverRecorded)?;
        fence.wait_on(stream)
    }
}

/// An allocation of device memory, freed when dropped.
#[derive(Debug)]
pub(crate) struct Allocation {
    driver: Arc<dyn Driver>,
    at: DeviceAddress,
}

impl Allocation {
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, CallError> {
        Ok(Self { driver: driver.clone(), at: driver.allocate(bytes)? })
    }

    pub(crate) fn at(&self) -> DeviceAddress {
        self.at
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.driver.bind_thread().is_ok() {
            // SAFETY: the memory was allocated, and submitters of work on it keep it until that
            // work is done.
            unsafe { self.driver.free(self.at) };
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::driver::Priority;
    use crate::fake::FakeDriver;

    #[test]
    fn wait_for_a_layer_waits_for_its_group_only() {
        let fake = FakeDriver::new(1 << 20, 1);
        let driver: Arc<dyn Driver> = Arc::new(fake.clone());
        let (events, memory) = (EventPool::new(&driver), Allocation::new(&driver, 64).unwrap());
        let stream = || fake.create_stream(Priority::Low).unwrap();
        let (copies, held_up) = (stream(), fake.ban(0..1));
        let first = events.record(copies).unwrap();
        fake.gate(copies, held_up);
        let second = events.record(copies).unwrap();
        let marks = LayerMarks::new(vec![(2, first), (4, second)]);
        let readers: Vec<_> = (0..5)
            .map(|layer| {
                let (steps, seen) = (stream(), Arc::new(Mutex::new(Vec::new())));
                marks.wait_on(steps, layer).unwrap();
                fake.peek(steps, memory.at(), &seen);
                (steps, seen)
            })
            .collect();
        for (steps, _) in &readers[..2] {
            fake.drain(*steps).unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        let seen = || readers.iter().map(|(_, seen)| seen.lock().len()).collect::<Vec<_>>();
        assert_eq!(seen(), [1, 1, 0, 0, 0]);
        fake.lift(held_up);
        readers.iter().for_each(|(steps, _)| fake.drain(*steps).unwrap());
        assert_eq!(seen(), [1; 5]);
        assert!(
            LayerMarks::new(Vec::new()).wait_on(copies, 0).is_err(),
            "nothing will ever be there"
        );
    }
}
