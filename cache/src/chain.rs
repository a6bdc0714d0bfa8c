//! How page keys are computed: a digest of each page's tokens by themselves, and a chain through the digests.
//!
//! Digests do not wait for each other, so the processor computes those of several pages at once, and what has to
//! wait is one multiplication a page. All arithmetic is modulo 2^128 and little-endian; `fold(x)` is `x` with its
//! high half added to its low half by exclusive or.
//!
//! - **Digest** of some tokens: `d` is zero at first. For every eight tokens, the last ones followed by zeros,
//!   taken in pairs as words `a`, `b`, `c` and `e` of 64 bits, it becomes
//!   `d * SPREAD ^ (a ^ W0) * (b ^ W1) ^ swap((c ^ W2) * (e ^ W3))`, where `swap` exchanges the halves. At last
//!   `d ^ the number of tokens`.
//! - **Chain**: `state = fold((state ^ digest) * SPREAD)`, and the page's key is `fold(state * SCRAMBLE)`. Nothing
//!   is lost on the way from a state to its key, so the state behind a page is known from its key.

use crate::key::PageKey;
use crate::planted::{Bug, planted};
use crate::sequence::Token;

/// Digits of pi, as are all constants here. The words have the highest bit of both halves set, so that tokens
/// below 2^31 never make a factor zero; multipliers are odd, so that nothing is lost by them.
const WORDS: [u64; 4] =
    [0xA43F_6A88_85A3_08D3, 0x9319_8A2E_8370_7344, 0xA409_3822_A99F_31D0, 0x882E_FA98_EC4E_6C89];
const SPREAD: u128 = 0xBE54_66CF_34E9_0C6D;
const SCRAMBLE: u128 = 0xC0AC_29B7_C97C_50DD;
const UNSCRAMBLE: u128 = inverse(SCRAMBLE);

/// Tokens that are multiplied at a time.
const GROUP: usize = 8;

/// A place between two pages: what all pages before it come to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain {
    state: u128,
}

impl Chain {
    /// Behind the page of this key.
    #[inline(always)]
    pub(crate) fn behind(key: PageKey) -> Self {
        Self { state: fold(key.0).wrapping_mul(UNSCRAMBLE) }
    }

    /// Goes on behind the page that holds these tokens, and tells its key. Inlined, so that a length that is
    /// known when compiling is made use of.
    #[inline(always)]
    pub(crate) fn next(&mut self, tokens: &[Token]) -> PageKey {
        if planted(Bug::LeavePrefixOutOfKey) {
            self.state = 0;
        }
        self.state = fold((self.state ^ digest(tokens)).wrapping_mul(SPREAD));
        PageKey(fold(self.state.wrapping_mul(SCRAMBLE)))
    }
}

#[inline(always)]
fn digest(tokens: &[Token]) -> u128 {
    let (groups, rest) = tokens.as_chunks::<GROUP>();
    let mut digest = 0u128;
    for group in groups {
        digest = digest.wrapping_mul(SPREAD) ^ products(group);
    }
    if !rest.is_empty() {
        let group = std::array::from_fn(|at| rest.get(at).copied().unwrap_or(0));
        digest = digest.wrapping_mul(SPREAD) ^ products(&group);
    }
    digest ^ tokens.len() as u128
}

/// Two products of 128 bits, one turned by half, so that small differences of both cannot cancel out.
#[inline(always)]
fn products(group: &[Token; GROUP]) -> u128 {
    let factor = |at: usize| {
        let pair = u64::from(group[2 * at]) | u64::from(group[2 * at + 1]) << 32;
        u128::from(pair ^ WORDS[at])
    };
    (factor(0) * factor(1)) ^ (factor(2) * factor(3)).rotate_left(64)
}

/// Its own inverse.
#[inline(always)]
fn fold(bits: u128) -> u128 {
    bits ^ bits >> 64
}

/// What undoes a multiplication by an odd number. Each round doubles the bits that are right, of which there
/// are three at first.
const fn inverse(odd: u128) -> u128 {
    let (mut inverse, mut right) = (odd, 3);
    while right < u128::BITS {
        inverse = inverse.wrapping_mul(2u128.wrapping_sub(odd.wrapping_mul(inverse)));
        right *= 2;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_behind_a_page_is_known_from_its_key() {
        let mut chain = Chain::behind(PageKey(7));
        for page in 0..1000 {
            let key = chain.next(&[page; 16]);
            assert_eq!(Chain::behind(key).state, chain.state);
        }
    }

    #[test]
    fn what_multiplies_is_odd_and_undone() {
        for odd in [SPREAD, SCRAMBLE, 1, 3, u128::MAX] {
            assert_eq!(odd.wrapping_mul(inverse(odd)), 1, "{odd:x}");
        }
        assert_eq!(fold(fold(u128::MAX / 7)), u128::MAX / 7);
    }

    #[test]
    fn tokens_below_two_to_the_31_make_no_factor_zero() {
        let top_bits = 1 << 63 | 1 << 31;
        assert!(WORDS.iter().all(|word| word & top_bits == top_bits));
    }
}
