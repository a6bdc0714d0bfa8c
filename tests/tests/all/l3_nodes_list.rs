//! Lists of nodes that change under live samples: nothing is lost, and nothing is taken for consumed.

use std::sync::Arc;
use std::time::Duration;

use terrace_l3::{
    Arena, ExistsOptions, LendingStore, MemoryConfig, MemoryStore, ObjectId, Presence, PutOptions,
    Registration, Removal, Store, StoreError, Stored,
};
use terrace_l3_disk::{DiskConfig, DiskStore, TieredConfig, TieredStore};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureRef, FeatureStore, Released, Tensor, TensorSpec,
};
use terrace_l3_nodes::{
    ChangeError, ClientLimits, NodeAddress, NodeClient, NodeConfig, NodeSecret, NodeServer,
    NodesConfig, NodesError, NodesStore, RunningNode, change_list, survey,
};
use terrace_tests::l3::nodes::{patient, secret};
use terrace_tests::l3::objects::{self, page};
use tokio::time::{Instant, sleep};

const BYTES: usize = 4096;
const SAMPLES: u64 = 40;
const TENSORS: u64 = 4;

/// Nodes that can be started again at their addresses, with or without disks.
struct Farm {
    folder: tempfile::TempDir,
    has_disks: bool,
    nodes: Vec<Option<RunningNode>>,
    addresses: Vec<String>,
}

impl Farm {
    async fn new(count: usize, has_disks: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let addresses = vec!["127.0.0.1:0".to_owned(); count];
        let nodes = std::iter::repeat_with(|| None).take(count).collect();
        let mut farm = Self { folder, has_disks, nodes, addresses };
        for node in 0..count {
            farm.start(node).await;
        }
        farm
    }

    async fn start(&mut self, node: usize) {
        let folder = self.folder.path().join(node.to_string());
        for _ in 0..400 {
            let memory = MemoryStore::new(MemoryConfig::new(1024 * BYTES as u64, BYTES)).unwrap();
            let holding: Option<Arc<dyn LendingStore>> = match self.has_disks {
                false => Some(Arc::new(memory)),
                true => DiskStore::open(DiskConfig::new(&folder, 1024 * BYTES as u64, BYTES))
                    .map(|disk| TieredStore::new(memory, disk, TieredConfig::default()).unwrap())
                    .map(|store| Arc::new(store) as Arc<dyn LendingStore>)
                    .ok(),
            };
            let config = NodeConfig {
                folder: self.has_disks.then(|| folder.clone()),
                clients: vec![
                    NodeClient { name: String::new(), secret: secret(), limits: None },
                    NodeClient {
                        name: "guest".to_owned(),
                        secret: guests(),
                        limits: Some(ClientLimits::new([page(0).namespace].into())),
                    },
                ],
                ..NodeConfig::new(secret())
            };
            let bound =
                holding.and_then(|it| NodeServer::bind(&self.addresses[node], it, config).ok());
            if let Some(bound) = bound {
                let running = bound.start().unwrap();
                self.addresses[node] = running.address().to_string();
                self.nodes[node] = Some(running);
                return;
            }
            // The system, or the store, may need a moment to let it go.
            sleep(Duration::from_millis(50)).await;
        }
        panic!("node {node} cannot be started");
    }

    async fn stop(&mut self, node: usize) {
        let running = self.nodes[node].take().unwrap();
        running.stop(Duration::from_secs(10)).await.unwrap();
    }

    async fn restart(&mut self) {
        for node in 0..self.nodes.len() {
            self.stop(node).await;
            self.start(node).await;
        }
    }

    /// These nodes, each under a name.
    fn list(&self, nodes: &[(&str, usize)]) -> NodesConfig {
        let node = |(name, node): &(&str, usize)| NodeAddress {
            name: (*name).to_owned(),
            address: self.addresses[*node].clone(),
            weight: 1.0,
        };
        let config = NodesConfig::new(nodes.iter().map(node).collect(), secret());
        NodesConfig { retry_max_ms: 100, ..patient(config) }
    }

    fn three(&self) -> NodesConfig {
        self.list(&[("a", 0), ("b", 1), ("c", 2)])
    }
}

fn guests() -> NodeSecret {
    NodeSecret::new(b"what only guests and nodes know").unwrap()
}

/// A process that uses features.
struct Process {
    features: FeatureStore,
    arena: Arena,
    _registration: Registration,
}

impl Process {
    async fn producer(list: NodesConfig) -> Result<Self, FeatureError> {
        Self::open(list, FeatureConfig::producer("list", 0)).await
    }

    async fn open(list: NodesConfig, config: FeatureConfig) -> Result<Self, FeatureError> {
        let store = Arc::new(NodesStore::new(list).unwrap());
        let features = FeatureStore::open(store, config).await?;
        let arena = Arena::new(2 * TENSORS as u32, BYTES).unwrap();
        let _registration = features.register(&arena).unwrap();
        Ok(Self { features, arena, _registration })
    }

    async fn put_all(&self) -> Vec<FeatureRef> {
        let mut refs = Vec::new();
        for number in 0..SAMPLES {
            let tensor = |tensor: u64| {
                let page = tensor as u32;
                self.arena.target(page).unwrap()[..8].copy_from_slice(&number.to_le_bytes());
                let spec = TensorSpec::new(format!("t{tensor}"), Dtype::U8, [BYTES as u64]);
                Tensor::new(spec, self.arena.source(page).unwrap())
            };
            let tensors = (0..TENSORS).map(tensor).collect();
            refs.push(self.features.put(&number.to_string(), tensors).await.unwrap());
        }
        refs
    }

    async fn read(&self, reference: &FeatureRef) -> Result<(), FeatureError> {
        let pages = (TENSORS..2 * TENSORS).map(|page| page as u32);
        let targets = pages.clone().map(|page| self.arena.target(page).unwrap()).collect();
        self.features.get_into(reference, targets).await?;
        for page in pages {
            let bytes = self.arena.source(page).unwrap();
            let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert_eq!(number.to_string(), reference.sample());
        }
        Ok(())
    }

    async fn consume_all(&self, refs: &[FeatureRef]) {
        for reference in refs {
            self.read(reference).await.unwrap();
            assert_eq!(self.features.release(reference.clone()).await, Ok(Released::Freed));
        }
    }

    /// A producer whose samples were consumed gives its number back, whose notes are pinned too.
    async fn end(&self) {
        self.features.gc().await.unwrap();
        self.features.close().await.unwrap();
    }
}

/// Nothing can be told with a list that the objects were not placed by.
async fn says_nothing(list: &NodesConfig, refs: &[FeatureRef]) {
    let is_unknown = |error: &StoreError| {
        matches!(error, StoreError::HolderAway | StoreError::Unavailable { .. })
    };
    for _ in 0..2 {
        let opened = Process::producer(list.clone()).await.map(drop);
        let Err(FeatureError::Store { error, .. }) = opened else { panic!("{opened:?}") };
        assert!(is_unknown(&error), "{error}");
        let consumer = Process::open(list.clone(), FeatureConfig::consumer("list")).await.unwrap();
        for reference in &refs[..8] {
            let read = consumer.read(reference).await;
            let Err(FeatureError::Store { error, .. }) = &read else { panic!("{read:?}") };
            assert!(is_unknown(error), "{error}");
            assert!(consumer.features.release(reference.clone()).await.is_err());
        }
        let store = NodesStore::new(list.clone()).unwrap();
        let ids: Vec<ObjectId> = (0..100).map(page).collect();
        for found in store.exists(&ids, ExistsOptions::default()).await {
            assert!(is_unknown(&found.unwrap_err()));
        }
        for removed in store.remove(&ids, Removal::Forced).await {
            assert!(is_unknown(&removed.unwrap_err()));
        }
        let reached = store.reach_within(Duration::from_millis(10)).await;
        assert!(matches!(reached, Err(NodesError::OtherList(_))), "{reached:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f80_a_changed_list_of_nodes_ends_no_live_sample() {
    for has_disks in [false, true] {
        let mut farm = Farm::new(4, has_disks).await;
        let producer = Process::producer(farm.three()).await.unwrap();
        let refs = producer.put_all().await;
        let twice = NodesConfig { copies: 2, ..farm.three() };
        let changed = [
            ("added", farm.list(&[("a", 0), ("b", 1), ("c", 2), ("d", 3)])),
            ("removed", farm.list(&[("a", 0), ("c", 2)])),
            ("renamed", farm.list(&[("a", 0), ("x", 1), ("c", 2)])),
            ("swapped", farm.list(&[("a", 1), ("b", 0), ("c", 2)])),
            ("copied", twice),
        ];
        for (what, list) in &changed {
            println!("{what}, with disks: {has_disks}");
            says_nothing(list, &refs).await;
        }
        // The one who goes on with the list that it had notices nothing.
        producer.features.gc().await.unwrap();
        assert_eq!(producer.features.stats().live, SAMPLES);
        drop(producer);
        if has_disks {
            farm.restart().await;
            for (what, list) in &changed {
                println!("{what}, after a restart");
                says_nothing(list, &refs).await;
            }
        }
        // With the list that there was, everything is there.
        let producer = Process::producer(farm.three()).await.unwrap();
        producer.features.gc().await.unwrap();
        let stats = producer.features.stats();
        assert_eq!((stats.live, stats.consumed_elsewhere), (SAMPLES, 0), "{stats:#?}");
        producer.consume_all(&refs).await;
    }
}

/// An empty node under the name of one that lives elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f80_a_node_that_stands_in_for_another_ends_no_live_sample() {
    for has_disks in [false, true] {
        let farm = Farm::new(4, has_disks).await;
        let refs = Process::producer(farm.three()).await.unwrap().put_all().await;
        let replaced = farm.list(&[("a", 0), ("b", 1), ("c", 3)]);
        let opened = Process::producer(replaced.clone()).await.map(drop);
        let Err(FeatureError::Store { error, .. }) = opened else { panic!("{opened:?}") };
        assert_eq!(error, StoreError::HolderAway);
        let consumer = Process::open(replaced, FeatureConfig::consumer("list")).await.unwrap();
        for reference in &refs {
            match consumer.read(reference).await {
                Ok(()) | Err(FeatureError::Store { error: StoreError::HolderAway, .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        let producer = Process::producer(farm.three()).await.unwrap();
        assert_eq!(producer.features.stats().live, SAMPLES);
        producer.consume_all(&refs).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_is_changed_when_nothing_is_pinned() {
    for has_disks in [false, true] {
        let mut farm = Farm::new(4, has_disks).await;
        let (three, four) = (farm.three(), farm.list(&[("a", 0), ("b", 1), ("x", 2), ("d", 3)]));
        let producer = Process::producer(three.clone()).await.unwrap();
        let refs = producer.put_all().await;
        let refused = change_list(&four, &three.nodes).await;
        assert!(matches!(refused, Err(ChangeError::Pinned { .. })), "{refused:?}");
        producer.consume_all(&refs).await;
        // Nobody knows what is on a node that does not answer.
        farm.stop(2).await;
        let unknown = change_list(&farm.list(&[("a", 0), ("b", 1)]), &three.nodes).await;
        assert!(matches!(unknown, Err(ChangeError::Away { .. })), "{unknown:?}");
        farm.start(2).await;
        producer.end().await;
        let changed = change_list(&four, &three.nodes).await.unwrap();
        assert!(changed.iter().all(|node| node.is_member), "{changed:?}");
        // Whoever has not been told is not served, although it was a moment ago.
        assert!(producer.features.gc().await.is_err() || producer.features.stats().live == 0);
        let error = Process::producer(three.clone()).await.map(drop).unwrap_err();
        assert!(matches!(error, FeatureError::Store { .. }), "{error}");
        let producer = Process::producer(four.clone()).await.unwrap();
        let refs = producer.put_all().await;
        if has_disks {
            farm.restart().await;
        }
        producer.features.gc().await.unwrap();
        assert_eq!(producer.features.stats().live, SAMPLES);
        producer.consume_all(&refs).await;
        producer.end().await;
        let again = change_list(&four, &[]).await.unwrap();
        assert_eq!(again[0].standing, changed[0].standing, "nothing is left to be done");
    }
}

/// A node without a disk has lost its memory when it is started again, and everybody knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_in_memory_is_gone_after_a_restart_and_what_was_on_disk_is_unknown_without_it() {
    for has_disks in [false, true] {
        let mut farm = Farm::new(3, has_disks).await;
        let list = farm.three();
        let (store, arena) =
            (NodesStore::new(list.clone()).unwrap(), Arena::new(2, BYTES).unwrap());
        let _registration = store.register(&arena).unwrap();
        for number in 0..SAMPLES {
            let put = objects::put(&store, &arena, page(number), BYTES, PutOptions::default());
            assert_eq!(put.await, Ok(Stored::New));
        }
        let ids: Vec<ObjectId> = (0..SAMPLES).map(page).collect();
        farm.stop(1).await;
        if has_disks {
            std::fs::remove_dir_all(farm.folder.path().join("1")).unwrap();
        }
        farm.start(1).await;
        let expected = if has_disks { Err(StoreError::HolderAway) } else { Ok(Presence::Absent) };
        let (later, gone) = (NodesStore::new(list.clone()).unwrap(), expected.clone());
        until("the node is back", async || {
            let found = later.exists(&ids, ExistsOptions::default()).await;
            later.peers()[1].is_up
                && found.iter().all(|it| matches!(it, Ok(Presence::Present(_))) || *it == gone)
        })
        .await;
        let found = later.exists(&ids, ExistsOptions::default()).await;
        for (id, found) in ids.iter().zip(&found) {
            let is_lost = later.holders(id).eq(["b"]);
            assert_eq!(found.as_ref().is_ok_and(|it| it.is_present()), !is_lost);
        }
        assert!(found.contains(&expected));
        // What it is sent, it keeps all the same.
        let lost = ids.iter().find(|id| later.holders(id).eq(["b"])).unwrap();
        let _registration = later.register(&arena).unwrap();
        objects::put(&later, &arena, *lost, BYTES, PutOptions::default()).await.unwrap();
        objects::get(&later, &arena, *lost, BYTES).await.unwrap();
        if has_disks {
            assert!(!survey(&list).await.unwrap()[1].is_member);
            // The operator accepts the loss.
            let accepted = change_list(&list, &[]).await.unwrap();
            assert!(accepted.iter().all(|node| node.is_member), "{accepted:?}");
            until("the loss is known", async || {
                let found = later.exists(&ids, ExistsOptions::default()).await;
                found.iter().all(Result::is_ok) && found.contains(&Ok(Presence::Absent))
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_can_be_used_before_all_of_its_nodes_were_there() {
    let mut farm = Farm::new(3, true).await;
    farm.stop(2).await;
    let (store, arena) = (NodesStore::new(farm.three()).unwrap(), Arena::new(2, BYTES).unwrap());
    let _registration = store.register(&arena).unwrap();
    let (mut stored, mut unknown) = (0, 0);
    for number in 0..SAMPLES {
        match objects::put(&store, &arena, page(number), BYTES, PutOptions::default()).await {
            Ok(_) => {
                objects::get(&store, &arena, page(number), BYTES).await.unwrap();
                stored += 1;
            }
            Err(error) => {
                assert_eq!(error, StoreError::HolderAway);
                unknown += 1;
            }
        }
    }
    assert!(stored > 10 && unknown > 5, "{stored} stored, {unknown} unknown");
    let never_put: Vec<ObjectId> = (1000..1100).map(page).collect();
    for found in store.exists(&never_put, ExistsOptions::default()).await {
        assert_eq!(found, Err(StoreError::HolderAway), "the third may know more about the list");
    }
    farm.start(2).await;
    until("all are members", async || {
        let found = store.exists(&never_put, ExistsOptions::default()).await;
        found.iter().all(|found| *found == Ok(Presence::Absent))
    })
    .await;
    assert!(store.peers().iter().all(|node| node.is_member));
}

/// Many clients that begin at the same time found one store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_start_together_agree() {
    let farm = Farm::new(3, false).await;
    let clients: Vec<_> = (0..8).map(|_| NodesStore::new(farm.three()).unwrap()).collect();
    let ids: Vec<ObjectId> = (0..100).map(page).collect();
    let ask = |store: &NodesStore| {
        let (store, ids) = (store.clone(), ids.clone());
        tokio::spawn(async move { store.exists(&ids, ExistsOptions::default()).await })
    };
    for asked in clients.iter().map(ask).collect::<Vec<_>>() {
        assert!(asked.await.unwrap().iter().all(|found| *found == Ok(Presence::Absent)));
    }
    let surveyed = survey(&farm.three()).await.unwrap();
    let stores = surveyed.iter().map(|node| node.standing.as_ref().unwrap().member.unwrap().store);
    let stores: Vec<_> = stores.collect();
    assert!(surveyed.iter().all(|node| node.is_member) && stores.iter().all(|it| *it == stores[0]));
}

/// A client with few rights does not decide what a node is a member of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restricted_client_makes_no_members() {
    let farm = Farm::new(1, false).await;
    let list = farm.list(&[("a", 0)]);
    let of_guest = NodesConfig { name: "guest".to_owned(), secret: guests(), ..list.clone() };
    let guest = NodesStore::new(of_guest.clone()).unwrap();
    let asked = async || guest.exists(&[page(1)], ExistsOptions::default()).await.remove(0);
    assert_eq!(asked().await, Err(StoreError::HolderAway));
    let changed = change_list(&of_guest, &[]).await;
    assert!(matches!(changed, Err(ChangeError::Refused { .. })));
    assert_eq!(NodesStore::new(list).unwrap().reach().await, 1);
    until("it has heard", async || asked().await == Ok(Presence::Absent)).await;
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let patience = Instant::now() + Duration::from_secs(60);
    while !is_so().await {
        assert!(Instant::now() < patience, "{what}");
        sleep(Duration::from_millis(20)).await;
    }
}
