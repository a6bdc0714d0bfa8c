//! Computation of page keys: a digest of each page's tokens by themselves, and a chain through the digests.
//!
//! Digests do not wait for each other, so the processor computes those of several pages at once, and what has to
//! wait is one multiplication a page. All arithmetic is modulo 2^128 and little-endian; `fold(x)` is `x` with its
//! high half added to its low half by exclusive or.
//!
//! - **Words** of a namespace, which only its digest `n` reveals. With
//!   `mix(x) = fold(fold(x * SPREAD) * SCRAMBLE)`, `m(i)` is `mix(mix(n ^ i) + n)`. The low half of `m(i)`, for i from
//!   0 to 7 and with its two highest bits replaced by 01, is the word `w(i)`; `m(8)` with its lowest bit set is the
//!   multiplier `r`.
//! - **Digest** of up to 16 tokens, followed by zeros up to a multiple of four: pairs of them are the numbers `t(0)`,
//!   `t(1)` and so on of 64 bits, and the digest is the sum of the products
//!   `(t(0) + w(0)) * (t(1) + w(1)) + (t(2) + w(2)) * (t(3) + w(3)) + ...`, whose factors are modulo 2^64, and of how
//!   many tokens there are, by exclusive or.
//! - **Chain**: for every 16 tokens of a page and what is left of it, `state = fold((state ^ digest) * r)`, and the
//!   page's key is `fold(state * SCRAMBLE)`. Nothing is lost on the way from a state to its key, so the state behind
//!   a page is known from its key.

use crate::key::{PageKey, Token};
use crate::planted::{Bug, planted};

/// Digits of pi. Both are odd, so that nothing is lost by a multiplication.
const SPREAD: u128 = 0xBE54_66CF_34E9_0C6D;
const SCRAMBLE: u128 = 0xC0AC_29B7_C97C_50DD;
const UNSCRAMBLE: u128 = inverse(SCRAMBLE);

/// Tokens that are digested at a time.
const GROUP: usize = 16;

/// Tokens in a product.
const PRODUCT: usize = 4;

/// Words and multiplier of a namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    /// The first two bits are 01, so that a sum with two tokens below 2^31 is neither zero nor cut off.
    added: [u64; GROUP / 2],
    /// An odd number.
    multiplier: u128,
}

impl Words {
    /// Computes the words of the namespace with this digest.
    pub(crate) fn of(namespace: PageKey) -> Self {
        let mixed = |index: u128| mix(mix(namespace.0 ^ index).wrapping_add(namespace.0));
        let word = |index: usize| mixed(index as u128) as u64 & (u64::MAX >> 2) | 1 << 62;
        Self { added: std::array::from_fn(word), multiplier: mixed(8) | 1 }
    }

    /// Digest of at most [`GROUP`] tokens. Inlined, so that the compiler uses a length that it knows.
    #[inline(always)]
    fn digest(&self, tokens: &[Token]) -> u128 {
        let (fours, rest) = tokens.as_chunks::<PRODUCT>();
        let mut digest = 0u128;
        for (four, words) in fours.iter().zip(self.added.as_chunks::<2>().0) {
            digest = digest.wrapping_add(product(four, words));
        }
        if !rest.is_empty() {
            let four = std::array::from_fn(|at| rest.get(at).copied().unwrap_or(0));
            let words = self.added.as_chunks::<2>().0[fours.len()];
            digest = digest.wrapping_add(product(&four, &words));
        }
        digest ^ tokens.len() as u128
    }
}

#[inline(always)]
fn product(tokens: &[Token; PRODUCT], words: &[u64; 2]) -> u128 {
    let factor = |at: usize| {
        let pair = u64::from(tokens[2 * at]) | u64::from(tokens[2 * at + 1]) << 32;
        u128::from(pair.wrapping_add(words[at]))
    };
    factor(0) * factor(1)
}

/// A place between two pages: what all pages before it come to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    words: Words,
    state: u128,
}

impl Chain {
    /// Behind the page of this key, in the namespace with these words.
    #[inline(always)]
    pub(crate) fn behind(key: PageKey, words: &Words) -> Self {
        Self { words: *words, state: fold(key.0).wrapping_mul(UNSCRAMBLE) }
    }

    /// Goes on behind the page that holds these tokens, and tells its key.
    #[inline(always)]
    pub(crate) fn next(&mut self, tokens: &[Token]) -> PageKey {
        if planted(Bug::LeavePrefixOutOfKey) {
            self.state = 0;
        }
        let (groups, rest) = tokens.as_chunks::<GROUP>();
        groups.iter().for_each(|group| self.take_in(group));
        if !rest.is_empty() {
            self.take_in(rest);
        }
        PageKey(fold(self.state.wrapping_mul(SCRAMBLE)))
    }

    #[inline(always)]
    fn take_in(&mut self, tokens: &[Token]) {
        let digest = self.words.digest(tokens);
        self.state = fold((self.state ^ digest).wrapping_mul(self.words.multiplier));
    }
}

/// Two rounds, which can be undone, after which all bits depend on all bits.
fn mix(bits: u128) -> u128 {
    fold(fold(bits.wrapping_mul(SPREAD)).wrapping_mul(SCRAMBLE))
}

/// Its own inverse.
#[inline(always)]
fn fold(bits: u128) -> u128 {
    bits ^ bits >> 64
}

/// Inverse of an odd number. Each round doubles the number of correct bits, of which there are three at first.
const fn inverse(odd: u128) -> u128 {
    let (mut inverse, mut right) = (odd, 3);
    while right < u128::BITS {
        inverse = inverse.wrapping_mul(2u128.wrapping_sub(odd.wrapping_mul(inverse)));
        right *= 2;
    }
    inverse
}

impl PageKey {
    /// The key of the page that holds `tokens` and follows the page named by `self` (or, for the
    /// first page, the namespace itself), in the namespace whose digest is `root`.
    ///
    /// The top of `chain.rs` defines it.
    #[must_use]
    pub fn next(self, root: PageKey, tokens: &[Token]) -> PageKey {
        Chain::behind(self, &Words::of(root)).next(tokens)
    }
}

/// Hashes the whole pages of `tokens`, which follow the page named by `before`.
pub(crate) fn hash_pages(
    words: &Words,
    before: PageKey,
    tokens: &[Token],
    page_size: usize,
    keys: &mut Vec<PageKey>,
) {
    hash_each_page(words, before, tokens, page_size, keys, |_| {});
}

/// The same, and does something with each page on the way.
#[inline(always)]
pub(crate) fn hash_each_page(
    words: &Words,
    before: PageKey,
    tokens: &[Token],
    page_size: usize,
    keys: &mut Vec<PageKey>,
    on_the_way: impl FnMut(&[Token]),
) {
    let chain = Chain::behind(before, words);
    match page_size {
        1 => hash_pages_of::<1>(chain, tokens, keys, on_the_way),
        2 => hash_pages_of::<2>(chain, tokens, keys, on_the_way),
        4 => hash_pages_of::<4>(chain, tokens, keys, on_the_way),
        16 => hash_pages_of::<16>(chain, tokens, keys, on_the_way),
        _ => hash_in_turn(chain, tokens.chunks_exact(page_size), keys, on_the_way),
    }
}

/// Hashes pages of a size that is known when compiling: the usual one, and those smaller than what is multiplied at
/// a time.
#[inline(always)]
fn hash_pages_of<const PAGE_SIZE: usize>(
    chain: Chain,
    tokens: &[Token],
    keys: &mut Vec<PageKey>,
    on_the_way: impl FnMut(&[Token]),
) {
    let pages = tokens.as_chunks::<PAGE_SIZE>().0.iter();
    hash_in_turn(chain, pages.map(|page| &page[..]), keys, on_the_way);
}

#[inline(always)]
fn hash_in_turn<'a>(
    mut chain: Chain,
    pages: impl Iterator<Item = &'a [Token]>,
    keys: &mut Vec<PageKey>,
    mut on_the_way: impl FnMut(&[Token]),
) {
    keys.extend(pages.map(|page| {
        on_the_way(page);
        chain.next(page)
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roots() -> impl Iterator<Item = PageKey> {
        (0..200).map(|number| PageKey(mix(number << 64 | number)))
    }

    fn key(root: PageKey, page: &[Token]) -> PageKey {
        root.next(root, page)
    }

    /// Two tokens that are this number.
    fn tokens_of(pair: u64) -> [Token; 2] {
        [pair as Token, (pair >> 32) as Token]
    }

    #[test]
    fn the_state_behind_a_page_is_known_from_its_key() {
        let words = Words::of(PageKey(7));
        let mut chain = Chain::behind(PageKey(7), &words);
        for page in 0..1000 {
            let key = chain.next(&[page; 16]);
            assert_eq!(Chain::behind(key, &words).state, chain.state);
        }
    }

    #[test]
    fn multipliers_are_odd_and_invertible() {
        let multipliers = roots().map(|root| Words::of(root).multiplier);
        for odd in [SPREAD, SCRAMBLE, 1, 3, u128::MAX].into_iter().chain(multipliers) {
            assert_eq!(odd.wrapping_mul(inverse(odd)), 1, "{odd:x}");
        }
        assert_eq!(fold(fold(u128::MAX / 7)), u128::MAX / 7);
    }

    #[test]
    fn tokens_below_two_to_the_31_make_no_factor_zero_and_none_is_cut_off() {
        let most = u64::from(u32::MAX >> 1) << 32 | u64::from(u32::MAX);
        for word in roots().flat_map(|root| Words::of(root).added) {
            assert!(word != 0 && word.checked_add(most).is_some(), "{word:x}");
        }
    }

    #[test]
    fn words_of_namespaces_are_all_different() {
        let mut words: Vec<u64> = roots().flat_map(|root| Words::of(root).added).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 8 * roots().count());
    }

    /// Pages that have one key where the words are these: two factors change places, a factor is zero so that the
    /// other does not count, and two products change places.
    fn collisions(words: &Words) -> [[Vec<Token>; 2]; 3] {
        let w = words.added;
        let page = |pairs: [u64; 8]| pairs.into_iter().flat_map(tokens_of).collect::<Vec<Token>>();
        let plain: [u64; 8] = [5, 6, 7, 8, 9, 10, 11, 12];
        let moved = |to: usize, from: usize| plain[from].wrapping_add(w[from]).wrapping_sub(w[to]);
        let swapped = [moved(0, 1), moved(1, 0), 7, 8, 9, 10, 11, 12];
        let zero = |other| [0u64.wrapping_sub(w[0]), other, 7, 8, 9, 10, 11, 12];
        let lanes = [moved(0, 2), moved(1, 3), moved(2, 0), moved(3, 1), 9, 10, 11, 12];
        [[page(plain), page(swapped)], [page(zero(1)), page(zero(2))], [page(plain), page(lanes)]]
    }

    #[test]
    fn known_words_allow_collisions_only_in_their_namespace() {
        let known = PageKey(mix(42));
        for [one, other] in collisions(&Words::of(known)) {
            assert_ne!(one, other);
            assert_eq!(key(known, &one), key(known, &other), "the attack is a real one");
            for root in roots() {
                assert_ne!(key(root, &one), key(root, &other), "{root}");
            }
        }
    }

    #[test]
    fn digests_cannot_be_chosen_without_the_words() {
        // With a factor of one the digest is the other factor, and so what one likes.
        let known = PageKey(mix(42));
        let forged = |words: &Words, wanted: u64| -> Vec<Token> {
            let w = words.added;
            let one = |at: usize| 1u64.wrapping_sub(w[at]);
            [one(0), wanted.wrapping_sub(w[1])].into_iter().flat_map(tokens_of).collect()
        };
        let words = Words::of(known);
        assert_eq!(words.digest(&forged(&words, 12345)), 12345 ^ 4);
        for root in roots() {
            let others = Words::of(root);
            assert_ne!(others.digest(&forged(&words, 12345)), 12345 ^ 4, "{root}");
        }
    }
}
