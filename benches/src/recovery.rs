//! Memory and start time of a disk store with very many objects.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;
use terrace_cache::PageKey;
use terrace_l3::{Arena, ObjectId, Put, PutOptions, Store};
use terrace_l3_disk::{Direction, Disk, DiskConfig, DiskFile, DiskStore, FileDisk, Transfer};

/// Sizes of the stores that are filled and opened.
#[derive(Clone, Debug)]
pub struct RecoveryWorkload {
    /// The folder for the index. The files are deleted at the end.
    pub path: PathBuf,
    /// Numbers of objects, one run for each.
    pub objects: Vec<u32>,
    /// Capacity of the store in each run.
    pub capacity_bytes: u64,
    /// Size of the largest object.
    pub object_bytes: usize,
    /// Called with a message when a phase begins.
    pub progress: fn(&str),
}

/// Figures of one run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RecoveryFigures {
    /// Number of objects in the store.
    pub objects: u64,
    /// Memory of the index after the store was opened.
    pub index_memory_bytes: u64,
    /// Size of the index on disk.
    pub index_file_bytes: u64,
    /// Time to open the store.
    pub open_s: f64,
    /// Time to read the index file with one read of 1 MiB at a time, without interpreting it.
    pub plain_read_s: f64,
}

type Failure = Box<dyn Error + Send + Sync>;

/// A disk that discards objects and stores the index: recovery reads nothing else.
#[derive(Debug)]
struct IndexDisk {
    files: FileDisk,
    data_bytes: AtomicU64,
}

impl Disk for IndexDisk {
    fn start(&self, transfers: Vec<Transfer>) {
        let (data, index): (Vec<_>, Vec<_>) =
            transfers.into_iter().partition(|transfer| transfer.file() == DiskFile::Data);
        self.files.start(index);
        for transfer in data {
            assert_eq!(transfer.direction(), Direction::Write, "objects were discarded");
            let bytes = transfer.bytes();
            transfer.finish(Ok(bytes));
        }
    }

    fn sync(&self, file: DiskFile) -> io::Result<()> {
        match file {
            DiskFile::Data => Ok(()),
            DiskFile::Index => self.files.sync(file),
        }
    }

    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        match file {
            DiskFile::Data => {
                self.data_bytes.fetch_max(bytes, Ordering::Relaxed);
                Ok(())
            }
            DiskFile::Index => self.files.grow(file, bytes),
        }
    }

    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        match file {
            DiskFile::Data => {
                self.data_bytes.fetch_min(bytes, Ordering::Relaxed);
                Ok(())
            }
            DiskFile::Index => self.files.shrink(file, bytes),
        }
    }

    fn length(&self, file: DiskFile) -> io::Result<u64> {
        match file {
            DiskFile::Data => Ok(self.data_bytes.load(Ordering::Relaxed)),
            DiskFile::Index => self.files.length(file),
        }
    }
}

impl RecoveryWorkload {
    /// Fills a store, closes it, and opens it again, for each number of objects.
    ///
    /// # Errors
    /// Fails if the store or the disk fails.
    pub fn run(&self) -> Result<Vec<RecoveryFigures>, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        self.objects.iter().map(|objects| runtime.block_on(self.run_with(*objects))).collect()
    }

    async fn run_with(&self, objects: u32) -> Result<RecoveryFigures, Failure> {
        let folder = tempfile::Builder::new().prefix("terrace-bench-").tempdir_in(&self.path)?;
        let config = DiskConfig {
            grow_bytes: 64 << 30,
            ..DiskConfig::new(folder.path(), self.capacity_bytes, self.object_bytes)
        };
        let open_disk = |data_bytes| -> Result<_, Failure> {
            let files = FileDisk::open(folder.path(), config.io, config.depth)?;
            Ok(Arc::new(IndexDisk { files, data_bytes: AtomicU64::new(data_bytes) }))
        };
        (self.progress)(&format!("storing {objects} objects"));
        let disk = open_disk(0)?;
        let store = DiskStore::open_on(disk.clone(), config.clone())?;
        put_all(&store, objects).await?;
        drop(store);
        let data_bytes = disk.length(DiskFile::Data)?;
        drop(disk);

        (self.progress)(&format!("opening a store of {objects} objects"));
        let disk = open_disk(data_bytes)?;
        let index_file_bytes = disk.length(DiskFile::Index)?;
        let began = Instant::now();
        let store = DiskStore::open_on(disk, config.clone())?;
        let open_s = began.elapsed().as_secs_f64();
        let stats = store.stats().disk.unwrap_or_default();
        if stats.objects != u64::from(objects) {
            let found = stats.objects;
            return Err(format!("only {found} of {objects} objects were found again").into());
        }
        drop(store);
        let plain_read_s = plain_read_s(&folder.path().join("index"))?;
        Ok(RecoveryFigures {
            objects: stats.objects,
            index_memory_bytes: stats.index_bytes,
            index_file_bytes,
            open_s,
            plain_read_s,
        })
    }
}

async fn put_all(store: &DiskStore, objects: u32) -> Result<(), Failure> {
    const BATCH: u32 = 4096;
    let arena = Arena::new(BATCH, 4096)?;
    let _registration = store.register(&arena)?;
    for first in (0..objects).step_by(BATCH as usize) {
        let puts = (first..(first + BATCH).min(objects)).map(|number| {
            // Any odd multiplier spreads the keys.
            let key = u128::from(number).wrapping_mul(0x2D35_8DCC_AA6C_78A5_8BB8_4B93_962E_ACC9);
            let id = ObjectId::page(PageKey(1), PageKey(key));
            Ok(Put::new(id, arena.source(number % BATCH)?))
        });
        let puts = puts.collect::<Result<Vec<_>, Failure>>()?;
        for stored in store.put_from(puts, PutOptions::default()).await {
            stored?;
        }
    }
    store.flush().await?;
    Ok(())
}

fn plain_read_s(path: &Path) -> io::Result<f64> {
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    const READ_BYTES: usize = 1 << 20;
    const BLOCK_BYTES: usize = 4096;
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let mut file = std::fs::OpenOptions::new().read(true).custom_flags(direct).open(path)?;
    let mut memory = vec![0; READ_BYTES + BLOCK_BYTES];
    let start = memory.as_ptr().align_offset(BLOCK_BYTES);
    let memory = &mut memory[start..start + READ_BYTES];
    let began = Instant::now();
    while file.read(memory)? > 0 {}
    Ok(began.elapsed().as_secs_f64())
}
