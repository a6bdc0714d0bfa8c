//! The machine that reads. It runs the checks one after the other, because they compare counters
//! and disable the network.

use std::fmt;
use std::future::Future;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_l3::{Arena, Target};
use terrace_l3_nodes::rdma::{
    Device, Link, LinkAddress, RdmaError, Region, RemotePage, RemoteRead, Unread,
};

use super::holder::{bytes_of, hex};
use super::pages::Pool;
use super::{faults, nodes, reads, servers};

type Check = fn(Reader) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! checks {
    ($($module:ident :: $check:ident,)*) => {
        &[$((stringify!($check), |reader| Box::pin($module::$check(reader))),)*]
    };
}

const CHECKS: &[(&str, Check)] = checks! {
    reads::a_batch_is_one_completion_and_wakes_nobody_over_there,
    reads::more_than_fits_the_queue_is_read_in_turns,
    reads::a_long_page_is_read_in_pieces,
    reads::many_batches_share_a_link,
    reads::what_nobody_waits_for_ends_by_itself,
    faults::an_arena_that_is_not_registered_is_refused,
    faults::a_wrong_key_is_refused,
    faults::an_address_outside_the_region_is_refused,
    faults::a_registration_that_ended_is_refused,
    faults::a_link_that_was_never_connected_says_so,
    faults::closing_gives_pages_back_at_once,
    faults::a_peer_that_closes_in_mid_read,
    faults::a_network_that_goes_in_mid_read_and_comes_back,
    nodes::what_one_client_puts_others_get,
    nodes::a_restricted_client_is_served_by_tcp,
    nodes::memory_over_disk_goes_by_rdma,
    nodes::a_frozen_client_keeps_nothing_and_reads_nothing_wrong,
    nodes::a_node_keeps_its_promises_by_rdma,
    servers::what_one_server_computes_others_fetch_by_rdma,
    servers::as_fast_as_what_others_measure,
    nodes::a_network_that_goes_in_mid_get_and_comes_back,
    nodes::a_node_that_loses_power_in_mid_get,
    faults::a_peer_that_loses_power_in_mid_read,
};

const PATIENCE: Duration = Duration::from_secs(200);

pub(crate) async fn run(address: &str) -> ExitCode {
    let device = Device::open(Some("rxe0/1")).expect("the machine has soft-RoCE");
    println!("reader: {device:?}");
    let missing = Device::open(Some("rxe7")).unwrap_err().to_string();
    assert!(missing.contains("rxe7") && missing.contains("rxe0"), "{missing}");
    let missing = Device::open(Some("rxe0/7")).unwrap_err().to_string();
    assert!(missing.contains("rxe0/7") && missing.contains("the device has 1"), "{missing}");

    let mut failed = Vec::new();
    for (name, check) in CHECKS {
        let start = Instant::now();
        let reader = Reader { device: device.clone(), holder: address.to_owned() };
        let ended = tokio::time::timeout(PATIENCE, tokio::spawn(check(reader))).await;
        let verdict = match ended {
            Ok(Ok(())) => "ok",
            Ok(Err(_)) => "FAILED",
            Err(_) => "DOES NOT END",
        };
        println!("reader: {name}: {verdict} after {:.1} s", start.elapsed().as_secs_f64());
        if verdict != "ok" {
            failed.push(*name);
        }
    }
    println!("reader: {} of {} checks failed {failed:?}", failed.len(), CHECKS.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Context of a check.
pub(crate) struct Reader {
    pub(crate) device: Device,
    holder: String,
}

impl Reader {
    /// Opens a link to the holder, and the command connection.
    pub(crate) fn link(&self) -> (Link, Holder) {
        let mut holder = self.holder();
        let link = Link::new(&self.device).expect("there are queues left");
        let peer = holder.ask(&format!("link {}", hex(&link.address().encode())));
        link.connect(LinkAddress::decode(&bytes_of(&peer)).unwrap()).unwrap();
        (link, holder)
    }

    pub(crate) fn holder(&self) -> Holder {
        let start = Instant::now();
        loop {
            let address = self.holder.parse().expect("an address and a port");
            match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE / 4)).expect("some time");
                    return Holder(BufReader::new(stream));
                }
                Err(error) if start.elapsed() > PATIENCE => panic!("the holder: {error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    /// Allocates memory for the pages of a pool, filled with wrong bytes and registered.
    pub(crate) fn memory(&self, pool: Pool) -> Memory {
        let arena = pool.arena();
        for page in 0..pool.pages() {
            arena.target(page).unwrap().fill(0xEE);
        }
        let region = self.device.register(&arena).unwrap();
        Memory { pool, arena: Arc::new(arena), _region: region }
    }
}

/// Command connection to the holder.
pub(crate) struct Holder(BufReader<TcpStream>);

impl Holder {
    pub(crate) fn ask(&mut self, question: &str) -> String {
        writeln!(self.0.get_mut(), "{question}").expect("the holder listens");
        let mut reply = String::new();
        self.0.read_line(&mut reply).expect("the holder answers");
        reply.trim().to_owned()
    }

    /// Returns the remote pages of a pool.
    pub(crate) fn pages(&mut self, pool: Pool) -> Vec<RemotePage> {
        self.ask(&format!("pages {}", pool.index())).split(' ').map(remote_page).collect()
    }
}

pub(crate) fn remote_page(text: &str) -> RemotePage {
    let (address, key) = text.split_once(':').expect("an address and a key");
    RemotePage { address: address.parse().unwrap(), key: key.parse().unwrap() }
}

/// Target memory of a pool.
#[derive(Clone)]
pub(crate) struct Memory {
    pub(crate) pool: Pool,
    pub(crate) arena: Arc<Arena>,
    _region: Region,
}

impl Memory {
    /// Creates reads of all pages, each into the local page of its number.
    pub(crate) fn reads(&self, from: &[RemotePage]) -> Vec<RemoteRead> {
        let targets = (0..self.pool.pages()).map(|page| self.arena.target(page).unwrap());
        let reads = targets.zip(from).map(|(target, page)| RemoteRead { target, page: *page });
        reads.collect()
    }

    pub(crate) fn right(&self) -> u32 {
        (0..self.pool.pages()).filter(|page| self.pool.is_right(&self.arena, *page)).count() as u32
    }

    /// Returns the number of pages that are lent for writing.
    pub(crate) fn lent(&self) -> u32 {
        (0..self.pool.pages()).filter(|page| self.arena.source(*page).is_err()).count() as u32
    }

    /// Asserts that the targets are those of all pages in order, with the right bytes.
    pub(crate) fn assert_right(&self, targets: Vec<Target>) {
        let pages: Vec<u32> = targets.iter().map(Target::page).collect();
        assert_eq!(pages, (0..self.pool.pages()).collect::<Vec<_>>());
        drop(targets);
        assert_eq!(self.right(), self.pool.pages(), "pages with the right bytes");
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in {:?}", self.pool, self.arena)
    }
}

/// Returns the error of a failed read. Its targets were returned, and are dropped.
pub(crate) fn failure(result: Result<Vec<Target>, Unread>, pages: usize) -> String {
    match result {
        Err(Unread { error: error @ RdmaError::ReadFailed { .. }, targets }) => {
            assert_eq!(targets.len(), pages, "all targets are handed back");
            error.to_string()
        }
        other => panic!("the read should have failed: {other:?}"),
    }
}
