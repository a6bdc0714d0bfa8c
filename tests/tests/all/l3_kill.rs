//! A process that writes to a disk store is killed a hundred times, in the middle of whatever it
//! was doing. Everything it was told to be durable is there afterwards.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use terrace_kit::Dice;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, ObjectId, Put, PutOptions, Removal, Store, StoreError,
};
use terrace_l3_disk::{DiskConfig, DiskStore, IoEngine};
use terrace_tests::l3::objects;

const KILLS: u64 = 100;
const OBJECT_BYTES_MAX: usize = 8192;
/// More than are ever there at a time: nothing is evicted.
const OBJECTS_MAX: u64 = 2048;
/// How many objects the process keeps.
const KEPT: u64 = 64;
const BATCH_MAX: u64 = 4;
/// A process that nobody kills ends by itself.
const LIFE_MAX: Duration = Duration::from_secs(20);

/// Which directory the process writes to. Without it there is no work.
const DIRECTORY: &str = "TERRACE_KILL_DIRECTORY";
/// Which object it stores first.
const FIRST: &str = "TERRACE_KILL_FIRST";
/// Which object it removes first.
const OLDEST: &str = "TERRACE_KILL_OLDEST";

fn config(path: &Path, first: u64) -> DiskConfig {
    let bytes = OBJECTS_MAX * (4096 + OBJECT_BYTES_MAX as u64);
    DiskConfig {
        io: if first.is_multiple_of(2) { IoEngine::Auto } else { IoEngine::Threads },
        depth: 8,
        grow_bytes: bytes / 8,
        ..DiskConfig::new(path, bytes, OBJECT_BYTES_MAX)
    }
}

fn length(number: u64) -> usize {
    [100, 4096, 5000, OBJECT_BYTES_MAX][number as usize % 4]
}

/// The process that is killed. It says what it is about to do and what the store has answered.
#[tokio::test]
#[ignore = "the other test starts it in a process of its own"]
async fn write_until_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let (mut oldest, mut next) = (number(OLDEST), number(FIRST));
    let store = DiskStore::open(config(directory.as_ref(), next)).unwrap();
    let arena = Arena::new(BATCH_MAX as u32, OBJECT_BYTES_MAX).unwrap();
    let _registration = store.register(&arena).unwrap();
    let mut dice = Dice::new(next);
    let start = Instant::now();
    while start.elapsed() < LIFE_MAX {
        let numbers = next..next + 1 + dice.below(BATCH_MAX);
        next = numbers.end;
        let put = |(page, number): (u32, u64)| {
            let id = objects::page(number);
            objects::fill(&id, &mut arena.target(page).unwrap()[..length(number)]);
            Put::new(id, arena.source(page).unwrap().first(length(number)))
        };
        let puts = (0..).zip(numbers.clone()).map(put).collect();
        let options = PutOptions { durable: true, ..PutOptions::default() };
        for (number, result) in numbers.zip(store.put_from(puts, options).await) {
            result.unwrap();
            println!("stored {number}");
        }
        if next - oldest > KEPT {
            let numbers = oldest..oldest + 1 + dice.below(8);
            oldest = numbers.end;
            println!("removing {}", oldest - 1);
            let ids: Vec<ObjectId> = numbers.map(objects::page).collect();
            for result in store.remove(&ids, Removal::Plain).await {
                assert!(matches!(result, Ok(()) | Err(StoreError::Missing)), "{result:?}");
            }
            store.flush().await.unwrap();
            println!("removed {}", oldest - 1);
        }
    }
}

/// What is known of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Stored,
    BeingRemoved,
    Removed,
}

/// Lets a process write, kills it, and notes what it has said.
fn live_and_die(directory: &Path, known: &mut BTreeMap<u64, Known>, dice: &mut Dice) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "l3_kill::write_until_killed", "--ignored", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(OLDEST, oldest(known).to_string())
        .env(FIRST, first_unused(known).to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let patience = Duration::from_micros(5_000 + dice.below(55_000));
    let mut child = Some(child);
    let mut killer = None;
    for line in lines {
        let line = line.unwrap();
        // The harness has lines of its own, and begins one that ours ends.
        let mut words = line.split_whitespace().rev();
        let number = words.next().and_then(|word| word.parse::<u64>().ok());
        match (words.next(), number) {
            (Some("stored"), Some(number)) => drop(known.insert(number, Known::Stored)),
            (Some("removing"), Some(last)) => mark(known, last, Known::BeingRemoved),
            (Some("removed"), Some(last)) => mark(known, last, Known::Removed),
            _ => continue,
        }
        if let Some(child) = child.take() {
            killer = Some(std::thread::spawn(move || kill(child, patience)));
        }
    }
    killer.expect("the process stored something before it ended").join().unwrap();
}

fn kill(mut child: Child, patience: Duration) {
    std::thread::sleep(patience);
    assert_eq!(child.try_wait().unwrap(), None, "the process ended by itself");
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Everything up to `last` is being removed, or is.
fn mark(known: &mut BTreeMap<u64, Known>, last: u64, how: Known) {
    for (_, known) in known.range_mut(..=last).rev() {
        if *known == Known::Removed {
            break;
        }
        *known = how;
    }
}

/// The first object that may still be there.
fn oldest(known: &BTreeMap<u64, Known>) -> u64 {
    let removed = known.iter().rev().find(|(_, known)| **known == Known::Removed);
    removed.map_or(0, |(number, _)| number + 1)
}

/// The first object that no process has tried to store.
fn first_unused(known: &BTreeMap<u64, Known>) -> u64 {
    known.keys().last().map_or(0, |last| last + BATCH_MAX + 1)
}

/// Opens the store and looks for everything that may be there.
async fn check(directory: &Path, known: &BTreeMap<u64, Known>) {
    let store = DiskStore::open(config(directory, known.len() as u64)).unwrap();
    let arena = Arena::new(1, OBJECT_BYTES_MAX).unwrap();
    let _registration = store.register(&arena).unwrap();
    for number in oldest(known).saturating_sub(2 * KEPT)..first_unused(known) {
        let id = objects::page(number);
        let presence = store.exists(&[id], ExistsOptions::default()).await.remove(0).unwrap();
        let target = arena.target(0).unwrap().first(length(number));
        let gets = vec![Get::new(id, target)];
        let read = store.get_into(gets, GetOptions::default()).await.remove(0);
        if let Err(error) = &read {
            assert_eq!(*error, StoreError::Missing, "object {number} is damaged");
        } else {
            let source = arena.source(0).unwrap();
            assert!(objects::is_right(&id, &source[..length(number)]), "object {number} is wrong");
        }
        assert_eq!(
            read.is_ok(),
            presence.is_present(),
            "object {number} is {presence:?}: {read:?}"
        );
        match known.get(&number) {
            Some(Known::Stored) => assert!(read.is_ok(), "object {number} was durable"),
            Some(Known::Removed) => assert!(read.is_err(), "object {number} was removed"),
            Some(Known::BeingRemoved) | None => {}
        }
    }
    assert_eq!(store.stats().disk.unwrap().evicted, 0);
}

#[tokio::test]
async fn a_killed_process_loses_nothing_durable() {
    let directory = tempfile::tempdir().unwrap();
    let dice = &mut Dice::new(1);
    let mut known = BTreeMap::new();
    for _ in 0..KILLS {
        live_and_die(directory.path(), &mut known, dice);
        check(directory.path(), &known).await;
    }
    let removed = known.values().filter(|known| **known == Known::Removed).count() as u64;
    assert!(known.len() as u64 > KILLS && removed > KEPT, "little was done: {removed}");
}
