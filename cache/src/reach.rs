//! Depth of tiers that a request reads and writes.

use serde::{Deserialize, Serialize};

/// Deepest tier that a request may read, or that its pages may be written to. Pages that several requests use go as
/// deep as the deepest of them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Reach {
    /// No tier.
    Nothing,
    /// Device alone.
    Device,
    /// Device and host.
    Host,
    /// All tiers.
    #[default]
    L3,
}

impl Reach {
    /// Returns true for all tiers.
    #[must_use]
    pub fn is_all(&self) -> bool {
        *self == Self::L3
    }
}
