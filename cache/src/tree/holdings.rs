//! Holdings: what each tier holds of a node, and how it goes.

use super::{NodeId, Tree};
use crate::events::{KvEvents, KvTier};
use crate::key::PageKey;
use crate::node::NONE;
use crate::planted::{Bug, planted};
use crate::pool::Pool;
use crate::tier::{Device, Host, Pages, Tier, TierName};

/// At least one page in so many goes from a node that is split for it.
const SPLIT_SHARE: usize = 8;

impl Tree {
    /// Gives a node its pages in tier `T`: the first of those.
    pub(super) fn attach<T: Tier>(&mut self, index: u32, pages: &mut Pages<T>) {
        let node = &mut self.nodes[index as usize];
        let count = node.len();
        let holding = T::of_mut(node);
        debug_assert!(holding.pages.is_empty());
        let pages = pages.as_vec_mut();
        if pages.len() == count && holding.pages.capacity() == 0 {
            holding.pages = std::mem::take(pages);
        } else {
            holding.pages.extend(pages.drain(..count));
        }
        debug_assert_eq!(T::of(node).pages.len(), node.len());
        let parent = node.parent;
        T::of_mut(&mut self.nodes[parent as usize]).children += 1;
        self.refresh(index);
        self.refresh(parent);
        self.tell_stored(T::NAME.into(), index, 0);
    }

    pub(super) fn detach<T: Tier>(&mut self, index: u32, pool: &mut Pool<T>) {
        let node = &mut self.nodes[index as usize];
        pool.give_all(std::mem::take(&mut T::of_mut(node).pages).into_iter());
        let parent = node.parent;
        T::of_mut(&mut self.nodes[parent as usize]).children -= 1;
        self.refresh(index);
        self.refresh(parent);
        self.tell_gone::<T>(index, 0);
    }

    /// Drops an unsound host copy that nothing reads, so that a sound one can take its place.
    pub(super) fn make_way<T: Tier>(&mut self, index: u32, pool: &mut Pool<T>) {
        if T::NAME == TierName::Host && self.nodes[index as usize].is_unsound_and_unread() {
            self.detach(index, pool);
            self.nodes[index as usize].host_unsound = false;
        }
    }

    /// Frees `pages_max` device pages of a victim, from its end, or what it has; a few more of a long
    /// one. Without a sound host copy they are forgotten, together with what lies below them on host.
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
        // The host holds it too, so it is split. A page at a time would leave a node for each page.
        let length = self.nodes[victim as usize].len();
        let pages = pages.max(length / SPLIT_SHARE);
        if self.passes_down(victim, length - pages) {
            self.pass_down(victim, length - pages, device);
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

    /// Evicts every page of a namespace that nothing holds, from the ends of its paths.
    pub(crate) fn evict_namespace(
        &mut self,
        namespace: PageKey,
        device: &mut Pool<Device>,
        host: &mut Pool<Host>,
    ) {
        let Some(&root) = self.by_key.get(&namespace) else { return };
        let mut parents_first = Vec::new();
        let mut index = self.nodes[root as usize].first_child;
        while index != NONE {
            parents_first.push(self.id(index));
            index = self.next_below(root, index);
        }
        for NodeId { index, generation } in parents_first.into_iter().rev() {
            let is_there = |tree: &Self| tree.nodes[index as usize].generation == generation;
            if is_there(self) && self.nodes[index as usize].device.offered {
                self.evict_device(index, usize::MAX, device, host);
            }
            if is_there(self) && self.nodes[index as usize].host.offered {
                self.evict_host(index, usize::MAX, host);
            }
        }
    }

    /// Drops the host copy of a node; without a device copy the node goes with it.
    pub(super) fn drop_host_copy(&mut self, index: u32, host: &mut Pool<Host>) {
        self.detach::<Host>(index, host);
        self.nodes[index as usize].host_unsound = false;
        self.refresh(index);
        if !self.nodes[index as usize].held_by::<Device>() {
            self.remove(index);
        }
    }

    /// Cuts the last pages off a node that nothing but tier `T` holds and that keeps some.
    pub(super) fn shorten<T: Tier>(
        &mut self,
        index: u32,
        pages: usize,
        pool: &mut Pool<T>,
    ) -> bool {
        let node = &self.nodes[index as usize];
        let kept = node.len() - pages;
        let only_here = T::of(node).pages.len() == node.device.pages.len() + node.host.pages.len();
        if kept == 0 || !only_here || node.first_child != NONE {
            return false;
        }
        if !planted(Bug::ForgetRemovedEvent) {
            self.tell_gone::<T>(index, kept);
        }
        let node = &mut self.nodes[index as usize];
        node.excerpt.truncate(kept);
        self.digests.cut(index, node.end_page());
        pool.give_all(T::of_mut(node).pages.drain(kept..));
        // A victim goes on shrinking until it is gone: copying what is left would be for nothing, and
        // the copy of a long one would hold up the step that needs the room.
        node.is_untrimmed = true;
        // Whether and when it goes does not depend on its length: it stays where it is in the order.
        if T::of(node).evictable {
            T::state_mut(self).evictable_pages -= pages;
        }
        true
    }

    /// Splits a node so that it has just its last `pages`. The parts share their tokens: what a tier
    /// gives up goes bit by bit from the end, and in the other tier too the end goes first.
    pub(super) fn isolate_end(&mut self, index: u32, pages: usize) {
        let kept = self.nodes[index as usize].len() - pages;
        if kept > 0 {
            self.part(index, kept);
        }
    }

    /// Removes a node that the device does not hold, and everything below it.
    pub(super) fn remove_with_host_pages(&mut self, index: u32, host: &mut Pool<Host>) {
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
    pub(super) fn remove(&mut self, index: u32) {
        let parent = self.nodes[index as usize].parent;
        self.unlink_and_vacate(index);
        let shrunk = self.shrunk.replace(self.id(parent));
        if let Some(node) = shrunk.filter(|node| node.index != parent) {
            self.trim_if_there(node);
        }
        self.remove_if_empty_root(parent);
        if !self.nodes[parent as usize].is_root() {
            self.merge_with_only_child(parent);
        }
    }

    fn trim_if_there(&mut self, id: NodeId) {
        let node = &mut self.nodes[id.index as usize];
        if node.generation == id.generation && node.is_untrimmed {
            node.trim();
        }
    }

    pub(super) fn unlink_and_vacate(&mut self, index: u32) {
        debug_assert_eq!(self.nodes[index as usize].first_child, NONE);
        self.unlink(index);
        let first = self.nodes[index as usize].first_key;
        if !planted(Bug::KeepKeyOfRemovedNode) {
            self.by_key.remove(&first);
        }
        self.vacate(index);
    }

    /// Forgets a namespace of which nothing is held or pinned.
    pub(super) fn remove_if_empty_root(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        if node.is_root()
            && node.first_child == NONE
            && node.device.pins + node.host.pins == 0
            && self.by_key.remove(&node.namespace).is_some()
        {
            self.vacate(index);
        }
    }

    pub(super) fn vacate(&mut self, index: u32) {
        self.withdraw(index);
        let node = &mut self.nodes[index as usize];
        debug_assert!(node.device.pages.is_empty() && node.host.pages.is_empty());
        node.parent = NONE;
        node.generation += 1;
        self.strip(index);
        self.vacant.push(index);
    }

    /// Tells that a tier has got a node's pages from page `from` of it on.
    pub(super) fn tell_stored(&mut self, tier: KvTier, index: u32, from: usize) {
        if !self.events.is_recording() {
            return;
        }
        let mut parent = self.key_before(index, from);
        let node = &self.nodes[index as usize];
        if planted(Bug::WrongParentInEvent) {
            parent = node.namespace;
        }
        self.events.stored(tier, &node.pages_from(from, parent, self.page_size));
    }

    /// Tells that a tier inside this process has lost a node's pages from page `from` of it on.
    pub(super) fn tell_gone<T: Tier>(&mut self, index: u32, from: usize) {
        // An unsound copy was told to be gone when it was found out.
        let is_told = T::NAME == TierName::Host && self.nodes[index as usize].host_unsound;
        if !is_told {
            self.tell_removed(T::NAME.into(), index, from);
        }
    }

    pub(super) fn tell_removed(&mut self, tier: KvTier, index: u32, from: usize) {
        if self.events.is_recording() {
            let node = &self.nodes[index as usize];
            self.events.removed(tier, node.namespace, &node.keys()[from..]);
        }
    }

    /// The key of the page before page `from` of a node.
    fn key_before(&self, index: u32, from: usize) -> PageKey {
        let node = &self.nodes[index as usize];
        let before = match from {
            0 => self.nodes[node.parent as usize].keys().last(),
            from => node.keys().get(from - 1),
        };
        before.copied().unwrap_or(node.namespace)
    }

    /// Writes down everything that is held, each page after the one before it.
    pub(crate) fn tell_all(&self, into: &mut KvEvents) {
        into.clear();
        (into.is_snapshot, into.next) = (true, self.events.next());
        self.each_held(|tier, index| {
            let node = &self.nodes[index as usize];
            let parent = self.key_before(index, 0);
            into.add_stored(tier, &node.pages_from(0, parent, self.page_size));
        });
    }

    /// Tells again what device and host hold, after it was told that they hold nothing.
    pub(crate) fn tell_what_is_left(&mut self) {
        if !self.events.is_recording() {
            return;
        }
        let mut left = Vec::new();
        self.each_held(|tier, index| left.push((tier, index)));
        for (tier, index) in left.into_iter().filter(|(tier, _)| *tier != KvTier::L3) {
            self.tell_stored(tier, index, 0);
        }
    }

    /// Every node, parents before their children, with each tier that has it.
    fn each_held(&self, mut each: impl FnMut(KvTier, u32)) {
        for (root, top) in (0..).zip(&self.nodes) {
            if !top.is_root() || self.by_key.get(&top.namespace) != Some(&root) {
                continue;
            }
            let mut index = top.first_child;
            while index != NONE {
                let node = &self.nodes[index as usize];
                let tiers = [
                    (KvTier::Device, node.held_by::<Device>()),
                    (KvTier::Host, node.has_sound_host_copy()),
                    (KvTier::L3, node.in_l3),
                ];
                tiers.iter().filter(|(_, holds)| *holds).for_each(|(tier, _)| each(*tier, index));
                index = self.next_below(root, index);
            }
        }
    }

    /// The node after this one, of all below a root: parents before their children.
    fn next_below(&self, root: u32, mut index: u32) -> u32 {
        let first_child = self.nodes[index as usize].first_child;
        if first_child != NONE {
            return first_child;
        }
        while index != root {
            let node = &self.nodes[index as usize];
            if node.next_sibling != NONE {
                return node.next_sibling;
            }
            index = node.parent;
        }
        NONE
    }
}
