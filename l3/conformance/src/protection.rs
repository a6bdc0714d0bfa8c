//! Protection from eviction and removal.

use terrace_l3::{ExistsOptions, Pin, PutOptions, Removal, StoreError, Stored};
use tokio::time::{Instant, sleep};

use super::Bench;
use crate::objects::{HARD, HARD_OF_ANOTHER, page};

const LEASE: ExistsOptions = ExistsOptions { prefetch_to_memory: false, lease: true };

/// Neither pressure nor a forced removal affects an object in use.
pub(super) async fn a_hard_pin_prevents_eviction_and_removal(bench: Bench) {
    bench.put(0).await;
    bench.pin(page(0), HARD).await.unwrap();
    assert_eq!(bench.put_pinned(1, HARD).await, Ok(Stored::New));
    bench.press(100).await;
    for number in [0, 1] {
        bench.get(number).await.unwrap();
        for removal in [Removal::Plain, Removal::Forced] {
            assert_eq!(bench.remove(page(number), removal).await, Err(StoreError::Pinned));
        }
        bench.unpin(page(number), HARD).await.unwrap();
    }
    bench.remove(page(0), Removal::Plain).await.unwrap();
    bench.press(10_000).await;
    assert!(!bench.is_present(page(1)).await, "without its pin it is like any other");
}

/// Pinning again has no effect. Another owner can neither pin, unpin nor remove the object.
pub(super) async fn a_hard_pin_has_one_owner(bench: Bench) {
    bench.put(0).await;
    assert_eq!(bench.unpin(page(0), HARD).await, Err(StoreError::NotPinned));
    for _ in 0..3 {
        bench.pin(page(0), HARD).await.unwrap();
    }
    assert_eq!(bench.pin(page(0), HARD_OF_ANOTHER).await, Err(StoreError::Pinned));
    assert_eq!(bench.put_pinned(0, HARD_OF_ANOTHER).await, Err(StoreError::Pinned));
    for not_this in [Pin::Soft, HARD_OF_ANOTHER] {
        assert_eq!(bench.unpin(page(0), not_this).await, Err(StoreError::NotPinned));
    }
    assert_eq!(bench.remove(page(0), Removal::Forced).await, Err(StoreError::Pinned));
    bench.unpin(page(0), HARD).await.unwrap();
    assert_eq!(bench.unpin(page(0), HARD).await, Err(StoreError::NotPinned));
    bench.pin(page(0), HARD_OF_ANOTHER).await.unwrap();
    bench.unpin(page(0), HARD_OF_ANOTHER).await.unwrap();
    bench.remove(page(0), Removal::Plain).await.unwrap();
    assert_eq!(bench.pin(page(0), HARD).await, Err(StoreError::Missing));
    assert_eq!(bench.unpin(page(0), HARD).await, Err(StoreError::Missing));
    // A pin does not outlive its object.
    bench.put(0).await;
    assert_eq!(bench.unpin(page(0), HARD).await, Err(StoreError::NotPinned));
}

/// After a put with a pin the object is pinned, whether the put stored it or not.
pub(super) async fn a_put_pins_an_existing_object(bench: Bench) {
    bench.put(0).await;
    assert_eq!(bench.put_pinned(0, HARD).await, Ok(Stored::AlreadyThere));
    assert_eq!(bench.put_pinned(0, HARD).await, Ok(Stored::AlreadyThere));
    bench.press(100).await;
    assert_eq!(bench.remove(page(0), Removal::Forced).await, Err(StoreError::Pinned));
    bench.unpin(page(0), HARD).await.unwrap();
    bench.remove(page(0), Removal::Plain).await.unwrap();
}

/// The caller need not know who has pinned or leased the object.
pub(super) async fn a_final_removal_ignores_pins_and_leases(bench: Bench) {
    for number in [0, 1] {
        assert_eq!(bench.put_pinned(number, HARD).await, Ok(Stored::New));
    }
    let leased = bench.store().exists(&[page(0)], LEASE).await.remove(0);
    assert!(leased.unwrap().is_present());
    let removed = bench.store().remove(&[page(0), page(1), page(2)], Removal::Final).await;
    assert_eq!(removed, [Ok(()), Ok(()), Err(StoreError::Missing)]);
    assert!(!bench.is_present(page(0)).await);
    bench.put(0).await;
    assert_eq!(bench.unpin(page(0), HARD).await, Err(StoreError::NotPinned));
}

/// They outlive all other objects, but no put is refused because of them.
pub(super) async fn softly_pinned_objects_are_evicted_last(bench: Bench) {
    let few = bench.backend.objects_kept / 2;
    for number in 0..few {
        assert_eq!(bench.put_pinned(number, Pin::Soft).await, Ok(Stored::New));
    }
    bench.press(100).await;
    for number in 0..few {
        bench.get(number).await.unwrap();
    }
    // From here on all objects are softly pinned and were read recently.
    let most = bench.backend.objects_max;
    for number in 1000..1000 + 2 * most {
        assert_eq!(bench.put_pinned(number, Pin::Soft).await, Ok(Stored::New), "page {number}");
        for read in (number + 1).saturating_sub(most).max(1000)..=number {
            let served = bench.get(read).await;
            assert!(matches!(served, Ok(_) | Err(StoreError::Missing)), "{served:?}");
        }
    }
    let first = page(1000);
    assert!(!bench.is_present(first).await);
}

/// It is not counted either.
pub(super) async fn a_soft_pin_does_not_prevent_removal(bench: Bench) {
    bench.put(0).await;
    bench.pin(page(0), Pin::Soft).await.unwrap();
    bench.pin(page(0), Pin::Soft).await.unwrap();
    bench.unpin(page(0), Pin::Soft).await.unwrap();
    assert_eq!(bench.unpin(page(0), Pin::Soft).await, Err(StoreError::NotPinned));
    bench.pin(page(0), Pin::Soft).await.unwrap();
    bench.remove(page(0), Removal::Plain).await.unwrap();
    bench.assert_empties(&[]).await;
}

/// Lookups that renew leases could prevent all evictions: F31.
pub(super) async fn lookups_protect_nothing(bench: Bench) {
    bench.put(0).await;
    bench.put(1).await;
    for _ in 0..10 {
        assert!(bench.is_present(page(0)).await);
    }
    bench.remove(page(0), Removal::Plain).await.unwrap();
    for number in 100..100 + 3 * bench.backend.objects_max {
        bench.put(number).await;
        bench.is_present(page(1)).await;
    }
    assert!(!bench.is_present(page(1)).await, "it was asked about, never read");
}

/// Protects from eviction and from plain removal, not from forced removal, and not for longer.
pub(super) async fn a_lease_protects_for_its_time(bench: Bench) {
    let ids = [page(0), page(1), page(2)];
    for number in 0..3 {
        bench.put(number).await;
    }
    let granted = Instant::now();
    let lasts = || granted.elapsed() < bench.backend.lease_ttl;
    let found = bench.store().exists(&ids, LEASE).await;
    assert!(found.into_iter().all(|it| it.unwrap().is_present()));
    let refused = bench.remove(page(0), Removal::Plain).await;
    assert!(refused == Err(StoreError::Leased) || !lasts(), "{refused:?}");
    for number in 100..100 + 2 * bench.backend.objects_max {
        bench.put(number).await;
        for id in ids {
            assert!(bench.is_present(id).await || !lasts(), "{id:?}");
        }
    }
    // The lease ends at the first instant beyond its duration; reads do not extend it.
    let served = bench.get(1).await;
    assert!(served.is_ok() || !lasts(), "{served:?}");
    let forced = bench.remove(page(2), Removal::Forced).await;
    assert!(forced.is_ok() || !lasts(), "{forced:?}");
    sleep(bench.backend.lease_ttl).await;
    for id in [page(0), page(1)] {
        let removed = bench.remove(id, Removal::Plain).await;
        assert!(matches!(removed, Ok(()) | Err(StoreError::Missing)), "{removed:?}");
    }
}

/// Holds for any number of leases and renewals.
pub(super) async fn leases_leave_room_for_puts(bench: Bench) {
    let count = 3 * bench.backend.objects_max;
    let ids: Vec<_> = (0..count).map(page).collect();
    for number in 0..count {
        bench.put(number).await;
        bench.store().exists(&ids, LEASE).await;
    }
    let leases: u64 = super::tiers(&bench.store().stats()).iter().map(|tier| tier.leases).sum();
    assert!(leases > 0);
}

/// While other objects are stored and evicted.
pub(super) async fn frequently_read_objects_stay(bench: Bench) {
    for number in 0..3 {
        bench.put(number).await;
    }
    for number in 100..100 + 3 * bench.backend.objects_max {
        for number in 0..3 {
            bench.get(number).await.unwrap();
        }
        bench.put(number).await;
    }
}

/// The error comes within a bounded time, and existing objects stay readable.
pub(super) async fn a_store_full_of_pins_reports_it_and_recovers(bench: Bench) {
    let mut number = 0;
    let refused = loop {
        let start = Instant::now();
        match bench.put_pinned(number, HARD).await {
            Ok(stored) => assert_eq!(stored, Stored::New),
            Err(error) => {
                // The call may take slightly longer than the wait for room.
                let patience = bench.backend.full_wait * 2 + std::time::Duration::from_secs(2);
                assert!(start.elapsed() < patience, "{:?}", start.elapsed());
                break error;
            }
        }
        number += 1;
        assert!(number <= bench.backend.objects_max, "so many cannot be there");
    };
    assert_eq!(refused, StoreError::Full);
    assert!(number >= bench.backend.objects_kept, "there is room for more than {number}");
    assert_eq!(bench.put_id(page(number)).await, Err(StoreError::Full));
    assert_eq!(bench.put_id(page(0)).await, Ok(Stored::AlreadyThere));
    for number in 0..number {
        bench.get(number).await.unwrap();
    }
    // On nodes, only pins on the full node matter.
    let figures = bench.store().stats().figures;
    let is_in_one_place = figures.iter().all(|figure| figure.name != "terrace_node_up");
    let mut unpinned = 3;
    loop {
        bench.unpin(page(unpinned), HARD).await.unwrap();
        unpinned += 1;
        match bench.put_id(page(number)).await {
            Err(StoreError::Full) if !is_in_one_place && unpinned < number => {}
            stored => break assert_eq!(stored, Ok(Stored::New)),
        }
    }
    // Among so many pins it may be evicted next.
    let served = bench.get(number).await;
    assert!(matches!(served, Ok(_) | Err(StoreError::Missing)), "{served:?}");
    for pinned in (0..number).filter(|it| !(3..unpinned).contains(it)) {
        bench.get(pinned).await.unwrap();
        bench.unpin(page(pinned), HARD).await.unwrap();
    }
    let options = PutOptions { pin: None, durable: true };
    assert_eq!(bench.put_with(page(number + 1), options).await, Ok(Stored::New));
    let ids: Vec<_> = (0..number + 2).map(page).collect();
    bench.assert_empties(&ids).await;
}
