//! Crashes a workload at every event and sees whether the store keeps its promises.

use std::collections::BTreeSet;
use std::sync::Arc;
use terrace_tests::l3::objects::HARD;

use terrace_kit::Dice;
use terrace_l3::{Arena, ExistsOptions, ObjectId, Presence, PutOptions, Store, StoreError};
use terrace_l3_disk::{DiskConfig, DiskStore};
use terrace_tests::l3::objects;
use terrace_tests::l3::simulated_disk::SimulatedDisk;

use super::calls::{self, OBJECT_BYTES_MAX};
use super::promises::{Kind, Promise, promises};
use super::workload::{Plan, Record, from_generation};

/// What was examined.
#[derive(Debug, Default)]
pub(crate) struct Examined {
    pub(crate) crashes: usize,
    /// Objects that had to be there and were, over all crashes.
    pub(crate) kept: usize,
    /// Objects that had to be gone and were.
    pub(crate) gone: usize,
}

/// Crashes at every event of a workload, so many times each. Answers the first broken promise.
pub(crate) async fn examine(plan: &Plan, record: &Record, times: u64) -> Result<Examined, String> {
    // Rounds on demand only: what is being examined does not change meanwhile.
    let config = Plan { commit_interval_ms: 3_600_000, ..plan.clone() }.config();
    let arena = Arena::new(64, OBJECT_BYTES_MAX).expect("there is memory");
    let promises = promises(record);
    let mut examined = Examined::default();
    let mut crashes = record.history.crashes();
    loop {
        let at = crashes.at();
        if crashes.is_interesting() {
            let holding: Vec<&Promise> = promises
                .iter()
                .filter(|promise| (promise.from..promise.to).contains(&at))
                .collect();
            for time in 0..times {
                let seed = (at as u64) << 8 | time;
                let disk = crashes.disk(&mut Dice::new(seed));
                let checked = check(disk, &config, &arena, record, &holding).await;
                let event = record.history.events().get(at);
                checked.map_err(|what| {
                    let event = event.map_or("the end".to_owned(), |event| {
                        format!("{event:?}").chars().take(60).collect()
                    });
                    format!("workload {}, crash {seed} at {at} ({event}): {what}", plan.seed)
                })?;
                examined.crashes += 1;
                let kept = holding.iter().filter(|promise| promise.kind == Kind::Present).count();
                examined.kept += kept;
                examined.gone += holding.len() - kept;
            }
        }
        if !crashes.advance() {
            return Ok(examined);
        }
    }
}

/// Opens a store on what a crash has left and examines it.
async fn check(
    disk: SimulatedDisk,
    config: &DiskConfig,
    arena: &Arena,
    record: &Record,
    holding: &[&Promise],
) -> Result<(), String> {
    let store = DiskStore::open_on(Arc::new(disk), config.clone());
    let store = store.map_err(|error| format!("it does not open: {error}"))?;
    let _registration = store.register(arena).expect("the arena is new here");
    let present = present(&store, &record.ids).await;
    let mut former: Option<&ObjectId> = None;
    for id in &present {
        let both = former.is_some_and(|former| former.with_generation(id.generation) == *id);
        if both {
            return Err(format!("two generations at once: {former:?} and {id:?}"));
        }
        former = Some(id);
    }
    for promise in holding {
        let kept = match promise.kind {
            Kind::Present => from_generation(&present, &promise.id).next().is_some(),
            Kind::Absent => !present.contains(&promise.id),
        };
        if !kept {
            return Err(format!("broken: {promise:?}"));
        }
    }
    read_all(&store, arena, record, &present).await?;
    work_on(&store, arena).await
}

async fn present(store: &DiskStore, ids: &BTreeSet<ObjectId>) -> BTreeSet<ObjectId> {
    let ids: Vec<ObjectId> = ids.iter().copied().collect();
    let presences = store.exists(&ids, ExistsOptions::default()).await;
    let presences = presences.into_iter().map(|presence| presence.is_ok_and(Presence::is_present));
    ids.into_iter().zip(presences).filter(|(_, present)| *present).map(|(id, _)| id).collect()
}

/// What is said to be there can be read, and nothing else can.
async fn read_all(
    store: &DiskStore,
    arena: &Arena,
    record: &Record,
    present: &BTreeSet<ObjectId>,
) -> Result<(), String> {
    let ids: Vec<ObjectId> = record.ids.iter().copied().collect();
    for ids in ids.chunks(arena.pages() as usize) {
        let results = calls::get(store, arena, 0, ids).await;
        for (id, result) in ids.iter().zip(results) {
            match (present.contains(id), result) {
                (true, Ok(_)) | (false, Err(StoreError::Missing)) => {}
                (said, result) => {
                    return Err(format!(
                        "{id:?} is said to be there: {said}, but reads {result:?}"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// The store is as good as ever.
async fn work_on(store: &DiskStore, arena: &Arena) -> Result<(), String> {
    let id = objects::page(u64::MAX);
    let failed =
        |during: &str, error: StoreError| format!("it does not work on: {during}: {error}");
    let put = calls::put(arena, 0, id);
    // In a full store a round between put and get may evict what has no pin.
    let pinned = PutOptions { pin: Some(HARD), durable: false };
    let stored = store.put_from(vec![put], pinned).await.remove(0);
    stored.map_err(|error| failed("put", error))?;
    let read = calls::get(store, arena, 1, &[id]).await.remove(0);
    read.map_err(|error| failed("get", error))?;
    store.flush().await.map_err(|error| failed("flush", error))
}
