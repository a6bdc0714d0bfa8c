//! By which way pieces of which size go: measured when a device is opened.

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

/// From which size on pieces go by the copy engines instead of the copy kernel; never with none.
///
/// The kernel moves pieces of any size at the speed of the link and keeps a few multiprocessors busy; copy engines keep
/// none, but are slow where pieces are small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyWays {
    /// Bytes of a piece from host to device.
    pub to_device_batch_from: Option<usize>,
    /// Bytes of a piece from device to host.
    pub to_host_batch_from: Option<usize>,
}

impl Default for CopyWays {
    /// What was found on PCIe 5, for devices too small to measure.
    fn default() -> Self {
        Self { to_device_batch_from: Some(1 << 20), to_host_batch_from: Some(1 << 20) }
    }
}

/// The sizes that are tried, as far as pages are as large. Below them the kernel is the faster by far.
const SIZES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// What is moved to measure: a good millisecond.
const SAMPLE_BYTES: usize = 64 << 20;
/// With less than this the beginning and end of a copy count too much.
const SAMPLE_BYTES_MIN: usize = 4 << 20;
/// Copy engines may take so many times as long: the kernel makes steps slower.
const SLOWER: f64 = 1.1;
/// The first is a warm-up.
const RUNS: usize = 3;

/// Tries both ways. Nobody uses the pages yet, so it does not matter what is in them.
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

/// Pieces of pages, in an order in which no two that follow each other are neighbours.
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

/// Where copies are tried.
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

    /// Whether copy engines move such pieces about as fast as the kernel does: they cost no multiprocessors.
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
            // SAFETY: the list is there, and it names pieces of pages that exist and that nobody uses.
            unsafe { driver.copy_by_kernel(stream, direction, list, part) }
        })?;
        let (mut to, mut from): (Vec<_>, Vec<_>) = pieces.iter().copied().unzip();
        let mut sizes = vec![bytes; pieces.len()];
        let by_batch = self.time(|driver, stream| {
            // SAFETY: as above.
            unsafe { driver.copy_by_batch(stream, &mut to, &mut from, &mut sizes) }
        });
        // Whoever has no batches, or is broken, says so when it matters.
        Ok(by_batch
            .is_ok_and(|by_batch| by_batch.as_secs_f64() <= by_kernel.as_secs_f64() * SLOWER))
    }

    /// The shortest time of a few.
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
