//! L3 in object storage: S3 and compatible stores, Google Cloud Storage, Azure, or a shared folder.
//!
//! One object of the bucket is one object of the store: the header, then the payload. The header
//! verifies everything that is read, so an old, truncated, damaged or foreign object is a miss and
//! never wrong bytes.
//!
//! A bucket does not guarantee all that a [`Store`] does; this crate adds the rest. It keeps pins,
//! leases, generations and the eviction order for the objects that this client has put or pinned,
//! in a catalogue like that of any other store. It also keeps the client's share of the bucket and
//! evicts from it. Objects of other clients are looked up and read, and belong to them. No
//! operation lists the bucket.
//!
//! ```
//! use terrace_l3::{Arena, Get, GetOptions, ObjectId, Put, PutOptions, Store};
//! use terrace_l3_buckets::{BucketsConfig, BucketsStore};
//! use terrace_cache::Namespace;
//!
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = BucketsStore::open(BucketsConfig::new("memory:///", 64 << 20, 64 << 10))?;
//! let arena = Arena::new(2, 64 << 10)?;
//! let registration = store.register(&arena)?;
//!
//! let namespace = Namespace::new("my-model", 16).digest();
//! let id = ObjectId::page(namespace, namespace.next(namespace, &[1, 2, 3]));
//! arena.target(0)?.fill(7);
//! store.put_from(vec![Put::new(id, arena.source(0)?)], PutOptions::default()).await.remove(0)?;
//! store.get_into(vec![Get::new(id, arena.target(1)?)], GetOptions::default()).await.remove(0)?;
//! assert_eq!(arena.source(0)?[..], arena.source(1)?[..]);
//! # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
//! ```

mod bucket;
mod control;
mod ledger;
mod put;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use object_store;
use object_store::ObjectStore;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use self::bucket::Bucket;
use self::ledger::BucketLedger;
use terrace_l3::backend::{InFlight, Registry, Traffic, check_shares, died, slots_of};
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, ObjectId, Pin, Presence, Put, PutOptions,
    Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored, TierStats,
};

/// Configuration of a bucket, and of this client's share of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketsConfig {
    /// `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file:///FOLDER` or
    /// `memory:///`. Stores with different prefixes share nothing.
    pub url: String,
    /// Maximum payload of this client's objects in the bucket; beyond it, the client evicts its own
    /// objects.
    pub capacity_bytes: u64,
    /// Maximum object size.
    pub object_bytes_max: usize,
    /// Time for which a lease protects from this client's own eviction and plain removal.
    pub lease_ttl_ms: u64,
    /// Maximum share of this client's objects that may be leased at a time.
    pub leased_share_max: f64,
    /// Maximum wait of a put for room.
    pub full_wait_ms: u64,
    /// Timeout of one request, including retries.
    pub request_timeout_ms: u64,
    /// Maximum number of concurrent requests; further ones wait.
    pub requests_max: u32,
    /// Number of threads that make requests and verify responses.
    pub threads: u32,
}

impl BucketsConfig {
    /// A share of `capacity_bytes` of the bucket at `url`.
    #[must_use]
    pub fn new(url: impl Into<String>, capacity_bytes: u64, object_bytes_max: usize) -> Self {
        Self {
            url: url.into(),
            capacity_bytes,
            object_bytes_max,
            lease_ttl_ms: 5_000,
            leased_share_max: 0.5,
            full_wait_ms: 500,
            request_timeout_ms: 5_000,
            requests_max: 64,
            threads: 2,
        }
    }
}

/// Reason why the store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BucketsError {
    /// The URL is invalid or refused.
    #[error("the bucket {url} cannot be used: {why}")]
    Url {
        /// The URL.
        url: String,
        /// Reason.
        why: String,
    },
    /// A setting is invalid.
    #[error("{0}")]
    Setting(String),
    /// The system cannot start threads.
    #[error("cannot start the threads for the bucket: {0}")]
    System(#[from] io::Error),
}

/// A store in a bucket. Clones are the same store.
#[derive(Clone, Debug)]
pub struct BucketsStore {
    shared: Arc<BucketsCore>,
    threads: Arc<StoreRuntime>,
}

#[derive(Debug)]
struct BucketsCore {
    config: BucketsConfig,
    bucket: Bucket,
    ledger: BucketLedger,
    registry: Registry,
    traffic: Traffic,
    in_flight: InFlight,
    closed: AtomicBool,
}

/// Runtime of the store, so that operations continue when their callers stop waiting. May be
/// dropped in any context.
#[derive(Debug)]
struct StoreRuntime(Option<Runtime>);

impl Drop for StoreRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // The runtime is dropped by a thread, which joins its threads. Detaching them while
            // they end, as a shutdown in the background does, reads memory that glibc (2.36) has
            // already unmapped.
            let ending = std::thread::Builder::new().name("terrace-bucket-end".to_owned());
            let _ = ending.spawn(move || drop(runtime));
        }
    }
}

impl BucketsStore {
    /// Opens the bucket that the URL names. Its address and credentials come from the environment
    /// variables that begin with `AWS_`, `AZURE_` or `GOOGLE_`. Sends no request yet.
    ///
    /// # Errors
    /// If the URL names no bucket, or a setting is invalid.
    pub fn open(config: BucketsConfig) -> Result<Self, BucketsError> {
        let bucket = Bucket::open(&config)?;
        Self::with_bucket(config, bucket)
    }

    /// Opens a store on a client that the caller has created, for objects whose names begin with
    /// `prefix`. The configuration's URL is ignored.
    ///
    /// # Errors
    /// If a setting is invalid.
    pub fn over(
        config: BucketsConfig,
        objects: Arc<dyn ObjectStore>,
        prefix: object_store::path::Path,
    ) -> Result<Self, BucketsError> {
        let bucket = Bucket::new(objects, prefix, &config);
        Self::with_bucket(config, bucket)
    }

    fn with_bucket(config: BucketsConfig, bucket: Bucket) -> Result<Self, BucketsError> {
        let slots = slots_of(config.capacity_bytes, config.object_bytes_max as u64);
        let slots = check_shares(0.0, 1.0, config.leased_share_max).and(slots);
        let slots = slots.map_err(BucketsError::Setting)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.threads.max(1) as usize)
            .thread_name("terrace-buckets")
            .enable_all()
            .build()?;
        let shared = BucketsCore {
            bucket,
            ledger: BucketLedger::new(slots),
            registry: Registry::default(),
            traffic: Traffic::default(),
            in_flight: InFlight::default(),
            closed: AtomicBool::new(false),
            config,
        };
        Ok(Self { shared: Arc::new(shared), threads: Arc::new(StoreRuntime(Some(runtime))) })
    }

    /// Runs an operation on the store's own threads, even if the caller stops waiting.
    async fn ask<T: Send + 'static, F>(
        &self,
        job: impl FnOnce(Arc<BucketsCore>) -> F + Send,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let under_way = self.shared.in_flight.begin();
        self.shared.check_open()?;
        let job = job(self.shared.clone());
        let runtime = self.threads.0.as_ref().expect("it is there until the last handle goes");
        let task = runtime.spawn(async move {
            let answer = job.await;
            drop(under_way);
            answer
        });
        task.await.map_err(died)
    }

    /// Runs an operation on `objects` objects.
    async fn ask_for<T: Clone + Send + 'static, F>(
        &self,
        objects: usize,
        job: impl FnOnce(Arc<BucketsCore>) -> F + Send,
    ) -> Results<T>
    where
        F: Future<Output = Results<T>> + Send + 'static,
    {
        self.ask(job).await.unwrap_or_else(|error| vec![Err(error); objects])
    }
}

impl BucketsCore {
    fn check_open(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::SeqCst) { Err(StoreError::Closed) } else { Ok(()) }
    }
}

/// Runs all jobs concurrently, and returns the results in their order.
async fn each<J, T: Send + 'static, F>(jobs: Vec<J>, run: impl Fn(J) -> F) -> Results<T>
where
    F: Future<Output = Result<T, StoreError>> + Send + 'static,
{
    let tasks: Vec<_> = jobs.into_iter().map(|job| tokio::spawn(run(job))).collect();
    let mut results = Vec::with_capacity(tasks.len());
    for task in tasks {
        results.push(task.await.map_err(died).flatten());
    }
    results
}

impl Store for BucketsStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.shared.check_open()?;
        self.shared.registry.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Traffic::count(&self.shared.traffic.exists, ids.len());
        let ids = ids.to_vec();
        Box::pin(self.ask_for(ids.len(), move |shared| shared.exist(ids, options)))
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(self.ask_for(puts.len(), move |shared| {
            // A registration that ends from here on does not end the call.
            let checked = |put| shared.registry.check_put(&put).map(|()| put);
            let puts: Results<Put> = puts.into_iter().map(checked).collect();
            shared.put(puts, options)
        }))
    }

    fn get_into(&self, gets: Vec<Get>, _: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(self.ask_for(gets.len(), move |shared| {
            let checked = |get| shared.registry.check_get(&get).map(|()| get);
            let gets: Results<Get> = gets.into_iter().map(checked).collect();
            each(gets, move |get| shared.clone().get(get))
        }))
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        let ids = ids.to_vec();
        Box::pin(self.ask_for(ids.len(), move |shared| shared.pin(ids, pin)))
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(async move {
            let unpin = |id| self.shared.check_open().and_then(|()| self.shared.unpin(id, pin));
            ids.iter().map(unpin).collect()
        })
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        let ids = ids.to_vec();
        Box::pin(self.ask_for(ids.len(), move |shared| shared.remove(ids, removal)))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async {
            let flush = |shared: Arc<BucketsCore>| async move {
                shared.retry_stuck().await?;
                shared.bucket.sync().await
            };
            self.ask(flush).await.flatten()
        })
    }

    fn stats(&self) -> StoreStats {
        let BucketsCore { config, bucket, ledger, registry, traffic, .. } = &*self.shared;
        let stats = ledger.lock().catalogue.stats(config.object_bytes_max, ledger.now_ms());
        let arenas = registry.arenas() as u64;
        let remote = TierStats { arenas, io_errors: bucket.failed(), ..stats };
        StoreStats { remote: Some(traffic.fill(remote)), ..StoreStats::default() }
    }

    /// The objects in the bucket stay.
    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async {
            if self.shared.check_open().is_err() {
                return Ok(());
            }
            let flushed = self.flush().await;
            self.shared.closed.store(true, Ordering::SeqCst);
            self.shared.in_flight.none().await;
            flushed
        })
    }
}
