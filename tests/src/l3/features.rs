//! Guarantees of the feature store on every backend, as checks that each of them passes. The names
//! of the checks, in the order of [`all`], read as the contract.

mod atomicity;
mod lifetime;
mod passing_on;
mod pressure;
mod together;

use std::any::Any;
use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use terrace_l3::{Arena, ExistsOptions, Removal, Store};
use terrace_l3_conformance::run_checks;
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureRef, FeatureStore, FreeConfig, Released, Tensor,
    TensorSpec,
};

use super::mischief::{Asked, MischievousStore, Trick};

/// A store to keep features in.
pub struct FeatureBackend {
    /// A handle for each process that uses it: another connection, or the same store again.
    pub handle: Box<dyn Fn() -> Arc<dyn Store> + Send + Sync>,
    /// Counts the objects in the store, if its statistics cannot.
    pub objects: Option<Box<dyn Fn() -> u64 + Send + Sync>>,
    /// Values that must outlive the store, such as its directory.
    pub keep: Box<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for FeatureBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FeatureBackend")
    }
}

/// The largest object that the checks store; the backend needs room for a hundred of them.
pub const OBJECT_BYTES_MAX: usize = 8192;

type Check = fn(Stage) -> Pin<Box<dyn Future<Output = ()> + Send>>;

macro_rules! checks {
    ($($module:ident { $($check:ident,)* })*) => {
        const CHECKS: &[(&str, Check)] = &[
            $($((stringify!($check), |stage| Box::pin($module::$check(stage))),)*)*
        ];
    };
}

checks! {
    passing_on {
        a_sample_comes_back_as_it_was_put,
        every_type_and_shape_travels_on_the_ref,
        a_ref_is_small_and_can_be_sent,
        tensors_may_be_read_into_memory_of_the_callers,
        every_tensor_is_one_object_under_its_key,
        f39_unregistered_memory_is_refused,
        what_is_no_sample_is_refused,
        forged_and_altered_refs_are_refused,
        a_ref_of_another_store_is_refused,
    }
    lifetime {
        f34_a_released_sample_cannot_be_had_anywhere,
        f33_a_release_frees_at_once_whatever_the_leases,
        an_aborted_sample_cannot_be_had_anywhere,
        a_put_supersedes_the_older_generation_everywhere,
        another_producer_supersedes_as_well,
        a_stale_ref_frees_nothing_else,
        f40_two_puts_never_share_a_name,
        a_sample_is_consumed_once,
        a_retained_sample_lasts_for_further_epochs,
        f35_a_failed_free_is_parked_and_retried,
        a_store_that_removes_nothing_is_told_by_a_note,
        a_store_that_cannot_be_told_is_told_by_gc,
    }
    pressure {
        a_budget_that_is_used_up_refuses,
        a_put_waits_until_somebody_elsewhere_consumes,
        a_put_does_not_wait_for_ever,
        what_nobody_releases_is_freed,
        the_budget_survives_a_restart,
        the_time_to_hold_survives_a_restart,
        a_restart_pins_what_is_there,
        samples_are_bounded_like_bytes,
        gc_looks_sooner_when_room_is_short,
    }
    atomicity {
        a_put_that_fails_anywhere_leaves_nothing,
        a_put_that_nobody_waits_for_leaves_nothing,
        a_producer_that_dies_in_mid_put_leaves_nothing,
        where_a_dead_producer_wrote_others_need_not_wait,
        two_processes_with_one_number_lose_no_sample,
        f12_a_short_tensor_fails_the_whole_sample,
        a_damaged_tensor_fails_the_whole_sample,
        a_missing_tensor_fails_the_whole_sample,
        what_arrives_late_is_freed,
    }
    together {
        producers_of_one_sample_leave_one_generation,
        producers_and_consumers_pass_on_everything_once,
        a_thousand_cycles_leave_nothing,
    }
}

/// Runs all checks, each on a store of its own, a few at a time.
///
/// # Panics
/// When a check fails or does not end; all that fail are named.
pub async fn all(make: impl Fn() -> FeatureBackend) {
    const AT_A_TIME: usize = 4;
    const PATIENCE: Duration = Duration::from_secs(300);
    let only = std::env::var("TERRACE_FEATURE_CHECK").unwrap_or_default();
    let chosen = CHECKS.iter().filter(|(name, _)| name.contains(&only));
    let checks = chosen.map(|(name, check)| (*name, check(Stage::new(make()))));
    run_checks(checks, AT_A_TIME, PATIENCE).await;
}

/// A backend, and a unique store name on it.
struct Stage {
    backend: FeatureBackend,
    name: String,
    /// The numbers of producers that were used.
    owners: Mutex<BTreeSet<u16>>,
}

/// Number of notes for the number of a producer.
const OWNER_NOTES: u64 = 3;

impl Stage {
    fn new(backend: FeatureBackend) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = format!("check-{}-{number}", now.as_nanos());
        Self { backend, name, owners: Mutex::default() }
    }

    fn producer_config(&self, owner: u16) -> FeatureConfig {
        let free = FreeConfig { retry_ms: 5, retry_max_ms: 50, ..FreeConfig::default() };
        let (poll_ms, recheck_ms) = (5, 5);
        FeatureConfig { free, poll_ms, recheck_ms, ..FeatureConfig::producer(&self.name, owner) }
    }

    fn consumer_config(&self) -> FeatureConfig {
        FeatureConfig { owner: None, ..self.producer_config(0) }
    }

    async fn open(&self, config: FeatureConfig) -> Process {
        self.note_owner(&config);
        Process::open((self.backend.handle)(), config).await
    }

    fn note_owner(&self, config: &FeatureConfig) {
        self.owners.lock().expect("nobody panics").extend(config.owner);
    }

    /// Returns true if the store is empty except for the notes of producers' numbers.
    async fn assert_empty(&self, process: &Process) {
        process.store.flush().await.expect("a sound store flushes");
        let stats = process.store.stats();
        let notes = OWNER_NOTES * self.owners.lock().expect("nobody panics").len() as u64;
        for tier in stats.memory.into_iter().chain(stats.disk) {
            assert!(tier.objects <= notes && tier.hard_pinned <= notes, "{notes}: {tier:#?}");
        }
        if let Some(objects) = &self.backend.objects {
            assert_eq!(objects(), notes, "objects are left");
        }
    }

    async fn producer(&self) -> Process {
        self.open(self.producer_config(0)).await
    }

    async fn consumer(&self) -> Process {
        self.open(self.consumer_config()).await
    }

    /// A process whose store goes wrong on demand.
    async fn mischievous(&self, config: FeatureConfig) -> (Process, Arc<MischievousStore>) {
        self.note_owner(&config);
        let store = Arc::new(MischievousStore::new((self.backend.handle)(), |_| Trick::None));
        (Process::open(store.clone(), config).await, store)
    }
}

/// One process that uses the feature store.
struct Process {
    features: FeatureStore,
    store: Arc<dyn Store>,
}

/// A sample has two tensors of these sizes.
const SIZES: [(&str, usize); 2] = [("hidden", 6000), ("ids", 800)];
const SAMPLE_BYTES: u64 = 6800;
/// Bytes that this takes of a store: a slot for each tensor and each note.
const SAMPLE_FOOTPRINT: u64 = 4 * OBJECT_BYTES_MAX as u64;

impl Process {
    async fn open(store: Arc<dyn Store>, config: FeatureConfig) -> Self {
        let features = FeatureStore::open(store.clone(), config).await.expect("it can be opened");
        Self { features, store }
    }

    /// Puts a sample whose bytes follow from its name and a number.
    async fn put_as(&self, sample: &str, salt: u64) -> Result<FeatureRef, FeatureError> {
        let [(hidden, hidden_bytes), (ids, ids_bytes)] = SIZES;
        let hidden = TensorSpec::new(hidden, Dtype::Bf16, [30, hidden_bytes as u64 / 60]);
        let ids = TensorSpec::new(ids, Dtype::I64, [ids_bytes as u64 / 8]);
        self.put_specs(sample, salt, vec![hidden, ids]).await
    }

    async fn put_specs(
        &self,
        sample: &str,
        salt: u64,
        specs: Vec<TensorSpec>,
    ) -> Result<FeatureRef, FeatureError> {
        let mut registrations = Vec::new();
        let tensors = specs.into_iter().map(|spec| {
            let bytes = spec.bytes().expect("a size");
            let arena = Arena::new(1, bytes.max(1)).expect("there is memory");
            registrations.push(self.features.register(&arena).expect("a new arena"));
            fill(sample, &spec.name, salt, &mut arena.target(0).expect("new").first(bytes));
            Tensor::new(spec, arena.source(0).expect("new").first(bytes))
        });
        let tensors = tensors.collect();
        self.features.put(sample, tensors).await
    }

    async fn put(&self, sample: &str) -> FeatureRef {
        self.put_as(sample, 0).await.unwrap_or_else(|error| panic!("{sample}: {error}"))
    }

    /// Reads a sample and checks every byte.
    async fn read(&self, reference: &FeatureRef, salt: u64) -> Result<(), FeatureError> {
        let tensors = self.features.get(reference).await?;
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        assert_eq!(specs, reference.tensors());
        for tensor in &tensors {
            let mut expected = vec![0; tensor.len()];
            fill(reference.sample(), &tensor.spec.name, salt, &mut expected);
            assert!(expected == tensor[..], "{reference:?} has wrong bytes");
        }
        Ok(())
    }

    async fn is_gone(&self, reference: &FeatureRef) -> bool {
        match self.features.get(reference).await {
            Err(FeatureError::Gone { .. }) => true,
            Ok(_) => false,
            Err(error) => panic!("neither there nor gone: {error}"),
        }
    }

    async fn release(&self, reference: &FeatureRef) -> Result<Released, FeatureError> {
        self.features.release(reference.clone()).await
    }

    /// Number of the sample's objects in the store.
    async fn objects_left(&self, reference: &FeatureRef) -> usize {
        let ids: Vec<_> = self.features.objects(reference).into_iter().map(|(_, id)| id).collect();
        let found = self.store.exists(&ids, ExistsOptions::default()).await;
        found.into_iter().filter(|found| found.as_ref().expect("it answers").is_present()).count()
    }

    /// Collects garbage until nothing of this producer is left in the store.
    async fn settles(&self) {
        let patience = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let _ = self.features.gc().await;
            let stats = self.features.stats();
            if (stats.resident_bytes, stats.live, stats.parked, stats.putting) == (0, 0, 0, 0) {
                return;
            }
            assert!(tokio::time::Instant::now() < patience, "something is left: {stats:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Bytes that follow from names and a number, so that any wrong one is noticed.
fn fill(sample: &str, tensor: &str, salt: u64, bytes: &mut [u8]) {
    let mut state = salt ^ 0x9E37_79B9_7F4A_7C15;
    for byte in sample.bytes().chain([0]).chain(tensor.bytes()) {
        state = (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23);
    }
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        let next = (state ^ (state >> 33)).to_le_bytes();
        word.copy_from_slice(&next[..word.len()]);
    }
}

/// Refuses some calls.
fn refuse(calls: &'static [Asked]) -> impl FnMut(Asked) -> Trick + Send + 'static {
    move |asked| if calls.contains(&asked) { Trick::Refuse } else { Trick::None }
}

/// Removes one object behind the feature store's back.
async fn steal(process: &Process, reference: &FeatureRef, tensor: usize) {
    let (_, id) = process.features.objects(reference).swap_remove(tensor);
    process.store.remove(&[id], Removal::Final).await.remove(0).expect("it is there");
}
