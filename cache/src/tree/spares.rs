//! Spare memory for small nodes, so that a page that fills up while decoding costs no allocation.

use super::Tree;
use crate::excerpt::Excerpt;
use crate::key::PageKey;
use crate::node::Node;
use crate::sequence::PageRun;
use crate::tier::{Device, Page};

/// A small node has up to so many tokens.
const SPARE_TOKENS: usize = 256;
/// So many spares are made between two steps, at the most.
const REPLENISHED_MAX: usize = 4;

/// What a small node needs.
struct Spare {
    keys: Vec<PageKey>,
    tokens: Excerpt,
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
            keys: Vec::with_capacity(pages),
            tokens: Excerpt::with_capacity(pages * self.page_size),
            device_pages: Vec::with_capacity(pages),
        }));
    }

    /// Gives a new node the keys and tokens of its run.
    pub(super) fn furnish(&mut self, node: &mut Node, run: PageRun<'_>) {
        let spare = if run.len() <= self.spare_pages() { self.spares.kept.pop() } else { None };
        let Some(mut spare) = spare else {
            node.tokens = Excerpt::new(run.tokens);
            // Chunks that follow find room: to make it for each would move the keys of all before it.
            node.keys.reserve_exact(node.tokens.expected() / self.page_size);
            node.keys.extend_from_slice(run.keys);
            node.is_untrimmed = node.tokens.is_wasteful();
            return;
        };
        spare.keys.extend_from_slice(run.keys);
        spare.tokens.append(run.tokens);
        node.keys = spare.keys;
        node.tokens = spare.tokens;
        node.device.pages = spare.device_pages;
    }

    /// Takes the memory of a node that goes; what is not needed as a spare goes with it.
    pub(super) fn strip(&mut self, index: u32) {
        let pages = self.spare_pages();
        let node = &mut self.nodes[index as usize];
        let mut spare = Spare {
            keys: std::mem::take(&mut node.keys),
            tokens: std::mem::take(&mut node.tokens),
            device_pages: std::mem::take(&mut node.device.pages),
        };
        node.host.pages = Vec::new();
        let fits = |capacity: usize| (pages..=2 * pages).contains(&capacity);
        if self.spares.kept.len() < self.spares.most
            && fits(spare.keys.capacity())
            && fits(spare.device_pages.capacity())
            && spare.tokens.clear_own(pages * self.page_size)
        {
            spare.keys.clear();
            spare.device_pages.clear();
            self.spares.kept.push(spare);
        }
    }

    /// What the spares take.
    pub(crate) fn spare_bytes(&self) -> usize {
        let page_bytes = size_of::<PageKey>()
            + size_of::<Page<Device>>()
            + self.page_size * size_of::<crate::sequence::Token>();
        self.spares.kept.len() * self.spare_pages() * page_bytes
    }

    fn spare_pages(&self) -> usize {
        (SPARE_TOKENS / self.page_size).max(1)
    }
}
