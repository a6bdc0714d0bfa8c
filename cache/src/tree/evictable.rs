//! Evictability: counts and offers, kept up to date as nodes change.

use super::Tree;
use crate::node::Node;
use crate::planted::{Bug, planted};
use crate::tier::{Device, Host, Tier};

impl Tree {
    /// Takes a node out of the counts and offers before it changes.
    pub(super) fn withdraw(&mut self, index: u32) {
        self.withdraw_from::<Device>(index);
        self.withdraw_from::<Host>(index);
    }

    pub(super) fn withdraw_from<T: Tier>(&mut self, index: u32) {
        let node = &mut self.nodes[index as usize];
        let length = node.len();
        let holding = T::of_mut(node);
        let (evictable, offered) = (holding.evictable, holding.offered);
        (holding.evictable, holding.offered) = (false, false);
        let state = T::state_mut(self);
        if evictable {
            state.evictable_pages -= length;
        }
        if offered {
            state.policy.withdraw(index);
        }
        if evictable {
            self.count_evictable_child::<T>(index, false);
        }
    }

    /// Brings the counts and offers up to date after a node, its pins or its children changed.
    pub(super) fn refresh(&mut self, index: u32) {
        self.refresh_in::<Device>(index);
        self.refresh_in::<Host>(index);
    }

    /// A node is evictable only with its children: a change propagates upwards.
    pub(super) fn refresh_in<T: Tier>(&mut self, mut index: u32) {
        while self.refresh_node::<T>(index) {
            index = self.nodes[index as usize].parent;
        }
    }

    /// Tells whether the node became evictable or is so no more.
    pub(super) fn refresh_node<T: Tier>(&mut self, index: u32) -> bool {
        self.visits += 1;
        let node = &mut self.nodes[index as usize];
        let evictable = is_evictable::<T>(node);
        let is_leaf = T::of(node).children == 0 || planted(Bug::EvictParentFirst);
        let offered = evictable && is_leaf;
        let (length, usage) = (node.len(), node.usage);
        let holding = T::of_mut(node);
        let before = (holding.evictable, holding.offered);
        (holding.evictable, holding.offered) = (evictable, offered);
        let state = T::state_mut(self);
        match (before.1, offered) {
            (false, true) => state.policy.offer(index, &usage),
            (true, false) => state.policy.withdraw(index),
            (true, true) | (false, false) => {}
        }
        match (before.0, evictable) {
            (false, true) if planted(Bug::MiscountEvictablePages) => state.evictable_pages += 1,
            (false, true) => state.evictable_pages += length,
            (true, false) => state.evictable_pages -= length,
            (true, true) | (false, false) => return false,
        }
        self.count_evictable_child::<T>(index, evictable);
        true
    }

    pub(super) fn count_evictable_child<T: Tier>(&mut self, index: u32, evictable: bool) {
        let parent = self.nodes[index as usize].parent;
        let holding = T::of_mut(&mut self.nodes[parent as usize]);
        if evictable {
            holding.evictable_children += 1;
        } else {
            holding.evictable_children -= 1;
        }
    }
}

/// Returns true if the node's pages in this tier may be evicted after those below them, which may be evicted too.
pub(crate) fn is_evictable<T: Tier>(node: &Node) -> bool {
    let holding = T::of(node);
    !holding.pages.is_empty() && holding.evictable_children == holding.children && T::may_go(node)
}
