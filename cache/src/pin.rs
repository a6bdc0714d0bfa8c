//! Pins: move-only proofs that a path of the tree stays where it is.

use std::fmt;
use std::marker::PhantomData;

use crate::tier::{Device, Host, Tier};
use crate::tree::NodeId;

/// Keeps the path from the root to one node from eviction until it is given back.
///
/// A [`DevicePin`] keeps the path's device pages. A [`HostPin`] keeps the path's host pages, and
/// the device pages of those nodes on the path that have no host copy: the bytes of the path do
/// not vanish, whichever tier holds them.
#[must_use = "dropping a pin without giving it back leaks it"]
#[derive(PartialEq, Eq)]
pub struct Pin<T> {
    pub(crate) node: NodeId,
    pub(crate) depth: u32,
    tier: PhantomData<T>,
}

/// Keeps device pages.
pub type DevicePin = Pin<Device>;
/// Keeps host pages.
pub type HostPin = Pin<Host>;

impl<T> Pin<T> {
    pub(crate) fn new(node: NodeId, depth: u32) -> Self {
        Self { node, depth, tier: PhantomData }
    }

    /// The deepest node of the pinned path.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Number of pages of the pinned path.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.depth
    }
}

impl<T: Tier> fmt::Debug for Pin<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}Pin({} pages)", T::NAME, self.depth)
    }
}
