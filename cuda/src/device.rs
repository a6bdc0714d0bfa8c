//! The device: KV pages in GPU memory, host pages in pinned memory, and a lane of copies each way.

#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use terrace_engine::{CopyJob, Device, PageLayout};
use terrace_l3::Arena;
use terrace_scheduler::CopyDirection;

use crate::canary::{CanaryConfig, Sampler};
use crate::context::Context;
use crate::driver::{CallError, CallErrorKind, DeviceMemory, Driver, Priority};
use crate::error::CudaError;
use crate::fence::CudaFence;
use crate::lane::{Broken, Lane};
use crate::lists::Lists;
use crate::memory::CudaMemory;
use crate::pinned::{Pinned, SeenArena};
use crate::real::RealDriver;
use crate::room::Room;
use crate::stats::{CudaStats, LinkCounts};
use crate::transfer::{BatchLists, Copier, Ends};
use crate::ways::{CopyWays, measure};

/// Longest time of a step. Large chunks behind long prompts take seconds.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// Configuration of a device.
#[derive(Clone, Debug)]
pub struct CudaConfig {
    /// KV pages in GPU memory.
    pub device_pages: u32,
    /// KV pages in pinned host memory; 0 for a device without a host tier. They are allocated at
    /// once.
    pub host_pages: u32,
    /// KV layout of a page, on both sides.
    pub layout: PageLayout,
    /// Verification of copies, if any.
    pub canary: Option<CanaryConfig>,
    /// Copy method by piece size; measured if it is not given.
    pub ways: Option<CopyWays>,
}

/// A GPU as a [`Device`].
#[derive(Debug)]
pub struct CudaDevice {
    // Dropped first: they wait for copies, which use all other fields.
    to_device: Lane,
    to_host: Lane,
    ends: Ends,
    ways: CopyWays,
    counts: [Arc<LinkCounts>; 2],
    broken: Broken,
    driver: Arc<dyn Driver>,
}

impl CudaDevice {
    /// Creates a device on an open GPU. Several threads pin the host pages, which takes up to half
    /// a second per GiB and thread.
    ///
    /// # Errors
    /// Fails if memory of either side is short or a kernel does not compile.
    pub fn new(context: &Arc<Context>, config: CudaConfig) -> Result<Self, CudaError> {
        Self::with_driver(Arc::new(RealDriver::new(context)?), config, None)
    }

    /// Creates a device in existing memory, for programs that create many devices in succession.
    ///
    /// # Errors
    /// Fails if the pages do not fit the room, another device uses the room, or a kernel does not
    /// compile.
    pub fn new_in(
        context: &Arc<Context>,
        config: CudaConfig,
        room: &Arc<Room>,
    ) -> Result<Self, CudaError> {
        Self::with_driver(Arc::new(RealDriver::new(context)?), config, Some(room))
    }

    pub(crate) fn with_driver(
        driver: Arc<dyn Driver>,
        config: CudaConfig,
        room: Option<&Arc<Room>>,
    ) -> Result<Self, CudaError> {
        driver.bind_thread()?;
        let (pages, page_bytes) = (config.device_pages, config.layout.bytes());
        Self::set_up(driver.clone(), config, room).map_err(|error| match error {
            CudaError::Call(CallError { kind: CallErrorKind::OutOfMemory, .. }) => {
                let DeviceMemory { free, total } = driver.memory().unwrap_or_default();
                CudaError::OutOfDeviceMemory { pages, page_bytes, free, total }
            }
            other => other,
        })
    }

    fn set_up(
        driver: Arc<dyn Driver>,
        config: CudaConfig,
        room: Option<&Arc<Room>>,
    ) -> Result<Self, CudaError> {
        let CudaConfig { device_pages, host_pages, layout, canary, ways } = config;
        let page_bytes = layout.bytes();
        let (memory, host) = match (room, host_pages) {
            (Some(room), _) => {
                let (memory, arena, seen) = room.take(&driver, device_pages, host_pages, layout)?;
                (memory, Some((arena, seen)))
            }
            (None, 0) => (CudaMemory::new(&driver, device_pages, layout)?, None),
            (None, _) => {
                let memory = CudaMemory::new(&driver, device_pages, layout)?;
                let arena = Arena::with_headroom_in_huge_pages(host_pages, page_bytes);
                let arena = arena.map_err(CudaError::HostMemory)?;
                let seen = SeenArena::pin(&driver, &arena)?;
                (memory, Some((arena, seen)))
            }
        };
        let ways = match (ways, &host) {
            (Some(ways), _) => ways,
            (None, Some((arena, seen))) => measure(&driver, &memory, arena, seen)?,
            (None, None) => CopyWays::default(),
        };
        let ends = Ends { memory, host };
        let (broken, counts) = (Arc::new(OnceLock::new()), <[Arc<LinkCounts>; 2]>::default());
        let lane = |direction, batch_from, counts: &Arc<LinkCounts>| {
            let pages = device_pages.min(host_pages) as usize;
            let sampler = canary.map(Sampler::new);
            let samples = sampler.as_ref().map_or(0, |sampler| sampler.samples_max(pages));
            // Room for two copies of all pages, since one may not fit into the rest before the end
            // of the ring.
            let lists = Lists::new(&driver, 2 * Copier::places(pages, samples))?;
            let stream = driver.create_stream(Priority::Low)?;
            let list_stream = driver.create_stream(Priority::Low);
            let copier = Copier {
                driver: driver.clone(),
                stream,
                list_stream: list_stream.inspect_err(|_| driver.destroy_stream(stream))?,
                events: ends.memory.events().clone(),
                ends: ends.clone(),
                lists,
                direction,
                batch_from,
                counts: counts.clone(),
                batch: BatchLists::default(),
            };
            Lane::spawn(copier, sampler, Broken::clone(&broken))
        };
        let to_device = lane(CopyDirection::LoadBack, ways.to_device_batch_from, &counts[0])?;
        let to_host = lane(CopyDirection::WriteBack, ways.to_host_batch_from, &counts[1])?;
        Ok(Self { to_device, to_host, ends, ways, counts, broken, driver })
    }

    /// Returns the copy method by piece size.
    #[must_use]
    pub fn ways(&self) -> CopyWays {
        self.ways
    }

    /// Returns statistics. Reads counters and asks the driver for the memory in use.
    #[must_use]
    pub fn stats(&self) -> CudaStats {
        let memory = self.driver.bind_thread().and_then(|()| self.driver.memory());
        let [to_device, to_host] = [0, 1].map(|lane: usize| self.counts[lane].snapshot());
        CudaStats { to_device, to_host, memory: memory.unwrap_or_default() }
    }

    /// Pins memory of another owner until the returned value is dropped, so that kernels and copies
    /// of other streams can access it.
    ///
    /// # Errors
    /// Fails if the memory cannot be pinned, or part of it is already.
    ///
    /// # Safety
    /// The bytes must stay mapped as long as the returned value lives. It must live until the
    /// device no longer accesses them.
    pub unsafe fn pin(&self, base: NonNull<u8>, bytes: usize) -> Result<Pinned, CudaError> {
        self.driver.bind_thread()?;
        // SAFETY: as the caller says.
        unsafe { Pinned::new(&self.driver, base, bytes) }
    }

    /// Corrupts a compared page of the next copy of a direction, if the copy has one. For tests of
    /// canaries.
    pub fn corrupt_next_copy(&self, direction: CopyDirection) {
        self.lane(direction).corrupt_next();
    }

    fn lane(&self, direction: CopyDirection) -> &Lane {
        match direction {
            CopyDirection::LoadBack => &self.to_device,
            CopyDirection::WriteBack => &self.to_host,
        }
    }
}

impl Device for CudaDevice {
    type Memory = CudaMemory;
    type Fence = CudaFence;

    fn pages(&self) -> u32 {
        self.ends.memory.pages()
    }

    fn layout(&self) -> &PageLayout {
        self.ends.memory.layout()
    }

    fn memory(&self) -> &CudaMemory {
        &self.ends.memory
    }

    fn host(&self) -> Option<&Arena> {
        self.ends.host.as_ref().map(|(arena, _)| arena)
    }

    fn start_copy(&self, job: CopyJob<CudaFence>) {
        self.lane(job.direction).start(job);
    }

    fn failure(&self) -> Option<String> {
        if let Some(reason) = self.broken.get() {
            return Some(reason.clone());
        }
        let checked = self.driver.bind_thread().and_then(|()| self.driver.check());
        checked.err().map(|error| error.to_string())
    }

    fn step_timeout(&self) -> Option<Duration> {
        Some(STEP_TIMEOUT)
    }
}

#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod portion_tests;
#[cfg(test)]
mod tests;
