//! A real disk whose transfers of objects can be held up and spoilt.

use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use terrace_l3_disk::{BLOCK_BYTES, Direction, Disk, DiskFile, FileDisk, IoEngine, Transfer};

/// Behaviour of transfers in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// They take place.
    #[default]
    Open,
    /// They wait until the gate opens.
    Shut,
    /// They fail.
    Fails,
    /// They end one block early, without an error.
    Short,
}

/// A disk with a gate for each direction. The index has none.
#[derive(Debug)]
pub struct GatedDisk {
    disk: FileDisk,
    gates: Mutex<Gates>,
}

#[derive(Debug, Default)]
struct Gates {
    reads: Gate,
    writes: Gate,
    waiting: Vec<Transfer>,
    reads_begun: u64,
}

impl Gates {
    fn of(&mut self, direction: Direction) -> &mut Gate {
        match direction {
            Direction::Read => &mut self.reads,
            Direction::Write => &mut self.writes,
        }
    }
}

impl GatedDisk {
    /// The disk of a store in `path`, with its gates open.
    ///
    /// # Panics
    /// When the directory cannot be used.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        let disk = FileDisk::open(path, IoEngine::Auto, 4).expect("a directory to write to");
        Self { disk, gates: Mutex::default() }
    }

    /// Sets a gate. Waiting transfers continue under its new state.
    pub fn set(&self, direction: Direction, gate: Gate) {
        let waiting = {
            let gates = &mut *self.gates();
            *gates.of(direction) = gate;
            std::mem::take(&mut gates.waiting)
        };
        self.start(waiting);
    }

    /// Number of waiting transfers.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.gates().waiting.len()
    }

    /// Number of reads of objects started.
    #[must_use]
    pub fn reads_begun(&self) -> u64 {
        self.gates().reads_begun
    }

    /// Somebody who opens the gates in the end, so that a test which fails does not hang: a store is not
    /// closed before its transfers have ended.
    #[must_use]
    pub fn keeper(self: &Arc<Self>) -> Keeper {
        Keeper(self.clone())
    }

    fn gates(&self) -> MutexGuard<'_, Gates> {
        self.gates.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens the gates when it is dropped. It must be dropped before the store.
#[derive(Debug)]
pub struct Keeper(Arc<GatedDisk>);

impl Deref for Keeper {
    type Target = GatedDisk;

    fn deref(&self) -> &GatedDisk {
        &self.0
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.set(Direction::Read, Gate::Open);
        self.set(Direction::Write, Gate::Open);
    }
}

impl Disk for GatedDisk {
    fn start(&self, transfers: Vec<Transfer>) {
        let mut through = Vec::new();
        for transfer in transfers {
            let (direction, bytes) = (transfer.direction(), transfer.bytes());
            let gate = match transfer.file() {
                DiskFile::Data => *self.gates().of(direction),
                DiskFile::Index => Gate::Open,
            };
            if gate != Gate::Shut
                && (transfer.file(), direction) == (DiskFile::Data, Direction::Read)
            {
                self.gates().reads_begun += 1;
            }
            match gate {
                Gate::Open => through.push(transfer),
                Gate::Shut => self.gates().waiting.push(transfer),
                Gate::Fails => transfer.finish(Err(io::Error::other("worn out"))),
                Gate::Short => transfer.finish(Ok(bytes - BLOCK_BYTES)),
            }
        }
        self.disk.start(through);
    }

    fn sync(&self, file: DiskFile) -> io::Result<()> {
        self.disk.sync(file)
    }

    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        self.disk.grow(file, bytes)
    }

    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        self.disk.shrink(file, bytes)
    }

    fn length(&self, file: DiskFile) -> io::Result<u64> {
        self.disk.length(file)
    }
}
