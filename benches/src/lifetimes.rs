//! Memory use of a store while objects are produced and consumed. It should follow the number of
//! objects in flight, not the lease duration.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_cache::PageKey;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, MemoryConfig, MemoryStore, ObjectId, Owner, Pin, Put,
    PutOptions, Removal, Store,
};

/// Parameters of the benchmark.
#[derive(Clone, Debug)]
pub struct LifetimesWorkload {
    /// Lease durations, one run each.
    pub lease_ttls: Vec<Duration>,
    /// Duration of each run.
    pub run: Duration,
    /// Objects in flight.
    pub concurrency: u32,
    /// Size of an object.
    pub object_bytes: usize,
    /// Capacity of the store.
    pub capacity_bytes: u64,
    /// Called with a message when a phase begins.
    pub progress: fn(&str),
}

/// Results of one run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LifetimesFigures {
    /// Lease duration.
    pub lease_ttl_s: f64,
    /// Objects produced and consumed.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Mean memory use.
    pub resident_mean_bytes: u64,
    /// Largest memory use.
    pub resident_max_bytes: u64,
    /// Memory use at the end.
    pub resident_end_bytes: u64,
    /// Evicted objects; 0 is expected.
    pub evicted: u64,
}

impl LifetimesWorkload {
    /// Runs the benchmark, once for each lease duration.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub fn run(&self) -> Result<Vec<LifetimesFigures>, Box<dyn Error + Send + Sync>> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build()?;
        self.lease_ttls.iter().map(|ttl| runtime.block_on(self.run_once(*ttl))).collect()
    }

    async fn run_once(
        &self,
        ttl: Duration,
    ) -> Result<LifetimesFigures, Box<dyn Error + Send + Sync>> {
        (self.progress)(&format!("leases of {ttl:?} for {:?}", self.run));
        let config = MemoryConfig {
            lease_ttl_ms: ttl.as_millis() as u64,
            leased_share_max: 1.0,
            ..MemoryConfig::new(self.capacity_bytes, self.object_bytes)
        };
        let store = Arc::new(MemoryStore::new(config)?);
        let arena = Arena::new(2 * self.concurrency, self.object_bytes)?;
        let _registration = store.register(&arena)?;
        let (objects, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let worker = |number: u32| {
            let (store, arena) = (store.clone(), arena.clone());
            let (objects, over) = (objects.clone(), over.clone());
            async move {
                let root = PageKey(u128::from(number));
                for object in 0.. {
                    if over.load(Ordering::Relaxed) {
                        break;
                    }
                    let id = ObjectId::page(root, root.next(root, &[object]));
                    pass_on(&store, &arena, number, id).await?;
                    objects.fetch_add(1, Ordering::Relaxed);
                }
                Ok::<(), Box<dyn Error + Send + Sync>>(())
            }
        };
        let workers: Vec<_> =
            (0..self.concurrency).map(|number| tokio::spawn(worker(number))).collect();
        let resident = || store.stats().memory.map_or(0, |memory| memory.resident_bytes);
        let (began, mut samples) = (Instant::now(), Vec::new());
        while began.elapsed() < self.run {
            tokio::time::sleep(Duration::from_millis(2)).await;
            samples.push(resident());
        }
        over.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.await??;
        }
        let objects = objects.load(Ordering::Relaxed);
        Ok(LifetimesFigures {
            lease_ttl_s: ttl.as_secs_f64(),
            objects,
            bytes: objects * self.object_bytes as u64,
            resident_mean_bytes: samples.iter().sum::<u64>() / samples.len().max(1) as u64,
            resident_max_bytes: samples.iter().copied().max().unwrap_or(0),
            resident_end_bytes: resident(),
            evicted: store.stats().memory.map_or(0, |memory| memory.evicted),
        })
    }
}

/// Passes one object through its life: put with a hard pin, lookup with a lease, get, release.
async fn pass_on(
    store: &MemoryStore,
    arena: &Arena,
    number: u32,
    id: ObjectId,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let pinned =
        PutOptions { pin: Some(Pin::Hard(Owner::named("lifetimes"))), ..PutOptions::default() };
    let put = Put::new(id, arena.source(2 * number)?);
    store.put_from(vec![put], pinned).await.remove(0)?;
    let leased = ExistsOptions { lease: true, ..ExistsOptions::default() };
    store.exists(&[id], leased).await.remove(0)?;
    let get = Get::new(id, arena.target(2 * number + 1)?);
    store.get_into(vec![get], GetOptions::default()).await.remove(0)?;
    store.remove(&[id], Removal::Final).await.remove(0)?;
    Ok(())
}
