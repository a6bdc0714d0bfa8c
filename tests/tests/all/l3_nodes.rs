//! Nodes that die, freeze, return and forget: each costs its share and nothing else.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, MemoryConfig, MemoryStore, ObjectId, Presence,
    PutOptions, Registration, Removal, Results, Store, StoreError, Stored,
};
use terrace_l3_disk::{DiskConfig, DiskStore, TieredConfig, TieredStore};
use terrace_l3_nodes::{NodeConfig, NodeServer, NodesConfig, NodesStore, RunningNode};
use terrace_tests::l3::nodes::{LocalNodes, patient, secret};
use terrace_tests::l3::objects::{self, HARD, page};
use tokio::time::{Instant, sleep};

const OBJECT_BYTES: usize = 3000;
const OBJECTS: u64 = 60;

fn memory_store() -> MemoryStore {
    MemoryStore::new(MemoryConfig::new(200 * OBJECT_BYTES as u64, OBJECT_BYTES)).unwrap()
}

fn nodes() -> LocalNodes {
    LocalNodes::start(3, || Arc::new(memory_store()))
}

/// A node at an address that one had before; the system may need a moment to let it go.
async fn restart(address: SocketAddr, config: NodeConfig) -> RunningNode {
    for _ in 0..200 {
        let holding = Arc::new(memory_store());
        match NodeServer::bind(&address.to_string(), holding, config.clone()) {
            Ok(node) => return node.start().unwrap(),
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
    panic!("{address} cannot be used again");
}

struct Client {
    store: NodesStore,
    arena: Arena,
    _registration: Registration,
}

impl Client {
    fn new(config: &NodesConfig) -> Self {
        let store = NodesStore::new(config.clone()).unwrap();
        let arena = Arena::new(2, OBJECT_BYTES).unwrap();
        let _registration = store.register(&arena).unwrap();
        Self { store, arena, _registration }
    }

    async fn put(&self, number: u64) -> Result<Stored, StoreError> {
        let options = PutOptions::default();
        objects::put(&self.store, &self.arena, page(number), OBJECT_BYTES, options).await
    }

    /// Which of the objects can be read; their bytes are checked.
    async fn readable(&self) -> Vec<u64> {
        let mut readable = Vec::new();
        for number in 0..OBJECTS {
            let id = page(number);
            match objects::get(&self.store, &self.arena, id, OBJECT_BYTES).await {
                Ok(_) => readable.push(number),
                Err(StoreError::Missing | StoreError::HolderAway) => {}
                Err(error) => panic!("{error}"),
            }
        }
        readable
    }

    async fn present(&self) -> usize {
        let ids: Vec<ObjectId> = (0..OBJECTS).map(page).collect();
        let found = self.store.exists(&ids, ExistsOptions::default()).await;
        let is_present = |found: &Result<Presence, _>| match found {
            Ok(found) => found.is_present(),
            Err(error) => {
                assert_eq!(*error, StoreError::HolderAway);
                false
            }
        };
        found.iter().filter(|found| is_present(found)).count()
    }

    /// Whether the holder of an object answers.
    async fn asks(&self) -> Result<(), StoreError> {
        let found = self.store.exists(&[page(0)], ExistsOptions::default()).await.remove(0);
        found.map(drop)
    }

    async fn until(&self, what: &str, is_so: impl AsyncFn(&Self) -> bool) {
        let patience = Instant::now() + Duration::from_secs(30);
        while !is_so(self).await {
            assert!(Instant::now() < patience, "{what}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_node_costs_its_share_and_takes_it_again_when_it_returns() {
    let mut nodes = nodes();
    let client = Client::new(&nodes.config);
    for number in 0..OBJECTS {
        assert_eq!(client.put(number).await, Ok(Stored::New));
    }
    assert_eq!(client.readable().await.len() as u64, OBJECTS);
    let dead = nodes.nodes.remove(1);
    let address = dead.address();
    let lost = dead.store_stats().memory.unwrap().objects;
    assert!((10..30).contains(&lost), "{lost} is not a third");
    drop(dead);
    client.until("its death is noticed", async |it| it.present().await < OBJECTS as usize).await;
    let left = client.readable().await;
    assert_eq!(left.len() as u64, OBJECTS - lost);
    // Nobody waits for it any more: its connections were refused at once, and are not tried by calls.
    let away = client.store.peers().iter().filter(|it| !it.is_up).count();
    assert_eq!(away, 1);
    let gone = (0..OBJECTS).find(|number| !left.contains(number)).unwrap();
    assert_eq!(client.put(gone).await, Err(StoreError::HolderAway));
    let removed = client.store.remove(&[page(gone)], Removal::Forced).await.remove(0);
    assert_eq!(removed, Err(StoreError::HolderAway));
    client.store.flush().await.unwrap();

    let _again = restart(address, NodeConfig::new(secret())).await;
    client.until("its return is noticed", async |it| it.put(gone).await.is_ok()).await;
    for number in 0..OBJECTS {
        let stored = client.put(number).await;
        assert_eq!(stored == Ok(Stored::AlreadyThere), left.contains(&number) || number == gone);
    }
    assert_eq!(client.readable().await.len() as u64, OBJECTS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_two_copies_a_dead_node_costs_nothing() {
    let mut nodes = nodes();
    nodes.config.copies = 2;
    let client = Client::new(&nodes.config);
    for number in 0..OBJECTS {
        assert_eq!(client.put(number).await, Ok(Stored::New));
    }
    let copies = client.store.stats().remote.unwrap().objects;
    assert_eq!(copies, 2 * OBJECTS);
    drop(nodes.nodes.remove(0));
    assert_eq!(client.readable().await.len() as u64, OBJECTS);
    assert_eq!(client.present().await as u64, OBJECTS);
    assert_eq!(client.put(OBJECTS + 1).await, Ok(Stored::New));
}

/// What was never put may have been put where nobody answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_what_an_absent_node_may_hold_nobody_says_that_it_is_not_there() {
    for copies in [1, 2] {
        let mut nodes = nodes();
        nodes.config.copies = copies;
        let client = Client::new(&nodes.config);
        let never_put: Vec<ObjectId> = (0..OBJECTS).map(page).collect();
        let absent = |known: &Results<Presence>| {
            known.iter().filter(|it| **it == Ok(Presence::Absent)).count()
        };
        let found = client.store.exists(&never_put, ExistsOptions::default()).await;
        assert_eq!(absent(&found), never_put.len());
        drop(nodes.nodes.remove(0));
        let asked = async |it: &Client| it.store.exists(&never_put, ExistsOptions::default()).await;
        client.until("it is away", async |it| absent(&asked(it).await) < never_put.len()).await;
        let not_known = never_put.len() - absent(&asked(&client).await);
        let share = never_put.len() * copies / 3;
        assert!(not_known.abs_diff(share) < 12, "{not_known} of {copies} copies");
        for (id, found) in never_put.iter().zip(asked(&client).await) {
            let read = objects::get(&client.store, &client.arena, *id, OBJECT_BYTES).await;
            let expected = match found {
                Ok(_) => StoreError::Missing,
                Err(error) => error,
            };
            assert_eq!(read, Err(expected));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_several_who_put_two_copies_one_is_first() {
    let mut nodes = nodes();
    nodes.config.copies = 2;
    let clients = [(); 4].map(|()| Arc::new(Client::new(&nodes.config)));
    for number in 0..40 {
        let put = |client: &Arc<Client>| {
            let client = client.clone();
            tokio::spawn(async move { client.put(number).await })
        };
        let mut first = 0;
        for put in clients.each_ref().map(put) {
            match put.await.unwrap() {
                Ok(stored) => first += u32::from(stored == Stored::New),
                Err(error) => assert_eq!(error, StoreError::BeingWritten),
            }
        }
        assert_eq!(first, 1, "of those who put object {number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_that_fails_leaves_no_pin_on_one_of_two_copies() {
    let stores = RefCell::new(Vec::new());
    let mut nodes = LocalNodes::start(3, || {
        stores.borrow_mut().push(memory_store());
        Arc::new(stores.borrow().last().unwrap().clone())
    });
    nodes.config.copies = 2;
    let client = Client::new(&nodes.config);
    let put = async |store: &dyn Store, id, pin| {
        let options = PutOptions { pin, ..PutOptions::default() };
        objects::put(store, &client.arena, id, OBJECT_BYTES, options).await
    };
    let (early, late) = (page(1).with_generation(3), page(1).with_generation(5));
    let first = client.store.holders(&early).next().unwrap().to_owned();
    let first = nodes.config.nodes.iter().position(|node| node.name == first).unwrap();
    // The first holder knows of a later one, and the second does not.
    {
        let store = stores.borrow()[first].clone();
        let _registration = store.register(&client.arena).unwrap();
        assert_eq!(put(&store, late, None).await, Ok(Stored::New));
    }
    let refused = put(&client.store, early, Some(HARD)).await;
    assert_eq!(refused, Err(StoreError::Superseded { present: 5 }));
    let there = |node: &RunningNode| node.store_stats().memory.unwrap();
    assert_eq!(nodes.nodes.iter().map(|node| there(node).objects).sum::<u64>(), 2);
    assert_eq!(nodes.nodes.iter().map(|node| there(node).hard_pinned).sum::<u64>(), 0);
}

/// A listener that accepts and never says a word is what a frozen node looks like.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_says_nothing_is_waited_for_once() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut nodes = nodes();
    nodes.config.nodes[2].address = silent.local_addr().unwrap().to_string();
    nodes.config.connect_timeout_ms = 1_500;
    let client = Client::new(&nodes.config);
    let began = Instant::now();
    client.present().await;
    let first = began.elapsed();
    assert!(first >= Duration::from_millis(1_500), "{first:?}");
    let began = Instant::now();
    for _ in 0..50 {
        client.present().await;
    }
    let others = began.elapsed() / 50;
    assert!(others < first / 10, "{others:?} a call, the first took {first:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_fails_late_says_nothing_about_a_node_that_has_returned() {
    let mut nodes = LocalNodes::start(1, || Arc::new(memory_store()));
    let gate = nodes.put_gate_before(0).await;
    let config = NodesConfig {
        connect_timeout_ms: 3_000,
        exists_timeout_ms: 1_000,
        stall_timeout_ms: 3_000,
        get_timeout_ms: 15_000,
        ..nodes.config.clone()
    };
    let client = Arc::new(Client::new(&config));
    let node = |client: &Client| client.store.peers().remove(0);
    client.put(0).await.unwrap();
    let requests = || nodes.nodes[0].stats().requests;
    let before = requests();
    gate.freeze_answers();
    let late = tokio::spawn({
        let client = client.clone();
        async move { objects::get(&client.store, &client.arena, page(0), OBJECT_BYTES).await }
    });
    client.until("it is under way", async |_| requests() > before).await;
    gate.freeze_all();
    client.until("a question goes unanswered", async |it| it.asks().await.is_err()).await;
    assert!(!node(&client).is_up);
    gate.let_others_through();
    client.until("it is back", async |it| it.asks().await.is_ok()).await;
    assert!(!late.is_finished(), "it waits longer than a question does");
    let failures = node(&client).failures;
    assert_eq!(late.await.unwrap(), Err(StoreError::HolderAway));
    assert_eq!(node(&client).failures, failures + 1);
    assert!(node(&client).is_up);
}

/// A node of which most is on disk, with memory for so many transfers at a time.
fn mostly_on_disk(folder: &Path, scratch_pages: u32, object_bytes: usize) -> RunningNode {
    let memory = MemoryConfig::new(object_bytes as u64, object_bytes);
    let disk = DiskConfig::new(folder, 64 * object_bytes as u64, object_bytes);
    let (memory, disk) = (MemoryStore::new(memory).unwrap(), DiskStore::open(disk).unwrap());
    let tiers = TieredStore::new(memory, disk, TieredConfig::default()).unwrap();
    let config = NodeConfig {
        scratch_pages,
        // Longer than any test takes.
        stall_timeout_ms: 3_600_000,
        ..NodeConfig::new(secret())
    };
    NodeServer::bind("127.0.0.1:0", Arc::new(tiers), config).unwrap().start().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_freezes_in_mid_get_keeps_nobody_else_from_reading() {
    /// More than a connection takes without anybody reading.
    const BYTES: usize = 4 << 20;
    const OBJECTS: u32 = 8;
    /// So many that one call could take them all.
    const PAGES: u32 = OBJECTS / 2;
    let folder = tempfile::tempdir().unwrap();
    let node = mostly_on_disk(folder.path(), PAGES, BYTES);
    let address = node.address().to_string();
    let mut nodes = LocalNodes { config: one_node(&address), nodes: vec![node] };
    let well = NodesStore::new(nodes.config.clone()).unwrap();
    let gate = nodes.put_gate_before(0).await;
    let frozen = NodesStore::new(nodes.config.clone()).unwrap();
    let arena = Arena::new(2 * OBJECTS, BYTES).unwrap();
    let _registrations = [well.register(&arena).unwrap(), frozen.register(&arena).unwrap()];
    for number in 0..u64::from(OBJECTS) {
        let options = PutOptions::default();
        objects::put(&well, &arena, page(number), BYTES, options).await.unwrap();
    }
    let get = |page_from: u32| {
        let get =
            |number: u32| Get::new(page(number.into()), arena.target(page_from + number).unwrap());
        (0..OBJECTS).map(get).collect::<Vec<_>>()
    };
    assert_eq!(frozen.reach().await, 1);
    gate.freeze_answers();
    let never_ends = tokio::spawn({
        let gets = get(0);
        async move { frozen.get_into(gets, GetOptions::default()).await }
    });
    let from_disk =
        || nodes.nodes[0].store_stats().figure("terrace_l3_gets_total", "disk").unwrap();
    let patience = Instant::now() + Duration::from_secs(60);
    while from_disk() == 0 {
        assert!(Instant::now() < patience, "the node has begun to answer");
        sleep(Duration::from_millis(5)).await;
    }
    let read = well.get_into(get(OBJECTS), GetOptions::default());
    let read = tokio::time::timeout(Duration::from_secs(60), read).await.expect("nobody waits");
    assert!(read.iter().all(Result::is_ok), "{read:?}");
    assert!(!never_ends.is_finished());
    never_ends.abort();
}

fn one_node(address: &str) -> NodesConfig {
    patient(NodesConfig::new(vec![address.parse().unwrap()], secret()))
}

/// A node that is late with one answer and welcomes others is not away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_answer_costs_a_call_and_not_the_node() {
    let mut nodes = LocalNodes::start(1, || Arc::new(memory_store()));
    let gate = nodes.put_gate_before(0).await;
    let client = Client::new(&NodesConfig { exists_timeout_ms: 3_000, ..nodes.config.clone() });
    client.put(0).await.unwrap();
    let node = || client.store.peers().remove(0);
    gate.let_others_through();
    assert_eq!(client.asks().await, Err(StoreError::HolderAway));
    assert!(node().is_up && node().failures == 1, "{:?}", node());
    client.asks().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_any_node_the_store_is_unwell_as_a_whole() {
    let nodes = nodes();
    let client = Client::new(&nodes.config);
    client.put(0).await.unwrap();
    drop(nodes);
    // A flush asks all of them.
    let gone =
        async |it: &Client| matches!(it.store.flush().await, Err(StoreError::Unavailable { .. }));
    client.until("all are gone", gone).await;
    let found = client.store.exists(&[page(0)], ExistsOptions::default()).await.remove(0);
    assert!(found.unwrap_err().is_unwell());
}
