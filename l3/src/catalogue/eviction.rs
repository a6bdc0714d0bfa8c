//! Eviction policy.
//!
//! Unprotected objects form a queue, and the oldest is evicted. If it was requested since it
//! entered the queue, it moves to the end instead. So no object is evicted before an older one that
//! was never requested. Protected objects are in separate rows, which no search for a victim
//! visits: one row per owner of hard pins, one per end time of leases, and one for soft pins. When
//! a protection ends, its whole row moves to the queue in one step.

use super::rings::Ring;
use super::{Catalogue, NO_OWNER, Slot, SlotState};

/// Maximum number of objects that one search inspects; the catalogue is locked meanwhile.
const INSPECTED_MAX: u32 = 64;

/// Outcome of a search for a victim.
enum Search {
    Found(Slot),
    /// The row has no object that may be evicted.
    Nothing,
    /// None of the inspected objects may be evicted, but the row has more.
    Unfinished,
}

impl Catalogue {
    /// Dooms the least useful object that may be evicted; one with a soft pin only if there is no
    /// other. Returns false if there is none. A search inspects a bounded number of objects, so it
    /// may miss a victim while many are being read.
    pub fn evict(&mut self, now_ms: u64) -> bool {
        self.end_protection(now_ms);
        let found = match self.search(self.plain) {
            Search::Nothing => self.search(self.softly_pinned),
            found => found,
        };
        let Search::Found(victim) = found else { return false };
        self.counts.evicted += 1;
        self.doom(victim);
        true
    }

    /// Returns true if no slot is free and none can be evicted until a pin, lease or read changes
    /// that. Objects that are being written or read count as about to change.
    pub fn is_stuck(&self, now_ms: u64) -> bool {
        let is_empty = |ring| self.rings.oldest(ring).is_none();
        let nothing_goes = is_empty(self.plain) && is_empty(self.softly_pinned);
        let is_protected = self.leases.first_end() > now_ms && self.owners_end_ms > now_ms;
        let all_is_still = self.used() == self.present && self.reads == 0;
        !self.has_free() && all_is_still && nothing_goes && is_protected
    }

    /// Moves objects whose lease or owner has expired to the queue.
    pub(super) fn end_protection(&mut self, now_ms: u64) {
        while let Some(ring) = self.leases.take_ended(now_ms) {
            self.rings.remove_into(ring, self.plain);
        }
        if self.owners_end_ms <= now_ms {
            for ring in self.owners.end_pins(now_ms) {
                self.rings.append(ring, self.plain);
            }
            self.owners_end_ms = self.owners.next_end();
        }
    }

    fn search(&mut self, ring: Ring) -> Search {
        let (mut asked_for, mut first_kept) = (None, None);
        for _ in 0..INSPECTED_MAX {
            let Some(slot) = self.rings.oldest(ring).filter(|slot| first_kept != Some(*slot))
            else {
                return asked_for.map_or(Search::Nothing, Search::Found);
            };
            #[cfg(test)]
            {
                self.inspected += 1;
            }
            let home = self.home(slot);
            if home != ring {
                // Its row was merged with rows that lost their protection.
                self.rings.shift(home, slot);
                continue;
            }
            let entry = &mut self.entries[slot as usize];
            if entry.readers > 0 {
                first_kept = first_kept.or(Some(slot));
            } else if std::mem::take(&mut entry.visited) {
                asked_for = asked_for.or(Some(slot));
            } else {
                return Search::Found(slot);
            }
            self.rings.shift(ring, slot);
        }
        // All inspected objects were requested since: evict the oldest of them.
        asked_for.map_or(Search::Unfinished, Search::Found)
    }

    /// Row in which a present object belongs.
    fn home(&mut self, slot: Slot) -> Ring {
        let entry = &self.entries[slot as usize];
        if entry.owner != NO_OWNER
            && let Some(ring) = self.owners.ring(entry.owner, &mut self.rings)
        {
            return ring;
        }
        match self.leases.ring(entry.leased_until_ms) {
            Some(ring) => ring,
            None if entry.soft_pin => self.softly_pinned,
            None => self.plain,
        }
    }

    /// Adds the present object in `slot` to its row, as the newest.
    pub(super) fn enter_row(&mut self, slot: Slot) {
        let home = self.home(slot);
        self.rings.push(home, slot);
    }

    /// Removes the object in `slot` from its row.
    pub(super) fn leave_row(&mut self, slot: Slot) {
        self.rings.unlink(slot);
    }

    /// Moves the object in `slot` to the row that matches its protection.
    pub(super) fn change_row(&mut self, slot: Slot) {
        if self.entries[slot as usize].state == SlotState::Present {
            let home = self.home(slot);
            self.rings.shift(home, slot);
        }
    }
}
