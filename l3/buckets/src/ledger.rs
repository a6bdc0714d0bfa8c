//! What this client has in the bucket: the objects that it has put or pinned, in a catalogue like that of any
//! other store.
//!
//! An object that is being removed is `leaving`: nobody can have it any more, and nobody can put it again
//! before it has left. So is one whose put may have happened although it has failed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use terrace_l3::backend::{Catalogue, Slot};
use terrace_l3::{ObjectId, Pin, StoreError};

#[derive(Debug)]
pub(crate) struct Ledger {
    state: Mutex<State>,
    changed: Notify,
    born: Instant,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) catalogue: Catalogue,
    leaving: BTreeMap<ObjectId, Leaving>,
    /// Objects of other clients that are pinned here.
    adopted: BTreeSet<ObjectId>,
}

#[derive(Clone, Copy, Debug)]
struct Leaving {
    room: Room,
    /// The bucket did not remove it, and nobody is at it: somebody must try again.
    stuck: bool,
}

/// What an object that leaves takes up here until it has left.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Room {
    /// The slot of one that was there.
    Doomed(Slot),
    /// The slot of one that may have come to be there.
    Begun(Slot),
    /// It was never ours.
    None,
}

/// An object that whoever has this is to remove from the bucket.
#[derive(Clone, Copy, Debug)]
#[must_use = "it leaves when it is removed"]
pub(crate) struct Departure {
    pub(crate) id: ObjectId,
    room: Room,
}

impl Ledger {
    pub(crate) fn new(slots: Slot) -> Self {
        let state = State {
            catalogue: Catalogue::new(slots, slots),
            leaving: BTreeMap::new(),
            adopted: BTreeSet::new(),
        };
        Self { state: Mutex::new(state), changed: Notify::new(), born: Instant::now() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }

    /// Tells those who wait that something has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Waits for a change, a little while at the most. False if it is later than `until`.
    pub(crate) async fn wait(&self, until: Instant) -> bool {
        const TURN: Duration = Duration::from_millis(20);
        let left = until.saturating_duration_since(Instant::now());
        let _ = tokio::time::timeout(left.min(TURN), self.changed.notified()).await;
        !left.is_zero()
    }

    /// The object has left the bucket.
    pub(crate) fn departed(&self, departure: Departure) {
        let mut state = self.lock();
        state.leaving.remove(&departure.id);
        match departure.room {
            Room::Doomed(slot) => state.catalogue.release(slot),
            Room::Begun(slot) => state.catalogue.abandon(slot),
            Room::None => {}
        }
        drop(state);
        self.notify();
    }

    /// The bucket has not removed it. One of ours stays unreachable; another's is as it was.
    pub(crate) fn stayed(&self, departure: Departure) {
        let mut state = self.lock();
        match departure.room {
            Room::Doomed(_) | Room::Begun(_) => {
                state.leaving.insert(departure.id, Leaving { room: departure.room, stuck: true });
            }
            Room::None => drop(state.leaving.remove(&departure.id)),
        }
        drop(state);
        self.notify();
    }
}

impl State {
    pub(crate) fn is_leaving(&self, id: &ObjectId) -> bool {
        self.leaving.contains_key(id)
    }

    /// The object leaves from now on.
    pub(crate) fn depart(&mut self, id: ObjectId, room: Room) -> Departure {
        let before = self.leaving.insert(id, Leaving { room, stuck: false });
        assert!(before.is_none(), "an object leaves once");
        self.adopted.remove(&id);
        Departure { id, room }
    }

    /// Everything that was doomed leaves from now on.
    pub(crate) fn take_departures(&mut self) -> Vec<Departure> {
        let doomed = self.catalogue.take_doomed();
        self.depart_from(doomed)
    }

    /// What is in these slots, which are doomed, leaves from now on.
    pub(crate) fn depart_from(&mut self, slots: impl IntoIterator<Item = Slot>) -> Vec<Departure> {
        let depart = |slot| self.depart(self.catalogue.id(slot), Room::Doomed(slot));
        slots.into_iter().map(depart).collect()
    }

    /// Takes an object in hand that is stuck, to try again.
    pub(crate) fn take_stuck(&mut self, id: &ObjectId) -> Option<Departure> {
        let leaving = self.leaving.get_mut(id).filter(|leaving| leaving.stuck)?;
        leaving.stuck = false;
        Some(Departure { id: *id, room: leaving.room })
    }

    /// Takes so many at the most in hand.
    pub(crate) fn take_all_stuck(&mut self, objects_max: usize) -> Vec<Departure> {
        let stuck = self.leaving.iter_mut().filter(|(_, leaving)| leaving.stuck);
        let take = |(id, leaving): (&ObjectId, &mut Leaving)| {
            leaving.stuck = false;
            Departure { id: *id, room: leaving.room }
        };
        stuck.take(objects_max).map(take).collect()
    }

    /// The object in this slot is there and another's, and this client's until its pin is taken back.
    pub(crate) fn adopt(&mut self, slot: Slot) -> Vec<Departure> {
        self.adopted.insert(self.catalogue.id(slot));
        let replaced = self.catalogue.publish(slot);
        self.depart_from(replaced)
    }

    /// Takes back a pin. What another has put is the other's again, and not ours to evict.
    pub(crate) fn unpin(&mut self, id: &ObjectId, pin: Pin) -> Result<(), StoreError> {
        let slot = self.catalogue.unpin(id, pin)?;
        if self.adopted.contains(id) && !self.catalogue.is_pinned(id) {
            self.forget(id, slot);
        }
        Ok(())
    }

    /// Ends the reading of an object that the bucket does not have any more.
    pub(crate) fn end_reading_of_nothing(&mut self, id: &ObjectId, slot: Slot) {
        self.catalogue.end_read(slot);
        self.forget(id, slot);
    }

    /// The object in this slot, if it is still this one, is not ours.
    fn forget(&mut self, id: &ObjectId, slot: Slot) {
        if self.catalogue.find(id) == Some(slot) {
            self.adopted.remove(id);
            self.catalogue.doom(slot);
            self.catalogue.release_doomed();
        }
    }
}
