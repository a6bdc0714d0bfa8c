//! Host memory that the device can reach.

#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use terrace_l3::{Arena, Target};

use crate::driver::{DeviceAddress, Driver};
use crate::error::CudaError;

/// Memory that is pinned until this is dropped.
pub struct Pinned {
    driver: Arc<dyn Driver>,
    base: NonNull<u8>,
    bytes: usize,
    seen_at: DeviceAddress,
}

// SAFETY: the address is only a name here, by which the driver knows the memory.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Pins memory that somebody else owns.
    ///
    /// # Errors
    /// When so much cannot be pinned, or some of it is already.
    ///
    /// # Safety
    /// The bytes stay mapped until this is dropped, and whoever has the device touch them sees to it that this is not
    /// dropped before the device has ended.
    pub(crate) unsafe fn new(
        driver: &Arc<dyn Driver>,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        // SAFETY: as the caller says.
        let seen_at = unsafe { driver.pin(base, bytes) };
        let seen_at = seen_at.map_err(|source| CudaError::NotPinned { bytes, source })?;
        Ok(Self { driver: driver.clone(), base, bytes, seen_at })
    }

    /// Where the device sees the memory.
    #[must_use]
    pub fn seen_at(&self) -> DeviceAddress {
        self.seen_at
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pinned bytes at {:?}", self.bytes, self.base)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.driver.bind_thread().is_ok() {
            // SAFETY: it was pinned, and nothing is on its way, as whoever has pinned it promised.
            unsafe { self.driver.unpin(self.base) };
        }
    }
}

/// Where the device sees an arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenArena {
    base: usize,
    seen_at: DeviceAddress,
}

impl SeenArena {
    /// Pins all of an arena for as long as it lives.
    pub(crate) fn pin(driver: &Arc<dyn Driver>, arena: &Arena) -> Result<Self, CudaError> {
        let base = arena.base();
        // SAFETY: the arena drops what is attached to it before its memory goes, and not before the last loan of a page:
        // copies hold loans until the device has ended.
        let pinned = unsafe { Pinned::new(driver, base, arena.bytes())? };
        let seen = Self { base: base.addr().get(), seen_at: pinned.seen_at() };
        arena.attach(Box::new(pinned));
        Ok(seen)
    }

    /// Where the device sees what lies at an address of the arena.
    pub(crate) fn address(&self, at: *const u8) -> DeviceAddress {
        self.seen_at.offset(at.addr() - self.base)
    }
}

/// Pinned memory of our own.
#[derive(Debug)]
pub(crate) struct PinnedBytes {
    bytes: Target,
    seen: SeenArena,
}

impl PinnedBytes {
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, CudaError> {
        let arena = Arena::new(1, bytes).map_err(CudaError::HostMemory)?;
        let seen = SeenArena::pin(driver, &arena)?;
        let bytes = arena.target(0).expect("nobody else knows the arena");
        Ok(Self { bytes, seen })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Where the device sees the byte at an offset.
    pub(crate) fn address(&self, offset: usize) -> DeviceAddress {
        self.seen.address(self.bytes.start().wrapping_add(offset))
    }
}
