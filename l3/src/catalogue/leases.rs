//! Active leases and their end times.

use std::collections::BTreeMap;

use super::rings::{Ring, Rings};

/// Maximum number of distinct end times.
const ENDS_MAX: usize = 1 << 20;

/// Active leases. A renewed lease counts once.
#[derive(Debug, Default)]
pub(super) struct Leases {
    ends: BTreeMap<u64, LeaseEnd>,
    count: usize,
}

/// Leases with one end time.
#[derive(Debug)]
struct LeaseEnd {
    leases: u32,
    /// Row of their objects.
    ring: Ring,
}

impl Leases {
    /// Grants a lease, or extends the one that ends at `former_end_ms`, and returns its end.
    /// Returns `None` if `leases_max` others are active. Expired leases must have been taken out
    /// before.
    pub(super) fn grant(
        &mut self,
        former_end_ms: u64,
        now_ms: u64,
        ttl_ms: u64,
        leases_max: usize,
        rings: &mut Rings,
    ) -> Option<u64> {
        let end_ms = now_ms.saturating_add(ttl_ms);
        let has_room = self.ends.len() < ENDS_MAX || self.ends.contains_key(&end_ms);
        if let Some(ending) = self.ends.get_mut(&former_end_ms).filter(|_| has_room) {
            // An empty row is removed at its end time.
            ending.leases -= 1;
            self.count -= 1;
        } else if self.count >= leases_max || !has_room {
            return None;
        }
        let new = || LeaseEnd { leases: 0, ring: rings.add() };
        self.ends.entry(end_ms).or_insert_with(new).leases += 1;
        self.count += 1;
        Some(end_ms)
    }

    /// Takes the row of one expired end time, if there is one, and stops counting it.
    pub(super) fn take_ended(&mut self, now_ms: u64) -> Option<Ring> {
        let first = self.ends.first_entry().filter(|first| *first.key() <= now_ms)?;
        let LeaseEnd { leases, ring } = first.remove();
        self.count -= leases as usize;
        Some(ring)
    }

    /// Row of the objects whose leases end at `end_ms`.
    pub(super) fn ring(&self, end_ms: u64) -> Option<Ring> {
        self.ends.get(&end_ms).map(|ending| ending.ring)
    }

    /// End of the lease that expires next.
    pub(super) fn first_end(&self) -> u64 {
        self.ends.first_key_value().map_or(u64::MAX, |(end_ms, _)| *end_ms)
    }

    pub(super) fn bytes(&self) -> usize {
        self.ends.len() * size_of::<(u64, LeaseEnd)>()
    }
}
