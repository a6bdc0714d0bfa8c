//! The CPU as a device: device pages lie in ordinary memory, and copies run on threads.

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use terrace_l3::{Arena, Lent, Source, Target};
use terrace_scheduler::{CopyDirection, DevicePage};

use crate::batch::Step;
use crate::device::{CopyError, CopyJob, Device};
use crate::layout::PageLayout;

/// A [`Device`] that uses the CPU.
#[derive(Debug)]
pub struct CpuDevice {
    layout: PageLayout,
    memory: CpuMemory,
    host: Option<Arena>,
    to_device: Lane,
    to_host: Lane,
}

impl CpuDevice {
    /// Creates a device with the given number of pages in each tier. The system commits memory on
    /// first touch.
    ///
    /// # Errors
    /// Fails if the address space cannot be reserved.
    pub fn new(device_pages: u32, host_pages: u32, layout: PageLayout) -> io::Result<Self> {
        let memory = CpuMemory(Arena::new(device_pages, layout.bytes())?);
        let host = match host_pages {
            0 => None,
            pages => Some(Arena::with_headroom(pages, layout.bytes())?),
        };
        let lane = |name: &str| {
            let copier =
                Copier { layout: layout.clone(), memory: memory.clone(), host: host.clone() };
            Lane::spawn(name, copier)
        };
        let (to_device, to_host) = (lane("terrace-to-device")?, lane("terrace-to-host")?);
        Ok(Self { layout, memory, host, to_device, to_host })
    }
}

impl Device for CpuDevice {
    type Memory = CpuMemory;
    type Fence = CpuFence;

    fn pages(&self) -> u32 {
        self.memory.0.pages()
    }

    fn layout(&self) -> &PageLayout {
        &self.layout
    }

    fn memory(&self) -> &CpuMemory {
        &self.memory
    }

    fn host(&self) -> Option<&Arena> {
        self.host.as_ref()
    }

    fn start_copy(&self, job: CopyJob<CpuFence>) {
        let lane = match job.direction {
            CopyDirection::LoadBack => &self.to_device,
            CopyDirection::WriteBack => &self.to_host,
        };
        let jobs = lane.jobs.as_ref().expect("a lane lives as long as its device");
        jobs.send(job).expect("a lane lives as long as its device");
    }
}

/// A fence that one thread passes and other threads wait for.
#[derive(Clone, Debug, Default)]
pub struct CpuFence(Arc<(Mutex<bool>, Condvar)>);

impl CpuFence {
    /// Marks all work before the fence as done.
    pub fn pass(&self) {
        let (passed, changed) = &*self.0;
        *passed.lock() = true;
        changed.notify_all();
    }

    /// Waits until all work before the fence is done.
    pub fn wait(&self) {
        let (passed, changed) = &*self.0;
        let mut passed = passed.lock();
        while !*passed {
            changed.wait(&mut passed);
        }
    }
}

/// A thread that runs the copies of one direction in order.
#[derive(Debug)]
struct Lane {
    jobs: Option<mpsc::Sender<CopyJob<CpuFence>>>,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    fn spawn(name: &str, copier: Copier) -> io::Result<Self> {
        let (jobs, receiver) = mpsc::channel::<CopyJob<CpuFence>>();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            for job in receiver {
                let (copied, done) = (copier.copy(&job), job.done);
                done(copied);
            }
        })?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }
}

impl Drop for Lane {
    /// Waits for copies that have started.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Copier {
    layout: PageLayout,
    memory: CpuMemory,
    host: Option<Arena>,
}

impl Copier {
    fn copy(&self, job: &CopyJob<CpuFence>) -> Result<(), CopyError> {
        let none = || CopyError::Failed("there is no host tier".to_owned());
        let host = self.host.as_ref().ok_or_else(none)?;
        if let Some(after) = &job.after {
            after.wait();
        }
        if job.progress.is_called_off() {
            return Err(CopyError::CalledOff);
        }
        let pages = job.device_pages.iter().zip(&job.host_pages);
        let pages = pages.map(|(device_page, host_page)| (device_page.slot(), host_page.slot()));
        let copied = match job.direction {
            CopyDirection::LoadBack => self.load_back(host, pages, job),
            CopyDirection::WriteBack => self.write_back(host, pages),
        };
        copied.map_err(|lent| CopyError::Failed(lent.to_string()))
    }

    /// Copies layer by layer, and reports each.
    fn load_back(
        &self,
        host: &Arena,
        pages: impl Iterator<Item = (u32, u32)>,
        job: &CopyJob<CpuFence>,
    ) -> Result<(), Lent> {
        let memory = &self.memory.0;
        let lent: Result<Vec<(Target, Source)>, Lent> = pages
            .map(|(device_page, host_page)| {
                Ok((memory.target(device_page)?, host.source(host_page)?))
            })
            .collect();
        let lent = lent?;
        for layer in 0..self.layout.layers() {
            for part in self.layout.layer(layer) {
                for (to, from) in &lent {
                    self.memory.write_part(to, part.clone(), from);
                }
            }
            job.progress.arrive(layer + 1);
        }
        Ok(())
    }

    fn write_back(
        &self,
        host: &Arena,
        pages: impl Iterator<Item = (u32, u32)>,
    ) -> Result<(), Lent> {
        for (device_page, host_page) in pages {
            let (mut to, from) = (host.target(host_page)?, self.memory.0.source(device_page)?);
            to.copy_from_slice(&from);
        }
        Ok(())
    }
}

/// Memory of a [`CpuDevice`], as models see it.
#[derive(Clone, Debug)]
pub struct CpuMemory(Arena);

impl CpuMemory {
    /// Creates memory for the given number of KV pages.
    ///
    /// # Errors
    /// Fails if the address space cannot be reserved.
    pub fn new(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Arena::new(pages, page_bytes).map(Self)
    }

    /// Copies a part of a host page to the same part of a borrowed device page. Other threads may
    /// read parts that were copied before.
    fn write_part(&self, to: &Target, part: Range<usize>, from: &Source) {
        let from = &from[part.clone()];
        assert!(part.end <= self.0.page_bytes(), "a part lies in its page");
        let offset = to.page() as usize * self.0.page_bytes() + part.start;
        // SAFETY: the part lies in a page of the arena that is lent for writing to the caller
        // alone. Readers of a page that is being loaded read only layers that have arrived. Those
        // are other bytes than these, and readers hold no reference to these.
        unsafe {
            let to = self.0.base().as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
        }
    }

    /// Borrows the pages of a step until the returned value is dropped.
    ///
    /// # Errors
    /// Fails if another transfer uses a page that the step writes to. Debug builds also fail if
    /// another transfer writes to a page that the step reads.
    pub fn lend(&self, step: &Step<'_>) -> Result<StepPages<'_>, Lent> {
        let mut pages = StepPages { memory: self, written: Vec::new(), _read: Vec::new() };
        for span in step.spans {
            let written = step.written_pages_of(span);
            for page in written {
                pages.written.push(self.0.target(page.slot())?);
            }
            // The scheduler guarantees that a page in use does not move. A loan of each page read
            // would make a step's cost proportional to the context length.
            if cfg!(debug_assertions) && step.arriving.is_empty() {
                let all = step.pages_of(span);
                for page in &all[..all.len() - written.len()] {
                    pages._read.push(self.0.source(page.slot())?);
                }
            }
        }
        pages.written.sort_unstable_by_key(Target::page);
        Ok(pages)
    }
}

/// The pages that one step uses.
#[derive(Debug)]
pub struct StepPages<'a> {
    memory: &'a CpuMemory,
    /// Borrowed pages, sorted by page id.
    written: Vec<Target>,
    _read: Vec<Source>,
}

impl StepPages<'_> {
    /// Returns the elements of a page that the step reads or has written.
    #[must_use]
    pub fn read(&self, page: DevicePage) -> &[f32] {
        let (_, elements) = self.locate(page);
        self.read_part(page, 0..elements)
    }

    /// Returns a range of elements of such a page. Only layers that have arrived may be read from a
    /// page in [`Step::arriving`].
    #[must_use]
    pub fn read_part(&self, page: DevicePage, part: Range<usize>) -> &[f32] {
        let (start, elements) = self.locate(page);
        assert!(part.start <= part.end && part.end <= elements, "a part lies in its page");
        // SAFETY: the part lies in the arena, which is aligned for any element and outlives `self`.
        // There is no other writer: pages that the step writes to are lent to it alone and need
        // `&mut self`, the scheduler starts no transfer into a page that a step reads, and a
        // load-back does not write again to a layer that has arrived.
        unsafe { std::slice::from_raw_parts(start.add(part.start), part.len()) }
    }

    /// Returns the elements of a page that the step writes to.
    ///
    /// # Panics
    /// Panics if the step does not write to the page.
    pub fn write(&mut self, page: DevicePage) -> &mut [f32] {
        let lent = self.written.binary_search_by_key(&page.slot(), Target::page);
        assert!(lent.is_ok(), "the step does not write to {page:?}");
        let (start, elements) = self.locate(page);
        // SAFETY: the page lies in the arena and is lent for writing to this step alone; `&mut
        // self` excludes readers within the step.
        unsafe { std::slice::from_raw_parts_mut(start, elements) }
    }

    fn locate(&self, page: DevicePage) -> (*mut f32, usize) {
        let arena = &self.memory.0;
        assert!(page.slot() < arena.pages(), "the device has no {page:?}");
        let offset = page.slot() as usize * arena.page_bytes();
        // SAFETY: the offset of a page that exists lies in the arena's allocation.
        let start = unsafe { arena.base().as_ptr().add(offset) };
        (start.cast::<f32>(), arena.page_bytes() / size_of::<f32>())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use terrace_cache::{Cache, CacheConfig, DevicePages, HostPages};
    use terrace_scheduler::{OpId, Slot};

    use super::*;
    use crate::batch::{PageTable, Span};
    use crate::device::CopyProgress;
    use crate::layout::{KvLayout, KvType};

    const PAGE_SIZE: u32 = 4;
    const SOON: Duration = Duration::from_secs(10);

    fn pages(count: usize) -> (DevicePages, HostPages) {
        let config = CacheConfig { host_pages: 8, ..CacheConfig::default() };
        let mut cache = Cache::new(&config);
        (cache.take_device_pages(count).unwrap(), cache.take_host_pages(count).unwrap())
    }

    /// Pages of 4 KiB, 1 KiB a layer.
    fn device() -> CpuDevice {
        let layout = KvLayout::keys_and_values(KvType::F32, 4, 2, 16).pages(PAGE_SIZE).unwrap();
        CpuDevice::new(8, 8, layout).unwrap()
    }

    fn job(
        direction: CopyDirection,
        pages: &(DevicePages, HostPages),
        after: Option<&CpuFence>,
    ) -> (CopyJob<CpuFence>, mpsc::Receiver<Result<(), CopyError>>) {
        let (sender, receiver) = mpsc::channel();
        let job = CopyJob {
            direction,
            device_pages: pages.0.as_slice().to_vec(),
            host_pages: pages.1.as_slice().to_vec(),
            after: after.cloned(),
            progress: CopyProgress::new(OpId(7)),
            done: Box::new(move |copied| sender.send(copied).unwrap()),
        };
        (job, receiver)
    }

    #[test]
    fn copy_waits_for_its_fence() {
        let device = device();
        let (pages, fence) = (pages(1), CpuFence::default());
        let (copy, done) = job(CopyDirection::WriteBack, &pages, Some(&fence));
        device.start_copy(copy);
        assert!(done.recv_timeout(Duration::from_millis(30)).is_err(), "the fence has not passed");
        device.memory.0.target(pages.0.as_slice()[0].slot()).unwrap().fill(7);
        fence.pass();
        done.recv_timeout(SOON).unwrap().unwrap();
        let host = device.host().unwrap().source(pages.1.as_slice()[0].slot()).unwrap();
        assert_eq!(host[4095], 7, "it has what the step wrote");
    }

    #[test]
    fn round_trip_through_host_keeps_bytes() {
        let device = device();
        let pages = pages(3);
        let slots: Vec<_> = pages.0.as_slice().iter().map(|page| page.slot()).collect();
        for (&slot, byte) in slots.iter().zip(1..) {
            device.memory.0.target(slot).unwrap().fill(byte);
        }
        let (copy, done) = job(CopyDirection::WriteBack, &pages, None);
        device.start_copy(copy);
        done.recv_timeout(SOON).unwrap().unwrap();
        for &slot in &slots {
            device.memory.0.target(slot).unwrap().fill(0);
        }
        let (copy, done) = job(CopyDirection::LoadBack, &pages, None);
        device.start_copy(copy);
        done.recv_timeout(SOON).unwrap().unwrap();
        let first_bytes = slots.iter().map(|&slot| device.memory.0.source(slot).unwrap()[0]);
        assert_eq!(first_bytes.collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn copy_of_a_page_in_use_fails() {
        let device = device();
        let pages = pages(1);
        let _in_use = device.host().unwrap().target(pages.1.as_slice()[0].slot()).unwrap();
        let (copy, done) = job(CopyDirection::WriteBack, &pages, None);
        device.start_copy(copy);
        assert!(done.recv_timeout(SOON).unwrap().is_err());
    }

    #[test]
    fn load_back_does_not_queue_behind_write_backs() {
        let device = device();
        let (pages, fence) = (pages(2), CpuFence::default());
        let (held_up, held) = job(CopyDirection::WriteBack, &pages, Some(&fence));
        device.start_copy(held_up);
        let (load_back, loaded) = job(CopyDirection::LoadBack, &pages, None);
        device.start_copy(load_back);
        loaded.recv_timeout(SOON).unwrap().unwrap();
        assert!(held.try_recv().is_err(), "its fence is not passed");
        fence.pass();
        held.recv_timeout(SOON).unwrap().unwrap();
    }

    #[test]
    fn cancelled_copy_that_has_not_started_touches_no_page() {
        let device = device();
        let (pages, fence) = (pages(1), CpuFence::default());
        device.host().unwrap().target(pages.1.as_slice()[0].slot()).unwrap().fill(9);
        let (copy, done) = job(CopyDirection::LoadBack, &pages, Some(&fence));
        let progress = copy.progress.clone();
        device.start_copy(copy);
        progress.call_off();
        fence.pass();
        assert_eq!(done.recv_timeout(SOON).unwrap(), Err(CopyError::CalledOff));
        assert_eq!(device.memory.0.source(pages.0.as_slice()[0].slot()).unwrap()[0], 0);
    }

    #[test]
    fn load_back_reports_every_layer() {
        let device = device();
        let pages = pages(2);
        for (page, byte) in pages.1.as_slice().iter().zip(1..) {
            let mut page = device.host().unwrap().target(page.slot()).unwrap();
            page.chunks_mut(1024).zip(0..).for_each(|(part, layer)| part.fill(10 * byte + layer));
        }
        let (copy, done) = job(CopyDirection::LoadBack, &pages, None);
        let progress = copy.progress.clone();
        assert_eq!(progress.layers_arrived(), 0);
        device.start_copy(copy);
        for layer in 0..4 {
            progress.wait_for(layer).unwrap();
        }
        done.recv_timeout(SOON).unwrap().unwrap();
        assert_eq!(progress.layers_arrived(), 4);
        for (page, byte) in pages.0.as_slice().iter().zip(1..) {
            let page = device.memory.0.source(page.slot()).unwrap();
            let parts: Vec<_> = page.chunks(1024).map(|part| (part[0], part[1023])).collect();
            let expected: Vec<_> =
                (0..4).map(|layer| (10 * byte + layer, 10 * byte + layer)).collect();
            assert_eq!(parts, expected);
        }
    }

    #[test]
    fn step_borrows_written_pages_exclusively() {
        let memory = CpuMemory::new(8, 4096).unwrap();
        let pages = pages(3).0;
        let mut table = PageTable::new(1, PAGE_SIZE);
        table.set(Slot(0), 0, pages.as_slice());
        let span = Span { slot: Slot(0), start: 6, tokens: 0..4, logits: 0 };
        let step = Step { spans: &[span], tokens: &[0; 4], table: &table, arriving: &[] };
        let [read, first, second] = *pages.as_slice() else { panic!("three pages") };

        let mut lent = memory.lend(&step).unwrap();
        lent.write(first)[0] = 1.5;
        lent.write(second)[1] = 2.5;
        assert_eq!((lent.read(first)[0], lent.read(second)[1]), (1.5, 2.5));
        assert!(memory.lend(&step).is_err(), "one step at a time");
        assert!(memory.0.target(first.slot()).is_err());
        assert!(memory.0.target(read.slot()).is_err(), "it may read what the step reads");
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            lent.write(read)[0] = 3.5;
        }));
        assert!(panics.is_err(), "a page that the step only reads is not written to");
        drop(lent);
        assert!(memory.lend(&step).is_ok());
    }
}
