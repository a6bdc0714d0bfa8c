//! Transfers whose caller waits for them: of the index, and of what moves when a store is opened.

use std::io;
use std::sync::{Arc, mpsc};

use super::io::{Blocks, Direction, Disk, DiskFile, Part, Parts, Transfer};

/// Performs transfers, each at its offset, and waits for all of them. The memory comes back in the same
/// order.
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

/// Reads a range of the index.
pub(super) fn read_index(disk: &Arc<dyn Disk>, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let reads = vec![(offset, blocks(Blocks::for_bytes(bytes)))];
    let read = perform(disk, Direction::Read, DiskFile::Index, reads).pop();
    Ok(read.expect("one result for each transfer")?[0].bytes().to_vec())
}

/// Writes blocks of the index.
pub(super) fn write_index(disk: &Arc<dyn Disk>, writes: Vec<(u64, Parts)>) -> io::Result<()> {
    let written = perform(disk, Direction::Write, DiskFile::Index, writes);
    written.into_iter().try_for_each(|written| written.map(drop))
}

/// A transfer's memory that is nothing but these blocks.
pub(super) fn blocks(blocks: Blocks) -> Parts {
    let mut parts = Parts::new();
    parts.push(Part::blocks(blocks));
    parts
}
