//! What a cluster in trouble may cost, with the guard in front: a bounded time, and never a wrong byte.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_l3::{
    BreakerState, ExistsOptions, GuardConfig, Guarded, Removal, Store, StoreError, Stored,
};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeError, MooncakeStore};
use terrace_tests::l3::objects::page;
use terrace_tests::mooncake::{Cluster, Options, library};

use super::shared::{Member, PAGES};
use super::{OBJECT_BYTES_MAX, config, open};

/// Deadlines far below what the library takes to notice anything.
fn guarded(config: &MooncakeConfig) -> Member {
    let guard = GuardConfig {
        exists_timeout_ms: 1_000,
        put_timeout_ms: 1_000,
        get_timeout_ms: 1_000,
        control_timeout_ms: 1_000,
        failures_to_open: 3,
        pause_ms: 200,
        pause_max_ms: 1_000,
        negative_ttl_ms: 500,
        ..GuardConfig::default()
    };
    let store = Guarded::new(Arc::new(open(config.clone())), guard);
    Member::with(Arc::new(store), config.object_bytes_max)
}

/// What even a busy machine does not take longer than when a deadline is a second.
const BOUND: Duration = Duration::from_secs(10);

async fn within_bound<T>(call: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let result = call.await;
    assert!(began.elapsed() < BOUND, "it took {:?}", began.elapsed());
    result
}

/// Puts these before there is any trouble, however long a busy machine takes for it.
async fn stores(member: &Member, numbers: Range<u64>) {
    for number in numbers {
        let until = Instant::now() + Duration::from_secs(60);
        while let Err(error) = member.put(page(number)).await {
            assert!(Instant::now() < until, "it is not stored: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Tries until something can be put and read again, by this client and as before.
async fn recovers(member: &Member, first: u64) {
    let until = Instant::now() + Duration::from_secs(60);
    for number in first.. {
        assert!(Instant::now() < until, "it does not recover: {:#?}", member.store.stats());
        let stored = within_bound(member.put(page(number))).await;
        if stored == Ok(Stored::New) && within_bound(member.get(page(number))).await.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let guard = member.store.stats().guard.unwrap();
    assert_eq!(guard.breaker, BreakerState::Closed);
}

/// Its objects are said to be there for some ten seconds, and cannot be read: F24, F29.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_dead_storage_node_costs_its_objects_and_nothing_else() {
    let mut cluster = Cluster::start(Options::default());
    let config = MooncakeConfig { capacity_bytes: 64 << 20, ..config(&cluster) };
    let member = guarded(&config);
    stores(&member, 0..40).await;
    cluster.kill_node(0);
    let mut served = 0;
    for number in 0..40 {
        match within_bound(member.get(page(number))).await {
            Ok(()) => served += 1,
            Err(error) if error == StoreError::Missing || error.is_unwell() => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(served < 40, "the node had nothing");
    recovers(&member, 1_000).await;
    cluster.start_node(0);
    recovers(&member, 2_000).await;
}

/// Each of the library's calls takes seconds then, and afterwards everything is gone: F30.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_dead_master_costs_a_bounded_time_and_then_nothing() {
    let mut cluster = Cluster::start(Options::default());
    let member = guarded(&config(&cluster));
    stores(&member, 1..2).await;
    cluster.kill_master();
    let mut refused = 0;
    for number in 0..30 {
        let error = within_bound(member.get(page(number % 3))).await.unwrap_err();
        refused += u32::from(matches!(error, StoreError::Unavailable { .. }));
        within_bound(member.put(page(100 + number))).await.unwrap_err();
    }
    assert!(refused > 10, "the breaker refuses most of them at once, not {refused}");
    assert!(member.store.stats().guard.unwrap().opened > 0);
    cluster.start_master();
    recovers(&member, 1_000).await;
    let found = loop {
        match member.get(page(1)).await {
            Err(StoreError::TimedOut(_)) => {}
            found => break found,
        }
    };
    assert_eq!(found, Err(StoreError::Missing), "the master has forgotten it");
    stores(&member, 1..2).await;
    member.get(page(1)).await.expect("this client knew that it was to be put again");
    // What was lent to calls that hung has come back.
    for page in 0..PAGES {
        tokio::time::timeout(Duration::from_secs(60), member.arena.returned(page)).await.unwrap();
    }
}

/// A store that knows an answer by heart must not look well while its master is dead.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn what_was_seen_is_not_believed_of_a_master_that_is_gone() {
    let mut cluster = Cluster::start(Options::default());
    let member = Member::new(&config(&cluster));
    for number in 0..2 {
        member.put(page(number)).await.unwrap();
        assert!(member.has(page(number)).await);
    }
    cluster.kill_master();
    assert!(member.has(page(1)).await, "it was seen a moment ago");
    assert_eq!(member.put(page(1)).await, Ok(Stored::AlreadyThere), "by puts too");
    assert!(member.get(page(0)).await.is_err_and(|error| error.is_unwell()));
    let found = member.store.exists(&[page(1)], ExistsOptions::default()).await.remove(0);
    assert!(found.is_err_and(|error| error.is_unwell()));
    assert!(member.put(page(1)).await.is_err_and(|error| error.is_unwell()));
}

/// However long the library takes, whoever asks only waits, and asks on no thread of its own.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn probing_a_thousand_keys_takes_no_time_of_the_thread_that_asks() {
    let mut cluster = Cluster::start(Options::default());
    let store = open(config(&cluster));
    let ids: Vec<_> = (0..1024).map(page).collect();
    let options = ExistsOptions::default();
    assert_eq!(store.exists(&ids, options).await.len(), 1024);
    cluster.kill_master();
    // Not every call is slow: connections that are known to be lost fail at once.
    for _ in 0..20 {
        let began = Instant::now();
        let mut asking = store.exists(&ids, options);
        let mut turns = 0;
        let answers = loop {
            // One thread has both: if asking took it, there would be no turns.
            tokio::select! {
                answers = &mut asking => break answers,
                () = tokio::time::sleep(Duration::from_millis(1)) => turns += 1,
            }
        };
        let took = began.elapsed();
        assert!(answers.iter().all(|answer| answer.as_ref().unwrap_err().is_unwell()));
        if took > Duration::from_millis(500) {
            assert!(turns > 100, "{turns} turns in {took:?}");
            return;
        }
    }
    panic!("the library was never slow");
}

/// Puts are refused within their time, what is there can be read, and room comes back by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_cluster_full_of_leased_objects_says_so_and_recovers() {
    const BYTES: usize = 512 << 10;
    let cluster =
        Cluster::start(Options { nodes: 1, node_mib: 16, lease_ms: 3_000, ..Options::default() });
    let config = MooncakeConfig {
        capacity_bytes: 1 << 30,
        object_bytes_max: BYTES,
        full_wait_ms: 200,
        ..config(&cluster)
    };
    let member = Member::new(&config);
    let mut stored = 0;
    let full = loop {
        match within_bound(member.put(page(stored))).await {
            Ok(_) => {}
            Err(error) => break error,
        }
        // A lease for all that is there.
        let ids: Vec<_> = (0..=stored).map(page).collect();
        let lease = ExistsOptions { lease: true, ..ExistsOptions::default() };
        member.store.exists(&ids, lease).await;
        stored += 1;
        assert!(stored < 100, "so many cannot be there");
    };
    assert_eq!(full, StoreError::Full);
    assert!(member.count("put", "full") > 0);
    member.get(page(0)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(3_200)).await;
    let until = Instant::now() + Duration::from_secs(20);
    while member.put(page(1_000)).await != Ok(Stored::New) {
        assert!(Instant::now() < until, "no room comes back");
    }
    member.get(page(1_000)).await.unwrap();
}

/// A lease that is over before the bytes are there costs a miss at the most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_read_that_is_slower_than_its_lease_is_right_or_a_miss() {
    const BYTES: usize = 8 << 20;
    let cluster = Cluster::start(Options { node_mib: 128, lease_ms: 1, ..Options::default() });
    let config =
        MooncakeConfig { capacity_bytes: 1 << 30, object_bytes_max: BYTES, ..config(&cluster) };
    let member = Member::new(&config);
    for number in 0..8 {
        assert_eq!(member.put(page(number)).await, Ok(Stored::New));
        // It checks the bytes of what it gets.
        let served = member.get(page(number)).await;
        assert!(matches!(served, Ok(()) | Err(StoreError::Missing)), "{served:?}");
    }
    assert!(member.count("get", "lease-lapsed") > 0, "no read was slower than a millisecond");
}

/// The master gives up puts that take too long. That is a failure of this put alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_put_that_the_master_has_given_up_can_be_tried_again() {
    let cluster = Cluster::start(Options { nodes: 1, unfinished_s: Some(1), ..Options::default() });
    let member = Member::new(&config(&cluster));
    cluster.suspend_node(0);
    let wakes = async {
        tokio::time::sleep(Duration::from_secs(6)).await;
        cluster.wake_node(0);
    };
    let (put, ()) = tokio::join!(member.put(page(1)), wakes);
    let error = put.unwrap_err();
    assert!(error.to_string().contains("dropped the put"), "{error}");
    assert_eq!(member.put(page(1)).await, Ok(Stored::New));
    member.get(page(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_cut_network_costs_a_bounded_time_and_heals() {
    let cluster = Cluster::start_apart(Options::default());
    let member = guarded(&config(&cluster));
    recovers(&member, 500).await;
    cluster.cut();
    for number in 0..20 {
        within_bound(member.put(page(100 + number))).await.unwrap_err();
        within_bound(member.store.exists(&[page(number)], ExistsOptions::default())).await;
        within_bound(member.store.remove(&[page(50)], Removal::Forced)).await;
    }
    assert!(member.store.stats().guard.unwrap().opened > 0);
    cluster.join();
    recovers(&member, 1_000).await;
}

/// It lets anybody connect and answers no question.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_master_of_another_version_is_called_that() {
    let options = Options { nodes: 0, has_older_master: true, ..Options::default() };
    let cluster = Cluster::start(options);
    let store = MooncakeStore::open(config(&cluster)).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let asked = within_bound(store.exists(&[page(1)], ExistsOptions::default())).await;
        let error = asked[0].as_ref().unwrap_err();
        assert!(error.is_unwell(), "the breaker must know");
        if error.to_string().contains("of the same Mooncake version") {
            break;
        }
        assert!(Instant::now() < until, "it says only: {error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(!store.cluster_stats().is_connected);
}

#[test]
fn a_library_that_cannot_be_used_is_named() {
    let open = |path: &str| {
        let config = MooncakeConfig::new(path, "127.0.0.1:1", 1 << 20, OBJECT_BYTES_MAX);
        let error = MooncakeStore::open(config).unwrap_err();
        assert!(matches!(error, MooncakeError::Library(_)), "{error}");
        error.to_string()
    };
    assert!(open("/no/such/library.so").contains("/no/such/library.so"));
    let other = open("libc.so.6");
    assert!(other.contains("has no function mooncake_store_create"), "{other}");
    assert!(other.contains("older than"), "it says what may be wrong: {other}");
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn settings_that_make_no_sense_are_refused() {
    let config = MooncakeConfig::new(library(), "127.0.0.1:1", 10, OBJECT_BYTES_MAX);
    assert!(matches!(MooncakeStore::open(config), Err(MooncakeError::Setting(_))));
    let config = MooncakeConfig {
        prefix: "a\0b".to_owned(),
        ..MooncakeConfig::new(library(), "127.0.0.1:1", 1 << 20, OBJECT_BYTES_MAX)
    };
    assert!(matches!(MooncakeStore::open(config), Err(MooncakeError::Setting(_))));
}
