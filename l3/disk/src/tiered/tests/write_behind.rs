//! Tests of write-behind.

use super::*;
use terrace_l3::Header;

#[tokio::test]
async fn a_write_behind_put_returns_before_the_disk_has_the_object() {
    let bench = TestTiers::writing_behind(4);
    bench.gate.shut_for_writes();
    assert_eq!(bench.put(id(1)).await, Ok(Stored::New));
    assert_eq!(bench.put(id(1)).await, Ok(Stored::AlreadyThere));
    assert_eq!(bench.get(id(1)).await, Ok(Place::Memory));
    let put = bench.put_of(id(2));
    let twice = bench.spawn_put(vec![put.share(), put]).await.unwrap();
    assert_eq!(twice, [Ok(Stored::New), Ok(Stored::AlreadyThere)]);
    assert_eq!(unwritten(&bench), 2);
    // Half of the slots are waiting for the disk.
    let third = bench.spawn_put(vec![bench.put_of(id(3))]);
    let flush = tokio::spawn({
        let store = bench.store.clone();
        async move { store.flush().await }
    });
    sleep(Duration::from_millis(5)).await;
    assert!(!third.is_finished() && !flush.is_finished());
    bench.gate.open_for_writes();
    assert_eq!(third.await.unwrap(), [Ok(Stored::New)]);
    assert_eq!(flush.await.unwrap(), Ok(()));
    bench.store.flush().await.unwrap();
    for key in 1..4 {
        assert!(bench.disk().length(&id(key)).is_some(), "{key}");
        assert!(bench.get(id(key)).await.is_ok());
    }
    assert_eq!(unwritten(&bench), 0);
}

#[tokio::test]
async fn a_change_of_an_object_in_write_behind_waits_for_the_disk() {
    let bench = TestTiers::writing_behind(8);
    bench.gate.shut_for_writes();
    for key in 1..5 {
        assert_eq!(bench.put(id(key)).await, Ok(Stored::New));
    }
    let store = bench.store.clone();
    let removal = tokio::spawn(async move { store.remove(&[id(1)], Removal::Plain).await });
    let store = bench.store.clone();
    let pin = tokio::spawn(async move { store.pin(&[id(2)], HARD).await });
    let replaced = bench.spawn_put(vec![bench.put_of(id(3).with_generation(1))]);
    sleep(Duration::from_millis(5)).await;
    assert!(!removal.is_finished() && !pin.is_finished() && !replaced.is_finished());
    assert_eq!(bench.get(id(1)).await, Ok(Place::Memory));
    bench.gate.open_for_writes();
    assert_eq!(removal.await.unwrap(), [Ok(())]);
    assert_eq!(pin.await.unwrap(), [Ok(())]);
    assert_eq!(replaced.await.unwrap(), [Ok(Stored::New)]);
    assert_eq!(bench.get(id(1)).await, Err(StoreError::Missing));
    assert_eq!(bench.disk().length(&id(1)), None);
    assert_eq!(bench.get(id(3)).await, Err(StoreError::Missing));
    assert_eq!(bench.get(id(3).with_generation(1)).await, Ok(Place::Memory));
    let refused = bench.disk().remove(&[id(2)], Removal::Forced).await;
    assert_eq!(refused, [Err(StoreError::Pinned)]);
    assert_eq!(bench.store.shutdown().await, Ok(()));
}

/// Without the disk, whose threads run in real time while the paused clock runs ahead.
#[tokio::test(start_paused = true)]
async fn the_store_is_idle_a_while_after_the_last_load() {
    let bench = TestTiers::writing_behind(16);
    let behind = &bench.store.shared.behind;
    let began = Instant::now();
    let load = behind.transfers();
    let mut quiet = std::pin::pin!(behind.wait_for_idle(began + Duration::from_secs(10)));
    let waited = tokio::time::timeout(Duration::from_millis(200), &mut quiet).await;
    assert!(waited.is_err(), "a load is in progress");
    drop(load);
    quiet.await;
    let waited = began.elapsed();
    let wanted = Duration::from_millis(250)..Duration::from_millis(260);
    assert!(wanted.contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn writing_waits_for_loads_within_a_limit() {
    let bench = TestTiers::writing_behind(16);
    let load = held_load(&bench).await;
    bench.gate.shut_for_writes();
    assert_eq!(bench.put(id(1)).await, Ok(Stored::New));
    assert_eq!(bench.put(id(2)).await, Ok(Stored::New));
    advance(Duration::from_millis(200)).await;
    assert_eq!(bench.gate.held_writes(), 0, "a load is in progress");
    sleep(Duration::from_millis(60)).await;
    assert_eq!(bench.gate.held_writes(), 2, "the load takes too long");

    assert_eq!(bench.put(id(3)).await, Ok(Stored::New));
    advance(Duration::from_millis(100)).await;
    assert_eq!(bench.gate.held_writes(), 2);
    let store = bench.store.clone();
    let removal = tokio::spawn(async move { store.remove(&[id(3)], Removal::Plain).await });
    sleep(Duration::from_millis(10)).await;
    assert_eq!(bench.gate.held_writes(), 3, "a call waits for it");

    bench.gate.open_for_writes();
    assert_eq!(removal.await.unwrap(), [Ok(())]);
    bench.gate.shut_for_writes();
    assert_eq!(bench.put(id(4)).await, Ok(Stored::New));
    bench.gate.open();
    assert!(load.await.unwrap()[0].is_ok());
    sleep(Duration::from_millis(60)).await;
    assert_eq!(bench.gate.held_writes(), 1, "no load is in progress");
    bench.gate.open_for_writes();
    bench.store.flush().await.unwrap();
}

/// Less than a fourth of the slots can still wait for the disk: writing starts at once.
#[tokio::test(start_paused = true)]
async fn writing_does_not_wait_when_room_is_short() {
    let bench = TestTiers::writing_behind(8);
    let load = held_load(&bench).await;
    bench.gate.shut_for_writes();
    for key in 1..3 {
        assert_eq!(bench.put(id(key)).await, Ok(Stored::New));
    }
    advance(Duration::from_millis(100)).await;
    assert_eq!(bench.gate.held_writes(), 0);
    assert_eq!(bench.put(id(3)).await, Ok(Stored::New));
    sleep(Duration::from_millis(10)).await;
    assert_eq!(bench.gate.held_writes(), 3);
    bench.gate.open();
    bench.gate.open_for_writes();
    assert!(load.await.unwrap()[0].is_ok());
    bench.store.flush().await.unwrap();
}

#[tokio::test]
async fn an_object_that_the_disk_refuses_stays_in_memory() {
    let bench = TestTiers::writing_behind(8);
    bench.gate.writes_fail.store(true, Ordering::Relaxed);
    assert_eq!(bench.put(id(1)).await, Ok(Stored::New));
    bench.store.flush().await.unwrap();
    assert_eq!((bench.disk().length(&id(1)), unwritten(&bench)), (None, 0));
    assert_eq!(bench.get(id(1)).await, Ok(Place::Memory));
    let durable = PutOptions { pin: None, durable: true };
    assert!(bench.put_with(id(2), durable).await.unwrap_err().is_unwell(), "it is not put off");
}

/// The disk gets the checksum of the bytes that were put, not of those in memory at the time of
/// writing.
#[tokio::test]
async fn bytes_changed_before_writing_are_not_served() {
    let bench = TestTiers::writing_behind(8);
    bench.arena.target(0).unwrap().fill(byte(&id(1)));
    let header = Header::new(id(1), &bench.arena.source(0).unwrap());
    bench.arena.target(0).unwrap()[100] ^= 1;
    let put = Put::described(&header, bench.arena.source(0).unwrap());
    assert_eq!(bench.disk().put_from(vec![put], PutOptions::default()).await, [Ok(Stored::New)]);
    let damaged = bench.get(id(1)).await;
    assert!(matches!(damaged, Err(StoreError::Corrupt(_))), "{damaged:?}");
}

/// A load from disk that ends when the gate is opened.
async fn held_load(bench: &TestTiers) -> JoinHandle<Results<Served>> {
    bench.put_on_disk(&[id(9)]).await;
    bench.store.flush().await.unwrap();
    bench.gate.shut();
    let store = bench.store.clone();
    let get = Get::new(id(9), bench.arena.target(60).unwrap());
    let load = tokio::spawn(async move { store.get_into(vec![get], GetOptions::default()).await });
    bench.at_the_gate(1).await;
    load
}

fn unwritten(bench: &TestTiers) -> u64 {
    let figures = bench.store.stats().figures;
    let figure = figures.iter().find(|it| it.name == "terrace_l3_unwritten_objects").unwrap();
    figure.values[0].1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tiers_agree_under_load_when_written_behind() {
    agree_under_load(TestTiers::writing_behind(5)).await;
}
