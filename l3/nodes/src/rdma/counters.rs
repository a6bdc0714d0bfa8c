//! Counters of a device.

use std::sync::atomic::{AtomicU64, Ordering};

/// Activity of all links of a device on this side. Reads by peers do not involve this side and are
/// not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads posted to the adapter: one per contiguous piece.
    pub reads: u64,
    /// Bytes that they requested.
    pub bytes: u64,
    /// Completions that the adapter reported.
    pub completions: u64,
    /// Times that the adapter woke this process.
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
