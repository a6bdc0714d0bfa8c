//! The seam between the disk store and the disk: two files, transfers, syncs. A simulated disk is
//! just another implementation.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ptr::NonNull;

use smallvec::SmallVec;

use terrace_l3::{Source, Target};

/// Everything on disk happens in whole blocks of this size.
pub const BLOCK_BYTES: usize = 4096;

/// Which of the store's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFile {
    /// Objects in slots.
    Data,
    /// What is in which slot.
    Index,
}

/// What a disk store needs of a disk.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Starts transfers and returns. Each is finished exactly once ([`Transfer::finish`]), by any
    /// thread, in any order, perhaps before this returns.
    fn start(&self, transfers: Vec<Transfer>);

    /// Waits until all finished writes to the file would survive a crash.
    ///
    /// # Errors
    /// When that cannot be said. What was written since the last sync is then in doubt for good.
    fn sync(&self, file: DiskFile) -> io::Result<()>;

    /// Makes the file at least `bytes` long and reserves the room for it. New bytes are zero.
    ///
    /// # Errors
    /// When there is no room; the file is then as it was.
    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()>;

    /// Cuts the file to at most `bytes`.
    ///
    /// # Errors
    /// What the system says.
    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()>;

    /// The file's length.
    ///
    /// # Errors
    /// What the system says.
    fn length(&self, file: DiskFile) -> io::Result<u64>;

    /// How many bytes both files can still grow by, as far as anybody knows.
    fn available(&self) -> Option<u64> {
        None
    }
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From disk to memory.
    Read,
    /// From memory to disk.
    Write,
}

/// The pieces of memory that a transfer reads from or writes to, one after the other.
pub(crate) type Parts = SmallVec<[Part; 3]>;

type Done = Box<dyn FnOnce(io::Result<()>, Parts) + Send>;

/// One contiguous range of a file, and the memory that it goes from or to. It owns that memory until
/// it is finished; one that is dropped has failed.
pub struct Transfer {
    file: DiskFile,
    direction: Direction,
    offset: u64,
    parts: Parts,
    done: Option<Done>,
}

impl Transfer {
    pub(crate) fn new(
        direction: Direction,
        file: DiskFile,
        offset: u64,
        parts: Parts,
        done: impl FnOnce(io::Result<()>, Parts) + Send + 'static,
    ) -> Self {
        Self { file, direction, offset, parts, done: Some(Box::new(done)) }
    }

    /// Ends the transfer: the disk has moved that many bytes, or failed. Fewer than asked for is a
    /// failure.
    pub fn finish(mut self, moved: io::Result<usize>) {
        let expected = self.bytes();
        let result = moved.and_then(|moved| {
            if moved == expected {
                return Ok(());
            }
            let message = format!("only {moved} of {expected} bytes were transferred");
            Err(io::Error::new(io::ErrorKind::UnexpectedEof, message))
        });
        self.end(result);
    }

    /// Which file.
    #[must_use]
    pub fn file(&self) -> DiskFile {
        self.file
    }

    /// Which way.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Where in the file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.length).sum()
    }

    /// The bytes to write, in order.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().map(Part::bytes)
    }

    /// Where read bytes go, in order.
    pub fn pieces_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        assert_eq!(self.direction, Direction::Read);
        self.parts.iter_mut().map(Part::bytes_mut)
    }

    fn end(&mut self, result: io::Result<()>) {
        if let Some(done) = self.done.take() {
            done(result, std::mem::take(&mut self.parts));
        }
    }

    pub(crate) fn vectors(&self) -> SmallVec<[IoVector; 3]> {
        let vector = |part: &Part| IoVector { _base: part.start(), _length: part.length };
        self.parts.iter().map(vector).collect()
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.end(Err(io::Error::other("the transfer was abandoned")));
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, direction, offset, .. } = self;
        write!(f, "{direction:?} of {} bytes at {offset} of {file:?}", self.bytes())
    }
}

/// What the kernel calls `iovec`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct IoVector {
    _base: *mut u8,
    _length: usize,
}

// SAFETY: it is only a description; whoever passes it to the kernel answers for the memory.
unsafe impl Send for IoVector {}

/// The first `length` bytes of some memory.
pub(crate) struct Part {
    pub(crate) owner: Owner,
    length: usize,
}

pub(crate) enum Owner {
    Blocks(Blocks),
    Source(Source),
    Target(Target),
}

impl Part {
    pub(crate) fn new(owner: Owner, length: usize) -> Self {
        let available = match &owner {
            Owner::Blocks(blocks) => blocks.bytes(),
            Owner::Source(source) => source.len(),
            Owner::Target(target) => target.len(),
        };
        assert!(length <= available);
        Self { owner, length }
    }

    /// All of the blocks.
    pub(crate) fn blocks(blocks: Blocks) -> Self {
        let length = blocks.bytes();
        Self::new(Owner::Blocks(blocks), length)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the owner has at least `length` initialised bytes, which nobody writes to meanwhile.
        unsafe { std::slice::from_raw_parts(self.start(), self.length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!matches!(self.owner, Owner::Source(_)), "sources are not written to");
        // SAFETY: as above, and blocks and targets are this part's alone.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.length) }
    }

    fn start(&self) -> *mut u8 {
        match &self.owner {
            Owner::Blocks(blocks) => blocks.start(),
            Owner::Source(source) => source.start(),
            Owner::Target(target) => target.start(),
        }
    }
}

/// Memory of the store's own, aligned for direct IO. It is not a `Box`: reads, by the kernel too, write
/// to it through pointers.
pub(crate) struct Blocks {
    start: NonNull<Block>,
    count: usize,
}

// SAFETY: it is the only owner of plain bytes.
unsafe impl Send for Blocks {}

#[repr(C, align(4096))]
#[derive(Clone)]
struct Block([u8; BLOCK_BYTES]);

impl Blocks {
    /// Zeroed blocks with room for `bytes`.
    pub(crate) fn for_bytes(bytes: usize) -> Self {
        let count = bytes.div_ceil(BLOCK_BYTES);
        let blocks = vec![Block([0; BLOCK_BYTES]); count].into_boxed_slice();
        let start = NonNull::from(Box::leak(blocks)).cast();
        Self { start, count }
    }

    /// Blocks that begin with these bytes.
    pub(crate) fn holding(bytes: &[u8]) -> Self {
        let blocks = Self::for_bytes(bytes.len());
        // SAFETY: there is room for so many bytes, and nobody else knows it yet.
        unsafe { blocks.start().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        blocks
    }

    /// Copies the first bytes out.
    pub(crate) fn copy_to(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes());
        // SAFETY: there are so many initialised bytes, which nobody writes to meanwhile.
        unsafe { self.start().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    }

    fn start(&self) -> *mut u8 {
        self.start.as_ptr().cast()
    }

    fn bytes(&self) -> usize {
        self.count * BLOCK_BYTES
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // SAFETY: that is where it came from.
        drop(unsafe {
            Box::from_raw(NonNull::slice_from_raw_parts(self.start, self.count).as_ptr())
        });
    }
}

/// Whether direct IO can use memory that begins here.
pub(crate) fn is_aligned(start: *const u8) -> bool {
    start.addr().is_multiple_of(BLOCK_BYTES)
}
