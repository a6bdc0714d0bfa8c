//! Full load while nodes and links fail at random. Ten seconds of it belong to the tests, and
//! `scripts/test-nodes --soak MINUTES` goes on for longer.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use terrace_kit::Dice;
use terrace_l3::{
    ExistsOptions, ObjectId, Owner, Pin, PutOptions, Removal, Store, StoreError, Stored,
};

use super::client::{BATCH, Client, PAGE_BYTES, is_a_miss};
use super::farm::{Farm, resident_kib};
use crate::objects;

/// Objects that there can be: several times what fits.
const OBJECTS: u64 = 8_000;
const WORKERS: u64 = 6;

/// All workers are one owner.
const HARD: Pin = Pin::Hard(Owner(NonZeroU64::MIN));

/// Nobody kills this one, so that its memory can be compared with what it was.
const NEVER_KILLED: usize = 2;

/// What workers have seen.
#[derive(Debug, Default)]
struct Tally {
    calls: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    away: AtomicU64,
    stored: AtomicU64,
    already_there: AtomicU64,
    not_stored: AtomicU64,
    longest_us: AtomicU64,
}

fn batch(dice: &mut Dice) -> Vec<ObjectId> {
    let mut numbers: Vec<u64> = (0..BATCH as u64).map(|_| dice.below(OBJECTS)).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers.into_iter().map(|number| dice.pick(&objects_of(number))).collect()
}

/// Every fourth is of a kind that is written more than once.
fn objects_of(number: u64) -> Vec<ObjectId> {
    let page = objects::page(number);
    match number % 4 {
        0 => (0..3).map(|generation| page.with_generation(generation)).collect(),
        _ => vec![page],
    }
}

fn add(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Ordering::Relaxed);
}

/// Calls one after the other, each of which ends in time and with right bytes or none.
async fn work(client: Client, seed: u64, tally: Arc<Tally>, done: Arc<AtomicBool>) {
    let mut dice = Dice::new(seed);
    while !done.load(Ordering::Relaxed) {
        let ids = batch(&mut dice);
        let began = Instant::now();
        match dice.below(20) {
            0..8 => {
                for served in client.get(&ids).await {
                    match served {
                        Ok(()) => add(&tally.hits, 1),
                        Err(StoreError::Missing | StoreError::Superseded { .. }) => {
                            add(&tally.misses, 1);
                        }
                        Err(error) => {
                            assert!(is_a_miss(&error), "{error}");
                            add(&tally.away, 1);
                        }
                    }
                }
            }
            8..15 => {
                let pin = (dice.below(8) == 0).then_some(Pin::Soft);
                let options = PutOptions { pin, durable: dice.below(8) == 0 };
                for stored in client.put_with(&ids, options).await {
                    match stored {
                        Ok(Stored::New) => add(&tally.stored, 1),
                        Ok(Stored::AlreadyThere) => add(&tally.already_there, 1),
                        Err(error) => {
                            assert!(!matches!(error, StoreError::Corrupt(_)), "{error}");
                            add(&tally.not_stored, 1);
                        }
                    }
                }
                if pin.is_some() {
                    client
                        .in_time(
                            "an unpin",
                            client.config.control_timeout_ms,
                            client.store.unpin(&ids, Pin::Soft),
                        )
                        .await;
                }
            }
            15..18 => {
                let options = ExistsOptions { prefetch_to_memory: true, lease: false };
                client
                    .in_time(
                        "an exists",
                        client.config.exists_timeout_ms,
                        client.store.exists(&ids, options),
                    )
                    .await;
            }
            18 => {
                client
                    .in_time(
                        "a remove",
                        client.config.control_timeout_ms,
                        client.store.remove(&ids, Removal::Forced),
                    )
                    .await;
            }
            _ => {
                let pinned = client.store.pin(&ids, HARD);
                let pinned =
                    client.in_time("a pin", client.config.control_timeout_ms, pinned).await;
                let pairs = ids.iter().zip(&pinned).filter(|(_, it)| it.is_ok());
                let ids: Vec<ObjectId> = pairs.map(|(id, _)| *id).collect();
                client
                    .in_time(
                        "an unpin",
                        client.config.control_timeout_ms,
                        client.store.unpin(&ids, HARD),
                    )
                    .await;
            }
        }
        add(&tally.calls, 1);
        tally.longest_us.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
    }
}

/// Something goes wrong for a while, and then is well again.
async fn trouble(farm: &mut Farm, dice: &mut Dice) -> &'static str {
    let node = dice.below(farm.len() as u64) as usize;
    let pause = Duration::from_millis(200 + dice.below(1_800));
    let kind = dice.below(if node == NEVER_KILLED { 3 } else { 5 });
    type Change = fn(&mut Farm, usize);
    let (begin, end): (Change, Change) = match kind {
        0 => (|farm, node| farm.cut(node), |farm, node| farm.join(node)),
        1 => (|farm, node| farm.freeze(node), |farm, node| farm.thaw(node)),
        2 => (|farm, node| farm.spoil(node), |farm, node| farm.mend(node)),
        3 => (Farm::kill, Farm::start_node),
        _ => (Farm::stop, Farm::start_node),
    };
    tokio::task::block_in_place(|| begin(farm, node));
    tokio::time::sleep(pause).await;
    tokio::task::block_in_place(|| end(farm, node));
    ["cut", "frozen", "spoilt", "killed", "stopped"][kind as usize]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn full_load_with_faults_at_random() {
    let seconds = std::env::var("TERRACE_SOAK_SECONDS").map_or(10, |it| it.parse().unwrap());
    let memory = ["--memory", "16MiB", "--object-max", "16KiB"];
    let disk = |name| [&memory[..], &["--disk", name, "--disk-capacity", "32MiB"]].concat();
    let (first, second) = (disk("{folder}/first"), disk("{folder}/second"));
    let mut farm = Farm::start(&[&memory, &first, &second]);
    let client = Client::new(farm.config());
    let (tally, done) = (Arc::new(Tally::default()), Arc::new(AtomicBool::new(false)));
    let workers: Vec<_> = (0..WORKERS)
        .map(|seed| tokio::spawn(work(client.beside(), seed, tally.clone(), done.clone())))
        .collect();
    let mut dice = Dice::new(0xd1ce);
    // The client, and the node that lives all along.
    let mut memory: Vec<(u64, u64)> = Vec::new();
    let mut troubles: std::collections::BTreeMap<&str, u32> = Default::default();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(seconds) {
        assert!(workers.iter().all(|worker| !worker.is_finished()), "a worker has failed");
        tokio::time::sleep(Duration::from_millis(200 + dice.below(1_500))).await;
        *troubles.entry(trouble(&mut farm, &mut dice).await).or_default() += 1;
        memory.push((resident_kib(std::process::id()), farm.resident_kib(NEVER_KILLED)));
    }
    done.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.unwrap();
    }
    let took = began.elapsed().as_secs_f64();
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let pages = read(&tally.hits) + read(&tally.stored);
    println!("{troubles:?}\n{tally:?}");
    println!(
        "{:.0} calls and {:.0} MiB a second; memory in KiB (client, node {NEVER_KILLED}): {:?} ... {:?}",
        read(&tally.calls) as f64 / took,
        pages as f64 * PAGE_BYTES as f64 / took / f64::from(1 << 20),
        memory.first(),
        memory.last()
    );
    assert!(read(&tally.hits) > 0 && read(&tally.stored) > 0);
    memory_is_flat(&memory);
    pins_can_be_taken_back(&client, &farm).await;
    // All is well again, and all nodes take part.
    let ids: Vec<ObjectId> = (0..200).map(|number| objects::page(1_000_000 + number)).collect();
    let until = Instant::now() + Duration::from_secs(30);
    while client.put(&ids).await.iter().any(Result::is_err) {
        assert!(Instant::now() < until, "{:?}", client.store.peers());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    client.hits_come_back(&ids).await;
    for node in 0..farm.len() {
        let connections = farm.figure(node, "terrace_node_connections");
        assert!(connections <= 40.0, "node {node} has {connections} connections");
    }
}

/// Some were left where a node could not be reached, or answered too late; those on a node that
/// lives on are in the way of everything else until somebody takes them back.
async fn pins_can_be_taken_back(client: &Client, farm: &Farm) {
    let pinned = |kind: &str| {
        let name = format!("terrace_l3_{kind}_pinned_objects");
        (0..farm.len()).map(|node| farm.figure(node, &name)).collect::<Vec<_>>()
    };
    println!("pins left on each node: {:?} hard, {:?} soft", pinned("hard"), pinned("soft"));
    let all: Vec<ObjectId> = (0..OBJECTS).flat_map(objects_of).collect();
    for ids in all.chunks(BATCH) {
        client.store.unpin(ids, Pin::Soft).await;
        client.store.unpin(ids, HARD).await;
    }
    assert_eq!([pinned("hard"), pinned("soft")], [[0.0; 3]; 2]);
}

/// After a warm-up, what the last third needs is what the second needed, but for a little.
fn memory_is_flat(samples: &[(u64, u64)]) {
    const LITTLE_KIB: u64 = 24 << 10;
    let third = samples.len() / 3;
    if third < 5 {
        return;
    }
    let most = |samples: &[(u64, u64)]| {
        samples.iter().fold((0, 0), |most, it| (it.0.max(most.0), it.1.max(most.1)))
    };
    let (middle, end) = (most(&samples[third..2 * third]), most(&samples[2 * third..]));
    println!("most memory in the second and last third: {middle:?}, {end:?} KiB");
    assert!(end.0 < middle.0 + middle.0 / 10 + LITTLE_KIB, "the client grows");
    assert!(end.1 < middle.1 + middle.1 / 10 + LITTLE_KIB, "the node grows");
}
