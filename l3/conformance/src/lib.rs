//! Conformance checks for backends of [`terrace_l3`].
//!
//! Every backend gives the same guarantees, and each of them has a check. The names of the checks, in the
//! order of [`all`], read as the contract of [`Store`].
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use terrace_l3::{MemoryConfig, MemoryStore};
//! use terrace_l3_conformance::{Backend, all};
//!
//! let make = || {
//!     let config = MemoryConfig { lease_ttl_ms: 1_500, ..MemoryConfig::new(16 * 10_001, 10_001) };
//!     Backend {
//!         store: Arc::new(MemoryStore::new(config).expect("there is memory")),
//!         object_bytes_max: 10_001,
//!         objects_kept: 12,
//!         objects_max: 16,
//!         copies: 1,
//!         lease_ttl: Duration::from_millis(1_500),
//!         full_wait: Duration::ZERO,
//!         keep: Box::new(()),
//!     }
//! };
//! let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
//! # if false {
//! runtime.block_on(all(make));
//! # }
//! # let _ = (runtime, make);
//! ```

mod batches;
mod checks;
mod lifetime;
mod names;
pub mod objects;
mod protection;
mod together;

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, GuardConfig, Guarded, ObjectId, Pin as Pinned,
    Put, PutOptions, Registration, Removal, Results, Served, Source, Store, StoreError, StoreStats,
    Stored, TierStats,
};
use tokio::time::{Instant, sleep};

pub use self::checks::run_checks;
use self::objects::{fill, is_right, page};

/// A fresh store and its properties, as far as the checks depend on them.
#[derive(Debug)]
pub struct Backend {
    /// The store.
    pub store: Arc<dyn Store>,
    /// Maximum object size; at least 4 KiB.
    pub object_bytes_max: usize,
    /// Number of objects of maximum size that it keeps without eviction; at least eight.
    pub objects_kept: u64,
    /// Maximum number of objects.
    pub objects_max: u64,
    /// Number of copies of each object; statistics count all of them.
    pub copies: u64,
    /// Duration of a lease.
    pub lease_ttl: Duration,
    /// Maximum wait of a put for room.
    pub full_wait: Duration,
    /// Values that must outlive the store, such as its directory.
    pub keep: Box<dyn Any + Send + Sync>,
}

impl Backend {
    /// Wraps the store in a guard whose deadlines a slow machine does not reach.
    #[must_use]
    pub fn guarded(self) -> Self {
        const PATIENCE_MS: u64 = 120_000;
        let config = GuardConfig {
            exists_timeout_ms: PATIENCE_MS,
            put_timeout_ms: PATIENCE_MS,
            get_timeout_ms: PATIENCE_MS,
            control_timeout_ms: PATIENCE_MS,
            ..GuardConfig::default()
        };
        Self { store: Arc::new(Guarded::new(self.store, config)), ..self }
    }
}

type Check = fn(Bench) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! checks {
    ($($module:ident { $($check:ident,)* })*) => {
        const CHECKS: &[(&str, Check)] = &[
            $($((stringify!($check), |bench| Box::pin($module::$check(bench))),)*)*
        ];
    };
}

checks! {
    batches {
        each_object_of_a_batch_has_its_own_result,
        results_are_in_the_order_of_the_batch,
        an_empty_batch_has_no_results,
        an_object_may_be_in_a_batch_twice,
        a_batch_may_be_larger_than_the_store,
        unregistered_memory_is_refused,
        an_arena_is_registered_once_at_a_time,
        a_registration_ends_with_its_guard,
        an_arena_may_be_dropped_while_its_pages_are_lent,
        every_length_is_stored_and_read,
        an_object_that_is_too_large_is_refused,
        a_target_of_another_length_is_refused_and_the_object_stays,
    }
    names {
        a_second_put_keeps_the_first_bytes,
        different_ids_are_different_objects,
        a_higher_generation_replaces_lower_ones,
        an_id_means_exactly_its_generation,
        a_page_is_read_with_its_own_prefix_only,
        a_page_without_a_prefix_matches_no_prefix,
    }
    protection {
        a_hard_pin_prevents_eviction_and_removal,
        a_hard_pin_has_one_owner,
        a_put_pins_an_existing_object,
        a_final_removal_ignores_pins_and_leases,
        softly_pinned_objects_are_evicted_last,
        a_soft_pin_does_not_prevent_removal,
        lookups_protect_nothing,
        a_lease_protects_for_its_time,
        leases_leave_room_for_puts,
        frequently_read_objects_stay,
        a_store_full_of_pins_reports_it_and_recovers,
    }
    lifetime {
        removed_objects_are_missing_at_once,
        removed_objects_leave_nothing_behind,
        an_abandoned_put_is_atomic,
        an_abandoned_get_returns_its_page,
        flushing_and_durable_puts_work_on_every_backend,
        statistics_are_consistent,
        a_closed_store_refuses_calls_and_lends_nothing,
    }
    together {
        concurrent_reads_get_the_same_bytes,
        one_of_many_concurrent_puts_wins,
        early_lookups_do_not_hide_an_object,
        a_removal_does_not_disturb_readers,
        no_wrong_bytes_under_load,
    }
}

/// Runs all checks, each on its own store, a few at a time.
///
/// # Panics
/// If a check fails or does not end; names all that fail.
pub async fn all(make: impl Fn() -> Backend) {
    const AT_A_TIME: usize = 6;
    const PATIENCE: Duration = Duration::from_secs(300);
    let checks = CHECKS.iter().map(|(name, check)| (*name, check(Bench::new(make()))));
    run_checks(checks, AT_A_TIME, PATIENCE).await;
}

/// Number of pages of a bench's arena.
const PAGES: u32 = 24;

/// A store with a registered arena. Its pages begin at odd addresses and have headroom; those of the
/// arenas that single checks create have none.
struct Bench {
    registration: Registration,
    arena: Arena,
    backend: Backend,
}

impl Bench {
    fn new(backend: Backend) -> Self {
        assert!(backend.objects_kept >= 8, "the checks need room for eight objects");
        assert!(backend.object_bytes_max >= 4096, "the checks need objects of 4 KiB");
        let arena = Arena::with_headroom(PAGES, backend.object_bytes_max).expect("there is memory");
        let registration = backend.store.register(&arena).expect("a fresh store takes an arena");
        Self { registration, arena, backend }
    }

    fn store(&self) -> &dyn Store {
        &*self.backend.store
    }

    /// Length of the largest objects.
    fn max(&self) -> usize {
        self.backend.object_bytes_max
    }

    /// An object to store, with its bytes in `page` of the arena.
    fn put_of(&self, page: u32, id: ObjectId, length: usize) -> Put {
        Put::new(id, filled(&self.arena, page, id, length))
    }

    /// An object to read into `page` of the arena.
    fn get_of(&self, page: u32, id: ObjectId, length: usize) -> Get {
        let mut target = self.arena.target(page).expect("nobody else uses it").first(length);
        target.fill(0xEE);
        Get::new(id, target)
    }

    async fn put_with(&self, id: ObjectId, options: PutOptions) -> Result<Stored, StoreError> {
        self.store().put_from(vec![self.put_of(0, id, self.max())], options).await.remove(0)
    }

    async fn put_id(&self, id: ObjectId) -> Result<Stored, StoreError> {
        self.put_with(id, PutOptions::default()).await
    }

    /// Stores a page, which must be new.
    async fn put(&self, number: u64) {
        assert_eq!(self.put_id(page(number)).await, Ok(Stored::New), "page {number}");
    }

    async fn put_pinned(&self, number: u64, pin: Pinned) -> Result<Stored, StoreError> {
        self.put_with(page(number), PutOptions { pin: Some(pin), durable: false }).await
    }

    /// Puts twice as many other objects as the store can have.
    async fn press(&self, first: u64) {
        for number in first..first + 2 * self.backend.objects_max {
            self.put(number).await;
        }
    }

    /// Reads an object and checks its bytes.
    async fn get_id(&self, id: ObjectId, length: usize) -> Result<Served, StoreError> {
        self.get_at(1, id, length).await
    }

    async fn get_at(&self, page: u32, id: ObjectId, length: usize) -> Result<Served, StoreError> {
        let gets = vec![self.get_of(page, id, length)];
        let served = self.store().get_into(gets, GetOptions::default()).await.remove(0)?;
        self.assert_right(page, id, length);
        Ok(served)
    }

    async fn get(&self, number: u64) -> Result<Served, StoreError> {
        self.get_id(page(number), self.max()).await
    }

    fn assert_right(&self, page: u32, id: ObjectId, length: usize) {
        let source = self.arena.source(page).expect("the store has let go of it").first(length);
        assert!(is_right(&id, &source), "{id:?} was served with wrong bytes");
    }

    async fn is_present(&self, id: ObjectId) -> bool {
        let found = self.store().exists(&[id], ExistsOptions::default()).await.remove(0);
        found.expect("asking does not fail").is_present()
    }

    async fn remove(&self, id: ObjectId, removal: Removal) -> Result<(), StoreError> {
        self.store().remove(&[id], removal).await.remove(0)
    }

    async fn pin(&self, id: ObjectId, pin: Pinned) -> Result<(), StoreError> {
        self.store().pin(&[id], pin).await.remove(0)
    }

    async fn unpin(&self, id: ObjectId, pin: Pinned) -> Result<(), StoreError> {
        self.store().unpin(&[id], pin).await.remove(0)
    }

    /// Removes `ids` repeatedly until the store is empty: abandoned operations may still be in flight.
    async fn assert_empties(&self, ids: &[ObjectId]) {
        let patience = Instant::now() + Duration::from_secs(10);
        loop {
            for removed in self.store().remove(ids, Removal::Forced).await {
                let fine =
                    matches!(removed, Ok(()) | Err(StoreError::Missing | StoreError::BeingWritten));
                assert!(fine, "{removed:?}");
            }
            self.store().flush().await.expect("a sound store flushes");
            let left = tiers(&self.store().stats());
            if left.iter().all(|tier| (tier.resident_bytes, tier.objects, tier.bytes) == (0, 0, 0))
            {
                return;
            }
            assert!(Instant::now() < patience, "something is left: {left:#?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Lends a page that holds the first `length` bytes of an object.
fn filled(arena: &Arena, page: u32, id: ObjectId, length: usize) -> Source {
    fill(&id, &mut arena.target(page).expect("nobody else uses it").first(length));
    arena.source(page).expect("nobody writes to it").first(length)
}

/// Statistics of all tiers.
fn tiers(stats: &StoreStats) -> Vec<TierStats> {
    [stats.memory, stats.disk, stats.remote].into_iter().flatten().collect()
}

/// Polls a call once.
fn poll_once<T>(answer: &mut Answer<'_, T>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match answer.as_mut().poll(&mut context) {
        std::task::Poll::Ready(result) => Some(result),
        std::task::Poll::Pending => None,
    }
}

/// Predicate on an object's result.
type Expected<T> = fn(&Result<T, StoreError>) -> bool;

/// Asserts that each object of a batch has the expected result.
fn assert_each<T: std::fmt::Debug>(results: &Results<T>, expected: &[Expected<T>]) {
    assert_eq!(results.len(), expected.len(), "one result for each object: {results:?}");
    for (number, (result, expected)) in results.iter().zip(expected).enumerate() {
        assert!(expected(result), "object {number}: {results:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use terrace_l3::{MemoryConfig, MemoryStore};

    fn backend(objects_max: u64) -> Backend {
        const OBJECT_BYTES_MAX: usize = 10_001;
        let config = MemoryConfig {
            lease_ttl_ms: 1_500,
            ..MemoryConfig::new(16 * OBJECT_BYTES_MAX as u64, OBJECT_BYTES_MAX)
        };
        Backend {
            store: Arc::new(MemoryStore::new(config).unwrap()),
            object_bytes_max: OBJECT_BYTES_MAX,
            objects_kept: 12,
            objects_max,
            copies: 1,
            lease_ttl: Duration::from_millis(1_500),
            full_wait: Duration::ZERO,
            keep: Box::new(()),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_memory_backend_conforms() {
        all(|| backend(16)).await;
    }
}
