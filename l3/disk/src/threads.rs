//! IO engine with blocking threads, for kernels without io_uring.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};
use rustix::io::retry_on_intr;

use super::engine::{Engine, join};
use super::io::{Direction, DiskFile, Transfer};
use super::joined::Joined;

#[derive(Debug)]
pub(super) struct Threads {
    queue: Arc<TransferQueue>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct TransferQueue {
    data: File,
    index: File,
    waiting: Mutex<QueuedTransfers>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueuedTransfers {
    joined: VecDeque<Joined>,
    closed: bool,
}

impl Threads {
    pub(super) fn new(data: File, index: File, depth: usize) -> io::Result<Self> {
        let waiting = Mutex::new(QueuedTransfers::default());
        let queue = Arc::new(TransferQueue { data, index, waiting, changed: Condvar::new() });
        let work = |number: usize| {
            let queue = queue.clone();
            std::thread::Builder::new()
                .name(format!("terrace-disk-{number}"))
                .spawn(move || queue.work())
        };
        // If one fails to start, dropping this ends the others.
        let mut threads = Self { queue: queue.clone(), workers: Vec::new() };
        for number in 0..depth {
            threads.workers.push(work(number)?);
        }
        Ok(threads)
    }
}

impl Engine for Threads {
    fn start(&self, transfers: Vec<Transfer>) {
        self.queue.waiting.lock().joined.extend(Joined::all(transfers));
        self.queue.changed.notify_all();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue.waiting.lock().closed = true;
        self.queue.changed.notify_all();
        self.workers.drain(..).for_each(join);
    }
}

impl TransferQueue {
    fn work(&self) {
        loop {
            let mut waiting = self.waiting.lock();
            let joined = loop {
                if let Some(joined) = waiting.joined.pop_front() {
                    break joined;
                }
                if waiting.closed {
                    return;
                }
                self.changed.wait(&mut waiting);
            };
            drop(waiting);
            let moved = self.perform(&joined);
            for alone in joined.finish(moved) {
                let moved = self.perform(&alone);
                assert!(alone.finish(moved).is_empty(), "one transfer ends at the first attempt");
            }
        }
    }

    fn perform(&self, joined: &Joined) -> io::Result<usize> {
        let file = match joined.file() {
            DiskFile::Data => &self.data,
            DiskFile::Index => &self.index,
        };
        let mut vectors = joined.vectors();
        // SAFETY: an `IoVector` has the layout of the slices that rustix expects, which is that of
        // the kernel's `iovec`. The transfers own the memory until they are finished, and only
        // reads write to it.
        let moved = retry_on_intr(|| unsafe {
            let (start, count) = (vectors.as_mut_ptr(), vectors.len());
            match joined.direction() {
                Direction::Read => {
                    let slices = std::slice::from_raw_parts_mut(start.cast(), count);
                    rustix::io::preadv(file, slices, joined.offset())
                }
                Direction::Write => {
                    let slices = std::slice::from_raw_parts(start.cast(), count);
                    rustix::io::pwritev(file, slices, joined.offset())
                }
            }
        });
        moved.map_err(io::Error::from)
    }
}
