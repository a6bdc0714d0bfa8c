//! Writing behind: objects that memory has taken, and that are still on their way to the disk.
//!
//! Their slots are lent to whoever writes them, so memory keeps them until the disk has them too. Until then they are
//! claimed, and so is whatever else is being changed: who wants to change an object waits for the claim of another, and
//! so finds what was on its way on disk, like any other.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{memory_may_stand_in, take_back};
use crate::DiskStore;
use terrace_l3::backend::SlotLoan;
use terrace_l3::{Figure, Header, MemoryStore, ObjectId, Put, PutOptions, Store, Stored};

/// Batches that are written at a time; the disk itself has several transfers of each under way.
const WRITERS: usize = 4;

/// Nobody has stored or loaded for so long: more than there is between two steps of an engine.
const QUIET: Duration = Duration::from_millis(50);

/// Whether somebody waits for what is to be written is looked at so often.
const LOOK: Duration = Duration::from_millis(5);

/// Batches wait so long for quiet. Whoever stores or loads waits for the processor and for memory, which writing would
/// take from it.
const PATIENCE: Duration = Duration::from_millis(250);

/// How writing behind goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteBehindStats {
    /// Objects that were written to the disk.
    pub written: u64,
    /// Objects that the disk did not take.
    pub failed: u64,
    /// Objects that are still on their way.
    pub unwritten: u64,
}

/// Clones are the same.
#[derive(Clone, Debug)]
pub(super) struct WriteBehind {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// If not, everything goes to the disk first, and there is nothing to claim.
    is_on: bool,
    memory: MemoryStore,
    disk: DiskStore,
    /// Generation 0 stands for all of an object.
    claimed: Mutex<HashSet<ObjectId>>,
    fewer_claimed: Notify,
    /// Those who wait for somebody else's claim to end.
    waiting: AtomicUsize,
    calls: Mutex<Calls>,
    /// The oldest batch waits for quiet, and the others for it.
    oldest: tokio::sync::Mutex<()>,
    /// Slots that may be on their way to the disk: half of them, so that there are others to evict than those which
    /// are read again and again.
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

/// A call that stores or loads, until this is dropped.
#[derive(Debug)]
pub(super) struct Transfers<'a>(&'a Mutex<Calls>);

/// Somebody waits for a claim to end until this is dropped.
struct Waiting<'a>(&'a AtomicUsize);

/// Objects that nobody else changes until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    behind: WriteBehind,
    objects: SmallVec<[ObjectId; 1]>,
}

/// An object that memory has taken.
#[derive(Debug)]
pub(super) struct Unwritten {
    loan: SlotLoan,
    id: ObjectId,
    _room: OwnedSemaphorePermit,
    // The last to go: the slot is given back before anybody else may change the object.
    _claim: Claim,
}

impl WriteBehind {
    pub(super) fn new(is_on: bool, memory: MemoryStore, disk: DiskStore) -> Self {
        let slots = memory.arena().pages() as usize;
        let shared = Shared {
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

    /// Whether such puts may be in memory before they are on disk.
    pub(super) fn allows(&self, options: PutOptions) -> bool {
        self.shared.is_on && !options.durable && options.pin.is_none()
    }

    /// Has memory take an object, which is then to be [written](Self::write); `None` if it must go to the disk
    /// first.
    pub(super) fn take(&self, put: &Put, unwritten: &mut Vec<Unwritten>) -> Option<Stored> {
        let Shared { memory, disk, room, .. } = &*self.shared;
        let id = put.id;
        // Only the disk knows what a generation replaces.
        if id.generation > 0 {
            return None;
        }
        let Some(claim) = self.try_claim(&[id]) else {
            // Mostly it is on its way to the disk.
            return memory.contains(&id).then_some(Stored::AlreadyThere);
        };
        // The disk has the say about what it knows.
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
            // There is no slot, or somebody else is writing this object.
            Err(_) => None,
        }
    }

    /// Somebody begins to store or to load; nobody waits for the end of it if this is off.
    pub(super) fn transfers(&self) -> Option<Transfers<'_>> {
        self.shared.is_on.then(|| {
            self.shared.calls.lock().under_way += 1;
            Transfers(&self.shared.calls)
        })
    }

    /// Writes objects to the disk, without anybody waiting for it.
    pub(super) fn write(&self, unwritten: Vec<Unwritten>) {
        if !unwritten.is_empty() {
            let (behind, until) = (self.clone(), Instant::now() + PATIENCE);
            tokio::spawn(async move {
                behind.wait_for_quiet(until).await;
                behind.write_all(unwritten).await;
            });
        }
    }

    pub(super) async fn wait_for_quiet(&self, until: Instant) {
        let Shared { memory, waiting, calls, oldest, room, .. } = &*self.shared;
        let _oldest = oldest.lock().await;
        loop {
            let now = Instant::now();
            let Calls { under_way, last_ended } = *calls.lock();
            let is_quiet = under_way == 0 && now >= last_ended + QUIET;
            let is_wanted = waiting.load(Ordering::Relaxed) > 0;
            let is_room_short = room.available_permits() < memory.arena().pages() as usize / 4;
            if is_quiet || is_wanted || is_room_short || now >= until {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn write_all(&self, unwritten: Vec<Unwritten>) {
        let Shared { memory, disk, writers, written, failed, .. } = &*self.shared;
        let _turn = writers.acquire().await.expect("it is never closed");
        let puts: Vec<Put> = unwritten.iter().filter_map(Unwritten::put).collect();
        let ids: Vec<ObjectId> = puts.iter().map(|put| put.id).collect();
        failed.fetch_add((unwritten.len() - puts.len()) as u64, Ordering::Relaxed);
        let results = disk.put_from(puts, PutOptions::default()).await;
        for (id, result) in ids.iter().zip(results) {
            match result {
                Ok(Stored::New | Stored::AlreadyThere) => written.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    if !memory_may_stand_in(id, PutOptions::default(), &error) {
                        take_back(memory, id).await;
                    }
                    failed.fetch_add(1, Ordering::Relaxed)
                }
            };
        }
        drop(unwritten);
    }

    /// Claims objects as soon as nobody else has a claim to any of them.
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
            waiting.get_or_insert_with(|| Waiting::new(&self.shared.waiting));
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

    /// Waits until all that is on its way to the disk now has got there.
    pub(super) async fn settled(&self) {
        let now: Vec<ObjectId> = self.shared.claimed.lock().iter().copied().collect();
        drop(self.claim(now.iter()).await);
    }

    /// How it goes, if it is on.
    pub(super) fn stats(&self) -> Option<WriteBehindStats> {
        let Shared { is_on, taken, written, failed, .. } = &*self.shared;
        let [written, failed, taken] =
            [written, failed, taken].map(|counter| counter.load(Ordering::Relaxed));
        let unwritten = taken.saturating_sub(written + failed);
        is_on.then_some(WriteBehindStats { written, failed, unwritten })
    }
}

impl WriteBehindStats {
    /// The same for people who watch.
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
    /// With the header under which memory took it: should its bytes have changed since, nobody takes them for sound.
    /// `None` if the header itself is damaged.
    fn put(&self) -> Option<Put> {
        let source = self.loan.source();
        let header = Header::verify(self.loan.header(), &self.id, source.len() as u64).ok()?;
        Some(Put::described(&header, source.share()))
    }
}

impl<'a> Waiting<'a> {
    fn new(all: &'a AtomicUsize) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(all)
    }
}

impl Drop for Waiting<'_> {
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
