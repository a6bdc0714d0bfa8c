//! IO engine with io_uring: callers submit, one thread per ring reaps completions.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use io_uring::{IoUring, opcode, types};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::engine::{Engine, join};
use super::io::{Direction, DiskFile, IoVector, Transfer};
use super::joined::Joined;

#[derive(Debug)]
pub(super) struct Uring {
    rings: Vec<(Arc<KernelRing>, JoinHandle<()>)>,
    next: AtomicUsize,
}

struct KernelRing {
    kernel: IoUring,
    data: File,
    index: File,
    submission: Mutex<Submission>,
}

/// Submission side of a ring, for one thread at a time.
#[derive(Default)]
struct Submission {
    /// Calls in the kernel, indexed by their user data.
    in_flight: Vec<Option<KernelCall>>,
    unused: Vec<usize>,
    waiting: VecDeque<Joined>,
}

/// Joined transfers, and the vectors that point the kernel to their memory.
struct KernelCall {
    joined: Joined,
    vectors: Vec<IoVector>,
}

/// User data of the call that ends a ring's thread.
const CLOSE: u64 = u64::MAX;

impl Uring {
    /// Creates rings with `depth` calls in flight each, or returns the kernel's error.
    pub(super) fn new(data: &File, index: &File, rings: usize, depth: usize) -> io::Result<Self> {
        let ring = |number: usize| -> io::Result<_> {
            let ring = Arc::new(KernelRing {
                // One more for the call that closes the ring.
                kernel: IoUring::new((depth + 1).next_power_of_two() as u32)?,
                data: data.try_clone()?,
                index: index.try_clone()?,
                submission: Mutex::new(Submission {
                    in_flight: (0..depth).map(|_| None).collect(),
                    unused: (0..depth).rev().collect(),
                    waiting: VecDeque::new(),
                }),
            });
            let reaper =
                std::thread::Builder::new().name(format!("terrace-ring-{number}")).spawn({
                    let ring = ring.clone();
                    move || ring.reap()
                })?;
            Ok((ring, reaper))
        };
        // If one fails, dropping this ends the threads of the others.
        let mut uring = Self { rings: Vec::new(), next: AtomicUsize::new(0) };
        for number in 0..rings {
            uring.rings.push(ring(number)?);
        }
        Ok(uring)
    }
}

impl Engine for Uring {
    fn start(&self, transfers: Vec<Transfer>) {
        let all = Joined::all(transfers);
        let first = self.next.fetch_add(all.len(), Ordering::Relaxed);
        let mut shares: SmallVec<[Vec<Joined>; 4]> =
            self.rings.iter().map(|_| Vec::new()).collect();
        for (number, joined) in all.into_iter().enumerate() {
            shares[(first + number) % self.rings.len()].push(joined);
        }
        for ((ring, _), share) in self.rings.iter().zip(shares) {
            if !share.is_empty() {
                let mut submission = ring.submission.lock();
                submission.waiting.extend(share);
                ring.submit(&mut submission);
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        for (ring, reaper) in self.rings.drain(..) {
            ring.close();
            join(reaper);
        }
    }
}

impl KernelRing {
    /// Submits queued transfers, up to `depth` in flight.
    fn submit(&self, submission: &mut Submission) {
        // SAFETY: the lock that `submission` came from makes this the only use of the queue.
        let mut queue = unsafe { self.kernel.submission_shared() };
        let mut any = false;
        while !submission.waiting.is_empty() {
            let Some(number) = submission.unused.pop() else { break };
            let joined = submission.waiting.pop_front().expect("not empty");
            let vectors = joined.vectors();
            let file = types::Fd(match joined.file() {
                DiskFile::Data => self.data.as_raw_fd(),
                DiskFile::Index => self.index.as_raw_fd(),
            });
            let (start, count) = (vectors.as_ptr().cast(), vectors.len() as u32);
            let call = match joined.direction() {
                Direction::Read => {
                    opcode::Readv::new(file, start, count).offset(joined.offset()).build()
                }
                Direction::Write => {
                    opcode::Writev::new(file, start, count).offset(joined.offset()).build()
                }
            };
            submission.in_flight[number] = Some(KernelCall { joined, vectors });
            // SAFETY: the vectors and the transfers stay in place, on the heap and in `in_flight`,
            // until the kernel has completed the call; the transfers own the memory that the
            // vectors name.
            let pushed = unsafe { queue.push(&call.user_data(number as u64)) };
            pushed.expect("the queue has room for all that may be in flight");
            any = true;
        }
        drop(queue);
        if any {
            self.enter(submission);
        }
    }

    /// Passes the queue to the kernel until it is empty: the kernel may take a part of it when it
    /// is short of memory, and would not take the rest before the next call.
    fn enter(&self, _submission: &mut Submission) {
        // SAFETY: the lock that `_submission` came from makes this the only use of the queue.
        while !unsafe { self.kernel.submission_shared() }.is_empty() {
            if let Err(error) = self.kernel.submit() {
                let busy =
                    matches!(error.raw_os_error(), Some(code) if code == BUSY || code == AGAIN);
                assert!(busy || error.kind() == io::ErrorKind::Interrupted, "io_uring: {error}");
                std::thread::yield_now();
            }
        }
    }

    fn close(&self) {
        let mut submission = self.submission.lock();
        // SAFETY: the lock makes this the only use of the queue; the call uses no memory.
        let pushed = unsafe {
            self.kernel.submission_shared().push(&opcode::Nop::new().build().user_data(CLOSE))
        };
        pushed.expect("one place is kept for this");
        self.enter(&mut submission);
    }

    fn reap(&self) {
        let mut answers: Vec<(u64, i32)> = Vec::new();
        let mut ended: Vec<(Joined, i32)> = Vec::new();
        let mut again: Vec<Joined> = Vec::new();
        let mut closing = false;
        loop {
            // SAFETY: only this thread takes completions.
            answers.extend(
                unsafe { self.kernel.completion_shared() }
                    .map(|answer| (answer.user_data(), answer.result())),
            );
            if answers.is_empty() {
                // SAFETY: nothing is submitted here, so no memory is passed to the kernel.
                let waited =
                    unsafe { self.kernel.submitter().enter::<()>(0, 1, ENTER_GETEVENTS, None) };
                if let Err(error) = waited {
                    let harmless = error.kind() == io::ErrorKind::Interrupted
                        || error.raw_os_error() == Some(BUSY);
                    assert!(harmless, "io_uring: {error}");
                }
                continue;
            }
            let mut submission = self.submission.lock();
            for (number, result) in answers.drain(..) {
                if number == CLOSE {
                    closing = true;
                    continue;
                }
                let in_flight = submission.in_flight[number as usize].take();
                let KernelCall { joined, vectors } = in_flight.expect("the kernel answers once");
                drop(vectors);
                submission.unused.push(number as usize);
                ended.push((joined, result));
            }
            self.submit(&mut submission);
            // Memory that the kernel still writes to must outlive this thread.
            let idle = submission.unused.len() == submission.in_flight.len();
            drop(submission);
            for (joined, result) in ended.drain(..) {
                let moved = usize::try_from(result);
                again.extend(
                    joined.finish(moved.map_err(|_| io::Error::from_raw_os_error(-result))),
                );
            }
            if !again.is_empty() {
                let mut submission = self.submission.lock();
                submission.waiting.extend(again.drain(..));
                self.submit(&mut submission);
                continue;
            }
            if closing && idle {
                return;
            }
        }
    }
}

impl std::fmt::Debug for KernelRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ring")
    }
}

const AGAIN: i32 = 11;
const BUSY: i32 = 16;
/// Flag: wait for completions.
const ENTER_GETEVENTS: u32 = 1;

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::sync::mpsc;

    use super::super::io::{Blocks, Part, Parts};
    use super::*;

    #[test]
    fn dropping_a_ring_waits_for_calls_in_flight() {
        const BYTES: usize = 1 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 * BYTES as u64).unwrap();
        let (answer, answered) = mpsc::channel();
        let uring = Uring::new(&file, &file, 2, 8).unwrap();
        let transfer = |number: usize| {
            let answer = answer.clone();
            let parts = Parts::from_iter([Part::blocks(Blocks::for_bytes(BYTES))]);
            let done = move |result: io::Result<()>, _: Parts| answer.send(result).unwrap();
            let offset = (number * BYTES) as u64;
            Transfer::new(Direction::Write, DiskFile::Data, offset, parts, done)
        };
        uring.start((0..64).map(transfer).collect());
        drop((uring, answer));
        let results: Vec<_> = answered.iter().collect();
        let failed: Vec<_> = results.iter().filter(|result| result.is_err()).collect();
        assert_eq!(results.len(), 64);
        assert!(failed.is_empty(), "{} of 64: {:?}", failed.len(), failed[0]);
    }
}
