//! The state of jobs until Python drains those that have ended.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;

use super::figures::Figures;
use super::job::{Done, Kind};
use crate::errors::bad_argument;

/// Longest delay of Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

/// The jobs of one [`NativeTransfers`](super::NativeTransfers).
#[derive(Default)]
pub(super) struct Board {
    next: AtomicU64,
    state: Mutex<State>,
    /// Signalled when no job is in flight.
    idle: Condvar,
    signal: OnceLock<signal::Signal>,
}

#[derive(Default)]
struct State {
    pending: u64,
    ended: Vec<Ended>,
    figures: Figures,
}

/// An ended job.
pub(super) struct Ended {
    pub(super) number: u64,
    pub(super) kind: Kind,
    /// 255 for each failed key; otherwise the place of the object, or 1.
    pub(super) codes: Vec<u8>,
    /// Transferred bytes.
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    /// Message of the first error.
    pub(super) error: Option<String>,
}

/// A job in flight. Dropping it ends it, so that a panic leaves no waiter.
pub(super) struct Job {
    board: Arc<Board>,
    pub(super) number: u64,
    kind: Kind,
    keys: usize,
    /// True for a blocking call, whose result is not drained.
    is_waited_for: bool,
    since: Instant,
    is_over: bool,
}

impl Board {
    pub(super) fn begin(self: &Arc<Self>, kind: Kind, keys: usize, is_waited_for: bool) -> Job {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.state.lock().pending += 1;
        let (board, since) = (self.clone(), Instant::now());
        Job { board, number, kind, keys, is_waited_for, since, is_over: false }
    }

    /// Returns the ended jobs that were not drained yet, in order.
    pub(super) fn take(&self) -> Vec<Ended> {
        let mut state = self.state.lock();
        if let Some(signal) = self.signal.get() {
            signal.clear();
        }
        std::mem::take(&mut state.ended)
    }

    pub(super) fn pending(&self) -> u64 {
        self.state.lock().pending
    }

    pub(super) fn figures(&self) -> Figures {
        self.state.lock().figures.clone()
    }

    /// Waits until no job is in flight; returns false on timeout.
    pub(super) fn wait_idle(&self, python: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        let limit = seconds.map(Duration::try_from_secs_f64).transpose().map_err(bad_argument)?;
        let since = Instant::now();
        loop {
            let is_idle = python.detach(|| {
                let mut state = self.state.lock();
                if state.pending > 0 {
                    let left = limit.map(|limit| limit.saturating_sub(since.elapsed()));
                    self.idle.wait_for(&mut state, left.unwrap_or(SIGNALS).min(SIGNALS));
                }
                state.pending == 0
            });
            if is_idle || limit.is_some_and(|limit| since.elapsed() >= limit) {
                return Ok(is_idle);
            }
            python.check_signals()?;
        }
    }

    pub(super) fn event_fd(&self) -> PyResult<i32> {
        let state = self.state.lock();
        if self.signal.get().is_none() {
            let made = signal::Signal::new()?;
            if !state.ended.is_empty() {
                made.raise();
            }
            let _ = self.signal.set(made);
        }
        Ok(self.signal.get().expect("it is there").descriptor())
    }
}

impl Job {
    /// Records the result, and returns it to a blocking call.
    pub(super) fn end(mut self, done: Done) -> Option<Ended> {
        self.is_over = true;
        self.close(done)
    }

    fn close(&self, done: Done) -> Option<Ended> {
        let Done { codes, bytes, error, failures } = done;
        let (number, kind, seconds) = (self.number, self.kind, self.since.elapsed().as_secs_f64());
        let ended = Ended { number, kind, codes, bytes, seconds, error };
        let mut state = self.board.state.lock();
        state.figures.note(&ended, &failures);
        state.pending -= 1;
        if state.pending == 0 {
            self.board.idle.notify_all();
        }
        if self.is_waited_for {
            return Some(ended);
        }
        state.ended.push(ended);
        if let Some(signal) = self.board.signal.get() {
            signal.raise();
        }
        None
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if !self.is_over {
            self.close(Done::broken(self.keys));
        }
    }
}

#[cfg(target_os = "linux")]
mod signal {
    use std::io;
    use std::os::fd::{AsRawFd, OwnedFd};

    use rustix::event::{EventfdFlags, eventfd};

    /// A descriptor that is readable while it is raised.
    pub(super) struct Signal(OwnedFd);

    impl Signal {
        pub(super) fn new() -> io::Result<Self> {
            Ok(Self(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
        }

        pub(super) fn raise(&self) {
            // It fails only after 2^64 writes, when it is readable anyway.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }

        pub(super) fn clear(&self) {
            // It fails only if it is not raised.
            let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
        }

        pub(super) fn descriptor(&self) -> i32 {
            self.0.as_raw_fd()
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod signal {
    use std::io;

    /// Other systems have no such descriptor.
    pub(super) struct Signal;

    impl Signal {
        pub(super) fn new() -> io::Result<Self> {
            Err(io::Error::other("event_fd needs Linux: use drain or the calls that wait"))
        }

        pub(super) fn raise(&self) {}

        pub(super) fn clear(&self) {}

        pub(super) fn descriptor(&self) -> i32 {
            -1
        }
    }
}
