//! A node on one machine and its clients on the other.

use std::io::Read;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use terrace_l3::{Arena, Get, GetOptions, ObjectId, Put, PutOptions, Results, Served, Store};
use terrace_l3_nodes::{NodeAddress, NodesConfig, NodesStore, RdmaChoice};
use terrace_tests::l3::conformance::{Backend, all};
use terrace_tests::l3::nodes::{patient, secret};
use terrace_tests::l3::objects::{fill, is_right, page};

use super::faults::NetworkDown;
use super::reader::{Holder, Reader};

const OBJECT_BYTES_MAX: usize = 10_001;
const SLOTS: u64 = 16;
/// Long enough for an emulated machine to put twice the capacity.
pub(crate) const LEASE_TTL_MS: u64 = 6_000;

impl Reader {
    /// Starts a node on the holder, which lasts as long as the connection.
    fn node(&self, slots: u64, object_bytes: usize) -> (NodesConfig, Holder) {
        self.node_of_kind("usual", slots, object_bytes)
    }

    fn node_of_kind(&self, kind: &str, slots: u64, object_bytes: usize) -> (NodesConfig, Holder) {
        let mut holder = self.holder();
        let address = holder.ask(&format!("node {kind} {slots} {object_bytes}"));
        let node = NodeAddress { name: "node".to_owned(), address, weight: 1.0 };
        (patient(NodesConfig::new(vec![node], secret())), holder)
    }
}

fn store(config: NodesConfig) -> NodesStore {
    NodesStore::new(config).expect("a configuration that works")
}

/// Returns the bytes of a store's payload that went by RDMA, and all of them.
fn traffic(store: &NodesStore) -> (u64, u64) {
    let direct = store.peers().iter().map(|node| node.direct_bytes).sum();
    let remote = store.stats().remote.expect("its nodes are remote");
    (direct, remote.put_bytes + remote.get_bytes)
}

pub(crate) async fn a_node_keeps_its_promises_by_rdma(reader: Reader) {
    let stores: Mutex<Vec<NodesStore>> = Mutex::default();
    all(|| {
        let (config, holder) = reader.node(SLOTS, OBJECT_BYTES_MAX);
        let store = store(config);
        stores.lock().unwrap().push(store.clone());
        Backend {
            store: Arc::new(store),
            object_bytes_max: OBJECT_BYTES_MAX,
            objects_kept: 12,
            objects_max: SLOTS,
            copies: 1,
            lease_ttl: Duration::from_millis(LEASE_TTL_MS),
            full_wait: Duration::from_secs(5),
            keep: Box::new(Mutex::new(holder)),
        }
    })
    .await;
    let sums = stores
        .lock()
        .unwrap()
        .iter()
        .map(traffic)
        .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    println!("reader: {} of {} bytes went by RDMA", sums.0, sums.1);
    assert!(sums.0 > 0 && sums.0 * 10 >= sums.1 * 9, "nearly all goes by RDMA");
}

/// Pages of a client of the node.
#[derive(Clone)]
struct Pages {
    arena: Arena,
    count: u32,
    /// Number of the first object.
    first: u64,
}

impl Pages {
    fn new(count: u32, bytes: usize) -> Self {
        Self { arena: Arena::new(count, bytes).expect("there is memory"), count, first: 0 }
    }

    fn id(&self, number: u32) -> ObjectId {
        page(self.first + u64::from(number))
    }

    async fn put(&self, store: &NodesStore) {
        let put = |number| {
            let id = self.id(number);
            fill(&id, &mut self.arena.target(number).unwrap());
            Put::new(id, self.arena.source(number).unwrap())
        };
        let puts = (0..self.count).map(put).collect();
        for result in store.put_from(puts, PutOptions::default()).await {
            result.unwrap();
        }
    }

    fn gets(&self) -> Vec<Get> {
        let get = |number| {
            let mut target = self.arena.target(number).unwrap();
            target.fill(0xEE);
            Get::new(self.id(number), target)
        };
        (0..self.count).map(get).collect()
    }

    async fn get(&self, store: &NodesStore) -> Results<Served> {
        store.get_into(self.gets(), GetOptions::default()).await
    }

    fn assert_right(&self, results: &Results<Served>) {
        for (number, result) in (0..).zip(results) {
            assert!(result.is_ok(), "page {number}: {result:?}");
            assert!(self.is_right(number), "page {number} has wrong bytes");
        }
    }

    fn is_right(&self, number: u32) -> bool {
        is_right(&self.id(number), &self.arena.source(number).expect("it is given back"))
    }
}

pub(crate) async fn what_one_client_puts_others_get(reader: Reader) {
    const PAGES: u32 = 64;
    const BYTES: usize = 64 << 10;
    let (config, _holder) = reader.node(u64::from(PAGES), BYTES);
    let writer = store(config.clone());
    let others = [
        store(config.clone()),
        store(NodesConfig { rdma: RdmaChoice::Never, ..config.clone() }),
        store(NodesConfig { rdma: RdmaChoice::Device("rxe7".to_owned()), ..config }),
    ];
    let pages = Pages::new(PAGES, BYTES);
    let registration = writer.register(&pages.arena).unwrap();
    pages.put(&writer).await;
    assert_eq!(
        traffic(&writer),
        (u64::from(PAGES) * BYTES as u64, u64::from(PAGES) * BYTES as u64)
    );
    drop(registration);
    for (reader, by_rdma) in others.iter().zip([true, false, false]) {
        let _registration = reader.register(&pages.arena).unwrap();
        let results = pages.get(reader).await;
        pages.assert_right(&results);
        let (direct, all) = traffic(reader);
        assert_eq!(direct, if by_rdma { all } else { 0 }, "without an adapter it goes by TCP");
    }
}

/// A client without access to all objects gets no link, because a link exposes all memory.
pub(crate) async fn a_restricted_client_is_served_by_tcp(reader: Reader) {
    let (config, _holder) = reader.node_of_kind("restrictive", 8, 4096);
    let (store, pages) = (store(config), Pages::new(8, 4096));
    let _registration = store.register(&pages.arena).unwrap();
    pages.put(&store).await;
    let results = pages.get(&store).await;
    pages.assert_right(&results);
    assert_eq!(traffic(&store), (0, 2 * 8 * 4096));
}

/// An object that is only on disk is read into memory first, and then goes by RDMA.
pub(crate) async fn memory_over_disk_goes_by_rdma(reader: Reader) {
    const PAGES: u32 = 48;
    const BYTES: usize = 64 << 10;
    let (config, _holder) = reader.node_of_kind("tiered", u64::from(PAGES) / 3, BYTES);
    let (store, pages) = (store(config), Pages::new(PAGES, BYTES));
    let _registration = store.register(&pages.arena).unwrap();
    pages.put(&store).await;
    for _ in 0..2 {
        let results = pages.get(&store).await;
        pages.assert_right(&results);
    }
    let (direct, all) = traffic(&store);
    println!("reader: {direct} of {all} bytes went by RDMA");
    assert_eq!(all, 3 * u64::from(PAGES) * BYTES as u64);
    assert!(direct > all / 2);
}

const GETTER_PAGES: u32 = 32;
const GETTER_BYTES: usize = 256 << 10;

/// Gets the same pages repeatedly, in a separate process that can be frozen, and fails if any byte
/// is wrong. It ends with its input.
pub(crate) async fn get_over_and_over(address: &str) -> ExitCode {
    let node = NodeAddress { name: "node".to_owned(), address: address.to_owned(), weight: 1.0 };
    let store = store(patient(NodesConfig::new(vec![node], secret())));
    let pages = Pages::new(GETTER_PAGES, GETTER_BYTES);
    let _registration = store.register(&pages.arena).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    std::thread::spawn({
        let is_over = is_over.clone();
        move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            is_over.store(true, Ordering::Relaxed);
        }
    });
    let mut served = 0;
    while !is_over.load(Ordering::Relaxed) {
        for (number, result) in (0..).zip(pages.get(&store).await) {
            assert!(result.is_err() || pages.is_right(number), "page {number} has wrong bytes");
            served += u32::from(result.is_ok());
        }
    }
    println!("getter: {served} pages were right, {} bytes by RDMA", traffic(&store).0);
    if served > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Memory lent to a frozen client is reused, and the client does not accept the new content.
pub(crate) async fn a_frozen_client_keeps_nothing_and_reads_nothing_wrong(reader: Reader) {
    let slots = u64::from(GETTER_PAGES);
    let (config, _holder) = reader.node_of_kind("impatient", slots, GETTER_BYTES);
    let address = config.nodes[0].address.clone();
    let (store, pages) = (store(config), Pages::new(GETTER_PAGES, GETTER_BYTES));
    let _registration = store.register(&pages.arena).unwrap();
    pages.put(&store).await;
    let program = std::env::current_exe().expect("it runs");
    let mut getter = Command::new(program)
        .args(["getter", &address])
        .stdin(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let signal = |name: &str| {
        let kill = Command::new("kill").args([name, &getter.id().to_string()]).status();
        assert!(kill.expect("busybox has it").success());
    };
    tokio::time::sleep(Duration::from_secs(2)).await;
    for round in 1..4 {
        signal("-STOP");
        // Other objects take the places that it may be reading.
        let others = Pages { first: round * 1_000, ..pages.clone() };
        others.put(&store).await;
        signal("-CONT");
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        pages.put(&store).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    drop(getter.stdin.take());
    assert!(getter.wait().expect("it ends").success());
}

/// Sets deadlines that a healthy emulated machine meets.
fn impatient(config: NodesConfig) -> NodesConfig {
    const LIMIT_MS: u64 = 4_000;
    NodesConfig {
        connect_timeout_ms: LIMIT_MS,
        get_timeout_ms: LIMIT_MS,
        stall_timeout_ms: LIMIT_MS,
        ..config
    }
}

/// Starts a long get, injects a fault, and checks that the get ends within the bound and its pages
/// are returned.
async fn assert_gets_in_the_middle(reader: &Reader, trouble: impl FnOnce(&mut Holder)) -> Settled {
    const PAGES: u32 = 64;
    const BYTES: usize = 512 << 10;
    let (config, mut holder) = reader.node(u64::from(PAGES), BYTES);
    let store = store(impatient(config));
    let pages = Pages::new(PAGES, BYTES);
    let registration = store.register(&pages.arena).unwrap();
    pages.put(&store).await;
    assert!(traffic(&store).0 > 0, "it goes by RDMA");
    let (start, gets) = (Instant::now(), pages.gets());
    let getting = tokio::spawn({
        let store = store.clone();
        async move { store.get_into(gets, GetOptions::default()).await }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!getting.is_finished(), "it was in the middle");
    trouble(&mut holder);
    let results = getting.await.unwrap();
    println!("reader: the get ended after {:.1} s", start.elapsed().as_secs_f64());
    for (number, result) in (0..).zip(&results) {
        let right = pages.is_right(number);
        assert!(result.is_err() || right, "page {number} has wrong bytes");
    }
    let failed = results.iter().filter(|result| result.is_err()).count();
    println!("reader: {failed} of {PAGES} pages failed");
    Settled { pages, store, _holder: holder, _registration: registration }
}

/// State after the fault.
struct Settled {
    pages: Pages,
    store: NodesStore,
    _holder: Holder,
    _registration: terrace_l3::Registration,
}

pub(crate) async fn a_network_that_goes_in_mid_get_and_comes_back(reader: Reader) {
    let mut down = None;
    let settled = assert_gets_in_the_middle(&reader, |_| down = Some(NetworkDown::now())).await;
    drop(down);
    let start = Instant::now();
    loop {
        let results = settled.pages.get(&settled.store).await;
        if results.iter().all(Result::is_ok) {
            settled.pages.assert_right(&results);
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(40), "the node does not come back");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    println!("reader: all is well {:.1} s after the network", start.elapsed().as_secs_f64());
}

pub(crate) async fn a_node_that_loses_power_in_mid_get(reader: Reader) {
    let settled = assert_gets_in_the_middle(&reader, |holder| {
        // Late enough that the answer is in flight.
        holder.ask("vanish-after-ms 300");
    })
    .await;
    let results = settled.pages.get(&settled.store).await;
    assert!(results.iter().all(Result::is_err), "the node is down");
    // The machine restarts.
    drop(reader.holder());
}
