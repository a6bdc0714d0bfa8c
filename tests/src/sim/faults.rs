//! Kinds of external faults, and their counts.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum FaultKind {
    Missing,
    Failed,
    TimedOut,
    LateAfterCancel,
    Repeated,
    Reordered,
    PartlyDone,
    ShortRead,
    FlippedBit,
    WrongPage,
    StaleGeneration,
    NoSpace,
    StoreRestart,
    StoreSlow,
    RankDisagreement,
    Abort,
    SharedTokens,
    Corrupt,
    StepFailed,
    NeverInTime,
    CacheCleared,
    CalledOff,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [FaultKind; 22] = [
        Self::Missing,
        Self::Failed,
        Self::TimedOut,
        Self::LateAfterCancel,
        Self::Repeated,
        Self::Reordered,
        Self::PartlyDone,
        Self::ShortRead,
        Self::FlippedBit,
        Self::WrongPage,
        Self::StaleGeneration,
        Self::NoSpace,
        Self::StoreRestart,
        Self::StoreSlow,
        Self::RankDisagreement,
        Self::Abort,
        Self::SharedTokens,
        Self::Corrupt,
        Self::StepFailed,
        Self::NeverInTime,
        Self::CacheCleared,
        Self::CalledOff,
    ];
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Occurrences of each kind of fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts([u64; FaultKind::ALL.len()]);

impl FaultCounts {
    /// Counts an occurrence.
    pub fn count(&mut self, kind: FaultKind) {
        self.0[kind as usize] += 1;
    }

    /// Returns the occurrences of a kind.
    #[must_use]
    pub fn of(&self, kind: FaultKind) -> u64 {
        self.0[kind as usize]
    }

    /// Adds another's counts.
    pub fn add(&mut self, other: &FaultCounts) {
        for (ours, theirs) in self.0.iter_mut().zip(other.0) {
            *ours += theirs;
        }
    }
}
