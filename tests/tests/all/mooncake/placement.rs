//! Where a cluster puts objects: segments, replicas, and how clients find each other.

use std::time::{Duration, Instant};

use terrace_l3::{PutOptions, Store, StoreError, Stored};
use terrace_l3_features::{FeatureConfig, FeatureStore};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore};
use terrace_tests::l3::objects::{HARD, page};
use terrace_tests::mooncake::{Cluster, Options, library};

use super::features::{for_features, process, put};
use super::shared::Member;
use super::{config, open};

const SEGMENT_BYTES: u64 = 32 << 20;

/// The memory of all segments together.
fn capacity(cluster: &Cluster) -> u64 {
    figure(cluster, "master_total_capacity_bytes")
}

/// What is used of a segment.
fn used(cluster: &Cluster, segment: &str) -> u64 {
    figure(cluster, &format!("segment_allocated_bytes{{segment=\"{segment}\"}}"))
}

fn figure(cluster: &Cluster, name: &str) -> u64 {
    let metrics = cluster.ask("/metrics");
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0, |value| value.parse::<f64>().unwrap() as u64)
}

/// In how many segments the one object of that prefix is.
fn replicas(cluster: &Cluster, prefix: &str) -> usize {
    let keys = cluster.ask("/get_all_keys");
    let key = keys.lines().find(|key| key.contains(prefix)).expect("the object is there");
    cluster.ask(&format!("/query_key?key={}", key.trim())).matches("transport_endpoint_").count()
}

/// Waits for what the master notices a little later.
async fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_client_may_offer_a_segment_and_prefer_it() {
    let cluster = Cluster::start(Options::default());
    let before = capacity(&cluster);
    let own = MooncakeConfig {
        segment_bytes: SEGMENT_BYTES,
        preferred_segments: vec![MooncakeConfig::OWN_SEGMENT.to_owned()],
        ..config(&cluster)
    };
    let store = open(own.clone());
    let segment = store.segment().expect("it offers one");
    assert_eq!(capacity(&cluster), before + SEGMENT_BYTES);
    let member = Member::with(std::sync::Arc::new(store.clone()), own.object_bytes_max);
    for number in 0..8 {
        assert_eq!(member.put(page(number)).await, Ok(Stored::New));
    }
    let bytes = 8 * own.object_bytes_max as u64;
    assert!(used(&cluster, &segment) >= bytes, "{} of {bytes}", used(&cluster, &segment));
    // Others may prefer it by its name, and none prefers it otherwise.
    let named = MooncakeConfig { preferred_segments: vec![segment.clone()], ..config(&cluster) };
    let other = Member::new(&named);
    assert_eq!(other.put(page(100)).await, Ok(Stored::New));
    assert!(used(&cluster, &segment) >= bytes + own.object_bytes_max as u64);
    Member::new(&own_without_segment(&own)).get(page(3)).await.unwrap();
    // What is in it goes with it.
    store.shutdown().await.unwrap();
    eventually("the segment stays", || capacity(&cluster) == before).await;
    assert_eq!(other.get(page(100)).await, Err(StoreError::Missing));
}

fn own_without_segment(own: &MooncakeConfig) -> MooncakeConfig {
    MooncakeConfig { segment_bytes: 0, preferred_segments: Vec::new(), ..own.clone() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn an_object_is_in_as_many_segments_as_wanted() {
    let cluster = Cluster::start(Options { nodes: 3, ..Options::default() });
    for (wanted, found) in [(1, 1), (2, 2), (3, 3), (7, 3)] {
        let config = MooncakeConfig { replicas: wanted, ..config(&cluster) };
        let member = Member::new(&config);
        assert_eq!(member.put(page(1)).await, Ok(Stored::New));
        assert_eq!(replicas(&cluster, &config.prefix), found, "{wanted} were wanted");
        member.get(page(1)).await.unwrap();
        let pinned = PutOptions { pin: Some(HARD), durable: false };
        assert_eq!(member.put_with(page(2), pinned).await, Ok(Stored::New));
    }
}

/// Those who look for each other elsewhere reach the master, and no segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn clients_find_each_other_by_the_metadata_server_of_the_settings() {
    // The library wants more than the machine's own address for this.
    let options = Options { has_metadata_server: true, ..Options::default() };
    let cluster = Cluster::start_apart(options);
    let found = MooncakeConfig { metadata_server: cluster.metadata(), ..config(&cluster) };
    let member = Member::new(&found);
    assert_eq!(member.put(page(1)).await, Ok(Stored::New));
    Member::new(&found).get(page(1)).await.unwrap();
    let lost = MooncakeConfig { prefix: found.prefix.clone(), ..config(&cluster) };
    let lost = Member::new(&lost).get(page(1)).await;
    assert!(lost.is_err_and(|error| error.is_unwell()), "it is found without its metadata");
}

/// Nothing that can be put or read tells how large it is; but so much memory there is not.
#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn a_buffer_that_is_too_large_is_told() {
    let cluster = Cluster::start(Options { nodes: 1, ..Options::default() });
    let small = MooncakeConfig { buffer_bytes: 16 << 20, ..config(&cluster) };
    assert!(MooncakeStore::open(small).unwrap().wait_until_connected(Duration::from_secs(20)));
    let large = MooncakeConfig { buffer_bytes: 1 << 50, ..config(&cluster) };
    let store = MooncakeStore::open(large).unwrap();
    assert!(!store.wait_until_connected(Duration::from_secs(3)));
}

/// A client that is replaced because transfers failed takes nothing along that it offers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_segment_outlives_a_quarantine() {
    let mut cluster = Cluster::start(Options { nodes: 1, ..Options::default() });
    let own = MooncakeConfig {
        segment_bytes: SEGMENT_BYTES,
        preferred_segments: vec![MooncakeConfig::OWN_SEGMENT.to_owned()],
        keep_interval_ms: 50,
        quarantine_ms: 100,
        ..config(&cluster)
    };
    let store = open(own.clone());
    let segment = store.segment().unwrap();
    let member = Member::with(std::sync::Arc::new(store.clone()), own.object_bytes_max);
    assert_eq!(member.put(page(1)).await, Ok(Stored::New));
    // An object on a node that dies: reading it fails, and the client that tried is replaced.
    let elsewhere = Member::new(&own_without_segment(&own));
    let mut number = 1_000;
    let on_node = loop {
        let before = used(&cluster, &segment);
        assert_eq!(elsewhere.put(page(number)).await, Ok(Stored::New));
        if used(&cluster, &segment) == before {
            break page(number);
        }
        number += 1;
    };
    cluster.kill_node(0);
    assert!(member.get(on_node).await.is_err_and(|error| error.is_unwell()));
    assert!(store.cluster_stats().quarantined > 0);
    eventually("the client stays", || store.cluster_stats().quarantined == 0).await;
    assert_eq!(store.segment(), Some(segment.clone()));
    member.get(page(1)).await.unwrap();
    assert_eq!(member.put(page(2)).await, Ok(Stored::New));
    Member::new(&own_without_segment(&own)).get(page(2)).await.unwrap();
}

/// A producer that offers the memory that its samples are in stays until they are consumed, or nobody has
/// wanted them for too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_producer_holds_its_segment_until_its_samples_are_consumed() {
    let cluster = Cluster::start(Options { nodes: 0, ..Options::default() });
    let config = MooncakeConfig { segment_bytes: SEGMENT_BYTES, ..for_features(&cluster) };
    let max_hold_ms = Some(4_000);
    let producing = FeatureConfig { max_hold_ms, ..FeatureConfig::producer("f", 0) };
    let (store, producer) = process(&config, producing).await;
    let consumer = MooncakeConfig { segment_bytes: 0, ..config.clone() };
    let (_, consumer): (_, FeatureStore) = process(&consumer, FeatureConfig::consumer("f")).await;
    let consumed = put(&producer, "consumed", 1).await;
    let forgotten = put(&producer, "forgotten", 2).await;
    let began = Instant::now();
    let held = tokio::spawn(async move {
        producer.consumed().await;
        store.shutdown().await.unwrap();
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!held.is_finished());
    consumer.get(&forgotten).await.unwrap();
    consumer.release(consumed).await.unwrap();
    held.await.unwrap();
    let took = began.elapsed();
    assert!(took > Duration::from_secs(3) && took < Duration::from_secs(20), "{took:?}");
    assert!(consumer.get(&forgotten).await.is_err());
    assert_eq!(capacity(&cluster), 0);
}

/// What is wrong with an offer is told like everything else that keeps a client from connecting.
#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn a_segment_that_is_too_large_is_told() {
    let cluster = Cluster::start(Options { nodes: 1, ..Options::default() });
    let large = MooncakeConfig { segment_bytes: 1 << 50, ..config(&cluster) };
    let store = MooncakeStore::open(MooncakeConfig { library: library(), ..large }).unwrap();
    assert!(!store.wait_until_connected(Duration::from_secs(3)));
    assert_eq!(store.segment(), None);
}
