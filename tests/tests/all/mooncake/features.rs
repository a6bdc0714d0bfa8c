//! The feature store over a real cluster, each process with a connection of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_l3::{Arena, ExistsOptions, Owner, Pin, Store};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureRef, FeatureStore, Released, Tensor, TensorSpec,
};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore};
use terrace_tests::l3::features::{FeatureBackend, OBJECT_BYTES_MAX, all};
use terrace_tests::mooncake::{Cluster, Options};

use super::{config, open};

const OBJECTS: u64 = 512;

pub(super) fn for_features(cluster: &Cluster) -> MooncakeConfig {
    MooncakeConfig {
        capacity_bytes: OBJECTS * OBJECT_BYTES_MAX as u64,
        object_bytes_max: OBJECT_BYTES_MAX,
        ..config(cluster)
    }
    .for_features()
}

/// How many notes say which process has the number of the producer.
const OWNER_NOTES: u64 = 3;

/// How many objects of that prefix the cluster has.
fn objects(cluster: &Cluster, prefix: &str) -> u64 {
    let prefix = format!("{prefix}/");
    cluster.ask("/get_all_keys").lines().filter(|key| key.contains(&prefix)).count() as u64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn features_in_a_cluster() {
    let cluster = Arc::new(Cluster::start(Options::default()));
    all(|| {
        let config = for_features(&cluster);
        let (cluster, prefix) = (cluster.clone(), config.prefix.clone());
        FeatureBackend {
            handle: Box::new(move || Arc::new(open(config.clone()))),
            objects: Some(Box::new(move || objects(&cluster, &prefix))),
            keep: Box::new(()),
        }
    })
    .await;
}

pub(super) async fn process(
    config: &MooncakeConfig,
    features: FeatureConfig,
) -> (MooncakeStore, FeatureStore) {
    let store = open(config.clone());
    let features = FeatureStore::open(Arc::new(store.clone()), features).await.unwrap();
    (store, features)
}

pub(super) async fn put(features: &FeatureStore, sample: &str, byte: u8) -> FeatureRef {
    let arena = Arena::with_headroom(1, OBJECT_BYTES_MAX).unwrap();
    let _registration = features.register(&arena).unwrap();
    arena.target(0).unwrap().fill(byte);
    let spec = TensorSpec::new("hidden", Dtype::U8, [OBJECT_BYTES_MAX as u64]);
    features.put(sample, vec![Tensor::new(spec, arena.source(0).unwrap())]).await.unwrap()
}

async fn is_gone(features: &FeatureStore, reference: &FeatureRef) -> bool {
    matches!(features.get(reference).await, Err(FeatureError::Gone { .. }))
}

/// A producer that is done and shuts down takes nothing along that somebody is to consume.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn samples_outlive_their_producer() {
    let cluster = Cluster::start(Options::default());
    let config = for_features(&cluster);
    let (store, producer) = process(&config, FeatureConfig::producer("f", 0)).await;
    let reference = put(&producer, "a", 7).await;
    assert_eq!(store.stats().remote.unwrap().bounced_bytes, 0, "nothing is copied on the way");
    drop(producer);
    store.shutdown().await.unwrap();
    let (store, consumer) = process(&config, FeatureConfig::consumer("f")).await;
    let tensors = consumer.get(&reference).await.unwrap();
    assert_eq!(tensors[0][..], [7; OBJECT_BYTES_MAX]);
    assert_eq!(store.stats().remote.unwrap().bounced_bytes, 0, "nothing is copied on the way");
    assert_eq!(consumer.release(reference).await, Ok(Released::Freed));
    // Its notes are the producer's, who finds and removes them when it comes back.
    assert_eq!(objects(&cluster, &config.prefix), OWNER_NOTES + 2);
    let (store, _) = process(&config, FeatureConfig::producer("f", 0)).await;
    assert_eq!(objects(&cluster, &config.prefix), OWNER_NOTES);
    assert_eq!(store.stats().remote.unwrap().objects, OWNER_NOTES);
}

/// What a producer has unpinned and a consumer removed does not come back, however long the producer's
/// client lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn what_was_consumed_never_comes_back() {
    let cluster = Cluster::start(Options::default());
    let config = MooncakeConfig { keep_interval_ms: 20, ..for_features(&cluster) };
    let (store, producer) = process(&config, FeatureConfig::producer("f", 0)).await;
    let (_, consumer) = process(&config, FeatureConfig::consumer("f")).await;
    let refs = [put(&producer, "a", 1).await, put(&producer, "b", 2).await];
    let ids: Vec<_> = refs.iter().flat_map(|it| producer.objects(it)).map(|(_, id)| id).collect();
    let pins = Pin::Hard(Owner::named("f producer 0"));
    for unpinned in store.unpin(&ids, pins).await {
        unpinned.unwrap();
    }
    assert_eq!(consumer.release(refs[0].clone()).await, Ok(Released::Freed));
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        assert!(is_gone(&consumer, &refs[0]).await, "it lives again");
        assert!(consumer.get(&refs[1]).await.is_ok(), "nobody has removed it");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Whoever comes second is told so, even the one who has put it.
    assert_eq!(producer.release(refs[0].clone()).await, Ok(Released::AlreadyGone));
    let found = store.exists(&ids, ExistsOptions::default()).await;
    let found: Vec<bool> = found.into_iter().map(|it| it.unwrap().is_present()).collect();
    assert_eq!(found, [false, true]);
    // Without pins it is nobody's, and goes with the client.
    store.shutdown().await.unwrap();
    assert!(is_gone(&consumer, &refs[1]).await);
}

/// A removal that the master does not answer has not happened: others can read the sample, and its
/// producer says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_release_that_the_cluster_did_not_hear_is_none() {
    let cluster = Cluster::start_apart(Options::default());
    let config = for_features(&cluster);
    let (_, producer) = process(&config, FeatureConfig::producer("f", 0)).await;
    let (_, consumer) = process(&config, FeatureConfig::consumer("f")).await;
    let reference = put(&producer, "a", 1).await;
    cluster.cut();
    let released = producer.release(reference.clone()).await;
    assert!(matches!(released, Err(FeatureError::NotRevoked { .. })), "{released:?}");
    assert!(is_gone(&producer, &reference).await, "this process keeps its word");
    cluster.join();
    let until = Instant::now() + Duration::from_secs(60);
    while producer.stats().live + producer.stats().parked > 0 {
        assert!(Instant::now() < until, "{:#?}", producer.stats());
        let _ = producer.gc().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(is_gone(&consumer, &reference).await);
    assert_eq!(objects(&cluster, &config.prefix), OWNER_NOTES);
}
