//! The content of the two files.

use std::ops::Range;
use std::sync::Arc;

use terrace_l3_disk::{BLOCK_BYTES, DiskFile};

type Block = [u8; BLOCK_BYTES];

/// One for each of the files.
#[derive(Clone, Debug, Default)]
pub(super) struct Files<T> {
    data: T,
    index: T,
}

impl<T> Files<T> {
    pub(super) fn of_mut(&mut self, file: DiskFile) -> &mut T {
        match file {
            DiskFile::Data => &mut self.data,
            DiskFile::Index => &mut self.index,
        }
    }

    pub(super) fn of(&self, file: DiskFile) -> &T {
        match file {
            DiskFile::Data => &self.data,
            DiskFile::Index => &self.index,
        }
    }
}

/// The content of a file. Clones share the blocks in which they do not differ, so that there can be
/// one for every moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Image {
    blocks: Vec<Arc<Block>>,
    length: u64,
}

impl Image {
    /// Cuts the file, or appends zeros.
    pub(super) fn resize(&mut self, length: u64) {
        if length < self.length {
            let rest = (length % BLOCK_BYTES as u64) as usize;
            self.blocks.truncate(length.div_ceil(BLOCK_BYTES as u64) as usize);
            if let Some(last) = self.blocks.last_mut().filter(|_| rest > 0) {
                Arc::make_mut(last)[rest..].fill(0);
            }
        } else {
            let zeros = Arc::new([0; BLOCK_BYTES]);
            self.blocks.resize(length.div_ceil(BLOCK_BYTES as u64) as usize, zeros);
        }
        self.length = length;
    }

    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        if end > self.length {
            self.resize(end);
        }
        let mut rest = bytes;
        for (block, range) in pieces(offset, bytes.len()) {
            let (now, later) = rest.split_at(range.len());
            Arc::make_mut(&mut self.blocks[block])[range].copy_from_slice(now);
            rest = later;
        }
    }

    /// Reads as far as the file goes, and says how far that is.
    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> usize {
        let length = self.length.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let mut rest = &mut bytes[..length];
        for (block, range) in pieces(offset, length) {
            let (now, later) = rest.split_at_mut(range.len());
            now.copy_from_slice(&self.blocks[block][range]);
            rest = later;
        }
        length
    }

    pub(super) fn flip_bit(&mut self, offset: u64, bit: u32) {
        let (block, range) = pieces(offset, 1).next().expect("one byte");
        Arc::make_mut(&mut self.blocks[block])[range.start] ^= 1 << bit;
    }

    pub(super) fn length(&self) -> u64 {
        self.length
    }
}

/// The blocks that a range of a file touches, and which part of each.
fn pieces(offset: u64, length: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut at = offset as usize;
    let end = at + length;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let (block, start) = (at / BLOCK_BYTES, at % BLOCK_BYTES);
            let length = (BLOCK_BYTES - start).min(end - at);
            at += length;
            (block, start..start + length)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_holds_what_was_written() {
        let mut image = Image::default();
        image.resize(3 * BLOCK_BYTES as u64);
        let before = image.clone();
        let bytes: Vec<u8> = (0..6000).map(|index| index as u8).collect();
        image.write(4000, &bytes);
        let mut read = vec![0; 6000];
        assert_eq!(image.read(4000, &mut read), 6000);
        assert_eq!(read, bytes);
        assert_eq!(before.read(4000, &mut read), 6000);
        assert!(read.iter().all(|byte| *byte == 0), "a clone is a file of its own");
        image.flip_bit(4097, 7);
        assert_eq!(image.read(4096, &mut read[..2]), 2);
        assert_eq!(read[..2], [96, 97 ^ 128]);
    }

    #[test]
    fn a_file_that_is_cut_and_grown_has_zeros_there() {
        let mut image = Image::default();
        image.write(0, &[9; 5000]);
        image.resize(100);
        assert_eq!(image.read(90, &mut [0; 50]), 10);
        image.resize(8192);
        let mut read = [1; 5000];
        assert_eq!(image.read(0, &mut read), 5000);
        assert_eq!((read[99], read[100], read[4999]), (9, 0, 0));
    }
}
