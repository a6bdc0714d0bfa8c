//! Objects that this client has put or pinned in the bucket, in a catalogue.
//!
//! A departing object can be neither read nor put until the bucket has removed it. This includes an
//! object whose put may have taken effect although it failed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use terrace_l3::backend::{Catalogue, Departure, Departures, Slot, SlotUse};
use terrace_l3::{ObjectId, Pin, StoreError};

#[derive(Debug)]
pub(crate) struct BucketLedger {
    state: Mutex<BucketState>,
    changed: Notify,
    born: Instant,
}

#[derive(Debug)]
pub(crate) struct BucketState {
    pub(crate) catalogue: Catalogue,
    pub(crate) departures: Departures,
    /// Objects of other clients that are pinned here.
    adopted: BTreeSet<ObjectId>,
}

impl BucketLedger {
    pub(crate) fn new(slots: Slot) -> Self {
        let state = BucketState {
            catalogue: Catalogue::new(slots, slots),
            departures: Departures::default(),
            adopted: BTreeSet::new(),
        };
        Self { state: Mutex::new(state), changed: Notify::new(), born: Instant::now() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, BucketState> {
        self.state.lock()
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    /// Wakes all waiting calls.
    pub(crate) fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Waits briefly for a change. Returns false after `until`.
    pub(crate) async fn wait(&self, until: Instant) -> bool {
        const TURN: Duration = Duration::from_millis(20);
        let left = until.saturating_duration_since(Instant::now());
        let _ = tokio::time::timeout(left.min(TURN), self.changed.notified()).await;
        !left.is_zero()
    }

    /// Records that the bucket has removed the object.
    pub(crate) fn departed(&self, departure: Departure) {
        self.settle(departure, true);
    }

    /// Records that the bucket has not removed the object. One of ours stays unreadable; another
    /// client's is unaffected.
    pub(crate) fn stayed(&self, departure: Departure) {
        self.settle(departure, false);
    }

    fn settle(&self, departure: Departure, removed: bool) {
        let BucketState { departures, catalogue, .. } = &mut *self.lock();
        departures.end(departure, removed, catalogue);
        self.notify();
    }
}

impl BucketState {
    pub(crate) fn is_leaving(&self, id: &ObjectId) -> bool {
        self.departures.contains(id)
    }

    /// Starts the removal of an object. One of another client may be departing already.
    pub(crate) fn depart(&mut self, id: ObjectId, slot_use: SlotUse) -> Departure {
        self.adopted.remove(&id);
        self.departures.begin(id, slot_use)
    }

    /// Marks the object of a failed put, which may exist or appear later, for removal by the next retry.
    pub(crate) fn park(&mut self, id: ObjectId, slot: Slot) {
        self.adopted.remove(&id);
        self.departures.park(id, SlotUse::Begun(slot));
    }

    /// Starts the removal of all doomed objects.
    pub(crate) fn take_departures(&mut self) -> Vec<Departure> {
        let doomed = self.catalogue.take_doomed();
        self.depart_from(doomed)
    }

    /// Starts the removal of the objects in these doomed slots.
    pub(crate) fn depart_from(&mut self, slots: impl IntoIterator<Item = Slot>) -> Vec<Departure> {
        let depart = |slot| self.depart(self.catalogue.id(slot), SlotUse::Doomed(slot));
        slots.into_iter().map(depart).collect()
    }

    /// Publishes an existing object of another client, which belongs to this client until it is
    /// unpinned.
    pub(crate) fn adopt(&mut self, slot: Slot) -> Vec<Departure> {
        self.adopted.insert(self.catalogue.id(slot));
        let replaced = self.catalogue.publish(slot);
        self.depart_from(replaced)
    }

    /// Unpins an object. One of another client belongs to it again, and is not ours to evict.
    pub(crate) fn unpin(&mut self, id: &ObjectId, pin: Pin) -> Result<(), StoreError> {
        let slot = self.catalogue.unpin(id, pin)?;
        if self.adopted.contains(id) && !self.catalogue.is_pinned(id) {
            self.forget(id, slot);
        }
        Ok(())
    }

    /// Ends a read of an object that the bucket does not have any more.
    pub(crate) fn end_read_of_missing(&mut self, id: &ObjectId, slot: Slot) {
        self.catalogue.end_read(slot);
        self.forget(id, slot);
    }

    /// Forgets the object in this slot, if it still is this one.
    fn forget(&mut self, id: &ObjectId, slot: Slot) {
        if self.catalogue.find(id) == Some(slot) {
            self.adopted.remove(id);
            self.catalogue.doom(slot);
            self.catalogue.release_doomed();
        }
    }
}
