//! The tokens of one request with the keys of its whole pages, each hashed once.

use std::ops::Range;
use std::sync::Arc;

use crate::key::{PageKey, hash_pages};

/// A token of the model's vocabulary.
pub type Token = u32;

/// The tokens of a request so far, and the key of each whole page of them.
#[derive(Clone, Debug)]
pub struct Sequence {
    root: PageKey,
    page_size: usize,
    /// Shared with the nodes that hold its pages.
    prompt: Arc<Vec<Token>>,
    /// The end of the prompt's whole pages: asked for with every token, and too slow to divide for.
    border: usize,
    /// What follows the prompt's whole pages: the rest of the prompt, and what was appended.
    tail: Vec<Token>,
    keys: Vec<PageKey>,
}

/// All tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens<'a> {
    /// Those it began with.
    pub prompt: &'a [Token],
    /// Those that were appended.
    pub appended: &'a [Token],
}

impl<'a> Tokens<'a> {
    /// The tokens at some places: those from the prompt, then those that were appended.
    ///
    /// # Panics
    /// When there are not so many.
    #[must_use]
    pub fn range(&self, places: Range<usize>) -> [&'a [Token]; 2] {
        let prompt = self.prompt.len();
        let (start, end) = (places.start, places.end);
        [
            &self.prompt[start.min(prompt)..end.min(prompt)],
            &self.appended[start.max(prompt) - prompt..end.max(prompt) - prompt],
        ]
    }

    /// One after the other.
    #[must_use]
    pub fn to_vec(&self) -> Vec<Token> {
        [self.prompt, self.appended].concat()
    }
}

/// Consecutive whole pages of a sequence: what an insertion into the tree is about.
#[derive(Clone, Copy, Debug)]
pub struct PageRun<'a> {
    /// The first page's place in its sequence.
    pub start_page: u32,
    /// One key a page.
    pub keys: &'a [PageKey],
    /// The tokens of these pages.
    pub tokens: RunTokens<'a>,
}

/// Consecutive whole pages that outlive their sequence: what a transfer is about. Tokens of the prompt
/// are shared with it.
#[derive(Clone, Debug)]
pub struct KeptRun {
    keys: Vec<PageKey>,
    page_size: usize,
    /// The prompt, and which tokens of it.
    prompt: Option<(Arc<Vec<Token>>, Range<usize>)>,
    /// The tokens that follow.
    back: Vec<Token>,
}

/// The tokens of a run: some in the prompt, the others after it.
#[derive(Clone, Copy, Debug)]
pub struct RunTokens<'a> {
    /// The prompt that `front` is part of, and where.
    prompt: Option<(&'a Arc<Vec<Token>>, usize)>,
    front: &'a [Token],
    back: &'a [Token],
}

impl<'a> From<&'a [Token]> for RunTokens<'a> {
    fn from(tokens: &'a [Token]) -> Self {
        Self { prompt: None, front: tokens, back: &[] }
    }
}

impl<'a> RunTokens<'a> {
    /// A copy.
    #[must_use]
    pub fn to_vec(&self) -> Vec<Token> {
        [self.front, self.back].concat()
    }

    pub(crate) fn append_to(self, tokens: &mut Vec<Token>) {
        tokens.extend_from_slice(self.front);
        tokens.extend_from_slice(self.back);
    }

    pub(crate) fn len(self) -> usize {
        self.front.len() + self.back.len()
    }

    /// Those in the prompt and those after it; no page lies on both sides.
    pub(crate) fn parts(self) -> [&'a [Token]; 2] {
        [self.front, self.back]
    }

    /// The prompt and the place in it, if all tokens are from one.
    pub(crate) fn within_prompt(self) -> Option<(&'a Arc<Vec<Token>>, usize)> {
        self.prompt.filter(|_| self.back.is_empty())
    }

    fn skip(self, tokens: usize) -> Self {
        let front = tokens.min(self.front.len());
        Self {
            prompt: self.prompt.map(|(prompt, start)| (prompt, start + front)),
            front: &self.front[front..],
            back: &self.back[tokens - front..],
        }
    }
}

impl Sequence {
    /// A sequence in the namespace whose digest is `root`.
    #[must_use]
    pub fn new(root: PageKey, page_size: u32, tokens: Vec<Token>) -> Self {
        // With room for a page more: short answers need no other memory.
        Self::with_room(root, page_size, tokens, page_size as usize)
    }

    /// A sequence that has room for the keys of so many tokens more: a long prompt has many keys, and
    /// to make room for others later would move them all.
    #[must_use]
    pub fn with_room(root: PageKey, page_size: u32, tokens: Vec<Token>, more: usize) -> Self {
        let page_size = page_size as usize;
        let pages = tokens.len() / page_size;
        let mut keys = Vec::with_capacity(pages + more.div_ceil(page_size));
        hash_pages(root, &tokens, page_size, &mut keys);
        let border = pages * page_size;
        let rest = &tokens[border..];
        let mut tail = Vec::with_capacity(rest.len() + page_size);
        tail.extend_from_slice(rest);
        Self { root, page_size, prompt: Arc::new(tokens), border, tail, keys }
    }

    /// Appends tokens that the model produced.
    #[inline]
    pub fn extend(&mut self, tokens: &[Token]) {
        // Mostly it is a single one, for which a call to copy it costs the most.
        match tokens {
            &[token] => self.tail.push(token),
            tokens => self.tail.extend_from_slice(tokens),
        }
        let hashed = self.keys.len() * self.page_size - self.border;
        if self.tail.len() >= hashed + self.page_size {
            self.hash_from(hashed);
        }
    }

    /// Hashes the whole pages of the tail from here on.
    fn hash_from(&mut self, hashed: usize) {
        let before = self.keys.last().copied().unwrap_or(self.root);
        hash_pages(before, &self.tail[hashed..], self.page_size, &mut self.keys);
    }

    /// Makes room for `tokens` more tokens, so that appending them does not allocate.
    pub fn reserve(&mut self, tokens: usize) {
        self.tail.reserve(tokens);
        self.keys.reserve(tokens.div_ceil(self.page_size));
    }

    /// The digest of the namespace.
    #[must_use]
    pub fn root(&self) -> PageKey {
        self.root
    }

    /// All tokens.
    #[must_use]
    pub fn tokens(&self) -> Tokens<'_> {
        let of_prompt = self.prompt.len() - self.border;
        Tokens { prompt: &self.prompt, appended: &self.tail[of_prompt..] }
    }

    /// How many tokens there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nobody asks for an empty one")]
    pub fn len(&self) -> usize {
        self.border + self.tail.len()
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
            prompt: Arc::new(self.run(0, pages).tokens.to_vec()),
            border: pages as usize * self.page_size,
            tail: Vec::new(),
            keys: self.keys[..pages as usize].to_vec(),
        }
    }

    /// The whole pages from `start` up to, not including, `end`.
    #[must_use]
    pub fn run(&self, start: u32, end: u32) -> PageRun<'_> {
        let (from, to) = (start as usize * self.page_size, end as usize * self.page_size);
        let border = self.border;
        let in_prompt = from.min(border);
        PageRun {
            start_page: start,
            keys: &self.keys[start as usize..end as usize],
            tokens: RunTokens {
                prompt: Some((&self.prompt, in_prompt)),
                front: &self.prompt[in_prompt..to.min(border)],
                back: &self.tail[from.max(border) - border..to.max(border) - border],
            },
        }
    }
}

impl<'a> PageRun<'a> {
    /// The same run, for as long as it is kept.
    #[must_use]
    pub fn keep(self) -> KeptRun {
        let RunTokens { prompt, front, back } = self.tokens;
        let shared = prompt.map(|(prompt, start)| (prompt.clone(), start..start + front.len()));
        KeptRun {
            keys: self.keys.to_vec(),
            page_size: self.tokens.len().checked_div(self.keys.len()).unwrap_or(0),
            back: if shared.is_some() { back.to_vec() } else { self.tokens.to_vec() },
            prompt: shared,
        }
    }

    /// The same run without its first `pages`.
    #[must_use]
    pub fn skip(self, pages: usize) -> PageRun<'a> {
        let tokens_per_page = self.tokens.len().checked_div(self.keys.len()).unwrap_or(0);
        PageRun {
            start_page: self.start_page + pages as u32,
            keys: &self.keys[pages..],
            tokens: self.tokens.skip(pages * tokens_per_page),
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

impl KeptRun {
    /// One key a page.
    #[must_use]
    pub fn keys(&self) -> &[PageKey] {
        &self.keys
    }

    /// The first `pages` of it as a run that begins at page `start_page`.
    #[must_use]
    pub fn run(&self, start_page: u32, pages: usize) -> PageRun<'_> {
        let tokens = pages * self.page_size;
        let (prompt, front) = match &self.prompt {
            Some((prompt, places)) => (Some((prompt, places.start)), &prompt[places.clone()]),
            None => (None, &[][..]),
        };
        let in_front = tokens.min(front.len());
        PageRun {
            start_page,
            keys: &self.keys[..pages],
            tokens: RunTokens {
                prompt,
                front: &front[..in_front],
                back: &self.back[..tokens - in_front],
            },
        }
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
        assert_eq!((run.start_page, run.tokens.to_vec()), (2, vec![8, 9, 10, 11]));
    }

    #[test]
    fn a_run_may_lie_on_both_sides_of_the_prompts_end() {
        let mut sequence = Sequence::new(PageKey(7), 4, (0..10).collect());
        sequence.extend(&(10..21).collect::<Vec<_>>());
        let run = sequence.run(1, 5);
        assert_eq!(run.tokens.to_vec(), (4..20).collect::<Vec<_>>());
        assert_eq!(run.skip(1).tokens.to_vec(), (8..20).collect::<Vec<_>>());
        assert_eq!(run.skip(2).tokens.parts().map(<[Token]>::len), [0, 8]);
        assert!(run.tokens.within_prompt().is_none());
        assert_eq!(sequence.run(1, 2).tokens.within_prompt().unwrap().1, 4);
        assert_eq!(sequence.tokens().to_vec(), (0..21).collect::<Vec<_>>());
        assert_eq!((sequence.tokens().appended[0], sequence.len()), (10, 21));
        assert_eq!(sequence.prefix(4).keys(), &sequence.keys()[..4]);
        for kept in [run.keep(), PageRun { tokens: run.tokens.to_vec()[..].into(), ..run }.keep()] {
            assert_eq!(kept.keys(), run.keys);
            for pages in 0..=4 {
                let part = kept.run(7, pages);
                assert_eq!((part.start_page, part.keys), (7, &run.keys[..pages]));
                assert_eq!(part.tokens.to_vec(), run.tokens.to_vec()[..4 * pages]);
            }
        }
    }
}
