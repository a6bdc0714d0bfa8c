//! A device that is the CPU: its memory is memory, and its copies run on threads of their own.

#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use terrace_l3::{Arena, Lent, Source, Target};
use terrace_scheduler::{CopyDirection, DevicePage, StepId};

use crate::batch::Step;
use crate::device::{CopyError, CopyJob, Device};

/// The CPU as a device.
#[derive(Debug)]
pub struct CpuDevice {
    memory: CpuMemory,
    host: Option<Arena>,
    copies: Option<std::sync::mpsc::Sender<CopyJob>>,
    steps: Arc<StepsEnded>,
    copier: Option<JoinHandle<()>>,
}

impl CpuDevice {
    /// A device with so many pages in each tier. Memory is taken from the system as it is first
    /// touched.
    ///
    /// # Errors
    /// When the system has not so much address space left.
    pub fn new(device_pages: u32, host_pages: u32, page_bytes: usize) -> io::Result<Self> {
        let memory = CpuMemory(Arena::new(device_pages, page_bytes)?);
        let host = match host_pages {
            0 => None,
            pages => Some(Arena::with_headroom(pages, page_bytes)?),
        };
        let steps = Arc::new(StepsEnded::default());
        let (sender, receiver) = std::sync::mpsc::channel::<CopyJob>();
        let copier = std::thread::Builder::new().name("terrace-copies".to_owned()).spawn({
            let (memory, host, steps) = (memory.clone(), host.clone(), steps.clone());
            move || {
                for job in receiver {
                    let (copied, done) = (copy(&memory, host.as_ref(), &steps, &job), job.done);
                    done(copied);
                }
            }
        })?;
        Ok(Self { memory, host, copies: Some(sender), steps, copier: Some(copier) })
    }
}

impl Device for CpuDevice {
    type Memory = CpuMemory;

    fn pages(&self) -> u32 {
        self.memory.0.pages()
    }

    fn page_bytes(&self) -> usize {
        self.memory.0.page_bytes()
    }

    fn memory(&self) -> &CpuMemory {
        &self.memory
    }

    fn host(&self) -> Option<&Arena> {
        self.host.as_ref()
    }

    fn start_copy(&self, job: CopyJob) {
        let copies = self.copies.as_ref().expect("the copier lives as long as its device");
        copies.send(job).expect("the copier lives as long as its device");
    }

    fn step_ended(&self, step: StepId) {
        self.steps.set(step);
    }
}

impl Drop for CpuDevice {
    /// Copies that were started are finished first.
    fn drop(&mut self) {
        drop(self.copies.take());
        if let Some(copier) = self.copier.take()
            && copier.thread().id() != std::thread::current().id()
        {
            let _ = copier.join();
        }
    }
}

/// The last step that has ended, and who waits for one.
#[derive(Debug, Default)]
struct StepsEnded {
    last: Mutex<Option<StepId>>,
    changed: Condvar,
}

impl StepsEnded {
    fn set(&self, step: StepId) {
        let mut last = self.last.lock();
        *last = (*last).max(Some(step));
        self.changed.notify_all();
    }

    fn wait_for(&self, step: Option<StepId>) {
        let mut last = self.last.lock();
        while *last < step {
            self.changed.wait(&mut last);
        }
    }
}

fn copy(
    memory: &CpuMemory,
    host: Option<&Arena>,
    steps: &StepsEnded,
    job: &CopyJob,
) -> Result<(), CopyError> {
    let host = host.ok_or_else(|| CopyError("there is no host tier".to_owned()))?;
    let in_use = |lent: Lent| CopyError(lent.to_string());
    steps.wait_for(job.after);
    for (device_page, host_page) in job.device_pages.iter().zip(&job.host_pages) {
        let (device_page, host_page) = (device_page.slot(), host_page.slot());
        let (mut to, from) = match job.direction {
            CopyDirection::LoadBack => (memory.0.target(device_page), host.source(host_page)),
            CopyDirection::WriteBack => (host.target(host_page), memory.0.source(device_page)),
        };
        let (to, from) = (to.as_mut().map_err(|lent| in_use(*lent))?, from.map_err(in_use)?);
        to.copy_from_slice(&from);
    }
    Ok(())
}

/// The memory of a [`CpuDevice`], as models see it.
#[derive(Clone, Debug)]
pub struct CpuMemory(Arena);

impl CpuMemory {
    /// Memory for so many pages of KV.
    ///
    /// # Errors
    /// When the system has not so much address space left.
    pub fn new(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Arena::new(pages, page_bytes).map(Self)
    }

    /// Takes the pages that a step uses until the returned value is dropped.
    ///
    /// # Errors
    /// When another transfer is using a page that the step writes to, or, checked in debug builds
    /// only, writing to one that it reads.
    pub fn lend(&self, step: &Step<'_>) -> Result<StepPages<'_>, Lent> {
        let mut pages = StepPages { memory: self, written: Vec::new(), _read: Vec::new() };
        for span in step.spans {
            let written = step.written_pages_of(span);
            for page in written {
                pages.written.push(self.0.target(page.slot())?);
            }
            // A page in use never moves, which is the scheduler's promise; taking a loan of each
            // would cost a step as much as its contexts are long.
            if cfg!(debug_assertions) {
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
    /// By page.
    written: Vec<Target>,
    _read: Vec<Source>,
}

impl StepPages<'_> {
    /// The elements of a page that the step reads or has written.
    #[must_use]
    pub fn read(&self, page: DevicePage) -> &[f32] {
        let (start, elements) = self.locate(page);
        // SAFETY: the page lies in the arena, which is aligned for any element and outlives `self`.
        // Nobody else writes to it: pages that the step writes to are lent to it alone and need
        // `&mut self`, and the scheduler starts no transfer into a page that a step reads.
        unsafe { std::slice::from_raw_parts(start, elements) }
    }

    /// The elements of a page that the step writes to.
    ///
    /// # Panics
    /// When the page is not one of those.
    pub fn write(&mut self, page: DevicePage) -> &mut [f32] {
        let lent = self.written.binary_search_by_key(&page.slot(), Target::page);
        assert!(lent.is_ok(), "the step does not write to {page:?}");
        let (start, elements) = self.locate(page);
        // SAFETY: the page lies in the arena and is lent for writing to this step alone; `&mut self`
        // keeps the step's own readers away.
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
    use std::sync::mpsc;
    use std::time::Duration;

    use terrace_cache::{Cache, CacheConfig, DevicePages, HostPages};
    use terrace_scheduler::Slot;

    use super::*;
    use crate::batch::{PageTable, Span};

    const PAGE_SIZE: u32 = 4;
    const SOON: Duration = Duration::from_secs(10);

    fn pages(count: usize) -> (DevicePages, HostPages) {
        let config = CacheConfig { host_pages: 8, ..CacheConfig::default() };
        let mut cache = Cache::new(&config);
        (cache.take_device_pages(count).unwrap(), cache.take_host_pages(count).unwrap())
    }

    fn job(
        direction: CopyDirection,
        pages: &(DevicePages, HostPages),
        after: Option<StepId>,
    ) -> (CopyJob, mpsc::Receiver<Result<(), CopyError>>) {
        let (sender, receiver) = mpsc::channel();
        let job = CopyJob {
            direction,
            device_pages: pages.0.as_slice().to_vec(),
            host_pages: pages.1.as_slice().to_vec(),
            after,
            done: Box::new(move |copied| sender.send(copied).unwrap()),
        };
        (job, receiver)
    }

    #[test]
    fn a_copy_waits_for_the_step_that_writes_its_pages() {
        let device = CpuDevice::new(8, 8, 4096).unwrap();
        let pages = pages(1);
        let (copy, done) = job(CopyDirection::WriteBack, &pages, Some(StepId(3)));
        device.start_copy(copy);
        device.step_ended(StepId(2));
        assert!(done.recv_timeout(Duration::from_millis(30)).is_err(), "step 3 has not ended");
        device.memory.0.target(pages.0.as_slice()[0].slot()).unwrap().fill(7);
        device.step_ended(StepId(3));
        done.recv_timeout(SOON).unwrap().unwrap();
        let host = device.host().unwrap().source(pages.1.as_slice()[0].slot()).unwrap();
        assert_eq!(host[4095], 7, "it has what the step wrote");
    }

    #[test]
    fn bytes_go_to_host_and_back() {
        let device = CpuDevice::new(8, 8, 4096).unwrap();
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
    fn a_copy_of_a_page_in_use_fails() {
        let device = CpuDevice::new(8, 8, 4096).unwrap();
        let pages = pages(1);
        let _in_use = device.host().unwrap().target(pages.1.as_slice()[0].slot()).unwrap();
        let (copy, done) = job(CopyDirection::WriteBack, &pages, None);
        device.start_copy(copy);
        assert!(done.recv_timeout(SOON).unwrap().is_err());
    }

    #[test]
    fn a_step_has_the_pages_that_it_writes_to_itself() {
        let memory = CpuMemory::new(8, 4096).unwrap();
        let pages = pages(3).0;
        let mut table = PageTable::new(1, PAGE_SIZE);
        table.set(Slot(0), 0, pages.as_slice());
        let span = Span { slot: Slot(0), start: 6, tokens: 0..4, logits: 0 };
        let step = Step { spans: &[span], tokens: &[0; 4], table: &table };
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
