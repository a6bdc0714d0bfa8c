//! One copy, from its borrowed pages to the work submitted to the device.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use terrace_engine::CopyError;
use terrace_l3::{Arena, Sources, Targets};
use terrace_scheduler::{CopyDirection, DevicePage, HostPage};

use crate::canary::checksum;
use crate::driver::{DeviceAddress, Driver, Event, Part, Stream};
use crate::error::CudaError;
use crate::fence::{CudaFence, EventPool};
use crate::groups::Group;
use crate::lists::{Lists, PAIR_BYTES};
use crate::memory::{CudaMemory, LayerMarks};
use crate::pinned::SeenArena;
use crate::portions::portions;
use crate::stats::LinkCounts;

/// Bytes that a planted corruption writes over the start of a page.
const CORRUPTION: [u64; 2] = [0x6b8b_4567_327b_23c6, 0x643c_9869_6633_4873];

/// Both sides of the copies of a lane.
#[derive(Clone, Debug)]
pub(crate) struct Ends {
    pub(crate) memory: CudaMemory,
    pub(crate) host: Option<(Arena, SeenArena)>,
}

/// Borrowed host pages of a portion. They are exclusive until this is dropped, which is after the
/// device has ended with them.
#[derive(Debug)]
pub(crate) enum Lent {
    Read(Sources),
    Written(Targets),
}

impl Lent {
    /// Returns the bytes of the n-th page. The device must have ended with it.
    fn bytes(&self, n: usize) -> &[u8] {
        match self {
            Self::Read(sources) => sources.bytes(n),
            Self::Written(targets) => targets.bytes(n),
        }
    }
}

/// Submits copies to a dedicated stream.
#[derive(Debug)]
pub(crate) struct Copier {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) stream: Stream,
    /// Stream for lists, which are uploaded while pages of the list before are copied.
    pub(crate) list_stream: Stream,
    pub(crate) events: EventPool,
    pub(crate) ends: Ends,
    pub(crate) lists: Lists,
    pub(crate) direction: CopyDirection,
    /// Piece size from which the copy engines are used.
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

/// A copy to submit.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    /// The pages of both sides, equally many.
    pub(crate) device_pages: &'a [DevicePage],
    pub(crate) host_pages: &'a [HostPage],
    pub(crate) groups: Vec<Group>,
    pub(crate) after: Option<&'a CudaFence>,
    /// Timing events for its start and end.
    pub(crate) times: [Event; 2],
    /// Its places in the lists.
    pub(crate) places: Range<usize>,
    /// True if the copy is corrupted, for tests of canaries.
    pub(crate) is_corrupted: bool,
}

/// A submitted or partly submitted copy.
#[derive(Debug)]
pub(crate) struct HandedOver {
    /// Compared pages, in order.
    samples: Vec<usize>,
    /// Borrowed pages whose portion has no end in the stream yet.
    beginning: VecDeque<Lent>,
    /// Pending milestones with their fences, in stream order.
    pub(crate) milestones: VecDeque<(CudaFence, Milestone)>,
    /// Number of compared pages that differ.
    corrupt: usize,
}

/// A milestone of a copy.
#[derive(Debug)]
pub(crate) enum Milestone {
    /// The given number of leading layers has arrived.
    Layers(usize),
    /// The device has ended with some of the pages.
    Ended(Portion),
}

/// Pages of a copy that are released together.
#[derive(Debug)]
pub(crate) struct Portion {
    pages: Range<usize>,
    lent: Lent,
    /// Indices of the copy's samples in it, and the place of their sums.
    samples: Range<usize>,
    sums_place: usize,
}

impl HandedOver {
    /// Creates a copy without submitted work, whose n-th pages are to be compared.
    pub(crate) fn nothing(samples: Vec<usize>) -> Self {
        let (beginning, milestones) = (VecDeque::new(), VecDeque::new());
        Self { samples, beginning, milestones, corrupt: 0 }
    }

    /// Returns whether any of its pages may be in flight.
    pub(crate) fn has_begun(&self) -> bool {
        !self.beginning.is_empty() || !self.milestones.is_empty()
    }

    /// Returns the points at which its layers will have arrived.
    pub(crate) fn marks(&self) -> LayerMarks {
        let layers = self.milestones.iter().filter_map(|(fence, milestone)| match milestone {
            Milestone::Layers(layers) => Some((*layers, fence.clone())),
            Milestone::Ended(_) => None,
        });
        LayerMarks::new(layers.collect())
    }

    /// Returns an error if a compared page differs.
    pub(crate) fn verdict(&self) -> Result<(), CopyError> {
        match self.corrupt {
            0 => Ok(()),
            corrupt => Err(CopyError::Failed(format!(
                "{corrupt} of {} verified pages are not the same on both sides; the GPU, the \
                 memory or the link is broken, or pages were written while they were being copied",
                self.samples.len()
            ))),
        }
    }
}

impl Copier {
    /// Returns the number of list places that a copy needs.
    pub(crate) fn places(pages: usize, samples: usize) -> usize {
        // A pair for each page and sample, space for the sums of samples, and the planted bytes.
        pages + 2 * samples + 1
    }

    /// Submits a copy to the stream: behind its fence, group by group, then the checksums of
    /// samples.
    ///
    /// Pages of a large copy are prepared and released in portions while other pages are copied.
    /// Only the first and the last group are divided into portions; the groups between them copy
    /// all pages at once.
    ///
    /// After an error, part of the copy may have been submitted. The pages stay borrowed until the
    /// caller has waited for the streams and dropped `copy`.
    pub(crate) fn hand_over(
        &mut self,
        order: &Order<'_>,
        copy: &mut HandedOver,
    ) -> Result<(), CudaError> {
        let pages = order.device_pages.len();
        if let Some(after) = order.after {
            after.wait_on(self.stream)?;
        }
        self.driver.record(order.times[0], self.stream)?;
        let first_bytes = order.groups.first().map_or(0, |group| group.bytes());
        let (portions, all) = (portions(pages, first_bytes), 0..pages);
        for (n, group) in order.groups.iter().enumerate() {
            let (is_first, is_last) = (n == 0, n + 1 == order.groups.len());
            let of_group =
                if is_first || is_last { &portions[..] } else { std::slice::from_ref(&all) };
            for portion in of_group {
                let list = order.places.start + portion.start..order.places.start + portion.end;
                if is_first {
                    let lent = self.prepare(order, portion, list.clone())?;
                    copy.beginning.push_back(lent);
                    self.fetch(list.clone())?;
                }
                for part in &group.parts {
                    self.copy(&list, *part)?;
                }
                if is_last {
                    self.end_portion(order, portion, copy)?;
                }
            }
            if is_last {
                self.driver.record(order.times[1], self.stream)?;
            }
            let mark = self.events.record(self.stream)?;
            copy.milestones.push_back((mark, Milestone::Layers(group.layers)));
        }
        Ok(())
    }

    /// Borrows the host pages of a portion, and writes its list.
    fn prepare(
        &mut self,
        order: &Order<'_>,
        portion: &Range<usize>,
        list: Range<usize>,
    ) -> Result<Lent, CopyError> {
        let failed = |why: String| CopyError::Failed(why);
        let in_use = |lent: terrace_l3::Lent| CopyError::Failed(lent.to_string());
        let memory = &self.ends.memory;
        let host = self.ends.host.as_ref();
        let (arena, seen) = host.ok_or_else(|| failed("there is no host tier".to_owned()))?;
        let device_pages = &order.device_pages[portion.clone()];
        if let Some(page) = device_pages.iter().find(|page| page.slot() >= memory.pages()) {
            return Err(failed(format!("the device has no {page:?}")));
        }
        let slots = order.host_pages[portion.clone()].iter().map(|page| page.slot());
        if let Some(slot) = slots.clone().find(|slot| *slot >= arena.pages()) {
            return Err(failed(format!("the host has no page {slot}")));
        }
        let on_device = device_pages.iter().map(|page| memory.address(*page));
        Ok(match self.direction {
            CopyDirection::LoadBack => {
                let sources = arena.sources(slots).map_err(in_use)?;
                let from = sources.starts().map(|at| seen.address(at));
                self.lists.write_all(list, on_device.zip(from));
                Lent::Read(sources)
            }
            CopyDirection::WriteBack => {
                let targets = arena.targets(slots).map_err(in_use)?;
                let to = targets.starts().map(|at| seen.address(at));
                self.lists.write_all(list, to.zip(on_device));
                Lent::Written(targets)
            }
        })
    }

    /// Sends places of the lists to the device, and makes later copies wait for them.
    fn fetch(&self, places: Range<usize>) -> Result<(), CudaError> {
        let (to, from) =
            (self.lists.on_device(places.clone()).at, self.lists.seen_at(places.start));
        // SAFETY: both are the lists' memory, in places that belong to this copy until it has
        // ended, which is behind the point that the other stream waits for here.
        unsafe { self.driver.fetch(self.list_stream, to, from, places.len() * PAIR_BYTES)? };
        self.events.record(self.list_stream)?.wait_on(self.stream)
    }

    /// Copies a part of all pages in the list.
    fn copy(&mut self, places: &Range<usize>, part: Part) -> Result<(), CudaError> {
        let is_large = self.batch_from.is_some_and(|bytes| part.bytes >= bytes);
        if !is_large {
            let list = self.lists.on_device(places.clone());
            // SAFETY: the stream reaches this point after the list has arrived. It names pages that
            // the caller keeps until the stream has passed them, and the part lies in a page.
            unsafe { self.driver.copy_by_kernel(self.stream, self.direction, list, part)? };
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

    /// Ends a portion whose copies are submitted: adds the checksums of its samples and its end.
    fn end_portion(
        &mut self,
        order: &Order<'_>,
        pages: &Range<usize>,
        copy: &mut HandedOver,
    ) -> Result<(), CudaError> {
        let place = |page| order.places.start + page;
        let corrupted = copy.samples.first().copied().unwrap_or(0);
        if order.is_corrupted && pages.contains(&corrupted) {
            self.corrupt(order.places.end - 1, self.lists.read(place(corrupted)).0)?;
        }
        let before = |page: usize| copy.samples.partition_point(|sample| *sample < page);
        let samples = before(pages.start)..before(pages.end);
        // Places behind the pages of the copy: first its samples, then their sums.
        let first_sample = place(order.device_pages.len());
        let sums_place = first_sample + copy.samples.len() + samples.start;
        if !samples.is_empty() {
            let list = first_sample + samples.start..first_sample + samples.end;
            for (place_of_sample, sample) in list.clone().zip(&copy.samples[samples.clone()]) {
                let (to, from) = self.lists.read(place(*sample));
                let (on_device, on_host) = match self.direction {
                    CopyDirection::LoadBack => (to, from),
                    CopyDirection::WriteBack => (from, to),
                };
                self.lists.write(place_of_sample, on_device, on_host);
            }
            self.fetch(list.clone())?;
            let (list, sums) = (self.lists.on_device(list), self.lists.seen_at(sums_place));
            let page_bytes = self.ends.memory.page_bytes();
            // SAFETY: the stream reaches this point after the list has arrived. It names device
            // pages of this copy, which the caller keeps, and the sums are this copy's places in
            // the lists.
            unsafe { self.driver.checksums(self.stream, list, page_bytes, sums)? };
        }
        let end = self.events.record(self.stream)?;
        let lent = copy.beginning.pop_front().expect("every portion was prepared");
        let portion = Portion { pages: pages.clone(), lent, samples, sums_place };
        copy.milestones.push_back((end, Milestone::Ended(portion)));
        Ok(())
    }

    /// Overwrites the start of the copied page, for tests of canaries.
    fn corrupt(&mut self, place: usize, at: DeviceAddress) -> Result<(), CudaError> {
        let [first, second] = CORRUPTION.map(DeviceAddress);
        self.lists.write(place, first, second);
        let from = self.lists.seen_at(place);
        let bytes = PAIR_BYTES.min(self.ends.memory.page_bytes());
        // SAFETY: the place is this copy's, and so is the page that it writes to.
        unsafe { self.driver.fetch(self.stream, at, from, bytes)? };
        Ok(())
    }

    /// Compares the samples of a completed portion, and releases its pages.
    pub(crate) fn end(&self, portion: Portion, copy: &mut HandedOver) {
        let samples = &copy.samples[portion.samples];
        let sums = (0..samples.len()).map(|n| self.lists.number(portion.sums_place, n));
        let corrupt = samples.iter().zip(sums).filter(|(sample, sum)| {
            checksum(portion.lent.bytes(**sample - portion.pages.start)) != *sum
        });
        let corrupt = corrupt.count();
        self.counts.compared(samples.len(), corrupt);
        copy.corrupt += corrupt;
    }

    /// Waits until all submitted work is done or the device is lost.
    pub(crate) fn drain(&self) -> Result<(), CudaError> {
        let lists = self.driver.drain(self.list_stream);
        Ok(self.driver.drain(self.stream).and(lists)?)
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        if self.driver.bind_thread().is_ok() {
            self.driver.destroy_stream(self.list_stream);
            self.driver.destroy_stream(self.stream);
        }
    }
}
