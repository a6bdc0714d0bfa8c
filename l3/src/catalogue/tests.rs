//! Random steps, compared with a plain list of slots.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const TTL_MS: u64 = 10;

/// Steps choose slots and objects by number, modulo how many there are.
#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve { id: ObjectId, pin: Option<Pin> },
    Publish { which: usize },
    Abandon { which: usize },
    BeginRead { id: ObjectId },
    EndRead { which: usize },
    Pin { id: ObjectId, pin: Pin },
    Unpin { id: ObjectId, pin: Pin },
    Hold { owner: Owner },
    LetGo { owner: Owner, ms: u64 },
    Lease { id: ObjectId },
    Remove { id: ObjectId, removal: Removal },
    DoomLower { id: ObjectId },
    Evict,
    Release { which: usize },
    Grow,
    Wait { ms: u64 },
}

fn id() -> impl Strategy<Value = ObjectId> {
    // The second key has the hash of the first.
    let key = prop_oneof![Just(1u128 << 32), Just(1u128 << 64), Just(7u128)];
    let generation = prop_oneof![2 => Just(0u64), 1 => 1u64..4];
    (0u128..2, key, generation).prop_map(|(namespace, key, generation)| ObjectId {
        namespace: PageKey(namespace),
        key: PageKey(key),
        generation,
    })
}

fn owner(number: u64) -> Owner {
    Owner(number.try_into().unwrap())
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0usize..16;
    let owner = || prop_oneof![3 => Just(owner(1)), 1 => Just(owner(2))];
    let pin = || prop_oneof![owner().prop_map(Pin::Hard), Just(Pin::Soft)];
    let maybe = || prop_oneof![3 => Just(None), 1 => pin().prop_map(Some)];
    let removal = prop_oneof![
        2 => Just(Removal::Plain),
        2 => Just(Removal::Forced),
        1 => Just(Removal::Final),
    ];
    prop_oneof![
        8 => (id(), maybe()).prop_map(|(id, pin)| Step::Reserve { id, pin }),
        6 => which().prop_map(|which| Step::Publish { which }),
        1 => which().prop_map(|which| Step::Abandon { which }),
        3 => id().prop_map(|id| Step::BeginRead { id }),
        3 => which().prop_map(|which| Step::EndRead { which }),
        2 => (id(), pin()).prop_map(|(id, pin)| Step::Pin { id, pin }),
        3 => (id(), pin()).prop_map(|(id, pin)| Step::Unpin { id, pin }),
        1 => owner().prop_map(|owner| Step::Hold { owner }),
        1 => (owner(), 0..2 * TTL_MS).prop_map(|(owner, ms)| Step::LetGo { owner, ms }),
        2 => id().prop_map(|id| Step::Lease { id }),
        3 => (id(), removal).prop_map(|(id, removal)| Step::Remove { id, removal }),
        1 => id().prop_map(|id| Step::DoomLower { id }),
        4 => Just(Step::Evict),
        4 => which().prop_map(|which| Step::Release { which }),
        1 => Just(Step::Grow),
        2 => (0..2 * TTL_MS).prop_map(|ms| Step::Wait { ms }),
    ]
}

/// A slot in use.
#[derive(Clone, Copy, Debug)]
struct Taken {
    id: ObjectId,
    length: u32,
    state: SlotState,
    owner: Option<Owner>,
    soft_pin: bool,
    leased_until_ms: u64,
    readers: u16,
}

impl Taken {
    fn pin(&mut self, pin: Pin) {
        match pin {
            Pin::Hard(owner) => self.owner = Some(owner),
            Pin::Soft => self.soft_pin = true,
        }
    }

    fn doom(&mut self) {
        self.state = SlotState::Doomed;
        self.owner = None;
    }
}

/// The catalogue and its expected content.
struct Expectation {
    catalogue: Catalogue,
    slots: BTreeMap<Slot, Taken>,
    /// Disconnected owners, and when their pins expire.
    gone: BTreeMap<Owner, u64>,
    now_ms: u64,
}

impl Expectation {
    fn new(slots: Slot, usable: Slot) -> Self {
        let catalogue = Catalogue::new(slots, usable);
        Self { catalogue, slots: BTreeMap::new(), gone: BTreeMap::new(), now_ms: 0 }
    }

    fn play(&mut self, step: Step) {
        match step {
            Step::Reserve { id, pin } => self.reserve(id, pin),
            Step::Publish { which } => {
                if let Some(slot) = self.nth(which, |it| it.state == SlotState::Writing) {
                    self.publish(slot);
                }
            }
            Step::Abandon { which } => {
                if let Some(slot) = self.nth(which, |it| it.state == SlotState::Writing) {
                    self.catalogue.abandon(slot);
                    self.slots.remove(&slot);
                }
            }
            Step::BeginRead { id } => {
                let expected = self.find(&id).map(|slot| (slot, self.slots[&slot].length));
                assert_eq!(self.catalogue.begin_read(&id), expected);
                if let Some((slot, _)) = expected {
                    self.slot(slot).readers += 1;
                }
            }
            Step::EndRead { which } => {
                if let Some(slot) = self.nth(which, |it| it.readers > 0) {
                    self.catalogue.end_read(slot);
                    self.slot(slot).readers -= 1;
                    self.drop_if_left(slot);
                }
            }
            Step::Pin { id, pin } => {
                let slot = self.find(&id);
                let expected = match slot {
                    Some(slot) if self.refuses(&self.slots[&slot], pin) => Err(StoreError::Pinned),
                    Some(slot) => Ok(slot),
                    None => Err(StoreError::Missing),
                };
                assert_eq!(self.catalogue.pin(&id, pin, self.now_ms), expected);
                if let Ok(slot) = expected {
                    self.pin(slot, pin);
                }
            }
            Step::Hold { owner } => {
                self.catalogue.hold(owner);
                self.gone.remove(&owner);
            }
            Step::LetGo { owner, ms } => {
                self.catalogue.let_go(owner, self.now_ms + ms);
                self.gone.insert(owner, self.now_ms + ms);
                self.forget_owners();
            }
            Step::Unpin { id, pin } => self.unpin(id, pin),
            Step::Lease { id } => {
                if let Some(slot) = self.find(&id) {
                    let (granted, now_ms) = (self.catalogue.counts.leases, self.now_ms);
                    self.catalogue.lease(slot, now_ms, TTL_MS, 4);
                    if self.catalogue.counts.leases > granted {
                        self.slot(slot).leased_until_ms = now_ms + TTL_MS;
                    }
                }
            }
            Step::Remove { id, removal } => self.remove(id, removal),
            Step::DoomLower { id } => {
                self.catalogue.doom_lower(&id);
                for taken in self.slots.values_mut() {
                    let same = taken.id.with_generation(0) == id.with_generation(0);
                    let lower = same && taken.id.generation < id.generation;
                    if lower && taken.state == SlotState::Present {
                        taken.doom();
                    }
                }
            }
            Step::Evict => self.evict(),
            Step::Release { which } => {
                // The catalogue hands out doomed slots; they may be kept for any time.
                self.catalogue.take_doomed();
                if let Some(slot) = self.nth(which, |it| it.state == SlotState::Doomed) {
                    self.catalogue.release(slot);
                    self.slot(slot).state = SlotState::Leaving;
                    self.drop_if_left(slot);
                }
            }
            Step::Grow => self.catalogue.set_usable(self.catalogue.usable() + 1),
            Step::Wait { ms } => self.now_ms += ms,
        }
        self.forget_owners();
        self.check();
    }

    fn reserve(&mut self, id: ObjectId, pin: Option<Pin>) {
        let length = (id.key.0 % 1000) as u32 + self.slots.len() as u32;
        let reserved = self.catalogue.reserve(&id, length, pin, self.now_ms);
        let mut others: Vec<(Slot, Taken)> = Vec::new();
        for (slot, taken) in &self.slots {
            let findable = matches!(taken.state, SlotState::Writing | SlotState::Present);
            let same = taken.id.with_generation(0) == id.with_generation(0);
            if findable && same && taken.id.generation >= id.generation {
                others.push((*slot, *taken));
            }
        }
        match reserved {
            Ok(Reserved::Slot(slot)) => {
                assert!(others.is_empty() && slot < self.catalogue.usable());
                let taken = Taken {
                    id,
                    length,
                    state: SlotState::Writing,
                    owner: None,
                    soft_pin: false,
                    leased_until_ms: 0,
                    readers: 0,
                };
                assert!(self.slots.insert(slot, taken).is_none(), "slot {slot} was not free");
                if let Some(pin) = pin {
                    self.pin(slot, pin);
                }
            }
            Ok(Reserved::NoSlot) => {
                assert!(others.is_empty());
                assert_eq!(self.slots.len() as u32, self.catalogue.usable());
            }
            Ok(Reserved::AlreadyThere(slot)) => {
                assert_eq!(self.find(&id), Some(slot));
                if let Some(pin) = pin {
                    assert!(!self.refuses(&self.slots[&slot], pin));
                    self.pin(slot, pin);
                }
            }
            Err(StoreError::Pinned) => {
                let slot = self.find(&id).expect("it is there");
                assert!(self.refuses(&self.slots[&slot], pin.expect("a pin is refused")));
            }
            Err(StoreError::BeingWritten) => {
                assert!(!others.is_empty());
                assert!(others.iter().all(|(_, it)| it.state == SlotState::Writing));
            }
            Err(StoreError::Superseded { present }) => {
                assert!(present > id.generation);
                let is_it =
                    |it: &Taken| it.id.generation == present && it.state == SlotState::Present;
                assert!(others.iter().any(|(_, it)| is_it(it)));
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn publish(&mut self, slot: Slot) {
        let replaced: BTreeSet<Slot> = self.catalogue.publish(slot).into_iter().collect();
        self.slot(slot).state = SlotState::Present;
        let name = self.slots[&slot].id.with_generation(0);
        let present = |(_, it): &(&Slot, &Taken)| {
            it.state == SlotState::Present && it.id.with_generation(0) == name
        };
        let generations = self.slots.iter().filter(present);
        let (latest, _) = generations.clone().max_by_key(|(_, it)| it.id.generation).unwrap();
        let expected: BTreeSet<Slot> =
            generations.map(|(slot, _)| *slot).filter(|slot| slot != latest).collect();
        assert_eq!(replaced, expected);
        for slot in replaced {
            self.slot(slot).doom();
        }
    }

    /// Pins an object for a connected owner.
    fn pin(&mut self, slot: Slot, pin: Pin) {
        self.slot(slot).pin(pin);
        if let Pin::Hard(owner) = pin {
            self.gone.remove(&owner);
        }
    }

    /// Returns true if another owner's pin conflicts.
    fn refuses(&self, taken: &Taken, pin: Pin) -> bool {
        matches!(pin, Pin::Hard(owner) if taken.owner != Some(owner)) && self.is_pinned(taken)
    }

    fn is_pinned(&self, taken: &Taken) -> bool {
        let ends = |owner| self.gone.get(&owner).copied().unwrap_or(u64::MAX);
        taken.owner.is_some_and(|owner| ends(owner) > self.now_ms)
    }

    /// An owner without pins leaves no trace.
    fn forget_owners(&mut self) {
        let slots = &self.slots;
        self.gone.retain(|owner, _| slots.values().any(|it| it.owner == Some(*owner)));
    }

    fn unpin(&mut self, id: ObjectId, pin: Pin) {
        let unpinned = self.catalogue.unpin(&id, pin);
        let Some(slot) = self.find(&id) else {
            assert_eq!(unpinned, Err(StoreError::Missing));
            return;
        };
        let taken = self.slot(slot);
        let pinned = match pin {
            Pin::Hard(owner) => taken.owner == Some(owner),
            Pin::Soft => taken.soft_pin,
        };
        assert_eq!(unpinned, if pinned { Ok(slot) } else { Err(StoreError::NotPinned) });
        match pin {
            Pin::Hard(_) if pinned => taken.owner = None,
            Pin::Hard(_) => {}
            Pin::Soft => taken.soft_pin = false,
        }
    }

    fn remove(&mut self, id: ObjectId, removal: Removal) {
        let removed = self.catalogue.remove(&id, removal, self.now_ms);
        let now_ms = self.now_ms;
        let Some(slot) = self.find(&id) else {
            let written =
                self.slots.values().any(|it| it.id == id && it.state == SlotState::Writing);
            let expected = if written { StoreError::BeingWritten } else { StoreError::Missing };
            assert_eq!(removed, Err(expected));
            return;
        };
        let is_pinned = self.is_pinned(&self.slots[&slot]);
        let taken = self.slot(slot);
        let expected = if is_pinned && removal != Removal::Final {
            Err(StoreError::Pinned)
        } else if removal == Removal::Plain && taken.leased_until_ms > now_ms {
            Err(StoreError::Leased)
        } else {
            taken.doom();
            Ok(())
        };
        assert_eq!(removed, expected);
    }

    /// Evicts an object whenever one may be evicted; one with a soft pin only if there is no other.
    fn evict(&mut self) {
        let may_go = |it: &&Taken| {
            it.state == SlotState::Present
                && !self.is_pinned(it)
                && it.readers == 0
                && it.leased_until_ms <= self.now_ms
        };
        let may_go: Vec<Taken> = self.slots.values().filter(may_go).copied().collect();
        self.catalogue.take_doomed();
        let evicted = self.catalogue.evict(self.now_ms);
        assert_eq!(evicted, !may_go.is_empty(), "may go: {may_go:?}");
        if evicted {
            let [victim] = self.catalogue.take_doomed()[..] else { panic!("one goes at a time") };
            let taken = self.slot(victim);
            taken.doom();
            let taken = *taken;
            assert!(may_go.iter().any(|it| it.id == taken.id), "{taken:?} may not go");
            assert!(!taken.soft_pin || may_go.iter().all(|it| it.soft_pin), "{taken:?} goes last");
        }
    }

    fn drop_if_left(&mut self, slot: Slot) {
        let taken = self.slots[&slot];
        if taken.state == SlotState::Leaving && taken.readers == 0 {
            self.slots.remove(&slot);
        }
    }

    fn check(&self) {
        let present = || self.slots.values().filter(|it| it.state == SlotState::Present);
        let stats = self.catalogue.stats(1000, self.now_ms);
        assert_eq!(stats.objects, present().count() as u64);
        assert_eq!(stats.bytes, present().map(|it| u64::from(it.length)).sum::<u64>());
        assert_eq!(stats.hard_pinned, present().filter(|it| self.is_pinned(it)).count() as u64);
        assert_eq!(stats.soft_pinned, present().filter(|it| it.soft_pin).count() as u64);
        assert_eq!(stats.resident_bytes, 1000 * self.slots.len() as u64);
        assert_eq!(self.catalogue.has_free(), (self.slots.len() as u32) < self.catalogue.usable());
        for (slot, taken) in &self.slots {
            assert_eq!(self.catalogue.id(*slot), taken.id);
            assert_eq!(self.catalogue.is_present(*slot), taken.state == SlotState::Present);
            assert_eq!(self.catalogue.find(&taken.id), self.find(&taken.id));
        }
        if self.catalogue.is_stuck(self.now_ms) {
            assert!(!self.catalogue.has_free());
            assert!(
                self.slots.values().all(|it| it.state == SlotState::Present && it.readers == 0)
            );
        }
    }

    fn find(&self, id: &ObjectId) -> Option<Slot> {
        let is_it = |it: &Taken| it.state == SlotState::Present && it.id == *id;
        self.slots.iter().find(|(_, it)| is_it(it)).map(|(slot, _)| *slot)
    }

    fn nth(&self, which: usize, wanted: impl Fn(&Taken) -> bool) -> Option<Slot> {
        let slots: Vec<Slot> =
            self.slots.iter().filter(|(_, it)| wanted(it)).map(|(slot, _)| *slot).collect();
        (!slots.is_empty()).then(|| slots[which % slots.len()])
    }

    fn slot(&mut self, slot: Slot) -> &mut Taken {
        self.slots.get_mut(&slot).expect("a slot that is taken")
    }
}

/// A freed slot may be anywhere, yet its new object is the newest.
#[test]
fn a_new_object_in_an_old_slot_is_evicted_last() {
    const OLD: u128 = 100;
    let id = |number: u128| ObjectId::page(PageKey(1), PageKey(number));
    let mut catalogue = Catalogue::new(OLD as u32, OLD as u32);
    let put = |catalogue: &mut Catalogue, number| {
        let Ok(Reserved::Slot(slot)) = catalogue.reserve(&id(number), 1, None, 0) else { panic!() };
        catalogue.publish(slot);
    };
    (0..OLD).for_each(|number| put(&mut catalogue, number));
    for _ in 0..10 {
        assert!(catalogue.evict(0));
    }
    catalogue.release_doomed();
    for number in [30, 50, 70, 90] {
        catalogue.remove(&id(number), Removal::Forced, 0).unwrap();
    }
    catalogue.release_doomed();
    let asked_for = catalogue.begin_read(&id(20)).unwrap().0;
    catalogue.end_read(asked_for);
    (OLD..OLD + 14).for_each(|number| put(&mut catalogue, number));
    let there = |catalogue: &Catalogue, number| catalogue.find(&id(number)).is_some();
    for _ in 0..OLD - 15 {
        assert!(catalogue.evict(0));
        assert!((OLD..OLD + 14).all(|number| there(&catalogue, number)));
    }
    assert!(there(&catalogue, 20), "and what was asked for is spared once");
    assert!((0..OLD).all(|number| number == 20 || !there(&catalogue, number)));
    assert!(catalogue.evict(0) && !there(&catalogue, OLD), "the oldest of the new ones is next");
}

/// A lease counts as a use, whether it is granted or not.
#[test]
fn leased_objects_are_evicted_after_unrequested_ones() {
    let id = |number: u128| ObjectId::page(PageKey(1), PageKey(number));
    let mut catalogue = Catalogue::new(4, 4);
    for number in 0..4 {
        let Ok(Reserved::Slot(slot)) = catalogue.reserve(&id(number), 1, None, 0) else { panic!() };
        catalogue.publish(slot);
    }
    for number in 0..2 {
        let slot = catalogue.find(&id(number)).unwrap();
        catalogue.lease(slot, 0, TTL_MS, 1);
    }
    let there =
        |catalogue: &Catalogue| (0..4).filter(|&it| catalogue.find(&id(it)).is_some()).collect();
    assert_eq!((catalogue.counts.leases, catalogue.counts.leases_refused), (1, 1));
    assert!(catalogue.evict(2 * TTL_MS) && catalogue.evict(2 * TTL_MS));
    let left: Vec<u128> = there(&catalogue);
    assert_eq!(left, [0, 1]);
}

/// Protected objects of all kinds, and how many of them a search for a victim inspects.
#[test]
fn a_search_for_a_victim_inspects_few_objects() {
    const EACH: u128 = 2_000;
    const SLOTS: Slot = 5 * EACH as Slot + 2;
    let id = |number: u128| ObjectId::page(PageKey(1), PageKey(number));
    let mut catalogue = Catalogue::new(SLOTS, SLOTS);
    let put = |catalogue: &mut Catalogue, number, pin| {
        let reserved = catalogue.reserve(&id(number), 1, pin, 0);
        let Ok(Reserved::Slot(slot)) = reserved else { panic!("{reserved:?}") };
        catalogue.publish(slot);
        slot
    };
    let evict = |catalogue: &mut Catalogue, now_ms| {
        let before = catalogue.inspected;
        let evicted = catalogue.evict(now_ms);
        let inspected = catalogue.inspected - before;
        assert!(inspected <= 128, "{inspected} objects were inspected");
        evicted
    };
    for number in 0..EACH {
        put(&mut catalogue, number, Some(Pin::Hard(owner(1))));
        put(&mut catalogue, EACH + number, Some(Pin::Hard(owner(2))));
        let leased = put(&mut catalogue, 2 * EACH + number, None);
        catalogue.lease(leased, 0, 100, SLOTS as usize);
        put(&mut catalogue, 3 * EACH + number, None);
        catalogue.pin(&id(3 * EACH + number), Pin::Hard(owner(1)), 0).unwrap();
    }
    for _ in 0..3 {
        assert!(!evict(&mut catalogue, 1), "all is protected");
    }
    // The newest two may be evicted, one after the other.
    let soft = put(&mut catalogue, 5 * EACH, Some(Pin::Soft));
    let plain = put(&mut catalogue, 5 * EACH + 1, None);
    for victim in [plain, soft] {
        assert!(evict(&mut catalogue, 1));
        assert_eq!(catalogue.take_doomed(), [victim]);
        catalogue.release(victim);
    }
    assert!(!evict(&mut catalogue, 1) && !catalogue.is_stuck(1), "two slots are free");
    // Objects that are being read, and others that were requested.
    for number in 0..EACH {
        put(&mut catalogue, 4 * EACH + number, None);
        catalogue.begin_read(&id(4 * EACH + number)).unwrap();
    }
    assert!(!evict(&mut catalogue, 1));
    for number in 0..EACH {
        catalogue.end_read(catalogue.find(&id(4 * EACH + number)).unwrap());
    }
    assert!(evict(&mut catalogue, 1), "all were asked for, and one goes");
    // A protection that ends frees all objects that it protected.
    catalogue.let_go(owner(2), 50);
    for _ in 1..EACH {
        assert!(evict(&mut catalogue, 49));
    }
    assert!(!evict(&mut catalogue, 49), "the pins still count");
    for _ in 0..EACH {
        assert!(evict(&mut catalogue, 50));
    }
    assert!(!evict(&mut catalogue, 99));
    for _ in 0..EACH {
        assert!(evict(&mut catalogue, 100));
    }
    assert!(!evict(&mut catalogue, u64::MAX - 1), "owner 1 is there");
    // An owner that disconnects and returns protects again.
    catalogue.let_go(owner(1), 200);
    assert!(evict(&mut catalogue, 200));
    catalogue.hold(owner(1));
    let refused = (0..EACH).filter(|_| !evict(&mut catalogue, 200)).count() as u128;
    assert_eq!(refused, EACH, "the pins count again");
}

/// A table of several parts that each grow several times.
#[test]
fn a_large_catalogue_finds_its_objects() {
    const SLOTS: Slot = 1 << 20;
    const OBJECTS: u32 = 100_000;
    let mut catalogue = Catalogue::new(SLOTS, 100);
    catalogue.set_usable(SLOTS);
    let id = |number: u32| ObjectId::page(PageKey(1), PageKey(u128::from(number) << 64));
    for number in 0..OBJECTS {
        let Ok(Reserved::Slot(slot)) = catalogue.reserve(&id(number), number, None, 0) else {
            panic!("{number} found no slot")
        };
        assert!(catalogue.publish(slot).is_empty());
    }
    for number in (0..OBJECTS).step_by(2) {
        catalogue.remove(&id(number), Removal::Plain, 0).unwrap();
    }
    for number in 0..OBJECTS {
        let found = catalogue.find(&id(number)).map(|slot| catalogue.length(slot));
        assert_eq!(found, (number % 2 == 1).then_some(number));
    }
}

#[test]
fn memory_is_taken_for_slots_in_use() {
    const SLOTS: Slot = 160_000_000;
    let mut catalogue = Catalogue::new(SLOTS, 0);
    let bytes = |catalogue: &Catalogue| catalogue.stats(1, 0).index_bytes;
    assert!(bytes(&catalogue) < 1 << 20, "{}", bytes(&catalogue));
    let recorded = Recorded { id: ObjectId::page(PageKey(1), PageKey(1)), length: 1, owner: None };
    catalogue.restore(100_000, &recorded);
    assert!(bytes(&catalogue) < 20_000_000, "{}", bytes(&catalogue));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_catalogue_agrees_with_a_list_of_slots(
        slots in 1u32..10,
        unusable in 0u32..4,
        steps in prop::collection::vec(step(), 0..300),
    ) {
        let mut expectation = Expectation::new(slots, slots.saturating_sub(unusable).max(1));
        for step in steps {
            expectation.play(step);
        }
    }

    /// An index may name an object in several generations, and even twice.
    #[test]
    fn the_latest_of_what_an_index_names_is_restored(
        entries in prop::collection::vec(prop::option::of(id()), 0..20),
    ) {
        let mut catalogue = Catalogue::new(24, 24);
        let mut latest: BTreeMap<ObjectId, u64> = BTreeMap::new();
        for (slot, id) in (0..).zip(&entries) {
            let Some(id) = id else { continue };
            let name = id.with_generation(0);
            let beats = latest.get(&name).is_none_or(|present| id.generation > *present);
            prop_assert_eq!(catalogue.restore(slot, &Recorded { id: *id, length: slot, owner: None }), beats);
            if beats {
                latest.insert(name, id.generation);
            }
        }
        for id in entries.iter().flatten() {
            let is_latest = latest[&id.with_generation(0)] == id.generation;
            prop_assert_eq!(catalogue.find(id).is_some(), is_latest);
        }
        prop_assert_eq!(catalogue.stats(1, 0).objects, latest.len() as u64);
        // Duplicates are released, and every other slot can be reserved.
        catalogue.release_doomed();
        let mut taken = 0;
        let other = |number: u128| ObjectId::page(PageKey(9), PageKey(number));
        while let Ok(Reserved::Slot(_)) = catalogue.reserve(&other(taken), 0, None, 0) {
            taken += 1;
        }
        prop_assert_eq!(taken as usize, 24 - latest.len());
    }
}
