//! The bytes of KV events: MessagePack, as vLLM and SGLang write it.
//!
//! A batch is an array `[time, [events], rank]`. An event is a map with a `type`; before mid-2026 both engines wrote an
//! array that begins with it, which is read too. What is unknown is passed over: engines add fields with every
//! version.

mod decode;
mod encode;

pub use decode::{WireError, decode};
pub use encode::{L3Sharing, Manner, encode};

/// Events that an engine told at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// When, in seconds since 1970.
    pub at: f64,
    /// What has changed, in this order.
    pub events: Vec<Event>,
    /// Which of the engine's data-parallel ranks tells it.
    pub rank: Option<i64>,
}

/// One change of what a worker holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Blocks became available.
    Stored(Stored),
    /// Blocks are gone.
    Removed {
        /// Which.
        hashes: Vec<u64>,
        /// From where.
        medium: Medium,
    },
    /// The worker holds nothing any more.
    Cleared,
    /// Nothing that tells of attention over the whole prompt, or a kind that is not known here.
    Other,
}

/// Consecutive blocks of one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// What the engine calls them: 64 bits, whatever it made them of.
    pub hashes: Vec<u64>,
    /// The block before the first; none at the beginning of a prompt.
    pub parent: Option<u64>,
    /// Their tokens, `block_size` for each; none where an engine tells only where blocks are.
    pub tokens: Vec<u32>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Where they are.
    pub medium: Medium,
    /// What besides tokens the blocks depend on, for each of them; shorter if nothing follows.
    pub extras: Vec<Vec<String>>,
    /// The adapter that they were computed with.
    pub adapter: Option<String>,
}

/// Where blocks are, as far as a router cares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Medium {
    /// Memory that the worker computes with.
    #[default]
    Device,
    /// Memory of the worker's machine.
    Host,
    /// A disk that only this worker reads.
    Disk,
    /// A store that others may share, or a place that is not known here: no merit of this worker.
    Shared,
}
