//! Which object is in which slot, and which may go. Pure bookkeeping, shared by the memory and the
//! disk backend: no IO, no lock, no clock.
//!
//! A slot is free, being written, present, or doomed: doomed slots hold objects that nobody can find
//! any more, but that a reader may still be copying, or that the disk's index still names. The backend
//! says when that is over ([`Catalogue::release`]).

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
use self::owners::{NOBODY, OwnerNumber, Owners};
use self::rings::{Ring, Rings};
pub use self::shares::NamespaceShare;
use self::shares::Shares;
pub use self::sizes::{check_shares, leases_max, slots_of};
use self::table::Table;
use crate::object::ObjectId;
use crate::stats::TierStats;
use crate::store::{Owner, Pin, Removal, StoreError};

/// The number of a slot.
pub type Slot = u32;

const NO_SLOT: Slot = Slot::MAX;

/// Which object is in which slot, and which may go.
#[derive(Debug)]
pub struct Catalogue {
    /// Slots that were in use at least once.
    entries: Vec<Entry>,
    /// Number of slots, in use or not.
    slots: Slot,
    table: Table,
    namespaces: Namespaces,
    owners: Owners,
    shares: Shares,
    /// The first of the free slots that were used before; each names the next.
    free: Slot,
    /// Likewise those whose last write failed. They are used when nothing else is left: what ails one
    /// of them must not fail every put.
    shunned: Slot,
    /// How many there are of both.
    free_count: u32,
    /// Slots from here on cannot be used yet.
    usable: Slot,
    /// The rows of present objects.
    rings: Rings,
    /// Objects that nothing protects, as they came.
    plain: Ring,
    /// Objects with a soft pin and nothing else.
    softly_pinned: Ring,
    /// Doomed slots that the backend has not been told of.
    doomed: Vec<Slot>,
    leases: Leases,
    /// When the pins of the next owner stop to count, at the earliest.
    owners_end_ms: u64,
    present: u32,
    /// Reads under way.
    reads: u32,
    soft_pinned: u32,
    bytes: u64,
    counts: Counts,
    /// Objects that searches for a victim have looked at.
    #[cfg(test)]
    looked_at: u64,
}

/// What happened to objects, as far as the catalogue sees it.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    evicted: u64,
    removed: u64,
    superseded: u64,
    leases: u64,
    leases_refused: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Writing,
    Present,
    /// Impossible to find, not yet released by the backend.
    Doomed,
    /// Released, but for its last readers.
    Leaving,
}

const UNUSED: Entry = Entry {
    key: PageKey(0),
    generation: 0,
    leased_until_ms: 0,
    namespace: 0,
    length: NO_SLOT,
    owner: NOBODY,
    readers: 0,
    state: State::Free,
    soft_pin: false,
    visited: false,
    recorded: false,
};

/// 48 bytes: with its neighbours and its share of the table an object costs less than 72.
#[derive(Clone, Copy, Debug)]
struct Entry {
    key: PageKey,
    generation: u64,
    leased_until_ms: u64,
    namespace: u32,
    /// Of the payload; in a free slot, the next free one.
    length: u32,
    /// Whose hard pin it has.
    owner: OwnerNumber,
    readers: u16,
    state: State,
    soft_pin: bool,
    /// Asked for since it was last the oldest.
    visited: bool,
    /// The disk's index names this object, or is about to.
    recorded: bool,
}

const _: () = assert!(size_of::<Entry>() == 48);

/// What the disk's index says of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Its name.
    pub id: ObjectId,
    /// The length of its payload.
    pub length: u32,
    /// Whose hard pin it has.
    pub owner: Option<Owner>,
}

/// What came of a wish for a slot.
#[derive(Debug, PartialEq, Eq)]
pub enum Reserved {
    /// This one; the object is written to it.
    Slot(Slot),
    /// The object is there already, in this one.
    AlreadyThere(Slot),
    /// Nothing is free: evict.
    NoSlot,
}

impl Catalogue {
    /// Returns a catalogue of `slots` slots, of which the first `usable` can be used. Its memory grows with their number
    /// and with the number of slots in use.
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
            looked_at: 0,
        }
    }

    /// Takes a slot for an object that is about to be written, and has the pin as soon as it is there. One
    /// that is there already gets it at once.
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
                (State::Present, Greater) => {
                    return Err(StoreError::Superseded { present: entry.generation });
                }
                (State::Present, Equal) => {
                    entry.visited = true;
                    if let Some(pin) = pin {
                        self.pin_slot(slot, pin, now_ms)?;
                    }
                    return Ok(Reserved::AlreadyThere(slot));
                }
                // One that is only being written may yet come to nothing.
                (State::Writing, Equal | Greater) => being_written = true,
                (State::Free | State::Doomed | State::Leaving, Equal | Greater) => {
                    unreachable!("only what is written or present is in the table")
                }
            }
        }
        if being_written {
            return Err(StoreError::BeingWritten);
        }
        self.keep_to_share(&id.namespace, now_ms)?;
        if !self.has_free() {
            return Ok(Reserved::NoSlot);
        }
        let owner = match pin {
            Some(Pin::Hard(owner)) => self.owners.enter(owner).ok_or(StoreError::Full)?,
            Some(Pin::Soft) | None => NOBODY,
        };
        let slot = self.take_free().expect("there is one");
        self.enter(slot, id, length, owner);
        self.entries[slot as usize].soft_pin = pin == Some(Pin::Soft);
        Ok(Reserved::Slot(slot))
    }

    /// The object in `slot` is complete and can be found from now on; it replaces lower generations,
    /// whose slots are answered. If a higher one has come meanwhile, it is doomed itself.
    pub fn publish(&mut self, slot: Slot) -> SmallVec<[Slot; 2]> {
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, State::Writing);
        entry.state = State::Present;
        self.present += 1;
        self.bytes += u64::from(entry.length);
        self.soft_pinned += u32::from(entry.soft_pin);
        self.owners.appear(entry.owner);
        self.stand_in_row(slot);
        let mut replaced = self.generations(&self.id(slot));
        replaced.retain(|other| self.entries[*other as usize].state == State::Present);
        let latest =
            replaced.iter().copied().max_by_key(|slot| self.entries[*slot as usize].generation);
        replaced.retain(|old| Some(*old) != latest);
        for old in &replaced {
            self.counts.superseded += 1;
            self.leave(*old);
        }
        replaced
    }

    /// The write came to nothing: the slot is free again.
    pub fn abandon(&mut self, slot: Slot) {
        assert_eq!(self.entries[slot as usize].state, State::Writing);
        self.forget(slot);
        self.disown(slot);
        self.make_free(slot);
        self.free = std::mem::replace(&mut self.entries[slot as usize].length, self.shunned);
        self.shunned = slot;
    }

    /// Puts an object where the disk's index says it is. False if another one of the same name and at
    /// least this generation is there already. Its owner is not known to be there
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
        self.enter(slot, id, *length, owner.unwrap_or(NOBODY));
        self.entries[slot as usize].recorded = true;
        if beaten {
            self.forget(slot);
            self.disown(slot);
            self.entries[slot as usize].state = State::Doomed;
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

    /// A present object is read until [`Catalogue::end_read`], without being of any more use to anybody for that.
    pub fn begin_moving(&mut self, slot: Slot) -> Option<()> {
        let entry = &mut self.entries[slot as usize];
        entry.readers = entry.readers.checked_add(1)?;
        self.reads += 1;
        Some(())
    }

    /// The reading is over.
    pub fn end_read(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot as usize];
        entry.readers -= 1;
        self.reads -= 1;
        if entry.state == State::Leaving && entry.readers == 0 {
            self.make_free(slot);
        }
    }

    /// Makes an object impossible to find.
    pub fn doom(&mut self, slot: Slot) {
        self.leave(slot);
        self.doomed.push(slot);
    }

    /// Makes the object in `slot` impossible to find, if it is still this one.
    pub fn doom_if(&mut self, slot: Slot, id: &ObjectId) {
        if self.find(id) == Some(slot) {
            self.doom(slot);
        }
    }

    /// Makes all lower generations of an object impossible to find.
    pub fn doom_lower(&mut self, id: &ObjectId) {
        for slot in self.generations(id) {
            let entry = &self.entries[slot as usize];
            if entry.state == State::Present && entry.generation < id.generation {
                self.counts.superseded += 1;
                self.doom(slot);
            }
        }
    }

    /// Slots that were doomed since the last call.
    pub fn take_doomed(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.doomed)
    }

    /// Nothing refers to this doomed slot any more but, perhaps, its readers.
    pub fn release(&mut self, slot: Slot) {
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, State::Doomed);
        entry.state = State::Leaving;
        if entry.readers == 0 {
            self.make_free(slot);
        }
    }

    /// Releases all doomed slots at once, for a backend whose slots nothing else refers to.
    pub fn release_doomed(&mut self) {
        while let Some(slot) = self.doomed.pop() {
            self.release(slot);
        }
    }

    /// Whether a removal would be refused, and why.
    pub fn check_removal(
        &self,
        id: &ObjectId,
        removal: Removal,
        now_ms: u64,
    ) -> Result<Slot, StoreError> {
        let Some(slot) = self.find(id) else {
            let written = self.generations(id).iter().any(|slot| {
                let entry = &self.entries[*slot as usize];
                entry.state == State::Writing && entry.generation == id.generation
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

    /// Makes an object impossible to find, unless something keeps it.
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

    /// Lets more slots be used.
    pub fn set_usable(&mut self, usable: Slot) {
        self.usable = usable.min(self.slots());
    }

    /// Says whether the disk's index names the object in `slot`, or is about to.
    pub fn set_recorded(&mut self, slot: Slot, recorded: bool) {
        self.entries[slot as usize].recorded = recorded;
    }

    /// The slot of a present object.
    pub fn find(&self, id: &ObjectId) -> Option<Slot> {
        let (namespace, key, generation) = (self.namespaces.find(id)?, id.key, id.generation);
        let same = |slot: &Slot| {
            let entry = &self.entries[*slot as usize];
            entry.key == key && entry.generation == generation && entry.namespace == namespace
        };
        let slot = self.table.find(hash(key, namespace), same)?;
        (self.entries[slot as usize].state == State::Present).then_some(slot)
    }

    /// The name of the object in a slot that is not free.
    pub fn id(&self, slot: Slot) -> ObjectId {
        let entry = &self.entries[slot as usize];
        let namespace = self.namespaces.digest(entry.namespace);
        ObjectId { namespace, key: entry.key, generation: entry.generation }
    }

    /// What the disk's index says of the object in `slot`, if it names it.
    pub fn recorded(&self, slot: Slot) -> Option<Recorded> {
        let entry = self.entries.get(slot as usize)?;
        (entry.recorded && entry.state != State::Free).then(|| Recorded {
            id: self.id(slot),
            length: entry.length,
            owner: self.owners.get(entry.owner),
        })
    }

    /// Whether somebody is reading what is, or was, in the slot.
    pub fn has_readers(&self, slot: Slot) -> bool {
        self.entries[slot as usize].readers > 0
    }

    /// Whether the slot has an object that can be found.
    pub fn is_present(&self, slot: Slot) -> bool {
        self.entries.get(slot as usize).is_some_and(|entry| entry.state == State::Present)
    }

    /// The length of the object in the slot.
    pub fn length(&self, slot: Slot) -> u32 {
        self.entries[slot as usize].length
    }

    /// How many slots there are.
    pub fn slots(&self) -> Slot {
        self.slots
    }

    /// How many of them can be used.
    pub fn usable(&self) -> Slot {
        self.usable
    }

    /// Slots that are not free, of those that can be used.
    pub fn used(&self) -> Slot {
        self.fresh() - self.free_count
    }

    /// Whether a slot could be taken without evicting.
    pub fn has_free(&self) -> bool {
        self.free_count > 0 || self.fresh() < self.usable
    }

    /// How many doomed slots there are that the backend has not been told of.
    pub fn doomed(&self) -> usize {
        self.doomed.len()
    }

    /// Fills in what the catalogue knows; `slot_bytes` is the payload that a slot has room for.
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
        self.entries.capacity() * size_of::<Entry>()
            + self.rings.bytes()
            + self.table.bytes()
            + self.leases.bytes()
            + self.doomed.capacity() * size_of::<Slot>()
            + self.namespaces.bytes()
            + self.owners.bytes()
            + self.shares.bytes()
    }

    /// Whether any generation of an object is there, or being written.
    pub fn knows(&self, id: &ObjectId) -> bool {
        !self.generations(id).is_empty()
    }

    /// The slots of all generations of an object, being written or present.
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

    /// The object is about to be in `slot`.
    fn enter(&mut self, slot: Slot, id: &ObjectId, length: u32, owner: OwnerNumber) {
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, State::Free);
        *entry = Entry {
            key: id.key,
            generation: id.generation,
            leased_until_ms: 0,
            namespace: self.namespaces.enter(id.namespace),
            length,
            owner,
            readers: 0,
            state: State::Writing,
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

    /// Takes a present object out of the table and the counts.
    fn leave(&mut self, slot: Slot) {
        self.forget(slot);
        let entry = &mut self.entries[slot as usize];
        assert_eq!(entry.state, State::Present);
        entry.state = State::Doomed;
        self.present -= 1;
        self.soft_pinned -= u32::from(entry.soft_pin);
        self.bytes -= u64::from(entry.length);
        self.owners.disappear(entry.owner);
        self.leave_row(slot);
        self.disown(slot);
    }

    /// Nobody has a hard pin on what is in `slot`.
    fn disown(&mut self, slot: Slot) {
        let owner = std::mem::replace(&mut self.entries[slot as usize].owner, NOBODY);
        self.owners.leave(owner);
    }

    fn forget(&mut self, slot: Slot) {
        let Entry { key, namespace, .. } = self.entries[slot as usize];
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

    /// The first slot that was never used.
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
        if entry.state != State::Free {
            self.namespaces.leave(entry.namespace);
        }
        entry.state = State::Free;
        entry.recorded = false;
        entry.length = self.free;
        self.free = slot;
        self.free_count += 1;
    }
}

/// Appends to a list that grows by an eighth: doubling would take far more memory than a large store needs.
fn push_tightly<T>(list: &mut Vec<T>, value: T) {
    const GROWTH_MIN: usize = 1024;
    if list.len() == list.capacity() {
        list.reserve_exact((list.len() / 8).max(GROWTH_MIN));
    }
    list.push(value);
}

/// Keys of pages are hashes already; others need not be: they may be small numbers, or the same in
/// many namespaces. The halves of the product depend on all bits of the key.
fn hash(key: PageKey, namespace: u32) -> u64 {
    let (high, low) = ((key.0 >> 64) as u64 ^ u64::from(namespace), key.0 as u64);
    let product =
        u128::from(high ^ 0x9E37_79B9_7F4A_7C15) * u128::from(low ^ 0xD1B5_4A32_D192_ED03);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
