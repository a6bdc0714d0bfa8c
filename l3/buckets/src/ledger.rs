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
    /// How many requests to remove it are under way. Without one it is stuck: somebody must try again.
    in_hand: u32,
    /// The requests under way may come too early, or have failed, so there must be another.
    again: bool,
}

/// What an object that leaves takes up here until it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// The bucket has removed the object.
    pub(crate) fn departed(&self, departure: Departure) {
        self.lock().settle(departure, true);
        self.notify();
    }

    /// The bucket has not removed it. One of ours stays unreachable; another's is as it was.
    pub(crate) fn stayed(&self, departure: Departure) {
        self.lock().settle(departure, false);
        self.notify();
    }
}

impl State {
    pub(crate) fn is_leaving(&self, id: &ObjectId) -> bool {
        self.leaving.contains_key(id)
    }

    /// The object leaves from now on. It may be leaving already: as another's, before it became ours.
    pub(crate) fn depart(&mut self, id: ObjectId, room: Room) -> Departure {
        self.leave(id, room).in_hand += 1;
        Departure { id }
    }

    /// The object of a put that failed may be there, or come to be there, and leaves with the next try.
    pub(crate) fn park(&mut self, id: ObjectId, slot: Slot) {
        self.leave(id, Room::Begun(slot)).again = true;
    }

    fn leave(&mut self, id: ObjectId, room: Room) -> &mut Leaving {
        self.adopted.remove(&id);
        let nothing = Leaving { room: Room::None, in_hand: 0, again: false };
        let leaving = self.leaving.entry(id).or_insert(nothing);
        if room != Room::None {
            assert_eq!(leaving.room, Room::None, "an object has one slot");
            leaving.room = room;
        }
        leaving
    }

    /// A request to remove an object has ended.
    fn settle(&mut self, departure: Departure, removed: bool) {
        let Some(leaving) = self.leaving.get_mut(&departure.id) else { return };
        leaving.in_hand -= 1;
        leaving.again |= !removed;
        let stays = leaving.again && leaving.room != Room::None;
        if leaving.in_hand > 0 || stays {
            return;
        }
        match leaving.room {
            Room::Doomed(slot) => self.catalogue.release(slot),
            Room::Begun(slot) => self.catalogue.abandon(slot),
            Room::None => {}
        }
        self.leaving.remove(&departure.id);
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
        let leaving = self.leaving.get_mut(id).filter(|leaving| leaving.in_hand == 0)?;
        (leaving.in_hand, leaving.again) = (1, false);
        Some(Departure { id: *id })
    }

    /// Takes so many at the most in hand.
    pub(crate) fn take_all_stuck(&mut self, objects_max: usize) -> Vec<Departure> {
        let stuck = self.leaving.iter_mut().filter(|(_, leaving)| leaving.in_hand == 0);
        let take = |(id, leaving): (&ObjectId, &mut Leaving)| {
            (leaving.in_hand, leaving.again) = (1, false);
            Departure { id: *id }
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
