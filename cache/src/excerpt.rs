//! The pages of a node, their tokens and keys: an excerpt of a prompt, shared with it rather than copied.
//!
//! Prompts are long and cold by the time their pages are inserted, and copying them would cost more
//! than everything else about it. An excerpt keeps its whole prompt alive, so one that is but a small
//! part of it becomes a copy.

use std::sync::Arc;

use crate::key::{PageKey, Token};
use crate::passage::Marks;
use crate::run::PageRun;
use crate::text::{Part, Text};

/// An excerpt is at least one part in so many of what it keeps alive.
const KEPT_SHARE: usize = 2;

/// Moving so few tokens to where there is room for more costs next to nothing.
const MOVED_MAX: usize = 1024;

/// Whole pages within a text that others may share.
#[derive(Debug, Default)]
pub(crate) struct Excerpt {
    /// None while it is empty: a node that comes or goes allocates nothing for it.
    all: Option<Arc<Text>>,
    /// The place of the first page in the text.
    start: usize,
    /// Number of pages.
    len: usize,
}

impl Excerpt {
    /// The rest of a prompt that is computed in chunks is expected to follow.
    pub(crate) fn new(run: PageRun<'_>) -> Self {
        match run.within_prompt() {
            Some((prompt, start)) if is_worth_keeping(prompt, start) => {
                Self { all: Some(prompt.clone()), start, len: run.len() }
            }
            Some(_) | None => Self::own(run.to_text()),
        }
    }

    /// None yet, and room for so many pages.
    pub(crate) fn with_capacity(pages: usize, page_size: usize) -> Self {
        Self::own(Text::with_capacity(pages, page_size))
    }

    /// Empties it and keeps its allocation, if that is its own and has room for about `pages`.
    pub(crate) fn clear_own(&mut self, pages: usize) -> bool {
        (self.start, self.len) = (0, 0);
        let Some(own) = self.all.as_mut().and_then(Arc::get_mut) else { return false };
        let tokens = pages * own.page_size();
        let fits = (tokens..=2 * tokens).contains(&own.capacity())
            && (pages..=2 * pages).contains(&own.key_capacity());
        own.truncate(0);
        fits
    }

    /// Number of pages.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn keys(&self) -> &[PageKey] {
        self.all.as_ref().map_or(&[], |all| &all.keys()[self.start..self.start + self.len])
    }

    /// Content other than tokens on the pages of the sequence.
    pub(crate) fn marks(&self) -> Option<&Marks> {
        self.all.as_ref()?.marks().map(|marks| &**marks)
    }

    pub(crate) fn tokens(&self) -> &[Token] {
        self.part().tokens
    }

    /// Returns true if appending this run is cheap: the present pages stay in place, or are few, or few compared with
    /// the new ones.
    pub(crate) fn grows_cheaply(&self, run: PageRun<'_>) -> bool {
        let has_room = self.has_room_for(run.len(), run.page_size());
        let are_few = self.are_few_beside(run.len(), run.page_size());
        self.continues(run) || self.is_own() && (has_room || are_few)
    }

    /// Returns true if putting these pages before its own is cheap.
    pub(crate) fn takes_in_front_cheaply(&self, front: &Excerpt, page_size: usize) -> bool {
        let has_room = front.is_own() && front.has_room_for(self.len, page_size);
        self.follows(front) || has_room || front.are_few_beside(self.len, page_size)
    }

    fn has_room_for(&self, pages: usize, page_size: usize) -> bool {
        (self.len + pages) * page_size <= self.capacity()
    }

    /// Returns true if its pages are few, or few compared with this number of others.
    fn are_few_beside(&self, pages: usize, page_size: usize) -> bool {
        self.len * page_size < MOVED_MAX || self.len <= 4 * pages
    }

    pub(crate) fn append(&mut self, run: PageRun<'_>) {
        if !self.continues(run) {
            // What grows bit by bit has room for as much again.
            run.append_to(self.make_own(self.len.max(run.len())));
        }
        self.len += run.len();
    }

    /// Puts the pages that precede these in front.
    pub(crate) fn prepend(&mut self, front: &mut Excerpt) {
        if self.follows(front) {
            self.start = front.start;
            self.len += front.len;
            return;
        }
        front.make_own(self.len).append(self.part());
        front.len += self.len;
        *self = std::mem::take(front);
    }

    /// Returns true if these pages follow others in the same allocation.
    pub(crate) fn follows(&self, others: &Excerpt) -> bool {
        self.shares(others.all.as_ref()) && others.start + others.len == self.start
    }

    /// Keeps the first pages, and the memory of the others until it is trimmed.
    pub(crate) fn truncate(&mut self, pages: usize) {
        self.len = pages;
    }

    /// The pages from `at` on; these keep those before. Both keep the whole alive until they are
    /// trimmed.
    pub(crate) fn split_off(&mut self, at: usize) -> Excerpt {
        let rest = Self { all: self.all.clone(), start: self.start + at, len: self.len - at };
        self.len = at;
        rest
    }

    /// Memory that it keeps alive: an address that identifies the allocation, and the bytes of tokens and keys.
    pub(crate) fn allocation(&self) -> (usize, usize, usize) {
        let Some(all) = &self.all else { return (0, 0, 0) };
        let token_bytes = all.capacity() * size_of::<Token>();
        (Arc::as_ptr(all).addr(), token_bytes, all.key_capacity() * size_of::<PageKey>())
    }

    fn own(text: Text) -> Self {
        Self { start: 0, len: text.keys().len(), all: Some(Arc::new(text)) }
    }

    /// Returns true if nothing else uses the allocation, and it begins with these pages.
    fn is_own(&self) -> bool {
        self.all.as_ref().is_some_and(|all| Arc::strong_count(all) == 1) && self.start == 0
    }

    fn shares(&self, allocation: Option<&Arc<Text>>) -> bool {
        let both = self.all.as_ref().zip(allocation);
        both.is_some_and(|(ours, theirs)| Arc::ptr_eq(ours, theirs))
    }

    /// Room for so many tokens is kept alive.
    fn capacity(&self) -> usize {
        self.all.as_ref().map_or(0, |all| all.capacity())
    }

    fn part(&self) -> Part<'_> {
        let all = self.all.as_ref();
        all.map_or(Part::EMPTY, |all| all.part(self.start..self.start + self.len))
    }

    /// Returns true if these are the pages after its own in the same allocation.
    fn continues(&self, run: PageRun<'_>) -> bool {
        run.within_prompt().is_some_and(|(prompt, start)| {
            self.shares(Some(prompt)) && start == self.start + self.len
        })
    }

    /// Its pages, and nothing else, in an allocation of its own. A copy has room for so many more.
    fn make_own(&mut self, more: usize) -> &mut Text {
        if !self.is_own() {
            // Without that room, appending would copy all of it once more.
            self.copy(more);
        }
        let own = self.all.as_mut().and_then(Arc::get_mut).expect("an allocation of its own");
        own.truncate(self.len);
        own
    }

    /// Copies its pages to an allocation of its own, with room for so many more.
    fn copy(&mut self, more: usize) {
        if let Some(all) = &self.all {
            let mut own = Text::with_capacity(self.len + more, all.page_size());
            own.append(self.part());
            *self = Self::own(own);
        }
    }

    /// Returns true if it keeps too much memory alive.
    pub(crate) fn is_wasteful(&self) -> bool {
        let kept = |all: &Arc<Text>| self.len * all.page_size() * KEPT_SHARE < all.capacity();
        self.all.as_ref().is_some_and(kept)
    }

    /// Gives memory back once less than half of it is in use.
    pub(crate) fn trim(&mut self) {
        if self.is_wasteful() {
            self.copy(0);
        }
    }
}

/// Returns true if the pages from this one on are a large enough part of a prompt to keep all of it alive.
fn is_worth_keeping(prompt: &Text, start: usize) -> bool {
    let following = prompt.tokens().len() - start * prompt.page_size();
    following * KEPT_SHARE >= prompt.capacity()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sequence;

    fn sequence(tokens: u32) -> Sequence {
        Sequence::new(PageKey(7), 4, (0..tokens).collect())
    }

    fn shares(one: &Excerpt, other: &Excerpt) -> bool {
        one.shares(other.all.as_ref())
    }

    /// A run of so many pages that are part of no prompt.
    fn with_run<R>(pages: usize, token: Token, each: impl FnOnce(PageRun<'_>) -> R) -> R {
        let (keys, tokens) = (vec![PageKey(9); pages], vec![token; 4 * pages]);
        each(PageRun::apart(0, 4, &keys, &tokens))
    }

    #[test]
    fn a_large_part_of_a_prompt_is_shared_and_a_small_one_copied() {
        let sequence = sequence(4000);
        let large = Excerpt::new(sequence.run(500, 1000));
        let whole = Excerpt::new(sequence.run(0, 1000));
        let small = Excerpt::new(sequence.run(990, 1000));
        let first_chunk = Excerpt::new(sequence.run(0, 100));
        assert!(shares(&first_chunk, &whole) && first_chunk.is_wasteful());
        assert!(shares(&large, &whole) && !shares(&small, &whole));
        let first = [&large, &whole, &small].map(|excerpt| excerpt.tokens()[0]);
        assert_eq!(first, [2000, 0, 3960]);
        for (excerpt, start) in [(&large, 500), (&whole, 0), (&small, 990)] {
            assert_eq!(excerpt.keys(), sequence.run(start, 1000).keys().prompt);
        }
        assert_eq!((small.allocation().1, small.allocation().2), (160, 160));
    }

    #[test]
    fn chunks_of_one_prompt_grow_without_a_copy() {
        let sequence = sequence(4000);
        let mut excerpt = Excerpt::new(sequence.run(0, 600));
        for start in [600, 800] {
            let next = sequence.run(start, start + 200);
            assert!(excerpt.grows_cheaply(next));
            excerpt.append(next);
        }
        assert!(std::ptr::eq(excerpt.tokens(), sequence.tokens().prompt));
        assert!(std::ptr::eq(excerpt.keys(), sequence.keys().prompt));
        with_run(1, 5, |run| {
            assert!(!excerpt.grows_cheaply(run), "that would copy 4,000 tokens");
            excerpt.append(run);
        });
        assert_eq!(
            (excerpt.len(), excerpt.keys()[1000], excerpt.is_own()),
            (1001, PageKey(9), true)
        );
        assert_eq!((excerpt.tokens().len(), excerpt.tokens()[4003]), (4004, 5));
        let room = excerpt.capacity() / 4 - excerpt.len();
        with_run(room, 5, |run| {
            assert!(room > 0 && excerpt.grows_cheaply(run));
            excerpt.append(run);
        });
        with_run(1, 6, |run| assert!(!excerpt.grows_cheaply(run), "that would copy all"));
        with_run(1000, 6, |run| {
            assert!(excerpt.grows_cheaply(run), "this would too, for as many");
        });
    }

    #[test]
    fn a_spare_one_is_used_where_it_is() {
        let sequence = sequence(8);
        let mut spare = Excerpt::with_capacity(2, 4);
        let address = spare.allocation().0;
        spare.append(sequence.run(0, 1));
        spare.append(sequence.run(1, 2));
        assert_eq!(
            (spare.tokens(), spare.keys()),
            (sequence.tokens().prompt, sequence.keys().prompt)
        );
        assert!(spare.clear_own(2) && !spare.clear_own(3));
        assert_eq!((spare.allocation(), spare.len()), ((address, 32, 32), 0));
        assert!(!Excerpt::new(sequence.run(0, 2)).clear_own(2), "that is the prompt's");
    }

    #[test]
    fn a_remainder_does_not_keep_the_whole_alive() {
        let sequence = sequence(4000);
        let mut upper = Excerpt::new(sequence.run(0, 1000));
        let mut lower = upper.split_off(975);
        assert!(shares(&lower, &upper));
        lower.trim();
        assert_eq!((lower.len(), lower.tokens()[0], lower.is_own()), (25, 3900, true));
        assert_eq!(lower.keys(), sequence.run(975, 1000).keys().prompt);
        assert!(!upper.is_own(), "the prompt has it too");
        upper.truncate(500);
        upper.trim();
        assert!(!upper.is_own());
        upper.truncate(225);
        assert!(!upper.is_own(), "not before it is trimmed");
        upper.trim();
        assert_eq!((upper.len(), upper.is_own()), (225, true));
        assert_eq!(upper.keys(), sequence.run(0, 225).keys().prompt);
    }

    #[test]
    fn a_long_prompt_is_not_copied_to_stand_before_a_few_pages() {
        let sequence = sequence(4000);
        let whole = Excerpt::new(sequence.run(0, 1000));
        let few = with_run(20, 9, Excerpt::new);
        assert!(!few.takes_in_front_cheaply(&whole, 4));
        let many = with_run(250, 9, Excerpt::new);
        assert!(many.takes_in_front_cheaply(&whole, 4), "they are a fourth of it");
        assert!(few.takes_in_front_cheaply(&Excerpt::new(sequence.run(0, 200)), 4), "it is short");
        let mut roomy = Excerpt::with_capacity(1020, 4);
        roomy.append(sequence.run(0, 1000));
        assert!(few.takes_in_front_cheaply(&roomy, 4), "it stays where it is");
        let mut upper = whole;
        let lower = upper.split_off(980);
        assert!(lower.takes_in_front_cheaply(&upper, 4), "they adjoin");
    }

    #[test]
    fn adjacent_excerpts_are_merged() {
        let sequence = sequence(4000);
        let mut upper = Excerpt::new(sequence.run(0, 1000));
        let mut lower = upper.split_off(500);
        assert!(lower.follows(&upper) && !upper.follows(&lower));
        let mut middle = upper.split_off(400);
        assert!(!lower.follows(&upper));
        lower.prepend(&mut middle);
        lower.prepend(&mut upper);
        assert_eq!((lower.len(), lower.start), (1000, 0));
        let mut tail = with_run(1, 9, Excerpt::new);
        tail.prepend(&mut lower);
        assert_eq!((tail.len(), tail.tokens()[3999], tail.tokens()[4000]), (1001, 3999, 9));
        assert_eq!(tail.keys()[..1000], *sequence.keys().prompt);
        assert_eq!(tail.keys()[1000], PageKey(9));
        assert_eq!(tail.capacity(), 4004, "it was copied once, to where all of it fits");
    }
}
