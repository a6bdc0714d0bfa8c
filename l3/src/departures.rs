//! Removals from a remote store, in flight or to be retried.

use std::collections::BTreeMap;

use crate::catalogue::{Catalogue, Slot};
use crate::object::ObjectId;

/// Objects that are being removed from a remote store.
///
/// A departing object can be neither read nor put until the store has removed it: the removal, or its
/// retry, would remove the new object too. Its slot stays in use until then.
#[derive(Debug, Default)]
pub struct Departures {
    objects: BTreeMap<ObjectId, Departing>,
}

#[derive(Clone, Copy, Debug)]
struct Departing {
    slot_use: SlotUse,
    /// Removal requests in flight. Without one, the object is stuck until a retry.
    requests: u32,
    /// The requests in flight have failed or may come too early, so there must be another.
    retry: bool,
}

/// Use of a slot by a departing object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotUse {
    /// Doomed slot of a stored object.
    Doomed(Slot),
    /// Slot of a put that failed, whose object may exist or appear later.
    Begun(Slot),
    /// None: the object belongs to another client.
    None,
}

/// A removal request. Its result must be reported by [`Departures::end`].
#[derive(Clone, Copy, Debug)]
#[must_use = "the object departs when the request ends"]
pub struct Departure {
    /// Object to remove.
    pub id: ObjectId,
}

impl Departures {
    /// Starts a removal. An object of another client may be departing already.
    ///
    /// # Panics
    /// If the object is departing with a slot, and has another one now.
    pub fn begin(&mut self, id: ObjectId, slot_use: SlotUse) -> Departure {
        self.enter(id, slot_use).requests += 1;
        Departure { id }
    }

    /// Adds an object whose removal starts with the next retry.
    ///
    /// # Panics
    /// As for [`Departures::begin`].
    pub fn park(&mut self, id: ObjectId, slot_use: SlotUse) {
        self.enter(id, slot_use).retry = true;
    }

    fn enter(&mut self, id: ObjectId, slot_use: SlotUse) -> &mut Departing {
        let new = Departing { slot_use: SlotUse::None, requests: 0, retry: false };
        let departing = self.objects.entry(id).or_insert(new);
        if slot_use != SlotUse::None {
            assert_eq!(departing.slot_use, SlotUse::None, "an object has one slot");
            departing.slot_use = slot_use;
        }
        departing
    }

    /// Ends a request. The last one frees the slot, unless a retry is needed. Objects of other clients
    /// are not retried.
    pub fn end(&mut self, departure: Departure, removed: bool, catalogue: &mut Catalogue) {
        let Some(departing) = self.objects.get_mut(&departure.id) else { return };
        departing.requests -= 1;
        departing.retry |= !removed;
        let stays = departing.retry && departing.slot_use != SlotUse::None;
        if departing.requests > 0 || stays {
            return;
        }
        match departing.slot_use {
            SlotUse::Doomed(slot) => catalogue.release(slot),
            SlotUse::Begun(slot) => catalogue.abandon(slot),
            SlotUse::None => {}
        }
        self.objects.remove(&departure.id);
    }

    /// Retries the removal of a stuck object.
    pub fn take_stuck(&mut self, id: &ObjectId) -> Option<Departure> {
        let departing = self.objects.get_mut(id).filter(|departing| departing.requests == 0)?;
        (departing.requests, departing.retry) = (1, false);
        Some(Departure { id: *id })
    }

    /// Retries the removal of up to `objects_max` stuck objects.
    pub fn take_all_stuck(&mut self, objects_max: usize) -> Vec<Departure> {
        let stuck = self.objects.iter_mut().filter(|(_, departing)| departing.requests == 0);
        let take = |(id, departing): (&ObjectId, &mut Departing)| {
            (departing.requests, departing.retry) = (1, false);
            Departure { id: *id }
        };
        stuck.take(objects_max).map(take).collect()
    }

    /// Returns true if the object is departing.
    pub fn contains(&self, id: &ObjectId) -> bool {
        self.objects.contains_key(id)
    }

    /// Returns true if a removal has failed and no other is in flight, so that only the store knows whether
    /// it has the object.
    pub fn is_stuck(&self, id: &ObjectId) -> bool {
        self.objects.get(id).is_some_and(|departing| departing.requests == 0)
    }

    /// Slot of a departing object, if it has one.
    pub fn slot(&self, id: &ObjectId) -> Option<Slot> {
        match self.objects.get(id)?.slot_use {
            SlotUse::Doomed(slot) | SlotUse::Begun(slot) => Some(slot),
            SlotUse::None => None,
        }
    }

    /// Number of departing objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Returns true if no object is departing.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use terrace_cache::PageKey;

    use super::*;
    use crate::catalogue::Reserved;

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    /// A catalogue whose only slot has an object that was evicted.
    fn evicted() -> (Catalogue, Slot) {
        let mut catalogue = Catalogue::new(1, 1);
        let reserved = catalogue.reserve(&id(1), 10, None, 0).unwrap();
        let Reserved::Slot(slot) = reserved else { panic!("{reserved:?}") };
        catalogue.publish(slot);
        assert!(catalogue.evict(0));
        assert_eq!(catalogue.take_doomed(), [slot]);
        (catalogue, slot)
    }

    #[test]
    fn a_failed_removal_keeps_the_slot_until_a_retry_succeeds() {
        let (mut catalogue, slot) = evicted();
        let mut departures = Departures::default();
        let first = departures.begin(id(1), SlotUse::Doomed(slot));
        assert!(departures.contains(&id(1)) && !departures.is_stuck(&id(1)));
        assert!(departures.take_stuck(&id(1)).is_none(), "a request is in flight");
        departures.end(first, false, &mut catalogue);
        assert!(departures.is_stuck(&id(1)) && !catalogue.has_free());
        let retry = departures.take_all_stuck(8).pop().unwrap();
        departures.end(retry, true, &mut catalogue);
        assert!(departures.is_empty() && catalogue.has_free());
    }

    #[test]
    fn an_object_of_another_client_is_not_retried() {
        let (mut catalogue, _) = evicted();
        let mut departures = Departures::default();
        let removal = departures.begin(id(2), SlotUse::None);
        departures.end(removal, false, &mut catalogue);
        assert!(departures.is_empty());
    }

    #[test]
    fn a_removal_before_the_end_of_a_put_is_repeated() {
        let mut catalogue = Catalogue::new(1, 1);
        let reserved = catalogue.reserve(&id(1), 10, None, 0).unwrap();
        let Reserved::Slot(slot) = reserved else { panic!("{reserved:?}") };
        let mut departures = Departures::default();
        let early = departures.begin(id(1), SlotUse::None);
        departures.park(id(1), SlotUse::Begun(slot));
        departures.end(early, true, &mut catalogue);
        assert!(departures.is_stuck(&id(1)), "the object may have appeared after the removal");
        let retry = departures.take_stuck(&id(1)).unwrap();
        departures.end(retry, true, &mut catalogue);
        assert!(catalogue.has_free());
    }
}
