//! The hash table of a catalogue.

use hashbrown::HashTable;
use hashbrown::hash_table::OccupiedEntry;

use super::Slot;

/// Slots by the hash of their object.
///
/// The table consists of parts that grow one at a time: an insertion moves the slots of one part at most, which takes
/// a millisecond or two, however large the catalogue is.
#[derive(Debug)]
pub(super) struct Table {
    parts: Box<[HashTable<Slot>]>,
}

/// Number of slots in a part when all slots are in use.
const SLOTS_PER_PART: Slot = 1 << 16;
const PARTS_MAX: usize = 1 << 12;

impl Table {
    /// Returns an empty table for up to `slots` slots, with room for the first `usable`.
    pub(super) fn new(slots: Slot, usable: Slot) -> Self {
        let parts = (slots.div_ceil(SLOTS_PER_PART) as usize).next_power_of_two().min(PARTS_MAX);
        let mean = usable as usize / parts;
        // Some parts get more than others.
        let room = if usable == 0 { 0 } else { mean + mean / 16 + 1 };
        Self { parts: (0..parts).map(|_| HashTable::with_capacity(room)).collect() }
    }

    pub(super) fn insert(&mut self, hash: u64, slot: Slot, hash_of: impl Fn(&Slot) -> u64) {
        self.part_mut(hash).insert_unique(hash, slot, hash_of);
    }

    /// Returns the slot with this hash for which `is_it` holds.
    pub(super) fn find(&self, hash: u64, is_it: impl FnMut(&Slot) -> bool) -> Option<Slot> {
        self.part(hash).find(hash, is_it).copied()
    }

    /// Returns the slots that may have this hash.
    pub(super) fn candidates(&self, hash: u64) -> impl Iterator<Item = Slot> {
        self.part(hash).iter_hash(hash).copied()
    }

    /// Removes a slot.
    ///
    /// # Panics
    /// If the table does not have it under this hash.
    pub(super) fn remove(&mut self, hash: u64, slot: Slot) {
        let found = self.part_mut(hash).find_entry(hash, |other| *other == slot);
        found.map(OccupiedEntry::remove).expect("the slot of each object is in the table");
    }

    /// Returns the size in memory.
    pub(super) fn bytes(&self) -> usize {
        let parts = self.parts.iter().map(HashTable::allocation_size).sum::<usize>();
        parts + size_of_val(&*self.parts)
    }

    fn part(&self, hash: u64) -> &HashTable<Slot> {
        &self.parts[self.index(hash)]
    }

    fn part_mut(&mut self, hash: u64) -> &mut HashTable<Slot> {
        let index = self.index(hash);
        &mut self.parts[index]
    }

    /// Parts are chosen by bits that their tables do not use before they have 2^32 buckets.
    fn index(&self, hash: u64) -> usize {
        (hash >> 32) as usize & (self.parts.len() - 1)
    }
}
