//! Every backend keeps the promises of `Store`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use terrace_l3::{MemoryConfig, MemoryStore};
use terrace_l3_disk::{
    DiskConfig, DiskStore, IoEngine, PromotionConfig, TieredConfig, TieredStore,
};
use terrace_tests::l3::conformance::{Backend, all};
use terrace_tests::l3::nodes::LocalNodes;

/// No multiple of anything, so that no path is the easy one.
const OBJECT_BYTES_MAX: usize = 10_001;
const SLOTS: u64 = 16;
/// Long enough for a slow machine to put twice what fits.
const LEASE_TTL_MS: u64 = 1500;

fn memory_store() -> MemoryStore {
    let config = MemoryConfig {
        lease_ttl_ms: LEASE_TTL_MS,
        ..MemoryConfig::new(SLOTS * OBJECT_BYTES_MAX as u64, OBJECT_BYTES_MAX)
    };
    MemoryStore::new(config).unwrap()
}

fn disk_store(io: IoEngine, slots: u64) -> (DiskStore, TempDir) {
    const SLOT_BYTES: u64 = 4 * 4096;
    let directory = tempfile::tempdir().unwrap();
    let config = DiskConfig {
        io,
        depth: 4,
        grow_bytes: 5 * SLOT_BYTES,
        commit_interval_ms: 5,
        full_wait_ms: 5000,
        lease_ttl_ms: LEASE_TTL_MS,
        ..DiskConfig::new(directory.path(), slots * SLOT_BYTES, OBJECT_BYTES_MAX)
    };
    (DiskStore::open(config).unwrap(), directory)
}

fn memory() -> Backend {
    Backend {
        store: Arc::new(memory_store()),
        object_bytes_max: OBJECT_BYTES_MAX,
        objects_kept: 12,
        objects_max: SLOTS,
        copies: 1,
        lease_ttl: Duration::from_millis(LEASE_TTL_MS),
        full_wait: Duration::ZERO,
        keep: Box::new(()),
    }
}

fn disk(io: IoEngine) -> Backend {
    let (store, directory) = disk_store(io, SLOTS);
    Backend {
        store: Arc::new(store),
        full_wait: Duration::from_secs(5),
        keep: Box::new(directory),
        ..memory()
    }
}

fn tiered_store(write_behind: bool) -> (TieredStore, TempDir) {
    let (disk, directory) = disk_store(IoEngine::Auto, SLOTS);
    let promotion =
        PromotionConfig { remember_ms: 5, cooldown_ms: 5, ..PromotionConfig::default() };
    let tiers =
        TieredStore::new(memory_store(), disk, TieredConfig { promotion, write_behind }).unwrap();
    (tiers, directory)
}

fn tiered(write_behind: bool) -> Backend {
    let (tiers, directory) = tiered_store(write_behind);
    Backend {
        store: Arc::new(tiers),
        objects_max: 2 * SLOTS,
        full_wait: Duration::from_secs(5),
        keep: Box::new(directory),
        ..memory()
    }
}

/// Three nodes with memory alone.
fn nodes() -> Backend {
    let nodes = LocalNodes::start(3, || Arc::new(memory_store()));
    Backend {
        store: Arc::new(nodes.store()),
        objects_max: 3 * SLOTS,
        full_wait: Duration::from_secs(5),
        keep: Box::new(nodes),
        ..memory()
    }
}

/// Three nodes with memory alone, of which two have each object.
fn nodes_with_copies() -> Backend {
    let mut nodes = LocalNodes::start(3, || Arc::new(memory_store()));
    nodes.config.copies = 2;
    Backend {
        store: Arc::new(nodes.store()),
        objects_max: 3 * SLOTS,
        copies: 2,
        full_wait: Duration::from_secs(5),
        keep: Box::new(nodes),
        ..memory()
    }
}

/// Two nodes with memory over disk.
fn nodes_with_tiers() -> Backend {
    let directories = Mutex::new(Vec::new());
    let nodes = LocalNodes::start(2, || {
        let (tiers, directory) = tiered_store(false);
        directories.lock().unwrap().push(directory);
        Arc::new(tiers)
    });
    Backend {
        store: Arc::new(nodes.store()),
        objects_max: 2 * 2 * SLOTS,
        full_wait: Duration::from_secs(5),
        keep: Box::new((nodes, directories)),
        ..memory()
    }
}

#[tokio::test(start_paused = true)]
async fn memory_keeps_its_promises() {
    all(memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_keeps_its_promises_to_many_threads() {
    all(memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_with_io_uring_keeps_its_promises() {
    all(|| disk(IoEngine::Uring)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_with_threads_keeps_its_promises() {
    all(|| disk(IoEngine::Threads)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiers_keep_their_promises() {
    all(|| tiered(false)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiers_that_write_behind_keep_their_promises() {
    all(|| tiered(true)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guarded_store_keeps_its_promises() {
    all(|| memory().guarded()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guarded_tiers_keep_their_promises() {
    all(|| tiered(false).guarded()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_keep_their_promises() {
    all(nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_tiers_keep_their_promises() {
    all(nodes_with_tiers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guarded_nodes_keep_their_promises() {
    all(|| nodes().guarded()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_two_copies_of_each_object_keep_their_promises() {
    all(nodes_with_copies).await;
}
