//! Removal of objects, and their promotion from disk to memory.

use std::time::Duration;

use terrace_l3::{
    ExistsOptions, ObjectId, Place, Presence, PutOptions, Removal, Served, Store, Stored,
};
use terrace_l3_disk::{Direction, PromotionConfig, PromotionStats, TieredStore};
use terrace_tests::l3::gated::Gate;
use terrace_tests::l3::objects::{HARD, page};
use tokio::time::{Instant, sleep};

use super::{BYTES, Bench, memory_store, pages, tiers};

const PREFETCH: ExistsOptions = ExistsOptions { prefetch_to_memory: true, lease: false };
const LEASE: ExistsOptions = ExistsOptions { prefetch_to_memory: false, lease: true };

impl Bench<TieredStore> {
    /// Stores objects on disk only, by filling memory with pins.
    async fn put_on_disk(&self, ids: &[ObjectId]) {
        let others: Vec<ObjectId> = (0..16).map(|number| page(1_000_000 + number)).collect();
        let pinned = PutOptions { pin: Some(HARD), durable: false };
        for id in &others {
            assert_eq!(self.put_with(*id, pinned).await, Ok(Stored::New));
        }
        for id in ids {
            self.put(*id).await;
            let found = self.store.exists(&[*id], ExistsOptions::default()).await;
            assert_eq!(found, [Ok(Presence::Present(Place::Disk))]);
        }
        self.store.unpin(&others, HARD).await;
        self.store.remove(&others, Removal::Forced).await;
    }

    async fn prefetch(&self, ids: &[ObjectId]) {
        let found = self.store.exists(ids, PREFETCH).await;
        assert!(found.iter().all(|found| found.as_ref().unwrap().is_present()), "{found:?}");
    }

    fn promotions(&self) -> PromotionStats {
        self.store.promotion_stats()
    }

    /// Waits until no promotion is in flight.
    async fn promoted(&self) {
        while self.promotions().active > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

impl<S: Store> Bench<S> {
    /// Removes objects for good, whatever pins and leases they have.
    async fn free(&self, ids: &[ObjectId]) {
        let removed = self.store.remove(ids, Removal::Final).await;
        assert!(removed.iter().all(Result::is_ok), "{removed:?}");
    }
}

/// Failure: freed objects stayed until their lease ended, so memory held five minutes of consumed objects and
/// eviction then took objects in use. Here a final removal frees at once, whatever the leases say:
/// memory use follows concurrency, not the lease duration.
#[tokio::test(start_paused = true)]
async fn f33_memory_follows_concurrency_and_not_the_lease_time() {
    let short = most_resident_objects(5_000).await;
    let long = most_resident_objects(300_000).await;
    assert_eq!(short, long);
    assert!(long <= IN_FLIGHT, "{long} of {IN_FLIGHT}");
}

const IN_FLIGHT: u64 = 6;

/// Puts, looks up, reads and removes one object each 100 ms, with a few in flight; none may be lost
/// before its removal. Returns the largest number of resident objects.
async fn most_resident_objects(lease_ttl_ms: u64) -> u64 {
    let bench = Bench::new(memory_store(16, lease_ttl_ms), None);
    let resident = || bench.store.stats().memory.unwrap().resident_bytes / BYTES as u64;
    let pinned = PutOptions { pin: Some(HARD), durable: false };
    let mut most = 0;
    for number in 0..300 {
        assert_eq!(bench.put_with(page(number), pinned).await, Ok(Stored::New));
        most = most.max(resident());
        sleep(Duration::from_millis(100)).await;
        if let Some(consumed) = (number + 1).checked_sub(IN_FLIGHT).map(page) {
            let found = bench.store.exists(&[consumed], LEASE).await;
            assert_eq!(found, [Ok(Presence::Present(Place::Memory))]);
            bench.get(consumed).await.expect("what is in use stays");
            bench.free(&[consumed]).await;
        }
    }
    let stats = bench.store.stats();
    assert!(stats.memory.unwrap().leases > 0, "leases were granted");
    assert_eq!(stats.memory.unwrap().evicted, 0);
    // The last turn has removed all but these.
    bench.free(&pages(300)[(300 - IN_FLIGHT + 1) as usize..]).await;
    assert_eq!(resident(), 0);
    most
}

/// Failure: a prefetch whose task could not be started stayed 'triggered' until its timeout: it was
/// not retried, and its waiters got nothing. Here every promotion reports its end.
#[test]
fn f36_a_promotion_that_never_began_is_over() {
    let promotion = PromotionConfig { remember_ms: 50, ..PromotionConfig::default() };
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (bench, gates) = tiers(promotion);
    let doomed = runtime();
    doomed.block_on(bench.put_on_disk(&pages(3)));
    // The runtime that runs promotions is dropped before any has ended.
    gates.set(Direction::Read, Gate::Shut);
    doomed.block_on(async {
        let (store, ids) = (bench.store.clone(), pages(3));
        let asking = tokio::spawn(async move { store.exists(&ids, PREFETCH).await });
        while bench.promotions().active == 0 {
            tokio::task::yield_now().await;
        }
        asking.abort();
    });
    drop(doomed);
    gates.set(Direction::Read, Gate::Open);
    runtime().block_on(async {
        assert_eq!((bench.promotions().triggered, bench.promotions().active), (3, 0));
        let start = std::time::Instant::now();
        let served = bench.get_all(&pages(3), Duration::from_secs(60)).await;
        assert!(start.elapsed() < Duration::from_secs(30), "no waiter is left");
        assert!(served.iter().all(Result::is_ok), "{served:?}");
        // A promotion that fails ends as well.
        sleep(Duration::from_millis(60)).await;
        gates.set(Direction::Read, Gate::Fails);
        bench.prefetch(&pages(3)).await;
        bench.promoted().await;
        gates.set(Direction::Read, Gate::Open);
        sleep(Duration::from_millis(60)).await;
        bench.prefetch(&pages(3)).await;
        bench.promoted().await;
        for id in pages(3) {
            assert_eq!(bench.get(id).await.unwrap().place, Place::Memory, "tried again");
        }
        assert_eq!(bench.promotions().done, 3);
    });
}

/// Failure: the sweep of old prefetches dropped those in flight: the same object moved twice, and
/// the waiters got nothing. Here only ended ones are dropped.
#[tokio::test]
async fn f37_a_promotion_under_way_is_not_forgotten() {
    let promotion = PromotionConfig { remember_ms: 1, ..PromotionConfig::default() };
    let (bench, gates) = tiers(promotion);
    bench.put_on_disk(&pages(2)).await;
    let reads_begun = gates.reads_begun();
    gates.set(Direction::Read, Gate::Shut);
    bench.prefetch(&pages(2)).await;
    for _ in 0..10 {
        sleep(Duration::from_millis(5)).await;
        bench.prefetch(&pages(2)).await;
    }
    let stats = bench.promotions();
    assert_eq!((stats.triggered, stats.deduplicated, stats.active), (2, 20, 2));
    let (ids, wait) = (pages(2), Duration::from_secs(60));
    let opened = async {
        sleep(Duration::from_millis(20)).await;
        gates.set(Direction::Read, Gate::Open);
    };
    let (served, ()) = tokio::join!(bench.get_all(&ids, wait), opened);
    for served in served {
        assert_eq!(served, Ok(Served { place: Place::Memory, waited: true }));
    }
    assert_eq!(gates.reads_begun() - reads_begun, 2, "each object was read once");
}

/// Failure: a get polled the store for each object separately, so that ten objects waited ten
/// times, with a flood of calls. Here a batch waits once, and is woken.
#[tokio::test(start_paused = true)]
async fn f38_a_batch_waits_once() {
    let (bench, gates) = tiers(PromotionConfig { workers: 16, ..PromotionConfig::default() });
    bench.put_on_disk(&pages(10)).await;
    let reads_begun = gates.reads_begun();
    gates.set(Direction::Read, Gate::Shut);
    bench.prefetch(&pages(10)).await;
    while gates.waiting() < 10 {
        tokio::task::yield_now().await;
    }
    // The wait times out, and the disk is queried once for each object. Its answers arrive after
    // the gate has opened.
    let start = Instant::now();
    let opened = async {
        while gates.waiting() < 20 {
            sleep(Duration::from_millis(10)).await;
        }
        gates.set(Direction::Read, Gate::Open);
        start.elapsed()
    };
    let (ids, wait) = (pages(10), Duration::from_millis(100));
    let (served, waited) = tokio::join!(bench.get_all(&ids, wait), opened);
    for served in served {
        assert_eq!(served, Ok(Served { place: Place::Disk, waited: true }));
    }
    assert!((100..=110).contains(&waited.as_millis()), "one wait for all ten: {waited:?}");
    assert_eq!(bench.promotions().waits_expired, 1);
    assert_eq!(gates.reads_begun() - reads_begun, 20);
}
