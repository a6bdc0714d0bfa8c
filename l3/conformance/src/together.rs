//! Concurrent use.

use std::sync::Arc;

use terrace_l3::{
    ExistsOptions, GetOptions, ObjectId, Put, PutOptions, Removal, StoreError, Stored,
};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::Bench;
use crate::objects::{HARD, page};

/// All readers get the right bytes.
pub(super) async fn concurrent_reads_get_the_same_bytes(bench: Bench) {
    bench.put(0).await;
    let bench = Arc::new(bench);
    let mut readers = JoinSet::new();
    for reader in 2..10 {
        let bench = bench.clone();
        readers.spawn(async move {
            for _ in 0..20 {
                bench.get_at(reader, page(0), bench.max()).await.unwrap();
            }
        });
    }
    while let Some(read) = readers.join_next().await {
        read.unwrap();
    }
    bench.assert_empties(&[page(0)]).await;
}

/// Exactly one put stores the object. A put that finds it can read it at that moment, completely;
/// one that arrives during the write gets an error: F40.
pub(super) async fn one_of_many_concurrent_puts_wins(bench: Bench) {
    const WRITERS: u32 = 6;
    let bench = Arc::new(bench);
    for round in 0..15 {
        let id = page(round);
        let start = Arc::new(Barrier::new(WRITERS as usize));
        let mut writers = JoinSet::new();
        for writer in 0..WRITERS {
            let (bench, start) = (bench.clone(), start.clone());
            writers.spawn(async move {
                bench.arena.target(writer).expect("its own").fill(writer as u8);
                let puts = vec![Put::new(id, bench.arena.source(writer).expect("its own"))];
                start.wait().await;
                let stored = bench.store().put_from(puts, PutOptions::default()).await.remove(0);
                let found = match stored {
                    Ok(Stored::New | Stored::AlreadyThere) => Some(whole(&bench, writer, id).await),
                    Err(StoreError::BeingWritten) => None,
                    Err(error) => panic!("{error}"),
                };
                (writer, stored, found)
            });
        }
        let mut first = Vec::new();
        let mut seen = Vec::new();
        while let Some(ended) = writers.join_next().await {
            let (writer, stored, found) = ended.unwrap();
            seen.extend(found);
            if stored == Ok(Stored::New) {
                first.push(writer as u8);
            }
        }
        assert_eq!(first.len(), 1, "one is first");
        assert!(seen.iter().all(|byte| *byte == first[0]), "{first:?} is there, not {seen:?}");
        bench.remove(id, Removal::Plain).await.unwrap();
    }
    bench.assert_empties(&[]).await;
}

/// Reads an object that consists of one repeated byte, and returns the byte.
async fn whole(bench: &Bench, page: u32, id: ObjectId) -> u8 {
    let gets = vec![bench.get_of(page, id, bench.max())];
    bench.store().get_into(gets, GetOptions::default()).await.remove(0).expect("it is there");
    let bytes = bench.arena.source(page).expect("it came back");
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "pieces of different puts");
    bytes[0]
}

/// Early readers get `Missing`, and do not affect the object.
pub(super) async fn early_lookups_do_not_hide_an_object(bench: Bench) {
    let bench = Arc::new(bench);
    for round in 0..60 {
        let start = Arc::new(Barrier::new(4));
        let mut early = JoinSet::new();
        for reader in 2..5 {
            let (bench, start) = (bench.clone(), start.clone());
            early.spawn(async move {
                start.wait().await;
                for _ in 0..3 {
                    let served = bench.get_at(reader, page(round), bench.max()).await;
                    assert!(matches!(served, Ok(_) | Err(StoreError::Missing)), "{served:?}");
                }
            });
        }
        start.wait().await;
        bench.put(round).await;
        bench.get(round).await.expect("it was stored");
        while let Some(looked) = early.join_next().await {
            looked.unwrap();
        }
        bench.get(round).await.expect("it was stored");
        bench.remove(page(round), Removal::Plain).await.unwrap();
    }
}

/// Readers get the right bytes or none, even if the slot is reused at once.
pub(super) async fn a_removal_does_not_disturb_readers(bench: Bench) {
    let bench = Arc::new(bench);
    let kept = bench.backend.objects_kept;
    let mut readers = JoinSet::new();
    for reader in 2..6 {
        let bench = bench.clone();
        readers.spawn(async move {
            let mut served = 0;
            for number in 0..30 * kept {
                match bench.get_at(reader, page(number % kept), bench.max()).await {
                    Ok(_) => served += 1,
                    Err(StoreError::Missing) => {}
                    Err(error) => panic!("{error}"),
                }
                tokio::task::yield_now().await;
            }
            served
        });
    }
    while !readers.is_empty() {
        for number in 0..kept {
            let stored = bench.put_id(page(number)).await;
            assert!(stored.is_ok(), "{stored:?}");
            let removed = bench.remove(page((number + 3) % kept), Removal::Plain).await;
            assert!(matches!(removed, Ok(()) | Err(StoreError::Missing)), "{removed:?}");
        }
        while let Some(read) = readers.try_join_next() {
            read.unwrap();
        }
        tokio::task::yield_now().await;
    }
    let ids: Vec<_> = (0..kept).map(page).collect();
    bench.assert_empties(&ids).await;
}

/// Runs all kinds of calls concurrently, over more objects than fit: no read returns wrong bytes,
/// no pinned object is lost, and nothing is left in the end.
pub(super) async fn no_wrong_bytes_under_load(bench: Bench) {
    const TASKS: u32 = 6;
    let bench = Arc::new(bench);
    let numbers = 2 * bench.backend.objects_max;
    let mut tasks = JoinSet::new();
    // While there is room.
    for task in 0..TASKS {
        let options = PutOptions { pin: Some(HARD), durable: false };
        let put = bench.put_of(3 * task, page(9000 + u64::from(task)), bench.max());
        assert_eq!(bench.store().put_from(vec![put], options).await, [Ok(Stored::New)]);
    }
    for task in 0..TASKS {
        let bench = bench.clone();
        tasks.spawn(async move { work(&bench, task, numbers).await });
    }
    while let Some(worked) = tasks.join_next().await {
        worked.unwrap();
    }
    let ids: Vec<_> = (0..numbers).chain(9000..9000 + u64::from(TASKS)).map(page).collect();
    bench.assert_empties(&ids).await;
    for page in 0..3 * TASKS {
        assert!(bench.arena.target(page).is_ok(), "page {page} came back");
    }
}

async fn work(bench: &Bench, task: u32, numbers: u64) {
    let (store, max) = (bench.store(), bench.max());
    let (mine, pages) = (page(9000 + u64::from(task)), 3 * task..3 * task + 3);
    let mut random = u64::from(task) + 1;
    let mut next = |below: u64| {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for _ in 0..60 {
        let ids: Vec<ObjectId> = (0..3).map(|_| page(next(numbers))).collect();
        match next(6) {
            0 | 1 => {
                let puts = pages.clone().zip(&ids).map(|(page, id)| bench.put_of(page, *id, max));
                for stored in store.put_from(puts.collect(), PutOptions::default()).await {
                    let fine = matches!(stored, Ok(_) | Err(StoreError::BeingWritten));
                    assert!(fine, "{stored:?}");
                }
            }
            2 | 3 => {
                let gets = pages.clone().zip(&ids).map(|(page, id)| bench.get_of(page, *id, max));
                let served = store.get_into(gets.collect(), GetOptions::default()).await;
                for ((page, id), served) in pages.clone().zip(&ids).zip(served) {
                    match served {
                        Ok(_) => bench.assert_right(page, *id, max),
                        Err(error) => assert_eq!(error, StoreError::Missing),
                    }
                }
            }
            4 => {
                let prefetch = ExistsOptions { prefetch_to_memory: true, lease: next(2) == 0 };
                let found = store.exists(&ids, prefetch).await;
                assert!(found.iter().all(Result::is_ok), "{found:?}");
            }
            _ => {
                for removed in store.remove(&ids[..1], Removal::Forced).await {
                    let fine = matches!(
                        removed,
                        Ok(()) | Err(StoreError::Missing | StoreError::BeingWritten)
                    );
                    assert!(fine, "{removed:?}");
                }
            }
        }
        bench.get_at(pages.start, mine, max).await.expect("a pinned object stays");
    }
    store.unpin(&[mine], HARD).await.remove(0).unwrap();
}
