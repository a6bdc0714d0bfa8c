//! The feature store keeps its promises over every backend.

use std::sync::Arc;

use terrace_l3::{GuardConfig, Guarded, MemoryConfig, MemoryStore, Store};
use terrace_l3_disk::{
    DiskConfig, DiskStore, IoEngine, PromotionConfig, TieredConfig, TieredStore,
};
use terrace_l3_nodes::NodesStore;
use terrace_tests::l3::features::{FeatureBackend, OBJECT_BYTES_MAX, all};
use terrace_tests::l3::nodes::LocalNodes;

const OBJECTS: u64 = 512;

fn backend(store: impl Store + 'static, keep: impl std::any::Any + Send + Sync) -> FeatureBackend {
    let store: Arc<dyn Store> = Arc::new(store);
    FeatureBackend { handle: Box::new(move || store.clone()), objects: None, keep: Box::new(keep) }
}

fn memory_store() -> MemoryStore {
    let bytes = OBJECTS * OBJECT_BYTES_MAX as u64;
    let config =
        MemoryConfig { lease_ttl_ms: 300_000, ..MemoryConfig::new(bytes, OBJECT_BYTES_MAX) };
    MemoryStore::new(config).unwrap()
}

fn disk_store(io: IoEngine) -> (DiskStore, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let bytes = OBJECTS * (OBJECT_BYTES_MAX as u64 + 4096);
    let config = DiskConfig {
        io,
        depth: 8,
        commit_interval_ms: 5,
        lease_ttl_ms: 300_000,
        grow_bytes: bytes,
        ..DiskConfig::new(directory.path(), bytes, OBJECT_BYTES_MAX)
    };
    (DiskStore::open(config).unwrap(), directory)
}

fn disk(io: IoEngine) -> FeatureBackend {
    let (store, directory) = disk_store(io);
    backend(store, directory)
}

fn tiered() -> FeatureBackend {
    let (disk, directory) = disk_store(IoEngine::Auto);
    let promotion = PromotionConfig::default();
    let tiers = TieredStore::new(
        memory_store(),
        disk,
        TieredConfig { promotion, ..TieredConfig::default() },
    )
    .unwrap();
    backend(tiers, directory)
}

fn guarded() -> FeatureBackend {
    let config = GuardConfig {
        exists_timeout_ms: 20_000,
        get_timeout_ms: 20_000,
        control_timeout_ms: 20_000,
        negative_ttl_ms: 0,
        ..GuardConfig::default()
    };
    backend(Guarded::new(Arc::new(memory_store()), config), ())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_in_memory() {
    all(|| backend(memory_store(), ())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_on_disk_with_io_uring() {
    all(|| disk(IoEngine::Uring)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_on_disk_with_threads() {
    all(|| disk(IoEngine::Threads)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_in_tiers() {
    all(tiered).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_in_a_guarded_store() {
    all(guarded).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_on_nodes() {
    all(|| {
        let nodes = LocalNodes::start(3, || Arc::new(memory_store()));
        let config = nodes.config.clone();
        // Each process has connections of its own.
        let handle =
            move || -> Arc<dyn Store> { Arc::new(NodesStore::new(config.clone()).unwrap()) };
        FeatureBackend { handle: Box::new(handle), objects: None, keep: Box::new(nodes) }
    })
    .await;
}
