//! How many objects are leased, and until when.

use std::collections::BTreeMap;

/// The leases that are not over. One that is renewed counts once.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// How many end when.
    ends: BTreeMap<u64, u32>,
    count: usize,
}

impl Leases {
    /// Grants a lease, or a longer one for that which ends at `former_end_ms`, and answers its end.
    /// `None` if there are `leases_max` others already.
    pub(super) fn grant(
        &mut self,
        former_end_ms: u64,
        now_ms: u64,
        ttl_ms: u64,
        leases_max: usize,
    ) -> Option<u64> {
        self.next_end(now_ms);
        if let Some(leases) = self.ends.get_mut(&former_end_ms) {
            *leases -= 1;
            self.count -= 1;
            if *leases == 0 {
                self.ends.remove(&former_end_ms);
            }
        } else if self.count >= leases_max {
            return None;
        }
        let end_ms = now_ms.saturating_add(ttl_ms);
        *self.ends.entry(end_ms).or_default() += 1;
        self.count += 1;
        Some(end_ms)
    }

    /// Forgets the leases that are over, and says when the next one will be.
    pub(super) fn next_end(&mut self, now_ms: u64) -> u64 {
        while let Some(first) = self.ends.first_entry() {
            if *first.key() > now_ms {
                return *first.key();
            }
            self.count -= first.remove() as usize;
        }
        u64::MAX
    }

    pub(super) fn bytes(&self) -> usize {
        self.ends.len() * size_of::<(u64, u32)>()
    }
}
