//! Direct IO on a plain file, the baseline for the disk store.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use terrace_l3::Arena;

use crate::l3::LARGE_PRIME;

/// A file of equal objects, written and read by threads with one transfer each in flight.
#[derive(Debug)]
pub(crate) struct DirectFile {
    file: File,
    object_bytes: usize,
    objects: u64,
    /// One aligned page per thread.
    pages: Arena,
}

impl DirectFile {
    /// Creates a file for `objects` objects of `object_bytes`, rounded up to whole blocks, with `depth`
    /// transfers in flight. Falls back to the page cache if the file system has no direct IO.
    pub(crate) fn create(
        path: &Path,
        object_bytes: usize,
        objects: u64,
        depth: usize,
    ) -> io::Result<Self> {
        const BLOCK_BYTES: usize = 4096;
        let object_bytes = object_bytes.next_multiple_of(BLOCK_BYTES);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let direct = options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(path);
        let file = match direct {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => options.open(path),
            opened => opened,
        }?;
        file.set_len(objects * object_bytes as u64)?;
        let pages = Arena::new(depth.max(1) as u32, object_bytes)?;
        Ok(Self { file, object_bytes, objects, pages })
    }

    /// Writes all objects and syncs the file; returns the duration.
    pub(crate) fn write(&self) -> io::Result<Duration> {
        let began = Instant::now();
        self.transfer(|page, offset| self.file.write_all_at(page, offset))?;
        self.file.sync_data()?;
        Ok(began.elapsed())
    }

    /// Reads all objects; returns the duration.
    pub(crate) fn read(&self) -> io::Result<Duration> {
        let began = Instant::now();
        self.transfer(|page, offset| self.file.read_exact_at(page, offset))?;
        Ok(began.elapsed())
    }

    /// Transfers every object once, in scattered order.
    fn transfer(&self, one: impl Fn(&mut [u8], u64) -> io::Result<()> + Sync) -> io::Result<()> {
        let next = AtomicU64::new(0);
        let work = |page: u32| -> io::Result<()> {
            let mut page = self.pages.target(page).map_err(io::Error::other)?;
            loop {
                let object = next.fetch_add(1, Ordering::Relaxed);
                if object >= self.objects {
                    return Ok(());
                }
                let place =
                    (u128::from(object) * u128::from(LARGE_PRIME)) % u128::from(self.objects);
                one(&mut page, place as u64 * self.object_bytes as u64)?;
            }
        };
        let work = &work;
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..self.pages.pages()).map(|page| scope.spawn(move || work(page))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_object_is_written_and_read_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plain");
        let file = DirectFile::create(&path, 5000, 7, 3).unwrap();
        (0..3).for_each(|page| file.pages.target(page).unwrap().fill(9));
        file.write().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), vec![9; 7 * 8192]);
        file.read().unwrap();
    }
}
