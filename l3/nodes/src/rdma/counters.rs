//! What was done, counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// What all links of a device have done on this side. Pages that peers read from here cost this side
/// nothing and so appear nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads given to the adapter: one for each contiguous piece.
    pub reads: u64,
    /// How many bytes they asked for.
    pub bytes: u64,
    /// Completions that the adapter reported.
    pub completions: u64,
    /// How often the adapter woke this process.
    pub wake_ups: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counting {
    reads: AtomicU64,
    bytes: AtomicU64,
    completions: AtomicU64,
    wake_ups: AtomicU64,
}

impl Counting {
    pub(super) fn posted(&self, reads: usize, bytes: usize) {
        self.reads.fetch_add(reads as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn completed(&self, completions: usize) {
        self.completions.fetch_add(completions as u64, Ordering::Relaxed);
    }

    pub(super) fn woken(&self) {
        self.wake_ups.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Counters {
        Counters {
            reads: self.reads.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            completions: self.completions.load(Ordering::Relaxed),
            wake_ups: self.wake_ups.load(Ordering::Relaxed),
        }
    }
}
