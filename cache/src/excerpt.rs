//! The tokens of a node: an excerpt of a prompt, shared with it rather than copied.
//!
//! Prompts are long and cold by the time their pages are inserted, and copying them would cost more
//! than everything else about it. An excerpt keeps its whole prompt alive, so one that is but a small
//! part of it becomes a copy.

use std::ops::Deref;
use std::sync::Arc;

use crate::sequence::{RunTokens, Token};

/// An excerpt is at least one part in so many of what it keeps alive.
const KEPT_SHARE: usize = 2;

/// Moving so few tokens to where there is room for more costs next to nothing.
const MOVED_MAX: usize = 1024;

/// Tokens within an allocation that others may share.
#[derive(Debug, Default)]
pub(crate) struct Excerpt {
    /// None while it is empty: a node that comes or goes allocates nothing for it.
    all: Option<Arc<Vec<Token>>>,
    start: usize,
    len: usize,
}

impl Excerpt {
    /// Of a prompt that comes in chunks the rest is expected to follow.
    pub(crate) fn new(tokens: RunTokens<'_>) -> Self {
        match tokens.within_prompt() {
            Some((prompt, start)) if (prompt.len() - start) * KEPT_SHARE >= prompt.capacity() => {
                Self { all: Some(prompt.clone()), start, len: tokens.len() }
            }
            Some(_) | None => Self::own(tokens.to_vec()),
        }
    }

    /// None yet, and room for so many.
    pub(crate) fn with_capacity(tokens: usize) -> Self {
        Self::own(Vec::with_capacity(tokens))
    }

    /// Empties it and keeps its allocation, if that is its own and has room for about `tokens`.
    pub(crate) fn clear_own(&mut self, tokens: usize) -> bool {
        let fits = (tokens..=2 * tokens).contains(&self.capacity());
        (self.start, self.len) = (0, 0);
        let own = self.all.as_mut().and_then(Arc::get_mut).filter(|_| fits);
        own.map(Vec::clear).is_some()
    }

    /// Whether appending these tokens costs no more than they are worth: those that it has stay where
    /// they are, or are few, or few beside the new ones.
    pub(crate) fn grows_cheaply(&self, tokens: RunTokens<'_>) -> bool {
        let has_room = self.len + tokens.len() <= self.capacity();
        let are_few = self.len < MOVED_MAX || self.len <= 4 * tokens.len();
        self.continues(tokens) || self.is_own() && (has_room || are_few)
    }

    pub(crate) fn append(&mut self, tokens: RunTokens<'_>) {
        if self.continues(tokens) {
            self.len += tokens.len();
            return;
        }
        let own = self.make_own();
        tokens.append_to(own);
        self.len = own.len();
    }

    /// Puts the tokens that precede these in front.
    pub(crate) fn prepend(&mut self, front: &mut Excerpt) {
        if self.shares(front.all.as_ref()) && front.start + front.len == self.start {
            self.start = front.start;
            self.len += front.len;
            return;
        }
        let own = front.make_own();
        own.extend_from_slice(self);
        front.len = own.len();
        *self = std::mem::take(front);
    }

    /// Keeps the first tokens, and the memory of the others until it is trimmed.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = len;
    }

    /// The tokens from `at` on; these keep those before. Both keep the whole alive until they are
    /// trimmed.
    pub(crate) fn split_off(&mut self, at: usize) -> Excerpt {
        let rest = Self { all: self.all.clone(), start: self.start + at, len: self.len - at };
        self.len = at;
        rest
    }

    /// How many tokens it has once the rest of the prompt that it shares has followed.
    pub(crate) fn expected(&self) -> usize {
        self.all.as_ref().map_or(0, |all| all.len() - self.start)
    }

    /// What it keeps alive: an address that tells allocations apart, and their size.
    pub(crate) fn allocation(&self) -> (usize, usize) {
        let address = self.all.as_ref().map_or(0, |all| Arc::as_ptr(all).addr());
        (address, self.capacity() * size_of::<Token>())
    }

    fn own(tokens: Vec<Token>) -> Self {
        Self { start: 0, len: tokens.len(), all: Some(Arc::new(tokens)) }
    }

    /// Whether nobody else uses the allocation, and it begins with these tokens.
    fn is_own(&self) -> bool {
        self.all.as_ref().is_some_and(|all| Arc::strong_count(all) == 1) && self.start == 0
    }

    fn shares(&self, allocation: Option<&Arc<Vec<Token>>>) -> bool {
        let both = self.all.as_ref().zip(allocation);
        both.is_some_and(|(ours, theirs)| Arc::ptr_eq(ours, theirs))
    }

    fn capacity(&self) -> usize {
        self.all.as_ref().map_or(0, |all| all.capacity())
    }

    /// Whether these are the tokens after its own in the same allocation.
    fn continues(&self, tokens: RunTokens<'_>) -> bool {
        tokens.within_prompt().is_some_and(|(prompt, start)| {
            self.shares(Some(prompt)) && start == self.start + self.len
        })
    }

    /// Its tokens, and nothing else, in an allocation of its own.
    fn make_own(&mut self) -> &mut Vec<Token> {
        if !self.is_own() {
            *self = Self::own(self.to_vec());
        }
        let own = self.all.as_mut().and_then(Arc::get_mut).expect("an allocation of its own");
        own.truncate(self.len);
        own
    }

    /// Whether it keeps more alive than it should.
    pub(crate) fn is_wasteful(&self) -> bool {
        self.len * KEPT_SHARE < self.capacity()
    }

    /// Gives memory back once less than half of it is in use.
    pub(crate) fn trim(&mut self) {
        if self.is_wasteful() {
            *self = Self::own(self.to_vec());
        }
    }
}

impl Deref for Excerpt {
    type Target = [Token];

    fn deref(&self) -> &[Token] {
        match &self.all {
            Some(all) => &all[self.start..self.start + self.len],
            None => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PageKey, Sequence};

    fn sequence(tokens: u32) -> Sequence {
        Sequence::new(PageKey(7), 4, (0..tokens).collect())
    }

    fn shares(one: &Excerpt, other: &Excerpt) -> bool {
        one.shares(other.all.as_ref())
    }

    #[test]
    fn a_large_part_of_a_prompt_is_shared_and_a_small_one_copied() {
        let sequence = sequence(4000);
        let large = Excerpt::new(sequence.run(500, 1000).tokens);
        let whole = Excerpt::new(sequence.run(0, 1000).tokens);
        let small = Excerpt::new(sequence.run(990, 1000).tokens);
        let first_chunk = Excerpt::new(sequence.run(0, 100).tokens);
        assert!(shares(&first_chunk, &whole) && first_chunk.is_wasteful());
        assert!(shares(&large, &whole) && !shares(&small, &whole));
        assert_eq!((large[0], whole[0], small[0]), (2000, 0, 3960));
        assert_eq!(small.allocation().1, 160);
    }

    #[test]
    fn chunks_of_one_prompt_grow_without_a_copy() {
        let sequence = sequence(4000);
        let mut excerpt = Excerpt::new(sequence.run(0, 600).tokens);
        for start in [600, 800] {
            let next = sequence.run(start, start + 200).tokens;
            assert!(excerpt.grows_cheaply(next));
            excerpt.append(next);
        }
        assert_eq!(excerpt[..], *sequence.tokens().prompt);
        assert!(!excerpt.grows_cheaply((&[1, 2, 3, 4][..]).into()), "that would copy 4,000 tokens");
        excerpt.append((&[1, 2, 3, 4][..]).into());
        assert_eq!((excerpt.len(), excerpt[4003], excerpt.is_own()), (4004, 4, true));
        let room = excerpt.capacity() - excerpt.len();
        assert!(room > 0 && excerpt.grows_cheaply(vec![5; room][..].into()));
        excerpt.append(vec![5; room][..].into());
        assert!(!excerpt.grows_cheaply((&[6, 6, 6, 6][..]).into()), "that would copy all");
        assert!(excerpt.grows_cheaply(vec![6; 4000][..].into()), "this would too, for as many");
    }

    #[test]
    fn what_is_left_of_it_does_not_keep_the_whole() {
        let sequence = sequence(4000);
        let mut upper = Excerpt::new(sequence.run(0, 1000).tokens);
        let mut lower = upper.split_off(3900);
        assert!(shares(&lower, &upper));
        lower.trim();
        assert_eq!((lower.len(), lower[0], lower.is_own()), (100, 3900, true));
        assert!(!upper.is_own(), "the prompt has it too");
        upper.truncate(2000);
        upper.trim();
        assert!(!upper.is_own());
        upper.truncate(900);
        assert!(!upper.is_own(), "not before it is trimmed");
        upper.trim();
        assert_eq!((upper.len(), upper.is_own()), (900, true));
    }

    #[test]
    fn neighbours_come_together_again() {
        let sequence = sequence(4000);
        let mut upper = Excerpt::new(sequence.run(0, 1000).tokens);
        let mut lower = upper.split_off(2000);
        lower.prepend(&mut upper);
        assert_eq!((lower.len(), lower.start), (4000, 0));
        let mut tail = Excerpt::own(vec![9; 4]);
        tail.prepend(&mut lower);
        assert_eq!((tail.len(), tail[3999], tail[4000]), (4004, 3999, 9));
    }
}
