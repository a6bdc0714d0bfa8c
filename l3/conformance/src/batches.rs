//! Batches, their memory, and lengths of objects.

use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, Pin, Presence, Put, PutOptions, Removal, StoreError,
    Stored,
};

use super::{Bench, assert_each, filled, poll_once};
use crate::objects::{HARD, page};

/// The failure of one object does not affect its neighbours.
pub(super) async fn each_object_of_a_batch_has_its_own_result(bench: Bench) {
    let (store, max) = (bench.store(), bench.max());
    let stranger = Arena::new(1, max).expect("there is memory");
    let large = Arena::new(1, max + 1).expect("there is memory");
    let _registration = store.register(&large).expect("it is new");
    let puts = vec![
        bench.put_of(0, page(0), max),
        Put::new(page(1), filled(&stranger, 0, page(1), max)),
        Put::new(page(2), filled(&large, 0, page(2), max + 1)),
        bench.put_of(1, page(3), max),
    ];
    assert_each(
        &store.put_from(puts, PutOptions::default()).await,
        &[
            |it| *it == Ok(Stored::New),
            |it| matches!(it, Err(StoreError::NotRegistered { .. })),
            |it| matches!(it, Err(StoreError::TooLarge { .. })),
            |it| *it == Ok(Stored::New),
        ],
    );
    let gets = vec![
        bench.get_of(0, page(0), max),
        Get::new(page(3), stranger.target(0).expect("it came back")),
        bench.get_of(1, page(1), max),
        bench.get_of(2, page(3), max - 1),
        bench.get_of(3, page(3), max),
    ];
    assert_each(
        &store.get_into(gets, GetOptions::default()).await,
        &[
            |it| it.is_ok(),
            |it| matches!(it, Err(StoreError::NotRegistered { .. })),
            |it| *it == Err(StoreError::Missing),
            |it| matches!(it, Err(StoreError::Length { .. })),
            |it| it.is_ok(),
        ],
    );
    bench.assert_right(0, page(0), max);
    bench.assert_right(3, page(3), max);
    let (ok, missing) = (Ok(()), Err(StoreError::Missing));
    let ids = [page(0), page(1), page(3)];
    assert_eq!(store.pin(&ids, HARD).await, [ok.clone(), missing.clone(), ok.clone()]);
    let twice = [page(0), page(2), page(0)];
    let not_pinned = Err(StoreError::NotPinned);
    assert_eq!(store.unpin(&twice, HARD).await, [ok.clone(), missing.clone(), not_pinned]);
    let pinned = Err(StoreError::Pinned);
    assert_eq!(store.remove(&ids, Removal::Plain).await, [ok, missing, pinned]);
}

/// The n-th result is that of the n-th object.
pub(super) async fn results_are_in_the_order_of_the_batch(bench: Bench) {
    let (store, count) = (bench.store(), bench.backend.objects_kept as u32);
    // Every second object, from the last to the first.
    let put = |number: u32| bench.put_of(number, page(number.into()), 100 + number as usize);
    let puts = (0..count).rev().step_by(2).map(put).collect();
    let stored = store.put_from(puts, PutOptions::default()).await;
    assert!(stored.iter().all(|it| *it == Ok(Stored::New)), "{stored:?}");
    let there = |number: u32| (count - 1 - number).is_multiple_of(2);
    let ids: Vec<_> = (0..count).map(|number| page(number.into())).collect();
    let found = store.exists(&ids, ExistsOptions::default()).await;
    let found: Vec<bool> = found.into_iter().map(|it| it.unwrap().is_present()).collect();
    assert_eq!(found, (0..count).map(there).collect::<Vec<_>>());
    let get = |number: u32| bench.get_of(number, page(number.into()), 100 + number as usize);
    let served = store.get_into((0..count).map(get).collect(), GetOptions::default()).await;
    assert_eq!(served.len(), count as usize);
    for (number, served) in (0..count).zip(served) {
        if there(number) {
            served.unwrap();
            bench.assert_right(number, page(number.into()), 100 + number as usize);
        } else {
            assert_eq!(served, Err(StoreError::Missing));
        }
    }
}

/// An empty batch neither fails nor returns anything.
pub(super) async fn an_empty_batch_has_no_results(bench: Bench) {
    let store = bench.store();
    assert!(store.put_from(Vec::new(), PutOptions::default()).await.is_empty());
    let durable = PutOptions { durable: true, pin: Some(HARD) };
    assert!(store.put_from(Vec::new(), durable).await.is_empty());
    assert!(store.get_into(Vec::new(), GetOptions::default()).await.is_empty());
    let options = ExistsOptions { prefetch_to_memory: true, lease: true };
    assert!(store.exists(&[], options).await.is_empty());
    assert!(store.pin(&[], HARD).await.is_empty());
    assert!(store.unpin(&[], Pin::Soft).await.is_empty());
    assert!(store.remove(&[], Removal::Forced).await.is_empty());
}

/// The object is stored once, by either of the two puts, and read twice.
pub(super) async fn an_object_may_be_in_a_batch_twice(bench: Bench) {
    let (store, max, twice) = (bench.store(), bench.max(), [page(0), page(0), page(1)]);
    let puts = vec![
        bench.put_of(0, page(0), max),
        bench.put_of(1, page(0), max),
        bench.put_of(2, page(1), max),
    ];
    let stored = store.put_from(puts, PutOptions::default()).await;
    let is_twin = |it: &_| matches!(it, Ok(Stored::AlreadyThere) | Err(StoreError::BeingWritten));
    // Either of the two may be the one that is stored: a store may split a batch into concurrent
    // parts.
    let [one, other, last] = &stored[..] else { panic!("one result for each object: {stored:?}") };
    let new = Ok(Stored::New);
    let once = (*one == new && is_twin(other)) || (is_twin(one) && *other == new);
    assert!(once && *last == new, "{stored:?}");
    let gets = (0..3).map(|number| bench.get_of(number, twice[number as usize], max)).collect();
    for (number, served) in
        store.get_into(gets, GetOptions::default()).await.into_iter().enumerate()
    {
        served.unwrap();
        bench.assert_right(number as u32, twice[number], max);
    }
    let found = store.exists(&twice, ExistsOptions::default()).await;
    assert!(found.iter().all(|it| it.as_ref().is_ok_and(|it| it.is_present())), "{found:?}");
    assert_eq!(store.pin(&twice, HARD).await, [Ok(()), Ok(()), Ok(())]);
    let unpinned = store.unpin(&twice, HARD).await;
    assert_eq!(unpinned, [Ok(()), Err(StoreError::NotPinned), Ok(())]);
    let removed = store.remove(&twice, Removal::Plain).await;
    assert_eq!(removed, [Ok(()), Err(StoreError::Missing), Ok(())]);
}

/// Later objects of a batch may evict earlier ones, but all of them are stored.
pub(super) async fn a_batch_may_be_larger_than_the_store(bench: Bench) {
    let arena = Arena::new(2 * bench.backend.objects_max as u32, bench.max()).expect("memory");
    let _registration = bench.store().register(&arena).expect("it is new");
    let put = |number: u32| {
        let id = page(number.into());
        Put::new(id, filled(&arena, number, id, bench.max()))
    };
    let puts = (0..arena.pages()).map(put).collect();
    let stored = bench.store().put_from(puts, PutOptions::default()).await;
    assert!(stored.iter().all(|it| *it == Ok(Stored::New)), "{stored:?}");
    let mut there = 0;
    for number in 0..u64::from(arena.pages()) {
        match bench.get(number).await {
            Ok(_) => there += 1,
            Err(error) => assert_eq!(error, StoreError::Missing),
        }
    }
    assert!((1..=bench.backend.objects_max).contains(&there), "{there}");
}

/// Required of every backend, even if some could do without: F39.
pub(super) async fn unregistered_memory_is_refused(bench: Bench) {
    let (store, max) = (bench.store(), bench.max());
    let stranger = Arena::new(2, max).expect("there is memory");
    let puts =
        vec![Put::new(page(0), filled(&stranger, 0, page(0), max)), bench.put_of(0, page(1), max)];
    let stored = store.put_from(puts, PutOptions::default()).await;
    let Err(refused @ StoreError::NotRegistered { .. }) = &stored[0] else {
        panic!("{stored:?}");
    };
    assert!(refused.to_string().contains("Store::register"), "it says what to do: {refused}");
    assert_eq!(stored[1], Ok(Stored::New));
    assert!(!bench.is_present(page(0)).await);
    let gets = vec![
        Get::new(page(1), stranger.target(0).expect("it came back")),
        bench.get_of(0, page(1), max),
    ];
    assert_each(
        &store.get_into(gets, GetOptions::default()).await,
        &[|it| matches!(it, Err(StoreError::NotRegistered { .. })), |it| it.is_ok()],
    );
    let registration = store.register(&stranger).expect("nothing stands in the way");
    let puts = vec![Put::new(page(0), filled(&stranger, 0, page(0), max))];
    assert_eq!(store.put_from(puts, PutOptions::default()).await, [Ok(Stored::New)]);
    drop(registration);
}

/// Otherwise dropping the second registration would end the right of the first.
pub(super) async fn an_arena_is_registered_once_at_a_time(bench: Bench) {
    let again = bench.store().register(&bench.arena);
    assert!(matches!(again, Err(StoreError::AlreadyRegistered { .. })), "{again:?}");
    let clone = bench.store().register(&bench.arena.clone());
    assert!(matches!(clone, Err(StoreError::AlreadyRegistered { .. })), "{clone:?}");
    bench.put(0).await;
    bench.get(0).await.unwrap();
    let Bench { registration, arena, backend } = bench;
    drop(registration);
    let registration = backend.store.register(&arena).expect("it is not registered any more");
    let bench = Bench { registration, arena, backend };
    bench.get(0).await.unwrap();
}

/// The other arenas stay registered.
pub(super) async fn a_registration_ends_with_its_guard(bench: Bench) {
    let other = Arena::new(1, bench.max()).expect("there is memory");
    let registration = bench.store().register(&other).expect("it is new");
    bench.put(0).await;
    drop(registration);
    let gets = vec![Get::new(page(0), other.target(0).expect("it is free"))];
    let refused = bench.store().get_into(gets, GetOptions::default()).await.remove(0);
    assert!(matches!(refused, Err(StoreError::NotRegistered { .. })), "{refused:?}");
    bench.get(0).await.unwrap();
}

/// Lent pages keep their memory, and transfers in flight complete.
pub(super) async fn an_arena_may_be_dropped_while_its_pages_are_lent(bench: Bench) {
    let (store, max) = (bench.store(), bench.max());
    for number in 0..8 {
        let arena = Arena::new(2, max).expect("there is memory");
        let registration = store.register(&arena).expect("it is new");
        let puts = vec![Put::new(page(number), filled(&arena, 0, page(number), max))];
        let mut put = store.put_from(puts, PutOptions::default());
        let ended = poll_once(&mut put);
        drop((arena, registration));
        let stored = match ended {
            Some(stored) => stored,
            None => put.await,
        };
        // A call that had not begun finds that its arena is no longer registered.
        let begun = !matches!(stored[0], Err(StoreError::NotRegistered { .. }));
        assert!(!begun || stored[0] == Ok(Stored::New), "{stored:?}");
        assert_eq!(bench.get(number).await.is_ok(), begun);
        if begun {
            let arena = Arena::new(1, max).expect("there is memory");
            let registration = store.register(&arena).expect("it is new");
            let gets = vec![Get::new(page(number), arena.target(0).expect("it is free"))];
            let mut get = store.get_into(gets, GetOptions::default());
            let ended = poll_once(&mut get);
            drop((arena, registration));
            let served = match ended {
                Some(served) => served,
                None => get.await,
            };
            served[0].as_ref().unwrap();
        }
    }
}

/// Includes lengths that are not a multiple of a block, from and to unaligned memory.
pub(super) async fn every_length_is_stored_and_read(bench: Bench) {
    let max = bench.max();
    let aligned = Arena::new(2, max.next_multiple_of(4096)).expect("there is memory");
    let _registration = bench.store().register(&aligned).expect("it is new");
    let lengths = [0, 1, 79, 511, 512, 513, 4095, 4096, 4097, 8192, 8193, max - 1, max];
    for (number, length) in (0..).zip(lengths.into_iter().filter(|length| *length <= max)) {
        for (arena, id) in [(&bench.arena, page(2 * number)), (&aligned, page(2 * number + 1))] {
            let puts = vec![Put::new(id, filled(arena, 0, id, length))];
            let stored = bench.store().put_from(puts, PutOptions::default()).await;
            assert_eq!(stored, [Ok(Stored::New)], "{length} bytes");
            bench.get_at(1, id, length).await.unwrap();
            let mut target = aligned.target(1).expect("it is free").first(length);
            target.fill(0xEE);
            let gets = vec![Get::new(id, target)];
            bench.store().get_into(gets, GetOptions::default()).await.remove(0).unwrap();
            let read = aligned.source(1).expect("it came back").first(length);
            assert!(crate::objects::is_right(&id, &read), "{length} bytes");
            bench.remove(id, Removal::Plain).await.unwrap();
        }
    }
}

/// Nothing of the object stays.
pub(super) async fn an_object_that_is_too_large_is_refused(bench: Bench) {
    let max = bench.max();
    let large = Arena::new(1, max + 1).expect("there is memory");
    let _registration = bench.store().register(&large).expect("it is new");
    let puts = vec![Put::new(page(0), filled(&large, 0, page(0), max + 1))];
    let refused = bench.store().put_from(puts, PutOptions::default()).await;
    assert_eq!(refused, [Err(StoreError::TooLarge { bytes: max + 1, max })]);
    assert!(large.target(0).is_ok(), "its page came back");
    assert!(!bench.is_present(page(0)).await);
    bench.assert_empties(&[]).await;
    bench.put(0).await;
    bench.get(0).await.unwrap();
}

/// A short read must not count as complete: F12.
pub(super) async fn a_target_of_another_length_is_refused_and_the_object_stays(bench: Bench) {
    let (id, found) = (page(0), 5000.min(bench.max() - 1));
    let puts = vec![bench.put_of(0, id, found)];
    assert_eq!(bench.store().put_from(puts, PutOptions::default()).await, [Ok(Stored::New)]);
    for expected in [0, 1, found - 1, found + 1, bench.max()] {
        let refused = bench.get_id(id, expected).await;
        assert_eq!(refused, Err(StoreError::Length { expected, found }));
        bench.get_id(id, found).await.unwrap();
    }
    let found = bench.store().exists(&[id], ExistsOptions::default()).await.remove(0);
    assert_ne!(found, Ok(Presence::Absent));
}
