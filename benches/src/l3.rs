//! Stores, compared with plain direct IO or memory copies.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_cache::PageKey;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, MemoryConfig, MemoryStore, ObjectId, Put, PutOptions,
    Removal, Results, Store, StoreStats,
};
use terrace_l3_disk::{DiskConfig, DiskStore, IoEngine};

use crate::direct_file::DirectFile;

/// Parameters of the benchmark.
#[derive(Clone, Debug)]
pub struct L3Workload {
    /// Store to measure.
    pub backend: L3Backend,
    /// Size of an object.
    pub object_bytes: usize,
    /// Bytes to store and read.
    pub total_bytes: u64,
    /// Objects in flight, on disk.
    pub depth: usize,
    /// Called with a message when a phase begins.
    pub progress: fn(&str),
}

/// Store to measure.
#[derive(Clone, Debug)]
pub enum L3Backend {
    /// Memory store, compared with memory copies.
    Memory,
    /// Disk store in a temporary directory, compared with plain direct IO there.
    Disk {
        /// Parent of the temporary directory.
        path: PathBuf,
        /// IO engine.
        io: IoEngine,
    },
}

/// Results of the benchmark. Speeds are in 10^9 bytes of payload per second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct L3Figures {
    /// Speed of puts, until all objects are durable.
    pub put_gb_s: f64,
    /// Speed of verified gets, in another order.
    pub get_gb_s: f64,
    /// Speed of plain writes until durable, or of memory copies.
    pub raw_write_gb_s: f64,
    /// Speed of plain reads, or of memory copies.
    pub raw_read_gb_s: f64,
    /// `put_gb_s` as a share of `raw_write_gb_s`.
    pub put_share: f64,
    /// `get_gb_s` as a share of `raw_read_gb_s`.
    pub get_share: f64,
    /// Time of a lookup of 1,024 existing objects.
    pub exists_us: f64,
    /// Index memory per object.
    pub bytes_per_object: f64,
}

/// Number of rounds; the best counts, since noise only slows.
const ROUNDS: usize = 3;

/// Stride that visits every object once, for fewer objects than this.
pub(crate) const LARGE_PRIME: u64 = 4_294_967_291;

type Failure = Box<dyn Error + Send + Sync>;

impl L3Workload {
    /// Runs the benchmark; plain IO and store alternate.
    ///
    /// # Errors
    /// Fails if the store or the disk fails.
    pub fn run(&self) -> Result<L3Figures, Failure> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build()?;
        match &self.backend {
            L3Backend::Memory => runtime.block_on(self.run_memory()),
            L3Backend::Disk { path, io } => {
                let directory =
                    tempfile::Builder::new().prefix("terrace-bench-").tempdir_in(path)?;
                runtime.block_on(self.run_disk(directory.path(), *io))
            }
        }
    }

    async fn run_memory(&self) -> Result<L3Figures, Failure> {
        let objects = self.objects();
        let config = MemoryConfig {
            watermark_high: 1.0,
            watermark_low: 1.0,
            ..MemoryConfig::new(self.total_bytes, self.object_bytes)
        };
        let store = Arc::new(MemoryStore::new(config)?);
        let mut shoveled = PlainCopy::new(objects as usize * self.object_bytes);
        // One batch at a time: one thread copies, as in the plain run.
        let crew = Crew::new(store.clone(), self.object_bytes, objects, 1, 1)?;
        let mut best = Best::default();
        for round in 0..=ROUNDS {
            (self.progress)(&format!("memory, round {round} of {ROUNDS}"));
            let (write, put) = (shoveled.copy(self.object_bytes), crew.put_all().await?);
            let (read, get) = (shoveled.copy(self.object_bytes), crew.get_all().await?);
            // The first round touches all memory for the first time.
            if round > 0 {
                best.note(write, put, read, get);
            }
            crew.remove_all(round < ROUNDS).await?;
        }
        let exists_us = exists_us(&*store, objects).await?;
        let bytes_per_object = index_share(&store.stats(), objects);
        Ok(self.figures(best, exists_us, bytes_per_object))
    }

    async fn run_disk(&self, path: &Path, io: IoEngine) -> Result<L3Figures, Failure> {
        let objects = self.objects();
        let plain_path = path.join("plain");
        let plain =
            DirectFile::create(&plain_path, self.object_bytes, u64::from(objects), self.depth)?;
        let store_path = path.join("store");
        let store = Arc::new(DiskStore::open(self.disk_config(&store_path, io, objects))?);
        // Twice as many objects as the disk has in flight, so that its queue is always full.
        let batch = 4.min(self.depth);
        let tasks = 2 * self.depth / batch;
        let crew = Crew::new(store.clone(), self.object_bytes, objects, tasks, batch)?;
        let mut best = Best::default();
        for round in 0..=ROUNDS {
            (self.progress)(&format!("disk, round {round} of {ROUNDS}"));
            let (write, put) = (plain.write()?, crew.put_all().await?);
            let (read, get) = (plain.read()?, crew.get_all().await?);
            // In the first round the file system allocates blocks.
            if round > 0 {
                best.note(write, put, read, get);
            }
            crew.remove_all(round < ROUNDS).await?;
        }
        let exists_us = exists_us(&*store, objects).await?;
        let bytes_per_object = index_share(&store.stats(), objects);
        Ok(self.figures(best, exists_us, bytes_per_object))
    }

    fn disk_config(&self, path: &Path, io: IoEngine, objects: u32) -> DiskConfig {
        let slot_bytes = self.object_bytes.next_multiple_of(4096) + 4096;
        let capacity_bytes = u64::from(objects) * slot_bytes as u64;
        DiskConfig {
            io,
            depth: self.depth,
            grow_bytes: capacity_bytes,
            watermark_high: 1.0,
            watermark_low: 1.0,
            ..DiskConfig::new(path, capacity_bytes, self.object_bytes)
        }
    }

    fn objects(&self) -> u32 {
        (self.total_bytes / self.object_bytes as u64).clamp(1, u64::from(u32::MAX - 1)) as u32
    }

    fn figures(&self, best: Best, exists_us: f64, bytes_per_object: f64) -> L3Figures {
        let bytes = f64::from(self.objects()) * self.object_bytes as f64;
        let speed = |took: Duration| bytes / took.as_secs_f64() / 1e9;
        let share = |took: Duration, plain: Duration| plain.as_secs_f64() / took.as_secs_f64();
        L3Figures {
            put_gb_s: speed(best.put),
            get_gb_s: speed(best.get),
            raw_write_gb_s: speed(best.write),
            raw_read_gb_s: speed(best.read),
            put_share: share(best.put, best.write),
            get_share: share(best.get, best.read),
            exists_us,
            bytes_per_object,
        }
    }
}

/// The shortest times.
struct Best {
    write: Duration,
    put: Duration,
    read: Duration,
    get: Duration,
}

impl Default for Best {
    fn default() -> Self {
        Self { write: Duration::MAX, put: Duration::MAX, read: Duration::MAX, get: Duration::MAX }
    }
}

impl Best {
    fn note(&mut self, write: Duration, put: Duration, read: Duration, get: Duration) {
        self.write = self.write.min(write);
        self.put = self.put.min(put);
        self.read = self.read.min(read);
        self.get = self.get.min(get);
    }
}

/// Source and target memory of plain copies, as large as the store.
struct PlainCopy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl PlainCopy {
    fn new(bytes: usize) -> Self {
        Self { from: vec![1; bytes], to: vec![2; bytes] }
    }

    fn copy(&mut self, object_bytes: usize) -> Duration {
        let began = Instant::now();
        let objects =
            self.from.chunks_exact(object_bytes).zip(self.to.chunks_exact_mut(object_bytes));
        for (from, to) in objects {
            std::hint::black_box(to).copy_from_slice(std::hint::black_box(from));
        }
        began.elapsed()
    }
}

/// Tasks that put and get all objects, each with a share of the objects and with its own pages.
struct Crew<S> {
    store: Arc<S>,
    arena: Arena,
    registration: terrace_l3::Registration,
    objects: u32,
    tasks: usize,
    batch: usize,
}

impl<S: Store + 'static> Crew<S> {
    fn new(
        store: Arc<S>,
        object_bytes: usize,
        objects: u32,
        tasks: usize,
        batch: usize,
    ) -> Result<Self, Failure> {
        // On disk the pages in flight; in memory as much as the plain run reads, so that caches are
        // equally cold.
        let pages = (tasks * batch).max(if tasks == 1 { objects as usize } else { 0 });
        let arena = Arena::new(pages as u32, object_bytes)?;
        for page in 0..arena.pages() {
            arena.target(page)?.fill(page as u8);
        }
        let registration = store.register(&arena)?;
        Ok(Self { store, arena, registration, objects, tasks, batch })
    }

    async fn put_all(&self) -> Result<Duration, Failure> {
        let began = Instant::now();
        self.each_batch(1, |store, arena, ids, pages| {
            Box::pin(async move {
                let put = |(id, page)| Ok(Put::new(id, arena.source(page)?));
                let puts = ids.into_iter().zip(pages).map(put).collect::<Result<_, Failure>>()?;
                all(store.put_from(puts, PutOptions::default()).await)
            })
        })
        .await?;
        self.store.flush().await?;
        Ok(began.elapsed())
    }

    async fn get_all(&self) -> Result<Duration, Failure> {
        let began = Instant::now();
        self.each_batch(LARGE_PRIME, |store, arena, ids, pages| {
            Box::pin(async move {
                let get = |(id, page)| Ok(Get::new(id, arena.target(page)?));
                let gets = ids.into_iter().zip(pages).map(get).collect::<Result<_, Failure>>()?;
                all(store.get_into(gets, GetOptions::default()).await)
            })
        })
        .await?;
        Ok(began.elapsed())
    }

    async fn remove_all(&self, really: bool) -> Result<(), Failure> {
        if really {
            let ids: Vec<ObjectId> = (0..self.objects).map(id).collect();
            all(self.store.remove(&ids, Removal::Forced).await)?;
            self.store.flush().await?;
        }
        Ok(())
    }

    /// Runs the work for all objects, in an order given by `stride`.
    async fn each_batch(&self, stride: u64, work: Work<S>) -> Result<(), Failure> {
        let mut tasks = Vec::new();
        for task in 0..self.tasks {
            let (store, arena) = (self.store.clone(), self.arena.clone());
            let (objects, batch, step) = (self.objects, self.batch, self.tasks * self.batch);
            tasks.push(tokio::spawn(async move {
                for first in (task * batch..objects as usize).step_by(step) {
                    let numbers = first..(first + batch).min(objects as usize);
                    let pages = numbers.clone().map(|number| number as u32 % arena.pages());
                    let skip = |number: usize| (number as u64 * stride % u64::from(objects)) as u32;
                    let ids = numbers.map(|number| id(skip(number))).collect();
                    work(store.clone(), arena.clone(), ids, pages.collect()).await?;
                }
                Ok::<(), Failure>(())
            }));
        }
        for task in tasks {
            task.await??;
        }
        Ok(())
    }
}

type Work<S> = fn(
    Arc<S>,
    Arena,
    Vec<ObjectId>,
    Vec<u32>,
) -> std::pin::Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// Returns an error unless all of a batch succeeded.
pub(crate) fn all<T>(results: Results<T>) -> Result<(), Failure> {
    results.into_iter().try_for_each(|result| result.map(drop)).map_err(Into::into)
}

/// Returns the object id of a number.
pub(crate) fn id(number: u32) -> ObjectId {
    let root = PageKey(0x7e44_ace0);
    ObjectId::page(root, root.next(root, &[number]))
}

/// Returns the time of a lookup of 1,024 objects.
async fn exists_us(store: &dyn Store, objects: u32) -> Result<f64, Failure> {
    const KEYS: u32 = 1024;
    const TIMES: u32 = 64;
    let mut took = Duration::ZERO;
    for time in 0..TIMES {
        let number = |key: u32| (key.wrapping_mul(7919).wrapping_add(time * KEYS)) % objects;
        let ids: Vec<ObjectId> = (0..KEYS).map(|key| id(number(key))).collect();
        let began = Instant::now();
        let answers = store.exists(&ids, ExistsOptions::default()).await;
        took += began.elapsed();
        for answer in answers {
            if !answer?.is_present() {
                return Err("an object that was stored is not there".into());
            }
        }
    }
    Ok(took.as_secs_f64() * 1e6 / f64::from(TIMES))
}

fn index_share(stats: &StoreStats, objects: u32) -> f64 {
    let tier = stats.memory.or(stats.disk).unwrap_or_default();
    tier.index_bytes as f64 / f64::from(objects)
}

impl<S> std::fmt::Debug for Crew<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tasks with {} objects each, {:?}", self.tasks, self.batch, self.registration)
    }
}
