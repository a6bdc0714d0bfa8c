//! Rows of slots as linked lists. Each present object is in one row, in order of arrival.

use super::{NO_SLOT, Slot, push_tightly};

/// A row of slots. Its anchor is a link among those of the slots, so that a slot can leave its row
/// without knowing which row that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ring(Slot);

/// Links of a slot, or of an anchor, which link to the newest and the oldest of its row.
#[derive(Clone, Copy, Debug)]
struct Neighbours {
    older: Slot,
    newer: Slot,
}

const NOWHERE: Neighbours = Neighbours { older: NO_SLOT, newer: NO_SLOT };

/// The rows of a catalogue.
#[derive(Debug, Default)]
pub(super) struct Rings {
    slots: Vec<Neighbours>,
    /// Numbered downwards from the largest slot number, where there are no slots.
    anchors: Vec<Neighbours>,
    free: Vec<Ring>,
}

impl Rings {
    /// Adds a slot that is in no row.
    pub(super) fn push_slot(&mut self) {
        push_tightly(&mut self.slots, NOWHERE);
    }

    /// Creates an empty row.
    pub(super) fn add(&mut self) -> Ring {
        let ring = self.free.pop().unwrap_or_else(|| {
            self.anchors.push(NOWHERE);
            Ring(NO_SLOT - self.anchors.len() as Slot)
        });
        *self.at(ring.0) = Neighbours { older: ring.0, newer: ring.0 };
        ring
    }

    /// Appends the slots of a row to another and frees the row.
    pub(super) fn remove_into(&mut self, ring: Ring, other: Ring) {
        self.append(ring, other);
        self.free.push(ring);
    }

    /// Appends the slots of a row to another.
    pub(super) fn append(&mut self, from: Ring, to: Ring) {
        let Neighbours { older: newest, newer: oldest } = *self.at(from.0);
        if oldest == from.0 {
            return;
        }
        let last = self.at(to.0).older;
        self.connect(last, oldest);
        self.connect(newest, to.0);
        self.connect(from.0, from.0);
    }

    /// Slot that has been in the row for longest.
    pub(super) fn oldest(&self, ring: Ring) -> Option<Slot> {
        let oldest = self.anchors[(NO_SLOT - ring.0) as usize - 1].newer;
        (oldest != ring.0).then_some(oldest)
    }

    /// Appends a slot that is in no row.
    pub(super) fn push(&mut self, ring: Ring, slot: Slot) {
        let last = self.at(ring.0).older;
        self.connect(last, slot);
        self.connect(slot, ring.0);
    }

    /// Removes a slot from its row.
    pub(super) fn unlink(&mut self, slot: Slot) {
        let Neighbours { older, newer } = std::mem::replace(self.at(slot), NOWHERE);
        self.connect(older, newer);
    }

    /// Moves a slot from its row to the end of another, or of the same.
    pub(super) fn shift(&mut self, ring: Ring, slot: Slot) {
        self.unlink(slot);
        self.push(ring, slot);
    }

    /// Size in memory.
    pub(super) fn bytes(&self) -> usize {
        (self.slots.capacity() + self.anchors.capacity()) * size_of::<Neighbours>()
            + self.free.capacity() * size_of::<Ring>()
    }

    fn connect(&mut self, older: Slot, newer: Slot) {
        self.at(older).newer = newer;
        self.at(newer).older = older;
    }

    fn at(&mut self, place: Slot) -> &mut Neighbours {
        match self.slots.get_mut(place as usize) {
            Some(slot) => slot,
            None => &mut self.anchors[(NO_SLOT - place) as usize - 1],
        }
    }
}
