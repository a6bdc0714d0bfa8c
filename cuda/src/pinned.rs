//! Host memory that the device can access.

#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use terrace_l3::{Arena, Target};

use crate::driver::{DeviceAddress, Driver};
use crate::error::CudaError;

/// Bytes that are pinned in one call. Drivers from 580 on refuse 512 GiB in one call, and several
/// threads with a chunk each are faster than one.
const CHUNK_BYTES: usize = 1 << 30;
/// Number of pinning threads.
const PINNING_THREADS: usize = 16;
/// Alignment of chunks: the driver pins whole system pages, each once.
const SYSTEM_PAGE_BYTES: usize = 4096;

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
    /// Pins memory of another owner.
    ///
    /// # Errors
    /// Fails if the memory cannot be pinned, or part of it is already.
    ///
    /// # Safety
    /// The bytes must stay mapped until this is dropped, and this must not be dropped before the
    /// device has ended with them.
    pub(crate) unsafe fn new(
        driver: &Arc<dyn Driver>,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        // SAFETY: guaranteed by the caller.
        let seen_at = unsafe { driver.pin(base, bytes) };
        let seen_at = seen_at.map_err(|source| CudaError::NotPinned { bytes, source })?;
        Ok(Self { driver: driver.clone(), base, bytes, seen_at })
    }

    /// Returns the device address of the memory.
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
            // SAFETY: the memory is pinned, and no access is in flight, as the creator has
            // guaranteed.
            unsafe { self.driver.unpin(self.base) };
        }
    }
}

/// An arena as the device addresses it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenArena {
    base: usize,
    seen_at: DeviceAddress,
}

impl SeenArena {
    /// Pins an arena for its lifetime.
    pub(crate) fn pin(driver: &Arc<dyn Driver>, arena: &Arena) -> Result<Self, CudaError> {
        Self::pin_in_chunks(driver, arena, CHUNK_BYTES)
    }

    fn pin_in_chunks(
        driver: &Arc<dyn Driver>,
        arena: &Arena,
        chunk_bytes: usize,
    ) -> Result<Self, CudaError> {
        let bytes = arena.bytes();
        let chunks = chunks(bytes, bytes / arena.pages() as usize, chunk_bytes);
        let next = AtomicUsize::new(0);
        let pin_some = || -> Result<Vec<(usize, Pinned)>, CudaError> {
            driver.bind_thread()?;
            let mut pinned = Vec::new();
            while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                arena.populate(chunk.clone());
                // SAFETY: the chunk lies in the arena, which drops what is attached to it before its memory goes, and not
                // before the last loan of a page: copies hold loans until the device has ended.
                let new =
                    unsafe { Pinned::new(driver, arena.base().add(chunk.start), chunk.len()) };
                // After one failure the other threads stop.
                let new = new.inspect_err(|_| next.store(chunks.len(), Ordering::Relaxed));
                pinned.push((chunk.start, new?));
            }
            Ok(pinned)
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pinned: Result<Vec<_>, CudaError> = match chunks.len().min(cores).min(PINNING_THREADS) {
            ..=1 => pin_some(),
            threads => std::thread::scope(|scope| {
                let threads: Vec<_> = (0..threads).map(|_| scope.spawn(pin_some)).collect();
                let pinned = threads.into_iter().map(|thread| match thread.join() {
                    Ok(pinned) => pinned,
                    Err(panic) => std::panic::resume_unwind(panic),
                });
                Ok(pinned.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
            }),
        };
        let pinned = pinned.map_err(|error| match error {
            CudaError::NotPinned { source, .. } => CudaError::NotPinned { bytes, source },
            other => other,
        })?;
        let first = pinned.iter().find(|(start, _)| *start == 0);
        let seen_at = first.expect("an arena has a first chunk").1.seen_at();
        if pinned.iter().any(|(start, pinned)| pinned.seen_at() != seen_at.offset(*start)) {
            return Err(CudaError::Config(
                "the GPU sees pinned host memory in several places: use fewer host pages",
            ));
        }
        arena.attach(Box::new(pinned));
        Ok(Self { base: arena.base().addr().get(), seen_at })
    }

    /// Returns the device address of a byte of the arena.
    pub(crate) fn address(&self, at: *const u8) -> DeviceAddress {
        self.seen_at.offset(at.addr() - self.base)
    }
}

/// Divides memory into ranges that are pinned separately. A range ends at a page boundary, because
/// a copy must not cross ranges. It exceeds `bytes_max` only if one page does, or if KV pages and
/// system pages have few common boundaries.
fn chunks(bytes: usize, page_bytes: usize, bytes_max: usize) -> Vec<Range<usize>> {
    let common = page_bytes / gcd(page_bytes, SYSTEM_PAGE_BYTES);
    let unit = common.saturating_mul(SYSTEM_PAGE_BYTES);
    let chunk = (bytes_max / unit).max(1).saturating_mul(unit);
    (0..bytes).step_by(chunk).map(|start| start..bytes.min(start.saturating_add(chunk))).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Pinned memory with its allocation.
#[derive(Debug)]
pub(crate) struct PinnedBytes {
    bytes: Target,
    seen: SeenArena,
}

impl PinnedBytes {
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, CudaError> {
        let arena = Arena::new(1, bytes).map_err(CudaError::HostMemory)?;
        let seen = SeenArena::pin(driver, &arena)?;
        let bytes = arena.target(0).expect("the arena is not shared yet");
        Ok(Self { bytes, seen })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Returns the device address of the byte at an offset.
    pub(crate) fn address(&self, offset: usize) -> DeviceAddress {
        self.seen.address(self.bytes.start().wrapping_add(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeDriver;

    fn driver() -> (FakeDriver, Arc<dyn Driver>) {
        let fake = FakeDriver::new(1 << 20, 1);
        (fake.clone(), Arc::new(fake))
    }

    /// Drivers refuse to pin 512 GiB in one call.
    #[test]
    fn f72_large_pools_are_pinned_in_chunks_that_end_with_pages() {
        const PAGE_BYTES: usize = (2 << 20) + 4096;
        let bytes = (700 << 30) / PAGE_BYTES * PAGE_BYTES;
        let all = chunks(bytes, PAGE_BYTES, CHUNK_BYTES);
        assert!(all.iter().all(|chunk| chunk.len() <= CHUNK_BYTES));
        assert!(all.iter().all(|chunk| chunk.start % PAGE_BYTES == 0));
        assert_eq!((all[0].start, all.last().unwrap().end), (0, bytes));
        assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert_eq!(chunks(5000, 1000, 2000).len(), 1, "pages of the system are not split");
        assert_eq!(chunks(30, 10, 5).len(), 1);
        assert_eq!(
            chunks(3 << 13, 1 << 13, 4096),
            [0..1 << 13, 1 << 13..2 << 13, 2 << 13..3 << 13]
        );
    }

    #[test]
    fn pins_in_chunks_with_contiguous_device_addresses() {
        const CHUNK: usize = 40_000;
        let (fake, driver) = driver();
        let arena = Arena::with_headroom(50, 4096).unwrap();
        let seen = SeenArena::pin_in_chunks(&driver, &arena, CHUNK).unwrap();
        let pinned = fake.pinned();
        assert!(pinned.len() > 1 && pinned.iter().all(|bytes| *bytes <= CHUNK), "{pinned:?}");
        assert_eq!(pinned.iter().sum::<usize>(), arena.bytes());
        for page in [0, 7, 49] {
            let page = arena.source(page).unwrap();
            assert_eq!(fake.read(seen.address(page.start()), 4096), *page);
        }
        drop(arena);
        assert!(fake.pinned().is_empty(), "the memory is let go with the arena");
    }

    #[test]
    fn failed_pin_releases_pinned_chunks() {
        let (fake, driver) = driver();
        fake.limit_pinned(100_000);
        let arena = Arena::with_headroom(50, 4096).unwrap();
        let error = SeenArena::pin_in_chunks(&driver, &arena, 20_000).unwrap_err();
        assert!(matches!(error, CudaError::NotPinned { bytes, .. } if bytes == arena.bytes()));
        assert!(fake.pinned().is_empty());
    }
}
