//! How far down the tiers something goes.

use serde::{Deserialize, Serialize};

/// How far down the tiers a request may read, or what it computes may be written. Pages that several requests
/// use go as far as the one that goes farthest.
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
    /// Whether it is all tiers.
    #[must_use]
    pub fn is_all(&self) -> bool {
        *self == Self::L3
    }
}
