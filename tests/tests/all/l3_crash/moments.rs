//! Crashes at moments that chance seldom finds.

use std::sync::Arc;

use terrace_kit::Dice;
use terrace_l3::{Arena, ExistsOptions, ObjectId, PutOptions, Registration, Removal, Store};
use terrace_l3_disk::{BLOCK_BYTES, DiskConfig, DiskFile, DiskStore};
use terrace_tests::l3::objects;
use terrace_tests::l3::simulated_disk::{History, SimulatedDisk};

const OBJECT_BYTES: usize = 1000;
const DURABLE: PutOptions = PutOptions { pin: None, durable: true };
const LATER: PutOptions = PutOptions { pin: None, durable: false };
/// How often each event is interrupted, unless said otherwise.
const TIMES: u64 = 20;

/// A store of so many objects whose rounds come on demand.
fn config(slots: u64) -> DiskConfig {
    let bytes = slots * 2 * BLOCK_BYTES as u64;
    DiskConfig {
        commit_interval_ms: 3_600_000,
        ..DiskConfig::new("simulated", bytes, OBJECT_BYTES)
    }
}

struct Bench {
    store: DiskStore,
    disk: Arc<SimulatedDisk>,
    arena: Arena,
    _registration: Registration,
}

impl Bench {
    fn new(disk: SimulatedDisk, slots: u64) -> Self {
        let disk = Arc::new(disk);
        let store = DiskStore::open_on(disk.clone(), config(slots)).unwrap();
        let arena = Arena::new(2, OBJECT_BYTES).unwrap();
        let _registration = store.register(&arena).unwrap();
        Self { store, disk, arena, _registration }
    }

    async fn put(&self, id: ObjectId, options: PutOptions) {
        objects::put(&self.store, &self.arena, id, OBJECT_BYTES, options).await.unwrap();
    }

    /// Whether the object is there. One that is there can be read.
    async fn has(&self, id: ObjectId) -> bool {
        let presence = self.store.exists(&[id], ExistsOptions::default()).await.remove(0).unwrap();
        let read = objects::get(&self.store, &self.arena, id, OBJECT_BYTES).await;
        assert_eq!(
            read.is_ok(),
            presence.is_present(),
            "{id:?} is {presence:?} but reads {read:?}"
        );
        read.is_ok()
    }

    /// Does something while a round waits for its sync of `file`.
    async fn during_sync(&self, file: DiskFile, meanwhile: impl AsyncFnOnce()) {
        self.disk.hold_syncs(file);
        let store = self.store.clone();
        let flush = tokio::spawn(async move { store.flush().await });
        tokio::task::yield_now().await;
        self.disk.wait_for_held_sync();
        meanwhile().await;
        self.disk.release();
        flush.await.unwrap().unwrap();
    }

    /// Closes the store.
    fn history(self) -> History {
        drop(self.store);
        self.disk.history()
    }
}

/// Disks as crashes from event number `from` on leave them, so many for each event.
fn crashed(history: &History, from: usize, times: u64) -> impl Iterator<Item = SimulatedDisk> {
    let mut crashes = history.crashes();
    while crashes.at() < from && crashes.advance() {}
    let mut time = 0;
    std::iter::from_fn(move || {
        if time == times {
            time = 0;
            if !crashes.advance() {
                return None;
            }
        }
        time += 1;
        Some(crashes.disk(&mut Dice::new(crashes.at() as u64 * times + time)))
    })
}

#[tokio::test]
async fn an_object_that_is_replaced_during_a_round_keeps_its_predecessor_company() {
    let id = |generation| objects::page(1).with_generation(generation);
    let bench = Bench::new(SimulatedDisk::new(), 128);
    bench.put(id(1), DURABLE).await;
    // What comes next is in another block of the index.
    for number in 100..180 {
        bench.put(objects::page(number), LATER).await;
    }
    bench.store.flush().await.unwrap();
    let durable = bench.disk.position();
    bench.put(id(2), LATER).await;
    bench.during_sync(DiskFile::Data, async || bench.put(id(3), LATER).await).await;
    let flushed = bench.disk.position();
    let history = bench.history();
    for (from, first) in [(durable, 1), (flushed, 2)] {
        for disk in crashed(&history, from, TIMES) {
            let bench = Bench::new(disk, 128);
            let mut there = 0;
            for generation in first..=3 {
                there += u32::from(bench.has(id(generation)).await);
            }
            assert_eq!(there, 1, "of the generations from {first} on");
        }
    }
}

#[tokio::test]
async fn what_is_removed_during_a_round_stays_away() {
    for file in [DiskFile::Data, DiskFile::Index] {
        let bench = Bench::new(SimulatedDisk::new(), 32);
        bench.put(objects::page(1), LATER).await;
        bench.put(objects::page(2), LATER).await;
        let remove = async || {
            let ids = [objects::page(1)];
            bench.store.remove(&ids, Removal::Plain).await.remove(0).unwrap();
        };
        bench.during_sync(file, remove).await;
        bench.store.flush().await.unwrap();
        let flushed = bench.disk.position();
        for disk in crashed(&bench.history(), flushed, TIMES) {
            let bench = Bench::new(disk, 32);
            assert!(!bench.has(objects::page(1)).await);
            assert!(bench.has(objects::page(2)).await);
        }
    }
}

#[tokio::test]
async fn a_slot_is_not_reused_before_the_index_has_let_go_of_it() {
    const SLOTS: u64 = 8;
    let bench = Bench::new(SimulatedDisk::new(), SLOTS);
    for number in 0..7 {
        bench.put(objects::page(number), DURABLE).await;
    }
    let ids: Vec<ObjectId> = (0..7).map(objects::page).collect();
    bench.store.remove(&ids[..6], Removal::Plain).await;
    // One slot is free and six are about to be.
    bench.during_sync(DiskFile::Index, async || bench.put(objects::page(100), LATER).await).await;
    for number in 101..106 {
        bench.put(objects::page(number), LATER).await;
    }
    for disk in crashed(&bench.history(), 0, TIMES) {
        let bench = Bench::new(disk, SLOTS);
        for number in (0..7).chain(100..106) {
            bench.has(objects::page(number)).await;
        }
    }
}

#[tokio::test]
async fn a_slot_is_not_reused_while_it_is_read() {
    let bench = Bench::new(SimulatedDisk::new().shuffled(1), 8);
    for number in 0..7 {
        bench.put(objects::page(number), DURABLE).await;
    }
    bench.disk.hold_reads();
    let (store, arena) = (bench.store.clone(), bench.arena.clone());
    let read =
        tokio::spawn(
            async move { objects::get(&store, &arena, objects::page(0), OBJECT_BYTES).await },
        );
    tokio::task::yield_now().await;
    bench.store.remove(&[objects::page(0)], Removal::Forced).await.remove(0).unwrap();
    bench.store.flush().await.unwrap();
    // The disk would notice a write to what is being read.
    bench.put(objects::page(100), LATER).await;
    bench.disk.release();
    read.await.unwrap().expect("it was there when the read began");
}

#[tokio::test]
async fn a_store_whose_creation_was_interrupted_is_created_again() {
    let history = Bench::new(SimulatedDisk::new(), 32).history();
    // So often that the few bytes which describe the store are torn anywhere.
    for disk in crashed(&history, 0, 1500) {
        let bench = Bench::new(disk, 32);
        bench.put(objects::page(1), DURABLE).await;
        assert!(bench.has(objects::page(1)).await);
    }
}

#[tokio::test]
async fn what_lay_beyond_a_smaller_store_does_not_come_back() {
    const LARGE: u64 = 256;
    const SMALL: u64 = 16;
    let bench = Bench::new(SimulatedDisk::new(), LARGE);
    for number in 0..LARGE {
        bench.put(objects::page(number), LATER).await;
    }
    let disk = bench.disk.clone();
    drop(bench.history());
    let bench = Bench::new(disk.copy(), SMALL);
    let ids: Vec<ObjectId> = (0..LARGE).map(objects::page).collect();
    bench.store.remove(&ids, Removal::Plain).await;
    bench.store.flush().await.unwrap();
    let flushed = bench.disk.position();
    bench.put(objects::page(1000), DURABLE).await;
    let history = bench.history();
    for (time, disk) in (0..).zip(crashed(&history, 0, TIMES)) {
        // Once it is as large as before, nothing is taken for what lay there. New objects may have
        // overwritten a part of the index meanwhile.
        let bench = Bench::new(disk, LARGE);
        for number in 0..[0, 20, 120][time % 3] {
            bench.put(objects::page(2000 + number), LATER).await;
        }
        bench.store.flush().await.unwrap();
        let disk = bench.disk.clone();
        drop(bench.history());
        let bench = Bench::new(disk.copy(), LARGE);
        for id in &ids {
            bench.has(*id).await;
        }
    }
    for disk in crashed(&history, flushed, TIMES) {
        let bench = Bench::new(disk, LARGE);
        for id in &ids {
            assert!(!bench.has(*id).await, "{id:?}");
        }
    }
}

#[tokio::test]
async fn a_crash_while_a_store_becomes_smaller_costs_nothing_that_was_to_stay() {
    const LARGE: u64 = 128;
    const SMALL: u64 = 16;
    const OBJECTS: u64 = 96;
    let bench = Bench::new(SimulatedDisk::new(), LARGE);
    for number in 0..OBJECTS {
        bench.put(objects::page(number), LATER).await;
    }
    let disk = bench.disk.clone();
    drop(bench.history());
    let bench = Bench::new(disk.copy(), SMALL);
    let dropped = bench.store.opening().dropped.objects;
    assert!((OBJECTS - SMALL..=OBJECTS - SMALL + 1).contains(&dropped), "{dropped}");
    let history = bench.history();
    for (time, disk) in (0..).zip(crashed(&history, 0, TIMES)) {
        let bench = Bench::new(disk, [SMALL, LARGE][time % 2]);
        for number in dropped..OBJECTS {
            assert!(bench.has(objects::page(number)).await, "page {number} is gone");
        }
        // Whatever else is there is whole.
        for number in 0..dropped {
            bench.has(objects::page(number)).await;
        }
    }
}
