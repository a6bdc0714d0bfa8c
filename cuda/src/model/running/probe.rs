//! A few fixed tokens that are computed when a model starts. The digest of their bits is part of
//! the fingerprint, so servers that round differently do not share pages.

#![allow(unsafe_code)]

use std::ops::Range;

use cudarc::driver::result;
use terrace_engine::StepLimits;
use terrace_scheduler::Token;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::Running;
use crate::context::call;
use crate::error::CudaError;
use crate::model::forward::{LOGITS_ROWS, rounded};
use crate::model::plain::{self, NOWHERE};

/// Number of tokens in the digest.
const TOKENS: usize = 64;
/// Numbers of tokens that are also computed at once: by kernels for few rows, and by cuBLASLt with
/// timed algorithms and, above 1,024, with untimed ones.
const COUNTS: [usize; 7] = [1, 8, 80, 256, 320, 1024, 1088];

impl Running {
    /// Computes the tokens and returns the digest of their KV and logits. It does not depend on the
    /// sizes of steps and tiers. If bits depend on how many tokens are computed at once, this is
    /// logged and changes the digest.
    pub(in crate::model) fn probe(&mut self, limits: StepLimits) -> Result<u64, CudaError> {
        let device_tokens = self.memory.pages() as usize * limits.page_size as usize;
        let positions_max = self.forward.shape.positions_max as usize;
        let room = device_tokens.min(limits.tokens_max as usize).min(positions_max);
        let compared = TOKENS.min(room);
        let reference = self.bits(0..compared, compared)?;
        let mut others = Vec::new();
        for count in COUNTS.into_iter().filter(|count| *count <= room) {
            // Smaller numbers take the last tokens, behind existing KV.
            let first = compared.saturating_sub(count);
            let bits = self.bits(first..first + count, compared - first)?;
            if bits != reference[first..] {
                others.push((count, bits));
            }
        }
        let used = room.min(COUNTS[COUNTS.len() - 1]).div_ceil(limits.page_size as usize);
        let (base, bytes) = (self.memory.base().0, used * self.memory.page_bytes());
        // SAFETY: the pages exist, and no step is in flight.
        let cleared = unsafe { result::memset_d8_async(base, 0, bytes, self.forward.stream.raw()) };
        call("cuMemsetD8Async", cleared)?;
        self.driver.drain(self.forward.stream)?;
        if !others.is_empty() {
            let counts: Vec<usize> = others.iter().map(|(count, _)| *count).collect();
            tracing::warn!(
                "the bits of a token depend on how many are computed with it ({counts:?} against {compared}): this \
                 server shares pages only with servers of the same bits"
            );
        }
        Ok(digest(&reference, &others))
    }

    /// Computes the tokens of some positions at once, and returns the bits of the first `count` of
    /// them.
    fn bits(&mut self, positions: Range<usize>, count: usize) -> Result<Vec<u64>, CudaError> {
        let (start, end) = (positions.start, positions.start + count);
        self.compute(positions)?;
        let layout = self.memory.layout();
        let pages = Pages {
            page_size: layout.page_size() as usize,
            page_bytes: layout.bytes(),
            token_bytes: self.forward.shape.head_dim * 2,
        };
        let mut kv = vec![0_u8; end.div_ceil(pages.page_size) * pages.page_bytes];
        let row_bytes = self.forward.shape.vocabulary * 4;
        let mut logits = vec![0_u8; count * row_bytes];
        for (bytes, at) in
            [(&mut kv, self.memory.base()), (&mut logits, self.forward.buffers().logits.at())]
        {
            // SAFETY: that many pages and rows of logits were computed.
            call("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(bytes, at.0) })?;
        }
        let rows = logits.chunks_exact(row_bytes);
        Ok((start..end).zip(rows).map(|(position, row)| pages.bits(&kv, position, row)).collect())
    }

    /// Computes the tokens of some positions, and as many logits as there is room for.
    fn compute(&mut self, positions: Range<usize>) -> Result<(), CudaError> {
        let vocabulary = self.forward.shape.vocabulary;
        let tokens: Vec<Token> = positions.clone().map(|at| token(at, vocabulary)).collect();
        let (count, start) = (tokens.len(), positions.start as u32);
        let page_size = self.memory.layout().page_size();
        self.work.prepare_probe(&self.forward.shape, self.limits, &tokens, start, page_size);
        let nowhere = plain::Token { place: NOWHERE, ..plain::Token::default() };
        self.work.tokens.resize(rounded(count), nowhere);
        let fence = self.memory.fence()?;
        let lists = self.send(&fence)?;
        self.take_in(&lists)?;
        let extent = self.extent();
        self.forward.layers(extent, &lists, &[])?;
        self.forward.logits(count.min(LOGITS_ROWS), None)?;
        fence.record(self.forward.stream)?;
        Ok(self.driver.drain(self.forward.stream)?)
    }
}

/// Returns the token at a position: any of the vocabulary.
fn token(position: usize, vocabulary: usize) -> Token {
    let mixed = (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (mixed % vocabulary as u64) as Token
}

/// Layout of KV in pages: blocks of equally many bytes for each token of the page.
struct Pages {
    page_size: usize,
    page_bytes: usize,
    token_bytes: usize,
}

impl Pages {
    /// Returns a checksum of a token's KV and logits.
    fn bits(&self, kv: &[u8], position: usize, logits: &[u8]) -> u64 {
        let page = &kv[position / self.page_size * self.page_bytes..][..self.page_bytes];
        let within = position % self.page_size * self.token_bytes;
        let mut sum = Xxh3::new();
        for block in page.chunks_exact(self.page_size * self.token_bytes) {
            sum.update(&block[within..within + self.token_bytes]);
        }
        sum.update(logits);
        sum.digest()
    }
}

/// Returns the digest of the tokens' bits, and of those that differed with other numbers of tokens.
fn digest(reference: &[u64], others: &[(usize, Vec<u64>)]) -> u64 {
    let mut numbers = reference.to_vec();
    for (count, bits) in others {
        numbers.push(*count as u64);
        numbers.extend_from_slice(bits);
    }
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN_BYTES: usize = 8;
    const BLOCKS: usize = 6;

    /// Creates pages with one byte for each token and block.
    fn kv(page_size: usize, tokens: usize) -> (Pages, Vec<u8>) {
        let page_bytes = page_size * TOKEN_BYTES * BLOCKS;
        let pages = Pages { page_size, page_bytes, token_bytes: TOKEN_BYTES };
        let mut kv = vec![0; tokens.div_ceil(page_size) * page_bytes];
        for position in 0..tokens {
            for block in 0..BLOCKS {
                let at = position / page_size * page_bytes
                    + (block * page_size + position % page_size) * TOKEN_BYTES;
                kv[at..at + TOKEN_BYTES].fill((position * 7 + block) as u8);
            }
        }
        (pages, kv)
    }

    fn all_bits(page_size: usize, change: Option<usize>) -> Vec<u64> {
        let (pages, mut kv) = kv(page_size, 24);
        if let Some(byte) = change {
            kv[byte] ^= 1;
        }
        (0..24).map(|position| pages.bits(&kv, position, &[position as u8])).collect()
    }

    #[test]
    fn bits_do_not_depend_on_page_positions() {
        let whole = all_bits(8, None);
        assert_eq!(all_bits(2, None), whole);
        assert_eq!(all_bits(16, None), whole);
        for byte in [0, 7, 8, 200, 24 * TOKEN_BYTES * BLOCKS - 1] {
            let changed = all_bits(8, Some(byte));
            let different = changed.iter().zip(&whole).filter(|(a, b)| a != b).count();
            assert_eq!(different, 1, "byte {byte} belongs to one token");
        }
        let (pages, kv) = kv(8, 24);
        assert_ne!(pages.bits(&kv, 3, &[1]), pages.bits(&kv, 3, &[2]), "logits count, too");
    }

    #[test]
    fn digest_depends_on_every_bit_and_on_disagreements() {
        let reference = [1, 2, 3];
        let usual = digest(&reference, &[]);
        assert_eq!(digest(&reference, &[]), usual);
        assert_ne!(digest(&[1, 2, 2], &[]), usual);
        let odd = digest(&reference, &[(80, vec![1, 2, 4])]);
        assert_ne!(odd, usual);
        assert_ne!(digest(&reference, &[(256, vec![1, 2, 4])]), odd);
    }

    #[test]
    fn probed_tokens_are_in_every_vocabulary() {
        assert!((0..2000).all(|position| token(position, 258) < 258));
        let some: std::collections::BTreeSet<_> = (0..64).map(|it| token(it, 128_256)).collect();
        assert_eq!(some.len(), 64);
    }
}
