//! Random calls against stores and a plain map. A store with room for everything must agree with the
//! map exactly; one that must evict may have lost what is not pinned, and nothing else.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use tempfile::TempDir;
use terrace_cache::PageKey;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, MemoryConfig, MemoryStore, ObjectId, Owner, Pin, Put,
    PutOptions, Registration, Removal, Store, StoreError, Stored,
};
use terrace_l3_disk::{
    DiskConfig, DiskStore, IoEngine, PromotionConfig, TieredConfig, TieredStore,
};
use terrace_tests::l3::nodes::LocalNodes;
use terrace_tests::l3::objects::{HARD, HARD_OF_ANOTHER, fill, is_right};
use tokio::runtime::{Builder, Runtime};

const OBJECT_BYTES_MAX: usize = 6000;
const SLOT_BYTES: u64 = 3 * 4096;
const LENGTHS: [usize; 6] = [0, 1, 100, 4096, 5000, OBJECT_BYTES_MAX];
/// Few names, so that calls meet.
const NAMES: u8 = 12;
const BATCH_MAX: u32 = 4;

/// Which object; its length and its generation are numbers of a few possible ones.
#[derive(Clone, Copy, Debug)]
struct Which {
    name: u8,
    generation: u64,
}

impl Which {
    fn id(self) -> ObjectId {
        let namespace = PageKey(u128::from(self.name % 2));
        ObjectId { namespace, key: PageKey(u128::from(self.name / 2)), generation: self.generation }
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put { batch: Vec<(Which, usize)>, pin: Option<Pin>, durable: bool },
    Get { batch: Vec<(Which, usize)> },
    Exists { batch: Vec<Which>, prefetch_to_memory: bool },
    Pin { which: Which, pin: Pin },
    Unpin { which: Which, pin: Pin },
    Remove { batch: Vec<Which>, removal: Removal },
    Flush,
    Reopen { shut_down: bool },
}

fn op() -> impl Strategy<Value = Op> {
    // Most objects are pages and have one generation only.
    let generation = || prop_oneof![5 => Just(0u64), 1 => 1u64..4];
    let which =
        move || (0..NAMES, generation()).prop_map(|(name, generation)| Which { name, generation });
    let batch = move || proptest::collection::vec(which(), 0..=BATCH_MAX as usize);
    // Lengths follow from names more often than not, so that gets find what they expect.
    let sized = move || {
        let length = prop_oneof![4 => Just(None), 1 => (0..LENGTHS.len()).prop_map(Some)];
        let one = (which(), length).prop_map(|(which, length)| {
            (which, LENGTHS[length.unwrap_or(usize::from(which.name) % LENGTHS.len())])
        });
        proptest::collection::vec(one, 0..=BATCH_MAX as usize)
    };
    let pin = || prop_oneof![3 => Just(HARD), 1 => Just(HARD_OF_ANOTHER), 4 => Just(Pin::Soft)];
    let removal = prop_oneof![
        3 => Just(Removal::Plain),
        3 => Just(Removal::Forced),
        1 => Just(Removal::Final),
    ];
    let put_pin = prop_oneof![6 => Just(None), 1 => pin().prop_map(Some)];
    prop_oneof![
        8 => (sized(), put_pin, proptest::bool::weighted(0.1))
            .prop_map(|(batch, pin, durable)| Op::Put { batch, pin, durable }),
        8 => sized().prop_map(|batch| Op::Get { batch }),
        3 => (batch(), any::<bool>())
            .prop_map(|(batch, prefetch_to_memory)| Op::Exists { batch, prefetch_to_memory }),
        2 => (which(), pin()).prop_map(|(which, pin)| Op::Pin { which, pin }),
        3 => (which(), pin()).prop_map(|(which, pin)| Op::Unpin { which, pin }),
        3 => (batch(), removal).prop_map(|(batch, removal)| Op::Remove { batch, removal }),
        1 => Just(Op::Flush),
        1 => any::<bool>().prop_map(|shut_down| Op::Reopen { shut_down }),
    ]
}

/// What the map remembers of an object.
#[derive(Clone, Copy, Debug)]
struct Object {
    generation: u64,
    length: usize,
    owner: Option<Owner>,
    soft_pin: bool,
}

impl Object {
    fn pin(&mut self, pin: Pin) {
        match pin {
            Pin::Hard(owner) => self.owner = Some(owner),
            Pin::Soft => self.soft_pin = true,
        }
    }

    /// Whether another's pin is in the way.
    fn refuses(&self, pin: Pin) -> bool {
        matches!(pin, Pin::Hard(owner) if self.owner.is_some_and(|other| other != owner))
    }
}

/// Whether a store can be closed and opened again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reopening {
    /// It would be another one.
    Never,
    /// It closes when it is dropped.
    Always,
    /// It closes when it is dropped, if nothing of it is under way any more.
    AfterShutdown,
}

/// How to open the store, and what it can hold.
struct Kind {
    open: Box<dyn Fn() -> Arc<dyn Store>>,
    reopening: Reopening,
    /// How many objects it has room for, if fewer than there are.
    slots: Option<usize>,
}

/// A store and the map that it must agree with.
struct World {
    registration: Option<Registration>,
    store: Option<Arc<dyn Store>>,
    arena: Arena,
    kind: Kind,
    objects: BTreeMap<u8, Object>,
}

impl World {
    fn new(kind: Kind) -> Self {
        let arena = Arena::new(BATCH_MAX, OBJECT_BYTES_MAX).unwrap();
        let store = (kind.open)();
        let registration = store.register(&arena).unwrap();
        let (registration, store) = (Some(registration), Some(store));
        Self { registration, store, arena, kind, objects: BTreeMap::new() }
    }

    fn store(&self) -> Arc<dyn Store> {
        self.store.clone().expect("it is open")
    }

    async fn apply(&mut self, op: &Op) {
        match op {
            Op::Put { batch, pin, durable } => {
                self.put(&distinct(batch, |(which, _)| which.name), *pin, *durable).await;
            }
            Op::Get { batch } => self.get(batch).await,
            Op::Exists { batch, prefetch_to_memory } => {
                let options =
                    ExistsOptions { prefetch_to_memory: *prefetch_to_memory, lease: false };
                let found = self.store().exists(&ids(batch), options).await;
                for (which, found) in batch.iter().zip(found) {
                    let found = found.map(|found| found.is_present());
                    self.agree(which.name, &found, |object, _| {
                        Ok(object.is_some_and(|it| it.generation == which.generation))
                    });
                }
            }
            Op::Pin { which, pin } => self.pin(*which, *pin).await,
            Op::Unpin { which, pin } => self.unpin(*which, *pin).await,
            Op::Remove { batch, removal } => {
                let batch = distinct(batch, |which| which.name);
                let removed = self.store().remove(&ids(&batch), *removal).await;
                for (which, removed) in batch.iter().zip(removed) {
                    self.agree(which.name, &removed, |object, _| match object {
                        Some(it) if it.generation != which.generation => Err(StoreError::Missing),
                        Some(it) if it.owner.is_some() && *removal != Removal::Final => {
                            Err(StoreError::Pinned)
                        }
                        Some(_) => Ok(()),
                        None => Err(StoreError::Missing),
                    });
                    if removed.is_ok() {
                        self.objects.remove(&which.name);
                    }
                }
            }
            Op::Flush => self.store().flush().await.unwrap(),
            Op::Reopen { shut_down } => self.reopen(*shut_down).await,
        }
        self.check_stats();
    }

    async fn put(&mut self, batch: &[(Which, usize)], pin: Option<Pin>, durable: bool) {
        let puts = (0..).zip(batch).map(|(page, (which, length))| {
            fill(&which.id(), &mut self.arena.target(page).unwrap().first(*length));
            Put::new(which.id(), self.arena.source(page).unwrap().first(*length))
        });
        let stored = self.store().put_from(puts.collect(), PutOptions { pin, durable }).await;
        assert_eq!(stored.len(), batch.len());
        for ((which, length), stored) in batch.iter().zip(stored) {
            let Which { name, generation } = *which;
            self.agree(name, &stored, |object, full| match object {
                Some(it) if it.generation > generation => {
                    Err(StoreError::Superseded { present: it.generation })
                }
                Some(it) if it.generation == generation => match pin {
                    Some(pin) if it.refuses(pin) => Err(StoreError::Pinned),
                    Some(_) | None => Ok(Stored::AlreadyThere),
                },
                Some(_) | None if full => Err(StoreError::Full),
                Some(_) | None => Ok(Stored::New),
            });
            if stored == Ok(Stored::New) {
                let object = Object { generation, length: *length, owner: None, soft_pin: false };
                self.objects.insert(name, object);
            }
            if let (Ok(_), Some(pin)) = (stored, pin) {
                self.objects.get_mut(&name).expect("it is there").pin(pin);
            }
        }
    }

    async fn get(&mut self, batch: &[(Which, usize)]) {
        let gets = (0..).zip(batch).map(|(page, (which, length))| {
            let mut target = self.arena.target(page).unwrap().first(*length);
            target.fill(0xEE);
            Get::new(which.id(), target)
        });
        let served = self.store().get_into(gets.collect(), GetOptions::default()).await;
        assert_eq!(served.len(), batch.len());
        for ((page, (which, length)), served) in (0..).zip(batch).zip(served) {
            if served.is_ok() {
                let bytes = self.arena.source(page).unwrap().first(*length);
                assert!(is_right(&which.id(), &bytes), "wrong bytes for {which:?}");
            }
            self.agree(which.name, &served.map(drop), |object, _| match object {
                Some(it) if it.generation != which.generation => Err(StoreError::Missing),
                Some(it) if it.length != *length => {
                    Err(StoreError::Length { expected: *length, found: it.length })
                }
                Some(_) => Ok(()),
                None => Err(StoreError::Missing),
            });
        }
    }

    async fn pin(&mut self, which: Which, pin: Pin) {
        let pinned = self.store().pin(&[which.id()], pin).await.remove(0);
        self.agree(which.name, &pinned, |object, _| match object {
            Some(it) if it.generation != which.generation => Err(StoreError::Missing),
            Some(it) if it.refuses(pin) => Err(StoreError::Pinned),
            Some(_) => Ok(()),
            None => Err(StoreError::Missing),
        });
        if pinned.is_ok() {
            self.objects.get_mut(&which.name).expect("it is there").pin(pin);
        }
    }

    async fn unpin(&mut self, which: Which, pin: Pin) {
        let unpinned = self.store().unpin(&[which.id()], pin).await.remove(0);
        self.agree(which.name, &unpinned, |object, _| match (object, pin) {
            (Some(it), _) if it.generation != which.generation => Err(StoreError::Missing),
            (Some(it), Pin::Hard(owner)) if it.owner == Some(owner) => Ok(()),
            (Some(it), Pin::Soft) if it.soft_pin => Ok(()),
            (Some(_), Pin::Hard(_) | Pin::Soft) => Err(StoreError::NotPinned),
            (None, Pin::Hard(_) | Pin::Soft) => Err(StoreError::Missing),
        });
        if unpinned.is_ok() {
            let object = self.objects.get_mut(&which.name).expect("it is there");
            match pin {
                Pin::Hard(_) => object.owner = None,
                Pin::Soft => object.soft_pin = false,
            }
        }
    }

    async fn reopen(&mut self, shut_down: bool) {
        let shut_down = match self.kind.reopening {
            Reopening::Never => return,
            Reopening::Always => shut_down,
            Reopening::AfterShutdown => true,
        };
        self.registration = None;
        let store = self.store.take().expect("it is open");
        if shut_down {
            store.shutdown().await.unwrap();
        }
        assert_eq!(Arc::strong_count(&store), 1, "nobody else has it");
        drop(store);
        let store = (self.kind.open)();
        self.registration = Some(store.register(&self.arena).unwrap());
        self.store = Some(store);
        // Hard pins wait for their owner to return.
        self.objects.values_mut().for_each(|object| object.soft_pin = false);
    }

    /// The answer must be that of the map, or, if the object may have been evicted, that of a map
    /// without it; from then on it is gone. What is `expected` depends on the object and on whether
    /// the store is full of pins.
    fn agree<T: Debug + PartialEq>(
        &mut self,
        name: u8,
        answer: &Result<T, StoreError>,
        expected: impl Fn(Option<Object>, bool) -> Result<T, StoreError>,
    ) {
        let object = self.objects.get(&name).copied();
        let full = self.kind.slots.is_some_and(|slots| self.hard_pinned() == slots);
        let agreed = expected(object, full);
        if *answer == agreed {
            return;
        }
        let evictable = self.kind.slots.is_some() && object.is_some_and(|it| it.owner.is_none());
        assert!(evictable, "name {name}: {answer:?} instead of {agreed:?}");
        self.objects.remove(&name);
        assert_eq!(*answer, expected(None, full), "name {name}: was {agreed:?}, or evicted");
    }

    fn check_stats(&self) {
        let stats = self.store().stats();
        // Tiers share objects and pins between them as they like.
        let tiers: Vec<_> =
            [stats.memory, stats.disk, stats.remote].into_iter().flatten().collect();
        let [tier] = tiers[..] else { return };
        assert_eq!(tier.hard_pinned, self.hard_pinned() as u64);
        assert_eq!((tier.corrupt, tier.io_errors), (0, 0));
        let objects = self.objects.len() as u64;
        let bytes: u64 = self.objects.values().map(|object| object.length as u64).sum();
        if self.kind.slots.is_some() {
            assert!(tier.objects <= objects && tier.bytes <= bytes);
            return;
        }
        assert_eq!((tier.objects, tier.bytes, tier.evicted), (objects, bytes, 0));
        let soft_pinned = self.objects.values().filter(|object| object.soft_pin).count();
        assert_eq!(tier.soft_pinned, soft_pinned as u64);
    }

    fn hard_pinned(&self) -> usize {
        self.objects.values().filter(|object| object.owner.is_some()).count()
    }

    /// Everything can be removed, and nothing is left then.
    async fn end(mut self) {
        let store = self.store();
        for (name, object) in std::mem::take(&mut self.objects) {
            let id = Which { name, generation: object.generation }.id();
            if let Some(owner) = object.owner {
                store.unpin(&[id], Pin::Hard(owner)).await.remove(0).unwrap();
            }
            let removed = store.remove(&[id], Removal::Plain).await.remove(0);
            let evicted = self.kind.slots.is_some() && removed == Err(StoreError::Missing);
            assert!(removed.is_ok() || evicted, "{id:?}: {removed:?}");
        }
        store.flush().await.unwrap();
        store.shutdown().await.unwrap();
        let stats = store.stats();
        for tier in [stats.memory, stats.disk, stats.remote].into_iter().flatten() {
            assert_eq!((tier.objects, tier.bytes, tier.resident_bytes), (0, 0, 0));
        }
        for page in 0..BATCH_MAX {
            assert!(self.arena.target(page).is_ok());
        }
    }
}

fn ids(batch: &[Which]) -> Vec<ObjectId> {
    batch.iter().map(|which| which.id()).collect()
}

/// Each name once: what becomes of a name that is in a batch twice is each backend's own affair.
fn distinct<T: Copy>(batch: &[T], name: impl Fn(&T) -> u8) -> Vec<T> {
    let mut first: Vec<T> = Vec::new();
    for one in batch {
        if first.iter().all(|other| name(other) != name(one)) {
            first.push(*one);
        }
    }
    first
}

fn play(kind: Kind, ops: &[Op]) {
    let runtime: Runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new(kind);
        for op in ops {
            world.apply(op).await;
        }
        world.end().await;
    });
}

fn memory_store(slots: usize) -> MemoryStore {
    let capacity_bytes = (slots * OBJECT_BYTES_MAX) as u64;
    let config = MemoryConfig::new(capacity_bytes, OBJECT_BYTES_MAX);
    // What is promoted is leased, which would keep it from being removed.
    MemoryStore::new(MemoryConfig { watermark_high: 1.0, lease_ttl_ms: 0, ..config }).unwrap()
}

fn memory(slots: usize) -> Kind {
    let open = move || -> Arc<dyn Store> { Arc::new(memory_store(slots)) };
    Kind { open: Box::new(open), reopening: Reopening::Never, slots: None }
}

fn disk_config(directory: &TempDir, slots: usize) -> DiskConfig {
    DiskConfig {
        io: IoEngine::Auto,
        depth: 2,
        grow_bytes: 4 * SLOT_BYTES,
        commit_interval_ms: 2,
        full_wait_ms: 20_000,
        watermark_high: 1.0,
        ..DiskConfig::new(directory.path(), slots as u64 * SLOT_BYTES, OBJECT_BYTES_MAX)
    }
}

fn disk(slots: usize) -> Kind {
    let directory = tempfile::tempdir().unwrap();
    let open = move || -> Arc<dyn Store> {
        Arc::new(DiskStore::open(disk_config(&directory, slots)).unwrap())
    };
    Kind { open: Box::new(open), reopening: Reopening::Always, slots: None }
}

/// A memory that is too small over a disk with room for everything.
fn tiered(slots: usize, write_behind: bool) -> Kind {
    let directory = tempfile::tempdir().unwrap();
    let open = move || -> Arc<dyn Store> {
        let disk = DiskStore::open(disk_config(&directory, slots)).unwrap();
        let promotion = PromotionConfig { remember_ms: 0, cooldown_ms: 0, ..Default::default() };
        let config = TieredConfig { promotion, write_behind };
        Arc::new(TieredStore::new(memory_store(3), disk, config).unwrap())
    };
    Kind { open: Box::new(open), reopening: Reopening::AfterShutdown, slots: None }
}

/// Three nodes, each with room for everything.
fn nodes(slots: usize) -> Kind {
    let kept = Mutex::new(Vec::new());
    let open = move || -> Arc<dyn Store> {
        let nodes = LocalNodes::start(3, || Arc::new(memory_store(slots)));
        let store = nodes.store();
        kept.lock().unwrap().push(nodes);
        Arc::new(store)
    };
    Kind { open: Box::new(open), reopening: Reopening::Never, slots: None }
}

/// The usual variable asks for more or fewer.
fn cases(default: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(default);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Room for everything, and for what is replaced until it is gone.
const PLENTY: usize = 4 * NAMES as usize;

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn memory_with_room_for_all_agrees_with_a_map(
        ops in proptest::collection::vec(op(), 1..100),
    ) {
        play(memory(PLENTY), &ops);
    }

    #[test]
    fn a_small_memory_loses_nothing_but_what_it_may_evict(
        slots in 1usize..6,
        ops in proptest::collection::vec(op(), 1..100),
    ) {
        play(Kind { slots: Some(slots), ..memory(slots) }, &ops);
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn a_disk_with_room_for_all_agrees_with_a_map(
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        play(disk(PLENTY), &ops);
    }

    #[test]
    fn a_small_disk_loses_nothing_but_what_it_may_evict(
        slots in 1usize..6,
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        play(Kind { slots: Some(slots), ..disk(slots) }, &ops);
    }

    #[test]
    fn nodes_with_room_for_all_agree_with_a_map(
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        play(nodes(PLENTY), &ops);
    }

    #[test]
    fn tiers_over_a_disk_with_room_for_all_agree_with_a_map(
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        play(tiered(PLENTY, false), &ops);
    }

    #[test]
    fn tiers_that_write_behind_agree_with_a_map(
        ops in proptest::collection::vec(op(), 1..80),
    ) {
        play(tiered(PLENTY, true), &ops);
    }
}
