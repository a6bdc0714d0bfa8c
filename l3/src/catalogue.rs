//! Slots, the objects in them, and eviction. Pure bookkeeping, shared by all backends with slots:
//! no IO, no lock, no clock.
//!
//! A slot is free, being written, present, or doomed. The object in a doomed slot cannot be found,
//! but a reader may still be copying it, or the disk's index may still name it. The backend reports
//! when neither is the case ([`Catalogue::release`]).

mod eviction;
mod leases;
mod namespaces;
mod owners;
mod protection;
mod rings;
mod shares;
mod sizes;
mod table;

use std::cmp::Ordering::{Equal, Greater, Less};

use smallvec::SmallVec;
use terrace_cache::PageKey;

use self::leases::Leases;
use self::namespaces::Namespaces;
use self::owners::{NO_OWNER, OwnerNumber, Owners};
use self::rings::{Ring, Rings};
pub use self::shares::NamespaceShare;
use self::shares::Shares;
pub use self::sizes::{check_shares, leases_max, slots_of};
use self::table::Table;
use crate::object::ObjectId;
use crate::stats::TierStats;
use crate::store::{Owner, Pin, Removal, StoreError};

/// Number of a slot.
pub type Slot = u32;

const NO_SLOT: Slot = Slot::MAX;

/// Maps objects to slots and chooses which objects to evict.
#[derive(Debug)]
pub struct Catalogue {
    /// Slots that have been in use at least once.
    entries: Vec<SlotEntry>,
    /// Number of slots, used or free.
    slots: Slot,
    table: Table,
    namespaces: Namespaces,
    owners: Owners,
    shares: Shares,
    /// First slot of the free list; each free slot names the next.
    free: Slot,
    /// First slot of the list of free slots whose last write failed. They are reused last, so that
    /// one bad slot does not fail every put.
    shunned: Slot,
    /// Length of both free lists.
    free_count: u32,
    /// Number of slots that can be used yet.
    usable: Slot,
    /// Eviction rows of present objects.
    rings: Rings,
    /// Unprotected objects, oldest first.
    plain: Ring,
    /// Objects with a soft pin and no other protection.
    softly_pinned: Ring,
    /// Doomed slots that the backend has not taken yet.
    doomed: Vec<Slot>,
    leases: Leases,
    /// Earliest time at which the pins of an owner expire.
    owners_end_ms: u64,
    present: u32,
    /// Reads in flight.
    reads: u32,
    soft_pinned: u32,
    bytes: u64,
    counts: Counts,
    /// Objects inspected by searches for a victim.
    #[cfg(test)]
    inspected: u64,
}

/// Counters of what happened to objects.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    evicted: u64,
    removed: u64,
    superseded: u64,
    leases: u64,
    leases_refused: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Free,
    Writing,
    Present,
    /// Impossible to find, not yet released by the backend.
    Doomed,
    /// Released by the backend, but not by its last readers.
    Leaving,
}

const UNUSED: SlotEntry = SlotEntry {
    key: PageKey(0),
    generation: 0,
    leased_until_ms: 0,
    namespace: 0,
    length: NO_SLOT,
    owner: NO_OWNER,
    readers: 0,
    state: SlotState::Free,
    soft_pin: false,
    visited: false,
    recorded: false,
};

/// Bookkeeping of a slot in 48 bytes: with its ring links and its share of the table, an object
/// costs less than 72 bytes.
#[derive(Clone, Copy, Debug)]
struct SlotEntry {
    key: PageKey,
    generation: u64,
    leased_until_ms: u64,
    namespace: u32,
    /// Length of the payload; in a free slot, the next free one.
    length: u32,
    /// Owner of its hard pin.
    owner: OwnerNumber,
    readers: u16,
    state: SlotState,
    soft_pin: bool,
    /// Set by a lookup, cleared when eviction passes the object.
    visited: bool,
    /// The disk's index names this object, or is about to.
    recorded: bool,
}

const _: () = assert!(size_of::<SlotEntry>() == 48);

/// Entry of the disk's index for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Id of the object.
    pub id: ObjectId,
    /// Length of its payload.
    pub length: u32,
    /// Owner of its hard pin.
    pub owner: Option<Owner>,
}

/// Outcome of [`Catalogue::reserve`].
#[derive(Debug, PartialEq, Eq)]
pub enum Reserved {
    /// Slot to write the object to.
    Slot(Slot),
    /// The object is present, in this slot.
    AlreadyThere(Slot),
    /// No slot is free: evict.
    NoSlot,
}

impl Catalogue {
    /// Creates a catalogue of `slots` slots, of which the first `usable` can be used. Its memory
    /// grows with the number of slots and with those in use.
    pub fn new(slots: Slot, usable: Slot) -> Self {
        let mut rings = Rings::default();
        let (plain, softly_pinned) = (rings.add(), rings.add());
        Self {
            entries: Vec::new(),
            slots,
            table: Table::new(slots, usable),
            namespaces: Namespaces::default(),
            owners: Owners::default(),
            shares: Shares::default(),
            free: NO_SLOT,
            shunned: NO_SLOT,
            free_count: 0,
            usable,
            rings,
            plain,
            softly_pinned,
            doomed: Vec::new(),
            leases: Leases::default(),
            owners_end_ms: u64::MAX,
            present: 0,
            reads: 0,
            soft_pinned: 0,
            bytes: 0,
            counts: Counts::default(),
            #[cfg(test)]
            inspected: 0,
        }
    }

    /// Reserves a slot for an object that is about to be written. The pin applies once the object
    /// is published, or at once if the object is present.
    pub fn reserve(
        &mut self,
        id: &ObjectId,
        length: u32,
        pin: Option<Pin>,
        now_ms: u64,
    ) -> Result<Reserved, StoreError> {
        let mut being_written = false;
        for slot in self.generations(id) {
            let entry = &mut self.entries[slot as usize];
            match (entry.state, entry.generation.cmp(&id.generation)) {
                (_, Less) => {}
                (SlotState::Present, Greater) => {
                    return Err(StoreError::Superseded { present: entry.generation });
                }
                (SlotState::Present, Equal) => {
                    entry.visited = true;
                    if let Some(pin) = pin {
                        self.pin_slot(slot, pin, now_ms)?;
                    }
                    return Ok(Reserved::AlreadyThere(slot));
                }
                // An object that is being written may still be abandoned.
                (SlotState::Writing, Equal | Greater) => being_written = true,
                (SlotState::Free | SlotState::Doomed | SlotState::Leaving, Equal | Greater) => {
                    unreachable!("only what is written or present is in the table")
                }
            }
        }
        if being_written {
            return Err(StoreError::BeingWritten);
        }
        self.enforce_share(&id.namespace, now_ms)?;
        if !self.has_free() {
            return Ok(Reserved::NoSlot);
        }
        let owner = match pin {
            Some(Pin::Hard(owner)) => self.owners.enter(owner).ok_or(StoreError::Full)?,
            Some(Pin::Soft) | None => NO_OWNER,
        };
        let slot = self.take_free().expect("there is one");
        self.enter(slot, id, length, owner);
        self.entries[slot as usize].soft_pin = pin == Some(Pin::Soft);
        Ok(Reserved::Slot(slot))
    }

    /// Makes the complete object in `slot` visible. It replaces lower generations, whose slots are
    /// returned. If a higher generation was published meanwhile, it is doomed itself.
    pub fn publish(&mut self, slot: Slot) -> SmallVec<[Slot; 2]> {
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, SlotState::Writing);
        entry.state = SlotState::Present;
        self.present += 1;
        self.bytes += u64::from(entry.length);
        self.soft_pinned += u32::from(entry.soft_pin);
        self.owners.appear(entry.owner);
        self.enter_row(slot);
        let mut replaced = self.generations(&self.id(slot));
        replaced.retain(|other| self.entries[*other as usize].state == SlotState::Present);
        let latest =
            replaced.iter().copied().max_by_key(|slot| self.entries[*slot as usize].generation);
        replaced.retain(|old| Some(*old) != latest);
        for old in &replaced {
            self.counts.superseded += 1;
            self.leave(*old);
        }
        replaced
    }

    /// Frees the slot of a write that failed.
    pub fn abandon(&mut self, slot: Slot) {
        assert_eq!(self.entries[slot as usize].state, SlotState::Writing);
        self.forget(slot);
        self.disown(slot);
        self.make_free(slot);
        self.free = std::mem::replace(&mut self.entries[slot as usize].length, self.shunned);
        self.shunned = slot;
    }

    /// Restores an object from an entry of the disk's index. Returns false if the catalogue has the
    /// object in this or a higher generation. The owner's pin expires unless the owner appears
    /// ([`Catalogue::doubt_owners`]).
    pub fn restore(&mut self, slot: Slot, recorded: &Recorded) -> bool {
        let Recorded { id, length, owner } = recorded;
        assert!(slot >= self.fresh(), "restored in the order of slots");
        while self.fresh() < slot {
            let unused = self.take_fresh();
            self.make_free(unused);
        }
        self.take_fresh();
        let beaten = self
            .generations(id)
            .iter()
            .any(|other| self.entries[*other as usize].generation >= id.generation);
        let owner = owner.and_then(|owner| self.owners.enter(owner));
        self.enter(slot, id, *length, owner.unwrap_or(NO_OWNER));
        self.entries[slot as usize].recorded = true;
        if beaten {
            self.forget(slot);
            self.disown(slot);
            self.entries[slot as usize].state = SlotState::Doomed;
            self.doomed.push(slot);
            return false;
        }
        let replaced = self.publish(slot);
        self.doomed.extend(replaced);
        true
    }

    /// Begins to read an object: its slot is not reused before [`Catalogue::end_read`].
    pub fn begin_read(&mut self, id: &ObjectId) -> Option<(Slot, u32)> {
        let slot = self.find(id)?;
        self.begin_moving(slot)?;
        let entry = &mut self.entries[slot as usize];
        entry.visited = true;
        Some((slot, entry.length))
    }

    /// Begins to read a present object, until [`Catalogue::end_read`], without counting as a use.
    pub fn begin_moving(&mut self, slot: Slot) -> Option<()> {
        let entry = &mut self.entries[slot as usize];
        entry.readers = entry.readers.checked_add(1)?;
        self.reads += 1;
        Some(())
    }

    /// Ends a read.
    pub fn end_read(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot as usize];
        entry.readers -= 1;
        self.reads -= 1;
        if entry.state == SlotState::Leaving && entry.readers == 0 {
            self.make_free(slot);
        }
    }

    /// Makes an object impossible to find.
    pub fn doom(&mut self, slot: Slot) {
        self.leave(slot);
        self.doomed.push(slot);
    }

    /// Makes the object in `slot` impossible to find, if it still is this one.
    pub fn doom_if(&mut self, slot: Slot, id: &ObjectId) {
        if self.find(id) == Some(slot) {
            self.doom(slot);
        }
    }

    /// Makes all lower generations of an object impossible to find.
    pub fn doom_lower(&mut self, id: &ObjectId) {
        for slot in self.generations(id) {
            let entry = &self.entries[slot as usize];
            if entry.state == SlotState::Present && entry.generation < id.generation {
                self.counts.superseded += 1;
                self.doom(slot);
            }
        }
    }

    /// Takes the slots that were doomed since the last call.
    pub fn take_doomed(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.doomed)
    }

    /// Releases a doomed slot to which nothing but readers refers; it is free after the last of
    /// them.
    pub fn release(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, SlotState::Doomed);
        entry.state = SlotState::Leaving;
        if entry.readers == 0 {
            self.make_free(slot);
        }
    }

    /// Releases all doomed slots, for a backend that keeps no other references to them.
    pub fn release_doomed(&mut self) {
        while let Some(slot) = self.doomed.pop() {
            self.release(slot);
        }
    }

    /// Returns the error with which a removal would be refused, if any.
    pub fn check_removal(
        &self,
        id: &ObjectId,
        removal: Removal,
        now_ms: u64,
    ) -> Result<Slot, StoreError> {
        let Some(slot) = self.find(id) else {
            let written = self.generations(id).iter().any(|slot| {
                let entry = &self.entries[*slot as usize];
                entry.state == SlotState::Writing && entry.generation == id.generation
            });
            return Err(if written { StoreError::BeingWritten } else { StoreError::Missing });
        };
        let entry = &self.entries[slot as usize];
        let is_pinned = self.owners.protects(entry.owner, now_ms);
        let is_leased = entry.leased_until_ms > now_ms;
        match removal {
            Removal::Plain | Removal::Forced if is_pinned => Err(StoreError::Pinned),
            Removal::Plain if is_leased => Err(StoreError::Leased),
            Removal::Plain | Removal::Forced | Removal::Final => Ok(slot),
        }
    }

    /// Makes an object impossible to find, unless a pin or a lease protects it.
    pub fn remove(
        &mut self,
        id: &ObjectId,
        removal: Removal,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let slot = self.check_removal(id, removal, now_ms)?;
        self.counts.removed += 1;
        self.doom(slot);
        Ok(())
    }

    /// Sets the number of usable slots.
    pub fn set_usable(&mut self, usable: Slot) {
        self.usable = usable.min(self.slots());
    }

    /// Records whether the disk's index names the object in `slot`, or is about to.
    pub fn set_recorded(&mut self, slot: Slot, recorded: bool) {
        self.entries[slot as usize].recorded = recorded;
    }

    /// Slot of a present object.
    pub fn find(&self, id: &ObjectId) -> Option<Slot> {
        let (namespace, key, generation) = (self.namespaces.find(id)?, id.key, id.generation);
        let same = |slot: &Slot| {
            let entry = &self.entries[*slot as usize];
            entry.key == key && entry.generation == generation && entry.namespace == namespace
        };
        let slot = self.table.find(hash(key, namespace), same)?;
        (self.entries[slot as usize].state == SlotState::Present).then_some(slot)
    }

    /// Id of the object in a slot that is not free.
    pub fn id(&self, slot: Slot) -> ObjectId {
        let entry = &self.entries[slot as usize];
        let namespace = self.namespaces.digest(entry.namespace);
        ObjectId { namespace, key: entry.key, generation: entry.generation }
    }

    /// Index entry for the object in `slot`, if the disk's index names it.
    pub fn recorded(&self, slot: Slot) -> Option<Recorded> {
        let entry = self.entries.get(slot as usize)?;
        (entry.recorded && entry.state != SlotState::Free).then(|| Recorded {
            id: self.id(slot),
            length: entry.length,
            owner: self.owners.get(entry.owner),
        })
    }

    /// Returns true while the object that is or was in the slot is being read.
    pub fn has_readers(&self, slot: Slot) -> bool {
        self.entries[slot as usize].readers > 0
    }

    /// Returns true if the object in the slot can be found.
    pub fn is_present(&self, slot: Slot) -> bool {
        self.entries.get(slot as usize).is_some_and(|entry| entry.state == SlotState::Present)
    }

    /// Length of the object in the slot.
    pub fn length(&self, slot: Slot) -> u32 {
        self.entries[slot as usize].length
    }

    /// Number of slots.
    pub fn slots(&self) -> Slot {
        self.slots
    }

    /// Number of usable slots.
    pub fn usable(&self) -> Slot {
        self.usable
    }

    /// Number of slots that are not free.
    pub fn used(&self) -> Slot {
        self.fresh() - self.free_count
    }

    /// Returns true if a slot can be reserved without eviction.
    pub fn has_free(&self) -> bool {
        self.free_count > 0 || self.fresh() < self.usable
    }

    /// Number of doomed slots that the backend has not taken yet.
    pub fn doomed(&self) -> usize {
        self.doomed.len()
    }

    /// Statistics of the catalogue; `slot_bytes` is the payload that fits in a slot.
    pub fn stats(&self, slot_bytes: usize, now_ms: u64) -> TierStats {
        let slot_bytes = slot_bytes as u64;
        TierStats {
            objects: u64::from(self.present),
            bytes: self.bytes,
            resident_bytes: u64::from(self.used()) * slot_bytes,
            capacity_bytes: u64::from(self.slots()) * slot_bytes,
            slot_bytes,
            index_bytes: self.index_bytes() as u64,
            hard_pinned: self.owners.pinned(now_ms),
            soft_pinned: u64::from(self.soft_pinned),
            leases: self.counts.leases,
            leases_refused: self.counts.leases_refused,
            evicted: self.counts.evicted,
            removed: self.counts.removed,
            superseded: self.counts.superseded,
            ..TierStats::default()
        }
    }

    fn index_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<SlotEntry>()
            + self.rings.bytes()
            + self.table.bytes()
            + self.leases.bytes()
            + self.doomed.capacity() * size_of::<Slot>()
            + self.namespaces.bytes()
            + self.owners.bytes()
            + self.shares.bytes()
    }

    /// Returns true if any generation of the object is present or being written.
    pub fn knows(&self, id: &ObjectId) -> bool {
        !self.generations(id).is_empty()
    }

    /// Slots of all generations of an object that are present or being written.
    fn generations(&self, id: &ObjectId) -> SmallVec<[Slot; 2]> {
        let mut slots = SmallVec::new();
        if let Some(namespace) = self.namespaces.find(id) {
            slots.extend(self.table.candidates(hash(id.key, namespace)).filter(|slot| {
                let entry = &self.entries[*slot as usize];
                entry.key == id.key && entry.namespace == namespace
            }));
        }
        slots
    }

    /// Registers the object that is about to be written to `slot`.
    fn enter(&mut self, slot: Slot, id: &ObjectId, length: u32, owner: OwnerNumber) {
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, SlotState::Free);
        *entry = SlotEntry {
            key: id.key,
            generation: id.generation,
            leased_until_ms: 0,
            namespace: self.namespaces.enter(id.namespace),
            length,
            owner,
            readers: 0,
            state: SlotState::Writing,
            soft_pin: false,
            visited: false,
            recorded: false,
        };
        let hash_of = |slot: &Slot| {
            let entry = &self.entries[*slot as usize];
            hash(entry.key, entry.namespace)
        };
        self.table.insert(hash_of(&slot), slot, hash_of);
        self.shares.enter(&id.namespace);
    }

    /// Removes a present object from the table and the counts.
    fn leave(&mut self, slot: Slot) {
        self.forget(slot);
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, SlotState::Present);
        entry.state = SlotState::Doomed;
        self.present -= 1;
        self.soft_pinned -= u32::from(entry.soft_pin);
        self.bytes -= u64::from(entry.length);
        self.owners.disappear(entry.owner);
        self.leave_row(slot);
        self.disown(slot);
    }

    /// Clears the owner of the hard pin on `slot`.
    fn disown(&mut self, slot: Slot) {
        let owner = std::mem::replace(&mut self.entries[slot as usize].owner, NO_OWNER);
        self.owners.leave(owner);
    }

    fn forget(&mut self, slot: Slot) {
        let SlotEntry { key, namespace, .. } = self.entries[slot as usize];
        self.table.remove(hash(key, namespace), slot);
        self.shares.leave(&self.namespaces.digest(namespace));
    }

    fn take_free(&mut self) -> Option<Slot> {
        if self.free == NO_SLOT && self.fresh() < self.usable {
            return Some(self.take_fresh());
        }
        let list = if self.free != NO_SLOT { &mut self.free } else { &mut self.shunned };
        let slot = *list;
        (slot != NO_SLOT).then(|| {
            *list = self.entries[slot as usize].length;
            self.free_count -= 1;
            slot
        })
    }

    /// First slot that was never used.
    fn fresh(&self) -> Slot {
        self.entries.len() as Slot
    }

    fn take_fresh(&mut self) -> Slot {
        let slot = self.fresh();
        push_tightly(&mut self.entries, UNUSED);
        self.rings.push_slot();
        slot
    }

    fn make_free(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot as usize];
        if entry.state != SlotState::Free {
            self.namespaces.leave(entry.namespace);
        }
        entry.state = SlotState::Free;
        entry.recorded = false;
        entry.length = self.free;
        self.free = slot;
        self.free_count += 1;
    }
}

/// Appends to a list that grows by an eighth: doubling would waste much memory in a large store.
fn push_tightly<T>(list: &mut Vec<T>, value: T) {
    const GROWTH_MIN: usize = 1024;
    if list.len() == list.capacity() {
        list.reserve_exact((list.len() / 8).max(GROWTH_MIN));
    }
    list.push(value);
}

/// Hash of a key. Page keys are hashes themselves, but other keys may be small numbers or equal in
/// many namespaces. Both halves of the product depend on all bits of the key.
fn hash(key: PageKey, namespace: u32) -> u64 {
    let (high, low) = ((key.0 >> 64) as u64 ^ u64::from(namespace), key.0 as u64);
    let product =
        u128::from(high ^ 0x9E37_79B9_7F4A_7C15) * u128::from(low ^ 0xD1B5_4A32_D192_ED03);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
