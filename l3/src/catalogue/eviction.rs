//! Which object goes when there is no room: the hand of a clock, which passes over what is protected.

use super::{Catalogue, Slot, State};

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
        for _ in 0..2 * u64::from(self.fresh) {
            let slot = self.hand;
            self.hand = if slot + 1 >= self.fresh { 0 } else { slot + 1 };
            let entry = &mut self.entries[slot as usize];
            if entry.state != State::Present || entry.hard_pins > 0 || entry.readers > 0 {
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
