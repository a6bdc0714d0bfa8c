//! Mapping between objects and transfers, and verification of objects read.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::io::{BLOCK_BYTES, Blocks, BufferOwner, Part, Parts, is_aligned};
use terrace_cache::PrefixDigest;
use terrace_l3::{
    Get, HEADER_BYTES, Header, Mismatch, ObjectId, Results, Source, StoreError, Target,
};

/// Memory of a write: the header, whole blocks directly from the source, and a copied rest. Also
/// returns the number of copied bytes.
pub(super) fn write_parts(header: &Header, source: Source) -> (Parts, usize) {
    let mut parts = Parts::new();
    parts.push(Part::blocks(Blocks::holding(&header.encode())));
    if !is_aligned(source.as_ptr()) {
        let copied = source.len();
        if copied > 0 {
            parts.push(Part::blocks(Blocks::holding(&source)));
        }
        return (parts, copied);
    }
    let whole = source.len() / BLOCK_BYTES * BLOCK_BYTES;
    let rest = (whole < source.len()).then(|| Blocks::holding(&source[whole..]));
    let copied = source.len() - whole;
    if whole > 0 {
        parts.push(Part::new(BufferOwner::Source(source), whole));
    }
    parts.extend(rest.map(Part::blocks));
    (parts, copied)
}

/// An object being read from disk.
pub(super) struct ObjectRead {
    pub(super) id: ObjectId,
    /// Prefix that it must be the KV of.
    prefix: Option<PrefixDigest>,
    /// The target, unless it is among the parts of the transfer.
    target: Option<Target>,
    length: usize,
}

impl ObjectRead {
    /// Memory of a read. Also returns the number of bytes that will have to be copied.
    pub(super) fn new(get: Get) -> (Self, Parts, usize) {
        let Get { id, target, prefix } = get;
        let length = target.len();
        let whole =
            if is_aligned(target.as_ptr()) { length / BLOCK_BYTES * BLOCK_BYTES } else { 0 };
        let mut parts = Parts::new();
        parts.push(Part::blocks(Blocks::for_bytes(HEADER_BYTES)));
        let mut arrival = Self { id, prefix, target: None, length };
        if whole > 0 {
            parts.push(Part::new(BufferOwner::Target(target), whole));
        } else {
            arrival.target = Some(target);
        }
        if whole < length {
            parts.push(Part::blocks(Blocks::for_bytes(length - whole)));
        }
        (arrival, parts, length - whole)
    }

    /// Assembles the object and verifies it.
    pub(super) fn verify(mut self, parts: Parts) -> Result<Header, Mismatch> {
        let mut parts = parts.into_iter();
        let header = parts.next().expect("the header comes first");
        let header = header.bytes().first_chunk().expect("a block is longer than a header");
        let header = Header::verify(header, &self.id, self.length as u64)?;
        let header = header.verify_prefix(self.prefix)?;
        let mut whole = 0;
        for part in parts {
            match part.owner {
                BufferOwner::Target(target) => {
                    whole = target.len() / BLOCK_BYTES * BLOCK_BYTES;
                    self.target = Some(target);
                }
                BufferOwner::Blocks(rest) => {
                    let target = self.target.as_mut().expect("the target comes before the rest");
                    rest.copy_to(&mut target[whole..]);
                }
                BufferOwner::Source(_) => unreachable!("reads have no source"),
            }
        }
        header.verify_payload(&self.target.expect("a read has a target"))?;
        Ok(header)
    }
}

/// Results of a batch, collected from any threads.
pub(super) struct BatchResults<T> {
    state: Mutex<ResultSlots<T>>,
}

struct ResultSlots<T> {
    results: Vec<Option<Result<T, StoreError>>>,
    missing: usize,
    complete: Option<oneshot::Sender<Results<T>>>,
}

impl<T> BatchResults<T> {
    /// Creates a batch and the receiver of its results.
    pub(super) fn new(length: usize) -> (Arc<Self>, oneshot::Receiver<Results<T>>) {
        let (complete, completed) = oneshot::channel();
        let results = (0..length).map(|_| None).collect();
        // One more until `seal`: a batch that is still being filled is not complete.
        let state = ResultSlots { results, missing: length + 1, complete: Some(complete) };
        (Arc::new(Self { state: Mutex::new(state) }), completed)
    }

    pub(super) fn set(&self, number: usize, result: Result<T, StoreError>) {
        let mut state = self.state.lock();
        let before = state.results[number].replace(result);
        assert!(before.is_none(), "an object of a batch has one result");
        Self::count_down(&mut state);
    }

    /// Marks the batch as filled.
    pub(super) fn seal(&self) {
        Self::count_down(&mut self.state.lock());
    }

    fn count_down(state: &mut ResultSlots<T>) {
        state.missing -= 1;
        if state.missing == 0
            && let Some(complete) = state.complete.take()
        {
            let results = std::mem::take(&mut state.results);
            // The receiver may have been dropped.
            let _ = complete.send(results.into_iter().map(|result| result.expect("all")).collect());
        }
    }
}

/// Error of a failed transfer. A short transfer means that the file does not hold the object.
pub(super) fn transfer_error(during: &'static str, error: &io::Error) -> StoreError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => StoreError::Corrupt(Mismatch::Length),
        _ => StoreError::io(during, error),
    }
}
