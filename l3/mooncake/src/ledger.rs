//! What this client knows of the cluster: the objects that it has put, in a catalogue like that of any
//! other store, and what it has seen there lately.
//!
//! Objects of other clients are not in it; they are simply asked for. An object that is being taken
//! out of the cluster is `leaving`: nobody can have it any more, and nobody can put it again before
//! it has left, since the cluster would keep the old one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use terrace_l3::ObjectId;
use terrace_l3::backend::{Catalogue, Slot};

#[derive(Debug)]
pub(crate) struct Ledger {
    state: Mutex<State>,
    changed: Condvar,
    born: Instant,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) catalogue: Catalogue,
    /// Objects that leave the cluster.
    pub(crate) leaving: BTreeMap<ObjectId, Leaving>,
    pub(crate) seen: Seen,
    /// Objects with a hard pin of the cluster's own, which only a new put can take off, and since when
    /// nobody wants it any more.
    pub(crate) stiff: BTreeMap<ObjectId, Option<Instant>>,
    /// Objects with a hard pin of ours alone: their leases are renewed.
    pub(crate) held: BTreeSet<ObjectId>,
    /// Objects whose payload is apart from its header, or may be, since another client has put them. All
    /// others in the catalogue are in one piece.
    pub(crate) may_be_apart: BTreeSet<ObjectId>,
    /// The object that is out of the cluster for a moment, to be put again without the cluster's own pin.
    /// That is no use of it, so it may be evicted meanwhile.
    softening: Option<Softening>,
}

#[derive(Clone, Copy, Debug)]
struct Softening {
    id: ObjectId,
    /// What the catalogue has of this name, if anything, is another object by now.
    was_forgotten: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving {
    pub(crate) slot: Slot,
    /// Whether its payload may be apart from its header.
    pub(crate) may_be_apart: bool,
    /// The cluster did not take it out, and nobody is at it: somebody must try again.
    pub(crate) stuck: bool,
}

/// An object that is about to leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Departure {
    pub(crate) id: ObjectId,
    pub(crate) slot: Slot,
    /// Whether its payload may be apart from its header.
    pub(crate) may_be_apart: bool,
}

impl Ledger {
    pub(crate) fn new(slots: Slot, seen: Seen) -> Self {
        let state = State {
            catalogue: Catalogue::new(slots, slots),
            leaving: BTreeMap::new(),
            seen,
            stiff: BTreeMap::new(),
            held: BTreeSet::new(),
            may_be_apart: BTreeSet::new(),
            softening: None,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), born: Instant::now() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Tells those who wait that something has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change, a little while at the most. False if it is later than `until`.
    pub(crate) fn wait(&self, state: &mut MutexGuard<'_, State>, until: Instant) -> bool {
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

    /// The object has left the cluster: its slot is free.
    pub(crate) fn departed(&self, departure: Departure) {
        let mut state = self.lock();
        state.leaving.remove(&departure.id);
        state.catalogue.release(departure.slot);
        drop(state);
        self.notify();
    }

    /// The cluster did not let it go; it stays unreachable.
    pub(crate) fn is_stuck(&self, departure: Departure) {
        if let Some(leaving) = self.lock().leaving.get_mut(&departure.id) {
            leaving.stuck = true;
        }
        self.notify();
    }

    /// Waits until nobody is at an object that is leaving. Whoever is, is in the middle of a call, which
    /// ends.
    pub(crate) fn wait_for_users(&self, departure: &Departure) {
        let mut state = self.lock();
        while state.catalogue.has_readers(departure.slot) || state.is_softening(&departure.id) {
            self.changed.wait(&mut state);
        }
    }
}

impl State {
    /// Whether nobody may have the object although the cluster may have it still.
    pub(crate) fn is_leaving(&self, id: &ObjectId) -> bool {
        self.leaving.contains_key(id)
    }

    /// Whether a removal has failed, so that only the cluster knows whether it has the object.
    pub(crate) fn is_stuck(&self, id: &ObjectId) -> bool {
        self.leaving.get(id).is_some_and(|leaving| leaving.stuck)
    }

    /// Takes an object that is stuck in hand, or any of them, to try again.
    pub(crate) fn take_stuck(&mut self, id: Option<&ObjectId>) -> Option<Departure> {
        let (id, leaving) = match id {
            Some(id) => (*id, self.leaving.get_mut(id).filter(|leaving| leaving.stuck)?),
            None => {
                let stuck = self.leaving.iter_mut().find(|(_, leaving)| leaving.stuck)?;
                (*stuck.0, stuck.1)
            }
        };
        leaving.stuck = false;
        Some(Departure { id, slot: leaving.slot, may_be_apart: leaving.may_be_apart })
    }

    /// Everything that was doomed is leaving from now on.
    pub(crate) fn take_departures(&mut self) -> Vec<Departure> {
        let doomed = self.catalogue.take_doomed();
        doomed.into_iter().map(|slot| self.depart(slot)).collect()
    }

    /// A doomed slot's object is leaving from now on.
    pub(crate) fn depart(&mut self, slot: Slot) -> Departure {
        let id = self.catalogue.id(slot);
        let may_be_apart = self.may_be_apart.contains(&id);
        self.drop_marks(&id);
        self.leaving.insert(id, Leaving { slot, may_be_apart, stuck: false });
        Departure { id, slot, may_be_apart }
    }

    /// The cluster does not have the object that was in this slot.
    pub(crate) fn forget(&mut self, id: &ObjectId, slot: Slot) {
        self.seen.remove(id);
        if self.catalogue.find(id) == Some(slot) {
            if let Some(softening) = self.softening.as_mut().filter(|it| it.id == *id) {
                softening.was_forgotten = true;
            }
            self.drop_marks(id);
            self.catalogue.doom(slot);
            self.catalogue.release_doomed();
        }
    }

    /// An object without any hard pin of ours. Whoever releases it usually removes it at once, so a
    /// pin of the cluster's is taken off only if it does not.
    pub(crate) fn unheld(&mut self, id: &ObjectId) {
        self.held.remove(id);
        if let Some(since) = self.stiff.get_mut(id) {
            *since = Some(Instant::now());
        }
    }

    /// An object with a hard pin of ours.
    pub(crate) fn hold(&mut self, id: ObjectId) {
        match self.stiff.get_mut(&id) {
            Some(since) => *since = None,
            None => drop(self.held.insert(id)),
        }
    }

    fn is_softening(&self, id: &ObjectId) -> bool {
        self.softening.is_some_and(|softening| softening.id == *id)
    }

    /// Begins to soften an object, and says how long its payload is.
    pub(crate) fn begin_softening(&mut self, id: &ObjectId) -> Option<u32> {
        let slot = self.catalogue.find(id)?;
        self.softening = Some(Softening { id: *id, was_forgotten: false });
        Some(self.catalogue.length(slot))
    }

    /// Answers where the object is, unless it has left or was forgotten meanwhile.
    pub(crate) fn end_softening(&mut self, id: &ObjectId) -> Option<Slot> {
        let softening = self.softening.take().filter(|softening| !softening.was_forgotten);
        softening.and_then(|_| self.catalogue.find(id))
    }

    fn drop_marks(&mut self, id: &ObjectId) {
        self.seen.remove(id);
        self.held.remove(id);
        self.stiff.remove(id);
        self.may_be_apart.remove(id);
    }
}

/// Objects that the cluster was seen to have. They are not asked about again for a while: asking
/// renews a lease, and what is asked about all the time could never be evicted.
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
    fn what_was_seen_is_remembered_for_a_while_and_only_so_much() {
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
    fn an_object_that_leaves_has_its_slot_until_it_has_left() {
        let ledger = Ledger::new(1, Seen::new(Duration::from_secs(1), 8));
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
