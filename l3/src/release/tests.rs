use std::time::Duration;

use tokio::time::{advance, sleep};

use super::*;
use crate::guard::scripted::{HANGING, HARD, Scripted, broken, get, id, present, put, put_pinned};
use crate::stats::ReleaseStats;

async fn releases(stored: &[ObjectId]) -> (Scripted, Releases, Arena) {
    let config = ReleaseConfig { retry_ms: 100, retry_max_ms: 400, ..ReleaseConfig::default() };
    let scripted = Scripted::default();
    let releases = Releases::new(scripted.store(), config);
    let arena = Arena::new(8, 64).unwrap();
    let results = put(&releases, &arena, stored).await;
    assert_eq!(results, vec![Ok(Stored::New); stored.len()]);
    scripted.calls();
    (scripted, releases, arena)
}

fn stats(releases: &Releases) -> ReleaseStats {
    releases.stats().release.unwrap()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[tokio::test(start_paused = true)]
async fn what_is_released_is_removed_and_nothing_else() {
    let (scripted, releases, arena) = releases(&[id(1), id(2), id(2).with_generation(1)]).await;
    let registration = releases.register(&arena).unwrap();
    releases.release(vec![id(2), id(3)]).await;
    assert_eq!(scripted.calls(), [("remove", 2)]);
    let ids = [id(1), id(2), id(2).with_generation(1)];
    assert_eq!(ids.map(|id| scripted.holds(id)), [true, false, true]);
    assert_eq!(present(&releases, &ids).await, [true, false, true]);
    let found: Vec<bool> = get(&releases, &arena, &ids).await.iter().map(Result::is_ok).collect();
    assert_eq!(found, [true, false, true]);
    assert_eq!(scripted.calls(), [("exists", 2), ("get", 2)]);
    let expected = ReleaseStats { released: 2, gets_refused: 1, ..ReleaseStats::default() };
    assert_eq!(stats(&releases), expected);
    drop(registration);
}

#[tokio::test(start_paused = true)]
async fn f34_a_released_object_cannot_be_had_while_its_removal_lasts() {
    let (scripted, releases, arena) = releases(&[id(1)]).await;
    scripted.script(|script| {
        script.slow = ["remove", "exists", "get", "pin"].map(|call| (call, HANGING)).into();
    });
    let start = Instant::now();
    let released = releases.release(vec![id(1)]);
    assert_eq!(get(&releases, &arena, &[id(1)]).await, [Err(StoreError::Missing)]);
    assert_eq!(present(&releases, &[id(1)]).await, [false]);
    assert_eq!(releases.pin(&[id(1)], HARD).await, [Err(StoreError::Missing)]);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(put(&releases, &arena, &[id(1)]).await, [Err(StoreError::BeingWritten)]);
    released.await;
    assert!(!scripted.holds(id(1)));
}

#[tokio::test(start_paused = true)]
async fn f34_a_released_object_cannot_be_had_though_the_store_only_says_it_is_removed() {
    let (scripted, releases, arena) = releases(&[id(1)]).await;
    scripted.script(|script| script.removals_lie = true);
    releases.release(vec![id(1)]).await;
    advance(Duration::from_secs(599)).await;
    assert!(scripted.holds(id(1)));
    assert_eq!(get(&releases, &arena, &[id(1)]).await, [Err(StoreError::Missing)]);
    assert_eq!((stats(&releases).gets_refused, stats(&releases).parked), (1, 0));

    let again = put_pinned(&releases, &arena, &[id(1), id(2)], Some(HARD)).await;
    assert_eq!(again, [Err(StoreError::BeingWritten), Ok(Stored::New)]);
    assert_eq!(present(&releases, &[id(1), id(2)]).await, [false, true]);
    scripted.script(|script| script.removals_lie = false);
    sleep(ms(101)).await;
    assert!(!scripted.holds(id(1)), "the put has shown that it lingered");
}

#[tokio::test(start_paused = true)]
async fn f35_a_removal_that_fails_is_tried_again_until_it_succeeds() {
    let (scripted, releases, arena) = releases(&[id(1), id(2)]).await;
    scripted.script(|script| script.removals_fail = 4);
    let start = Instant::now();
    releases.release(vec![id(1)]).await;
    assert_eq!((stats(&releases).parked, scripted.holds(id(1))), (1, true));
    assert_eq!(get(&releases, &arena, &[id(1)]).await, [Err(StoreError::Missing)]);
    assert_eq!(scripted.calls(), [("remove", 1)]);
    while scripted.holds(id(1)) {
        sleep(ms(1)).await;
    }
    assert_eq!(start.elapsed().as_millis() / 100, 1 + 2 + 4 + 4);
    assert_eq!(scripted.calls(), [("remove", 1); 4], "woken, not polling");
    let ReleaseStats { parked, parked_most, retries, recovered, .. } = stats(&releases);
    assert_eq!([parked, parked_most, retries, recovered], [0, 1, 4, 1]);
    assert_eq!(present(&releases, &[id(1), id(2)]).await, [false, true]);
}

#[tokio::test(start_paused = true)]
async fn f35_nothing_leaks_when_the_store_is_down_for_a_while() {
    let (scripted, releases, arena) = releases(&[]).await;
    let ids: Vec<ObjectId> = (0..5).map(id).collect();
    put_pinned(&releases, &arena, &ids, Some(HARD)).await;
    scripted.is(Some(broken()));
    for id in &ids {
        releases.release(vec![*id]).await;
        sleep(ms(30)).await;
    }
    assert_eq!((stats(&releases).parked, stats(&releases).recovered), (5, 0));
    scripted.is(None);
    sleep(ms(401)).await;
    assert!(scripted.script(|script| script.objects.is_empty()), "nor do their pins");
    assert_eq!((stats(&releases).parked, stats(&releases).recovered), (0, 5));
}

#[tokio::test(start_paused = true)]
async fn f35_a_fresh_failure_waits_neither_for_older_ones_nor_for_ever() {
    let (scripted, releases, arena) = releases(&[id(1), id(2)]).await;
    scripted.script(|script| script.stuck.insert(id(1)));
    releases.release(vec![id(1)]).await;
    sleep(ms(701)).await;
    scripted.script(|script| script.removals_fail = 1);
    releases.release(vec![id(2)]).await;
    sleep(ms(101)).await;
    assert_eq!((scripted.holds(id(1)), scripted.holds(id(2))), (true, false));

    scripted.script(|script| script.stuck.clear());
    releases.release(vec![id(1)]).await;
    assert_eq!(stats(&releases).parked, 0, "and now there is nothing to wait for");
    put(&releases, &arena, &[id(3)]).await;
    scripted.script(|script| script.removals_fail = 1);
    releases.release(vec![id(3)]).await;
    sleep(ms(101)).await;
    assert!(!scripted.holds(id(3)));
}

#[tokio::test(start_paused = true)]
async fn f35_a_store_that_miscounts_has_removed_nothing() {
    let (scripted, releases, arena) = releases(&[id(1), id(2)]).await;
    scripted.script(|script| script.miscounts = true);
    releases.release(vec![id(1), id(2)]).await;
    assert_eq!(stats(&releases).parked, 2);
    assert!(get(&releases, &arena, &[id(3), id(4)]).await.iter().all(Result::is_err));
    scripted.script(|script| script.miscounts = false);
    sleep(ms(101)).await;
    assert_eq!((stats(&releases).parked, stats(&releases).recovered), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_release_removes_what_is_pinned() {
    let (scripted, releases, arena) = releases(&[]).await;
    put_pinned(&releases, &arena, &[id(1)], Some(HARD)).await;
    assert_eq!(releases.remove(&[id(1)], Removal::Forced).await, [Err(StoreError::Pinned)]);
    releases.release(vec![id(1)]).await;
    assert_eq!((scripted.holds(id(1)), stats(&releases).parked), (false, 0));
}

#[tokio::test(start_paused = true)]
async fn a_put_makes_it_available_again() {
    let (scripted, releases, arena) = releases(&[id(1)]).await;
    releases.release(vec![id(1)]).await;
    arena.target(0).unwrap().fill(9);
    assert_eq!(put(&releases, &arena, &[id(1), id(2)]).await, vec![Ok(Stored::New); 2]);
    assert!(get(&releases, &arena, &[id(1)]).await[0].is_ok());
    assert_eq!(arena.source(1).unwrap()[..], [9; 64]);
    advance(Duration::from_secs(3600)).await;
    assert!(scripted.holds(id(1)));
}

#[tokio::test(start_paused = true)]
async fn a_put_over_lingering_bytes_is_refused_as_their_removal_is() {
    let (scripted, releases, arena) = releases(&[id(1)]).await;
    scripted.script(|script| script.removals_fail = 2);
    releases.release(vec![id(1)]).await;
    let results = put(&releases, &arena, &[id(2), id(1), id(3)]).await;
    assert_eq!(results, [Ok(Stored::New), Err(broken()), Ok(Stored::New)]);
    assert_eq!(present(&releases, &[id(1), id(2)]).await, [false, true]);

    arena.target(0).unwrap().fill(9);
    assert_eq!(put(&releases, &arena, &[id(1)]).await, [Ok(Stored::New)], "its removal succeeded");
    assert!(get(&releases, &arena, &[id(1)]).await[0].is_ok());
    assert_eq!(arena.source(1).unwrap()[..], [9; 64]);
    sleep(Duration::from_secs(60)).await;
    assert!(scripted.holds(id(1)), "the parked removal is called off");
    let ReleaseStats { parked, retries, recovered, .. } = stats(&releases);
    assert_eq!([parked, retries, recovered], [0, 2, 1]);
}

#[tokio::test(start_paused = true)]
async fn an_object_released_while_it_is_put_does_not_stay() {
    let (scripted, releases, arena) = releases(&[]).await;
    scripted.script(|script| script.slow.insert("put", ms(500)));
    let impatient = timeout_at(Instant::now() + ms(1), put(&releases, &arena, &[id(1)])).await;
    assert!(impatient.is_err());
    releases.release(vec![id(1)]).await;
    arena.returned(0).await;
    assert!(scripted.holds(id(1)), "the removal came before the bytes");
    assert_eq!(present(&releases, &[id(1)]).await, [false]);
    sleep(ms(101)).await;
    assert!(!scripted.holds(id(1)));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_nobody_waits_for_goes_on() {
    let (scripted, releases, _) = releases(&[id(1)]).await;
    drop(releases.release(vec![id(1)]));
    sleep(ms(1)).await;
    assert!(!scripted.holds(id(1)));
}

#[tokio::test(start_paused = true)]
async fn retries_end_with_the_store() {
    let scripted = Scripted::default();
    let store = scripted.store();
    let releases = Releases::new(store.clone(), ReleaseConfig::default());
    scripted.script(|script| script.removals_fail = u32::MAX);
    releases.release(vec![id(1)]).await;
    assert!(Arc::strong_count(&store) > 1);
    drop(releases);
    sleep(ms(1)).await;
    assert_eq!(Arc::strong_count(&store), 1, "no task holds it any more");
}

#[tokio::test(start_paused = true)]
async fn shutdown_tries_what_is_parked_once_more() {
    let ids = [1, 2, 3].map(id);
    let (scripted, releases, _) = releases(&ids).await;
    scripted.script(|script| script.removals_fail = 4);
    releases.release(ids.to_vec()).await;
    scripted.script(|script| script.slow.insert("remove", ms(10)));
    scripted.calls();
    let in_flight = releases.release(vec![id(4)]);
    tokio::task::yield_now().await;
    assert_eq!(releases.shutdown().await, Ok(()));
    assert_eq!(scripted.calls(), [("remove", 1), ("remove", 4), ("shutdown", 1)]);
    in_flight.await;
    assert!(scripted.script(|script| script.objects.is_empty()));
    scripted.script(|script| script.failing.insert("remove", StoreError::Closed));
    releases.release(vec![id(5)]).await;
    scripted.calls();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(scripted.calls(), [], "nothing is tried any more");
}
