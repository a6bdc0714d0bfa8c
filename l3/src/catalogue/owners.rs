//! Whose hard pins there are, and whether they still count.

use super::rings::{Ring, Rings};
use crate::store::Owner;

/// The number of an owner in a catalogue; 0 is nobody.
pub(super) type OwnerNumber = u16;

pub(super) const NOBODY: OwnerNumber = 0;

/// The owners of the pins in a catalogue: a handful, of which each may have many.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// Those without slots are free.
    list: Vec<Holdings>,
}

#[derive(Clone, Copy, Debug)]
struct Holdings {
    owner: Owner,
    /// Slots that refer to it.
    slots: u32,
    /// Those of them whose object is present.
    pinned: u32,
    /// Until when its pins count: for ever, unless it is gone.
    until_ms: u64,
    /// The row of its objects, once it has one.
    ring: Option<Ring>,
    /// Its pins do not count any more, and its objects were put among the others.
    is_over: bool,
}

impl Holdings {
    fn set_end(&mut self, until_ms: u64) {
        (self.until_ms, self.is_over) = (until_ms, false);
    }
}

impl Owners {
    /// One more slot is the owner's, who is there. `None` if there are too many owners to count.
    pub(super) fn enter(&mut self, owner: Owner) -> Option<OwnerNumber> {
        let place = self.place(owner).or_else(|| self.list.iter().position(|it| it.slots == 0));
        let place = place.unwrap_or(self.list.len());
        let number = OwnerNumber::try_from(place + 1).ok()?;
        let until_ms = u64::MAX;
        let new = Holdings { owner, slots: 0, pinned: 0, until_ms, ring: None, is_over: false };
        match self.list.get_mut(place) {
            Some(free) if free.slots == 0 => *free = Holdings { ring: free.ring, ..new },
            Some(there) => there.set_end(until_ms),
            None => self.list.push(new),
        }
        self.list[place].slots += 1;
        Some(number)
    }

    /// One slot less is the owner's.
    pub(super) fn leave(&mut self, number: OwnerNumber) {
        if let Some(holdings) = self.holdings(number) {
            holdings.slots -= 1;
        }
    }

    /// The object in one more of the owner's slots is present.
    pub(super) fn appear(&mut self, number: OwnerNumber) {
        if let Some(holdings) = self.holdings(number) {
            holdings.pinned += 1;
        }
    }

    /// The object in one of the owner's slots is not present any more.
    pub(super) fn disappear(&mut self, number: OwnerNumber) {
        if let Some(holdings) = self.holdings(number) {
            holdings.pinned -= 1;
        }
    }

    /// Objects whose pins count.
    pub(super) fn pinned(&self, now_ms: u64) -> u64 {
        let there = self.list.iter().filter(|it| it.until_ms > now_ms);
        there.map(|it| u64::from(it.pinned)).sum()
    }

    pub(super) fn get(&self, number: OwnerNumber) -> Option<Owner> {
        (number != NOBODY).then(|| self.list[usize::from(number) - 1].owner)
    }

    /// Until when the pins of that owner count.
    pub(super) fn end(&self, number: OwnerNumber) -> u64 {
        if number == NOBODY { 0 } else { self.list[usize::from(number) - 1].until_ms }
    }

    /// Whether they count.
    pub(super) fn protects(&self, number: OwnerNumber, now_ms: u64) -> bool {
        self.end(number) > now_ms
    }

    /// From now on the owner's pins count until then.
    pub(super) fn set_end(&mut self, owner: Owner, until_ms: u64) {
        if let Some(place) = self.place(owner) {
            self.list[place].set_end(until_ms);
        }
    }

    /// From now on all pins count until then.
    pub(super) fn set_all_ends(&mut self, until_ms: u64) {
        self.list.iter_mut().for_each(|holdings| holdings.set_end(until_ms));
    }

    /// When the next owner's pins will not count any more, of those that do.
    pub(super) fn next_end(&self) -> u64 {
        let count = self.list.iter().filter(|it| it.slots > 0 && !it.is_over);
        count.map(|it| it.until_ms).min().unwrap_or(u64::MAX)
    }

    /// The rows of owners whose pins have stopped to count. Their objects must be put among the others.
    pub(super) fn end_pins(&mut self, now_ms: u64) -> impl Iterator<Item = Ring> {
        let ended = self.list.iter_mut().filter(move |it| !it.is_over && it.until_ms <= now_ms);
        ended.filter_map(|it| {
            it.is_over = true;
            it.ring
        })
    }

    /// The row of the objects that this owner has pinned, unless its pins do not count any more.
    pub(super) fn ring(&mut self, number: OwnerNumber, rings: &mut Rings) -> Option<Ring> {
        let holdings = self.holdings(number).filter(|it| !it.is_over)?;
        Some(*holdings.ring.get_or_insert_with(|| rings.add()))
    }

    pub(super) fn bytes(&self) -> usize {
        self.list.capacity() * size_of::<Holdings>()
    }

    fn holdings(&mut self, number: OwnerNumber) -> Option<&mut Holdings> {
        (number != NOBODY).then(|| &mut self.list[usize::from(number) - 1])
    }

    fn place(&self, owner: Owner) -> Option<usize> {
        self.list.iter().position(|it| it.owner == owner && it.slots > 0)
    }
}
