//! Write-behind: objects that memory has accepted and that are still to be written to disk.
//!
//! Their slots are lent to the writer, so memory keeps them until they are on disk. Until then they
//! are claimed, like every object that is being changed: a call that changes an object waits for
//! the claims of others, and then finds the object on disk, like any other.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{may_be_in_memory_only, remove_stray};
use crate::DiskStore;
use terrace_l3::backend::SlotLoan;
use terrace_l3::{Figure, Header, MemoryStore, ObjectId, Put, PutOptions, Store, Stored};

/// Maximum number of batches written concurrently; each has several transfers in flight.
const WRITERS: usize = 4;

/// Idle time after which batches are written, without a call that stores or loads. Longer than the
/// gap between two steps of an engine.
const IDLE_BEFORE_FLUSH: Duration = Duration::from_millis(50);

/// Interval of checks whether a call waits for an object that is to be written.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Maximum time that a batch waits for idleness. Writing competes with calls that store or load for
/// processor and memory bandwidth.
const FLUSH_DELAY_MAX: Duration = Duration::from_millis(250);

/// Statistics of write-behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteBehindStats {
    /// Objects written to the disk.
    pub written: u64,
    /// Objects that the disk refused.
    pub failed: u64,
    /// Objects still to be written.
    pub unwritten: u64,
}

/// Write-behind of a store. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct WriteBehind {
    shared: Arc<WriteBehindCore>,
}

#[derive(Debug)]
struct WriteBehindCore {
    /// If false, everything is written to disk first, and there is nothing to claim.
    is_on: bool,
    memory: MemoryStore,
    disk: DiskStore,
    /// Generation 0 stands for all generations of an object.
    claimed: Mutex<HashSet<ObjectId>>,
    fewer_claimed: Notify,
    /// Number of calls that wait for another's claim.
    waiting: AtomicUsize,
    calls: Mutex<Calls>,
    /// Held by the oldest batch while it waits for idleness; the others wait for the lock.
    oldest: tokio::sync::Mutex<()>,
    /// Slots that may be waiting for the disk: half of them, so that others than frequently read
    /// ones can be evicted.
    room: Arc<Semaphore>,
    writers: Semaphore,
    taken: AtomicU64,
    written: AtomicU64,
    failed: AtomicU64,
}

/// Calls that store or load.
#[derive(Clone, Copy, Debug)]
struct Calls {
    under_way: usize,
    last_ended: Instant,
}

/// Guard of a call that stores or loads.
#[derive(Debug)]
pub(super) struct Transfers<'a>(&'a Mutex<Calls>);

/// Guard of a call that waits for a claim.
struct ClaimWaiter<'a>(&'a AtomicUsize);

/// Exclusive right to change some objects, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    behind: WriteBehind,
    objects: SmallVec<[ObjectId; 1]>,
}

/// An object that memory has accepted.
#[derive(Debug)]
pub(super) struct Unwritten {
    loan: SlotLoan,
    id: ObjectId,
    _room: OwnedSemaphorePermit,
    // Dropped last: the slot is returned before another call may change the object.
    _claim: Claim,
}

impl WriteBehind {
    pub(super) fn new(is_on: bool, memory: MemoryStore, disk: DiskStore) -> Self {
        let slots = memory.arena().pages() as usize;
        let shared = WriteBehindCore {
            is_on,
            memory,
            disk,
            claimed: Mutex::default(),
            fewer_claimed: Notify::new(),
            waiting: AtomicUsize::new(0),
            calls: Mutex::new(Calls { under_way: 0, last_ended: Instant::now() }),
            oldest: tokio::sync::Mutex::default(),
            room: Arc::new(Semaphore::new(slots / 2)),
            writers: Semaphore::new(WRITERS),
            taken: AtomicU64::new(0),
            written: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns true if puts with these options may be in memory before they are on disk.
    pub(super) fn allows(&self, options: PutOptions) -> bool {
        self.shared.is_on && !options.durable && options.pin.is_none()
    }

    /// Stores an object in memory, to be [written](Self::write) later; `None` if it must go to disk
    /// first.
    pub(super) fn take(&self, put: &Put, unwritten: &mut Vec<Unwritten>) -> Option<Stored> {
        let WriteBehindCore { memory, disk, room, .. } = &*self.shared;
        let id = put.id;
        // Only the disk knows what a generation replaces.
        if id.generation > 0 {
            return None;
        }
        let Some(claim) = self.try_claim(&[id]) else {
            // Usually it is waiting for the disk.
            return memory.contains(&id).then_some(Stored::AlreadyThere);
        };
        // The disk is authoritative for objects that it knows.
        if disk.knows(&id) {
            return None;
        }
        let room = room.clone().try_acquire_owned().ok()?;
        match memory.put_and_lend(put) {
            Ok(Some(loan)) => {
                self.shared.taken.fetch_add(1, Ordering::Relaxed);
                unwritten.push(Unwritten { loan, id, _room: room, _claim: claim });
                Some(Stored::New)
            }
            Ok(None) => Some(Stored::AlreadyThere),
            // There is no slot, or another call is writing this object.
            Err(_) => None,
        }
    }

    /// Registers a call that stores or loads; `None` if write-behind is off.
    pub(super) fn transfers(&self) -> Option<Transfers<'_>> {
        self.shared.is_on.then(|| {
            self.shared.calls.lock().under_way += 1;
            Transfers(&self.shared.calls)
        })
    }

    /// Writes objects to the disk in the background.
    pub(super) fn write(&self, unwritten: Vec<Unwritten>) {
        if !unwritten.is_empty() {
            let (behind, until) = (self.clone(), Instant::now() + FLUSH_DELAY_MAX);
            tokio::spawn(async move {
                behind.wait_for_idle(until).await;
                behind.write_all(unwritten).await;
            });
        }
    }

    pub(super) async fn wait_for_idle(&self, until: Instant) {
        let WriteBehindCore { memory, waiting, calls, oldest, room, .. } = &*self.shared;
        let _oldest = oldest.lock().await;
        loop {
            let now = Instant::now();
            let Calls { under_way, last_ended } = *calls.lock();
            let is_quiet = under_way == 0 && now >= last_ended + IDLE_BEFORE_FLUSH;
            let is_wanted = waiting.load(Ordering::Relaxed) > 0;
            let is_room_short = room.available_permits() < memory.arena().pages() as usize / 4;
            if is_quiet || is_wanted || is_room_short || now >= until {
                break;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn write_all(&self, unwritten: Vec<Unwritten>) {
        let WriteBehindCore { memory, disk, writers, written, failed, .. } = &*self.shared;
        let _turn = writers.acquire().await.expect("it is never closed");
        let puts: Vec<Put> = unwritten.iter().filter_map(Unwritten::put).collect();
        let ids: Vec<ObjectId> = puts.iter().map(|put| put.id).collect();
        failed.fetch_add((unwritten.len() - puts.len()) as u64, Ordering::Relaxed);
        let results = disk.put_from(puts, PutOptions::default()).await;
        for (id, result) in ids.iter().zip(results) {
            match result {
                Ok(Stored::New | Stored::AlreadyThere) => written.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    if !may_be_in_memory_only(id, PutOptions::default(), &error) {
                        remove_stray(memory, id).await;
                    }
                    failed.fetch_add(1, Ordering::Relaxed)
                }
            };
        }
        drop(unwritten);
    }

    /// Claims objects as soon as no other claim has any of them.
    pub(super) async fn claim(&self, ids: impl Iterator<Item = &ObjectId>) -> Claim {
        let mut objects = Vec::new();
        if self.shared.is_on {
            objects.extend(ids.map(|id| id.with_generation(0)));
            objects.sort_unstable();
            objects.dedup();
        }
        let mut waiting = None;
        loop {
            let mut fewer = std::pin::pin!(self.shared.fewer_claimed.notified());
            fewer.as_mut().enable();
            if let Some(claim) = self.try_claim(&objects) {
                return claim;
            }
            waiting.get_or_insert_with(|| ClaimWaiter::new(&self.shared.waiting));
            fewer.await;
        }
    }

    fn try_claim(&self, objects: &[ObjectId]) -> Option<Claim> {
        let mut claimed = self.shared.claimed.lock();
        if objects.iter().any(|id| claimed.contains(id)) {
            return None;
        }
        claimed.extend(objects.iter().copied());
        Some(Claim { behind: self.clone(), objects: objects.into() })
    }

    /// Waits until all objects that are waiting for the disk have been written.
    pub(super) async fn settled(&self) {
        let now: Vec<ObjectId> = self.shared.claimed.lock().iter().copied().collect();
        drop(self.claim(now.iter()).await);
    }

    /// Statistics, if write-behind is on.
    pub(super) fn stats(&self) -> Option<WriteBehindStats> {
        let WriteBehindCore { is_on, taken, written, failed, .. } = &*self.shared;
        let [written, failed, taken] =
            [written, failed, taken].map(|counter| counter.load(Ordering::Relaxed));
        let unwritten = taken.saturating_sub(written + failed);
        is_on.then_some(WriteBehindStats { written, failed, unwritten })
    }
}

impl WriteBehindStats {
    /// Metrics of these statistics.
    #[must_use]
    pub fn figures(&self) -> Vec<Figure> {
        vec![
            Figure::counters(
                "terrace_l3_written_behind_total",
                "Objects that were in memory first, by outcome of writing them to disk.",
                "outcome",
                [("written", self.written), ("failed", self.failed)],
            ),
            Figure::gauge(
                "terrace_l3_unwritten_objects",
                "Objects in memory that are not on disk yet.",
                self.unwritten,
            ),
        ]
    }
}

impl Unwritten {
    /// Put with the header under which memory accepted the object: if its bytes have changed since,
    /// readers detect it. `None` if the header itself is damaged.
    fn put(&self) -> Option<Put> {
        let source = self.loan.source();
        let header = Header::verify(self.loan.header(), &self.id, source.len() as u64).ok()?;
        Some(Put::described(&header, source.share()))
    }
}

impl<'a> ClaimWaiter<'a> {
    fn new(all: &'a AtomicUsize) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(all)
    }
}

impl Drop for ClaimWaiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Transfers<'_> {
    fn drop(&mut self) {
        let mut calls = self.0.lock();
        calls.under_way -= 1;
        calls.last_ended = Instant::now();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.objects.is_empty() {
            let mut claimed = self.behind.shared.claimed.lock();
            for id in &self.objects {
                claimed.remove(id);
            }
            drop(claimed);
            self.behind.shared.fewer_claimed.notify_waiters();
        }
    }
}
