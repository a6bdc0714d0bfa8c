//! Tokens together with the keys of their whole pages: what sequences share with the nodes that hold them.

use std::ops::Range;
use std::sync::Arc;

use crate::chain::{Words, hash_each_page, hash_pages};
use crate::key::{PageKey, Token};
use crate::passage::Marks;

/// Tokens, and the key of each whole page of them.
#[derive(Clone, Debug)]
pub(crate) struct Text {
    page_size: usize,
    tokens: Vec<Token>,
    keys: Vec<PageKey>,
    /// Content other than tokens on the pages of the sequence.
    marks: Option<Arc<Marks>>,
}

/// Consecutive whole pages of a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'a> {
    pub(crate) keys: &'a [PageKey],
    pub(crate) tokens: &'a [Token],
    /// Content other than tokens on the pages of the sequence.
    pub(crate) marks: Option<&'a Arc<Marks>>,
}

impl Text {
    /// None yet, and room for so many pages.
    pub(crate) fn with_capacity(pages: usize, page_size: usize) -> Self {
        Self {
            page_size,
            tokens: Vec::with_capacity(pages * page_size),
            keys: Vec::with_capacity(pages),
            marks: None,
        }
    }

    /// Tokens that follow the page named by `before`.
    pub(crate) fn new(
        words: &Words,
        before: PageKey,
        page_size: usize,
        tokens: Vec<Token>,
    ) -> Self {
        let keys = Vec::with_capacity(tokens.len() / page_size);
        let mut text = Self { page_size, tokens, keys, marks: None };
        text.hash(words, &before);
        text
    }

    /// A prompt on whose pages more stands than its tokens.
    pub(crate) fn marked(
        words: &Words,
        root: PageKey,
        page_size: usize,
        tokens: Vec<Token>,
        marks: Arc<Marks>,
    ) -> Self {
        let mut keys = Vec::with_capacity(tokens.len() / page_size);
        marks.hash(words, root, &tokens, page_size, &mut keys);
        Self { page_size, tokens, keys, marks: Some(marks) }
    }

    /// Tokens that follow the page named by `before` and come in pieces, so many in all. Each piece is
    /// hashed as it comes, while it is in the processor's cache and the next one's memory on its way there.
    pub(crate) fn from_pieces<P: IntoIterator<Item = Token>>(
        words: &Words,
        before: PageKey,
        page_size: usize,
        tokens: usize,
        pieces: impl IntoIterator<Item = P>,
    ) -> Self {
        let (tokens, keys) = (Vec::with_capacity(tokens), Vec::with_capacity(tokens / page_size));
        let mut text = Self { page_size, tokens, keys, marks: None };
        for piece in pieces {
            text.tokens.extend(piece);
            text.hash(words, &before);
        }
        text
    }

    /// A copy of tokens that follow the page named by `before`. Each page is copied when it is hashed: writing to
    /// memory that is far away takes as long as hashing, and both go on at the same time.
    pub(crate) fn copied(
        words: &Words,
        before: PageKey,
        page_size: usize,
        tokens: &[Token],
    ) -> Self {
        let mut copy = Vec::with_capacity(tokens.len());
        let mut keys = Vec::with_capacity(tokens.len() / page_size);
        let copies = |page: &[Token]| copy.extend_from_slice(page);
        hash_each_page(words, before, tokens, page_size, &mut keys, copies);
        copy.extend_from_slice(&tokens[copy.len()..]);
        Self { page_size, tokens: copy, keys, marks: None }
    }

    /// Tokens that do not fill a page yet, and room for a page more: short answers need no other.
    pub(crate) fn beginning(
        tokens: &[Token],
        page_size: usize,
        marks: Option<&Arc<Marks>>,
    ) -> Self {
        let mut room = Vec::with_capacity(tokens.len() + page_size);
        room.extend_from_slice(tokens);
        Self { page_size, tokens: room, keys: Vec::new(), marks: marks.cloned() }
    }

    /// A copy of these pages.
    pub(crate) fn copy(part: Part<'_>, page_size: usize) -> Self {
        let (tokens, keys) = (part.tokens.to_vec(), part.keys.to_vec());
        Self { page_size, tokens, keys, marks: part.marks.cloned() }
    }

    pub(crate) fn page_size(&self) -> usize {
        self.page_size
    }

    pub(crate) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    pub(crate) fn keys(&self) -> &[PageKey] {
        &self.keys
    }

    /// Room for so many tokens is there, used or not.
    pub(crate) fn capacity(&self) -> usize {
        self.tokens.capacity()
    }

    /// Room for the keys of so many pages is there, used or not.
    pub(crate) fn key_capacity(&self) -> usize {
        self.keys.capacity()
    }

    pub(crate) fn part(&self, pages: Range<usize>) -> Part<'_> {
        let tokens = pages.start * self.page_size..pages.end * self.page_size;
        let marks = self.marks.as_ref();
        Part { keys: &self.keys[pages], tokens: &self.tokens[tokens], marks }
    }

    /// Makes room for so many tokens more.
    pub(crate) fn reserve(&mut self, tokens: usize) {
        self.tokens.reserve(tokens);
        self.keys.reserve(tokens.div_ceil(self.page_size));
    }

    /// Gives back the room that it does not use.
    pub(crate) fn shrink_to_fit(&mut self) {
        self.tokens.shrink_to_fit();
        self.keys.shrink_to_fit();
    }

    /// Appends whole pages to whole pages.
    pub(crate) fn append(&mut self, part: Part<'_>) {
        debug_assert_eq!(self.tokens.len(), self.keys.len() * self.page_size);
        self.keys.extend_from_slice(part.keys);
        self.tokens.extend_from_slice(part.tokens);
        if self.marks.is_some() || part.marks.is_some() {
            self.take_marks(part.marks);
        }
    }

    /// Appended pages belong to a sequence that has these too, so what it knows of them holds for all.
    // Apart, since most prompts have none.
    #[cold]
    fn take_marks(&mut self, marks: Option<&Arc<Marks>>) {
        self.marks = marks.cloned();
    }

    /// Appends tokens; the text follows the page named by `before`.
    #[inline]
    pub(crate) fn extend(&mut self, words: &Words, before: &PageKey, tokens: &[Token]) {
        // Mostly it is a single one, for which a call to copy it costs the most.
        match tokens {
            &[token] => self.tokens.push(token),
            tokens => self.tokens.extend_from_slice(tokens),
        }
        if self.tokens.len() >= (self.keys.len() + 1) * self.page_size {
            self.hash(words, before);
        }
    }

    /// Hashes the whole pages that have no key yet.
    // Apart, since most tokens complete none.
    #[inline(never)]
    fn hash(&mut self, words: &Words, before: &PageKey) {
        let before = *self.keys.last().unwrap_or(before);
        let hashed = self.keys.len() * self.page_size;
        hash_pages(words, before, &self.tokens[hashed..], self.page_size, &mut self.keys);
    }

    /// Content other than tokens on the pages of the sequence.
    pub(crate) fn marks(&self) -> Option<&Arc<Marks>> {
        self.marks.as_ref()
    }

    /// Keeps the first pages and all the room.
    pub(crate) fn truncate(&mut self, pages: usize) {
        if pages == 0 && self.marks.is_some() {
            self.take_marks(None);
        }
        self.keys.truncate(pages);
        self.tokens.truncate(pages * self.page_size);
    }
}

impl<'a> Part<'a> {
    pub(crate) const EMPTY: Part<'static> = Part { keys: &[], tokens: &[], marks: None };

    pub(crate) fn skip(self, pages: usize, page_size: usize) -> Part<'a> {
        let (keys, tokens) = (&self.keys[pages..], &self.tokens[pages * page_size..]);
        Part { keys, tokens, marks: self.marks }
    }
}
