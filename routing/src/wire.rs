//! The bytes of KV events: MessagePack, as vLLM and SGLang write it.
//!
//! A batch is an array `[time, [events], rank]`. An event is a map with a `type`; before mid-2026
//! both engines wrote an array that begins with it, which is read too. Unknown fields are ignored:
//! engines add fields with every version.

mod decode;
mod encode;

pub use decode::{WireError, decode};
pub use encode::{L3Sharing, Manner, encode};

/// A batch of an engine's events.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Time, in seconds since 1970.
    pub at: f64,
    /// Changes, in order.
    pub events: Vec<Event>,
    /// Data-parallel rank of the engine.
    pub rank: Option<i64>,
}

/// A change of a worker's cache content.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Blocks became available.
    Stored(Stored),
    /// Blocks were removed.
    Removed {
        /// Names.
        hashes: Vec<u64>,
        /// Medium.
        medium: Medium,
    },
    /// The worker dropped all blocks.
    Cleared,
    /// An event about partial attention, such as sliding windows, or of an unknown kind.
    Other,
}

/// Consecutive blocks of one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// The engine's block names: 64 bits of whatever it uses.
    pub hashes: Vec<u64>,
    /// Name of the block before the first; none at the start of a prompt.
    pub parent: Option<u64>,
    /// Their tokens, `block_size` each; empty if the event only reports their medium.
    pub tokens: Vec<u32>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Medium.
    pub medium: Medium,
    /// Further dependencies of each block beside tokens; shorter if the remaining blocks have none.
    pub extras: Vec<Vec<String>>,
    /// Adapter that computed them.
    pub adapter: Option<String>,
}

/// Place of blocks, as far as routing depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Medium {
    /// Device memory.
    #[default]
    Device,
    /// Host memory.
    Host,
    /// A disk that only this worker reads.
    Disk,
    /// A shared store or an unknown medium, which does not favour this worker.
    Shared,
}
