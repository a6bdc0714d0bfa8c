//! Synchronous transfers: of the index, and of objects that move when a store is opened.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvError};

use super::io::{BLOCK_BYTES, Blocks, Direction, Disk, DiskFile, Part, Parts, Transfer};
use super::layout::Layout;

/// Performs transfers, each at its offset, and waits for all of them. Returns the memory in the
/// same order.
pub(super) fn perform(
    disk: &Arc<dyn Disk>,
    direction: Direction,
    file: DiskFile,
    transfers: Vec<(u64, Parts)>,
) -> Vec<io::Result<Parts>> {
    let (answer, answered) = mpsc::channel();
    let mut results: Vec<io::Result<Parts>> = Vec::new();
    results.resize_with(transfers.len(), || Err(io::Error::other("the disk did not answer")));
    let started = transfers.into_iter().enumerate().map(|(number, (offset, parts))| {
        let answer = answer.clone();
        let done = move |result: io::Result<()>, parts: Parts| {
            // The receiver waits below.
            let _ = answer.send((number, result.map(|()| parts)));
        };
        Transfer::new(direction, file, offset, parts, done)
    });
    disk.start(started.collect());
    drop(answer);
    for (number, result) in answered {
        results[number] = result;
    }
    results
}

/// Starts to read a range of the index.
fn start_read(disk: &Arc<dyn Disk>, offset: u64, bytes: usize) -> Receiver<io::Result<Parts>> {
    let (answer, answered) = mpsc::sync_channel(1);
    let done = move |result: io::Result<()>, parts: Parts| {
        // The receiver is gone if an earlier read has failed.
        let _ = answer.send(result.map(|()| parts));
    };
    let parts = blocks(Blocks::for_bytes(bytes));
    disk.start(vec![Transfer::new(Direction::Read, DiskFile::Index, offset, parts, done)]);
    answered
}

/// Reads a range of the index.
pub(super) fn read_index(disk: &Arc<dyn Disk>, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let parts = start_read(disk, offset, bytes).recv().map_err(no_answer)??;
    Ok(parts[0].bytes().to_vec())
}

/// Reads the blocks of the index in order, with several reads in flight, and passes them to `visit`
/// together with the number of the first.
pub(super) fn visit_index(
    disk: &Arc<dyn Disk>,
    block_count: u32,
    mut visit: impl FnMut(u32, &[u8]),
) -> io::Result<()> {
    const BLOCKS_PER_READ: u32 = 256;
    const READS_IN_FLIGHT: usize = 32;
    let mut reads = VecDeque::with_capacity(READS_IN_FLIGHT);
    let mut ranges = (0..block_count).step_by(BLOCKS_PER_READ as usize);
    loop {
        while reads.len() < READS_IN_FLIGHT
            && let Some(first) = ranges.next()
        {
            let blocks = BLOCKS_PER_READ.min(block_count - first);
            let bytes = blocks as usize * BLOCK_BYTES;
            reads.push_back((first, start_read(disk, Layout::index_offset(first), bytes)));
        }
        let Some((first, read)) = reads.pop_front() else { return Ok(()) };
        let parts = read.recv().map_err(no_answer)??;
        visit(first, parts[0].bytes());
    }
}

fn no_answer(_: RecvError) -> io::Error {
    io::Error::other("the disk did not answer")
}

/// Writes blocks of the index.
pub(super) fn write_index(disk: &Arc<dyn Disk>, writes: Vec<(u64, Parts)>) -> io::Result<()> {
    let written = perform(disk, Direction::Write, DiskFile::Index, writes);
    written.into_iter().try_for_each(|written| written.map(drop))
}

/// Memory of a transfer that consists of these blocks only.
pub(super) fn blocks(blocks: Blocks) -> Parts {
    let mut parts = Parts::new();
    parts.push(Part::blocks(blocks));
    parts
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// Finishes reads in reverse order, as soon as the expected number is in flight.
    #[derive(Debug)]
    struct Reversing {
        waiting: Mutex<Vec<Transfer>>,
        expected: Mutex<usize>,
        fails: bool,
    }

    impl Disk for Reversing {
        fn start(&self, transfers: Vec<Transfer>) {
            let mut waiting = self.waiting.lock();
            waiting.extend(transfers);
            if waiting.len() < *self.expected.lock() {
                return;
            }
            // Then one at a time: the reader waits for the oldest.
            *self.expected.lock() = 1;
            for mut transfer in std::mem::take(&mut *waiting).into_iter().rev() {
                let block = (transfer.offset() / BLOCK_BYTES as u64) as u8;
                for (number, bytes) in transfer
                    .pieces_mut()
                    .flat_map(|piece| piece.chunks_mut(BLOCK_BYTES))
                    .enumerate()
                {
                    bytes.fill(block.wrapping_add(number as u8));
                }
                let bytes = transfer.bytes();
                let failed = self.fails && transfer.offset() > Layout::index_offset(300);
                transfer.finish(if failed { Err(io::Error::other("worn out")) } else { Ok(bytes) });
            }
        }

        fn sync(&self, _: DiskFile) -> io::Result<()> {
            unreachable!("it is only read")
        }

        fn grow(&self, _: DiskFile, _: u64) -> io::Result<()> {
            unreachable!("it is only read")
        }

        fn shrink(&self, _: DiskFile, _: u64) -> io::Result<()> {
            unreachable!("it is only read")
        }

        fn length(&self, _: DiskFile) -> io::Result<u64> {
            unreachable!("it is only read")
        }
    }

    fn disk(fails: bool) -> Arc<dyn Disk> {
        Arc::new(Reversing { waiting: Mutex::default(), expected: Mutex::new(32), fails })
    }

    #[test]
    fn the_index_is_read_with_many_reads_in_flight_and_visited_in_order() {
        const BLOCKS: u32 = 40 * 256 + 7;
        let mut next = 0;
        visit_index(&disk(false), BLOCKS, |first, bytes| {
            assert_eq!(first, next);
            for block in bytes.chunks(BLOCK_BYTES) {
                // The description precedes the first block.
                assert!(block.iter().all(|byte| *byte == (next as u8).wrapping_add(1)));
                next += 1;
            }
        })
        .unwrap();
        assert_eq!(next, BLOCKS);
    }

    #[test]
    fn a_read_that_fails_ends_the_visit() {
        let mut visited = 0;
        let error = visit_index(&disk(true), 40 * 256, |_, _| visited += 1).unwrap_err();
        assert_eq!((error.to_string().as_str(), visited), ("worn out", 2));
    }
}
