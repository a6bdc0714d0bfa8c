//! The radix tree: one node for each run of pages that no other sequence leaves halfway.
//!
//! Invariants, which [`crate::Cache::audit`] checks:
//! - every node but a root has bytes in at least one tier;
//! - a node on device has its parent on device, so what the device holds of any sequence is a
//!   prefix;
//! - a tier holds all pages of a node or none; nodes are split where that would not hold;
//! - a pin counts on every node of its path, so a node without pins has none below it either;
//! - a node's bytes vanish only when nothing lies below it.

mod digests;
mod evictable;
mod grow;
mod holdings;
mod shape;
mod spares;
mod transfers;

use std::ops::Range;

use smallvec::SmallVec;

pub(crate) use self::evictable::is_evictable;
use crate::events::KvEventLog;
use crate::evict::{EvictionKind, EvictionPolicy};
use crate::hash::HashedMap;
use crate::key::PageKey;
use crate::node::{NONE, Node};
use crate::pin::Pin;
use crate::reach::Reach;
use crate::run::PageRun;
use crate::sequence::Sequence;
use crate::tier::{Device, Page, Tier};

/// Room for so many nodes is there from the start, unless there are fewer pages.
const NODES_EXPECTED: usize = 28_000;

/// A node, as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A place in the tree: so many pages from the root, ending inside or at the end of a node. Good
/// until the tree changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// It tells when the node is gone and its place was given to another.
    pub(crate) node: NodeId,
    /// Number of pages from the root.
    pub depth: u32,
}

impl Cursor {
    /// Before the first page.
    pub const START: Cursor = Cursor { node: NodeId { index: NONE, generation: 0 }, depth: 0 };
}

/// Match of a sequence with the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The end of what the device holds.
    pub device: Cursor,
    /// The end of what device and host together hold: from `device` up to here pages are on host.
    pub host: Cursor,
    /// True while pages between `device` and `host` are loaded to the device.
    pub arriving: bool,
}

/// Depths of a [`Match`], for decisions that read no page. From keys alone they are known in a fraction of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depths {
    /// Pages that the device holds.
    pub device: u32,
    /// Pages that device and host together hold.
    pub host: u32,
    /// True while pages between the two are loaded to the device.
    pub arriving: bool,
}

impl Match {
    /// Depths of the match.
    #[must_use]
    pub fn depths(&self) -> Depths {
        let Self { device, host, arriving } = *self;
        Depths { device: device.depth, host: host.depth, arriving }
    }
}

/// State of one tier in the tree.
#[derive(Debug)]
pub struct TierState {
    pub(crate) policy: Box<dyn EvictionPolicy>,
    pub(crate) evictable_pages: usize,
}

/// Consecutive pages of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) start_page: u32,
    pub(crate) pages: u32,
}

impl Segment {
    fn covers(&self, node: &Node) -> bool {
        self.start_page <= node.start_page && node.end_page() <= self.start_page + self.pages
    }
}

/// Node indices from the top of a path to its bottom.
pub(crate) type PathNodes = SmallVec<[u32; 16]>;

#[allow(missing_debug_implementations)]
pub struct Tree {
    pub(crate) nodes: Vec<Node>,
    pub(crate) vacant: Vec<u32>,
    /// The node whose first page has this key; for roots, the namespace's digest.
    pub(crate) by_key: HashedMap<PageKey, u32>,
    pub(crate) device: TierState,
    pub(crate) host: TierState,
    pub(crate) events: KvEventLog,
    pub(crate) page_size: usize,
    /// True if a node may give its last pages to a child that was used alike.
    borders_move: bool,
    spares: spares::Spares,
    pub(crate) digests: digests::Digests,
    /// The node below which eviction removed another last: it may keep that one's tokens alive. It is
    /// trimmed once eviction has turned to another path: until then it mostly goes on shrinking, and
    /// copies of what is left would be for nothing.
    shrunk: Option<NodeId>,
    /// Nodes looked at by everything that changes the tree: its cost, counted.
    pub(crate) visits: u64,
    tick: u64,
    /// True if there ever was a node that may not be written to all tiers.
    some_are_limited: bool,
    /// The round in which things are learnt about L3.
    pub(crate) l3_round: u32,
}

impl Tree {
    pub(crate) fn new(
        page_size: u32,
        pages: usize,
        eviction: EvictionKind,
        events: KvEventLog,
    ) -> Self {
        let tier = || TierState { policy: eviction.build(), evictable_pages: 0 };
        // Small tables grow unnoticed; a large one holds up the request that fills it. What is not used
        // of it is not even mapped.
        let nodes_expected = pages.min(NODES_EXPECTED);
        let mut by_key = HashedMap::default();
        by_key.reserve(nodes_expected);
        Self {
            nodes: Vec::with_capacity(nodes_expected),
            vacant: Vec::new(),
            by_key,
            device: tier(),
            host: tier(),
            events,
            digests: digests::Digests::default(),
            page_size: page_size as usize,
            borders_move: eviction.goes_by_use(),
            spares: spares::Spares::default(),
            shrunk: None,
            visits: 0,
            tick: 0,
            some_are_limited: false,
            l3_round: 0,
        }
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        let node = &self.nodes[id.index as usize];
        assert_eq!(node.generation, id.generation, "a pin or cursor outlived its node");
        node
    }

    fn id(&self, index: u32) -> NodeId {
        NodeId { index, generation: self.nodes[index as usize].generation }
    }

    /// Follows the sequence from the root as far as its bytes can be had, at most `pages_max`.
    pub(crate) fn lookup(&self, sequence: &Sequence, pages_max: u32) -> Match {
        let common = |node: &Node, pages: Range<u32>| {
            node.common_pages(sequence.run(pages.start, pages.end), self.page_size)
        };
        self.walk(sequence, pages_max, common)
    }

    /// The same without a look at the tokens: two prefixes with one key pass for one.
    pub(crate) fn depths(&self, sequence: &Sequence, pages_max: u32) -> Depths {
        let common = |node: &Node, pages: Range<u32>| node.common_keys(sequence.keys(), pages);
        self.walk(sequence, pages_max, common).depths()
    }

    /// Follows the sequence from the root. `common` tells how many of the first pages of a node are those of the
    /// sequence at these places.
    fn walk(
        &self,
        sequence: &Sequence,
        pages_max: u32,
        common: impl Fn(&Node, Range<u32>) -> usize,
    ) -> Match {
        let mut found = Match { device: Cursor::START, host: Cursor::START, arriving: false };
        let keys = sequence.keys();
        let pages_max = (pages_max as usize).min(keys.len());
        let Some(&root) = self.by_key.get(&sequence.root()) else { return found };
        let (mut above, mut depth) = (root, 0usize);
        while depth < pages_max {
            let Some(index) = keys.get(depth).and_then(|key| self.child(above, key)) else { break };
            let node = &self.nodes[index as usize];
            if !node.readable() {
                break;
            }
            let common = common(node, depth as u32..pages_max as u32);
            if common == 0 {
                break;
            }
            depth += common;
            let node_id = NodeId { index, generation: node.generation };
            found.host = Cursor { node: node_id, depth: depth as u32 };
            if node.held_by::<Device>() {
                found.device = found.host;
            } else {
                found.arriving |= node.device.arriving;
            }
            if common < node.len() {
                break;
            }
            above = index;
        }
        found
    }

    /// Number of pages of the run, from its first, that tier `T` holds below the pinned path.
    pub(crate) fn held_ahead<T: Tier>(&self, pin: &Pin<T>, run: PageRun<'_>) -> u32 {
        let (mut above, mut rest) = (pin.node.index, run);
        while !rest.is_empty() {
            let Some(index) = self.child(above, rest.first_key()) else { break };
            let node = &self.nodes[index as usize];
            let common = node.common_pages(rest, self.page_size);
            if !node.held_by::<T>() || common == 0 {
                break;
            }
            rest = rest.skip(common);
            if common < node.len() {
                break;
            }
            above = index;
        }
        (run.len() - rest.len()) as u32
    }

    fn child(&self, above: u32, key: PageKey) -> Option<u32> {
        // Mostly the latest child goes on from here, and it is in one place in memory where the map is in two more.
        let latest = self.nodes[above as usize].first_child;
        if self.nodes.get(latest as usize).is_some_and(|child| child.first_key == key) {
            return Some(latest);
        }
        let &index = self.by_key.get(&key)?;
        // The keys chain from the namespace on, so another parent means a collision of keys.
        (self.nodes[index as usize].parent == above).then_some(index)
    }

    /// The nodes from the one that holds page `start_page` down to `bottom`.
    pub(crate) fn path(&self, bottom: u32, start_page: u32) -> PathNodes {
        let mut nodes = PathNodes::new();
        let mut index = bottom;
        while index != NONE {
            let node = &self.nodes[index as usize];
            if node.is_root() || node.end_page() <= start_page {
                break;
            }
            nodes.push(index);
            index = node.parent;
        }
        nodes.reverse();
        nodes
    }

    /// Writes the pages of a pinned path from `start_page` on to the end of `into`.
    pub(crate) fn pages<T: Tier>(&self, pin: &Pin<T>, start_page: u32, into: &mut Vec<Page<T>>) {
        for index in self.path(pin.node.index, start_page) {
            let node = &self.nodes[index as usize];
            let skip = start_page.saturating_sub(node.start_page) as usize;
            into.extend_from_slice(&T::of(node).pages[skip..]);
        }
    }

    /// Pins the path to `at`, splitting a node where the path ends inside it.
    pub(crate) fn pin<T: Tier>(&mut self, namespace: PageKey, at: Cursor) -> Pin<T> {
        let index = if at.depth == 0 { self.root(namespace) } else { self.boundary(at) };
        self.pin_node(index)
    }

    /// Pins the part of the pinned path that tier `T` holds.
    pub(crate) fn pin_held<T: Tier, U>(&mut self, along: &Pin<U>) -> Pin<T> {
        let mut index = along.node.index;
        while !self.nodes[index as usize].held_by::<T>() {
            index = self.nodes[index as usize].parent;
        }
        self.pin_node(index)
    }

    /// Pins the part of a pinned path that ends with page `depth`, where a node ends.
    pub(crate) fn pin_above<T: Tier>(&mut self, pin: &Pin<T>, depth: u32) -> Pin<T> {
        let mut index = pin.node.index;
        while self.nodes[index as usize].end_page() > depth {
            index = self.nodes[index as usize].parent;
        }
        self.pin_node(index)
    }

    /// Pages of a pinned path in tier `T` that no other pin keeps. A pin counts on all nodes above its own, so a
    /// node with one pin has no other below it.
    pub(crate) fn pages_kept_by<T: Tier>(&self, pin: &Pin<T>) -> usize {
        let path = self.path(pin.node.index, 0);
        let nodes = path.iter().rev().map(|&index| &self.nodes[index as usize]);
        nodes.take_while(|node| T::of(node).pins == 1).map(|node| T::of(node).pages.len()).sum()
    }

    fn pin_node<T: Tier>(&mut self, bottom: u32) -> Pin<T> {
        self.count_pins::<T>(bottom, NONE, |pins| pins + 1);
        Pin::new(self.id(bottom), self.nodes[bottom as usize].end_page())
    }

    /// Moves a pin down to a node below its own.
    fn lengthen<T: Tier>(&mut self, pin: &mut Pin<T>, bottom: u32) {
        self.count_pins::<T>(bottom, pin.node.index, |pins| pins + 1);
        *pin = Pin::new(self.id(bottom), self.nodes[bottom as usize].end_page());
    }

    pub(crate) fn unpin<T: Tier>(&mut self, pin: Pin<T>) {
        assert_eq!(self.node(pin.node).end_page(), pin.depth, "a pinned path changed its length");
        self.count_pins::<T>(pin.node.index, NONE, |pins| pins - 1);
        self.remove_if_empty_root(pin.node.index);
    }

    fn count_pins<T: Tier>(&mut self, bottom: u32, above: u32, count: impl Fn(u32) -> u32) {
        let mut index = bottom;
        while index != above {
            self.visits += 1;
            let node = &mut self.nodes[index as usize];
            let parent = node.parent;
            let holding = T::of_mut(node);
            let before = holding.pins;
            holding.pins = count(before);
            if before == 0 || holding.pins == 0 {
                self.refresh(index);
            }
            index = parent;
        }
    }

    /// The pinned path may be written so far, if it could not before.
    pub(crate) fn extend_reach<T: Tier>(&mut self, pin: &Pin<T>, reach: Reach) {
        if !self.some_are_limited {
            return;
        }
        for index in self.path(pin.node.index, 0) {
            let usage = &mut self.nodes[index as usize].usage;
            usage.reach = usage.reach.max(reach);
        }
    }

    /// Notes that a request found, or made, the pinned path: `hits` counts those that found it.
    pub(crate) fn touch<T: Tier>(&mut self, pin: &Pin<T>, hits: u32, priority: i32) {
        self.tick += 1;
        let tick = self.tick;
        let mut index = pin.node.index;
        while index != NONE {
            self.visits += 1;
            let node = &mut self.nodes[index as usize];
            if node.is_untrimmed {
                node.trim();
            }
            node.usage.last_used = tick;
            node.usage.hits = node.usage.hits.saturating_add(hits);
            node.usage.priority = node.usage.priority.max(priority);
            let (parent, usage) = (node.parent, node.usage);
            // A policy ranks a node once, when it is offered: offer it again.
            let (on_device, on_host) = (node.device.offered, node.host.offered);
            for (offered, tier) in [(on_device, &mut self.device), (on_host, &mut self.host)] {
                if offered {
                    tier.policy.withdraw(index);
                    tier.policy.offer(index, &usage);
                }
            }
            index = parent;
        }
    }
}
