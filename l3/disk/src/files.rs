//! Directory of a store: its files, its lock and its IO engine.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::engine::Engine;
use super::io::{Disk, DiskFile, Transfer};
use super::space;
use super::threads::Threads;
use super::{IoEngine, OpenError};

/// The two files of a store, in a directory that is locked against other processes.
#[derive(Debug)]
pub struct FileDisk {
    /// Dropped before the files, which its threads use.
    engine: Box<dyn Engine>,
    data: File,
    index: File,
    direct: bool,
    /// Dropped last.
    _lock: Lock,
}

/// Lock on a directory, held until this is dropped.
#[derive(Debug)]
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // `StoreFolder` takes this time as that of the last use.
        let _ = self.0.set_modified(SystemTime::now());
        // Closing the file would not release the lock while a child process that was just started
        // has a copy of it. If it cannot be unlocked, closing it must suffice.
        let _ = self.0.unlock();
    }
}

impl FileDisk {
    /// Opens or creates the files of a store, for `depth` transfers at a time.
    ///
    /// # Errors
    /// If the directory cannot be used, or another process uses it.
    pub fn open(path: &Path, io: IoEngine, depth: usize) -> Result<Self, OpenError> {
        let unusable = |error| OpenError::Directory { path: path.to_owned(), error };
        fs::create_dir_all(path).map_err(unusable)?;
        let (data, data_direct) = open(&path.join("data")).map_err(unusable)?;
        let lock = lock(path, &data)?;
        let (index, index_direct) = open(&path.join("index")).map_err(unusable)?;
        // Otherwise a crash could leave a directory without the entries of the new files.
        File::open(path).and_then(|directory| directory.sync_all()).map_err(unusable)?;
        let engine = engine(&data, &index, io, depth.max(1)).map_err(unusable)?;
        Ok(Self { engine, data, index, direct: data_direct && index_direct, _lock: lock })
    }

    /// Returns true if transfers bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    fn file(&self, file: DiskFile) -> &File {
        match file {
            DiskFile::Data => &self.data,
            DiskFile::Index => &self.index,
        }
    }
}

impl Disk for FileDisk {
    fn start(&self, transfers: Vec<Transfer>) {
        self.engine.start(transfers);
    }

    fn sync(&self, file: DiskFile) -> io::Result<()> {
        let file = self.file(file);
        // Writes to a deleted file succeed and are lost.
        if file.metadata()?.nlink() == 0 {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the store's files were deleted"));
        }
        file.sync_data()
    }

    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        let file = self.file(file);
        let length = file.metadata()?.len();
        if length >= bytes {
            return Ok(());
        }
        let reserve = || fallocate(file, FallocateFlags::empty(), length, bytes - length);
        match rustix::io::retry_on_intr(reserve) {
            Ok(()) => file.sync_all(),
            // The file system cannot reserve space: each write may find none.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
                file.set_len(bytes)?;
                file.sync_all()
            }
            Err(error) => {
                file.set_len(length)?;
                Err(error.into())
            }
        }
    }

    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        let file = self.file(file);
        if file.metadata()?.len() > bytes {
            file.set_len(bytes)?;
        }
        Ok(())
    }

    fn length(&self, file: DiskFile) -> io::Result<u64> {
        Ok(self.file(file).metadata()?.len())
    }

    fn available(&self) -> Option<u64> {
        space::available(&self.data)
    }
}

fn engine(data: &File, index: &File, io: IoEngine, depth: usize) -> io::Result<Box<dyn Engine>> {
    let threads = || -> io::Result<Box<dyn Engine>> {
        Ok(Box::new(Threads::new(data.try_clone()?, index.try_clone()?, depth)?))
    };
    match io {
        IoEngine::Threads => threads(),
        IoEngine::Auto => uring(data, index, depth).or_else(|error| {
            tracing::warn!("io_uring is not available, so slower threads do the IO: {error}");
            threads()
        }),
        IoEngine::Uring => uring(data, index, depth),
    }
}

#[cfg(target_os = "linux")]
fn uring(data: &File, index: &File, depth: usize) -> io::Result<Box<dyn Engine>> {
    const RINGS: usize = 2;
    let uring = super::uring::Uring::new(data, index, RINGS, depth.div_ceil(RINGS))?;
    Ok(Box::new(uring))
}

#[cfg(not(target_os = "linux"))]
fn uring(_: &File, _: &File, _: usize) -> io::Result<Box<dyn Engine>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "io_uring exists only on Linux"))
}

/// Opens a file for direct IO, or without it if the file system does not support it.
fn open(path: &Path) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let direct = options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(path);
    match direct {
        Ok(file) => Ok((file, true)),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            options.open(path).map(|file| (file, false))
        }
        Err(error) => Err(error),
    }
}

/// Time that the kernel may need to end the transfers of a killed process.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Locks the store against other processes and other handles in this process. The lock is on the
/// data file itself, so that it outlasts a killed process until the kernel has ended its transfers.
fn lock(path: &Path, data: &File) -> Result<Lock, OpenError> {
    let unusable = |error| OpenError::Directory { path: path.to_owned(), error };
    let owner_path = path.join("lock");
    let gives_up = Instant::now() + LOCK_WAIT;
    loop {
        match data.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if Instant::now() < gives_up => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(TryLockError::WouldBlock) => {
                // Only for the error message.
                let owner = fs::read_to_string(&owner_path).unwrap_or_default();
                let owner = owner.trim().to_owned();
                return Err(OpenError::InUse { path: path.to_owned(), owner });
            }
            Err(TryLockError::Error(error)) => return Err(unusable(error)),
        }
    }
    let lock = Lock(data.try_clone().map_err(unusable)?);
    match fs::write(owner_path, format!("process {}\n", std::process::id())) {
        // The owner is informative only, so a full disk does not matter.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Ok(lock),
        written => written.map(|()| lock).map_err(unusable),
    }
}
