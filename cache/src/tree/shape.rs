//! Shape: nodes are split where sequences part and merged where they no longer do.

use std::iter::successors;

use super::{Cursor, Tree};
use crate::node::{Holding, NONE, Node};
use crate::pin::Pin;
use crate::planted::{Bug, planted};
use crate::pool::Pool;
use crate::tier::Device;

/// A child with more pages than this is not merged into its parent: moving them would cost more
/// than the node that it saves.
const MERGE_PAGES_MAX: usize = 32;

impl Tree {
    /// The node that ends exactly at `at`, split off if the place is inside a node.
    pub(super) fn boundary(&mut self, at: Cursor) -> u32 {
        let node = self.node(at.node);
        debug_assert!(node.start_page < at.depth && at.depth <= node.end_page());
        if at.depth == node.end_page() {
            return at.node.index;
        }
        let pages = (at.depth - node.start_page) as usize;
        self.split(at.node.index, pages)
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
        let mut upper = Node::new(node.namespace, node.first_key, node.start_page, node.usage);
        upper.excerpt = std::mem::replace(&mut node.excerpt, lower);
        upper.device = split_holding(&mut node.device, pages);
        upper.host = split_holding(&mut node.host, pages);
        (upper.is_untrimmed, node.is_untrimmed) = (true, true);
        (upper.in_l3, upper.l3_round) = (node.in_l3, node.l3_round);
        (upper.backing_up, upper.host_unsound) = (node.backing_up, node.host_unsound);
        node.start_page += pages as u32;
        let border = node.start_page;
        self.tick += 1;
        node.usage.created = self.tick;
        let (first, lower_first) = (upper.first_key, node.keys()[0]);
        node.first_key = lower_first;
        node.usage.fingerprint = lower_first.0 as u64;
        self.unlink(index);
        let upper = self.place(upper);
        self.digests.part(index, upper, border);
        self.by_key.insert(first, upper);
        self.by_key.insert(lower_first, index);
        self.link(upper, parent);
        self.link(index, upper);
        self.refresh(upper);
        self.refresh(index);
        upper
    }

    /// Merges the nodes along a pinned path that nothing tells apart and that were used alike: what grew
    /// bit by bit under a request that has ended.
    pub(crate) fn tidy<T>(&mut self, pin: &Pin<T>) {
        // Mostly there is none, which is seen on the way up.
        let above = |node: &&Node| self.nodes.get(node.parent as usize);
        let mut path = successors(self.nodes.get(pin.node.index as usize), above);
        if !path.any(|node| self.is_used_like_only_child(node)) {
            return;
        }
        for index in self.path(pin.node.index, 0) {
            if self.is_used_like_only_child(&self.nodes[index as usize]) {
                self.merge_with_only_child(index);
            }
        }
    }

    fn is_used_like_only_child(&self, node: &Node) -> bool {
        let child = self.nodes.get(node.first_child as usize);
        child.is_some_and(|child| child.next_sibling == NONE && node.usage.is_like(&child.usage))
    }

    /// Merges a node with its only child, if nothing tells them apart, the child is small, and it costs no long copy:
    /// a prompt and its answer stay two nodes, which the next prompt, if it goes another way, has to part anyway.
    pub(super) fn merge_with_only_child(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        let child_index = node.first_child;
        if node.is_root() || child_index == NONE {
            return;
        }
        let child = &self.nodes[child_index as usize];
        let is_held_alike = node.device.pages.is_empty() == child.device.pages.is_empty();
        if !is_held_alike
            || child.len() > MERGE_PAGES_MAX
            || !is_like_only_child(node, child)
            || !child.excerpt.takes_in_front_cheaply(&node.excerpt, self.page_size)
        {
            return;
        }
        self.withdraw(index);
        self.withdraw(child_index);
        let [node, child] = both(&mut self.nodes, index, child_index);
        self.by_key.remove(&child.first_key);
        self.by_key.insert(node.first_key, child_index);
        child.first_key = node.first_key;
        let parent = node.parent;
        child.start_page = node.start_page;
        child.usage.created = node.usage.created;
        child.usage.fingerprint = node.usage.fingerprint;
        child.excerpt.prepend(&mut node.excerpt);
        self.digests.merge(index, child_index);
        prepend(&mut child.device.pages, &mut node.device.pages);
        prepend(&mut child.host.pages, &mut node.host.pages);
        self.unlink(index);
        self.link(child_index, parent);
        self.vacate(index);
        self.refresh(child_index);
    }

    /// Returns true if the end of a node from page `kept` on can become the beginning of its only child, once it is
    /// off the device: they are adjacent in memory, and do not differ then.
    pub(super) fn passes_down(&self, index: u32, kept: usize) -> bool {
        let node = &self.nodes[index as usize];
        let Some(child) = self.nodes.get(node.first_child as usize) else { return false };
        self.borders_move
            && kept > 0
            && node.has_sound_host_copy()
            && child.device.pages.is_empty()
            && is_like_only_child(node, child)
            && node.usage.is_like(&child.usage)
            && child.excerpt.follows(&node.excerpt)
    }

    /// Takes a node's pages from `kept` on off the device and gives their host copies to its only child.
    /// A node for each bit that a long prompt loses would cost more than the bit.
    pub(super) fn pass_down(&mut self, index: u32, kept: usize, device: &mut Pool<Device>) {
        self.tell_gone::<Device>(index, kept);
        let child_index = self.nodes[index as usize].first_child;
        self.withdraw(child_index);
        self.withdraw(index);
        let [node, child] = both(&mut self.nodes, index, child_index);
        self.by_key.remove(&child.first_key);
        device.give_all(node.device.pages.drain(kept..));
        child.excerpt.prepend(&mut node.excerpt.split_off(kept));
        child.host.pages.splice(..0, node.host.pages.drain(kept..));
        child.start_page = node.end_page();
        self.digests.pass_down(index, child_index, child.start_page);
        child.first_key = child.keys()[0];
        child.usage.fingerprint = child.first_key.0 as u64;
        self.by_key.insert(child.first_key, child_index);
        node.is_untrimmed = true;
        self.refresh(child_index);
        self.refresh(index);
    }
}

fn both(nodes: &mut [Node], index: u32, child: u32) -> [&mut Node; 2] {
    let places = [index as usize, child as usize];
    nodes.get_disjoint_mut(places).expect("a node is not its own child")
}

/// Returns true if a node and its only child differ only in their pages on device.
fn is_like_only_child(node: &Node, child: &Node) -> bool {
    child.next_sibling == NONE
        && is_pinned_alike(&node.device, &child.device)
        && is_pinned_alike(&node.host, &child.host)
        && node.host.pages.is_empty() == child.host.pages.is_empty()
        && !node.is_in_motion()
        && !child.is_in_motion()
        && (node.seen_in_l3(), node.host_unsound) == (child.seen_in_l3(), child.host_unsound)
        && node.usage.reach == child.usage.reach
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

/// Returns true if no pin of this tier ends between parent and only child.
fn is_pinned_alike<T>(parent: &Holding<T>, child: &Holding<T>) -> bool {
    parent.pins == child.pins || planted(Bug::MergeAcrossPins)
}

fn prepend<E>(to: &mut Vec<E>, front: &mut Vec<E>) {
    front.append(to);
    std::mem::swap(to, front);
}
