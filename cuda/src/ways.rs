//! Copy method by piece size, measured when a device is opened.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use terrace_l3::Arena;
use terrace_scheduler::CopyDirection;

use crate::driver::{CallError, DeviceAddress, Driver, Part, Priority, Stream};
use crate::error::CudaError;
use crate::lists::{Lists, PAIR_BYTES};
use crate::memory::CudaMemory;
use crate::pinned::SeenArena;

/// The piece sizes from which the copy engines are used instead of the copy kernel; never if none.
///
/// The kernel moves pieces of any size at link speed and occupies a few multiprocessors. Copy
/// engines occupy none, but are slow for small pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyWays {
    /// Piece size from host to device, in bytes.
    pub to_device_batch_from: Option<usize>,
    /// Piece size from device to host, in bytes.
    pub to_host_batch_from: Option<usize>,
}

impl Default for CopyWays {
    /// Values measured on PCIe 5, for devices too small to measure.
    fn default() -> Self {
        Self { to_device_batch_from: Some(1 << 20), to_host_batch_from: Some(1 << 20) }
    }
}

/// Measured sizes, as far as pages are that large. Below them the kernel is much faster.
const SIZES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Bytes of a measurement: just over a millisecond.
const SAMPLE_BYTES: usize = 64 << 20;
/// Smallest measurement: below, the overhead of a copy dominates.
const SAMPLE_BYTES_MIN: usize = 4 << 20;
/// Ratio of times up to which copy engines are preferred, because the kernel slows steps down.
const SLOWER: f64 = 1.1;
/// Number of runs; the first is a warm-up.
const RUNS: usize = 3;

/// Measures both ways. The pages are unused, so their content does not matter.
pub(crate) fn measure(
    driver: &Arc<dyn Driver>,
    memory: &CudaMemory,
    arena: &Arena,
    seen: &SeenArena,
) -> Result<CopyWays, CudaError> {
    let page_bytes = memory.page_bytes();
    let pages = memory.pages().min(arena.pages());
    let sample = SAMPLE_BYTES.min(pages as usize * page_bytes);
    let sizes = SIZES.iter().copied().filter(|bytes| *bytes <= page_bytes);
    let sizes: Vec<usize> = sizes.collect();
    if sample < SAMPLE_BYTES_MIN || sizes.is_empty() {
        return Ok(CopyWays::default());
    }
    let host: Vec<DeviceAddress> = (0..pages)
        .map_while(|page| arena.source(page).ok())
        .map(|source| seen.address(source.start()))
        .collect();
    let mut bench = Bench::new(driver, sample / sizes[0])?;
    let mut batch_from = |direction| -> Result<Option<usize>, CudaError> {
        let mut from = None;
        // From the largest down, as long as the engines are as fast.
        for bytes in sizes.iter().rev() {
            let pieces = pieces(memory, &host, *bytes, sample / bytes, direction);
            if !bench.is_batch_as_fast(direction, &pieces, *bytes)? {
                break;
            }
            from = Some(*bytes);
        }
        Ok(from)
    };
    Ok(CopyWays {
        to_device_batch_from: batch_from(CopyDirection::LoadBack)?,
        to_host_batch_from: batch_from(CopyDirection::WriteBack)?,
    })
}

type Pair = (DeviceAddress, DeviceAddress);

/// Returns pieces of pages, in an order without adjacent neighbours.
fn pieces(
    memory: &CudaMemory,
    host: &[DeviceAddress],
    bytes: usize,
    count: usize,
    direction: CopyDirection,
) -> Vec<Pair> {
    let page_bytes = memory.page_bytes();
    let offsets = (0..page_bytes / bytes).map(|piece| piece * bytes);
    let all = offsets.flat_map(|offset| {
        host.iter().enumerate().map(move |(page, host)| {
            let device = memory.base().offset(page * page_bytes + offset);
            (device, host.offset(offset))
        })
    });
    let of = |(device, host)| match direction {
        CopyDirection::LoadBack => (device, host),
        CopyDirection::WriteBack => (host, device),
    };
    all.take(count).map(of).collect()
}

/// The state of a measurement.
struct Bench {
    driver: Arc<dyn Driver>,
    stream: Stream,
    lists: Lists,
}

impl Bench {
    fn new(driver: &Arc<dyn Driver>, places: usize) -> Result<Self, CudaError> {
        let lists = Lists::new(driver, places)?;
        let stream = driver.create_stream(Priority::Low)?;
        Ok(Self { driver: driver.clone(), stream, lists })
    }

    /// Returns whether copy engines move such pieces about as fast as the kernel.
    fn is_batch_as_fast(
        &mut self,
        direction: CopyDirection,
        pieces: &[Pair],
        bytes: usize,
    ) -> Result<bool, CudaError> {
        for (place, (to, from)) in pieces.iter().enumerate() {
            self.lists.write(place, *to, *from);
        }
        let (list, seen) = (self.lists.on_device(0..pieces.len()), self.lists.seen_at(0));
        // SAFETY: both are the memory of the lists, which live until the stream is drained.
        unsafe { self.driver.fetch(self.stream, list.at, seen, pieces.len() * PAIR_BYTES)? };
        let part = Part { offset: 0, bytes };
        let by_kernel = self.time(|driver, stream| {
            // SAFETY: the list has arrived, and it names pieces of pages that exist and are unused.
            unsafe { driver.copy_by_kernel(stream, direction, list, part) }
        })?;
        let (mut to, mut from): (Vec<_>, Vec<_>) = pieces.iter().copied().unzip();
        let mut sizes = vec![bytes; pieces.len()];
        let by_batch = self.time(|driver, stream| {
            // SAFETY: as above.
            unsafe { driver.copy_by_batch(stream, &mut to, &mut from, &mut sizes) }
        });
        // A driver without batches, or a broken device, fails here; later calls report the reason.
        Ok(by_batch
            .is_ok_and(|by_batch| by_batch.as_secs_f64() <= by_kernel.as_secs_f64() * SLOWER))
    }

    /// Returns the shortest of a few runs.
    fn time(
        &self,
        mut copy: impl FnMut(&dyn Driver, Stream) -> Result<(), CallError>,
    ) -> Result<Duration, CallError> {
        let driver = &*self.driver;
        let [begin, end] = driver.create_times()?;
        let mut run = || {
            driver.record(begin, self.stream)?;
            copy(driver, self.stream)?;
            driver.record(end, self.stream)?;
            driver.drain(self.stream)?;
            driver.elapsed(begin, end)
        };
        let times: Result<Vec<Duration>, CallError> = (0..RUNS).map(|_| run()).collect();
        let _ = driver.drain(self.stream);
        driver.destroy_event(begin);
        driver.destroy_event(end);
        Ok(times?.into_iter().skip(1).min().unwrap_or_default())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.driver.drain(self.stream);
        self.driver.destroy_stream(self.stream);
    }
}
