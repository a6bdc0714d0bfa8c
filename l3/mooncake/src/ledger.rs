//! Knowledge of this client about the cluster: a catalogue of the objects that it has put, and the
//! objects that it has seen there recently.
//!
//! Objects of other clients are not in the catalogue; they are looked up. A departing object can be
//! neither read nor put until the cluster has removed it, since the cluster would keep the old
//! value.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use terrace_l3::ObjectId;
use terrace_l3::backend::{Catalogue, Departure, Departures, Slot, SlotUse};

#[derive(Debug)]
pub(crate) struct ClusterLedger {
    state: Mutex<ClusterState>,
    changed: Condvar,
    born: Instant,
}

#[derive(Debug)]
pub(crate) struct ClusterState {
    pub(crate) catalogue: Catalogue,
    pub(crate) departures: Departures,
    pub(crate) seen: Seen,
    /// Objects with a hard pin in the cluster, which only a new put can remove, each with the time
    /// of its last unpin here.
    pub(crate) cluster_pinned: BTreeMap<ObjectId, Option<Instant>>,
    /// Objects with a hard pin of this client only: their leases are renewed.
    pub(crate) lease_pinned: BTreeSet<ObjectId>,
    /// Object that is briefly absent from the cluster, to be put again without the cluster's pin.
    /// That does not count as a use, so it may be evicted meanwhile.
    unpinning: Option<Unpinning>,
}

#[derive(Clone, Copy, Debug)]
struct Unpinning {
    id: ObjectId,
    /// The catalogue's entry under this id, if any, is a different object by now.
    was_forgotten: bool,
}

impl ClusterLedger {
    pub(crate) fn new(slots: Slot, seen: Seen) -> Self {
        let state = ClusterState {
            catalogue: Catalogue::new(slots, slots),
            departures: Departures::default(),
            seen,
            cluster_pinned: BTreeMap::new(),
            lease_pinned: BTreeSet::new(),
            unpinning: None,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), born: Instant::now() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock()
    }

    /// Wakes all waiting calls.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits briefly for a change. Returns false after `until`.
    pub(crate) fn wait(&self, state: &mut MutexGuard<'_, ClusterState>, until: Instant) -> bool {
        const TURN: Duration = Duration::from_millis(20);
        let now = Instant::now();
        if now >= until {
            return false;
        }
        self.changed.wait_until(state, until.min(now + TURN));
        true
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    /// Records that the cluster has removed the object, and frees its slot.
    pub(crate) fn departed(&self, departure: Departure) {
        self.settle(departure, true);
    }

    /// Records that the cluster has not removed the object. It stays unreadable until a retry succeeds.
    pub(crate) fn stayed(&self, departure: Departure) {
        self.settle(departure, false);
    }

    fn settle(&self, departure: Departure, removed: bool) {
        let ClusterState { departures, catalogue, .. } = &mut *self.lock();
        departures.end(departure, removed, catalogue);
        self.notify();
    }

    /// Waits until no call uses a departing object. All such calls end.
    pub(crate) fn wait_for_users(&self, departure: &Departure) {
        let mut state = self.lock();
        let slot = state.departures.slot(&departure.id);
        let is_read =
            |state: &ClusterState| slot.is_some_and(|slot| state.catalogue.has_readers(slot));
        while is_read(&state) || state.is_unpinning(&departure.id) {
            self.changed.wait(&mut state);
        }
    }
}

impl ClusterState {
    /// Returns true if the object is departing: unreadable here, although the cluster may still
    /// have it.
    pub(crate) fn is_leaving(&self, id: &ObjectId) -> bool {
        self.departures.contains(id)
    }

    /// Returns true if a removal has failed, so that only the cluster knows whether it has the
    /// object.
    pub(crate) fn is_stuck(&self, id: &ObjectId) -> bool {
        self.departures.is_stuck(id)
    }

    /// Starts the removal of all doomed objects.
    pub(crate) fn take_departures(&mut self) -> Vec<Departure> {
        let doomed = self.catalogue.take_doomed();
        doomed.into_iter().map(|slot| self.depart(slot)).collect()
    }

    /// Starts the removal of the object in a doomed slot.
    pub(crate) fn depart(&mut self, slot: Slot) -> Departure {
        let id = self.catalogue.id(slot);
        self.drop_marks(&id);
        self.departures.begin(id, SlotUse::Doomed(slot))
    }

    /// Marks the object in a doomed slot as departing, to be removed by a later retry.
    pub(crate) fn park(&mut self, slot: Slot) {
        let id = self.catalogue.id(slot);
        self.drop_marks(&id);
        self.departures.park(id, SlotUse::Doomed(slot));
    }

    /// Forgets an object that the cluster does not have.
    pub(crate) fn forget(&mut self, id: &ObjectId, slot: Slot) {
        self.seen.remove(id);
        if self.catalogue.find(id) == Some(slot) {
            if let Some(unpinning) = self.unpinning.as_mut().filter(|it| it.id == *id) {
                unpinning.was_forgotten = true;
            }
            self.drop_marks(id);
            self.catalogue.doom(slot);
            self.catalogue.release_doomed();
        }
    }

    /// Records that an object has no hard pin of this client any more. The caller usually removes
    /// it next, so the cluster's pin is only removed after a while.
    pub(crate) fn note_unpinned(&mut self, id: &ObjectId) {
        self.lease_pinned.remove(id);
        if let Some(since) = self.cluster_pinned.get_mut(id) {
            *since = Some(Instant::now());
        }
    }

    /// Records that an object has a hard pin of this client.
    pub(crate) fn note_pinned(&mut self, id: ObjectId) {
        match self.cluster_pinned.get_mut(&id) {
            Some(since) => *since = None,
            None => drop(self.lease_pinned.insert(id)),
        }
    }

    fn is_unpinning(&self, id: &ObjectId) -> bool {
        self.unpinning.is_some_and(|unpinning| unpinning.id == *id)
    }

    /// Starts to remove the cluster's pin of an object, and returns the length of its payload.
    pub(crate) fn begin_unpinning(&mut self, id: &ObjectId) -> Option<u32> {
        let slot = self.catalogue.find(id)?;
        self.unpinning = Some(Unpinning { id: *id, was_forgotten: false });
        Some(self.catalogue.length(slot))
    }

    /// Returns the slot of the object, unless it was removed or forgotten meanwhile.
    pub(crate) fn end_unpinning(&mut self, id: &ObjectId) -> Option<Slot> {
        let unpinning = self.unpinning.take().filter(|unpinning| !unpinning.was_forgotten);
        unpinning.and_then(|_| self.catalogue.find(id))
    }

    fn drop_marks(&mut self, id: &ObjectId) {
        self.seen.remove(id);
        self.lease_pinned.remove(id);
        self.cluster_pinned.remove(id);
    }
}

/// Objects recently seen in the cluster. They are not looked up again for a while: a lookup renews
/// a lease, and objects that are looked up constantly could never be evicted.
#[derive(Debug)]
pub(crate) struct Seen {
    until: BTreeMap<ObjectId, Instant>,
    oldest_first: VecDeque<(Instant, ObjectId)>,
    ttl: Duration,
    objects_max: usize,
}

impl Seen {
    pub(crate) fn new(ttl: Duration, objects_max: usize) -> Self {
        Self { until: BTreeMap::new(), oldest_first: VecDeque::new(), ttl, objects_max }
    }

    pub(crate) fn insert(&mut self, id: ObjectId) {
        let now = Instant::now();
        let until = now + self.ttl;
        self.until.insert(id, until);
        self.oldest_first.push_back((until, id));
        while let Some((until, id)) = self.oldest_first.front().copied() {
            if now < until && self.oldest_first.len() <= self.objects_max {
                break;
            }
            self.oldest_first.pop_front();
            if self.until.get(&id) == Some(&until) {
                self.until.remove(&id);
            }
        }
    }

    pub(crate) fn remove(&mut self, id: &ObjectId) {
        self.until.remove(id);
    }

    pub(crate) fn clear(&mut self) {
        self.until.clear();
        self.oldest_first.clear();
    }

    pub(crate) fn contains(&self, id: &ObjectId) -> bool {
        self.until.get(id).is_some_and(|until| Instant::now() < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_cache::PageKey;
    use terrace_l3::backend::Reserved;

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    #[test]
    fn seen_objects_expire_and_are_limited() {
        let mut seen = Seen::new(Duration::from_millis(30), 2);
        (0..5).for_each(|key| seen.insert(id(key)));
        assert_eq!([2, 3, 4].map(|key| seen.contains(&id(key))), [false, true, true]);
        assert!(seen.oldest_first.len() <= 2);
        seen.remove(&id(4));
        assert!(!seen.contains(&id(4)));
        std::thread::sleep(Duration::from_millis(31));
        assert!(!seen.contains(&id(3)));
    }

    #[test]
    fn a_departing_object_keeps_its_slot() {
        let ledger = ClusterLedger::new(1, Seen::new(Duration::from_secs(1), 8));
        let mut state = ledger.lock();
        let Ok(Reserved::Slot(slot)) = state.catalogue.reserve(&id(1), 10, None, 0) else {
            panic!()
        };
        state.catalogue.publish(slot);
        assert!(state.catalogue.evict(0));
        let departures = state.take_departures();
        assert!(state.is_leaving(&id(1)) && !state.catalogue.has_free());
        drop(state);
        ledger.departed(departures[0]);
        let state = ledger.lock();
        assert!(!state.is_leaving(&id(1)) && state.catalogue.has_free());
    }
}
