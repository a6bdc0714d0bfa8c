//! Memory of device and host, with the content of each page.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use terrace_cache::Page;

use super::mix;

/// Layers of the model, computed in sequence and copied separately.
pub(crate) const LAYERS: usize = 2;

/// Content of an invalid page.
pub(super) const RUBBISH: u64 = 0xDEAD;

/// Content of a page: a word for each position in each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kv(pub(super) Vec<u64>);

impl Kv {
    pub(super) fn rubbish(page_size: usize) -> Self {
        Self(vec![RUBBISH; LAYERS * page_size])
    }

    /// Returns a layer's word for a position of the page.
    pub(super) fn word(&mut self, layer: usize, offset: usize) -> &mut u64 {
        let page_size = self.0.len() / LAYERS;
        &mut self.0[layer * page_size + offset]
    }

    /// Returns the words of the first layer, which are the right content as is.
    pub(super) fn first_layer(&self) -> &[u64] {
        &self.0[..self.0.len() / LAYERS]
    }

    /// Writes a layer of another page, or invalid words.
    pub(super) fn write_layer(&mut self, layer: usize, from: Option<&Kv>) {
        let page_size = self.0.len() / LAYERS;
        let words = layer * page_size..(layer + 1) * page_size;
        match from {
            Some(from) => self.0[words.clone()].copy_from_slice(&from.0[words]),
            None => self.0[words].fill(RUBBISH),
        }
    }

    pub(super) fn checksum(&self) -> u64 {
        self.0.iter().fold(0, |sum, &word| mix(sum ^ word, 1))
    }
}

/// Returns the word of a layer for a position's content.
pub(super) fn in_layer(layer: usize, word: u64) -> u64 {
    word.rotate_left(layer as u32)
}

/// The memory of a tier.
#[derive(Debug)]
pub(super) struct Arena<T> {
    pages: Vec<Kv>,
    tier: PhantomData<T>,
}

impl<T: Copy> Arena<T> {
    pub(super) fn new(pages: u32, page_size: usize) -> Self {
        Self { pages: vec![Kv::rubbish(page_size); pages as usize], tier: PhantomData }
    }

    /// Invalidates pages.
    pub(super) fn invalidate(&mut self, pages: &[Page<T>]) {
        for &page in pages {
            self[page].0.fill(RUBBISH);
        }
    }

    /// Returns whether one of these pages is completely invalid.
    pub(super) fn is_any_bad(&self, pages: &[Page<T>]) -> bool {
        let is_bad = |page: &Page<T>| self[*page].0.iter().all(|word| *word == RUBBISH);
        pages.iter().any(is_bad)
    }
}

impl<T: Copy> Index<Page<T>> for Arena<T> {
    type Output = Kv;

    fn index(&self, page: Page<T>) -> &Kv {
        &self.pages[page.slot() as usize]
    }
}

impl<T: Copy> IndexMut<Page<T>> for Arena<T> {
    fn index_mut(&mut self, page: Page<T>) -> &mut Kv {
        &mut self.pages[page.slot() as usize]
    }
}
