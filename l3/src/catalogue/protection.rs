//! What keeps an object from being evicted or removed: pins and leases.

use super::{Catalogue, Slot};
use crate::object::ObjectId;
use crate::store::{Pin, StoreError};

impl Catalogue {
    /// Protects an object from eviction.
    pub fn pin(&mut self, id: &ObjectId, pin: Pin) -> Result<(), StoreError> {
        let slot = self.find(id).ok_or(StoreError::Missing)?;
        self.pin_slot(slot, pin);
        Ok(())
    }

    /// Takes back one pin.
    pub fn unpin(&mut self, id: &ObjectId, pin: Pin) -> Result<(), StoreError> {
        let slot = self.find(id).ok_or(StoreError::Missing)?;
        let entry = &mut self.entries[slot as usize];
        match pin {
            Pin::Soft if entry.soft_pin => {
                entry.soft_pin = false;
                self.soft_pinned -= 1;
            }
            // So many that they were not counted any more: it stays pinned.
            Pin::Hard if entry.hard_pins == u16::MAX => {}
            Pin::Hard if entry.hard_pins > 0 => {
                entry.hard_pins -= 1;
                self.pinned -= u32::from(entry.hard_pins == 0);
            }
            Pin::Soft | Pin::Hard => return Err(StoreError::NotPinned),
        }
        self.may_go(slot);
        Ok(())
    }

    /// Whether the object has a hard pin.
    pub fn is_pinned(&self, id: &ObjectId) -> bool {
        self.find(id).is_some_and(|slot| self.entries[slot as usize].hard_pins > 0)
    }

    /// Protects an object until `now_ms + ttl_ms`, unless `leases_max` others are protected already.
    pub fn lease(&mut self, slot: Slot, now_ms: u64, ttl_ms: u64, leases_max: usize) {
        let entry = &mut self.entries[slot as usize];
        match self.leases.grant(entry.leased_until_ms, now_ms, ttl_ms, leases_max) {
            Some(end_ms) => {
                self.counts.leases += 1;
                entry.leased_until_ms = end_ms;
            }
            None => self.counts.leases_refused += 1,
        }
    }

    pub(super) fn pin_slot(&mut self, slot: Slot, pin: Pin) {
        let entry = &mut self.entries[slot as usize];
        match pin {
            Pin::Soft => {
                self.soft_pinned += u32::from(!entry.soft_pin);
                entry.soft_pin = true;
            }
            Pin::Hard => {
                self.pinned += u32::from(entry.hard_pins == 0);
                entry.hard_pins = entry.hard_pins.saturating_add(1);
            }
        }
    }
}
