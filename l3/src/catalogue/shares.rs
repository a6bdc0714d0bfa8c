//! Limits on the share of slots that groups of namespaces may use.
//!
//! A group at its limit evicts one of its own objects for each new one. So it cannot evict, pin or
//! reserve more than its share at the expense of the others.

use std::collections::BTreeSet;

use terrace_cache::{HashedMap, PageKey};

use super::{Catalogue, Slot, SlotState};
use crate::store::StoreError;

/// A group of namespaces and its share of a store.
#[derive(Clone, Debug, PartialEq)]
pub struct NamespaceShare {
    /// Digests of the namespaces. A namespace in several groups belongs to the first.
    pub namespaces: BTreeSet<PageKey>,
    /// Share of all slots; at least one slot.
    pub share: f64,
}

/// Maximum number of its own objects that a group above its limit loses per put.
const EVICTIONS_PER_PUT: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Shares {
    groups: HashedMap<PageKey, usize>,
    list: Vec<GroupUsage>,
}

#[derive(Clone, Copy, Debug)]
struct GroupUsage {
    /// Slots whose object is being written or present.
    used: Slot,
    slots_max: Slot,
    /// Slot where the next search for a victim starts.
    hand: Slot,
}

impl Shares {
    fn of(&self, namespace: &PageKey) -> Option<usize> {
        if self.list.is_empty() { None } else { self.groups.get(namespace).copied() }
    }

    /// Counts one more slot for the namespace.
    pub(super) fn enter(&mut self, namespace: &PageKey) {
        if let Some(group) = self.of(namespace) {
            self.list[group].used += 1;
        }
    }

    /// Counts one slot less for the namespace.
    pub(super) fn leave(&mut self, namespace: &PageKey) {
        if let Some(group) = self.of(namespace) {
            self.list[group].used -= 1;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.groups.capacity() * size_of::<(PageKey, usize)>()
            + self.list.capacity() * size_of::<GroupUsage>()
    }
}

impl Catalogue {
    /// Limits groups of namespaces. A group above its limit shrinks with its next puts.
    pub fn set_shares(&mut self, shares: &[NamespaceShare]) {
        let mut groups = HashedMap::default();
        let mut list = Vec::with_capacity(shares.len());
        for NamespaceShare { namespaces, share } in shares {
            for namespace in namespaces {
                groups.entry(*namespace).or_insert(list.len());
            }
            let slots_max = ((f64::from(self.slots()) * share) as Slot).max(1);
            list.push(GroupUsage { used: 0, slots_max, hand: 0 });
        }
        self.shares = Shares { groups, list };
        for entry in &self.entries {
            if let SlotState::Writing | SlotState::Present = entry.state {
                self.shares.enter(&self.namespaces.digest(entry.namespace));
            }
        }
    }

    /// Makes room for one more object of the namespace within its group's share.
    pub(super) fn enforce_share(
        &mut self,
        namespace: &PageKey,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let Some(group) = self.shares.of(namespace) else { return Ok(()) };
        for evicted in 0..EVICTIONS_PER_PUT {
            let GroupUsage { used, slots_max, .. } = self.shares.list[group];
            if used < slots_max {
                break;
            }
            if !self.evict_of(group, now_ms) {
                return if evicted > 0 { Ok(()) } else { Err(StoreError::Full) };
            }
        }
        Ok(())
    }

    /// Dooms an object of the group: one that was not requested since the last pass, or else one
    /// with a soft pin. Inspects a bounded number of slots; the next call continues there.
    fn evict_of(&mut self, group: usize, now_ms: u64) -> bool {
        const STEPS_MAX: u32 = 4096;
        let mut soft_pinned = None;
        let slots = self.fresh();
        for _ in 0..STEPS_MAX.min(2 * slots) {
            let hand = &mut self.shares.list[group].hand;
            let slot = *hand % slots;
            *hand = (slot + 1) % slots;
            let entry = &mut self.entries[slot as usize];
            let is_protected = entry.state != SlotState::Present
                || self.shares.of(&self.namespaces.digest(entry.namespace)) != Some(group)
                || self.owners.protects(entry.owner, now_ms)
                || entry.readers > 0
                || entry.leased_until_ms > now_ms;
            if is_protected {
                continue;
            }
            if entry.soft_pin {
                soft_pinned.get_or_insert(slot);
            } else if !std::mem::take(&mut entry.visited) {
                self.counts.evicted += 1;
                self.doom(slot);
                return true;
            }
        }
        soft_pinned.is_some_and(|slot| {
            self.counts.evicted += 1;
            self.doom(slot);
            true
        })
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::super::Reserved;
    use super::*;
    use crate::object::ObjectId;
    use crate::store::{Owner, Pin};

    const OURS: u128 = 1;
    const THEIRS: u128 = 2;

    fn id(namespace: u128, key: u128) -> ObjectId {
        ObjectId::page(PageKey(namespace), PageKey(key))
    }

    fn put(catalogue: &mut Catalogue, id: ObjectId, pin: Option<Pin>) -> Result<(), StoreError> {
        loop {
            match catalogue.reserve(&id, 1, pin, 0)? {
                Reserved::Slot(slot) => {
                    assert!(catalogue.publish(slot).is_empty());
                    return Ok(());
                }
                Reserved::AlreadyThere(_) => return Ok(()),
                Reserved::NoSlot => {
                    assert!(catalogue.doomed() > 0 || catalogue.evict(0));
                    catalogue.release_doomed();
                }
            }
        }
    }

    fn there(catalogue: &Catalogue, namespace: u128) -> usize {
        (0..1000).filter(|key| catalogue.find(&id(namespace, *key)).is_some()).count()
    }

    fn limited() -> Catalogue {
        let mut catalogue = Catalogue::new(100, 100);
        let namespaces = BTreeSet::from([PageKey(OURS)]);
        catalogue.set_shares(&[NamespaceShare { namespaces, share: 0.25 }]);
        catalogue
    }

    #[test]
    fn a_group_evicts_its_own_objects_once_it_has_its_share() {
        let mut catalogue = limited();
        for key in 0..100 {
            put(&mut catalogue, id(THEIRS, key), None).unwrap();
        }
        for key in 0..500 {
            put(&mut catalogue, id(OURS, key), None).unwrap();
        }
        assert_eq!((there(&catalogue, OURS), there(&catalogue, THEIRS)), (25, 75));
        // Requested objects stay.
        let kept = id(OURS, 499);
        for key in 500..530 {
            put(&mut catalogue, id(OURS, key), None).unwrap();
            let (slot, _) = catalogue.begin_read(&kept).unwrap();
            catalogue.end_read(slot);
        }
        assert!(catalogue.find(&kept).is_some());
        // Others have no limit.
        for key in 100..300 {
            put(&mut catalogue, id(THEIRS, key), None).unwrap();
        }
        assert!(there(&catalogue, THEIRS) > 75);
    }

    #[test]
    fn a_group_pins_and_reserves_its_share_and_no_more() {
        let owner = Owner::named("it");
        for pin in [Some(Pin::Hard(owner)), None] {
            let mut catalogue = limited();
            for key in 0..25 {
                match pin {
                    Some(_) => put(&mut catalogue, id(OURS, key), pin).unwrap(),
                    None => {
                        let reserved = catalogue.reserve(&id(OURS, key), 1, None, 0).unwrap();
                        assert!(matches!(reserved, Reserved::Slot(_)));
                    }
                }
            }
            assert_eq!(put(&mut catalogue, id(OURS, 25), None), Err(StoreError::Full));
            for key in 0..75 {
                put(&mut catalogue, id(THEIRS, key), None).unwrap();
            }
            assert_eq!(there(&catalogue, THEIRS), 75);
        }
        // Soft pins yield.
        let mut catalogue = limited();
        for key in 0..60 {
            put(&mut catalogue, id(OURS, key), Some(Pin::Soft)).unwrap();
        }
        assert_eq!(there(&catalogue, OURS), 25);
    }

    #[test]
    fn existing_objects_count() {
        let mut catalogue = Catalogue::new(100, 100);
        for key in 0..60 {
            put(&mut catalogue, id(OURS, key), None).unwrap();
        }
        let namespaces = BTreeSet::from([PageKey(OURS)]);
        catalogue.set_shares(&[NamespaceShare { namespaces, share: 0.25 }]);
        put(&mut catalogue, id(OURS, 60), None).unwrap();
        assert_eq!(there(&catalogue, OURS), 57);
        for key in 61..80 {
            put(&mut catalogue, id(OURS, key), None).unwrap();
        }
        assert_eq!(there(&catalogue, OURS), 25);
    }
}
