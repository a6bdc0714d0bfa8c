//! Hard pins belong to somebody: they are there as long as their owner is, whatever becomes of the process that
//! keeps the objects, and not much longer.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use terrace_kit::Dice;
use terrace_l3::{
    Arena, MemoryConfig, MemoryStore, ObjectId, Owner, Pin, PutOptions, Registration, Removal,
    Store, StoreError,
};
use terrace_l3_disk::{
    BLOCK_BYTES, Disk, DiskConfig, DiskFile, DiskStore, TieredConfig, TieredStore,
};
use terrace_l3_nodes::{NodeConfig, NodeServer, NodesConfig, NodesStore, RunningNode};
use terrace_tests::l3::nodes::{patient, secret};
use terrace_tests::l3::objects::{self, HARD, HARD_OF_ANOTHER, page};
use terrace_tests::l3::simulated_disk::SimulatedDisk;
use tokio::time::{Instant, sleep};

const OBJECT_BYTES: usize = 3000;
const PINNED: PutOptions = PutOptions { pin: Some(HARD), durable: false };
const PATIENCE: Duration = Duration::from_secs(60);

/// A store, and memory to use it.
struct Bench<S> {
    store: S,
    arena: Arena,
    _registration: Registration,
}

impl<S: Store> Bench<S> {
    fn new(store: S) -> Self {
        let arena = Arena::new(2, OBJECT_BYTES).unwrap();
        let _registration = store.register(&arena).unwrap();
        Self { store, arena, _registration }
    }

    async fn put(&self, number: u64, options: PutOptions) {
        let put = objects::put(&self.store, &self.arena, page(number), OBJECT_BYTES, options);
        put.await.unwrap();
    }

    /// Puts more than the store holds.
    async fn press(&self) {
        for number in 1_000..1_000 + 2 * OBJECTS_MAX {
            self.put(number, PutOptions::default()).await;
        }
    }

    /// Tries to remove what is pinned.
    async fn removal(&self, number: u64) -> Result<(), StoreError> {
        self.store.remove(&[page(number)], Removal::Forced).await.remove(0)
    }
}

const OBJECTS_MAX: u64 = 32;

fn disk_config(path: &Path) -> DiskConfig {
    // An object takes a block more than its payload.
    let capacity_bytes = OBJECTS_MAX * 2 * BLOCK_BYTES as u64;
    DiskConfig::new(path, capacity_bytes, OBJECT_BYTES)
}

/// A node of which all is on disk.
async fn node(folder: &Path, address: &str, pins_kept: Duration) -> RunningNode {
    let pins_kept_ms = pins_kept.as_millis() as u64;
    let disk = DiskConfig { pins_kept_ms, ..disk_config(folder) };
    let config = NodeConfig { pins_kept_ms, ..NodeConfig::new(secret()) };
    let until = Instant::now() + PATIENCE;
    loop {
        let memory = MemoryConfig::new(4 * OBJECT_BYTES as u64, OBJECT_BYTES);
        let memory = MemoryStore::new(memory).unwrap();
        let disk = DiskStore::open(disk.clone()).unwrap();
        let tiers = TieredStore::new(memory, disk, TieredConfig::default()).unwrap();
        // The system may need a moment to let an address go.
        match NodeServer::bind(address, Arc::new(tiers), config.clone()) {
            Ok(node) => return node.start().unwrap(),
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

fn client(node: &RunningNode) -> Bench<NodesStore> {
    let address = node.address().to_string().parse().unwrap();
    let config = NodesConfig { show_up_ms: 20, ..NodesConfig::new(vec![address], secret()) };
    Bench::new(NodesStore::new(patient(config)).unwrap())
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let patience = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < patience, "{what}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nodes_restart_costs_no_pin_of_an_owner_that_is_there() {
    const PINS_KEPT: Duration = Duration::from_secs(2);
    let folder = tempfile::tempdir().unwrap();
    let first = node(folder.path(), "127.0.0.1:0", PINS_KEPT).await;
    let address = first.address().to_string();
    let owner = client(&first);
    for number in 0..8 {
        owner.put(number, PINNED).await;
    }
    assert!(first.stop(PATIENCE).await.unwrap());
    drop(first);

    let second = node(folder.path(), &address, PINS_KEPT).await;
    let other = client(&second);
    until("the node is back", async || other.store.reach().await == 1).await;
    other.press().await;
    for number in 0..8 {
        assert_eq!(other.removal(number).await, Err(StoreError::Pinned), "page {number}");
    }
    // The owner has nothing to say but that it is there.
    sleep(2 * PINS_KEPT).await;
    other.press().await;
    for number in 0..8 {
        assert_eq!(other.removal(number).await, Err(StoreError::Pinned), "page {number}");
    }
    // Pinning is the same a second time, and nobody else's business.
    let ids: Vec<ObjectId> = (0..8).map(page).collect();
    assert_eq!(owner.store.pin(&ids, HARD).await, vec![Ok(()); 8]);
    let refused = other.store.pin(&ids, HARD_OF_ANOTHER).await;
    assert_eq!(refused, vec![Err(StoreError::Pinned); 8]);
    assert_eq!(owner.store.unpin(&ids[..1], HARD).await, [Ok(())]);
    assert_eq!(other.removal(0).await, Ok(()));

    drop(owner);
    until("its pins are taken back", async || other.removal(1).await.is_ok()).await;
    assert_eq!(other.store.pin(&ids[2..3], HARD_OF_ANOTHER).await, [Ok(())]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pins_that_a_restarted_node_finds_end_if_nobody_stands_for_them() {
    const PINS_KEPT: Duration = Duration::from_secs(1);
    let folder = tempfile::tempdir().unwrap();
    let first = node(folder.path(), "127.0.0.1:0", PINS_KEPT).await;
    let address = first.address().to_string();
    let owner = client(&first);
    owner.put(1, PINNED).await;
    drop(owner);
    assert!(first.stop(PATIENCE).await.unwrap());
    drop(first);
    let opened = Instant::now();
    let second = node(folder.path(), &address, PINS_KEPT).await;
    let other = client(&second);
    until("its pin is taken back", async || other.removal(1).await.is_ok()).await;
    assert!(opened.elapsed() >= PINS_KEPT, "not before it had time to return");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pins_of_a_client_that_is_gone_are_taken_back() {
    let config = NodeConfig { pins_kept_ms: 500, ..NodeConfig::new(secret()) };
    let memory = MemoryConfig::new(200 * OBJECT_BYTES as u64, OBJECT_BYTES);
    let holding = Arc::new(MemoryStore::new(memory).unwrap());
    let node = NodeServer::bind("127.0.0.1:0", holding, config).unwrap().start().unwrap();
    let (gone, stays) = (client(&node), client(&node));
    gone.put(1, PINNED).await;
    stays.put(2, PutOptions { pin: Some(HARD_OF_ANOTHER), durable: false }).await;
    drop(gone);
    until("its pins are gone", async || {
        assert_eq!(stays.removal(2).await, Err(StoreError::Pinned), "the other's are not");
        stays.removal(1).await.is_ok()
    })
    .await;
}

/// Opens a store on what a crash has left of a disk.
fn after_crash(disk: &SimulatedDisk, seed: u64) -> (Arc<SimulatedDisk>, Bench<DiskStore>) {
    let history = disk.history();
    let end = history.events().len();
    let disk = Arc::new(SimulatedDisk::after_crash(&history, end, &mut Dice::new(seed)));
    let config =
        DiskConfig { commit_interval_ms: 3_600_000, ..disk_config(Path::new("simulated")) };
    let store = DiskStore::open_on(disk.clone(), config).unwrap();
    (disk, Bench::new(store))
}

#[tokio::test]
async fn pins_are_as_durable_as_what_they_keep() {
    for seed in 0..8 {
        let (disk, bench) = after_crash(&SimulatedDisk::new(), seed);
        bench.put(1, PutOptions { durable: true, ..PINNED }).await;
        for number in [2, 3] {
            bench.put(number, PutOptions::default()).await;
        }
        let ids = [page(2), page(3)];
        assert_eq!(bench.store.pin(&ids, HARD_OF_ANOTHER).await, vec![Ok(()); 2]);
        assert_eq!(bench.store.unpin(&ids[1..], HARD_OF_ANOTHER).await, [Ok(())]);
        bench.store.flush().await.unwrap();

        let (disk, bench) = after_crash(&disk, seed);
        assert_eq!(bench.removal(1).await, Err(StoreError::Pinned));
        assert_eq!(bench.store.unpin(&[page(2)], HARD).await, [Err(StoreError::NotPinned)]);
        assert_eq!(bench.store.unpin(&[page(2)], HARD_OF_ANOTHER).await, [Ok(())]);
        assert_eq!(bench.removal(3).await, Ok(()));
        bench.store.flush().await.unwrap();

        let (_disk, bench) = after_crash(&disk, seed);
        assert_eq!(bench.removal(1).await, Err(StoreError::Pinned));
        assert_eq!(bench.removal(2).await, Ok(()));
        assert_eq!(bench.removal(3).await, Err(StoreError::Missing));
    }
}

#[tokio::test]
async fn what_is_pinned_goes_last_when_a_store_shrinks() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(DiskStore::open(disk_config(folder.path())).unwrap());
    for number in 0..OBJECTS_MAX / 2 {
        bench
            .put(number, if number.is_multiple_of(4) { PINNED } else { PutOptions::default() })
            .await;
    }
    drop(bench);
    let whole = disk_config(folder.path());
    let half = DiskConfig { capacity_bytes: whole.capacity_bytes / 4, ..whole };
    let bench = Bench::new(DiskStore::open(half).unwrap());
    assert!(bench.store.opening().dropped.objects > 0);
    for number in (0..OBJECTS_MAX / 2).step_by(4) {
        assert_eq!(bench.removal(number).await, Err(StoreError::Pinned), "page {number}");
    }
}

/// The index of version 1 had zeros where owners are now.
#[tokio::test]
async fn a_store_without_owners_is_taken_over() {
    let (disk, bench) = after_crash(&SimulatedDisk::new(), 1);
    bench.put(1, PutOptions { pin: None, durable: true }).await;
    drop(bench);
    let mut first = disk.bytes(DiskFile::Index, 0..32);
    first[8] = 1;
    let checksum = terrace_l3::backend::payload_checksum(&first[..24]);
    first[24..].copy_from_slice(&checksum.to_le_bytes());
    overwrite(&disk, &first);
    let (disk, bench) = after_crash(&disk, 1);
    assert_eq!(disk.bytes(DiskFile::Index, 8..12), [2, 0, 0, 0]);
    let owner = Pin::Hard(Owner::named("somebody"));
    assert_eq!(bench.store.pin(&[page(1)], owner).await, [Ok(())]);
    bench.store.flush().await.unwrap();
    let (_disk, bench) = after_crash(&disk, 1);
    assert_eq!(bench.removal(1).await, Err(StoreError::Pinned));
}

/// Changes the beginning of the index, bit by bit, for good.
fn overwrite(disk: &SimulatedDisk, bytes: &[u8]) {
    let there = disk.bytes(DiskFile::Index, 0..bytes.len() as u64);
    for (offset, (byte, there)) in (0..).zip(bytes.iter().zip(there)) {
        for bit in (0..8).filter(|bit| (byte ^ there) >> bit & 1 == 1) {
            disk.flip_bit(DiskFile::Index, offset, bit);
        }
    }
    disk.sync(DiskFile::Index).unwrap();
}
