//! Reads that fail, and the state of their pages afterwards.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_l3_nodes::rdma::{Link, RdmaError, RemotePage, RemoteRead};

use super::pages::Pool;
use super::reader::{Memory, Reader, failure, remote_page};

/// Upper bound for the failure of a read, whatever happens to the peer.
const BOUND: Duration = Duration::from_secs(40);
/// Delay between the start of a read and the fault.
const TROUBLE_AFTER_MS: u64 = 500;

/// Asserts that a link works: it reads a batch.
async fn assert_all_is_well(reader: &Reader) {
    let (link, mut holder) = reader.link();
    let memory = reader.memory(Pool::Usual);
    let reads = memory.reads(&holder.pages(Pool::Usual));
    memory.assert_right(link.read(reads).await.unwrap());
}

/// Asserts that the peer refuses a read of `page`, the pages are returned, and the link is closed.
async fn assert_refused(reader: &Reader, link: &Link, page: RemotePage) {
    let memory = reader.memory(Pool::Usual);
    let reads = memory.reads(&[page]);
    let message = failure(link.read(reads).await, 1);
    println!("reader: {message}");
    assert!(message.contains("rxe0/1") && message.contains("access"), "{message}");
    assert_eq!((memory.lent(), memory.right()), (0, 0));
    assert!(link.is_closed());
    let again = link.read(memory.reads(&[page])).await.unwrap_err();
    assert!(matches!(again.error, RdmaError::Closed { .. }), "{again}");
    assert_all_is_well(reader).await;
}

pub(crate) async fn an_arena_that_is_not_registered_is_refused(reader: Reader) {
    let (link, mut holder) = reader.link();
    let (arena, page) = (Pool::Usual.arena(), holder.pages(Pool::Usual)[0]);
    let read = || vec![RemoteRead { target: arena.target(0).unwrap(), page }];
    let refused = link.read(read()).await.unwrap_err().error;
    assert!(matches!(refused, RdmaError::NotRegistered { .. }), "{refused}");
    let region = reader.device.register(&arena).unwrap();
    link.read(read()).await.unwrap();
    assert!(Pool::Usual.is_right(&arena, 0));
    drop(region);
    let again = link.read(read()).await.unwrap_err().error;
    assert_eq!(again, refused, "its registration has ended");
}

pub(crate) async fn a_wrong_key_is_refused(reader: Reader) {
    let (link, mut holder) = reader.link();
    let RemotePage { address, key } = holder.pages(Pool::Usual)[0];
    assert_refused(&reader, &link, RemotePage { address, key: key ^ 0x55 }).await;
}

pub(crate) async fn an_address_outside_the_region_is_refused(reader: Reader) {
    let (link, mut holder) = reader.link();
    let pages = holder.pages(Pool::Usual);
    let RemotePage { address, key } = pages[pages.len() - 1];
    // All bytes but the first are out of range.
    let address = address + Pool::Usual.page_bytes() as u64 - 1;
    assert_refused(&reader, &link, RemotePage { address, key }).await;
}

pub(crate) async fn a_registration_that_ended_is_refused(reader: Reader) {
    let (link, mut holder) = reader.link();
    let page = remote_page(&holder.ask("forgotten"));
    assert_refused(&reader, &link, page).await;
}

pub(crate) async fn a_link_that_was_never_connected_says_so(reader: Reader) {
    let link = Link::new(&reader.device).unwrap();
    let memory = reader.memory(Pool::Usual);
    let reads = memory.reads(&[RemotePage { address: 0, key: 0 }]);
    let refused = tokio::time::timeout(BOUND, link.read(reads)).await.unwrap();
    println!("reader: {}", refused.unwrap_err());
    assert_eq!(memory.lent(), 0);
}

/// Starts a read that takes longer than the fault delay. Asserts that the pages stay borrowed until
/// the read fails, that it fails within the bound, and that they are returned then.
async fn assert_fails_in_the_middle(memory: Memory, link: Arc<Link>, pages: Vec<RemotePage>) {
    let reads = memory.reads(&pages);
    let start = Instant::now();
    let reading = tokio::spawn(async move {
        let read = link.read(reads).await;
        (read, link)
    });
    let mut lent = memory.lent();
    while !reading.is_finished() {
        assert!(start.elapsed() < BOUND, "it neither fails nor ends");
        assert_eq!(lent, Pool::Much.pages(), "all are lent while the read has not failed");
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = memory.lent();
        lent = if reading.is_finished() { lent } else { now };
    }
    let (read, link) = reading.await.unwrap();
    println!(
        "reader: {} after {:.1} s",
        failure(read, Pool::Much.pages() as usize),
        start.elapsed().as_secs_f64()
    );
    assert!(link.is_closed());
    assert_eq!(memory.lent(), 0, "none is lent when it has failed");
    let right = memory.right();
    println!("reader: {right} of {} pages had arrived", Pool::Much.pages());
    assert!(right < Pool::Much.pages(), "it was in the middle");
}

pub(crate) async fn closing_gives_pages_back_at_once(reader: Reader) {
    let (link, mut holder) = reader.link();
    let (link, memory) = (Arc::new(link), reader.memory(Pool::Much));
    let reads = memory.reads(&holder.pages(Pool::Much));
    let reading = tokio::spawn({
        let link = link.clone();
        async move { link.read(reads).await }
    });
    tokio::time::sleep(Duration::from_millis(TROUBLE_AFTER_MS)).await;
    assert_eq!(memory.lent(), Pool::Much.pages());
    link.close();
    let unread = reading.await.unwrap().unwrap_err();
    assert!(matches!(unread.error, RdmaError::Closed { .. }), "{unread}");
    assert_eq!(unread.targets.len(), Pool::Much.pages() as usize);
    for mut target in unread.targets {
        target.fill(0xDD);
    }
    // Bytes that the peer sent meanwhile are dropped.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for page in 0..Pool::Much.pages() {
        assert!(memory.arena.source(page).unwrap().iter().all(|byte| *byte == 0xDD));
    }
    assert_all_is_well(&reader).await;
}

pub(crate) async fn a_peer_that_closes_in_mid_read(reader: Reader) {
    let (link, mut holder) = reader.link();
    let (memory, pages) = (reader.memory(Pool::Much), holder.pages(Pool::Much));
    holder.ask(&format!("close-after-ms {TROUBLE_AFTER_MS}"));
    assert_fails_in_the_middle(memory, Arc::new(link), pages).await;
    assert_all_is_well(&reader).await;
}

/// Disables the network until it is dropped.
pub(crate) struct NetworkDown;

impl NetworkDown {
    pub(crate) fn now() -> Self {
        network("down");
        Self
    }
}

impl Drop for NetworkDown {
    fn drop(&mut self) {
        network("up");
    }
}

fn network(state: &str) {
    let set = Command::new("ip").args(["link", "set", "eth0", state]).status();
    assert!(set.expect("ip is there").success());
}

pub(crate) async fn a_network_that_goes_in_mid_read_and_comes_back(reader: Reader) {
    let (link, mut holder) = reader.link();
    let (memory, pages) = (reader.memory(Pool::Much), holder.pages(Pool::Much));
    let going = tokio::spawn(async {
        tokio::time::sleep(Duration::from_millis(TROUBLE_AFTER_MS)).await;
        NetworkDown::now()
    });
    assert_fails_in_the_middle(memory, Arc::new(link), pages).await;
    drop(going.await.unwrap());
    assert_all_is_well(&reader).await;
}

pub(crate) async fn a_peer_that_loses_power_in_mid_read(reader: Reader) {
    let (link, mut holder) = reader.link();
    let (memory, pages) = (reader.memory(Pool::Much), holder.pages(Pool::Much));
    holder.ask(&format!("vanish-after-ms {TROUBLE_AFTER_MS}"));
    assert_fails_in_the_middle(memory, Arc::new(link), pages).await;
    // The machine restarts.
    assert_all_is_well(&reader).await;
}
