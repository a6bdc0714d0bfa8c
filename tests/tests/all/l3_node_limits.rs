//! What one client may take of a node: time, memory, connections, and others' places.

use std::sync::Arc;
use std::time::Duration;

use terrace_cache::PageKey;
use terrace_l3::{
    Arena, ExistsOptions, LendingStore, MemoryConfig, MemoryStore, ObjectId, PutOptions,
    Registration, Store, StoreError,
};
use terrace_l3_disk::{DiskConfig, DiskStore, TieredConfig, TieredStore};
use terrace_l3_nodes::{
    ClientLimits, NodeClient, NodeConfig, NodeSecret, NodeServer, NodesConfig, NodesStore,
    RunningNode,
};
use terrace_tests::l3::nodes::{LocalNodes, patient, secret};
use terrace_tests::l3::objects::{self, HARD, page};
use tokio::time::{Instant, sleep};

const BYTES: usize = 64 << 10;
const SLOTS: u64 = 100;

fn memory(slots: u64, bytes: usize) -> MemoryStore {
    MemoryStore::new(MemoryConfig::new(slots * bytes as u64, bytes)).unwrap()
}

fn start(holding: Arc<dyn LendingStore>, config: NodeConfig) -> RunningNode {
    NodeServer::bind("127.0.0.1:0", holding, config).unwrap().start().unwrap()
}

fn guests() -> NodeSecret {
    NodeSecret::new(b"what only guests and nodes know").unwrap()
}

fn theirs(number: u64) -> ObjectId {
    ObjectId { namespace: PageKey(0xbad), ..page(number) }
}

/// A node for everybody, and for a guest who may have a quarter.
fn hotel(holding: Arc<dyn LendingStore>) -> RunningNode {
    let limits = ClientLimits { share: 0.25, ..ClientLimits::new([PageKey(0xbad)].into()) };
    let guest = NodeClient { name: "guest".to_owned(), secret: guests(), limits: Some(limits) };
    let mut config =
        NodeConfig { connections_max: 40, full_wait_ms: 50, ..NodeConfig::new(secret()) };
    config.clients.push(guest);
    start(holding, config)
}

struct Client {
    store: NodesStore,
    arena: Arena,
    _registration: Registration,
}

impl Client {
    fn new(config: NodesConfig) -> Self {
        let store = NodesStore::new(config).unwrap();
        let arena = Arena::new(2, BYTES).unwrap();
        let _registration = store.register(&arena).unwrap();
        Self { store, arena, _registration }
    }

    fn of(node: &RunningNode) -> Self {
        Self::new(config(node))
    }

    fn guest(node: &RunningNode) -> Self {
        let (name, secret) = ("guest".to_owned(), guests());
        Self::new(NodesConfig { name, secret, ..config(node) })
    }

    async fn put(&self, id: ObjectId, options: PutOptions) -> Result<(), StoreError> {
        objects::put(&self.store, &self.arena, id, BYTES, options).await.map(drop)
    }

    async fn count(&self, ids: impl Iterator<Item = ObjectId>) -> usize {
        let ids: Vec<ObjectId> = ids.collect();
        let found = self.store.exists(&ids, ExistsOptions::default()).await;
        found.iter().filter(|it| it.as_ref().is_ok_and(|it| it.is_present())).count()
    }
}

fn config(node: &RunningNode) -> NodesConfig {
    let address = node.address().to_string();
    patient(NodesConfig::new(vec![address.parse().unwrap()], secret()))
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let patience = Instant::now() + Duration::from_secs(20);
    while !is_so().await {
        assert!(Instant::now() < patience, "{what}");
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_sends_byte_by_byte_does_not_keep_memory() {
    const SLOT: usize = 1 << 20;
    let node = start(
        Arc::new(memory(4, SLOT)),
        NodeConfig { stall_timeout_ms: 500, ..NodeConfig::new(secret()) },
    );
    let mut nodes = LocalNodes { config: config(&node), nodes: vec![node] };
    let gate = nodes.put_gate_before(0).await;
    let node = &nodes.nodes[0];
    let reserved = || node.store_stats().memory.unwrap().resident_bytes;
    let store = nodes.store();
    let arena = Arena::new(2, SLOT).unwrap();
    let _registration = store.register(&arena).unwrap();
    assert_eq!(store.reach().await, 1);
    // All that is said before the bytes gets through, and some of them.
    gate.drip_after(64 << 10);
    let put = tokio::spawn({
        let store = store.clone();
        async move { objects::put(&store, &arena, page(1), SLOT, PutOptions::default()).await }
    });
    until("the bytes are on their way", async || reserved() > 0).await;
    until("its memory is free again", async || reserved() == 0).await;
    put.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restricted_client_takes_its_share_from_others_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    for is_tiered in [false, true] {
        let node = hotel(match is_tiered {
            false => Arc::new(memory(SLOTS, BYTES)),
            true => {
                let slot = BYTES as u64 + 4096;
                let disk = DiskConfig {
                    watermark_high: 1.0,
                    watermark_low: 1.0,
                    commit_interval_ms: 5,
                    ..DiskConfig::new(folder.path(), SLOTS * slot, BYTES)
                };
                let disk = DiskStore::open(disk).unwrap();
                let tiers =
                    TieredStore::new(memory(SLOTS / 2, BYTES), disk, TieredConfig::default());
                Arc::new(tiers.unwrap())
            }
        });
        let (host, guest) = (Client::of(&node), Client::guest(&node));
        for number in 0..SLOTS {
            host.put(page(number), PutOptions::default()).await.unwrap();
        }
        for number in 0..3 * SLOTS {
            guest.put(theirs(number), PutOptions::default()).await.unwrap();
        }
        let share = guest.count((0..3 * SLOTS).map(theirs)).await;
        assert!((20..=25).contains(&share), "{share} of {SLOTS}");
        let left = host.count((0..SLOTS).map(page)).await;
        assert!((65..=80).contains(&left), "{left} of {SLOTS} are left");
        // Nor do pins give it more.
        let pinned = PutOptions { pin: Some(HARD), ..PutOptions::default() };
        let mut refused = 0;
        for number in 0..SLOTS {
            match guest.put(theirs(1000 + number), pinned).await {
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error, StoreError::Full);
                    refused += 1;
                }
            }
        }
        assert!((70..=80).contains(&refused), "{refused} of {SLOTS} were refused");
        for number in 0..SLOTS {
            host.put(page(1000 + number), PutOptions::default()).await.unwrap();
        }
        let there = host.count((0..SLOTS).map(|number| page(1000 + number))).await;
        assert!(there >= 60, "{there} of {SLOTS}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restricted_client_has_its_share_of_connections() {
    let node = hotel(Arc::new(memory(SLOTS, BYTES)));
    // Each of these is a process that says so itself.
    let mut guests = Vec::new();
    for _ in 0..20 {
        let guest = Client::guest(&node);
        guest.store.reach().await;
        guests.push(guest);
    }
    let connected = node.stats().connections;
    assert_eq!(connected, 10, "a quarter of 40");
    let host = Client::of(&node);
    assert_eq!(host.store.reach().await, 1);
    host.put(page(1), PutOptions::default()).await.unwrap();
    drop(guests);
    until("they are gone", async || node.stats().connections < connected).await;
}
