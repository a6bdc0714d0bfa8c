//! The stores to compare, behind one small trait.

mod terrace;

use anyhow::Result;
use clap::ValueEnum;
use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, PsyncIoEngineConfig, UringIoEngineConfig,
};
use redb::{Database, Durability, ReadableDatabase, TableDefinition};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::Arc,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};
use terrace::Terrace;

/// Requests in flight while reading, and threads of the direct IO.
pub const DEPTH: usize = 16;
/// Objects per acknowledgement.
pub const BATCH: usize = 64;

const MIB: usize = 1 << 20;
const TABLE: TableDefinition<u128, &[u8]> = TableDefinition::new("pages");

/// Store to measure.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Direct,
    DirectSync,
    Redb,
    Foyer,
    FoyerUring,
    FoyerNowait,
    Terrace,
    TerraceDurable,
}

impl Kind {
    /// Returns the guarantee of an acknowledged put.
    pub fn acknowledged(self) -> &'static str {
        match self {
            Self::Direct => "pwrite returned; one fdatasync after the last object",
            Self::DirectSync => "as direct, with an fdatasync after every 64 objects",
            Self::Redb => "the transaction of its 64 objects is committed, fdatasync included",
            Self::Foyer => "wait() returned: queues are written out, no sync, losses unreported",
            Self::FoyerUring => "as foyer, with the io_uring engine in place of pread and pwrite",
            Self::FoyerNowait => "insert() returned: it is in memory and perhaps in a queue",
            Self::Terrace => "it is in its slot and readable; one flush after the last object",
            Self::TerraceDurable => "it and its index entry survive a crash, for every 64 objects",
        }
    }

    pub fn open(self, dir: &Path, pages: &Pages) -> Result<Box<dyn Store>> {
        Ok(match self {
            Self::Direct => Box::new(Direct::open(dir, pages, false)?),
            Self::DirectSync => Box::new(Direct::open(dir, pages, true)?),
            Self::Redb => Box::new(Redb::open(dir)?),
            Self::Foyer | Self::FoyerUring | Self::FoyerNowait => {
                Box::new(Foyer::open(dir, pages, self)?)
            }
            Self::Terrace => Box::new(Terrace::open(dir, pages, false)?),
            Self::TerraceDurable => Box::new(Terrace::open(dir, pages, true)?),
        })
    }
}

/// The objects: a key each, and content that identifies its key.
pub struct Pages {
    pub object_bytes: usize,
    pub keys: Vec<u128>,
    body: Vec<u8>,
}

impl Pages {
    pub fn new(object_bytes: usize, objects: usize) -> Self {
        let mut state = 0;
        let keys = (0..objects)
            .map(|_| (u128::from(random(&mut state)) << 64) | u128::from(random(&mut state)))
            .collect();
        let body = (0..object_bytes / 8).flat_map(|_| random(&mut state).to_le_bytes()).collect();
        Self { object_bytes, keys, body }
    }

    /// Returns the indices of all objects in random order.
    pub fn shuffled(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.keys.len()).collect();
        let mut state = 1;
        for i in (1..order.len()).rev() {
            order.swap(i, (random(&mut state) % (i as u64 + 1)) as usize);
        }
        order
    }

    /// Turns a buffer with any object into the object of this key.
    fn stamp(&self, key: u128, object: &mut [u8]) {
        object[..16].copy_from_slice(&key.to_le_bytes());
        object[self.object_bytes - 16..].copy_from_slice(&key.to_le_bytes());
    }

    fn is_object(&self, key: u128, object: &[u8]) -> bool {
        let key = key.to_le_bytes();
        object.len() == self.object_bytes && object.starts_with(&key) && object.ends_with(&key)
    }
}

/// A store under test.
pub trait Store {
    /// Writes all pages; returns after the last acknowledgement.
    fn put(&self, pages: &Pages) -> Result<()>;
    /// Reads pages by index, `DEPTH` at a time, and counts those that are intact.
    fn count(&self, pages: &Arc<Pages>, order: Vec<usize>) -> Result<usize>;
    /// Closes the store cleanly; for most, dropping it is sufficient.
    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// Slots in a preallocated file without an index: the limit set by disk and kernel.
struct Direct {
    file: File,
    sync: bool,
}

impl Direct {
    fn open(dir: &Path, pages: &Pages, sync: bool) -> Result<Self> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(dir.join("slots"))?;
        let bytes = pages.keys.len() * pages.object_bytes;
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        file.sync_all()?;
        Ok(Self { file, sync })
    }
}

impl Store for Direct {
    fn put(&self, pages: &Pages) -> Result<()> {
        each(pages.keys.len(), || {
            let (mut buffer, start) = aligned(pages.object_bytes);
            buffer[start..start + pages.object_bytes].copy_from_slice(&pages.body);
            move |i| {
                let object = &mut buffer[start..start + pages.object_bytes];
                pages.stamp(pages.keys[i], object);
                self.file.write_all_at(object, (i * pages.object_bytes) as u64)?;
                if self.sync && i % BATCH == BATCH - 1 {
                    self.file.sync_data()?;
                }
                Ok(true)
            }
        })?;
        Ok(self.file.sync_data()?)
    }

    fn count(&self, pages: &Arc<Pages>, order: Vec<usize>) -> Result<usize> {
        each(order.len(), || {
            let (mut buffer, start) = aligned(pages.object_bytes);
            let order = &order;
            move |i| {
                let object = &mut buffer[start..start + pages.object_bytes];
                self.file.read_exact_at(object, (order[i] * pages.object_bytes) as u64)?;
                Ok(pages.is_object(pages.keys[order[i]], object))
            }
        })
    }
}

struct Redb {
    database: Database,
}

impl Redb {
    /// The cache holds the largest batch, so that a transaction is written once.
    fn open(dir: &Path) -> Result<Self> {
        let database = Database::builder().set_cache_size(384 * MIB).create(dir.join("redb"))?;
        Ok(Self { database })
    }
}

impl Store for Redb {
    fn put(&self, pages: &Pages) -> Result<()> {
        let mut object = pages.body.clone();
        for batch in pages.keys.chunks(BATCH) {
            let mut transaction = self.database.begin_write()?;
            transaction.set_durability(Durability::Immediate)?;
            {
                let mut table = transaction.open_table(TABLE)?;
                for &key in batch {
                    pages.stamp(key, &mut object);
                    table.insert(key, object.as_slice())?;
                }
            }
            transaction.commit()?;
        }
        Ok(())
    }

    fn count(&self, pages: &Arc<Pages>, order: Vec<usize>) -> Result<usize> {
        let table = self.database.begin_read()?.open_table(TABLE)?;
        each(order.len(), || {
            |i| {
                let key = pages.keys[order[i]];
                Ok(table.get(key)?.is_some_and(|value| pages.is_object(key, value.value())))
            }
        })
    }
}

struct Foyer {
    runtime: tokio::runtime::Runtime,
    cache: HybridCache<u128, Vec<u8>>,
    wait: bool,
}

impl Foyer {
    /// Capacity is a quarter more than the payload, since objects with their headers fill whole 4
    /// KiB blocks; nothing is evicted. The buffers hold two batches of the largest objects.
    fn open(dir: &Path, pages: &Pages, kind: Kind) -> Result<Self> {
        let runtime = tokio::runtime::Runtime::new()?;
        let payload_bytes = pages.keys.len() * pages.object_bytes;
        let device = FsDeviceBuilder::new(dir)
            .with_capacity((payload_bytes / 4 * 5).max(1 << 30))
            .with_direct(true)
            .build()?;
        let engine = BlockEngineConfig::new(device)
            .with_block_size(64 * MIB)
            .with_flushers(2)
            .with_buffer_pool_size(256 * MIB)
            .with_submit_queue_size_threshold(256 * MIB);
        let builder = HybridCacheBuilder::new()
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .memory(64 * MIB)
            .with_weighter(|_: &u128, value: &Vec<u8>| value.len())
            .storage();
        let builder = if kind == Kind::FoyerUring {
            let uring: Box<dyn foyer::IoEngineConfig> = Box::new(UringIoEngineConfig::new());
            builder.with_io_engine_config(uring)
        } else {
            builder.with_io_engine_config(PsyncIoEngineConfig::new())
        };
        let cache = runtime.block_on(builder.with_engine_config(engine).build())?;
        Ok(Self { runtime, cache, wait: kind != Kind::FoyerNowait })
    }
}

impl Store for Foyer {
    /// Two batches are in flight: one is inserted while the other is written.
    fn put(&self, pages: &Pages) -> Result<()> {
        self.runtime.block_on(async {
            let mut waiting: Option<tokio::task::JoinHandle<()>> = None;
            for batch in pages.keys.chunks(BATCH) {
                for &key in batch {
                    let mut object = pages.body.clone();
                    pages.stamp(key, &mut object);
                    self.cache.insert(key, object);
                }
                if self.wait {
                    let store = self.cache.storage().clone();
                    let wait = tokio::spawn(async move { store.wait().await });
                    if let Some(before) = waiting.replace(wait) {
                        before.await?;
                    }
                }
            }
            if let Some(last) = waiting {
                last.await?;
            }
            Ok(())
        })
    }

    fn count(&self, pages: &Arc<Pages>, order: Vec<usize>) -> Result<usize> {
        let (order, next) = (Arc::new(order), Arc::new(AtomicUsize::new(0)));
        let readers: Vec<_> = (0..DEPTH)
            .map(|_| {
                let (pages, order) = (pages.clone(), order.clone());
                let (cache, next) = (self.cache.clone(), next.clone());
                self.runtime.spawn(async move {
                    let mut found = 0;
                    while let Some(&i) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let key = pages.keys[i];
                        let entry = cache.get(&key).await?;
                        let whole = entry.is_some_and(|e| pages.is_object(key, e.value()));
                        found += usize::from(whole);
                    }
                    anyhow::Ok(found)
                })
            })
            .collect();
        readers.into_iter().map(|reader| self.runtime.block_on(reader)?).sum()
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.runtime.block_on(self.cache.close())?)
    }
}

/// Distributes the numbers below `count` to `DEPTH` threads with a worker each, and counts those
/// for which the worker returned true.
fn each<W>(count: usize, worker: impl Fn() -> W) -> Result<usize>
where
    W: FnMut(usize) -> Result<bool> + Send,
{
    let next = &AtomicUsize::new(0);
    let run = |mut work: W| {
        let mut yes = 0;
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return Ok(yes);
            }
            yes += usize::from(work(i)?);
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..DEPTH)
            .map(|_| {
                let work = worker();
                scope.spawn(move || run(work))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no worker panics")).sum()
    })
}

/// Returns a buffer with an aligned range of `bytes` bytes for direct IO, and the start of that
/// range.
fn aligned(bytes: usize) -> (Vec<u8>, usize) {
    let buffer = vec![0; bytes + 4096];
    let start = buffer.as_ptr().align_offset(4096);
    (buffer, start)
}

/// SplitMix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
