use super::library::scripted::{ClusterScript, again, library};
use super::*;
use terrace_cache::{Namespace, PageKey};
use terrace_l3::{Arena, BreakerState, GuardConfig, Guarded, Owner};

const BYTES: usize = 4096;
const TRANSFER_FAILED: i32 = -800;

#[test]
fn large_batches_are_split_if_threads_are_idle() {
    let parts = |objects| parts_of(objects, 4, 4);
    assert_eq!([0, 1, 7, 8, 32, 1024].map(parts), [0, 1, 1, 2, PARTS_MAX, PARTS_MAX]);
    assert_eq!(parts_of(32, u32::MAX, 4), 1);
    assert_eq!((parts_of(32, 4, 1), parts_of(32, 0, 2)), (1, PARTS_MAX));
}

#[test]
fn generations_of_one_object_are_not_put_concurrently() {
    let repeat = |ids: &[ObjectId]| names_repeat(ids.iter());
    assert!(!repeat(&[id(1), id(2)]));
    assert!(!repeat(&[id(1).with_generation(7), id(2).with_generation(7)]));
    assert!(repeat(&[id(1).with_generation(7), id(2), id(1).with_generation(3)]));
}

/// A store on a scripted library, and registered memory.
struct TestStore {
    script: Arc<ClusterScript>,
    store: MooncakeStore,
    arena: Arena,
    registration: Option<Registration>,
}

fn config(master: &str, quarantine_ms: u64) -> MooncakeConfig {
    MooncakeConfig {
        keep_interval_ms: 10,
        quarantine_ms,
        ..MooncakeConfig::new("", master, 64 * BYTES as u64, BYTES)
    }
}

impl TestStore {
    fn new(master: &str, quarantine_ms: u64, arena: Arena) -> Self {
        Self::with_config(config(master, quarantine_ms), arena)
    }

    fn with_config(config: MooncakeConfig, arena: Arena) -> Self {
        let master = config.master.clone();
        let store = MooncakeStore::with_library(config, library()).unwrap();
        assert!(store.wait_until_connected(Duration::from_secs(60)));
        let registration = store.register(&arena).unwrap();
        Self { script: ClusterScript::of(&master), store, arena, registration: Some(registration) }
    }

    fn with_headroom(master: &str, quarantine_ms: u64) -> Self {
        Self::new(master, quarantine_ms, Arena::with_headroom(4, BYTES).unwrap())
    }

    fn put(&self, page: u32, options: PutOptions) -> Answer<'static, Result<Stored, StoreError>> {
        let put = Put::new(id(page), self.arena.source(page).unwrap());
        let store = self.store.clone();
        Box::pin(async move { store.put_from(vec![put], options).await.remove(0) })
    }

    fn get(&self, object: u32, page: u32) -> Answer<'static, Result<Served, StoreError>> {
        let get = Get::new(id(object), self.arena.target(page).unwrap());
        let store = self.store.clone();
        Box::pin(async move { store.get_into(vec![get], GetOptions::default()).await.remove(0) })
    }

    /// Puts the first page with content.
    async fn stores_one(&self) {
        self.arena.target(0).unwrap().fill(7);
        assert_eq!(self.put(0, PutOptions::default()).await, Ok(Stored::New));
    }

    fn holds(&self, page: u32, byte: u8) -> bool {
        self.arena.source(page).unwrap().iter().all(|it| *it == byte)
    }
}

fn id(number: u32) -> ObjectId {
    let namespace = Namespace::new("a model", 16).digest();
    ObjectId::page(namespace, PageKey(number.into()))
}

/// Both when the caller ends its registration and when it has stopped waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_stays_registered_until_its_bytes_have_moved() {
    let mut bench = TestStore::with_headroom("registered", 60_000);
    bench.stores_one().await;
    for cancelled in [false, true] {
        for puts in [false, true] {
            bench.script.close_gate();
            let page = 1 + u32::from(cancelled);
            let call: Answer<'static, bool> = if puts {
                let put = bench.put(page, PutOptions::default());
                Box::pin(async { put.await.is_ok() })
            } else {
                let get = bench.get(0, page);
                Box::pin(async { get.await.is_ok() })
            };
            let call = tokio::spawn(call);
            bench.script.wait_for_call();
            bench.registration = None;
            if cancelled {
                call.abort();
            }
            bench.script.open_gate();
            assert!(call.await.is_ok_and(|done| done) || cancelled);
            bench.arena.returned(page).await;
            bench.registration = Some(bench.store.register(&bench.arena).unwrap());
        }
    }
    assert_eq!(bench.script.unregistered(), 0);
}

/// Each call from Python has its own arena, so two puts of one array share memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arenas_over_the_same_memory_are_registered_once() {
    let bench = TestStore::new("same memory", 60_000, Arena::new(4, BYTES).unwrap());
    let put = |arena: &Arena, object| {
        let put = Put::new(id(object), arena.source(0).unwrap());
        let store = bench.store.clone();
        tokio::spawn(
            async move { store.put_from(vec![put], PutOptions::default()).await.remove(0) },
        )
    };
    let same = [again(&bench.arena, 4), again(&bench.arena, 4), again(&bench.arena, 1)];
    let mut registrations: Vec<_> =
        same.iter().map(|arena| bench.store.register(arena).unwrap()).collect();
    bench.script.close_gate();
    // The first arena's registration ends during its put, while the others are in use.
    let first = put(&same[0], 1);
    bench.script.wait_for_calls(1);
    let others = [put(&same[1], 2), put(&same[2], 3)];
    drop(registrations.remove(0));
    bench.script.open_gate();
    for put in std::iter::once(first).chain(others) {
        assert_eq!(put.await.unwrap(), Ok(Stored::New));
    }
    drop(registrations);
    bench.stores_one().await;
    assert_eq!(bench.script.unregistered(), 0);
    // When no arena uses it any more, it can be registered again.
    let TestStore { store, arena, registration, .. } = bench;
    drop(registration);
    let _registration = store.register(&again(&arena, 2)).unwrap();
    let _whole = store.register(&Arena::new(1, BYTES).unwrap()).unwrap();
}

#[tokio::test]
async fn pages_of_an_abandoned_transfer_return_when_it_has_ended() {
    let bench = TestStore::with_headroom("goes on", 100);
    bench.stores_one().await;
    bench.script.fail_with(Some(TRANSFER_FAILED));
    let failed = bench.get(0, 1).await.unwrap_err();
    assert!(failed.is_unwell(), "{failed}");
    bench.put(2, PutOptions::default()).await.unwrap_err();
    bench.script.fail_with(None);
    assert!(bench.arena.target(1).is_err() && bench.arena.target(2).is_err());
    assert_eq!(bench.store.cluster_stats().quarantined, 2);
    assert_eq!(bench.script.complete_abandoned(), 1);
    for page in [1, 2] {
        let returned = tokio::time::timeout(Duration::from_secs(60), bench.arena.returned(page));
        returned.await.unwrap();
    }
    assert_eq!(bench.script.complete_abandoned(), 0, "the client that began it is gone");
    assert_eq!((bench.script.clients(), bench.script.unregistered()), (1, 0));
    bench.get(0, 1).await.unwrap();
    assert!(bench.holds(1, 7));
    assert_eq!(bench.store.cluster_stats().quarantined, 0);
}

/// Pages without headroom are copied to the store's own memory, and only that is kept.
#[tokio::test]
async fn the_stores_own_memory_is_not_reused_during_an_abandoned_transfer() {
    let bench = TestStore::new("own memory", 60_000, Arena::new(4, BYTES).unwrap());
    bench.stores_one().await;
    bench.script.fail_with(Some(TRANSFER_FAILED));
    for _ in 0..3 {
        bench.get(0, 1).await.unwrap_err();
    }
    bench.put(2, PutOptions::default()).await.unwrap_err();
    bench.script.fail_with(None);
    assert_eq!(bench.script.complete_abandoned(), 3, "each had memory of its own");
    bench.get(0, 1).await.unwrap();
    assert!(bench.holds(1, 7));
    assert_eq!(bench.script.unregistered(), 0);
}

#[tokio::test]
async fn failed_transfers_are_failures_of_the_store_and_not_misses() {
    let bench = TestStore::with_headroom("unwell", 60_000);
    bench.stores_one().await;
    let config = GuardConfig { failures_to_open: 3, ..GuardConfig::default() };
    let guarded = Guarded::new(Arc::new(bench.store.clone()), config);
    bench.script.fail_with(Some(TRANSFER_FAILED));
    for page in 1..4 {
        let get = Get::new(id(page), bench.arena.target(page).unwrap());
        let result = guarded.get_into(vec![get], GetOptions::default()).await.remove(0);
        assert!(result.is_err_and(|error| error.is_unwell()));
    }
    assert_eq!(guarded.stats().guard.unwrap().breaker, BreakerState::Open);
}

/// A pinned put of an existing object checks whether it is intact. A failed check must not remove
/// it.
#[tokio::test]
async fn an_object_that_cannot_be_checked_is_not_removed() {
    let bench = TestStore::with_headroom("not removed", 60_000);
    bench.stores_one().await;
    let other = TestStore::with_headroom("not removed", 60_000);
    bench.script.fail_with(Some(TRANSFER_FAILED));
    let pinned = PutOptions { pin: Some(Pin::Hard(Owner::named("it"))), durable: false };
    let failed = other.put(0, pinned).await.unwrap_err();
    assert!(failed.is_unwell(), "{failed}");
    assert_eq!(bench.script.objects(), 1);
    bench.script.fail_with(None);
    bench.get(0, 1).await.unwrap();
}

/// A contributed segment stays when the client is replaced, and the placement preferences still
/// apply.
#[tokio::test]
async fn a_segment_outlives_the_client_that_is_replaced() {
    let config = MooncakeConfig {
        segment_bytes: 1 << 20,
        replicas: 2,
        preferred_segments: vec!["elsewhere".to_owned(), MooncakeConfig::OWN_SEGMENT.to_owned()],
        ..config("offers", 50)
    };
    let bench = TestStore::with_config(config, Arena::with_headroom(4, BYTES).unwrap());
    assert_eq!((bench.script.clients(), bench.script.segment_bytes()), (2, 1 << 20));
    assert_eq!(bench.store.segment().as_deref(), Some("offers"));
    bench.stores_one().await;
    bench.script.fail_with(Some(TRANSFER_FAILED));
    bench.get(0, 1).await.unwrap_err();
    bench.script.fail_with(None);
    let returned = tokio::time::timeout(Duration::from_secs(60), bench.arena.returned(1));
    returned.await.unwrap();
    assert_eq!((bench.script.clients(), bench.script.segment_bytes()), (2, 1 << 20));
    assert_eq!(bench.put(2, PutOptions::default()).await, Ok(Stored::New));
    let wanted = (2, vec![c"elsewhere".to_owned(), c"offers".to_owned()]);
    assert_eq!(bench.script.placements(), [wanted.clone(), wanted]);
    bench.store.shutdown().await.unwrap();
    // The keeper may be in a call.
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while (bench.script.clients(), bench.script.segment_bytes()) != (0, 0) {
        assert!(std::time::Instant::now() < until, "a client stays");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn impossible_placements_are_refused() {
    let refused = |config| MooncakeStore::with_library(config, library()).unwrap_err().to_string();
    let own = vec![MooncakeConfig::OWN_SEGMENT.to_owned()];
    let without = MooncakeConfig { preferred_segments: own, ..config("refused", 50) };
    assert!(refused(without).contains("contributes no segment"));
    let none = MooncakeConfig { replicas: 0, ..config("refused", 50) };
    assert!(refused(none).contains("at least one replica"));
}

/// The library reports success for a put of an existing key. Of two clients that put different
/// bytes under one id, only one has stored its own, and the other knows that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_concurrent_put_of_another_client_is_detected() {
    let config = |prefix: &str| MooncakeConfig {
        prefix: prefix.to_owned(),
        ..config("meanwhile", 60_000).for_features()
    };
    let arena = || Arena::with_headroom(4, BYTES).unwrap();
    let (one, two) = (
        TestStore::with_config(config("same"), arena()),
        TestStore::with_config(config("same"), arena()),
    );
    let hard = Pin::Hard(Owner::named("tests"));
    let pinned = PutOptions { pin: Some(hard), durable: false };
    one.arena.target(0).unwrap().fill(1);
    two.arena.target(0).unwrap().fill(2);
    // Both look up and find nothing, then both put.
    one.script.close_gate();
    let puts = [tokio::spawn(one.put(0, pinned)), tokio::spawn(two.put(0, pinned))];
    one.script.wait_for_calls(2);
    one.script.open_gate();
    let mut stored = Vec::new();
    for put in puts {
        stored.push(put.await.unwrap().unwrap());
    }
    stored.sort_by_key(|stored| *stored == Stored::AlreadyThere);
    assert_eq!(stored, [Stored::New, Stored::AlreadyThere]);
    // A client that unpins the other's object no longer owns it.
    for bench in [&one, &two] {
        drop(bench.store.unpin(&[id(0)], hard).await);
    }
    let own: u64 =
        [&one, &two].map(|bench| bench.store.stats().remote.unwrap().objects).iter().sum();
    assert_eq!((own, one.script.objects()), (1, 1));
}

/// Removing the cluster's pin of an unpinned object does not count as a use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_whose_pin_is_being_removed_can_be_evicted() {
    let bench = TestStore::with_headroom("softened", 60_000);
    let hard = Pin::Hard(Owner::named("tests"));
    let pinned = PutOptions { pin: Some(hard), durable: false };
    assert_eq!(bench.put(0, pinned).await, Ok(Stored::New));
    bench.script.close_gate();
    bench.store.unpin(&[id(0)], hard).await.remove(0).unwrap();
    bench.script.wait_for_call();
    let shared = bench.store.shared.clone();
    let departures = {
        let mut state = shared.ledger.lock();
        assert!(state.catalogue.evict(u64::MAX - 1), "nothing goes");
        state.take_departures()
    };
    let [departure] = departures[..] else { panic!("{departures:?}") };
    let client = shared.connection.client().unwrap();
    let expelled = tokio::task::spawn_blocking(move || shared.remove_departing(&client, departure));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!expelled.is_finished(), "the other may put it again");
    bench.script.open_gate();
    assert_eq!(expelled.await.unwrap(), Ok(true));
    assert_eq!(bench.script.objects(), 0);
    assert_eq!(bench.store.stats().remote.unwrap().objects, 0);
}
