//! When device pages are copied to host.

use serde::{Deserialize, Serialize};

/// When device pages are copied to host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum WritePolicy {
    /// When their request ends, all of them.
    WriteThrough,
    /// When their request ends, those that at least `hits` requests have found in the cache.
    SelectiveWriteThrough {
        /// How many hits make a page worth a host copy.
        hits: u32,
    },
    /// When the device wants their room.
    WriteBack,
}

impl WritePolicy {
    /// Whether pages with so many hits are copied when their request ends.
    #[must_use]
    pub fn writes_at_end(self, hits: u32) -> bool {
        match self {
            Self::WriteThrough => true,
            Self::SelectiveWriteThrough { hits: wanted } => hits >= wanted,
            Self::WriteBack => false,
        }
    }

    /// Whether pages without a host copy are copied before the device gives up their room.
    #[must_use]
    pub fn writes_at_eviction(self) -> bool {
        match self {
            Self::WriteThrough | Self::SelectiveWriteThrough { .. } => false,
            Self::WriteBack => true,
        }
    }
}
