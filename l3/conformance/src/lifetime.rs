//! The end of objects, of calls and of the store.

use terrace_l3::{
    ExistsOptions, GetOptions, ObjectId, Pin, Put, PutOptions, Removal, StoreError, Stored,
};

use super::{Bench, filled, poll_once, tiers};
use crate::objects::{HARD, page};

/// Neither a lease nor another copy keeps it readable: F34.
pub(super) async fn removed_objects_are_missing_at_once(bench: Bench) {
    let lease = ExistsOptions { prefetch_to_memory: true, lease: true };
    let missing = || Err(StoreError::Missing);
    for round in 0..5 {
        bench.put(0).await;
        bench.get(0).await.unwrap();
        bench.store().exists(&[page(0)], lease).await.remove(0).unwrap();
        bench.remove(page(0), Removal::Forced).await.unwrap();
        assert_eq!(bench.get(0).await, Err(StoreError::Missing), "round {round}");
        assert!(!bench.is_present(page(0)).await);
        assert_eq!(bench.pin(page(0), HARD).await, missing());
        assert_eq!(bench.unpin(page(0), HARD).await, missing());
        assert_eq!(bench.remove(page(0), Removal::Forced).await, missing());
    }
}

/// Neither bytes nor entries remain.
pub(super) async fn removed_objects_leave_nothing_behind(bench: Bench) {
    let mut ids: Vec<ObjectId> = (0..3 * bench.backend.objects_max).map(page).collect();
    for id in &ids {
        assert_eq!(bench.put_id(*id).await, Ok(Stored::New));
    }
    let replaced: Vec<ObjectId> = (0..4).map(|number| ids[0].with_generation(number)).collect();
    for id in &replaced[1..] {
        assert_eq!(bench.put_id(*id).await, Ok(Stored::New));
    }
    ids.extend(replaced);
    bench.assert_empties(&ids).await;
    for number in 5000..5000 + bench.backend.objects_kept {
        bench.put(number).await;
    }
    for number in 5000..5000 + bench.backend.objects_kept {
        bench.get(number).await.unwrap();
    }
}

/// Its pages are returned in either case, and its object can be put again.
pub(super) async fn an_abandoned_put_is_atomic(bench: Bench) {
    let mut ids = Vec::new();
    for round in 0..12 {
        let batch: Vec<ObjectId> = (0..3).map(|number| page(10 * round + number)).collect();
        let put = |(page, id): (u32, &ObjectId)| bench.put_of(page, *id, bench.max());
        let puts = (0..).zip(&batch).map(put).collect();
        let options = PutOptions { pin: None, durable: round % 4 == 3 };
        let mut put = bench.store().put_from(puts, options);
        for _ in 0..round % 3 {
            if poll_once(&mut put).is_some() {
                break;
            }
        }
        drop(put);
        for page in 0..3 {
            bench.arena.returned(page).await;
        }
        for id in &batch {
            let served = bench.get_id(*id, bench.max()).await;
            assert!(matches!(served, Ok(_) | Err(StoreError::Missing)), "{served:?}");
        }
        bench.assert_empties(&batch).await;
        ids.extend(batch);
    }
    for id in ids {
        assert_eq!(bench.put_id(id).await, Ok(Stored::New), "{id:?}");
        bench.remove(id, Removal::Plain).await.unwrap();
    }
}

/// Neither the object nor other readers are affected.
pub(super) async fn an_abandoned_get_returns_its_page(bench: Bench) {
    let ids: Vec<ObjectId> = (0..4).map(page).collect();
    for number in 0..4 {
        bench.put(number).await;
    }
    for round in 0..12 {
        let get = |(page, id): (u32, &ObjectId)| bench.get_of(page, *id, bench.max());
        let gets = (0..).zip(&ids).map(get).collect();
        let mut get = bench.store().get_into(gets, GetOptions::default());
        for _ in 0..round % 3 {
            if poll_once(&mut get).is_some() {
                break;
            }
        }
        drop(get);
        bench.get_at(10, ids[round % 4], bench.max()).await.unwrap();
        for page in 0..4 {
            bench.arena.returned(page).await;
        }
    }
    bench.assert_empties(&ids).await;
}

/// A backend without persistence has nothing to do.
pub(super) async fn flushing_and_durable_puts_work_on_every_backend(bench: Bench) {
    bench.store().flush().await.unwrap();
    let durable = PutOptions { pin: Some(HARD), durable: true };
    assert_eq!(bench.put_with(page(0), durable).await, Ok(Stored::New));
    assert_eq!(bench.put_with(page(0), durable).await, Ok(Stored::AlreadyThere));
    bench.put(1).await;
    bench.store().flush().await.unwrap();
    bench.get(0).await.unwrap();
    bench.get(1).await.unwrap();
    bench.remove(page(1), Removal::Plain).await.unwrap();
    bench.store().flush().await.unwrap();
    bench.store().flush().await.unwrap();
}

/// Counts are exact for stores with one tier. The distribution among tiers is not specified.
pub(super) async fn statistics_are_consistent(bench: Bench) {
    let max = bench.max();
    let put = |number: u32| bench.put_of(number, page(number.into()), 1000 + number as usize);
    let stored = bench.store().put_from((0..4).map(put).collect(), PutOptions::default()).await;
    assert!(stored.iter().all(|it| *it == Ok(Stored::New)));
    assert_eq!(bench.put_id(page(0)).await, Ok(Stored::AlreadyThere));
    bench.get_id(page(0), 1000).await.unwrap();
    bench.get_id(page(1), 1001).await.unwrap();
    let lease = ExistsOptions { prefetch_to_memory: false, lease: true };
    bench.store().exists(&[page(0), page(99)], lease).await;
    bench.get_id(page(99), 1000).await.unwrap_err();
    bench.pin(page(1), HARD).await.unwrap();
    bench.pin(page(1), HARD).await.unwrap();
    bench.pin(page(2), Pin::Soft).await.unwrap();
    bench.remove(page(3), Removal::Plain).await.unwrap();
    let replaced = page(0).with_generation(1);
    assert_eq!(bench.put_id(replaced).await, Ok(Stored::New));
    bench.store().flush().await.unwrap();
    let stats = tiers(&bench.store().stats());
    assert!(!stats.is_empty());
    for tier in &stats {
        let (copies, bytes) = (bench.backend.copies, 1001 + 1002 + max as u64);
        assert_eq!((tier.objects, tier.bytes), (3 * copies, bytes * copies), "{tier:#?}");
        assert!(tier.resident_bytes >= tier.bytes && tier.capacity_bytes >= tier.resident_bytes);
        assert!(tier.index_bytes > 0);
        assert_eq!((tier.hard_pinned, tier.soft_pinned), (copies, copies), "{tier:#?}");
        assert_eq!((tier.removed, tier.superseded), (copies, copies), "{tier:#?}");
        assert_eq!(tier.evicted, 0, "{tier:#?}");
        assert_eq!((tier.corrupt, tier.io_errors, tier.disk_full), (0, 0, 0), "{tier:#?}");
    }
    if let [tier] = stats[..] {
        assert_eq!(tier.arenas, 1);
        assert_eq!(tier.resident_bytes, 3 * bench.backend.copies * max as u64, "{tier:#?}");
        assert_eq!((tier.puts, tier.put_bytes), (5, 4006 + max as u64), "{tier:#?}");
        assert_eq!((tier.puts_already_there, tier.puts_full), (1, 0), "{tier:#?}");
        assert_eq!((tier.gets, tier.get_bytes), (2, 2001), "{tier:#?}");
        assert_eq!((tier.gets_missing, tier.exists), (1, 2), "{tier:#?}");
        assert_eq!((tier.leases, tier.leases_refused), (1, 0), "{tier:#?}");
    }
}

/// Operations in flight have ended, and no page is lent any more.
pub(super) async fn a_closed_store_refuses_calls_and_lends_nothing(bench: Bench) {
    let (store, max) = (bench.store(), bench.max());
    bench.put(0).await;
    let puts = (0..4).map(|page_number| {
        let id = page(10 + u64::from(page_number));
        Put::new(id, filled(&bench.arena, page_number, id, max))
    });
    let mut put = store.put_from(puts.collect(), PutOptions::default());
    let ended = poll_once(&mut put);
    store.shutdown().await.unwrap();
    let stored = match ended {
        Some(stored) => stored,
        None => put.await,
    };
    let fine =
        |it: &Result<Stored, StoreError>| matches!(it, Ok(Stored::New) | Err(StoreError::Closed));
    assert!(stored.iter().all(fine), "{stored:?}");
    for page in 0..4 {
        bench.arena.returned(page).await;
    }
    let closed = || Err(StoreError::Closed);
    assert_eq!(bench.put_id(page(1)).await, Err(StoreError::Closed));
    assert_eq!(bench.get(0).await, Err(StoreError::Closed));
    assert_eq!(store.exists(&[page(0)], ExistsOptions::default()).await, [Err(StoreError::Closed)]);
    assert_eq!(bench.pin(page(0), HARD).await, closed());
    assert_eq!(bench.unpin(page(0), HARD).await, closed());
    assert_eq!(bench.remove(page(0), Removal::Forced).await, closed());
    assert_eq!(store.flush().await, closed());
    let arena = terrace_l3::Arena::new(1, max).expect("there is memory");
    assert!(matches!(store.register(&arena), Err(StoreError::Closed)));
    store.shutdown().await.unwrap();
    assert!(!tiers(&store.stats()).is_empty(), "it still tells how it went");
}
