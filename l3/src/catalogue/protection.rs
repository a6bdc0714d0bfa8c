//! What keeps an object from being evicted or removed: pins and leases.

use super::{Catalogue, NOBODY, Slot};
use crate::object::ObjectId;
use crate::store::{Owner, Pin, StoreError};

impl Catalogue {
    /// Protects an object from eviction, and answers where it is.
    pub fn pin(&mut self, id: &ObjectId, pin: Pin, now_ms: u64) -> Result<Slot, StoreError> {
        let slot = self.find(id).ok_or(StoreError::Missing)?;
        self.pin_slot(slot, pin, now_ms)?;
        Ok(slot)
    }

    /// Takes back a pin, and answers of which slot.
    pub fn unpin(&mut self, id: &ObjectId, pin: Pin) -> Result<Slot, StoreError> {
        let slot = self.find(id).ok_or(StoreError::Missing)?;
        let entry = &mut self.entries[slot as usize];
        match pin {
            Pin::Soft if entry.soft_pin => {
                entry.soft_pin = false;
                self.soft_pinned -= 1;
            }
            Pin::Hard(owner) if self.owners.get(entry.owner) == Some(owner) => {
                self.owners.disappear(entry.owner);
                self.disown(slot);
            }
            Pin::Soft | Pin::Hard(_) => return Err(StoreError::NotPinned),
        }
        self.change_row(slot);
        Ok(slot)
    }

    /// Whether the object has a hard pin.
    pub fn is_pinned(&self, id: &ObjectId) -> bool {
        self.find(id).is_some_and(|slot| self.entries[slot as usize].owner != NOBODY)
    }

    /// The owner is there: its pins count until it is said to be gone.
    pub fn hold(&mut self, owner: Owner) {
        self.owners.set_end(owner, u64::MAX);
    }

    /// The owner is gone: its pins count until then, unless it comes back.
    pub fn let_go(&mut self, owner: Owner, until_ms: u64) {
        self.owners.set_end(owner, until_ms);
        self.pins_end(until_ms);
    }

    /// Nobody knows which owners are there.
    pub fn doubt_owners(&mut self, until_ms: u64) {
        self.owners.set_all_ends(until_ms);
        self.pins_end(until_ms);
    }

    fn pins_end(&mut self, at_ms: u64) {
        self.owners_end_ms = self.owners_end_ms.min(at_ms);
    }

    /// Protects an object until `now_ms + ttl_ms`, unless `leases_max` others are protected already. It counts as used
    /// in any case: who wants a lease is about to read it, or has it elsewhere and uses it there.
    pub fn lease(&mut self, slot: Slot, now_ms: u64, ttl_ms: u64, leases_max: usize) {
        self.end_protection(now_ms);
        let entry = &mut self.entries[slot as usize];
        entry.visited = true;
        let former_ms = entry.leased_until_ms;
        match self.leases.grant(former_ms, now_ms, ttl_ms, leases_max, &mut self.rings) {
            Some(end_ms) => {
                self.counts.leases += 1;
                self.entries[slot as usize].leased_until_ms = end_ms;
                self.change_row(slot);
            }
            None => self.counts.leases_refused += 1,
        }
    }

    pub(super) fn pin_slot(&mut self, slot: Slot, pin: Pin, now_ms: u64) -> Result<(), StoreError> {
        let entry = &mut self.entries[slot as usize];
        match pin {
            Pin::Soft => {
                self.soft_pinned += u32::from(!entry.soft_pin);
                entry.soft_pin = true;
            }
            Pin::Hard(owner) if self.owners.get(entry.owner) == Some(owner) => {
                self.owners.set_end(owner, u64::MAX);
            }
            Pin::Hard(_) if self.owners.protects(entry.owner, now_ms) => {
                return Err(StoreError::Pinned);
            }
            Pin::Hard(owner) => {
                let number = self.owners.enter(owner).ok_or(StoreError::Full)?;
                let former = std::mem::replace(&mut entry.owner, number);
                self.owners.disappear(former);
                self.owners.leave(former);
                self.owners.appear(number);
            }
        }
        self.change_row(slot);
        Ok(())
    }
}
