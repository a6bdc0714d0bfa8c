//! The backend on a real Mooncake cluster. `scripts/test-mooncake` provides what these tests need and
//! runs them.

mod faults;
mod features;
mod placement;
mod shared;
mod steps;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore};
use terrace_tests::l3::conformance::{Backend, all};
use terrace_tests::mooncake::{Cluster, Options, Transport, library, transport};

/// No multiple of anything, so that no path is the easy one.
const OBJECT_BYTES_MAX: usize = 10_001;
const SLOTS: u64 = 16;
const LEASE_TTL_MS: u64 = 1500;

/// A configuration under which nobody else has put anything.
fn config(cluster: &Cluster) -> MooncakeConfig {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let prefix = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let capacity_bytes = SLOTS * OBJECT_BYTES_MAX as u64;
    let Transport { protocol, device, .. } = transport();
    MooncakeConfig {
        prefix,
        protocol,
        device,
        lease_ttl_ms: LEASE_TTL_MS,
        full_wait_ms: 5_000,
        // Whatever can be cut into parts is.
        part_objects_min: 1,
        ..MooncakeConfig::new(library(), cluster.address(), capacity_bytes, OBJECT_BYTES_MAX)
    }
}

fn open(config: MooncakeConfig) -> MooncakeStore {
    let store = MooncakeStore::open(config).unwrap();
    assert!(store.wait_until_connected(Duration::from_secs(20)), "the cluster is not reached");
    store
}

fn backend(config: MooncakeConfig) -> Backend {
    Backend {
        store: Arc::new(open(config)),
        object_bytes_max: OBJECT_BYTES_MAX,
        objects_kept: 12,
        objects_max: SLOTS,
        copies: 1,
        lease_ttl: Duration::from_millis(LEASE_TTL_MS),
        full_wait: Duration::from_secs(5),
        keep: Box::new(()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_cluster_keeps_the_promises_of_a_store() {
    let cluster = Cluster::start(Options::default());
    all(|| backend(config(&cluster))).await;
}

/// With the breaker and the negative cache in front, as a server has it, and batches in one piece.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_guarded_cluster_keeps_the_promises_of_a_store() {
    let cluster = Cluster::start(Options::default());
    let whole = || MooncakeConfig { part_objects_min: u32::MAX, ..config(&cluster) };
    all(|| backend(whole()).guarded()).await;
}
