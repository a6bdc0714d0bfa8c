//! Features on nodes of which one does not answer: nothing that lives is lost, and what is over is freed.

use std::sync::Arc;
use std::time::Duration;

use terrace_l3::{Arena, MemoryConfig, MemoryStore, Registration, StoreError};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureRef, FeatureStore, Released, Tensor, TensorSpec,
};
use terrace_l3_nodes::NodesConfig;
use terrace_tests::l3::nodes::{Gate, LocalNodes};
use tokio::time::{Instant, sleep};

const BYTES: u64 = 4096;
const SAMPLES: u64 = 40;

/// A producer on three nodes, one of them behind a gate.
struct Farm {
    nodes: LocalNodes,
    gate: Arc<Gate>,
    producer: Process,
}

struct Process {
    features: FeatureStore,
    arena: Arena,
    _registration: Registration,
}

impl Farm {
    async fn new(copies: usize) -> Self {
        let memory = || MemoryStore::new(MemoryConfig::new(1024 * BYTES, BYTES as usize)).unwrap();
        let mut nodes = LocalNodes::start(3, || Arc::new(memory()));
        let gate = nodes.put_gate_before(1).await;
        let config = NodesConfig {
            copies,
            connect_timeout_ms: 3_000,
            exists_timeout_ms: 3_000,
            control_timeout_ms: 3_000,
            retry_ms: 100,
            ..nodes.config.clone()
        };
        nodes.config = config;
        let producer = Process::open(&nodes, producer()).await.unwrap();
        Self { nodes, gate, producer }
    }

    async fn put_all(&self) -> Vec<FeatureRef> {
        let mut refs = Vec::new();
        for number in 0..SAMPLES {
            refs.push(self.producer.put(number).await.unwrap());
        }
        refs
    }

    /// The gated node is known to be away when this returns.
    async fn freeze(&self) {
        self.gate.freeze_all();
        let away = async || self.producer.features.gc().await.is_err();
        until("it is missed", away).await;
    }

    async fn thaw(&self) {
        self.gate.let_others_through();
        until("it is back", async || self.producer.features.gc().await.is_ok()).await;
    }
}

impl Process {
    async fn open(nodes: &LocalNodes, config: FeatureConfig) -> Result<Self, FeatureError> {
        let features = FeatureStore::open(Arc::new(nodes.store()), config).await?;
        let arena = Arena::new(2, BYTES as usize).unwrap();
        let _registration = features.register(&arena).unwrap();
        Ok(Self { features, arena, _registration })
    }

    async fn put(&self, number: u64) -> Result<FeatureRef, FeatureError> {
        self.arena.target(0).unwrap()[..8].copy_from_slice(&number.to_le_bytes());
        let spec = TensorSpec::new("hidden", Dtype::U64, [BYTES / 8]);
        let tensor = Tensor::new(spec, self.arena.source(0).unwrap());
        self.features.put(&number.to_string(), vec![tensor]).await
    }

    async fn read(&self, reference: &FeatureRef) -> Result<(), FeatureError> {
        self.features.get_into(reference, vec![self.arena.target(1).unwrap()]).await?;
        let number = u64::from_le_bytes(self.arena.source(1).unwrap()[..8].try_into().unwrap());
        assert_eq!(number.to_string(), reference.sample());
        Ok(())
    }
}

fn producer() -> FeatureConfig {
    FeatureConfig { recheck_ms: 20, ..FeatureConfig::producer("away", 0) }
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let patience = Instant::now() + Duration::from_secs(120);
    while !is_so().await {
        assert!(Instant::now() < patience, "{what}");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_lives_outlasts_a_node_that_is_away() {
    for copies in [1, 2] {
        let farm = Farm::new(copies).await;
        let refs = farm.put_all().await;
        farm.freeze().await;
        let FeatureError::Store { error, .. } = farm.producer.features.gc().await.unwrap_err()
        else {
            panic!("only the store can fail");
        };
        assert_eq!(error, StoreError::HolderAway);
        for reference in &refs {
            match farm.producer.read(reference).await {
                Ok(()) | Err(FeatureError::Store { error: StoreError::HolderAway, .. }) => {}
                Err(error) => panic!("{reference:?}: {error}"),
            }
        }
        farm.thaw().await;
        let stats = farm.producer.features.stats();
        assert_eq!((stats.live, stats.consumed_elsewhere), (SAMPLES, 0), "{stats:#?}");
        for reference in &refs {
            farm.producer.read(reference).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_consumed_is_freed_although_a_node_is_away() {
    let farm = Farm::new(1).await;
    let refs = farm.put_all().await;
    let consumer = FeatureConfig { owner: None, ..producer() };
    let consumer = Process::open(&farm.nodes, consumer).await.unwrap();
    for reference in &refs {
        consumer.read(reference).await.unwrap();
        assert_eq!(consumer.features.release(reference.clone()).await, Ok(Released::Freed));
    }
    farm.freeze().await;
    let consumed = farm.producer.features.stats().consumed_elsewhere;
    assert!((SAMPLES / 3..SAMPLES).contains(&consumed), "{consumed}");
    farm.thaw().await;
    let empty = async || {
        farm.producer.features.gc().await.unwrap();
        farm.producer.features.stats().resident_bytes == 0
    };
    until("everything is freed", empty).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_that_starts_while_a_node_is_away_frees_nothing() {
    let farm = Farm::new(1).await;
    let refs = farm.put_all().await;
    farm.freeze().await;
    let again = Process::open(&farm.nodes, producer()).await;
    assert!(matches!(again, Err(FeatureError::Store { error: StoreError::HolderAway, .. })));
    farm.thaw().await;
    let again = Process::open(&farm.nodes, producer()).await.unwrap();
    assert_eq!(again.features.stats().live, SAMPLES);
    for reference in &refs {
        again.read(reference).await.unwrap();
    }
}

/// An older generation that a rival has put where nobody answers could still be read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_is_superseded_unseen() {
    let (farm, refs, rival, replaced) = loop {
        let farm = Farm::new(1).await;
        let refs = farm.put_all().await;
        let rival = Process::open(&farm.nodes, FeatureConfig::producer("away", 1)).await.unwrap();
        farm.freeze().await;
        let mut replaced = Vec::new();
        for number in 0..SAMPLES {
            replaced.push(rival.put(number).await.is_ok());
        }
        let well = replaced.iter().filter(|well| **well).count() as u64;
        assert!(well < SAMPLES, "all could be put");
        // Which nodes a put needs is up to chance, and seldom all notes about a producer are on one.
        if well > 0 {
            break (farm, refs, rival, replaced);
        }
    };
    farm.thaw().await;
    for (reference, replaced) in refs.iter().zip(replaced) {
        match farm.producer.read(reference).await {
            Ok(()) => assert!(!replaced, "{reference:?} is still there"),
            Err(FeatureError::Gone { .. }) => assert!(replaced, "{reference:?} is lost"),
            Err(error) => panic!("{reference:?}: {error}"),
        }
    }
    for number in 0..SAMPLES {
        until("it can be put again", async || rival.put(number).await.is_ok()).await;
        let old = farm.producer.read(&refs[number as usize]).await;
        assert!(matches!(old, Err(FeatureError::Gone { .. })), "{old:?}");
    }
}
