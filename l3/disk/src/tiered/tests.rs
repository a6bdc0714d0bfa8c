//! Both tiers together, on a disk whose reads can be delayed and whose writes can fail.

use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use tempfile::TempDir;
use terrace_cache::PageKey;
use tokio::task::JoinHandle;
use tokio::time::{advance, sleep};

mod write_behind;

use super::*;
use crate::{Direction, Disk, DiskConfig, DiskFile, FileDisk, IoEngine, Transfer};
use terrace_l3::MemoryConfig;

const BYTES: usize = 4096;
const HARD: Pin = Pin::Hard(Owner(NonZeroU64::MIN));
const PREFETCH: ExistsOptions = ExistsOptions { prefetch_to_memory: true, lease: false };

/// A disk with a gate for reads of objects.
#[derive(Debug)]
struct Gate {
    disk: FileDisk,
    /// Reads that wait while the gate is shut.
    held: Mutex<Option<Vec<Transfer>>>,
    /// Writes that wait while the gate is shut.
    held_writes: Mutex<Option<Vec<Transfer>>>,
    writes_fail: AtomicBool,
}

impl Gate {
    fn shut(&self) {
        *self.held.lock() = Some(Vec::new());
    }

    fn open(&self) {
        let held = self.held.lock().take().unwrap();
        self.disk.start(held);
    }

    fn shut_for_writes(&self) {
        *self.held_writes.lock() = Some(Vec::new());
    }

    fn open_for_writes(&self) {
        let held = self.held_writes.lock().take().unwrap();
        self.start(held);
    }

    fn held(&self) -> usize {
        self.held.lock().as_ref().map_or(0, Vec::len)
    }

    fn held_writes(&self) -> usize {
        self.held_writes.lock().as_ref().map_or(0, Vec::len)
    }
}

impl Disk for Gate {
    fn start(&self, transfers: Vec<Transfer>) {
        let mut through = Vec::new();
        for transfer in transfers {
            let failing = self.writes_fail.load(Ordering::Relaxed);
            let gate = match transfer.direction() {
                Direction::Read => &self.held,
                Direction::Write => &self.held_writes,
            };
            match (transfer.file(), transfer.direction(), &mut *gate.lock()) {
                (DiskFile::Data, _, Some(held)) => held.push(transfer),
                (DiskFile::Data, Direction::Write, None) if failing => {
                    transfer.finish(Err(io::Error::other("worn out")));
                }
                (DiskFile::Data | DiskFile::Index, Direction::Read | Direction::Write, _) => {
                    through.push(transfer);
                }
            }
        }
        self.disk.start(through);
    }

    fn sync(&self, file: DiskFile) -> io::Result<()> {
        self.disk.sync(file)
    }

    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        self.disk.grow(file, bytes)
    }

    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        self.disk.shrink(file, bytes)
    }

    fn length(&self, file: DiskFile) -> io::Result<u64> {
        self.disk.length(file)
    }
}

struct TestTiers {
    store: TieredStore,
    gate: Arc<Gate>,
    arena: Arena,
    _registration: Registration,
    _directory: TempDir,
}

impl TestTiers {
    fn new(memory_slots: u64, promotion: PromotionConfig) -> Self {
        Self::with(memory_slots, TieredConfig { promotion, ..TieredConfig::default() })
    }

    fn writing_behind(memory_slots: u64) -> Self {
        let promotion =
            PromotionConfig { remember_ms: 0, cooldown_ms: 0, ..PromotionConfig::default() };
        Self::with(memory_slots, TieredConfig { promotion, write_behind: true })
    }

    fn with(memory_slots: u64, config: TieredConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let disk = FileDisk::open(directory.path(), IoEngine::Threads, 4).unwrap();
        let gate = Gate {
            disk,
            held: Mutex::default(),
            held_writes: Mutex::default(),
            writes_fail: AtomicBool::new(false),
        };
        let gate = Arc::new(gate);
        let disk = DiskConfig::new(directory.path(), 4 << 20, BYTES);
        let disk = DiskStore::open_on(gate.clone(), disk).unwrap();
        let memory = MemoryConfig::new(memory_slots * BYTES as u64, BYTES);
        let memory = MemoryStore::new(MemoryConfig { leased_share_max: 1.0, ..memory }).unwrap();
        let store = TieredStore::new(memory, disk, config).unwrap();
        let arena = Arena::new(64, BYTES).unwrap();
        let registration = store.register(&arena).unwrap();
        Self { store, gate, arena, _registration: registration, _directory: directory }
    }

    async fn put_with(&self, id: ObjectId, options: PutOptions) -> Result<Stored, StoreError> {
        self.arena.target(0).unwrap().fill(byte(&id));
        let put = Put::new(id, self.arena.source(0).unwrap());
        self.store.put_from(vec![put], options).await.remove(0)
    }

    /// A put that can run concurrently with others.
    fn put_of(&self, id: ObjectId) -> Put {
        let page = 32 + id.key.0 as u32;
        self.arena.target(page).unwrap().fill(byte(&id));
        Put::new(id, self.arena.source(page).unwrap())
    }

    fn spawn_put(&self, puts: Vec<Put>) -> JoinHandle<Results<Stored>> {
        let store = self.store.clone();
        tokio::spawn(async move { store.put_from(puts, PutOptions::default()).await })
    }

    async fn put(&self, id: ObjectId) -> Result<Stored, StoreError> {
        self.put_with(id, PutOptions::default()).await
    }

    /// Stores objects and removes them from memory.
    async fn put_on_disk(&self, ids: &[ObjectId]) {
        for id in ids {
            assert_eq!(self.put(*id).await, Ok(Stored::New));
            let forgotten = self.memory().remove(&[*id], Removal::Forced).await.remove(0);
            assert!(matches!(forgotten, Ok(()) | Err(StoreError::Missing)));
        }
    }

    /// Fills memory with objects that cannot be evicted.
    async fn fill_memory(&self, ids: &[ObjectId]) {
        let options = PutOptions { pin: Some(HARD), durable: false };
        for id in ids {
            assert_eq!(self.put_with(*id, options).await, Ok(Stored::New));
        }
    }

    async fn get_all(&self, ids: &[ObjectId]) -> Results<Served> {
        let get = |(page, id): (usize, &ObjectId)| {
            Get::new(*id, self.arena.target(page as u32 + 1).unwrap())
        };
        let gets = ids.iter().enumerate().map(get).collect();
        let results = self.store.get_into(gets, GetOptions::default()).await;
        for (page, (id, result)) in ids.iter().zip(&results).enumerate() {
            if result.is_ok() {
                let page = self.arena.source(page as u32 + 1).unwrap();
                assert!(page.iter().all(|found| *found == byte(id)), "the bytes of {id:?}");
            }
        }
        results
    }

    async fn get(&self, id: ObjectId) -> Result<Place, StoreError> {
        self.get_all(&[id]).await.remove(0).map(|served| served.place)
    }

    async fn prefetch(&self, ids: &[ObjectId]) -> Vec<Presence> {
        let results = self.store.exists(ids, PREFETCH).await;
        results.into_iter().map(Result::unwrap).collect()
    }

    /// Waits until `count` promotions have reached the gate.
    async fn at_the_gate(&self, count: usize) {
        while self.gate.held() < count {
            tokio::task::yield_now().await;
        }
    }

    async fn settle(&self, ids: &[ObjectId]) {
        self.store.shared.board.settled(ids).await;
    }

    fn memory(&self) -> &MemoryStore {
        &self.store.shared.memory
    }

    fn disk(&self) -> &DiskStore {
        &self.store.shared.disk
    }

    fn stats(&self) -> PromotionStats {
        self.store.promotion_stats()
    }
}

fn id(key: u128) -> ObjectId {
    ObjectId::page(PageKey(1), PageKey(key))
}

fn ids(keys: std::ops::Range<u128>) -> Vec<ObjectId> {
    keys.map(id).collect()
}

fn byte(id: &ObjectId) -> u8 {
    (id.key.0 as u8).wrapping_mul(7).wrapping_add(id.generation as u8 + 1)
}

#[tokio::test]
async fn a_lookup_with_prefetch_promotes_objects() {
    let bench = TestTiers::new(8, PromotionConfig::default());
    bench.put_on_disk(&[id(1)]).await;
    let found = bench.store.exists(&[id(1), id(2)], ExistsOptions::default()).await;
    assert_eq!(found, [Ok(Presence::Present(Place::Disk)), Ok(Presence::Absent)]);
    assert_eq!(bench.stats().triggered, 0, "asking alone moves nothing");

    let present = bench.prefetch(&[id(1), id(2)]).await;
    assert_eq!(present, [Presence::Present(Place::Disk), Presence::Absent]);
    bench.settle(&[id(1)]).await;
    assert_eq!(bench.prefetch(&[id(1)]).await, [Presence::Present(Place::Memory)]);
    assert_eq!(bench.get(id(1)).await, Ok(Place::Memory));
    let stats = bench.stats();
    assert_eq!((stats.triggered, stats.done, stats.gets_from_memory), (1, 1, 1));
    let leased = bench.memory().remove(&[id(1)], Removal::Plain).await.remove(0);
    assert_eq!(leased, Err(StoreError::Leased), "a promoted object is there to stay for a while");
}

#[tokio::test]
async fn prefetch_returns_at_once_and_promotes_a_few_at_a_time() {
    let config = PromotionConfig { workers: 2, chunk_keys: 3, ..PromotionConfig::default() };
    let bench = TestTiers::new(16, config);
    bench.put_on_disk(&ids(0..10)).await;
    bench.gate.shut();
    bench.prefetch(&ids(0..10)).await;
    bench.at_the_gate(2).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!((bench.gate.held(), bench.stats().active), (2, 10));
    bench.prefetch(&ids(0..10)).await;
    assert_eq!((bench.stats().triggered, bench.stats().deduplicated), (10, 10));
    bench.gate.open();
    bench.settle(&ids(0..10)).await;
    assert_eq!((bench.stats().done, bench.stats().remembered), (10, 10));
}

#[tokio::test(start_paused = true)]
async fn f38_ten_promotions_are_waited_for_once() {
    let bench = TestTiers::new(16, PromotionConfig::default());
    bench.put_on_disk(&ids(0..11)).await;
    let start = Instant::now();
    let tickets: Vec<_> =
        ids(0..10).into_iter().map(|id| bench.store.shared.board.trigger(id, start)).collect();
    let served = bench.get_all(&ids(0..11)).await;
    assert_eq!(start.elapsed().as_millis(), 10);
    for served in &served[..10] {
        assert_eq!(*served, Ok(Served { place: Place::Disk, waited: true }));
    }
    assert_eq!(served[10], Ok(Served { place: Place::Disk, waited: false }));
    assert_eq!((bench.stats().waits_expired, bench.stats().gets_from_disk), (1, 11));

    let start = Instant::now();
    let options = GetOptions { promotion_wait: Some(Duration::ZERO) };
    let get = Get::new(id(0), bench.arena.target(1).unwrap());
    let impatient = bench.store.get_into(vec![get], options).await.remove(0);
    assert_eq!(impatient, Ok(Served { place: Place::Disk, waited: false }));
    assert_eq!((start.elapsed().as_millis(), bench.stats().waits_expired), (0, 1));
    drop(tickets);
}

/// Holds for every interleaving of the promotion and the read of the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn objects_in_promotion_are_not_read_from_disk() {
    let config =
        PromotionConfig { get_wait_ms: 60_000, remember_ms: 0, ..PromotionConfig::default() };
    let bench = TestTiers::new(64, config);
    let ids = ids(0..50);
    bench.put_on_disk(&ids).await;
    for _ in 0..100 {
        bench.prefetch(&ids).await;
        let served = bench.get_all(&ids).await;
        assert!(served.iter().all(Result::is_ok), "{served:?}");
        assert_eq!(bench.stats().gets_from_disk, 0);
        bench.memory().remove(&ids, Removal::Forced).await;
    }
}

#[tokio::test]
async fn f38_a_wait_ends_with_the_last_promotion() {
    let bench =
        TestTiers::new(16, PromotionConfig { get_wait_ms: 60_000, ..PromotionConfig::default() });
    bench.put_on_disk(&ids(0..10)).await;
    bench.gate.shut();
    bench.prefetch(&ids(0..10)).await;
    bench.at_the_gate(4).await;
    let gate = bench.gate.clone();
    tokio::spawn(async move {
        sleep(Duration::from_millis(5)).await;
        gate.open();
    });
    for served in bench.get_all(&ids(0..10)).await {
        assert_eq!(served, Ok(Served { place: Place::Memory, waited: true }));
    }
    let stats = bench.stats();
    assert_eq!((stats.gets_after_waiting, stats.gets_from_memory), (10, 10));
    assert_eq!((stats.gets_from_disk, stats.waits_expired), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_lack_of_memory_pauses_promotions() {
    let bench = TestTiers::new(2, PromotionConfig::default());
    bench.fill_memory(&ids(0..2)).await;
    bench.put_on_disk(&ids(2..4)).await;
    bench.prefetch(&[id(2)]).await;
    bench.settle(&[id(2)]).await;
    bench.prefetch(&[id(2), id(3)]).await;
    let stats = bench.stats();
    assert_eq!((stats.no_memory, stats.cooled_down, stats.active), (1, 2, 0));
    bench.store.unpin(&[id(0)], HARD).await.remove(0).unwrap();
    advance(Duration::from_millis(500)).await;
    bench.prefetch(&[id(2)]).await;
    bench.settle(&[id(2)]).await;
    assert_eq!(bench.get(id(2)).await, Ok(Place::Memory));
}

#[tokio::test]
async fn an_object_removed_during_its_promotion_does_not_return() {
    let bench = TestTiers::new(8, PromotionConfig::default());
    bench.put_on_disk(&[id(1)]).await;
    bench.gate.shut();
    bench.prefetch(&[id(1)]).await;
    bench.at_the_gate(1).await;
    assert_eq!(bench.store.remove(&[id(1)], Removal::Plain).await, [Ok(())]);
    bench.gate.open();
    bench.settle(&[id(1)]).await;
    assert_eq!((bench.stats().vanished, bench.stats().done), (1, 0));
    assert_eq!(bench.get(id(1)).await, Err(StoreError::Missing));
    assert_eq!(bench.store.remove(&[id(1)], Removal::Plain).await, [Err(StoreError::Missing)]);
    assert_eq!(bench.put(id(1)).await, Ok(Stored::New));
    assert_eq!(bench.get(id(1)).await, Ok(Place::Memory), "nothing is left in its way");
}

#[tokio::test]
async fn an_object_replaced_during_its_promotion_does_not_return() {
    let bench = TestTiers::new(2, PromotionConfig::default());
    let (old, new) = (id(1).with_generation(1), id(1).with_generation(2));
    bench.put_on_disk(&[old]).await;
    bench.gate.shut();
    bench.prefetch(&[old]).await;
    bench.at_the_gate(1).await;
    // The new one finds no room in memory and so does not evict the old one there.
    bench.fill_memory(&[id(5)]).await;
    assert_eq!(bench.put(new).await, Ok(Stored::New));
    assert!(!bench.memory().contains(&new));
    bench.gate.open();
    bench.settle(&[old]).await;
    assert_eq!(bench.get(old).await, Err(StoreError::Missing));
    assert_eq!(bench.get(new).await, Ok(Place::Disk));
}

#[tokio::test]
async fn a_later_generation_replaces_earlier_ones_in_both_tiers() {
    let bench = TestTiers::new(2, PromotionConfig::default());
    let generation = |number| id(1).with_generation(number);
    bench.fill_memory(&[id(5)]).await;
    bench.put_on_disk(&[generation(1)]).await;
    bench.prefetch(&[generation(1)]).await;
    bench.settle(&[generation(1)]).await;
    assert_eq!(bench.get(generation(1)).await, Ok(Place::Memory));
    // Memory is full; the earlier generation is among its objects.
    assert_eq!(bench.put(generation(2)).await, Ok(Stored::New));
    assert_eq!(bench.get(generation(1)).await, Err(StoreError::Missing));
    assert_eq!(bench.put(generation(1)).await, Err(StoreError::Superseded { present: 2 }));

    // Only memory has the latest.
    assert_eq!(bench.put(generation(3)).await, Ok(Stored::New));
    bench.disk().remove(&[generation(3)], Removal::Forced).await.remove(0).unwrap();
    let options = PutOptions { pin: Some(HARD), durable: false };
    let late = bench.put_with(generation(2), options).await;
    assert_eq!(late, Err(StoreError::Superseded { present: 3 }));
    assert_eq!(bench.get(generation(2)).await, Err(StoreError::Missing));
    assert_eq!(bench.get(generation(3)).await, Ok(Place::Memory));
}

#[tokio::test]
async fn an_object_that_one_tier_refuses_is_kept_by_the_other() {
    let bench = TestTiers::new(2, PromotionConfig::default());
    bench.gate.writes_fail.store(true, Ordering::Relaxed);
    assert_eq!(bench.put(id(1)).await, Ok(Stored::New));
    assert_eq!(bench.put(id(1)).await, Ok(Stored::AlreadyThere));
    assert_eq!(bench.get(id(1)).await, Ok(Place::Memory));
    let durable = PutOptions { pin: None, durable: true };
    let refused = bench.put_with(id(2), durable).await.unwrap_err();
    assert!(refused.is_unwell(), "{refused}");
    assert_eq!(bench.get(id(2)).await, Err(StoreError::Missing));
    let refused = bench.put(id(3).with_generation(1)).await.unwrap_err();
    assert!(refused.is_unwell(), "{refused}");

    bench.gate.writes_fail.store(false, Ordering::Relaxed);
    bench.fill_memory(&ids(5..7)).await;
    assert_eq!(bench.put_with(id(2), durable).await, Ok(Stored::New));
    assert_eq!(bench.put(id(2)).await, Ok(Stored::AlreadyThere));
    assert_eq!(bench.get(id(2)).await, Ok(Place::Disk));
}

#[tokio::test]
async fn a_damaged_copy_in_memory_is_read_from_disk() {
    let bench = TestTiers::new(8, PromotionConfig::default());
    assert_eq!(bench.put(id(1)).await, Ok(Stored::New));
    bench.memory().arena().target(0).unwrap()[100] ^= 1;
    assert_eq!(bench.get(id(1)).await, Ok(Place::Disk));
    assert_eq!(bench.store.stats().memory.unwrap().corrupt, 1);
    assert_eq!(bench.store.exists(&[id(1)], PREFETCH).await, [Ok(Presence::Present(Place::Disk))]);
}

#[tokio::test]
async fn a_refused_removal_leaves_both_copies() {
    let bench = TestTiers::new(8, PromotionConfig::default());
    for key in 1..4 {
        assert_eq!(bench.put(id(key)).await, Ok(Stored::New));
    }
    let lease = ExistsOptions { prefetch_to_memory: false, lease: true };
    bench.store.exists(&[id(1)], lease).await.remove(0).unwrap();
    bench.disk().pin(&[id(2)], HARD).await.remove(0).unwrap();
    let results = bench.store.remove(&ids(1..5), Removal::Plain).await;
    let missing = Err(StoreError::Missing);
    assert_eq!(results, [Err(StoreError::Leased), Err(StoreError::Pinned), Ok(()), missing]);
    for (key, kept) in [(1, true), (2, true), (3, false)] {
        let copies = (bench.memory().contains(&id(key)), bench.disk().length(&id(key)).is_some());
        assert_eq!(copies, (kept, kept), "{key}");
    }
    assert_eq!(bench.store.remove(&[id(1)], Removal::Forced).await, [Ok(())]);
}

#[tokio::test]
async fn pins_hold_in_whichever_tier_has_the_object() {
    let bench = TestTiers::new(8, PromotionConfig::default());
    bench.put_on_disk(&[id(1)]).await;
    assert_eq!(bench.store.pin(&[id(1)], HARD).await, [Ok(())]);
    bench.prefetch(&[id(1)]).await;
    bench.settle(&[id(1)]).await;
    assert_eq!(bench.store.pin(&[id(1)], HARD).await, [Ok(())]);
    let refused = bench.store.remove(&[id(1)], Removal::Forced).await;
    assert_eq!(refused, [Err(StoreError::Pinned)]);
    assert_eq!(bench.store.unpin(&[id(1)], HARD).await, [Ok(())]);
    assert_eq!(bench.store.unpin(&[id(1)], HARD).await, [Err(StoreError::NotPinned)]);
    assert_eq!(bench.store.unpin(&[id(2)], HARD).await, [Err(StoreError::Missing)]);
    assert_eq!(bench.store.remove(&[id(1)], Removal::Forced).await, [Ok(())]);
}

/// The object on disk was pinned by one owner before its copy in memory existed.
#[tokio::test]
async fn another_owner_is_refused_whichever_tier_knows_the_pin() {
    let bench = TestTiers::new(8, PromotionConfig::default());
    bench.put_on_disk(&[id(1)]).await;
    assert_eq!(bench.store.pin(&[id(1)], HARD).await, [Ok(())]);
    bench.prefetch(&[id(1)]).await;
    bench.settle(&[id(1)]).await;
    let another = Pin::Hard(Owner::named("another"));
    let pinned = bench.store.pin(&[id(1), id(2)], another).await;
    assert_eq!(pinned, [Err(StoreError::Pinned), Err(StoreError::Missing)]);
    assert_eq!(bench.store.unpin(&[id(1)], HARD).await, [Ok(())]);
    assert_eq!(bench.store.remove(&[id(1)], Removal::Forced).await, [Ok(())]);
}

#[tokio::test]
async fn a_registration_is_with_both_tiers_or_none() {
    let bench = TestTiers::new(2, PromotionConfig::default());
    let arenas = |bench: &TestTiers| bench.store.stats().memory.unwrap().arenas;
    let arena = Arena::new(1, BYTES).unwrap();
    let with_disk = bench.disk().register(&arena).unwrap();
    assert!(bench.store.register(&arena).is_err());
    assert_eq!(arenas(&bench), 1);
    drop(with_disk);
    let registration = bench.store.register(&arena).unwrap();
    assert_eq!(arenas(&bench), 2);
    drop(registration);
    assert_eq!(arenas(&bench), 1);
}

#[tokio::test]
async fn shutdown_waits_for_promotions_under_way() {
    let bench = TestTiers::new(8, PromotionConfig { workers: 1, ..PromotionConfig::default() });
    bench.put_on_disk(&ids(1..3)).await;
    bench.gate.shut();
    bench.prefetch(&ids(1..3)).await;
    bench.at_the_gate(1).await;
    let shutdown = tokio::spawn({
        let store = bench.store.clone();
        async move { store.shutdown().await }
    });
    sleep(Duration::from_millis(5)).await;
    assert!(!shutdown.is_finished());
    bench.gate.open();
    assert_eq!(shutdown.await.unwrap(), Ok(()));
    let stats = bench.stats();
    assert_eq!((stats.done, stats.failed, stats.active), (1, 1, 0));
    assert_eq!(bench.get(id(1)).await, Err(StoreError::Closed));
    assert_eq!(bench.put(id(9)).await, Err(StoreError::Closed));
    assert_eq!(bench.store.exists(&[id(1)], PREFETCH).await, [Err(StoreError::Closed)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tiers_agree_under_load() {
    let config = PromotionConfig { remember_ms: 0, cooldown_ms: 0, ..PromotionConfig::default() };
    agree_under_load(TestTiers::new(5, config)).await;
}

/// Everything concurrently, over a memory that is always too small: no get ever sees wrong bytes,
/// and nothing stays active in the end.
async fn agree_under_load(bench: TestTiers) {
    let work = |task: u32| {
        let (store, arena) = (bench.store.clone(), bench.arena.clone());
        async move {
            let mut random = u64::from(task) + 1;
            for _ in 0..500 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(task.into());
                let id = id(u128::from(random >> 32) % 12);
                match (random >> 40) % 8 {
                    0 | 1 => {
                        arena.target(task).unwrap().fill(byte(&id));
                        let put = Put::new(id, arena.source(task).unwrap());
                        let _ = store.put_from(vec![put], PutOptions::default()).await;
                    }
                    2 => drop(store.remove(&[id], Removal::Plain).await),
                    3 | 4 => drop(store.exists(&ids(0..12), PREFETCH).await),
                    _ => {
                        let get = Get::new(id, arena.target(task).unwrap());
                        let result = store.get_into(vec![get], GetOptions::default()).await;
                        let page = arena.source(task).unwrap();
                        assert!(result[0].is_err() || page.iter().all(|it| *it == byte(&id)));
                    }
                }
            }
        }
    };
    let tasks: Vec<_> = (0..4).map(|task| tokio::spawn(work(task))).collect();
    for task in tasks {
        task.await.unwrap();
    }
    bench.settle(&ids(0..12)).await;
    let stats = bench.stats();
    let unsuccessful = stats.vanished + stats.no_memory + stats.failed;
    assert_eq!(stats.triggered, stats.done + stats.already_resident + unsuccessful);
    assert!(stats.done > 0 && stats.failed == 0 && stats.active == 0, "{stats:?}");
    assert_eq!(bench.store.shutdown().await, Ok(()));
}
