//! Which object goes when there is no room.
//!
//! Objects stand in a row as they came. A hand goes along it, from the oldest to the newest and then from the
//! oldest again: it passes over what is protected, spares once what was asked for since it came by, and
//! takes the first of the others. So nothing goes before something older that nobody has asked for.

use super::{Catalogue, NO_SLOT, Neighbours, Slot, State};

impl Catalogue {
    /// Dooms the object that is missed least, if any may go; one with a soft pin if no other may.
    pub(crate) fn evict(&mut self, now_ms: u64) -> bool {
        if self.pinned >= self.present || now_ms < self.barren_until_ms {
            return false;
        }
        if now_ms >= self.plain_barren_until_ms {
            if self.evict_one(now_ms, false) {
                return true;
            }
            self.plain_barren_until_ms = self.leases.next_end(now_ms);
        }
        if self.soft_pinned > 0 && self.evict_one(now_ms, true) {
            return true;
        }
        self.barren_until_ms = self.leases.next_end(now_ms);
        false
    }

    /// Whether nothing is free and nothing can be evicted unless somebody changes that. What is being
    /// written or read changes by itself.
    pub(crate) fn is_stuck(&self, now_ms: u64) -> bool {
        let nothing_goes = self.pinned >= self.present || now_ms < self.barren_until_ms;
        let all_is_still = self.used() == self.present && self.reads == 0;
        !self.has_free() && all_is_still && nothing_goes
    }

    /// Two rounds of the hand: the first may clear `visited` everywhere, the second then finds a
    /// victim.
    fn evict_one(&mut self, now_ms: u64, soft_pinned: bool) -> bool {
        for _ in 0..2 * u64::from(self.present) {
            let slot = if self.hand == NO_SLOT { self.oldest } else { self.hand };
            self.hand = self.row[slot as usize].newer;
            let entry = &mut self.entries[slot as usize];
            if entry.hard_pins > 0 || entry.readers > 0 {
                continue;
            }
            if entry.leased_until_ms > now_ms || (entry.soft_pin && !soft_pinned) {
                continue;
            }
            if std::mem::take(&mut entry.visited) {
                continue;
            }
            self.counts.evicted += 1;
            self.doom(slot);
            return true;
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

    /// The object in `slot` is not present any more.
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
        if self.hand == slot {
            self.hand = newer;
        }
    }

    /// Something about the object in `slot` has changed: perhaps it may be evicted from now on.
    pub(super) fn may_go(&mut self, slot: Slot) {
        let entry = &self.entries[slot as usize];
        if entry.state == State::Present && entry.hard_pins == 0 && entry.readers == 0 {
            let from_ms = entry.leased_until_ms;
            self.barren_until_ms = self.barren_until_ms.min(from_ms);
            if !entry.soft_pin {
                self.plain_barren_until_ms = self.plain_barren_until_ms.min(from_ms);
            }
        }
    }
}
