//! The tokens of one request with the keys of its whole pages, each hashed once.

use std::sync::Arc;

use crate::chain::Words;
use crate::in_parts::{Keys, Tokens};
use crate::key::{PageKey, Token};
use crate::passage::{Marks, Passage, PassageError};
use crate::run::PageRun;
use crate::text::Text;

/// The tokens of a request so far, and the key of each whole page of them.
#[derive(Clone, Debug)]
pub struct Sequence {
    root: PageKey,
    /// Words of the namespace.
    words: Words,
    /// Shared with the nodes that hold its pages.
    prompt: Arc<Text>,
    /// The end of the prompt's whole pages: asked for with every token.
    border: usize,
    /// Tokens behind the prompt's whole pages: the rest of the prompt, and appended ones.
    tail: Text,
    /// Chain before the first page of the tail.
    before_tail: PageKey,
    /// Where its prompt says more than its tokens do.
    passages: Option<Box<[Passage]>>,
}

impl Sequence {
    /// A sequence in the namespace whose digest is `root`.
    #[must_use]
    pub fn new(root: PageKey, page_size: u32, tokens: Vec<Token>) -> Self {
        let words = Words::of(root);
        Self::of(root, words, Text::new(&words, root, page_size as usize, tokens), &[])
    }

    /// The same for a prompt of which passages say more than its tokens do, by their start.
    ///
    /// # Errors
    /// If the passages are empty, out of order, overlap or reach beyond the tokens.
    pub fn with_passages(
        root: PageKey,
        page_size: u32,
        tokens: Vec<Token>,
        passages: &[Passage],
    ) -> Result<Self, PassageError> {
        if passages.is_empty() {
            return Ok(Self::new(root, page_size, tokens));
        }
        Passage::check_all(passages, tokens.len())?;
        let words = Words::of(root);
        let prompt = match Marks::new(passages, page_size as usize) {
            Some(marks) => Text::marked(&words, root, page_size as usize, tokens, marks),
            None => Text::new(&words, root, page_size as usize, tokens),
        };
        Ok(Self::of(root, words, prompt, passages))
    }

    /// Makes a sequence from borrowed tokens, which are copied.
    #[must_use]
    pub fn copied(root: PageKey, page_size: u32, tokens: &[Token]) -> Self {
        let words = Words::of(root);
        Self::of(root, words, Text::copied(&words, root, page_size as usize, tokens), &[])
    }

    /// The same for tokens that come in pieces; `tokens` says how many they are in all.
    #[must_use]
    pub fn from_pieces<P: IntoIterator<Item = Token>>(
        root: PageKey,
        page_size: u32,
        tokens: usize,
        pieces: impl IntoIterator<Item = P>,
    ) -> Self {
        let words = Words::of(root);
        let prompt = Text::from_pieces(&words, root, page_size as usize, tokens, pieces);
        Self::of(root, words, prompt, &[])
    }

    fn of(root: PageKey, words: Words, mut prompt: Text, passages: &[Passage]) -> Self {
        // Nodes that share it go by its room: what the caller's vector had to spare must decide nothing.
        prompt.shrink_to_fit();
        let page_size = prompt.page_size();
        let border = prompt.keys().len() * page_size;
        let marks = prompt.marks();
        let tail = Text::beginning(&prompt.tokens()[border..], page_size, marks);
        let last = prompt.keys().last().copied().unwrap_or(root);
        let first_of_tail = prompt.keys().len() as u32;
        let before_tail = marks.map_or(last, |marks| marks.follow(last, first_of_tail));
        Self {
            root,
            words,
            border,
            tail,
            before_tail,
            passages: (!passages.is_empty()).then(|| passages.into()),
            prompt: Arc::new(prompt),
        }
    }

    /// Appends tokens that the model produced.
    #[inline]
    pub fn extend(&mut self, tokens: &[Token]) {
        self.tail.extend(&self.words, &self.before_tail, tokens);
    }

    /// Makes room for `tokens` more tokens, so that appending them does not allocate.
    pub fn reserve(&mut self, tokens: usize) {
        self.tail.reserve(tokens);
    }

    /// Tokens in a page.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.tail.page_size() as u32
    }

    /// The digest of the namespace.
    #[must_use]
    pub fn root(&self) -> PageKey {
        self.root
    }

    /// Where its prompt says more than its tokens do.
    #[must_use]
    #[inline]
    pub fn passages(&self) -> &[Passage] {
        self.passages.as_deref().unwrap_or_default()
    }

    /// All tokens.
    #[must_use]
    pub fn tokens(&self) -> Tokens<'_> {
        let of_prompt = self.prompt.tokens().len() - self.border;
        Tokens { prompt: self.prompt.tokens(), appended: &self.tail.tokens()[of_prompt..] }
    }

    /// The token at a place. Behind the prompt's whole pages nothing of the prompt is looked at.
    #[must_use]
    #[inline]
    pub fn token(&self, place: usize) -> Option<Token> {
        match place.checked_sub(self.border) {
            None => Some(self.prompt.tokens()[place]),
            Some(place) => self.tail.tokens().get(place).copied(),
        }
    }

    /// Number of tokens.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "nobody asks for an empty one")]
    pub fn len(&self) -> usize {
        self.border + self.tail.tokens().len()
    }

    /// The keys of the whole pages.
    #[must_use]
    pub fn keys(&self) -> Keys<'_> {
        Keys { prompt: self.prompt.keys(), appended: self.tail.keys() }
    }

    /// The first `pages` whole pages, as a sequence of their own.
    #[must_use]
    pub fn prefix(&self, pages: u32) -> Sequence {
        let page_size = self.tail.page_size();
        let last = (pages as usize).checked_sub(1).and_then(|last| self.keys().get(last));
        Self {
            root: self.root,
            words: self.words,
            prompt: Arc::new(self.run(0, pages).to_text()),
            border: pages as usize * page_size,
            tail: Text::with_capacity(0, page_size),
            before_tail: last.unwrap_or(self.root),
            passages: None,
        }
    }

    /// The same tokens in another namespace.
    ///
    /// # Panics
    /// Never: its passages were sound when it was made.
    #[must_use]
    pub fn under(&self, root: PageKey) -> Sequence {
        let Tokens { prompt, appended } = self.tokens();
        let prompt = prompt.to_vec();
        let moved = Self::with_passages(root, self.page_size(), prompt, self.passages());
        let mut moved = moved.expect("they were sound before");
        moved.extend(appended);
        moved
    }

    /// The whole pages from `start` up to, not including, `end`.
    #[must_use]
    pub fn run(&self, start: u32, end: u32) -> PageRun<'_> {
        let page_size = self.tail.page_size();
        if start as usize * page_size >= self.border {
            // Most runs are what was decoded: nothing of the prompt is looked at for them.
            let first = start as usize - self.border / page_size;
            let back = self.tail.part(first..first + (end - start) as usize);
            return PageRun::behind_prompt(start, page_size, back);
        }
        let (start_page, border) = (start, self.prompt.keys().len());
        let (start, end) = (start as usize, end as usize);
        let in_prompt = start.min(border)..end.min(border);
        let in_tail = start.max(border) - border..end.max(border) - border;
        PageRun::shared(start_page, &self.prompt, in_prompt, self.tail.part(in_tail))
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
        assert_eq!(whole.keys().to_vec(), grown.keys().to_vec());
        assert_eq!(whole.keys().len(), 5);
    }

    #[test]
    fn a_prompt_may_be_copied() {
        for (page_size, tokens) in [(4, 0), (4, 23), (16, 600), (256, 1000), (256, 1024)] {
            let tokens: Vec<_> = (0..tokens).collect();
            let copied = Sequence::copied(PageKey(7), page_size, &tokens);
            let whole = Sequence::new(PageKey(7), page_size, tokens);
            assert_eq!(copied.keys().to_vec(), whole.keys().to_vec());
            assert_eq!(copied.tokens().to_vec(), whole.tokens().to_vec());
        }
    }

    #[test]
    fn a_prompt_may_come_in_pieces() {
        let whole = Sequence::new(PageKey(7), 4, (0..23).collect());
        for size in [1, 3, 4, 5, 8, 23, 30] {
            let pieces = (0..23).step_by(size).map(|start| start..(start + size as Token).min(23));
            let sequence = Sequence::from_pieces(PageKey(7), 4, 23, pieces);
            assert_eq!(sequence.keys().to_vec(), whole.keys().to_vec());
            assert_eq!(sequence.tokens().prompt, whole.tokens().prompt);
            assert_eq!((sequence.root(), sequence.page_size()), (PageKey(7), 4));
        }
    }

    #[test]
    fn two_parts_read_as_one() {
        let mut sequence = Sequence::new(PageKey(7), 4, (0..10).collect());
        sequence.extend(&(10..21).collect::<Vec<_>>());
        assert_eq!(sequence.tokens().to_vec(), (0..21).collect::<Vec<_>>());
        assert_eq!((sequence.tokens().appended[0], sequence.len()), (10, 21));
        assert!((0..22).all(|place| sequence.token(place) == sequence.tokens().get(place)));
        let keys = sequence.keys();
        assert_eq!((keys.prompt.len(), keys.len()), (2, 5));
        assert_eq!(keys.iter().collect::<Vec<_>>(), keys.to_vec());
        for place in 0..6 {
            assert_eq!(keys.get(place), keys.to_vec().get(place).copied());
        }
        assert_eq!(keys.range(1..4).concat(), keys.to_vec()[1..4]);
        assert_eq!(sequence.prefix(4).keys().to_vec(), keys.to_vec()[..4]);
    }
}
