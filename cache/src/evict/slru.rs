//! Segmented LRU: what was never hit goes before what was.

use super::heap::{Rank, RankHeap};
use super::{EvictionPolicy, Usage};

/// The protected segment holds at most this share of the nodes on offer, in percent.
const PROTECTED_PERCENT_MAX: usize = 80;

/// Nodes on probation go first, in order of use; a hit moves a node to the protected segment, and
/// when that is too large its least recently used go back to probation.
#[derive(Debug, Default)]
pub(crate) struct Slru {
    probation: RankHeap,
    protected: RankHeap,
    /// The rank of each node, needed when it changes its segment.
    ranks: Vec<Rank>,
}

impl Slru {
    fn demote_surplus(&mut self) {
        let nodes = self.probation.len() + self.protected.len();
        while self.protected.len() * 100 > nodes * PROTECTED_PERCENT_MAX {
            let Some(node) = self.protected.first() else { return };
            self.protected.remove(node);
            self.probation.insert(node, self.ranks[node as usize]);
        }
    }
}

impl EvictionPolicy for Slru {
    fn offer(&mut self, node: u32, usage: &Usage) {
        let rank = (usage.last_used, usage.created);
        if self.ranks.len() <= node as usize {
            self.ranks.resize(node as usize + 1, (0, 0));
        }
        self.ranks[node as usize] = rank;
        if usage.hits == 0 {
            self.probation.insert(node, rank);
        } else {
            self.protected.insert(node, rank);
        }
    }

    fn withdraw(&mut self, node: u32) {
        if !self.probation.remove(node) {
            self.protected.remove(node);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        self.demote_surplus();
        self.probation.first().or_else(|| self.protected.first())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::tests::{order, usage};

    #[test]
    fn pages_without_a_hit_are_evicted_first() {
        let mut policy = Slru::default();
        let nodes = [usage(0, 10, 1), usage(1, 40, 0), usage(2, 30, 0)];
        assert_eq!(order(&mut policy, &nodes), [2, 1, 0]);
    }

    #[test]
    fn hits_alone_do_not_protect_everything() {
        let mut policy = Slru::default();
        for node in 0..10 {
            policy.offer(node, &usage(node.into(), node.into(), 1));
        }
        assert_eq!(policy.victim(), Some(0));
        assert_eq!((policy.probation.len(), policy.protected.len()), (2, 8));
    }
}
