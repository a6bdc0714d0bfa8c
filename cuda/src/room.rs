//! Memory of both sides in which devices are created in succession: pinning it again for each would
//! take longer than most measurements.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace_engine::PageLayout;
use terrace_l3::Arena;

use crate::context::Context;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::memory::{Allocation, CudaMemory};
use crate::pinned::SeenArena;
use crate::real::RealDriver;

/// Pinned host memory and memory of a GPU, for [`CudaDevice::new_in`](crate::CudaDevice::new_in).
#[derive(Debug)]
pub struct Room {
    host: Arena,
    seen: SeenArena,
    device: Allocation,
    device_bytes: usize,
    is_taken: AtomicBool,
}

impl Room {
    /// Allocates memory of both sides. Pinning takes about half a second per GiB.
    ///
    /// # Errors
    /// Fails if memory of either side is short.
    pub fn new(
        context: &Arc<Context>,
        host_bytes: usize,
        device_bytes: usize,
    ) -> Result<Arc<Self>, CudaError> {
        Self::with_driver(&(Arc::new(RealDriver::new(context)?) as _), host_bytes, device_bytes)
    }

    pub(crate) fn with_driver(
        driver: &Arc<dyn Driver>,
        host_bytes: usize,
        device_bytes: usize,
    ) -> Result<Arc<Self>, CudaError> {
        driver.bind_thread()?;
        let device = Allocation::new(driver, device_bytes)?;
        let host = Arena::new(1, host_bytes).map_err(CudaError::HostMemory)?;
        let seen = SeenArena::pin(driver, &host)?;
        let is_taken = AtomicBool::new(false);
        Ok(Arc::new(Self { host, seen, device, device_bytes, is_taken }))
    }

    /// Returns the host memory for `pages` pages, including the headroom of stores.
    #[must_use]
    pub fn host_bytes(pages: u32, page_bytes: usize) -> usize {
        pages as usize * (page_bytes + Arena::headroom_bytes(page_bytes))
    }

    /// Takes pages of both sides; the room is free again when the last of them is dropped.
    pub(crate) fn take(
        self: &Arc<Self>,
        driver: &Arc<dyn Driver>,
        device_pages: u32,
        host_pages: u32,
        layout: PageLayout,
    ) -> Result<(CudaMemory, Arena, SeenArena), CudaError> {
        let page_bytes = layout.bytes();
        if device_pages as usize * page_bytes > self.device_bytes
            || Self::host_bytes(host_pages, page_bytes) > self.host.bytes()
            || device_pages.min(host_pages) == 0
        {
            return Err(CudaError::Config("the pages of a device must be some, and fit its room"));
        }
        if self.is_taken.swap(true, Ordering::Acquire) {
            return Err(CudaError::Config("the room of a device is another device's"));
        }
        let taken = Arc::new(Taken(self.clone()));
        let memory = CudaMemory::at(driver, self.device.at(), device_pages, layout, taken.clone());
        let (base, headroom) = (self.host.base(), Arena::headroom_bytes(page_bytes));
        // SAFETY: the room has that many bytes, and no other user before `taken` is dropped.
        let arena = unsafe {
            Arena::from_raw_with_headroom(base, host_pages, page_bytes, headroom, Box::new(taken))
        };
        Ok((memory, arena, self.seen))
    }
}

/// A room in use.
#[derive(Debug)]
struct Taken(Arc<Room>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.is_taken.store(false, Ordering::Release);
    }
}
