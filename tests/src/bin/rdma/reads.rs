//! Successful reads, and their cost.

use std::sync::Arc;
use std::time::Instant;

use terrace_l3_nodes::rdma::{Counters, Link, RemoteRead};

use super::pages::Pool;
use super::reader::{Memory, Reader};

/// Returns the difference of counters.
fn since(before: Counters, after: Counters) -> Counters {
    Counters {
        reads: after.reads - before.reads,
        bytes: after.bytes - before.bytes,
        completions: after.completions - before.completions,
        wake_ups: after.wake_ups - before.wake_ups,
    }
}

/// Reads a whole pool and returns the counters.
async fn read(reader: &Reader, link: &Link, memory: &Memory, reads: Vec<RemoteRead>) -> Counters {
    let (before, start) = (reader.device.counters(), Instant::now());
    let targets = link.read(reads).await.unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let cost = since(before, reader.device.counters());
    memory.assert_right(targets);
    let megabytes = memory.pool.bytes() as f64 / 1e6;
    println!("reader: {:?}: {megabytes:.1} MB in {seconds:.3} s, {cost:?}", memory.pool);
    cost
}

pub(crate) async fn a_batch_is_one_completion_and_wakes_nobody_over_there(reader: Reader) {
    let (link, mut holder) = reader.link();
    let pages = holder.pages(Pool::Usual);
    let theirs = holder.ask("counters");
    for _ in 0..3 {
        let memory = reader.memory(Pool::Usual);
        let cost = read(&reader, &link, &memory, memory.reads(&pages)).await;
        assert_eq!(cost.reads, u64::from(Pool::Usual.pages()), "one for each page");
        assert_eq!(cost.bytes, Pool::Usual.bytes());
        assert_eq!(cost.completions, 1);
        assert!(cost.wake_ups <= 1, "{cost:?}");
    }
    assert_eq!(holder.ask("counters"), theirs, "the holder has not noticed");
}

pub(crate) async fn more_than_fits_the_queue_is_read_in_turns(reader: Reader) {
    let (link, mut holder) = reader.link();
    let memory = reader.memory(Pool::Many);
    let cost = read(&reader, &link, &memory, memory.reads(&holder.pages(Pool::Many))).await;
    assert_eq!(cost.reads, u64::from(Pool::Many.pages()));
    assert!((2..=8).contains(&cost.completions), "{cost:?}");
    assert!(cost.wake_ups <= cost.completions, "{cost:?}");
}

pub(crate) async fn a_long_page_is_read_in_pieces(reader: Reader) {
    let (link, mut holder) = reader.link();
    let memory = reader.memory(Pool::Long);
    let cost = read(&reader, &link, &memory, memory.reads(&holder.pages(Pool::Long))).await;
    assert!(cost.reads > 1, "soft-RoCE does not read so much at a time: {cost:?}");
    assert_eq!((cost.completions, cost.bytes), (1, Pool::Long.bytes()));
}

pub(crate) async fn many_batches_share_a_link(reader: Reader) {
    let (link, mut holder) = reader.link();
    let (link, pages) = (Arc::new(link), holder.pages(Pool::Usual));
    let batches: Vec<_> = (0..8)
        .map(|_| {
            let (link, memory) = (link.clone(), reader.memory(Pool::Usual));
            let reads = memory.reads(&pages);
            tokio::spawn(async move { memory.assert_right(link.read(reads).await.unwrap()) })
        })
        .collect();
    for batch in batches {
        batch.await.unwrap();
    }
}

pub(crate) async fn what_nobody_waits_for_ends_by_itself(reader: Reader) {
    let (link, mut holder) = reader.link();
    let memory = reader.memory(Pool::Much);
    let reads = memory.reads(&holder.pages(Pool::Much));
    tokio::select! {
        biased;
        _ = link.read(reads) => panic!("so much is not read at once"),
        () = std::future::ready(()) => {}
    }
    assert_eq!(memory.lent(), Pool::Much.pages(), "the adapter still writes to them");
    for page in 0..Pool::Much.pages() {
        memory.arena.returned(page).await;
    }
    assert_eq!(memory.right(), Pool::Much.pages());
    assert!(!link.is_closed());
}
