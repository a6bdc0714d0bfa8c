//! Identifiers that the scheduler assigns.

use serde::{Deserialize, Serialize};

/// Identifier of a forward step. Later steps have higher numbers.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct StepId(pub u64);

/// Number of an adapter (LoRA). It keeps its meaning as long as a request that uses the adapter is alive;
/// [`Scheduler::adapter`](crate::Scheduler::adapter) returns the name.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct AdapterId(pub u32);

impl AdapterId {
    /// No adapter: the plain model.
    pub const NONE: Self = Self(0);

    /// Returns true for [`NONE`](Self::NONE).
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// Handle of a live request. The serial number distinguishes it from earlier requests with the same
/// place or the same id. Lower numbers arrived earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle {
    pub(crate) serial: u64,
    pub(crate) index: u32,
}

impl Handle {
    /// Not later than any other.
    pub(crate) const FIRST: Self = Self { serial: 0, index: 0 };
    /// Not earlier than any other.
    pub(crate) const LAST: Self = Self { serial: u64::MAX, index: u32::MAX };

    /// Number of answer tokens for which memory is reserved at the start, at most `tokens_max`. It differs
    /// between requests, so that requests that start together do not reallocate in the same step.
    pub(crate) fn room_for_answer(self, tokens_max: u32) -> usize {
        let room = 4096 + 64 * (self.serial % 64) as usize;
        room.min(tokens_max as usize)
    }
}
