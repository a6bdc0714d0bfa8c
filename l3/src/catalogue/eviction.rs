//! Which object goes when there is no room.
//!
//! Objects stand in a row as they came, and the oldest goes. If it is protected, or was asked for meanwhile, it
//! stands at the end of the row again instead. So nothing goes before something older that nobody has asked
//! for.

use super::{Catalogue, NO_SLOT, Neighbours, Slot, State};

impl Catalogue {
    /// Dooms the object that is missed least, if any may go; one with a soft pin if no other may.
    pub fn evict(&mut self, now_ms: u64) -> bool {
        if now_ms < self.barren_until_ms {
            return false;
        }
        if now_ms >= self.plain_barren_until_ms {
            if self.evict_one(now_ms, false) {
                return true;
            }
            self.plain_barren_until_ms = self.next_end(now_ms);
        }
        if self.soft_pinned > 0 && self.evict_one(now_ms, true) {
            return true;
        }
        self.barren_until_ms = self.next_end(now_ms);
        false
    }

    /// When the next lease ends, or the next owner's pins do.
    fn next_end(&mut self, now_ms: u64) -> u64 {
        self.leases.next_end(now_ms).min(self.owners.next_end(now_ms))
    }

    /// Whether nothing is free and nothing can be evicted unless somebody changes that. What is being
    /// written or read changes by itself.
    pub fn is_stuck(&self, now_ms: u64) -> bool {
        let nothing_goes = now_ms < self.barren_until_ms;
        let all_is_still = self.used() == self.present && self.reads == 0;
        !self.has_free() && all_is_still && nothing_goes
    }

    /// Looks at all twice: the first time may clear `visited` everywhere, the second then finds a victim.
    fn evict_one(&mut self, now_ms: u64, soft_pinned: bool) -> bool {
        for _ in 0..2 * u64::from(self.present) {
            let slot = self.oldest;
            let entry = &mut self.entries[slot as usize];
            let is_protected = self.owners.protects(entry.owner, now_ms)
                || entry.readers > 0
                || entry.leased_until_ms > now_ms
                || (entry.soft_pin && !soft_pinned);
            if !is_protected && !std::mem::take(&mut entry.visited) {
                self.counts.evicted += 1;
                self.doom(slot);
                return true;
            }
            self.leave_row(slot);
            self.stand_in_row(slot);
        }
        false
    }

    /// The object in `slot` is the newest.
    pub(super) fn stand_in_row(&mut self, slot: Slot) {
        let older = std::mem::replace(&mut self.newest, slot);
        self.row[slot as usize] = Neighbours { older, newer: NO_SLOT };
        match older {
            NO_SLOT => self.oldest = slot,
            older => self.row[older as usize].newer = slot,
        }
    }

    /// The object in `slot` is not present any more, or about to stand at the end again.
    pub(super) fn leave_row(&mut self, slot: Slot) {
        let Neighbours { older, newer } = self.row[slot as usize];
        match older {
            NO_SLOT => self.oldest = newer,
            older => self.row[older as usize].newer = newer,
        }
        match newer {
            NO_SLOT => self.newest = older,
            newer => self.row[newer as usize].older = older,
        }
    }

    /// Something about the object in `slot` has changed: perhaps it may be evicted from now on.
    pub(super) fn may_go(&mut self, slot: Slot) {
        let entry = &self.entries[slot as usize];
        if entry.state == State::Present && entry.readers == 0 {
            let from_ms = entry.leased_until_ms.max(self.owners.end(entry.owner));
            self.barren_until_ms = self.barren_until_ms.min(from_ms);
            if !entry.soft_pin {
                self.plain_barren_until_ms = self.plain_barren_until_ms.min(from_ms);
            }
        }
    }
}
