//! Protection from eviction and removal: pins and leases.

use super::{Catalogue, NO_OWNER, Slot};
use crate::object::ObjectId;
use crate::store::{Owner, Pin, StoreError};

impl Catalogue {
    /// Pins an object and returns its slot.
    pub fn pin(&mut self, id: &ObjectId, pin: Pin, now_ms: u64) -> Result<Slot, StoreError> {
        let slot = self.find(id).ok_or(StoreError::Missing)?;
        self.pin_slot(slot, pin, now_ms)?;
        Ok(slot)
    }

    /// Removes a pin and returns the slot.
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

    /// Returns true if the object has a hard pin.
    pub fn is_pinned(&self, id: &ObjectId) -> bool {
        self.find(id).is_some_and(|slot| self.entries[slot as usize].owner != NO_OWNER)
    }

    /// Marks the owner as connected: its pins last until [`Catalogue::let_go`].
    pub fn hold(&mut self, owner: Owner) {
        self.owners.set_end(owner, u64::MAX);
    }

    /// Marks the owner as disconnected: its pins expire at `until_ms`, unless it returns.
    pub fn let_go(&mut self, owner: Owner, until_ms: u64) {
        self.owners.set_end(owner, until_ms);
        self.pins_end(until_ms);
    }

    /// Marks all owners as disconnected, since none is known to be connected.
    pub fn doubt_owners(&mut self, until_ms: u64) {
        self.owners.set_all_ends(until_ms);
        self.pins_end(until_ms);
    }

    fn pins_end(&mut self, at_ms: u64) {
        self.owners_end_ms = self.owners_end_ms.min(at_ms);
    }

    /// Leases an object until `now_ms + ttl_ms`, unless `leases_max` others are leased. Counts as a
    /// use in any case: the caller is about to read the object, or already has a copy and uses
    /// that.
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
