//! How many objects are leased, and until when.

use std::collections::BTreeMap;

use super::rings::{Ring, Rings};

/// Times at which leases end, at most.
const ENDS_MAX: usize = 1 << 20;

/// The leases that are not over. One that is renewed counts once.
#[derive(Debug, Default)]
pub(super) struct Leases {
    ends: BTreeMap<u64, Ending>,
    count: usize,
}

/// The leases that end at one time.
#[derive(Debug)]
struct Ending {
    leases: u32,
    /// The row of their objects.
    ring: Ring,
}

impl Leases {
    /// Grants a lease, or a longer one for that which ends at `former_end_ms`, and answers its end.
    /// `None` if there are `leases_max` others already. Those that are over must have been taken out.
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
            // An empty row goes when its time has come.
            ending.leases -= 1;
            self.count -= 1;
        } else if self.count >= leases_max || !has_room {
            return None;
        }
        let new = || Ending { leases: 0, ring: rings.add() };
        self.ends.entry(end_ms).or_insert_with(new).leases += 1;
        self.count += 1;
        Some(end_ms)
    }

    /// The row of objects whose leases are over, if there is one; it does not count any more.
    pub(super) fn take_ended(&mut self, now_ms: u64) -> Option<Ring> {
        let first = self.ends.first_entry().filter(|first| *first.key() <= now_ms)?;
        let Ending { leases, ring } = first.remove();
        self.count -= leases as usize;
        Some(ring)
    }

    /// The row of the objects whose leases end then.
    pub(super) fn ring(&self, end_ms: u64) -> Option<Ring> {
        self.ends.get(&end_ms).map(|ending| ending.ring)
    }

    /// When the next lease will be over.
    pub(super) fn first_end(&self) -> u64 {
        self.ends.first_key_value().map_or(u64::MAX, |(end_ms, _)| *end_ms)
    }

    pub(super) fn bytes(&self) -> usize {
        self.ends.len() * size_of::<(u64, Ending)>()
    }
}
