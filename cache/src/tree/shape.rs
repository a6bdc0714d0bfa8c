//! Shape: nodes are split where sequences part and merged where they no longer do.

use super::{Cursor, Tree};
use crate::node::{Holding, NONE, Node};
use crate::planted::{Bug, planted};

/// A child with more pages than this is not merged into its parent: moving them would cost more
/// than the node that it saves.
const MERGE_PAGES_MAX: usize = 32;

impl Tree {
    /// The node that ends exactly at `at`, split off if the place is inside a node.
    pub(super) fn boundary(&mut self, at: Cursor) -> u32 {
        let node = &self.nodes[at.node as usize];
        debug_assert!(node.start_page < at.depth && at.depth <= node.end_page());
        if at.depth == node.end_page() {
            return at.node;
        }
        let pages = (at.depth - node.start_page) as usize;
        self.split(at.node, pages)
    }

    /// Splits a node after its first `pages`; the new node gets those, and the old one, with its
    /// pins and children, keeps the rest. Neither keeps memory that only the other needs.
    pub(super) fn split(&mut self, index: u32, pages: usize) -> u32 {
        let upper = self.part(index, pages);
        self.nodes[upper as usize].trim();
        self.nodes[index as usize].trim();
        upper
    }

    /// Splits a node as [`Tree::split`] does, but its parts go on sharing the tokens of the whole until
    /// they are next used.
    pub(super) fn part(&mut self, index: u32, pages: usize) -> u32 {
        self.withdraw(index);
        let node = &mut self.nodes[index as usize];
        let parent = node.parent;
        let lower = node.excerpt.split_off(pages);
        let mut upper = Node::new(node.namespace, node.start_page, node.usage);
        upper.excerpt = std::mem::replace(&mut node.excerpt, lower);
        upper.device = split_holding(&mut node.device, pages);
        upper.host = split_holding(&mut node.host, pages);
        (upper.is_untrimmed, node.is_untrimmed) = (true, true);
        (upper.in_l3, upper.backing_up, upper.host_unsound) =
            (node.in_l3, node.backing_up, node.host_unsound);
        node.start_page += pages as u32;
        self.tick += 1;
        node.usage.created = self.tick;
        let (first, lower_first) = (upper.keys()[0], node.keys()[0]);
        node.usage.fingerprint = lower_first.0 as u64;
        self.unlink(index);
        let upper = self.place(upper);
        self.by_key.insert(first, upper);
        self.by_key.insert(lower_first, index);
        self.link(upper, parent);
        self.link(index, upper);
        self.refresh(upper);
        self.refresh(index);
        upper
    }

    /// Merges a node with its only child, if nothing tells them apart and the child is small.
    pub(super) fn merge_with_only_child(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        let child_index = node.first_child;
        if node.is_root() || child_index == NONE {
            return;
        }
        let child = &self.nodes[child_index as usize];
        let alike = child.next_sibling == NONE
            && child.len() <= MERGE_PAGES_MAX
            && alike(&node.device, &child.device)
            && alike(&node.host, &child.host)
            && !node.is_in_motion()
            && !child.is_in_motion()
            && (node.in_l3, node.host_unsound) == (child.in_l3, child.host_unsound);
        if !alike {
            return;
        }
        self.withdraw(index);
        self.withdraw(child_index);
        let [node, child] = self
            .nodes
            .get_disjoint_mut([index as usize, child_index as usize])
            .expect("a node is not its own child");
        self.by_key.remove(&child.keys()[0]);
        self.by_key.insert(node.keys()[0], child_index);
        let parent = node.parent;
        child.start_page = node.start_page;
        child.usage.created = node.usage.created;
        child.usage.fingerprint = node.usage.fingerprint;
        child.excerpt.prepend(&mut node.excerpt);
        prepend(&mut child.device.pages, &mut node.device.pages);
        prepend(&mut child.host.pages, &mut node.host.pages);
        self.unlink(index);
        self.link(child_index, parent);
        self.vacate(index);
        self.refresh(child_index);
    }
}

/// The part of a holding that goes to the upper node of a split.
fn split_holding<T>(holding: &mut Holding<T>, pages: usize) -> Holding<T> {
    let held = !holding.pages.is_empty();
    let lower = holding.pages.split_off(pages.min(holding.pages.len()));
    Holding {
        pages: std::mem::replace(&mut holding.pages, lower),
        pins: holding.pins,
        children: held.into(),
        evictable_children: 0,
        arriving: holding.arriving,
        evictable: false,
        offered: false,
    }
}

/// Whether parent and only child are the same to this tier: no pin ends between them.
fn alike<T>(parent: &Holding<T>, child: &Holding<T>) -> bool {
    (parent.pins == child.pins || planted(Bug::MergeAcrossPins))
        && parent.pages.is_empty() == child.pages.is_empty()
}

fn prepend<E>(to: &mut Vec<E>, front: &mut Vec<E>) {
    front.append(to);
    std::mem::swap(to, front);
}
