//! Spare memory for small nodes, so that a page that fills up while decoding costs no allocation.

use super::Tree;
use crate::excerpt::Excerpt;
use crate::key::PageKey;
use crate::node::Node;
use crate::run::PageRun;
use crate::tier::{Device, Page};

/// A small node has up to so many tokens.
const SPARE_TOKENS: usize = 256;
/// Maximum number of spares that are made between two steps.
const REPLENISHED_MAX: usize = 4;

/// Allocations of a small node.
struct Spare {
    excerpt: Excerpt,
    device_pages: Vec<Page<Device>>,
}

/// Spares, and how many of them to keep.
#[derive(Default)]
pub(crate) struct Spares {
    kept: Vec<Spare>,
    most: usize,
}

impl Tree {
    /// Makes sure that `nodes` small nodes can be added without allocating.
    pub(crate) fn set_aside(&mut self, nodes: usize) {
        self.by_key.reserve(nodes);
        self.nodes.reserve(nodes.saturating_sub(self.vacant.len()));
        self.spares.most = self.spares.most.max(nodes);
        self.add_spares(nodes.saturating_sub(self.spares.kept.len()));
    }

    /// Makes a few spares if less than half of them is left: requests that began together need theirs
    /// in the same step, which should not have to wait for the allocator.
    pub(crate) fn replenish(&mut self) {
        let missing = (self.spares.most / 2).saturating_sub(self.spares.kept.len());
        self.add_spares(missing.min(REPLENISHED_MAX));
    }

    fn add_spares(&mut self, count: usize) {
        let pages = self.spare_pages();
        self.spares.kept.extend((0..count).map(|_| Spare {
            excerpt: Excerpt::with_capacity(pages, self.page_size),
            device_pages: Vec::with_capacity(pages),
        }));
    }

    /// Gives a new node the keys and tokens of its run.
    pub(super) fn furnish(&mut self, node: &mut Node, run: PageRun<'_>) {
        let spare = if run.len() <= self.spare_pages() { self.spares.kept.pop() } else { None };
        let Some(mut spare) = spare else {
            node.excerpt = Excerpt::new(run);
            node.is_untrimmed = node.excerpt.is_wasteful();
            return;
        };
        spare.excerpt.append(run);
        node.excerpt = spare.excerpt;
        node.device.pages = spare.device_pages;
    }

    /// Takes the memory of a node that goes; what is not needed as a spare goes with it.
    pub(super) fn strip(&mut self, index: u32) {
        let pages = self.spare_pages();
        let node = &mut self.nodes[index as usize];
        let mut spare = Spare {
            excerpt: std::mem::take(&mut node.excerpt),
            device_pages: std::mem::take(&mut node.device.pages),
        };
        node.host.pages = Vec::new();
        self.digests.forget(index);
        if self.spares.kept.len() < self.spares.most
            && (pages..=2 * pages).contains(&spare.device_pages.capacity())
            && spare.excerpt.clear_own(pages)
        {
            spare.device_pages.clear();
            self.spares.kept.push(spare);
        }
    }

    /// Memory of the spares.
    pub(crate) fn spare_bytes(&self) -> usize {
        let page_bytes = size_of::<PageKey>()
            + size_of::<Page<Device>>()
            + self.page_size * size_of::<crate::key::Token>();
        self.spares.kept.len() * self.spare_pages() * page_bytes
    }

    fn spare_pages(&self) -> usize {
        (SPARE_TOKENS / self.page_size).max(1)
    }
}
