//! The tokens of one request with the keys of its whole pages, each hashed once.

use crate::key::{KeyHasher, PageKey};

/// A token of the model's vocabulary.
pub type Token = u32;

/// The tokens of a request so far, and the key of each whole page of them.
#[derive(Clone, Debug)]
pub struct Sequence {
    root: PageKey,
    page_size: usize,
    tokens: Vec<Token>,
    keys: Vec<PageKey>,
}

/// Consecutive whole pages of a sequence: what an insertion into the tree is about.
#[derive(Clone, Copy, Debug)]
pub struct PageRun<'a> {
    /// The first page's place in its sequence.
    pub start_page: u32,
    /// One key a page.
    pub keys: &'a [PageKey],
    /// The tokens of these pages.
    pub tokens: &'a [Token],
}

impl Sequence {
    /// A sequence in the namespace whose digest is `root`.
    #[must_use]
    pub fn new(root: PageKey, page_size: u32, tokens: Vec<Token>) -> Self {
        let page_size = page_size as usize;
        let mut sequence =
            Self { root, page_size, keys: Vec::with_capacity(tokens.len() / page_size), tokens };
        sequence.hash_new_pages();
        sequence
    }

    /// Appends tokens that the model produced.
    pub fn extend(&mut self, tokens: &[Token]) {
        self.tokens.extend_from_slice(tokens);
        self.hash_new_pages();
    }

    /// Makes room for `tokens` more tokens, so that appending them does not allocate.
    pub fn reserve(&mut self, tokens: usize) {
        self.tokens.reserve(tokens);
        self.keys.reserve(tokens.div_ceil(self.page_size));
    }

    /// The digest of the namespace.
    #[must_use]
    pub fn root(&self) -> PageKey {
        self.root
    }

    /// All tokens.
    #[must_use]
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The keys of the whole pages.
    #[must_use]
    pub fn keys(&self) -> &[PageKey] {
        &self.keys
    }

    /// The first `pages` whole pages, as a sequence of their own.
    #[must_use]
    pub fn prefix(&self, pages: u32) -> Sequence {
        Self {
            root: self.root,
            page_size: self.page_size,
            tokens: self.tokens[..pages as usize * self.page_size].to_vec(),
            keys: self.keys[..pages as usize].to_vec(),
        }
    }

    /// The whole pages from `start` up to, not including, `end`.
    #[must_use]
    pub fn run(&self, start: u32, end: u32) -> PageRun<'_> {
        let (from, to) = (start as usize, end as usize);
        PageRun {
            start_page: start,
            keys: &self.keys[from..to],
            tokens: &self.tokens[from * self.page_size..to * self.page_size],
        }
    }

    fn hash_new_pages(&mut self) {
        let hashed = self.keys.len() * self.page_size;
        if self.tokens.len() < hashed + self.page_size {
            return;
        }
        let mut hasher = KeyHasher::new();
        let mut key = self.keys.last().copied().unwrap_or(self.root);
        for page in self.tokens[hashed..].chunks_exact(self.page_size) {
            key = hasher.next(key, page);
            self.keys.push(key);
        }
    }
}

impl<'a> PageRun<'a> {
    /// The same run without its first `pages`.
    #[must_use]
    pub fn skip(self, pages: usize) -> PageRun<'a> {
        let tokens_per_page = self.tokens.len().checked_div(self.keys.len()).unwrap_or(0);
        PageRun {
            start_page: self.start_page + pages as u32,
            keys: &self.keys[pages..],
            tokens: &self.tokens[pages * tokens_per_page..],
        }
    }

    /// How many pages the run has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether the run has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_not_depend_on_how_the_tokens_arrived() {
        let whole = Sequence::new(PageKey(7), 4, (0..23).collect());
        let mut grown = Sequence::new(PageKey(7), 4, vec![0]);
        for token in 1..23 {
            grown.extend(&[token]);
        }
        assert_eq!(whole.keys(), grown.keys());
        assert_eq!(whole.keys().len(), 5);
    }

    #[test]
    fn a_run_carries_its_own_tokens() {
        let sequence = Sequence::new(PageKey(7), 4, (0..16).collect());
        let run = sequence.run(1, 3).skip(1);
        assert_eq!((run.start_page, run.tokens), (2, &[8, 9, 10, 11][..]));
    }
}
