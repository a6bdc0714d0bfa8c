//! A node on one machine and its clients on the other.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use terrace_l3::node::{NodeAddress, RdmaChoice};
use terrace_l3::{
    Arena, Get, GetOptions, NodesConfig, NodesStore, Put, PutOptions, Results, Served, Store,
};
use terrace_tests::l3::conformance::{Backend, all};
use terrace_tests::l3::nodes::{patient, secret};
use terrace_tests::l3::objects::{fill, is_right, page};

use super::faults::NetworkDown;
use super::reader::{Holder, Reader};

const OBJECT_BYTES_MAX: usize = 10_001;
const SLOTS: u64 = 16;
/// Long enough for an emulated machine to put twice what fits.
pub(crate) const LEASE_TTL_MS: u64 = 6_000;

impl Reader {
    /// A fresh node over there, which lasts as long as the connection to the holder.
    fn node(&self, slots: u64, object_bytes: usize) -> (NodesConfig, Holder) {
        let mut holder = self.holder();
        let address = holder.ask(&format!("node {slots} {object_bytes}"));
        let node = NodeAddress { name: "node".to_owned(), address, weight: 1.0 };
        (patient(NodesConfig::new(vec![node], secret())), holder)
    }
}

fn store(config: NodesConfig) -> NodesStore {
    NodesStore::new(config).expect("a configuration that works")
}

/// How much of a store's payload went by RDMA, and how much there was.
fn traffic(store: &NodesStore) -> (u64, u64) {
    let stats = store.stats();
    let direct =
        stats.nodes.expect("it has nodes").nodes.iter().map(|node| node.direct_bytes).sum();
    let remote = stats.remote.expect("its nodes are remote");
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
struct Pages {
    arena: Arena,
    count: u32,
}

impl Pages {
    fn new(count: u32, bytes: usize) -> Self {
        Self { arena: Arena::new(count, bytes).expect("there is memory"), count }
    }

    async fn put(&self, store: &NodesStore) {
        let put = |number| {
            let id = page(u64::from(number));
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
            Get::new(page(u64::from(number)), target)
        };
        (0..self.count).map(get).collect()
    }

    async fn get(&self, store: &NodesStore) -> Results<Served> {
        store.get_into(self.gets(), GetOptions::default()).await
    }

    fn assert_right(&self, results: &Results<Served>) {
        for (number, result) in results.iter().enumerate() {
            assert!(result.is_ok(), "page {number}: {result:?}");
            let source = self.arena.source(number as u32).expect("it is given back");
            assert!(is_right(&page(number as u64), &source), "page {number} has wrong bytes");
        }
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

/// Deadlines that are reached soon, but not by an emulated machine that is well.
fn impatient(config: NodesConfig) -> NodesConfig {
    const LIMIT_MS: u64 = 4_000;
    NodesConfig {
        connect_timeout_ms: LIMIT_MS,
        get_timeout_ms: LIMIT_MS,
        stall_timeout_ms: LIMIT_MS,
        ..config
    }
}

/// Begins to get so much that it takes a while, has trouble come, and checks that the get ends
/// within a bounded time with its pages given back.
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
    for (number, result) in results.iter().enumerate() {
        let source = pages.arena.source(number as u32).expect("it is given back");
        let right = is_right(&page(number as u64), &source);
        assert!(result.is_err() || right, "page {number} has wrong bytes");
    }
    let failed = results.iter().filter(|result| result.is_err()).count();
    println!("reader: {failed} of {PAGES} pages failed");
    Settled { pages, store, _holder: holder, _registration: registration }
}

/// What is left after the trouble.
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
        // Late enough for its answer to be on the way.
        holder.ask("vanish-after-ms 300");
    })
    .await;
    let results = settled.pages.get(&settled.store).await;
    assert!(results.iter().all(Result::is_err), "nobody is there");
    // The machine starts again.
    drop(reader.holder());
}
