//! What performs transfers, and what all of them need.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use super::io::Transfer;

/// Something that performs transfers.
pub(super) trait Engine: Send + Sync + fmt::Debug {
    fn start(&self, transfers: Vec<Transfer>);
}

/// Waits for a thread to end, unless it is this one: the last user of a disk may be a transfer of its
/// own.
pub(super) fn join(thread: JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        // A thread that panicked has said so itself.
        let _ = thread.join();
    }
}

/// Finishes a transfer. Whoever is told may run anything, a waker of the caller's for example; if that
/// panics it must not take along the thread that others' transfers depend on.
pub(super) fn finish(transfer: Transfer, moved: io::Result<usize>) {
    // The panic has been reported where it happened.
    let _ = catch_unwind(AssertUnwindSafe(|| transfer.finish(moved)));
}
