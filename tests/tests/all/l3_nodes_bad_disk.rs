//! Nodes of which one has a disk that fails reads: the second copy is read, others are not blamed, and what lives
//! is not taken for consumed.

use std::cell::Cell;
use std::sync::Arc;

use terrace_l3::{
    Arena, BreakerState, ExistsOptions, Get, GetOptions, GuardConfig, Guarded, LendingStore,
    MemoryConfig, MemoryStore, ObjectId, PutOptions, Results, Served, Store, StoreError,
};
use terrace_l3_disk::{Direction, DiskConfig, DiskStore, TieredConfig, TieredStore};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureStore, Released, Tensor, TensorSpec,
};
use terrace_tests::l3::gated::{Gate, GatedDisk};
use terrace_tests::l3::nodes::LocalNodes;
use terrace_tests::l3::objects::{self, page};

const OBJECT_BYTES: usize = 4096;
const OBJECTS: u64 = 48;

/// Three nodes with disks, of which the first has a gate.
struct Farm {
    nodes: LocalNodes,
    disk: Arc<GatedDisk>,
    _folder: tempfile::TempDir,
}

impl Farm {
    fn new(copies: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let gated = Arc::new(GatedDisk::new(&folder.path().join("0")));
        let next = Cell::new(0);
        let holding = || -> Arc<dyn LendingStore> {
            let number = next.replace(next.get() + 1);
            let path = folder.path().join(number.to_string());
            let config = DiskConfig::new(path, 1024 * OBJECT_BYTES as u64, OBJECT_BYTES);
            let disk = match number {
                0 => DiskStore::open_on(gated.clone(), config),
                _ => DiskStore::open(config),
            };
            // Almost everything is read from disk.
            let memory = MemoryConfig::new(OBJECT_BYTES as u64, OBJECT_BYTES);
            let memory = MemoryStore::new(memory).unwrap();
            Arc::new(TieredStore::new(memory, disk.unwrap(), TieredConfig::default()).unwrap())
        };
        let mut nodes = LocalNodes::start(3, holding);
        nodes.config.copies = copies;
        Self { nodes, disk: gated, _folder: folder }
    }
}

async fn read_all(store: &dyn Store, arena: &Arena) -> Results<Served> {
    let get = |number: u64| Get::new(page(number), arena.target(number as u32).unwrap());
    store.get_into((0..OBJECTS).map(get).collect(), GetOptions::default()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fails_reads_costs_nothing_with_two_copies_and_its_share_with_one() {
    for copies in [1, 2] {
        let farm = Farm::new(copies);
        let guard = GuardConfig {
            failures_to_open: 1,
            exists_timeout_ms: 120_000,
            get_timeout_ms: 120_000,
            put_timeout_ms: 120_000,
            // Each read is asked for, however often it has failed.
            negative_max: 0,
            ..GuardConfig::default()
        };
        let store = Guarded::new(Arc::new(farm.nodes.store()), guard);
        let arena = Arena::new(OBJECTS as u32, OBJECT_BYTES).unwrap();
        let _registration = store.register(&arena).unwrap();
        for number in 0..OBJECTS {
            let options = PutOptions { durable: true, ..PutOptions::default() };
            objects::put(&store, &arena, page(number), OBJECT_BYTES, options).await.unwrap();
        }
        farm.disk.set(Direction::Read, Gate::Fails);
        for _ in 0..8 {
            let mut unread = 0;
            for (number, read) in (0..OBJECTS).zip(read_all(&store, &arena).await) {
                match read {
                    Ok(_) => {
                        let bytes = arena.source(number as u32).unwrap();
                        assert!(objects::is_right(&page(number), &bytes), "object {number}");
                    }
                    Err(error) => {
                        assert_eq!(error, StoreError::HolderAway, "unknown, and not missing");
                        unread += 1;
                    }
                }
            }
            match copies {
                1 => assert!((1..OBJECTS / 2).contains(&unread), "{unread} is not a share"),
                _ => assert_eq!(unread, 0),
            }
        }
        let guard = store.stats().guard.unwrap();
        assert_eq!((guard.breaker, guard.opened), (BreakerState::Closed, 0));
        let ids: Vec<ObjectId> = (0..OBJECTS).map(page).collect();
        let found = store.exists(&ids, ExistsOptions::default()).await;
        assert!(found.iter().all(|it| it.as_ref().is_ok_and(|it| it.is_present())), "{found:?}");
        assert!(farm.disk.reads_begun() > 0, "the disk was asked");
        farm.disk.set(Direction::Read, Gate::Open);
        assert!(read_all(&store, &arena).await.iter().all(Result::is_ok));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_outlive_a_disk_that_fails_reads() {
    for copies in [1, 2] {
        let farm = Farm::new(copies);
        let features =
            FeatureStore::open(Arc::new(farm.nodes.store()), FeatureConfig::producer("disk", 0));
        let features = features.await.unwrap();
        let arena = Arena::new(2, OBJECT_BYTES).unwrap();
        let _registration = features.register(&arena).unwrap();
        let mut refs = Vec::new();
        for number in 0..OBJECTS {
            arena.target(0).unwrap()[..8].copy_from_slice(&number.to_le_bytes());
            let spec = TensorSpec::new("hidden", Dtype::U8, [OBJECT_BYTES as u64]);
            let tensor = Tensor::new(spec, arena.source(0).unwrap());
            refs.push(features.put(&number.to_string(), vec![tensor]).await.unwrap());
        }
        farm.disk.set(Direction::Read, Gate::Fails);
        let mut unread = 0;
        for reference in &refs {
            match features.get_into(reference, vec![arena.target(1).unwrap()]).await {
                Ok(()) => {}
                Err(FeatureError::Store { error: StoreError::HolderAway, .. }) => unread += 1,
                Err(error) => panic!("{reference:?}: {error}"),
            }
        }
        assert_eq!(unread > 0, copies == 1, "{unread} with {copies} copies");
        features.gc().await.unwrap();
        assert_eq!(features.stats().live, OBJECTS, "nobody has consumed any");
        farm.disk.set(Direction::Read, Gate::Open);
        for (number, reference) in (0u64..).zip(refs) {
            features.get_into(&reference, vec![arena.target(1).unwrap()]).await.unwrap();
            assert_eq!(arena.source(1).unwrap()[..8], number.to_le_bytes());
            assert_eq!(features.release(reference).await, Ok(Released::Freed));
        }
    }
}
