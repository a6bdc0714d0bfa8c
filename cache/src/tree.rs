//! The radix tree: one node for each run of pages that no other sequence leaves halfway.
//!
//! What always holds (and [`crate::Cache::audit`] checks):
//! - every node but a root has bytes in at least one tier;
//! - a node on device has its parent on device, so what the device holds of any sequence is a
//!   prefix;
//! - a tier holds all pages of a node or none; nodes are split where that would not hold;
//! - a pin counts on every node of its path, so a node without pins has none below it either;
//! - a node's bytes vanish only when nothing lies below it.

use smallvec::SmallVec;

use crate::events::{KvEvent, KvEventLog};
use crate::evict::{EvictionKind, EvictionPolicy, Usage};
use crate::hash::HashedMap;
use crate::key::PageKey;
use crate::node::{Holding, NONE, Node};
use crate::pin::Pin;
use crate::pool::Pool;
use crate::sequence::{PageRun, Sequence};
use crate::tier::{Device, Host, Page, Pages, Tier, TierName};

/// A child with more pages than this is not merged into its parent: moving them would cost more
/// than the node that it saves.
const MERGE_PAGES_MAX: usize = 32;

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
    pub(crate) node: u32,
    /// How many pages from the root.
    pub depth: u32,
}

impl Cursor {
    /// Before the first page.
    pub const START: Cursor = Cursor { node: NONE, depth: 0 };
}

/// How much of a sequence the cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// The end of what the device holds.
    pub device: Cursor,
    /// The end of what device and host together hold: from `device` up to here pages are on host.
    pub host: Cursor,
    /// Whether pages between `device` and `host` are being brought to the device already.
    pub arriving: bool,
}

/// What the tree keeps about one tier.
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
    tick: u64,
}

impl Tree {
    pub(crate) fn new(page_size: u32, eviction: EvictionKind, events: KvEventLog) -> Self {
        let tier = || TierState { policy: eviction.build(), evictable_pages: 0 };
        Self {
            nodes: Vec::new(),
            vacant: Vec::new(),
            by_key: HashedMap::default(),
            device: tier(),
            host: tier(),
            events,
            page_size: page_size as usize,
            tick: 0,
        }
    }

    // ---- reading ----

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        let node = &self.nodes[id.index as usize];
        assert_eq!(node.generation, id.generation, "a pin outlived its node");
        node
    }

    fn id(&self, index: u32) -> NodeId {
        NodeId { index, generation: self.nodes[index as usize].generation }
    }

    /// Follows the sequence from the root as far as its bytes can be had, at most `pages_max`.
    pub(crate) fn lookup(&self, sequence: &Sequence, pages_max: u32) -> Match {
        let mut found = Match { device: Cursor::START, host: Cursor::START, arriving: false };
        let (keys, tokens) = (sequence.keys(), sequence.tokens());
        let pages_max = (pages_max as usize).min(keys.len());
        let Some(&root) = self.by_key.get(&sequence.root()) else { return found };
        let (mut above, mut depth) = (root, 0usize);
        while depth < pages_max {
            let Some(index) = self.child(above, keys[depth]) else { break };
            let node = &self.nodes[index as usize];
            if !node.readable() {
                break;
            }
            let wanted = &tokens[depth * self.page_size..pages_max * self.page_size];
            let common = node.common_pages(wanted, self.page_size);
            if common == 0 {
                break;
            }
            depth += common;
            found.host = Cursor { node: index, depth: depth as u32 };
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

    fn child(&self, above: u32, key: PageKey) -> Option<u32> {
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

    // ---- pins ----

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

    /// Notes that a request found, or made, the pinned path: `hits` counts those that found it.
    pub(crate) fn touch<T: Tier>(&mut self, pin: &Pin<T>, hits: u32, priority: i32) {
        self.tick += 1;
        let tick = self.tick;
        let mut index = pin.node.index;
        while index != NONE {
            let node = &mut self.nodes[index as usize];
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

    // ---- growing ----

    /// Inserts the run's pages below the pinned path, in tier `T`, and moves the pin to their end.
    ///
    /// Pages that the tier holds already go back to the pool; unsound host copies that nobody reads
    /// are replaced. Pages that cannot be inserted (two
    /// prefixes with one key) stay in `pages`. Tells how many pages the pinned path gained and
    /// the place of the first page that the tier had already.
    pub(crate) fn insert<T: Tier>(
        &mut self,
        pin: &mut Pin<T>,
        run: PageRun<'_>,
        pages: &mut Pages<T>,
        in_l3: bool,
        pool: &mut Pool<T>,
    ) -> (u32, Option<u32>) {
        assert_eq!(run.start_page, pin.depth, "pages belong at the end of the pinned path");
        // A host prefix may have proved unsound meanwhile: nobody finds what lies below it until it
        // is computed or fetched anew.
        let on_device = self.node(pin.node).held_by::<Device>();
        assert!(on_device || T::NAME == TierName::Host, "device pages need their prefix");
        let mut bottom = pin.node.index;
        let (mut rest, mut first_duplicate) = (run, None);
        while !rest.is_empty() {
            let Some(child) = self.child(bottom, rest.keys[0]) else {
                if self.by_key.contains_key(&rest.keys[0]) {
                    break;
                }
                let count = rest.len();
                let new = pages.as_vec_mut().drain(..count);
                // Only the caller's own pin follows a node that grows in place.
                if bottom == pin.node.index && self.may_lengthen::<T>(bottom, in_l3) {
                    self.grow(bottom, rest, new);
                } else {
                    bottom = self.add_node(bottom, rest, in_l3);
                    self.attach(bottom, new);
                }
                rest = rest.skip(count);
                continue;
            };
            let common = self.nodes[child as usize].common_pages(rest.tokens, self.page_size);
            if common == 0 {
                break;
            }
            let child =
                self.boundary(Cursor { node: child, depth: rest.start_page + common as u32 });
            self.make_way(child, pool);
            if self.nodes[child as usize].held_by::<T>() {
                first_duplicate = first_duplicate.or(Some(rest.start_page));
                pool.give_all(pages.as_vec_mut().drain(..common));
            } else {
                self.attach::<T>(child, pages.as_vec_mut().drain(..common));
            }
            self.nodes[child as usize].in_l3 |= in_l3;
            rest = rest.skip(common);
            bottom = child;
        }
        let gained = rest.start_page - run.start_page;
        if bottom != pin.node.index {
            self.lengthen(pin, bottom);
        } else {
            pin.depth += gained;
        }
        (gained, first_duplicate)
    }

    /// Adds pages that the tree does not know yet to the end of a node.
    fn grow<T: Tier>(
        &mut self,
        index: u32,
        run: PageRun<'_>,
        pages: impl Iterator<Item = Page<T>>,
    ) {
        self.withdraw(index);
        let node = &mut self.nodes[index as usize];
        let parent = node.keys.last().copied().unwrap_or(node.namespace);
        node.keys.extend_from_slice(run.keys);
        node.tokens.extend_from_slice(run.tokens);
        T::of_mut(node).pages.extend(pages);
        self.refresh(index);
        self.tell_stored::<T>(index, parent, run.keys);
    }

    /// Whether a node may gain pages of tier `T` in place: nothing lies below it, no other tier
    /// holds it, no operation knows its extent, and only one pin ends at it.
    fn may_lengthen<T: Tier>(&self, index: u32, in_l3: bool) -> bool {
        let node = &self.nodes[index as usize];
        !node.is_root()
            && node.first_child == NONE
            && node.device.pins + node.host.pins == 1
            && T::of(node).pins == 1
            && T::of(node).pages.len() == node.device.pages.len() + node.host.pages.len()
            && !node.is_in_motion()
            && !node.host_unsound
            && node.in_l3 == in_l3
    }

    fn add_node(&mut self, parent: u32, run: PageRun<'_>, in_l3: bool) -> u32 {
        self.tick += 1;
        let above = &self.nodes[parent as usize];
        let usage = Usage {
            created: self.tick,
            last_used: self.tick,
            hits: 0,
            priority: above.usage.priority,
            fingerprint: run.keys[0].0 as u64,
        };
        let mut node = Node::new(above.namespace, run.start_page, usage);
        node.keys = run.keys.to_vec();
        node.tokens = run.tokens.to_vec();
        node.in_l3 = in_l3;
        let index = self.place(node);
        self.by_key.insert(run.keys[0], index);
        self.link(index, parent);
        index
    }

    fn root(&mut self, namespace: PageKey) -> u32 {
        if let Some(&root) = self.by_key.get(&namespace) {
            return root;
        }
        let usage = Usage { created: 0, last_used: 0, hits: 0, priority: i32::MIN, fingerprint: 0 };
        let root = self.place(Node::new(namespace, 0, usage));
        self.by_key.insert(namespace, root);
        root
    }

    fn place(&mut self, mut node: Node) -> u32 {
        if let Some(index) = self.vacant.pop() {
            node.generation = self.nodes[index as usize].generation + 1;
            self.nodes[index as usize] = node;
            index
        } else {
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        }
    }

    fn link(&mut self, index: u32, parent: u32) {
        let next = self.nodes[parent as usize].first_child;
        self.nodes[parent as usize].first_child = index;
        if next != NONE {
            self.nodes[next as usize].previous_sibling = index;
        }
        let node = &mut self.nodes[index as usize];
        node.parent = parent;
        node.previous_sibling = NONE;
        node.next_sibling = next;
    }

    fn unlink(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        let (parent, previous, next) = (node.parent, node.previous_sibling, node.next_sibling);
        if previous == NONE {
            self.nodes[parent as usize].first_child = next;
        } else {
            self.nodes[previous as usize].next_sibling = next;
        }
        if next != NONE {
            self.nodes[next as usize].previous_sibling = previous;
        }
    }

    // ---- splitting and merging ----

    /// The node that ends exactly at `at`, split off if the place is inside a node.
    fn boundary(&mut self, at: Cursor) -> u32 {
        let node = &self.nodes[at.node as usize];
        debug_assert!(node.start_page < at.depth && at.depth <= node.end_page());
        if at.depth == node.end_page() {
            return at.node;
        }
        let pages = (at.depth - node.start_page) as usize;
        self.split(at.node, pages)
    }

    /// Splits a node after its first `pages`; the new node gets those, and the old one, with its
    /// pins and children, keeps the rest.
    fn split(&mut self, index: u32, pages: usize) -> u32 {
        self.withdraw(index);
        let page_size = self.page_size;
        let node = &mut self.nodes[index as usize];
        let parent = node.parent;
        let lower_keys = node.keys.split_off(pages);
        let lower_tokens = node.tokens.split_off(pages * page_size);
        let mut upper = Node::new(node.namespace, node.start_page, node.usage);
        upper.keys = std::mem::replace(&mut node.keys, lower_keys);
        upper.tokens = std::mem::replace(&mut node.tokens, lower_tokens);
        upper.device = split_holding(&mut node.device, pages);
        upper.host = split_holding(&mut node.host, pages);
        trim(&mut upper.keys);
        trim(&mut upper.tokens);
        trim(&mut upper.device.pages);
        trim(&mut upper.host.pages);
        (upper.in_l3, upper.backing_up, upper.host_unsound) =
            (node.in_l3, node.backing_up, node.host_unsound);
        node.start_page += pages as u32;
        self.tick += 1;
        node.usage.created = self.tick;
        node.usage.fingerprint = node.keys[0].0 as u64;
        let (first, lower_first) = (upper.keys[0], node.keys[0]);
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
    fn merge_with_only_child(&mut self, index: u32) {
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
        self.by_key.remove(&child.keys[0]);
        self.by_key.insert(node.keys[0], child_index);
        let parent = node.parent;
        child.start_page = node.start_page;
        child.usage.created = node.usage.created;
        child.usage.fingerprint = node.usage.fingerprint;
        prepend(&mut child.keys, &mut node.keys);
        prepend(&mut child.tokens, &mut node.tokens);
        prepend(&mut child.device.pages, &mut node.device.pages);
        prepend(&mut child.host.pages, &mut node.host.pages);
        self.unlink(index);
        self.link(child_index, parent);
        self.vacate(index);
        self.refresh(child_index);
    }

    // ---- what tiers hold ----

    fn attach<T: Tier>(&mut self, index: u32, pages: impl Iterator<Item = Page<T>>) {
        let node = &mut self.nodes[index as usize];
        let holding = T::of_mut(node);
        debug_assert!(holding.pages.is_empty());
        holding.pages.extend(pages);
        debug_assert_eq!(T::of(node).pages.len(), node.len());
        let parent = node.parent;
        T::of_mut(&mut self.nodes[parent as usize]).children += 1;
        self.refresh(index);
        self.refresh(parent);
        if self.events.enabled() {
            let node = &self.nodes[index as usize];
            let above = &self.nodes[parent as usize];
            let before = above.keys.last().copied().unwrap_or(node.namespace);
            let keys = node.keys.clone();
            self.tell_stored::<T>(index, before, &keys);
        }
    }

    fn detach<T: Tier>(&mut self, index: u32, pool: &mut Pool<T>) {
        let node = &mut self.nodes[index as usize];
        pool.give_all(std::mem::take(&mut T::of_mut(node).pages).into_iter());
        let parent = node.parent;
        T::of_mut(&mut self.nodes[parent as usize]).children -= 1;
        self.refresh(index);
        self.refresh(parent);
        self.tell_removed::<T>(index, 0);
    }

    /// Drops an unsound host copy that nobody reads, so that a sound one can take its place.
    fn make_way<T: Tier>(&mut self, index: u32, pool: &mut Pool<T>) {
        if T::NAME == TierName::Host && self.nodes[index as usize].is_unsound_and_unread() {
            self.detach(index, pool);
            self.nodes[index as usize].host_unsound = false;
        }
    }

    /// Frees at most `pages_max` device pages of a victim, from its end. Without a sound host copy
    /// they are forgotten, together with what lies below them on host.
    pub(crate) fn evict_device(
        &mut self,
        victim: u32,
        pages_max: usize,
        device: &mut Pool<Device>,
        host: &mut Pool<Host>,
    ) -> usize {
        self.device.policy.evicted(victim, &self.nodes[victim as usize].usage);
        let pages = self.nodes[victim as usize].len().min(pages_max);
        if self.shorten::<Device>(victim, pages, device) {
            return pages;
        }
        self.isolate_end(victim, pages);
        self.detach::<Device>(victim, device);
        if !self.nodes[victim as usize].has_sound_host_copy() {
            self.remove_with_host_pages(victim, host);
        }
        pages
    }

    /// Frees at most `pages_max` host pages of a victim, from its end.
    pub(crate) fn evict_host(
        &mut self,
        victim: u32,
        pages_max: usize,
        host: &mut Pool<Host>,
    ) -> usize {
        self.host.policy.evicted(victim, &self.nodes[victim as usize].usage);
        let pages = self.nodes[victim as usize].len().min(pages_max);
        if self.shorten::<Host>(victim, pages, host) {
            return pages;
        }
        self.isolate_end(victim, pages);
        self.drop_host_copy(victim, host);
        pages
    }

    /// Drops the host copy of a node; without a device copy the node goes with it.
    fn drop_host_copy(&mut self, index: u32, host: &mut Pool<Host>) {
        self.detach::<Host>(index, host);
        self.nodes[index as usize].host_unsound = false;
        self.refresh(index);
        if !self.nodes[index as usize].held_by::<Device>() {
            self.remove(index);
        }
    }

    /// Cuts the last pages off a node that nothing but tier `T` holds and that keeps some.
    fn shorten<T: Tier>(&mut self, index: u32, pages: usize, pool: &mut Pool<T>) -> bool {
        let page_size = self.page_size;
        let node = &self.nodes[index as usize];
        let kept = node.len() - pages;
        let only_here = T::of(node).pages.len() == node.device.pages.len() + node.host.pages.len();
        if kept == 0 || !only_here || node.first_child != NONE {
            return false;
        }
        self.tell_removed::<T>(index, kept);
        self.withdraw(index);
        let node = &mut self.nodes[index as usize];
        node.keys.truncate(kept);
        node.tokens.truncate(kept * page_size);
        pool.give_all(T::of_mut(node).pages.drain(kept..));
        trim(&mut node.keys);
        trim(&mut node.tokens);
        trim(&mut T::of_mut(node).pages);
        self.refresh(index);
        true
    }

    /// Splits a node so that it has just its last `pages`.
    fn isolate_end(&mut self, index: u32, pages: usize) {
        let kept = self.nodes[index as usize].len() - pages;
        if kept > 0 {
            self.split(index, kept);
        }
    }

    /// Removes a node that the device does not hold, and everything below it.
    fn remove_with_host_pages(&mut self, index: u32, host: &mut Pool<Host>) {
        loop {
            let mut lowest = index;
            while self.nodes[lowest as usize].first_child != NONE {
                lowest = self.nodes[lowest as usize].first_child;
            }
            if self.nodes[lowest as usize].held_by::<Host>() {
                self.detach::<Host>(lowest, host);
            }
            if lowest == index {
                self.remove(index);
                return;
            }
            self.unlink_and_vacate(lowest);
        }
    }

    /// Removes a node that holds nothing and has nothing below it.
    fn remove(&mut self, index: u32) {
        let parent = self.nodes[index as usize].parent;
        self.unlink_and_vacate(index);
        self.remove_if_empty_root(parent);
        if !self.nodes[parent as usize].keys.is_empty() {
            self.merge_with_only_child(parent);
        }
    }

    fn unlink_and_vacate(&mut self, index: u32) {
        debug_assert_eq!(self.nodes[index as usize].first_child, NONE);
        self.unlink(index);
        let first = self.nodes[index as usize].keys[0];
        self.by_key.remove(&first);
        self.vacate(index);
    }

    /// Forgets a namespace of which nothing is held or pinned.
    fn remove_if_empty_root(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        if node.is_root()
            && node.first_child == NONE
            && node.device.pins + node.host.pins == 0
            && self.by_key.remove(&node.namespace).is_some()
        {
            self.vacate(index);
        }
    }

    fn vacate(&mut self, index: u32) {
        self.withdraw(index);
        let node = &mut self.nodes[index as usize];
        debug_assert!(node.device.pages.is_empty() && node.host.pages.is_empty());
        // The allocations go too: what is not held must not cost memory.
        node.keys = Vec::new();
        node.tokens = Vec::new();
        node.device.pages = Vec::new();
        node.host.pages = Vec::new();
        node.parent = NONE;
        node.generation += 1;
        self.vacant.push(index);
    }

    // ---- operations along a path ----

    /// Marks pages of the pinned path that tier `T` lacks and nobody is bringing as arriving, from
    /// page `start_page` down, at most `pages_max`, and passes each node to `each`. Nodes that
    /// `wanted` turns down are left out.
    pub(crate) fn expect_arrival<T: Tier, U>(
        &mut self,
        pin: &Pin<U>,
        start_page: u32,
        pages_max: usize,
        wanted: impl Fn(&Usage) -> bool,
        mut each: impl FnMut(&Node),
    ) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut left = pages_max;
        for index in self.path(pin.node.index, start_page) {
            let node = &self.nodes[index as usize];
            if left == 0 {
                break;
            }
            if node.held_by::<T>() || T::of(node).arriving || !wanted(&node.usage) {
                continue;
            }
            let index = if node.len() > left { self.split(index, left) } else { index };
            let node = &mut self.nodes[index as usize];
            T::of_mut(node).arriving = true;
            left -= node.len();
            each(node);
            push_segment(&mut segments, node);
        }
        segments
    }

    /// Ends what [`Tree::expect_arrival`] began: of the pages, in its order, the first
    /// `sound_pages` arrived. Those that the tier got otherwise meanwhile, and those that did not
    /// arrive, go back to the pool.
    pub(crate) fn settle_arrival<T: Tier, U>(
        &mut self,
        pin: &Pin<U>,
        segments: &[Segment],
        mut pages: Pages<T>,
        mut sound_pages: usize,
        pool: &mut Pool<T>,
    ) {
        let start_page = segments.first().map_or(0, |segment| segment.start_page);
        for mut index in self.path(pin.node.index, start_page) {
            if !segments.iter().any(|segment| segment.covers(&self.nodes[index as usize])) {
                continue;
            }
            self.make_way(index, pool);
            let held = self.nodes[index as usize].held_by::<T>();
            let length = self.nodes[index as usize].len();
            if !held && self.nodes[index as usize].host_unsound {
                // The copy that these pages were read from has proved unsound meanwhile.
                sound_pages = 0;
            }
            if !held && 0 < sound_pages && sound_pages < length {
                let upper = self.split(index, sound_pages);
                T::of_mut(&mut self.nodes[index as usize]).arriving = false;
                pool.give_all(pages.as_vec_mut().drain(sound_pages..length));
                index = upper;
            }
            let node = &mut self.nodes[index as usize];
            T::of_mut(node).arriving = false;
            let length = node.len();
            let arrived = pages.as_vec_mut().drain(..length);
            if !held && length <= sound_pages {
                self.attach::<T>(index, arrived);
            } else {
                pool.give_all(arrived);
            }
            sound_pages = sound_pages.saturating_sub(length);
        }
        debug_assert!(pages.is_empty(), "an operation's pages do not fit its path");
        pool.give(pages);
    }

    /// Marks what a backup of the pinned path should store, and passes each node to `each`.
    pub(crate) fn begin_backup(
        &mut self,
        pin: &Pin<Host>,
        pages_max: usize,
        mut each: impl FnMut(&Node),
    ) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut left = pages_max;
        for index in self.path(pin.node.index, 0) {
            let node = &self.nodes[index as usize];
            if left == 0 {
                break;
            }
            if node.in_l3 || node.backing_up || node.host.pages.is_empty() || node.host_unsound {
                continue;
            }
            let index = if node.len() > left { self.split(index, left) } else { index };
            let node = &mut self.nodes[index as usize];
            node.backing_up = true;
            left -= node.len();
            each(node);
            push_segment(&mut segments, node);
        }
        segments
    }

    /// Ends a backup of which L3 took the first `stored_pages`.
    pub(crate) fn end_backup(
        &mut self,
        pin: &Pin<Host>,
        segments: &[Segment],
        stored_pages: usize,
    ) {
        let mut stored = stored_pages;
        for index in self.path(pin.node.index, 0) {
            let node = &mut self.nodes[index as usize];
            if segments.iter().any(|segment| segment.covers(node)) {
                node.backing_up = false;
                node.in_l3 |= node.len() <= stored;
                stored = stored.saturating_sub(node.len());
            }
        }
    }

    /// Never reads the host copies of the pinned path from `start_page` on again.
    pub(crate) fn distrust_host(&mut self, pin: &Pin<Host>, start_page: u32) {
        for index in self.path(pin.node.index, start_page) {
            let node = &self.nodes[index as usize];
            if node.host.pages.is_empty() || node.host_unsound {
                continue;
            }
            let trusted = start_page.saturating_sub(node.start_page) as usize;
            if trusted > 0 {
                self.split(index, trusted);
            }
            self.tell_removed::<Host>(index, 0);
            self.nodes[index as usize].host_unsound = true;
            self.refresh(index);
        }
    }

    /// Drops unsound host copies along the pinned path where nobody reads them.
    pub(crate) fn drop_unsound(&mut self, pin: &Pin<Device>, host: &mut Pool<Host>) {
        for index in self.path(pin.node.index, 0) {
            self.make_way(index, host);
        }
    }

    // ---- evictability ----

    /// Takes a node out of the counts and offers before it changes.
    fn withdraw(&mut self, index: u32) {
        self.withdraw_from::<Device>(index);
        self.withdraw_from::<Host>(index);
    }

    fn withdraw_from<T: Tier>(&mut self, index: u32) {
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
    fn refresh(&mut self, index: u32) {
        self.refresh_in::<Device>(index);
        self.refresh_in::<Host>(index);
    }

    /// Whether a node is evictable depends on its children: a change goes up.
    fn refresh_in<T: Tier>(&mut self, mut index: u32) {
        while self.refresh_node::<T>(index) {
            index = self.nodes[index as usize].parent;
        }
    }

    /// Tells whether the node became evictable or is so no more.
    fn refresh_node<T: Tier>(&mut self, index: u32) -> bool {
        let node = &mut self.nodes[index as usize];
        let evictable = is_evictable::<T>(node);
        let offered = evictable && T::of(node).children == 0;
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
            (false, true) => state.evictable_pages += length,
            (true, false) => state.evictable_pages -= length,
            (true, true) | (false, false) => return false,
        }
        self.count_evictable_child::<T>(index, evictable);
        true
    }

    fn count_evictable_child<T: Tier>(&mut self, index: u32, evictable: bool) {
        let parent = self.nodes[index as usize].parent;
        let holding = T::of_mut(&mut self.nodes[parent as usize]);
        if evictable {
            holding.evictable_children += 1;
        } else {
            holding.evictable_children -= 1;
        }
    }

    // ---- events ----

    fn tell_stored<T: Tier>(&mut self, index: u32, parent: PageKey, keys: &[PageKey]) {
        if self.events.enabled() {
            let namespace = self.nodes[index as usize].namespace;
            let keys = keys.to_vec();
            self.events.push(KvEvent::Stored { tier: T::NAME, namespace, parent, keys });
        }
    }

    fn tell_removed<T: Tier>(&mut self, index: u32, from: usize) {
        let node = &self.nodes[index as usize];
        // An unsound copy was told to be gone when it was found out.
        let told = T::NAME == TierName::Host && node.host_unsound;
        if self.events.enabled() && !told {
            let (namespace, keys) = (node.namespace, node.keys[from..].to_vec());
            self.events.push(KvEvent::Removed { tier: T::NAME, namespace, keys });
        }
    }
}

/// Whether the node's pages in this tier may go, once those below them have gone, which may too.
pub(crate) fn is_evictable<T: Tier>(node: &Node) -> bool {
    let holding = T::of(node);
    !holding.pages.is_empty() && holding.evictable_children == holding.children && T::may_go(node)
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
    parent.pins == child.pins && parent.pages.is_empty() == child.pages.is_empty()
}

/// Gives memory back once less than half of it is in use.
fn trim<E>(part: &mut Vec<E>) {
    if part.capacity() > 2 * part.len() {
        part.shrink_to_fit();
    }
}

fn prepend<E>(to: &mut Vec<E>, front: &mut Vec<E>) {
    front.append(to);
    std::mem::swap(to, front);
}

fn push_segment(segments: &mut Vec<Segment>, node: &Node) {
    let pages = node.len() as u32;
    match segments.last_mut() {
        Some(last) if last.start_page + last.pages == node.start_page => last.pages += pages,
        _ => segments.push(Segment { start_page: node.start_page, pages }),
    }
}
