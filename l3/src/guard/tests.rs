use std::time::Duration;

use tokio::time::{Instant, advance, sleep};

use super::scripted::{HANGING, HARD, Scripted, broken, get, id, present, put};
use super::*;
use crate::object::Mismatch;
use crate::stats::BreakerState;

fn guarded(config: GuardConfig) -> (Scripted, Guarded, Arena) {
    let scripted = Scripted::default();
    let guarded = Guarded::new(scripted.store(), config);
    (scripted, guarded, Arena::new(8, 64).unwrap())
}

/// A guard without a negative cache, so that every call counts.
fn forgetful() -> GuardConfig {
    GuardConfig { negative_max: 0, failures_to_open: 2, pause_ms: 100, ..GuardConfig::default() }
}

fn stats(guarded: &Guarded) -> GuardStats {
    guarded.stats().guard.unwrap()
}

fn unavailable(retry_after_ms: u64) -> StoreError {
    StoreError::Unavailable { retry_after: Duration::from_millis(retry_after_ms) }
}

fn timed_out(limit_ms: u64) -> StoreError {
    StoreError::TimedOut(Duration::from_millis(limit_ms))
}

#[tokio::test(start_paused = true)]
async fn a_healthy_store_answers_itself() {
    let (scripted, guarded, arena) = guarded(GuardConfig::default());
    let registration = guarded.register(&arena).unwrap();
    assert!(guarded.register(&arena).is_err());
    drop(registration);

    arena.target(0).unwrap().fill(7);
    assert_eq!(
        put(&guarded, &arena, &[id(1), id(1)]).await,
        [Ok(Stored::New), Ok(Stored::AlreadyThere)]
    );
    assert_eq!(present(&guarded, &[id(2), id(1)]).await, [false, true]);
    assert!(get(&guarded, &arena, &[id(1)]).await[0].is_ok());
    assert_eq!(arena.source(1).unwrap()[..], [7; 64]);
    assert_eq!(guarded.pin(&[id(1)], HARD).await, [Ok(())]);
    assert_eq!(guarded.remove(&[id(1)], Removal::Forced).await, [Err(StoreError::Pinned)]);
    assert_eq!(guarded.unpin(&[id(1)], HARD).await, [Ok(())]);
    assert_eq!(guarded.remove(&[id(1)], Removal::Forced).await, [Ok(())]);
    assert_eq!(guarded.flush().await, Ok(()));
    assert_eq!(guarded.shutdown().await, Ok(()));
    assert_eq!(stats(&guarded), GuardStats::default());
    scripted.calls();
    assert_eq!(put(&guarded, &arena, &[]).await, []);
    assert_eq!(scripted.calls(), [], "nothing to ask");
}

#[tokio::test(start_paused = true)]
async fn every_call_has_its_deadline() {
    let (scripted, guarded, arena) =
        guarded(GuardConfig { failures_to_open: 100, ..GuardConfig::default() });
    let all = ["exists", "put", "get", "pin", "unpin", "remove", "flush", "shutdown"];
    scripted.script(|script| script.slow = all.map(|call| (call, HANGING)).into());
    let ids = [id(1), id(2)];
    let exists = guarded.exists(&ids, ExistsOptions::default()).await;
    assert_eq!(exists, vec![Err(timed_out(50)); 2]);
    assert_eq!(put(&guarded, &arena, &ids).await, vec![Err(timed_out(5_000)); 2]);
    assert_eq!(get(&guarded, &arena, &ids).await, vec![Err(timed_out(1_000)); 2]);
    assert_eq!(guarded.pin(&ids, Pin::Soft).await, vec![Err(timed_out(1_000)); 2]);
    assert_eq!(guarded.unpin(&ids, Pin::Soft).await, vec![Err(timed_out(1_000)); 2]);
    assert_eq!(guarded.remove(&ids, Removal::Plain).await, vec![Err(timed_out(1_000)); 2]);
    assert_eq!(guarded.flush().await, Err(timed_out(30_000)));
    assert_eq!(guarded.shutdown().await, Err(timed_out(60_000)));
    assert_eq!((stats(&guarded).timed_out, stats(&guarded).overdue), (8, 8));
}

#[tokio::test(start_paused = true)]
async fn a_late_operation_continues_and_keeps_its_pages() {
    let (scripted, guarded, arena) = guarded(GuardConfig::default());
    scripted.script(|script| script.slow.insert("put", Duration::from_secs(8)));
    assert_eq!(put(&guarded, &arena, &[id(1)]).await, [Err(timed_out(5_000))]);
    assert!(arena.target(0).is_err(), "the store may still read from the page");
    arena.returned(0).await;
    sleep(Duration::from_millis(1)).await;
    assert!(scripted.holds(id(1)));
    assert_eq!(stats(&guarded).overdue, 0);
}

#[tokio::test(start_paused = true)]
async fn f30_a_hanging_store_costs_its_deadlines_and_then_nothing() {
    let (scripted, guarded, _) = guarded(forgetful());
    scripted.script(|script| script.slow.insert("exists", HANGING));
    let start = Instant::now();
    for _ in 0..1000 {
        assert!(guarded.exists(&[id(1)], ExistsOptions::default()).await[0].is_err());
    }
    assert_eq!(start.elapsed(), Duration::from_millis(100));
    assert_eq!((scripted.calls().len(), stats(&guarded).timed_out), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn f30_a_failed_store_is_not_called_during_the_pause() {
    let (scripted, guarded, _) = guarded(forgetful());
    scripted.is(Some(broken()));
    scripted.script(|script| script.slow.insert("remove", Duration::from_millis(900)));
    let start = Instant::now();
    let remove = async || guarded.remove(&[id(1), id(2)], Removal::Plain).await;
    assert_eq!(remove().await, vec![Err(broken()); 2]);
    assert_eq!(remove().await, vec![Err(broken()); 2]);
    for _ in 0..1000 {
        assert_eq!(remove().await, vec![Err(unavailable(100)); 2]);
    }
    assert_eq!(start.elapsed(), Duration::from_millis(1800));
    assert_eq!(scripted.calls().len(), 2);
    let stats = stats(&guarded);
    assert_eq!((stats.breaker, stats.opened, stats.refused), (BreakerState::Open, 1, 1000));
}

#[tokio::test(start_paused = true)]
async fn half_open_lets_one_probe_through_and_its_success_closes() {
    let (scripted, guarded, _) = guarded(forgetful());
    scripted.is(Some(broken()));
    for _ in 0..2 {
        assert_eq!(guarded.flush().await, Err(broken()));
    }
    advance(Duration::from_millis(100)).await;
    scripted.calls();
    assert_eq!(guarded.flush().await, Err(broken()), "a probe that fails");
    assert_eq!(guarded.flush().await, Err(unavailable(200)), "so the pause is longer");

    advance(Duration::from_millis(200)).await;
    scripted.is(None);
    scripted.script(|script| script.slow.insert("flush", Duration::from_secs(1)));
    let (probe, refused) = tokio::join!(guarded.flush(), guarded.flush());
    assert_eq!((probe, refused), (Ok(()), Err(unavailable(100))));
    assert_eq!(scripted.calls().len(), 2);
    let (one, another) = tokio::join!(guarded.flush(), guarded.flush());
    assert_eq!((one, another), (Ok(()), Ok(())));
    assert_eq!((stats(&guarded).breaker, stats(&guarded).opened), (BreakerState::Closed, 2));
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_probe_still_counts() {
    let (scripted, guarded, _) = guarded(forgetful());
    scripted.is(Some(broken()));
    for _ in 0..2 {
        assert!(guarded.flush().await.is_err());
    }
    advance(Duration::from_millis(100)).await;
    scripted.is(None);
    scripted.script(|script| script.slow.insert("flush", Duration::from_secs(1)));
    let given_up = timeout(Duration::from_millis(1), guarded.flush()).await;
    assert!(given_up.is_err());
    assert_eq!(stats(&guarded).breaker, BreakerState::HalfOpen);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(stats(&guarded).breaker, BreakerState::Closed);
}

#[test]
fn a_probe_that_dies_with_its_runtime_makes_room_for_the_next() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_time().build().unwrap()
    };
    let (scripted, guarded, _) = guarded(GuardConfig { pause_max_ms: 0, ..forgetful() });
    scripted.is(Some(broken()));
    runtime().block_on(async {
        for _ in 0..2 {
            assert!(guarded.flush().await.is_err());
        }
        scripted.is(None);
        scripted.script(|script| script.slow.insert("flush", HANGING));
        assert!(timeout(Duration::from_millis(1), guarded.flush()).await.is_err());
        assert_eq!(stats(&guarded).breaker, BreakerState::HalfOpen);
    });
    scripted.script(|script| script.slow.clear());
    assert_eq!(runtime().block_on(guarded.flush()), Ok(()));
    assert_eq!(stats(&guarded).breaker, BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn an_open_breaker_does_not_keep_a_store_from_being_shut_down() {
    let (scripted, guarded, arena) = guarded(forgetful());
    scripted.is(Some(broken()));
    for _ in 0..2 {
        assert!(guarded.flush().await.is_err());
    }
    scripted.is(None);
    assert!(guarded.register(&arena).is_ok());
    assert_eq!(guarded.shutdown().await, Ok(()));
    assert_eq!(stats(&guarded).breaker, BreakerState::Open);
}

#[tokio::test(start_paused = true)]
async fn calls_that_never_end_are_bounded() {
    let (scripted, guarded, _) =
        guarded(GuardConfig { failures_to_open: 100, overdue_max: 3, ..GuardConfig::default() });
    scripted.script(|script| script.slow.insert("remove", Duration::from_secs(10)));
    for _ in 0..3 {
        assert_eq!(guarded.remove(&[id(1)], Removal::Plain).await, [Err(timed_out(1_000))]);
    }
    assert_eq!(guarded.flush().await, Err(unavailable(500)));
    assert_eq!((stats(&guarded).overdue, stats(&guarded).refused), (3, 1));
    sleep(Duration::from_secs(8)).await;
    assert_eq!(stats(&guarded).overdue, 2);
    assert_eq!(guarded.flush().await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn f24_an_object_that_is_present_but_never_comes_is_asked_for_once() {
    let (scripted, guarded, arena) = guarded(GuardConfig::default());
    put(&guarded, &arena, &[id(1), id(2)]).await.iter().for_each(|put| assert!(put.is_ok()));
    scripted.script(|script| script.slow.insert("get", Duration::from_secs(3)));
    assert_eq!(present(&guarded, &[id(1)]).await, [true]);
    assert_eq!(get(&guarded, &arena, &[id(1)]).await, [Err(timed_out(1_000))]);
    arena.returned(1).await;
    scripted.script(|script| script.slow.clear());
    scripted.calls();

    let start = Instant::now();
    for _ in 0..100 {
        assert_eq!(present(&guarded, &[id(1)]).await, [false]);
        assert_eq!(get(&guarded, &arena, &[id(1)]).await, [Err(StoreError::Missing)]);
    }
    assert_eq!((start.elapsed(), scripted.calls()), (Duration::ZERO, vec![]));
    assert_eq!((stats(&guarded).negative, stats(&guarded).negative_hits), (1, 200));

    advance(Duration::from_secs(10)).await;
    assert_eq!(present(&guarded, &[id(1)]).await, [true]);
    assert!(get(&guarded, &arena, &[id(1)]).await[0].is_ok());
    assert_eq!(stats(&guarded).negative, 0);
}

#[tokio::test(start_paused = true)]
async fn f24_an_absence_is_cached_even_if_the_caller_stops_waiting() {
    let (scripted, guarded, arena) = guarded(GuardConfig::default());
    put(&guarded, &arena, &[id(1)]).await[0].clone().unwrap();
    scripted.script(|script| script.slow.insert("get", HANGING));
    let impatient = timeout(Duration::from_millis(10), get(&guarded, &arena, &[id(1)])).await;
    assert!(impatient.is_err());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(present(&guarded, &[id(1)]).await, [false]);
}

#[tokio::test(start_paused = true)]
async fn only_the_rest_of_a_batch_is_asked_for() {
    let (scripted, guarded, arena) = guarded(GuardConfig::default());
    put(&guarded, &arena, &[id(2), id(4)]).await;
    let missing = get(&guarded, &arena, &[id(1), id(3)]).await;
    assert_eq!(missing, vec![Err(StoreError::Missing); 2]);
    scripted.calls();
    let ids = [1, 2, 3, 4, 5].map(id);
    assert_eq!(present(&guarded, &ids).await, [false, true, false, true, false]);
    let found: Vec<bool> = get(&guarded, &arena, &ids).await.iter().map(Result::is_ok).collect();
    assert_eq!(found, [false, true, false, true, false]);
    assert_eq!(scripted.calls(), [("exists", 3), ("get", 3)]);
}

#[tokio::test(start_paused = true)]
async fn an_object_is_forgotten_when_it_is_stored_and_absence_is_not_remembered() {
    let (scripted, guarded, arena) = guarded(GuardConfig::default());
    assert_eq!(present(&guarded, &[id(1)]).await, [false]);
    put(&scripted, &arena, &[id(1)]).await;
    assert_eq!(present(&guarded, &[id(1)]).await, [true], "objects appear");

    let damaged = StoreError::Corrupt(Mismatch::Payload);
    scripted.script(|script| script.failing.insert("get", damaged.clone()));
    assert_eq!(get(&guarded, &arena, &[id(1)]).await, [Err(damaged)]);
    scripted.is(None);
    assert_eq!(present(&guarded, &[id(1)]).await, [false]);
    assert_eq!(put(&guarded, &arena, &[id(1)]).await, [Ok(Stored::AlreadyThere)]);
    assert_eq!(present(&guarded, &[id(1)]).await, [true]);

    scripted.script(|script| script.failing.insert("get", StoreError::Full));
    assert_eq!(get(&guarded, &arena, &[id(1)]).await, [Err(StoreError::Full)]);
    assert_eq!(present(&guarded, &[id(1)]).await, [true], "no sign that it cannot be read");
}

#[tokio::test(start_paused = true)]
async fn a_refused_get_says_nothing_about_its_object() {
    let (scripted, guarded, arena) =
        guarded(GuardConfig { negative_max: 10, pause_max_ms: 100, ..forgetful() });
    put(&guarded, &arena, &[id(1)]).await;
    scripted.is(Some(broken()));
    for _ in 0..2 {
        assert!(guarded.flush().await.is_err());
    }
    assert_eq!(get(&guarded, &arena, &[id(1)]).await, [Err(unavailable(100))]);
    scripted.is(None);
    advance(Duration::from_millis(100)).await;
    assert_eq!(present(&guarded, &[id(1)]).await, [true]);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_miscounts_or_panics_has_failed() {
    let (scripted, guarded, arena) = guarded(forgetful());
    scripted.script(|script| script.miscounts = true);
    let message = |result: &Result<Stored, StoreError>| result.as_ref().unwrap_err().to_string();
    let results = put(&guarded, &arena, &[id(1), id(2)]).await;
    let messages: Vec<String> = results.iter().map(message).collect();
    assert_eq!(messages, ["calling the store: 1 results for 2 objects"; 2]);
    scripted.script(|script| (script.miscounts, script.panics) = (false, true));
    let results = put(&guarded, &arena, &[id(1), id(2)]).await;
    assert!(results.iter().all(|result| message(result).contains("panicked")), "{results:?}");
    assert_eq!(results.len(), 2);
    assert_eq!(stats(&guarded).breaker, BreakerState::Open);
}
