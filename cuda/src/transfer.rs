//! One copy, from the pages that are lent for it to the work that is handed to the device.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use terrace_engine::{CopyError, CopyJob};
use terrace_l3::{Arena, Source, Target};
use terrace_scheduler::CopyDirection;

use crate::canary::checksum;
use crate::driver::{DeviceAddress, Driver, Event, Part, Stream};
use crate::error::CudaError;
use crate::fence::{CudaFence, EventPool};
use crate::groups::Group;
use crate::lists::{Lists, PAIR_BYTES};
use crate::memory::CudaMemory;
use crate::pinned::SeenArena;
use crate::stats::LinkCounts;

/// What a planted corruption writes over the beginning of a page.
const CORRUPTION: [u64; 2] = [0x6b8b_4567_327b_23c6, 0x643c_9869_6633_4873];

/// Both sides of the copies of a lane.
#[derive(Clone, Debug)]
pub(crate) struct Ends {
    pub(crate) memory: CudaMemory,
    pub(crate) host: Option<(Arena, SeenArena)>,
}

/// The pages of a copy: nobody else touches them until it is dropped, which is after the device has ended with them.
#[derive(Debug)]
pub(crate) struct LentPages {
    /// Where pages go and where they come from.
    pub(crate) pairs: Vec<(DeviceAddress, DeviceAddress)>,
    pub(crate) pages: HostPagesLent,
}

/// Host pages on loan, by direction.
#[derive(Debug)]
pub(crate) enum HostPagesLent {
    Read(Vec<Source>),
    Written(Vec<Target>),
}

impl HostPagesLent {
    /// The bytes of the n-th page. The device must have ended with it.
    pub(crate) fn bytes(&self, n: usize) -> &[u8] {
        match self {
            Self::Read(sources) => &sources[n],
            Self::Written(targets) => &targets[n],
        }
    }
}

impl Ends {
    /// Takes the pages of a copy.
    pub(crate) fn lend(&self, job: &CopyJob<CudaFence>) -> Result<LentPages, CopyError> {
        let failed = |why: String| CopyError::Failed(why);
        let (arena, seen) =
            self.host.as_ref().ok_or_else(|| failed("there is no host tier".to_owned()))?;
        if job.device_pages.len() != job.host_pages.len() {
            return Err(failed("there are not as many device pages as host pages".to_owned()));
        }
        let on_device = job.device_pages.iter().map(|page| {
            let is_there = page.slot() < self.memory.pages();
            is_there
                .then(|| self.memory.address(*page))
                .ok_or_else(|| failed(format!("the device has no {page:?}")))
        });
        let on_device: Vec<DeviceAddress> = on_device.collect::<Result<_, _>>()?;
        let slots = job.host_pages.iter().map(|page| page.slot());
        if let Some(slot) = slots.clone().find(|slot| *slot >= arena.pages()) {
            return Err(failed(format!("the host has no page {slot}")));
        }
        let in_use = |lent: terrace_l3::Lent| failed(lent.to_string());
        Ok(match job.direction {
            CopyDirection::LoadBack => {
                let sources = slots.map(|slot| arena.source(slot));
                let sources: Vec<Source> = sources.collect::<Result<_, _>>().map_err(in_use)?;
                let from = sources.iter().map(|source| seen.address(source.start()));
                let pairs = on_device.into_iter().zip(from).collect();
                LentPages { pairs, pages: HostPagesLent::Read(sources) }
            }
            CopyDirection::WriteBack => {
                let targets = slots.map(|slot| arena.target(slot));
                let targets: Vec<Target> = targets.collect::<Result<_, _>>().map_err(in_use)?;
                let to = targets.iter().map(|target| seen.address(target.start()));
                let pairs = to.zip(on_device).collect();
                LentPages { pairs, pages: HostPagesLent::Written(targets) }
            }
        })
    }
}

/// Hands copies to a stream of their own.
#[derive(Debug)]
pub(crate) struct Copier {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) stream: Stream,
    pub(crate) events: EventPool,
    pub(crate) lists: Lists,
    pub(crate) direction: CopyDirection,
    pub(crate) page_bytes: usize,
    /// Pieces of so many bytes and more go by the copy engines.
    pub(crate) batch_from: Option<usize>,
    pub(crate) counts: Arc<LinkCounts>,
    pub(crate) batch: BatchLists,
}

/// Lists for the copy engines, kept for the next batch.
#[derive(Debug, Default)]
pub(crate) struct BatchLists {
    to: Vec<DeviceAddress>,
    from: Vec<DeviceAddress>,
    bytes: Vec<usize>,
}

/// A copy that is to be handed over.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    pub(crate) pages: &'a LentPages,
    pub(crate) groups: Vec<Group>,
    pub(crate) after: Option<&'a CudaFence>,
    /// Events that tell when it began and ended.
    pub(crate) times: [Event; 2],
    /// Which of its pages are compared.
    pub(crate) samples: Vec<usize>,
    /// Its room in the lists.
    pub(crate) places: Range<usize>,
    /// Whether it is damaged on its way, for tests of canaries.
    pub(crate) is_corrupted: bool,
}

/// A copy in a stream.
#[derive(Debug)]
pub(crate) struct HandedOver {
    /// Groups that have not been seen to arrive: how many layers are there with each, and the point behind it.
    pub(crate) groups: VecDeque<(usize, CudaFence)>,
    /// Behind all of it.
    pub(crate) end: CudaFence,
    /// Which pages of the copy are compared, and where their sums will be.
    pub(crate) samples: Vec<usize>,
    pub(crate) sums_place: usize,
}

impl Copier {
    /// How many places of the lists a copy needs.
    pub(crate) fn places(pages: usize, samples: usize) -> usize {
        // A pair for each page and sample, room for the sums of samples, and what is planted.
        pages + 2 * samples + 1
    }

    /// Hands a copy to the stream: behind what it comes after, group by group, then the checksums of samples.
    ///
    /// When it fails, some of it may have been handed over all the same; the pages are lent until the caller has waited
    /// for the stream.
    pub(crate) fn hand_over(&mut self, order: Order<'_>) -> Result<HandedOver, CudaError> {
        let Order { pages: lent, groups, after, times, samples, places, is_corrupted } = order;
        let of_pages = places.start..places.start + lent.pairs.len();
        let of_samples = of_pages.end..of_pages.end + samples.len();
        let sums_place = of_samples.end;
        for (place, (to, from)) in of_pages.clone().zip(&lent.pairs) {
            self.lists.write(place, *to, *from);
        }
        for (place, sample) in of_samples.clone().zip(&samples) {
            let (to, from) = lent.pairs[*sample];
            let (on_device, on_host) = match self.direction {
                CopyDirection::LoadBack => (to, from),
                CopyDirection::WriteBack => (from, to),
            };
            self.lists.write(place, on_device, on_host);
        }
        if let Some(after) = after {
            after.wait_on(self.stream)?;
        }
        self.driver.record(times[0], self.stream)?;
        let uploaded = of_pages.start..of_samples.end;
        let to = self.lists.on_device(uploaded.clone()).at;
        let from = self.lists.seen_at(uploaded.start);
        // SAFETY: both are the lists' memory, in places that are this copy's until it has ended.
        unsafe { self.driver.fetch(self.stream, to, from, uploaded.len() * PAIR_BYTES)? };
        let mut marks = VecDeque::with_capacity(groups.len());
        for group in groups {
            for part in group.parts {
                self.copy(&of_pages, part)?;
            }
            marks.push_back((group.layers, self.events.record(self.stream)?));
        }
        if is_corrupted {
            let page = samples.first().copied().unwrap_or(0);
            self.corrupt(places.end - 1, lent.pairs[page].0)?;
        }
        if !samples.is_empty() {
            let (list, sums) = (self.lists.on_device(of_samples), self.lists.seen_at(sums_place));
            // SAFETY: the list was uploaded before in this stream; it names device pages of this copy, which the caller
            // keeps, and the sums are this copy's places in the lists.
            unsafe { self.driver.checksums(self.stream, list, self.page_bytes, sums)? };
        }
        self.driver.record(times[1], self.stream)?;
        let end = self.events.record(self.stream)?;
        Ok(HandedOver { groups: marks, end, samples, sums_place })
    }

    /// Copies a part of all pages in the list.
    fn copy(&mut self, places: &Range<usize>, part: Part) -> Result<(), CudaError> {
        let is_large = self.batch_from.is_some_and(|bytes| part.bytes >= bytes);
        if !is_large {
            let list = self.lists.on_device(places.clone());
            // SAFETY: the list was uploaded before in this stream. It names pages that the caller keeps until the stream
            // has passed them, and the part lies in a page.
            unsafe { self.driver.copy_by_kernel(self.stream, list, part)? };
            self.counts.by_kernel();
            return Ok(());
        }
        let BatchLists { to, from, bytes } = &mut self.batch;
        to.clear();
        from.clear();
        bytes.clear();
        for place in places.clone() {
            let (page_to, page_from) = self.lists.read(place);
            to.push(page_to.offset(part.offset));
            from.push(page_from.offset(part.offset));
            bytes.push(part.bytes);
        }
        // SAFETY: as for the kernel.
        unsafe { self.driver.copy_by_batch(self.stream, to, from, bytes)? };
        self.counts.by_batch();
        Ok(())
    }

    /// Writes over the beginning of what was copied, for tests of canaries.
    fn corrupt(&mut self, place: usize, at: DeviceAddress) -> Result<(), CudaError> {
        let [first, second] = CORRUPTION.map(DeviceAddress);
        self.lists.write(place, first, second);
        let (from, bytes) = (self.lists.seen_at(place), PAIR_BYTES.min(self.page_bytes));
        // SAFETY: the place is this copy's, and so is the page that it writes to.
        unsafe { self.driver.fetch(self.stream, at, from, bytes)? };
        Ok(())
    }

    /// Whether sampled pages are the same on both sides. The copy has ended.
    pub(crate) fn compare(&self, lent: &LentPages, copy: &HandedOver) -> Result<(), CopyError> {
        let sums = (0..copy.samples.len()).map(|n| self.lists.number(copy.sums_place, n));
        let corrupt = copy
            .samples
            .iter()
            .zip(sums)
            .filter(|(sample, sum)| checksum(lent.pages.bytes(**sample)) != *sum);
        let corrupt = corrupt.count();
        self.counts.compared(copy.samples.len(), corrupt);
        match corrupt {
            0 => Ok(()),
            _ => Err(CopyError::Failed(format!(
                "{corrupt} of {} pages that were compared are not the same on both sides; the GPU, the memory or the link \
                 is broken, or somebody has written to pages that were being copied",
                copy.samples.len()
            ))),
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.driver.bind_thread().is_ok() {
            self.driver.destroy_stream(self.stream);
        }
    }
}
