//! Owners of hard pins, and when their pins expire.

use super::rings::{Ring, Rings};
use crate::store::Owner;

/// Number of an owner in a catalogue; 0 is no owner.
pub(super) type OwnerNumber = u16;

pub(super) const NO_OWNER: OwnerNumber = 0;

/// Owners of the pins in a catalogue: usually a handful, each with many pins.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// Entries without slots are free.
    list: Vec<OwnerEntry>,
}

#[derive(Clone, Copy, Debug)]
struct OwnerEntry {
    owner: Owner,
    /// Slots that refer to the owner.
    slots: u32,
    /// Slots among them whose object is present.
    pinned: u32,
    /// End of its pins; `u64::MAX` while the owner is connected.
    until_ms: u64,
    /// Row of its objects, once it has one.
    ring: Option<Ring>,
    /// Its pins have expired, and its objects were moved to the queue.
    is_over: bool,
}

impl OwnerEntry {
    fn set_end(&mut self, until_ms: u64) {
        (self.until_ms, self.is_over) = (until_ms, false);
    }
}

impl Owners {
    /// Adds a slot to a connected owner. `None` if there are too many owners.
    pub(super) fn enter(&mut self, owner: Owner) -> Option<OwnerNumber> {
        let place = self.place(owner).or_else(|| self.list.iter().position(|it| it.slots == 0));
        let place = place.unwrap_or(self.list.len());
        let number = OwnerNumber::try_from(place + 1).ok()?;
        let until_ms = u64::MAX;
        let new = OwnerEntry { owner, slots: 0, pinned: 0, until_ms, ring: None, is_over: false };
        match self.list.get_mut(place) {
            Some(free) if free.slots == 0 => *free = OwnerEntry { ring: free.ring, ..new },
            Some(there) => there.set_end(until_ms),
            None => self.list.push(new),
        }
        self.list[place].slots += 1;
        Some(number)
    }

    /// Removes a slot from an owner.
    pub(super) fn leave(&mut self, number: OwnerNumber) {
        if let Some(holdings) = self.holdings(number) {
            holdings.slots -= 1;
        }
    }

    /// Counts one more present object of the owner.
    pub(super) fn appear(&mut self, number: OwnerNumber) {
        if let Some(holdings) = self.holdings(number) {
            holdings.pinned += 1;
        }
    }

    /// Counts one present object less of the owner.
    pub(super) fn disappear(&mut self, number: OwnerNumber) {
        if let Some(holdings) = self.holdings(number) {
            holdings.pinned -= 1;
        }
    }

    /// Number of objects with active pins.
    pub(super) fn pinned(&self, now_ms: u64) -> u64 {
        let there = self.list.iter().filter(|it| it.until_ms > now_ms);
        there.map(|it| u64::from(it.pinned)).sum()
    }

    pub(super) fn get(&self, number: OwnerNumber) -> Option<Owner> {
        (number != NO_OWNER).then(|| self.list[usize::from(number) - 1].owner)
    }

    /// End of the pins of an owner.
    pub(super) fn end(&self, number: OwnerNumber) -> u64 {
        if number == NO_OWNER { 0 } else { self.list[usize::from(number) - 1].until_ms }
    }

    /// Returns true if the pins of an owner are active.
    pub(super) fn protects(&self, number: OwnerNumber, now_ms: u64) -> bool {
        self.end(number) > now_ms
    }

    /// Sets the end of an owner's pins.
    pub(super) fn set_end(&mut self, owner: Owner, until_ms: u64) {
        if let Some(place) = self.place(owner) {
            self.list[place].set_end(until_ms);
        }
    }

    /// Sets the end of all pins.
    pub(super) fn set_all_ends(&mut self, until_ms: u64) {
        self.list.iter_mut().for_each(|holdings| holdings.set_end(until_ms));
    }

    /// Earliest end of the active pins of an owner.
    pub(super) fn next_end(&self) -> u64 {
        let count = self.list.iter().filter(|it| it.slots > 0 && !it.is_over);
        count.map(|it| it.until_ms).min().unwrap_or(u64::MAX)
    }

    /// Returns the rows of owners whose pins have expired. The caller must move their objects to
    /// the queue.
    pub(super) fn end_pins(&mut self, now_ms: u64) -> impl Iterator<Item = Ring> {
        let ended = self.list.iter_mut().filter(move |it| !it.is_over && it.until_ms <= now_ms);
        ended.filter_map(|it| {
            it.is_over = true;
            it.ring
        })
    }

    /// Row of the objects that this owner has pinned, unless its pins have expired.
    pub(super) fn ring(&mut self, number: OwnerNumber, rings: &mut Rings) -> Option<Ring> {
        let holdings = self.holdings(number).filter(|it| !it.is_over)?;
        Some(*holdings.ring.get_or_insert_with(|| rings.add()))
    }

    pub(super) fn bytes(&self) -> usize {
        self.list.capacity() * size_of::<OwnerEntry>()
    }

    fn holdings(&mut self, number: OwnerNumber) -> Option<&mut OwnerEntry> {
        (number != NO_OWNER).then(|| &mut self.list[usize::from(number) - 1])
    }

    fn place(&self, owner: Owner) -> Option<usize> {
        self.list.iter().position(|it| it.owner == owner && it.slots > 0)
    }
}
