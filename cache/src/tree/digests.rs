//! Digests of prefixes that transfers from and to L3 have needed, so that a path that grows is not hashed again from
//! its first page. Most nodes have none, and most trees none at all.

use crate::hash::HashedMap;
use crate::prefix::PrefixDigest;

/// The digest of the pages of a path before one of its places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DigestAt {
    pub(crate) page: u32,
    pub(crate) digest: PrefixDigest,
}

/// Known digests, at most one for each node: of a prefix that ends in it.
#[derive(Debug, Default)]
pub(crate) struct Digests(HashedMap<u32, DigestAt>);

impl Digests {
    pub(crate) fn get(&self, node: u32) -> Option<DigestAt> {
        self.0.get(&node).copied()
    }

    pub(super) fn note(&mut self, node: u32, digest: DigestAt) {
        self.0.insert(node, digest);
    }

    /// The node is gone.
    pub(super) fn forget(&mut self, node: u32) {
        if !self.0.is_empty() {
            self.0.remove(&node);
        }
    }

    /// The pages of a node before a place are those of another from now on.
    pub(super) fn part(&mut self, node: u32, upper: u32, border: u32) {
        if let Some(known) = self.get(node).filter(|known| known.page <= border) {
            self.0.remove(&node);
            self.0.insert(upper, known);
        }
    }

    /// The pages of a node are the first of its child from now on.
    pub(super) fn merge(&mut self, node: u32, child: u32) {
        if let Some(known) = self.get(node) {
            self.0.remove(&node);
            self.0.entry(child).or_insert(known);
        }
    }

    /// The pages of a node behind a place are the first of its child from now on.
    pub(super) fn pass_down(&mut self, node: u32, child: u32, border: u32) {
        if let Some(known) = self.get(node).filter(|known| known.page > border) {
            self.0.remove(&node);
            self.0.entry(child).or_insert(known);
        }
    }

    /// The pages of a node behind a place are gone.
    pub(super) fn cut(&mut self, node: u32, end: u32) {
        if self.get(node).is_some_and(|known| known.page > end) {
            self.0.remove(&node);
        }
    }

    /// The size in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.0.capacity() * (size_of::<(u32, DigestAt)>() + 1)
    }
}
