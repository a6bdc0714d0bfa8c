//! Policies that are nothing but an order of the nodes on offer.

use super::heap::{Rank, RankHeap};
use super::{EvictionPolicy, Usage};

/// Evicts the node of the smallest rank; the rank is a function of a node's usage.
#[derive(Debug)]
pub(crate) struct Ranked {
    nodes: RankHeap,
    rank: fn(&Usage) -> Rank,
}

impl Ranked {
    pub(crate) fn by(rank: fn(&Usage) -> Rank) -> Self {
        Self { nodes: RankHeap::default(), rank }
    }
}

impl EvictionPolicy for Ranked {
    fn offer(&mut self, node: u32, usage: &Usage) {
        self.nodes.insert(node, (self.rank)(usage));
    }

    fn withdraw(&mut self, node: u32) {
        self.nodes.remove(node);
    }

    fn victim(&mut self) -> Option<u32> {
        self.nodes.first()
    }
}
