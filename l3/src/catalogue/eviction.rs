//! Which object goes when there is no room.
//!
//! Objects stand in a row as they came, and the oldest goes. If it was asked for meanwhile, it stands at the end of
//! the row again instead. So nothing goes before something older that nobody has asked for. Protected objects stand
//! in rows of their own, so that no search for a victim passes them: one for each owner of hard pins, one for each
//! time at which leases end, and one for soft pins. What does not protect any more puts its row back, all at once.

use super::rings::Ring;
use super::{Catalogue, NOBODY, Slot, State};

/// Objects that are looked at for one victim, at most: the catalogue is locked meanwhile.
const LOOKED_AT_MAX: u32 = 64;

/// What a search for a victim came to.
enum Search {
    Found(Slot),
    /// No object of the row may go.
    Nothing,
    /// None of those that were looked at may go, and there are others.
    Unfinished,
}

impl Catalogue {
    /// Dooms the object that is missed least, if any may go; one with a soft pin if no other may. However many
    /// objects there are, few are looked at: where so many are being read, it may fail though another could go.
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

    /// Whether nothing is free and nothing can be evicted unless somebody changes that. What is being
    /// written or read changes by itself.
    pub fn is_stuck(&self, now_ms: u64) -> bool {
        let is_empty = |ring| self.rings.oldest(ring).is_none();
        let nothing_goes = is_empty(self.plain) && is_empty(self.softly_pinned);
        let is_protected = self.leases.first_end() > now_ms && self.owners_end_ms > now_ms;
        let all_is_still = self.used() == self.present && self.reads == 0;
        !self.has_free() && all_is_still && nothing_goes && is_protected
    }

    /// Puts what leases and gone owners do not protect any more among what may go.
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
        for _ in 0..LOOKED_AT_MAX {
            let Some(slot) = self.rings.oldest(ring).filter(|slot| first_kept != Some(*slot))
            else {
                return asked_for.map_or(Search::Nothing, Search::Found);
            };
            #[cfg(test)]
            {
                self.looked_at += 1;
            }
            let home = self.home(slot);
            if home != ring {
                // It came here with others that nothing protects any more.
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
        // All that was looked at has been asked for: then the oldest of it goes.
        asked_for.map_or(Search::Unfinished, Search::Found)
    }

    /// The row in which a present object belongs.
    fn home(&mut self, slot: Slot) -> Ring {
        let entry = &self.entries[slot as usize];
        if entry.owner != NOBODY
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

    /// The object in `slot` is present from now on, and the newest.
    pub(super) fn stand_in_row(&mut self, slot: Slot) {
        let home = self.home(slot);
        self.rings.push(home, slot);
    }

    /// The object in `slot` is not present any more.
    pub(super) fn leave_row(&mut self, slot: Slot) {
        self.rings.unlink(slot);
    }

    /// Something about what protects the object in `slot` has changed.
    pub(super) fn change_row(&mut self, slot: Slot) {
        if self.entries[slot as usize].state == State::Present {
            let home = self.home(slot);
            self.rings.shift(home, slot);
        }
    }
}
