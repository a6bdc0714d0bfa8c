//! A folder of stores, one per object size, that share one limit.
//!
//! A store has objects of one size, so a model or page size that was not used before creates a new
//! store. Old stores stay as long as there is room. When a store in use needs their space, they are
//! removed, least recently used first. A store that is open is never removed.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::files::FileDisk;
use super::io::{BLOCK_BYTES, Disk, DiskFile, Transfer};
use super::store::DiskStore;
use super::{DiskConfig, OpenError};

/// A folder of stores, and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFolder {
    /// Path of the folder; it is created if necessary.
    pub path: PathBuf,
    /// Maximum size of the files of all stores together.
    pub limit_bytes: u64,
    /// Space to leave free on the file system.
    pub reserve_bytes: u64,
}

/// A store that was opened in a folder, and the other stores there.
#[derive(Debug)]
pub struct OpenedInFolder {
    /// The store.
    pub store: DiskStore,
    /// Path of the store.
    pub path: PathBuf,
    /// Other stores in the folder, most recently used first.
    pub others: Vec<OtherStore>,
    /// Stores that were removed to make room, in that order.
    pub removed: Vec<OtherStore>,
}

/// A store beside the one that was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherStore {
    /// Path of the store.
    pub path: PathBuf,
    /// Maximum object size.
    pub object_bytes_max: usize,
    /// Length of its files.
    pub bytes: u64,
    /// Time when it was last opened, written to or closed.
    pub last_used: SystemTime,
    /// Description of the process that has it open.
    pub owner: Option<String>,
}

impl StoreFolder {
    /// Opens the store for objects of `object_bytes_max`, or creates it.
    ///
    /// # Errors
    /// If the store cannot be opened, or if the stores in use leave no room for it.
    pub fn open(&self, object_bytes_max: usize) -> Result<OpenedInFolder, OpenError> {
        let path = self.path.join(name_of(object_bytes_max));
        let unusable = |error| OpenError::Directory { path: self.path.clone(), error };
        fs::create_dir_all(&self.path).map_err(unusable)?;
        let _turn = FolderLock::wait(&self.path);
        let config = self.config(&path, object_bytes_max)?;
        let disk = FileDisk::open(&path, config.io, config.depth)?;
        let removed = Mutex::new(Some(Vec::new()));
        let disk = Arc::new(SharedDisk { disk, folder: self.clone(), path: path.clone(), removed });
        // A store that exceeds its limit is shrunk when it is opened.
        let own_bytes = disk.own_bytes().map_err(unusable)?.min(self.limit_bytes);
        disk.make_room(own_bytes, 0).map_err(unusable)?;
        let store = DiskStore::open_on(disk.clone(), config)?;
        let others = self.others(&path).map_err(unusable)?;
        let removed = disk.removed.lock().take().unwrap_or_default();
        Ok(OpenedInFolder { store, path, others, removed })
    }

    /// Configuration of a store that may use the space that the stores in use leave.
    fn config(&self, path: &Path, object_bytes_max: usize) -> Result<DiskConfig, OpenError> {
        let unusable = |error| OpenError::Directory { path: self.path.clone(), error };
        let others = self.others(path).map_err(unusable)?;
        let in_use = others.iter().filter(|other| other.owner.is_some());
        let taken_bytes = in_use.clone().map(|other| other.bytes).sum();
        let rest = self.limit_bytes.saturating_sub(taken_bytes);
        let config = DiskConfig::new(path, rest, object_bytes_max);
        // The index begins with one block, and its last block may be partly empty.
        let slots = rest.saturating_sub(2 * BLOCK_BYTES as u64)
            / config.layout().slot_and_entry_bytes().max(1);
        if slots == 0 && taken_bytes > 0 {
            let owners: Vec<&str> = in_use.filter_map(|other| other.owner.as_deref()).collect();
            let (path, limit_bytes) = (path.to_owned(), self.limit_bytes);
            let owners = owners.join(" and ");
            return Err(OpenError::FolderFull { path, limit_bytes, taken_bytes, owners });
        }
        Ok(DiskConfig {
            // A store too small for one object is refused with its size.
            capacity_bytes: if slots == 0 { rest } else { slots * config.layout().slot_bytes() },
            reserve_bytes: self.reserve_bytes,
            // Small steps for small limits, so that no store takes space long before it needs it.
            grow_bytes: (self.limit_bytes / 16).clamp(64 << 10, 256 << 20),
            ..config
        })
    }

    /// Other stores in the folder than the one at `own`, most recently used first.
    fn others(&self, own: &Path) -> io::Result<Vec<OtherStore>> {
        let mut others = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            let named = path.file_name().and_then(|name| object_bytes_of(name.to_str()?));
            if let Some(object_bytes_max) = named
                && path != own
                && let Some(other) = OtherStore::inspect(path, object_bytes_max)
            {
                others.push(other);
            }
        }
        others.sort_by(|a, b| (b.last_used, &a.path).cmp(&(a.last_used, &b.path)));
        Ok(others)
    }
}

fn name_of(object_bytes_max: usize) -> String {
    format!("pages-of-{object_bytes_max}-bytes")
}

fn object_bytes_of(name: &str) -> Option<usize> {
    name.strip_prefix("pages-of-")?.strip_suffix("-bytes")?.parse().ok()
}

/// Files of a store.
const FILES: [&str; 3] = ["index", "lock", "data"];

impl OtherStore {
    /// Inspects a folder; `None` if it is not a store.
    fn inspect(path: PathBuf, object_bytes_max: usize) -> Option<Self> {
        let mut bytes = 0;
        let mut last_used = SystemTime::UNIX_EPOCH;
        let owner = owner_of(&path)?;
        for file in FILES.iter().filter_map(|name| fs::metadata(path.join(name)).ok()) {
            bytes += file.len();
            last_used = last_used.max(file.modified().unwrap_or(SystemTime::UNIX_EPOCH));
        }
        let owner = owner.err();
        Some(Self { path, object_bytes_max, bytes, last_used, owner })
    }

    /// Deletes the store, unless it has been opened meanwhile. Foreign files stay.
    fn remove(&self) -> io::Result<()> {
        let Some(Ok(_lock)) = owner_of(&self.path) else {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "it is in use"));
        };
        for name in FILES {
            match fs::remove_file(self.path.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        // Fails if the folder has foreign files.
        let _ = fs::remove_dir(&self.path);
        Ok(())
    }
}

/// Lock of the store in a folder, or its owner; `None` if there is no store.
fn owner_of(path: &Path) -> Option<Result<File, String>> {
    let data = OpenOptions::new().read(true).write(true).open(path.join("data"));
    let unknown = "another process".to_owned();
    match data {
        Ok(data) if data.try_lock().is_ok() => Some(Ok(data)),
        Ok(_) => match fs::read_to_string(path.join("lock")) {
            Ok(owner) if !owner.trim().is_empty() => Some(Err(owner.trim().to_owned())),
            Ok(_) | Err(_) => Some(Err(unknown)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        // A store that may not be opened cannot be removed either.
        Err(_) => Some(Err(unknown)),
    }
}

/// Exclusive right to open or remove stores in a folder, until this is dropped.
pub(super) struct FolderLock(Option<File>);

impl FolderLock {
    /// Waits for the right. If the folder cannot be locked, it does not wait.
    pub(super) fn wait(folder: &Path) -> Self {
        let folder = File::open(folder).ok();
        Self(folder.filter(|folder| folder.lock().is_ok()))
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if let Some(folder) = &self.0 {
            // Closing has the same effect, unless a child process that was just started has a copy.
            let _ = folder.unlock();
        }
    }
}

/// Disk of one store, which removes other stores when it grows.
#[derive(Debug)]
struct SharedDisk {
    disk: FileDisk,
    folder: StoreFolder,
    path: PathBuf,
    /// Stores removed during the opening. Later removals are logged.
    removed: Mutex<Option<Vec<OtherStore>>>,
}

impl SharedDisk {
    /// During the opening, the opener has the right already.
    fn turn(&self) -> Option<FolderLock> {
        let is_opening = self.removed.lock().is_some();
        (!is_opening).then(|| FolderLock::wait(&self.folder.path))
    }

    fn own_bytes(&self) -> io::Result<u64> {
        Ok(self.disk.length(DiskFile::Data)? + self.disk.length(DiskFile::Index)?)
    }

    /// Removes other stores until this one can grow from `own_bytes` by `growth`.
    fn make_room(&self, own_bytes: u64, growth: u64) -> io::Result<()> {
        let StoreFolder { limit_bytes, reserve_bytes, .. } = self.folder;
        let mut others = self.folder.others(&self.path)?;
        loop {
            let taken = own_bytes + others.iter().map(|other| other.bytes).sum::<u64>();
            let is_over = taken + growth > limit_bytes;
            let free = self.disk.available().unwrap_or(u64::MAX);
            let is_crowded = growth > 0 && free.saturating_sub(reserve_bytes) < growth;
            if !is_over && !is_crowded {
                return Ok(());
            }
            let Some(oldest) = others.iter().rposition(|other| other.owner.is_none()) else {
                let message = format!(
                    "the stores in {} take {taken} of at most {limit_bytes} bytes",
                    self.folder.path.display()
                );
                let full = || Err(io::Error::new(io::ErrorKind::StorageFull, message));
                return if growth > 0 && is_over { full() } else { Ok(()) };
            };
            match others[oldest].remove() {
                Ok(()) => self.report_removal(others.remove(oldest)),
                Err(error) => {
                    let path = others[oldest].path.display();
                    tracing::warn!("cannot remove {path} to free space: {error}");
                    others[oldest].owner = Some(error.to_string());
                }
            }
        }
    }

    fn report_removal(&self, gone: OtherStore) {
        match &mut *self.removed.lock() {
            Some(removed) => removed.push(gone),
            None => tracing::info!(
                "removed {}, {} bytes: the store in use needs the space",
                gone.path.display(),
                gone.bytes
            ),
        }
    }
}

impl Disk for SharedDisk {
    fn start(&self, transfers: Vec<Transfer>) {
        self.disk.start(transfers);
    }

    fn sync(&self, file: DiskFile) -> io::Result<()> {
        self.disk.sync(file)
    }

    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        let growth = bytes.saturating_sub(self.disk.length(file)?);
        if growth == 0 {
            return Ok(());
        }
        let _turn = self.turn();
        self.make_room(self.own_bytes()?, growth)?;
        self.disk.grow(file, bytes)
    }

    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        self.disk.shrink(file, bytes)
    }

    fn length(&self, file: DiskFile) -> io::Result<u64> {
        self.disk.length(file)
    }

    /// Includes the space of idle stores.
    fn available(&self) -> Option<u64> {
        let _turn = self.turn();
        let others = self.folder.others(&self.path).unwrap_or_default();
        let idle = others.iter().filter(|other| other.owner.is_none());
        Some(self.disk.available()?.saturating_add(idle.map(|other| other.bytes).sum()))
    }
}

#[cfg(test)]
mod tests;
