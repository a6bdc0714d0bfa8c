//! Interface between the disk store and the disk: two files, transfers, syncs. A simulated disk is
//! another implementation.

#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::ptr::NonNull;

use smallvec::SmallVec;

use terrace_l3::{Source, Target};

/// Block size: all accesses to the disk are in whole blocks.
pub const BLOCK_BYTES: usize = 4096;

/// One of the store's two files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFile {
    /// Slots with objects.
    Data,
    /// Entries that name the object in each slot.
    Index,
}

/// Operations that a disk store needs of a disk.
pub trait Disk: Send + Sync + fmt::Debug {
    /// Starts transfers and returns. Each is finished exactly once ([`Transfer::finish`]), by any
    /// thread, in any order, perhaps before this returns.
    fn start(&self, transfers: Vec<Transfer>);

    /// Waits until all finished writes to the file would survive a crash.
    ///
    /// # Errors
    /// If that is unknown. The state of everything written since the last sync is then unknown for
    /// good.
    fn sync(&self, file: DiskFile) -> io::Result<()>;

    /// Extends the file to at least `bytes` and reserves the space. New bytes are zero.
    ///
    /// # Errors
    /// If there is no space; the file is unchanged.
    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()>;

    /// Truncates the file to at most `bytes`.
    ///
    /// # Errors
    /// As reported by the system.
    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()>;

    /// Returns the length of the file.
    ///
    /// # Errors
    /// As reported by the system.
    fn length(&self, file: DiskFile) -> io::Result<u64>;

    /// Returns the number of bytes that both files can still grow by, if it is known.
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

/// Memory of a transfer: consecutive pieces that it reads from or writes to.
pub(crate) type Parts = SmallVec<[Part; 3]>;

type OnFinished = Box<dyn FnOnce(io::Result<()>, Parts) + Send>;

/// A transfer between one contiguous range of a file and memory. It owns the memory until it is
/// finished; dropping it counts as a failure.
pub struct Transfer {
    file: DiskFile,
    direction: Direction,
    offset: u64,
    parts: Parts,
    done: Option<OnFinished>,
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

    /// Ends the transfer: the disk has moved `moved` bytes, or failed. A short transfer is a
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

    /// File of the transfer.
    #[must_use]
    pub fn file(&self) -> DiskFile {
        self.file
    }

    /// Direction of the transfer.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Offset in the file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.length).sum()
    }

    /// Bytes to write, in order.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().map(Part::bytes)
    }

    /// Targets of the bytes read, in order.
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

/// The kernel's `iovec`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct IoVector {
    _base: *mut u8,
    _length: usize,
}

// SAFETY: it is only a description; the code that passes it to the kernel is responsible for the
// memory.
unsafe impl Send for IoVector {}

/// The first `length` bytes of a memory owner.
pub(crate) struct Part {
    pub(crate) owner: BufferOwner,
    length: usize,
}

pub(crate) enum BufferOwner {
    Blocks(Blocks),
    Source(Source),
    Target(Target),
}

impl Part {
    pub(crate) fn new(owner: BufferOwner, length: usize) -> Self {
        let available = match &owner {
            BufferOwner::Blocks(blocks) => blocks.bytes(),
            BufferOwner::Source(source) => source.len(),
            BufferOwner::Target(target) => target.len(),
        };
        assert!(length <= available);
        Self { owner, length }
    }

    /// A part that covers all of the blocks.
    pub(crate) fn blocks(blocks: Blocks) -> Self {
        let length = blocks.bytes();
        Self::new(BufferOwner::Blocks(blocks), length)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the owner has at least `length` initialised bytes, to which nothing writes
        // meanwhile.
        unsafe { std::slice::from_raw_parts(self.start(), self.length) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!matches!(self.owner, BufferOwner::Source(_)), "sources are not written to");
        // SAFETY: as above, and blocks and targets are used by this part only.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.length) }
    }

    fn start(&self) -> *mut u8 {
        match &self.owner {
            BufferOwner::Blocks(blocks) => blocks.start(),
            BufferOwner::Source(source) => source.start(),
            BufferOwner::Target(target) => target.start(),
        }
    }
}

/// Memory of the store itself, aligned for direct IO. It is not a `Box`, because reads, including
/// those of the kernel, write to it through pointers.
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
    /// Allocates zeroed blocks with room for `bytes`.
    pub(crate) fn for_bytes(bytes: usize) -> Self {
        let count = bytes.div_ceil(BLOCK_BYTES);
        let blocks = vec![Block([0; BLOCK_BYTES]); count].into_boxed_slice();
        let start = NonNull::from(Box::leak(blocks)).cast();
        Self { start, count }
    }

    /// Allocates blocks that begin with these bytes.
    pub(crate) fn holding(bytes: &[u8]) -> Self {
        let blocks = Self::for_bytes(bytes.len());
        // SAFETY: there is room for as many bytes, and nothing else refers to it yet.
        unsafe { blocks.start().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        blocks
    }

    /// Copies the first bytes.
    pub(crate) fn copy_to(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes());
        // SAFETY: there are as many initialised bytes, to which nothing writes meanwhile.
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
        // SAFETY: the memory was allocated as such a box.
        drop(unsafe {
            Box::from_raw(NonNull::slice_from_raw_parts(self.start, self.count).as_ptr())
        });
    }
}

/// Returns true if direct IO can use memory that begins here.
pub(crate) fn is_aligned(start: *const u8) -> bool {
    start.addr().is_multiple_of(BLOCK_BYTES)
}
