//! Objects as transfers: which memory goes where, and what is checked when it has arrived.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::io::{BLOCK_BYTES, Blocks, Owner, Part, Parts, is_aligned};
use terrace_cache::PrefixDigest;
use terrace_l3::{
    Get, HEADER_BYTES, Header, Mismatch, ObjectId, Results, Source, StoreError, Target,
};

/// The memory of a write: a header, the whole blocks straight from the source, and what remains.
/// Answers also how many bytes had to be copied.
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
        parts.push(Part::new(Owner::Source(source), whole));
    }
    parts.extend(rest.map(Part::blocks));
    (parts, copied)
}

/// An object on its way from disk.
pub(super) struct Arrival {
    pub(super) id: ObjectId,
    /// What it must be the KV of.
    prefix: Option<PrefixDigest>,
    /// The target, unless it is among the parts of the transfer.
    target: Option<Target>,
    length: usize,
}

impl Arrival {
    /// The memory of a read. Answers also how many bytes will have to be copied.
    pub(super) fn new(get: Get) -> (Self, Parts, usize) {
        let Get { id, target, prefix } = get;
        let length = target.len();
        let whole =
            if is_aligned(target.as_ptr()) { length / BLOCK_BYTES * BLOCK_BYTES } else { 0 };
        let mut parts = Parts::new();
        parts.push(Part::blocks(Blocks::for_bytes(HEADER_BYTES)));
        let mut arrival = Self { id, prefix, target: None, length };
        if whole > 0 {
            parts.push(Part::new(Owner::Target(target), whole));
        } else {
            arrival.target = Some(target);
        }
        if whole < length {
            parts.push(Part::blocks(Blocks::for_bytes(length - whole)));
        }
        (arrival, parts, length - whole)
    }

    /// Puts the pieces together and checks all of it.
    pub(super) fn verify(mut self, parts: Parts) -> Result<Header, Mismatch> {
        let mut parts = parts.into_iter();
        let header = parts.next().expect("the header comes first");
        let header = header.bytes().first_chunk().expect("a block is longer than a header");
        let header = Header::verify(header, &self.id, self.length as u64)?;
        let header = header.verify_prefix(self.prefix)?;
        let mut whole = 0;
        for part in parts {
            match part.owner {
                Owner::Target(target) => {
                    whole = target.len() / BLOCK_BYTES * BLOCK_BYTES;
                    self.target = Some(target);
                }
                Owner::Blocks(rest) => {
                    let target = self.target.as_mut().expect("the target comes before the rest");
                    rest.copy_to(&mut target[whole..]);
                }
                Owner::Source(_) => unreachable!("reads have no source"),
            }
        }
        header.verify_payload(&self.target.expect("a read has a target"))?;
        Ok(header)
    }
}

/// The results of a batch, collected from whichever threads they come.
pub(super) struct Batch<T> {
    state: Mutex<BatchState<T>>,
}

struct BatchState<T> {
    results: Vec<Option<Result<T, StoreError>>>,
    missing: usize,
    complete: Option<oneshot::Sender<Results<T>>>,
}

impl<T> Batch<T> {
    /// A batch, and where its results will be.
    pub(super) fn new(length: usize) -> (Arc<Self>, oneshot::Receiver<Results<T>>) {
        let (complete, completed) = oneshot::channel();
        let results = (0..length).map(|_| None).collect();
        // One more until `seal`: a batch that is still being filled is not complete.
        let state = BatchState { results, missing: length + 1, complete: Some(complete) };
        (Arc::new(Self { state: Mutex::new(state) }), completed)
    }

    pub(super) fn set(&self, number: usize, result: Result<T, StoreError>) {
        let mut state = self.state.lock();
        let before = state.results[number].replace(result);
        assert!(before.is_none(), "an object of a batch has one result");
        Self::count_down(&mut state);
    }

    /// Everything has been started.
    pub(super) fn seal(&self) {
        Self::count_down(&mut self.state.lock());
    }

    fn count_down(state: &mut BatchState<T>) {
        state.missing -= 1;
        if state.missing == 0
            && let Some(complete) = state.complete.take()
        {
            let results = std::mem::take(&mut state.results);
            // Nobody waits any more if the answer was dropped.
            let _ = complete.send(results.into_iter().map(|result| result.expect("all")).collect());
        }
    }
}

/// What a failed transfer is to the caller: a short one means that the file does not hold the object.
pub(super) fn transfer_error(during: &'static str, error: &io::Error) -> StoreError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => StoreError::Corrupt(Mismatch::Length),
        _ => StoreError::io(during, error),
    }
}
