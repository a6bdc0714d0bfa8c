//! Tiers and their pages. A page is a slot in an arena that the engine owns; the tier is part of
//! its type, so a device page cannot be passed where a host page is meant.

use std::fmt;
use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

use crate::node::{Holding, Node};

/// A tier that holds page bytes inside this process, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TierName {
    /// Device memory.
    Device,
    /// Host memory.
    Host,
}

/// A tier that holds page bytes inside this process, as a type: [`Device`] or [`Host`].
pub trait Tier: sealed::Stored {
    /// This tier as a value.
    const NAME: TierName;
}

/// Device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device;

/// Host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Host;

impl Tier for Device {
    const NAME: TierName = TierName::Device;
}

impl Tier for Host {
    const NAME: TierName = TierName::Host;
}

/// Where the tree keeps what belongs to a tier; only the two tiers here have it.
#[expect(private_interfaces, reason = "nobody outside can name this trait, let alone implement it")]
pub(crate) mod sealed {
    use super::{Device, Holding, Host, Node};
    use crate::planted::{Bug, planted};
    use crate::tree::{TierState, Tree};

    pub trait Stored: Copy + Eq + std::fmt::Debug + 'static {
        fn of(node: &Node) -> &Holding<Self>;
        fn of_mut(node: &mut Node) -> &mut Holding<Self>;
        fn state(tree: &Tree) -> &TierState;
        fn state_mut(tree: &mut Tree) -> &mut TierState;
        /// Returns true if pins and the other tier allow the eviction of the node's pages in this tier.
        fn may_go(node: &Node) -> bool;
    }

    impl Stored for Device {
        fn of(node: &Node) -> &Holding<Self> {
            &node.device
        }
        fn of_mut(node: &mut Node) -> &mut Holding<Self> {
            &mut node.device
        }
        fn state(tree: &Tree) -> &TierState {
            &tree.device
        }
        fn state_mut(tree: &mut Tree) -> &mut TierState {
            &mut tree.device
        }
        /// Without a sound host copy the node goes for good, and with it whatever lies below it
        /// on host: then host pins count too.
        fn may_go(node: &Node) -> bool {
            let unpinned = node.device.pins == 0 || planted(Bug::EvictPinnedDevicePages);
            unpinned && (node.has_sound_host_copy() || node.host.pins == 0)
        }
    }

    impl Stored for Host {
        fn of(node: &Node) -> &Holding<Self> {
            &node.host
        }
        fn of_mut(node: &mut Node) -> &mut Holding<Self> {
            &mut node.host
        }
        fn state(tree: &Tree) -> &TierState {
            &tree.host
        }
        fn state_mut(tree: &mut Tree) -> &mut TierState {
            &mut tree.host
        }
        fn may_go(node: &Node) -> bool {
            node.host.pins == 0 || planted(Bug::EvictPinnedHostPages)
        }
    }
}

/// A slot in the arena of tier `T`. Knowing a slot's number is not owning it: see [`Pages`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Page<T> {
    slot: u32,
    tier: PhantomData<T>,
}

/// A slot in the device arena.
pub type DevicePage = Page<Device>;
/// A slot in the host arena.
pub type HostPage = Page<Host>;

impl<T> Page<T> {
    pub(crate) fn new(slot: u32) -> Self {
        Self { slot, tier: PhantomData }
    }

    /// The slot's number, below the arena's size.
    #[must_use]
    pub fn slot(self) -> u32 {
        self.slot
    }
}

impl<T: Tier> fmt::Debug for Page<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match T::NAME {
            TierName::Device => 'd',
            TierName::Host => 'h',
        };
        write!(f, "{letter}{}", self.slot)
    }
}

impl<T> Serialize for Page<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.slot.serialize(serializer)
    }
}

/// Pages that the holder owns. Giving them back to the pool, or to the tree, consumes them.
#[must_use = "dropping owned pages loses them"]
#[derive(PartialEq, Eq)]
pub struct Pages<T> {
    pages: Vec<Page<T>>,
}

/// Owned slots of the device arena.
pub type DevicePages = Pages<Device>;
/// Owned slots of the host arena.
pub type HostPages = Pages<Host>;

impl<T> Pages<T> {
    /// Owns nothing.
    pub fn none() -> Self {
        Self { pages: Vec::new() }
    }

    pub(crate) fn into_vec(self) -> Vec<Page<T>> {
        self.pages
    }

    pub(crate) fn as_vec_mut(&mut self) -> &mut Vec<Page<T>> {
        &mut self.pages
    }

    /// Takes over `more`, behind what is owned already.
    pub fn append(&mut self, mut more: Pages<T>) {
        self.pages.append(&mut more.pages);
    }

    /// Hands on the pages from `at` to the end.
    pub fn split_off(&mut self, at: usize) -> Pages<T> {
        Self { pages: self.pages.split_off(at) }
    }

    /// Number of owned pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Returns true if no page is owned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The pages, to read.
    #[must_use]
    pub fn as_slice(&self) -> &[Page<T>] {
        &self.pages
    }
}

impl<T> Default for Pages<T> {
    fn default() -> Self {
        Self::none()
    }
}

impl<T: Tier> fmt::Debug for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.pages).finish()
    }
}
