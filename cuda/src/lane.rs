//! The copies of one direction: a stream, and a thread that submits copies to it and waits for
//! them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use terrace_engine::{CopyError, CopyJob, CopyProgress};
use terrace_scheduler::CopyDirection;

use crate::canary::Sampler;
use crate::driver::Event;
use crate::error::CudaError;
use crate::fence::CudaFence;
use crate::groups::groups;
use crate::transfer::{Copier, HandedOver, Milestone, Order};

type Done = Box<dyn FnOnce(Result<(), CopyError>) + Send>;

/// Reason why the device is lost, once it is. Shared by all lanes of a device.
pub(crate) type Broken = Arc<OnceLock<String>>;

/// A thread that runs the copies of one direction in order. Dropping it waits for copies in flight.
#[derive(Debug)]
pub(crate) struct Lane {
    jobs: Option<mpsc::Sender<CopyJob<CudaFence>>>,
    thread: Option<JoinHandle<()>>,
    corrupt_next: Arc<AtomicBool>,
}

impl Lane {
    pub(crate) fn spawn(
        copier: Copier,
        sampler: Option<Sampler>,
        broken: Broken,
    ) -> Result<Self, CudaError> {
        let (jobs, receiver) = mpsc::channel();
        let corrupt_next = Arc::new(AtomicBool::new(false));
        let name = match copier.direction {
            CopyDirection::LoadBack => "terrace-to-device",
            CopyDirection::WriteBack => "terrace-to-host",
        };
        let worker = Worker {
            copier,
            sampler,
            broken,
            corrupt_next: corrupt_next.clone(),
            under_way: VecDeque::new(),
            spare_times: Vec::new(),
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || worker.run(&receiver)).map_err(CudaError::Thread)?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread), corrupt_next })
    }

    /// Starts a copy.
    pub(crate) fn start(&self, job: CopyJob<CudaFence>) {
        let rejected = match &self.jobs {
            Some(jobs) => jobs.send(job).err().map(|rejected| rejected.0),
            None => Some(job),
        };
        if let Some(job) = rejected {
            (job.done)(Err(CopyError::Failed("the copy thread has ended".to_owned())));
        }
    }

    /// Corrupts the next copy.
    pub(crate) fn corrupt_next(&self) {
        self.corrupt_next.store(true, Ordering::Relaxed);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

struct Worker {
    copier: Copier,
    sampler: Option<Sampler>,
    broken: Broken,
    corrupt_next: Arc<AtomicBool>,
    /// Copies in the stream, the oldest first.
    under_way: VecDeque<UnderWay>,
    /// Pairs of timing events for reuse.
    spare_times: Vec<[Event; 2]>,
}

/// A copy in the stream.
struct UnderWay {
    copy: HandedOver,
    pages: usize,
    progress: CopyProgress,
    done: Done,
    times: [Event; 2],
}

impl Worker {
    fn run(mut self, jobs: &mpsc::Receiver<CopyJob<CudaFence>>) {
        if let Err(error) = self.copier.driver.bind_thread() {
            self.break_down(&error.into());
        }
        let mut is_open = true;
        loop {
            while is_open && self.under_way.len() < self.depth() {
                let job = if self.under_way.is_empty() {
                    jobs.recv().map_err(|_| TryRecvError::Disconnected)
                } else {
                    jobs.try_recv()
                };
                match job {
                    Ok(job) => self.begin(job),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => is_open = false,
                }
            }
            if self.under_way.is_empty() && !is_open {
                return;
            }
            self.wait_for_next();
        }
    }

    /// Returns the largest number of copies in the stream. It is high enough that the link never
    /// waits for this thread, and low enough that most copies can still be cancelled. It is higher
    /// for load-backs, because a step can wait on the device only for copies in the stream.
    fn depth(&self) -> usize {
        match self.copier.direction {
            CopyDirection::LoadBack => 8,
            CopyDirection::WriteBack => 2,
        }
    }

    fn begin(&mut self, job: CopyJob<CudaFence>) {
        if let Some(reason) = self.broken.get() {
            let failed = CopyError::Failed(format!("the GPU has failed before: {reason}"));
            return self.end(job.done, Err(failed));
        }
        if job.progress.is_called_off() {
            return self.end(job.done, Err(CopyError::CalledOff));
        }
        if job.device_pages.is_empty() && job.host_pages.is_empty() {
            return self.end(job.done, Ok(()));
        }
        if job.device_pages.len() != job.host_pages.len() {
            let failed = "the numbers of device pages and host pages differ".to_owned();
            return self.end(job.done, Err(CopyError::Failed(failed)));
        }
        self.hand_over(job);
    }

    fn hand_over(&mut self, job: CopyJob<CudaFence>) {
        let CopyJob { device_pages, host_pages, after, progress, done, .. } = job;
        let pages = device_pages.len();
        let samples = self.sampler.as_mut().map(|sampler| sampler.next(pages)).unwrap_or_default();
        let count = Copier::places(pages, samples.len());
        let places = loop {
            match self.copier.lists.take(count) {
                Some(places) => break places,
                None if self.under_way.is_empty() => {
                    let failed = format!("{pages} pages are more than the device has");
                    return self.end(done, Err(CopyError::Failed(failed)));
                }
                None => self.wait_for_next(),
            }
        };
        let times = match self.times() {
            Ok(times) => times,
            Err(error) => {
                self.break_down(&error);
                self.copier.lists.give_back_newest();
                return self.end(done, Err(CopyError::Failed(error.to_string())));
            }
        };
        let copy = HandedOver::nothing(samples);
        // Stored before submission: if this thread panics, its pages stay borrowed until the device
        // has ended with them.
        self.under_way.push_back(UnderWay { copy, pages, progress, done, times });
        let newest = self.under_way.back_mut().expect("it was just put there");
        let (layout, direction) = (self.copier.ends.memory.layout(), self.copier.direction);
        let order = Order {
            device_pages: &device_pages,
            host_pages: &host_pages,
            groups: groups(layout, direction, pages),
            after: after.as_ref(),
            times,
            places,
            is_corrupted: self.corrupt_next.swap(false, Ordering::Relaxed),
        };
        match self.copier.hand_over(&order, &mut newest.copy) {
            Ok(()) if direction == CopyDirection::LoadBack => {
                newest.progress.mark(Arc::new(newest.copy.marks()));
            }
            Ok(()) => {}
            Err(error) => self.take_newest_back(error),
        }
    }

    /// Removes the newest copy, which was not submitted completely.
    fn take_newest_back(&mut self, error: CudaError) {
        let failed = match error {
            // The missing fence concerns only this copy; nothing was submitted.
            CudaError::NeverRecorded => CopyError::Failed(error.to_string()),
            // The pages are not available, but earlier portions of the copy may be in flight.
            CudaError::Copy(failed) => {
                let has_begun = self.under_way.back().is_some_and(|newest| newest.copy.has_begun());
                if has_begun && let Err(error) = self.copier.drain() {
                    self.break_down(&error);
                }
                failed
            }
            // Part of the copy may be in flight: its pages are kept until the streams are idle.
            error => {
                let _ = self.copier.drain();
                self.break_down(&error);
                CopyError::Failed(error.to_string())
            }
        };
        if let Some(UnderWay { copy, done, times, .. }) = self.under_way.pop_back() {
            drop(copy);
            self.copier.lists.give_back_newest();
            self.spare_times.push(times);
            self.end(done, Err(failed));
        }
    }

    /// Waits for the next milestone of the oldest copy, which may be its end.
    fn wait_for_next(&mut self) {
        if let Err(error) = self.pass_next() {
            // All work of the streams has ended when this returns; a lost device runs none.
            let _ = self.copier.drain();
            self.break_down(&error);
            self.fail_oldest(CopyError::Failed(error.to_string()));
        }
    }

    fn pass_next(&mut self) -> Result<(), CudaError> {
        let Some(UnderWay { copy, progress, .. }) = self.under_way.front_mut() else {
            return Ok(());
        };
        // The copy keeps its pages until the device is known to have ended with them.
        if let Some((fence, _)) = copy.milestones.front() {
            fence.wait()?;
        }
        match copy.milestones.pop_front() {
            Some((_, Milestone::Layers(layers))) => progress.arrive(layers),
            Some((_, Milestone::Ended(portion))) => self.copier.end(portion, copy),
            None => {}
        }
        if copy.milestones.is_empty() { self.end_oldest() } else { Ok(()) }
    }

    /// Completes the oldest copy.
    fn end_oldest(&mut self) -> Result<(), CudaError> {
        let Some(UnderWay { copy, pages, times, .. }) = self.under_way.front() else {
            return Ok(());
        };
        let busy = self.copier.driver.elapsed(times[0], times[1])?;
        match copy.verdict() {
            Ok(()) => {
                let bytes = pages * self.copier.ends.memory.page_bytes();
                self.copier.counts.copied(bytes, busy);
                let done = self.let_go_of_oldest();
                self.end_if_any(done, Ok(()));
            }
            Err(corrupt) => {
                tracing::error!("{corrupt}");
                self.fail_oldest(corrupt);
            }
        }
        Ok(())
    }

    fn fail_oldest(&mut self, error: CopyError) {
        let done = self.let_go_of_oldest();
        self.end_if_any(done, Err(error));
    }

    /// Releases all resources of the oldest copy.
    fn let_go_of_oldest(&mut self) -> Option<Done> {
        let UnderWay { copy, done, times, .. } = self.under_way.pop_front()?;
        drop(copy);
        self.copier.lists.give_back_oldest();
        self.spare_times.push(times);
        Some(done)
    }

    fn end_if_any(&self, done: Option<Done>, result: Result<(), CopyError>) {
        if let Some(done) = done {
            self.end(done, result);
        }
    }

    /// Reports the result of a copy that has released its pages.
    fn end(&self, done: Done, result: Result<(), CopyError>) {
        if matches!(result, Err(CopyError::Failed(_))) {
            self.copier.counts.failed();
        }
        // A panic of the callback must not affect other copies.
        let _ = catch_unwind(AssertUnwindSafe(|| done(result)));
    }

    /// Marks the device as lost.
    fn break_down(&self, error: &CudaError) {
        if self.broken.set(error.to_string()).is_ok() {
            tracing::error!(
                "the GPU has failed; no more copies between GPU and host are possible: {error}"
            );
        }
    }

    fn times(&mut self) -> Result<[Event; 2], CudaError> {
        if let Some(times) = self.spare_times.pop() {
            return Ok(times);
        }
        Ok(self.copier.driver.create_times()?)
    }
}

impl Drop for Worker {
    /// Copies are in flight only if the thread panics. Their pages are kept until the device has
    /// ended with them.
    fn drop(&mut self) {
        if !self.under_way.is_empty() {
            let _ = self.copier.drain();
        }
        while !self.under_way.is_empty() {
            self.fail_oldest(CopyError::Failed("the copy thread has panicked".to_owned()));
        }
        let driver = &self.copier.driver;
        self.spare_times.iter().flatten().for_each(|event| driver.destroy_event(*event));
    }
}
