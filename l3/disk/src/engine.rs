//! IO engines and their shared helpers.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use super::io::Transfer;

/// Performs transfers.
pub(super) trait Engine: Send + Sync + fmt::Debug {
    fn start(&self, transfers: Vec<Transfer>);
}

/// Joins a thread, unless it is the current one: the last reference to a disk may be dropped by one
/// of its own transfers.
pub(super) fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        // A panic has been reported by the thread.
        let _ = thread.join();
    }
}

/// Finishes a transfer. Its callback may run arbitrary code, for example a waker of the caller. If
/// that panics, it must not end the thread that other transfers depend on.
pub(super) fn finish(transfer: Transfer, moved: io::Result<usize>) {
    // The panic has been reported where it happened.
    let _ = catch_unwind(AssertUnwindSafe(|| transfer.finish(moved)));
}
