//! Statistics of a device, for metrics.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::driver::DeviceMemory;

/// Statistics of a device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaStats {
    /// Copies from host to device.
    pub to_device: LinkStats,
    /// Copies from device to host.
    pub to_host: LinkStats,
    /// Device memory; zero if the device is lost.
    pub memory: DeviceMemory,
}

/// Traffic over the link in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Bytes of completed copies.
    pub bytes: u64,
    /// Time during which copies were in flight.
    pub busy: Duration,
    /// Parts of copies done by the copy kernel.
    pub by_kernel: u64,
    /// Parts of copies done by copy engines.
    pub by_batch: u64,
    /// Copies that failed.
    pub failed: u64,
    /// Pages that were compared on both sides.
    pub pages_compared: u64,
    /// Pages that differed.
    pub pages_corrupt: u64,
}

/// Counters of [`LinkStats`].
#[derive(Debug, Default)]
pub(crate) struct LinkCounts {
    bytes: AtomicU64,
    busy_ns: AtomicU64,
    by_kernel: AtomicU64,
    by_batch: AtomicU64,
    failed: AtomicU64,
    pages_compared: AtomicU64,
    pages_corrupt: AtomicU64,
}

impl LinkCounts {
    pub(crate) fn copied(&self, bytes: usize, busy: Duration) {
        add(&self.bytes, bytes as u64);
        add(&self.busy_ns, u64::try_from(busy.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn by_kernel(&self) {
        add(&self.by_kernel, 1);
    }

    pub(crate) fn by_batch(&self) {
        add(&self.by_batch, 1);
    }

    pub(crate) fn failed(&self) {
        add(&self.failed, 1);
    }

    pub(crate) fn compared(&self, pages: usize, corrupt: usize) {
        add(&self.pages_compared, pages as u64);
        add(&self.pages_corrupt, corrupt as u64);
    }

    pub(crate) fn snapshot(&self) -> LinkStats {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LinkStats {
            bytes: of(&self.bytes),
            busy: Duration::from_nanos(of(&self.busy_ns)),
            by_kernel: of(&self.by_kernel),
            by_batch: of(&self.by_batch),
            failed: of(&self.failed),
            pages_compared: of(&self.pages_compared),
            pages_corrupt: of(&self.pages_corrupt),
        }
    }
}

fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}
