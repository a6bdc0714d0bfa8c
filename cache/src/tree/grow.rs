//! Growing: pages are inserted below a pinned path.

use super::{Cursor, Tree};
use crate::events::KvTier;
use crate::evict::Usage;
use crate::key::PageKey;
use crate::node::{NONE, Node};
use crate::pin::Pin;
use crate::planted::{Bug, planted};
use crate::pool::Pool;
use crate::reach::Reach;
use crate::run::PageRun;
use crate::tier::{Device, Page, Pages, Tier, TierName};

impl Tree {
    /// Inserts the run's pages below the pinned path, in tier `T`, and moves the pin to their end.
    ///
    /// Pages that the tier holds already return to the pool; unsound host copies that nothing reads are replaced.
    /// Pages that cannot be inserted (two prefixes with one key) stay in `pages`. Returns the number of pages that
    /// the pinned path gained, and the place of the first page that the tier had already.
    pub(crate) fn insert<T: Tier>(
        &mut self,
        pin: &mut Pin<T>,
        run: PageRun<'_>,
        pages: &mut Pages<T>,
        priority: i32,
        in_l3: bool,
        pool: &mut Pool<T>,
    ) -> (u32, Option<u32>) {
        assert_eq!(run.start_page, pin.depth, "pages belong at the end of the pinned path");
        // A host prefix may have been found corrupt meanwhile: pages below it are not matched until it is computed or
        // fetched again.
        let on_device = self.node(pin.node).held_by::<Device>();
        assert!(on_device || T::NAME == TierName::Host, "device pages need their prefix");
        let mut bottom = pin.node.index;
        let (mut rest, mut gained, mut first_duplicate) = (run, 0, None);
        while !rest.is_empty() {
            let Some(&child) = self.by_key.get(&rest.first_key()) else {
                // The tree has nothing that goes on from here: all the rest is new.
                // Only the caller's own pin follows a node that grows in place.
                if bottom == pin.node.index && self.may_lengthen::<T>(bottom, rest, in_l3) {
                    self.grow(bottom, rest, pages.as_vec_mut().drain(..rest.len()));
                } else {
                    bottom = self.add_node(bottom, rest, priority);
                    self.attach(bottom, pages);
                    if in_l3 {
                        self.note_in_l3(bottom);
                    }
                }
                gained += rest.len();
                break;
            };
            let node = &self.nodes[child as usize];
            let common = node.common_pages(rest, self.page_size);
            if node.parent != bottom || common == 0 {
                // Two prefixes with one key.
                break;
            }
            let depth = rest.start_page + common as u32;
            let child = self.boundary(Cursor { node: self.id(child), depth });
            self.make_way(child, pool);
            if self.nodes[child as usize].held_by::<T>() {
                first_duplicate = first_duplicate.or(Some(rest.start_page));
                // The request that computed them may still read them.
                pool.cool(pages.as_vec_mut().drain(..common));
            } else {
                self.attach(child, pages);
            }
            if in_l3 {
                self.note_in_l3(child);
            }
            let reach = &mut self.nodes[child as usize].usage.reach;
            *reach = run.reach.max(*reach);
            gained += common;
            rest = rest.skip(common);
            bottom = child;
        }
        let gained = gained as u32;
        if bottom != pin.node.index {
            self.lengthen(pin, bottom);
        } else {
            pin.depth += gained;
        }
        (gained, first_duplicate)
    }

    /// Adds pages that the tree does not know yet to the end of a node.
    pub(super) fn grow<T: Tier>(
        &mut self,
        index: u32,
        run: PageRun<'_>,
        pages: impl Iterator<Item = Page<T>>,
    ) {
        self.withdraw(index);
        let node = &mut self.nodes[index as usize];
        let (before, in_l3) = (node.len(), node.in_l3);
        node.excerpt.append(run);
        T::of_mut(node).pages.extend(pages);
        self.refresh(index);
        self.tell_stored(T::NAME.into(), index, before);
        if in_l3 {
            self.tell_stored(KvTier::L3, index, before);
        }
    }

    /// Returns true if a node may gain pages of tier `T` in place: nothing is below it, no other tier holds it, no
    /// operation knows its extent, only one pin ends at it, and it costs no long copy.
    pub(super) fn may_lengthen<T: Tier>(&self, index: u32, run: PageRun<'_>, in_l3: bool) -> bool {
        let node = &self.nodes[index as usize];
        let is_ours = node.device.pins + node.host.pins == 1 && T::of(node).pins == 1;
        !node.is_root()
            && node.first_child == NONE
            && (is_ours || planted(Bug::LengthenSharedNode))
            && T::of(node).pages.len() == node.device.pages.len() + node.host.pages.len()
            && !node.is_in_motion()
            && !node.host_unsound
            && node.in_l3 == in_l3
            && node.usage.reach == run.reach
            && node.excerpt.grows_cheaply(run)
    }

    pub(super) fn add_node(&mut self, parent: u32, run: PageRun<'_>, priority: i32) -> u32 {
        self.tick += 1;
        let above = &self.nodes[parent as usize];
        let usage = Usage {
            created: self.tick,
            last_used: self.tick,
            hits: 0,
            priority: if planted(Bug::InheritPriority) { above.usage.priority } else { priority },
            fingerprint: run.first_key().0 as u64,
            reach: run.reach,
        };
        self.some_are_limited |= !run.reach.is_all();
        let mut node = Node::new(above.namespace, run.first_key(), run.start_page, usage);
        self.furnish(&mut node, run);
        node.l3_round = self.l3_round;
        let index = self.place(node);
        self.by_key.insert(run.first_key(), index);
        self.link(index, parent);
        index
    }

    pub(super) fn root(&mut self, namespace: PageKey) -> u32 {
        if let Some(&root) = self.by_key.get(&namespace) {
            return root;
        }
        let usage = Usage {
            created: 0,
            last_used: 0,
            hits: 0,
            priority: i32::MIN,
            fingerprint: 0,
            reach: Reach::L3,
        };
        let root = self.place(Node::new(namespace, namespace, 0, usage));
        self.by_key.insert(namespace, root);
        root
    }

    pub(super) fn place(&mut self, mut node: Node) -> u32 {
        if let Some(index) = self.vacant.pop() {
            node.generation = self.nodes[index as usize].generation + 1;
            self.nodes[index as usize] = node;
            index
        } else {
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        }
    }

    pub(super) fn link(&mut self, index: u32, parent: u32) {
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

    pub(super) fn unlink(&mut self, index: u32) {
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
}
