//! Plain direct IO, as a yardstick for the store: the same engine, sizes and depth, and nothing else.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::files::FileDisk;
use super::io::{Blocks, Direction, Disk, DiskFile, Part, Parts, Transfer};
use super::{IoEngine, OpenError};

/// A file of equal objects that can be written and read as fast as the disk allows.
#[derive(Debug)]
pub struct PlainFile {
    disk: FileDisk,
    path: std::path::PathBuf,
    object_bytes: usize,
    objects: u64,
    depth: usize,
}

impl PlainFile {
    /// Creates a file with room for `objects` objects of `object_bytes`, a multiple of the block size,
    /// that are transferred `depth` at a time.
    ///
    /// # Errors
    /// When the directory cannot be used or has no room.
    pub fn create(
        path: &Path,
        io: IoEngine,
        object_bytes: usize,
        objects: u64,
        depth: usize,
    ) -> Result<Self, OpenError> {
        let disk = FileDisk::open(path, io, depth)?;
        let no_room = |error| OpenError::NoRoom { path: path.to_owned(), error };
        disk.grow(DiskFile::Data, objects * object_bytes as u64).map_err(no_room)?;
        Ok(Self { disk, path: path.to_owned(), object_bytes, objects, depth: depth.max(1) })
    }

    /// Writes all objects, syncs, and answers how long it took.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn write(&self) -> Result<Duration, OpenError> {
        let began = Instant::now();
        self.transfer(Direction::Write)?;
        self.disk.sync(DiskFile::Data).map_err(|error| self.unusable(error))?;
        Ok(began.elapsed())
    }

    /// Reads all objects and answers how long it took.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn read(&self) -> Result<Duration, OpenError> {
        let began = Instant::now();
        self.transfer(Direction::Read)?;
        Ok(began.elapsed())
    }

    /// Keeps `depth` transfers in flight, at offsets in no particular order.
    fn transfer(&self, direction: Direction) -> Result<(), OpenError> {
        let (answer, answered) = mpsc::channel::<(std::io::Result<()>, Parts)>();
        let mut buffers: Vec<Parts> = (0..self.depth)
            .map(|_| Parts::from_iter([Part::blocks(Blocks::for_bytes(self.object_bytes))]))
            .collect();
        let answer = Arc::new(answer);
        // A step that has no divisor in common with the number of objects visits each once.
        let step = (self.objects / 2..).find(|step| coprime(*step, self.objects)).unwrap_or(1);
        let mut object = 0;
        for _ in 0..self.objects {
            let parts = match buffers.pop() {
                Some(parts) => parts,
                None => {
                    let (result, parts) = answered.recv().expect("every transfer ends");
                    result.map_err(|error| self.unusable(error))?;
                    parts
                }
            };
            let answer = answer.clone();
            let done = move |result, parts| {
                // Nobody listens any more after an error.
                let _ = answer.send((result, parts));
            };
            let offset = object * self.object_bytes as u64;
            object = (object + step) % self.objects;
            let transfer = Transfer::new(direction, DiskFile::Data, offset, parts, done);
            self.disk.start(vec![transfer]);
        }
        drop(answer);
        for (result, _) in answered {
            result.map_err(|error| self.unusable(error))?;
        }
        Ok(())
    }

    fn unusable(&self, error: std::io::Error) -> OpenError {
        OpenError::Directory { path: self.path.clone(), error }
    }
}

fn coprime(a: u64, b: u64) -> bool {
    let (mut a, mut b) = (a, b);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}
