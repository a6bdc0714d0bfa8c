//! Digests of prefixes: what proves that a stored page belongs to the tokens in hand.
//!
//! Page keys are fast, not cryptographic: without the namespace's secret a client can choose tokens such that two
//! prompts have a key in common. Inside the process tokens are compared. A page that leaves it carries the digest of
//! its whole prefix, which is computed only for such pages.

use std::fmt;

use crate::key::{PageKey, Token};
use crate::run::PageRun;

/// 256 bits that no two prefixes have in common: the namespace, all tokens up to the end of a page, and the content of
/// the passages on these pages.
///
/// The digest of a namespace is BLAKE3 over the bytes `terrace prefix 1` and the 16 bytes of the
/// [namespace's digest](crate::Namespace::digest). The digest of a page is keyed BLAKE3, whose key is the digest
/// before it, over the page's tokens as 32-bit words and, where passages with content touch the page, the 16 bytes of
/// their digest. All numbers are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefixDigest([u8; PrefixDigest::BYTES]);

/// Tokens that are turned into bytes at a time: the usual page.
const TOKENS_AT_A_TIME: usize = 16;

impl PrefixDigest {
    /// The size of a digest.
    pub const BYTES: usize = 32;

    /// The digest of a namespace, which precedes that of every first page.
    #[must_use]
    pub fn of_namespace(namespace: PageKey) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"terrace prefix 1").update(&namespace.0.to_le_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// The digest of the page that holds `tokens` and follows the prefix of this digest. `content` is the digest of
    /// the passages on the page, if any of them has content.
    #[must_use]
    pub fn next(&self, tokens: &[Token], content: Option<u128>) -> Self {
        let mut bytes = [0; 4 * TOKENS_AT_A_TIME];
        if let (Ok(tokens), None) = (<&[Token; TOKENS_AT_A_TIME]>::try_from(tokens), content) {
            write_tokens(tokens, &mut bytes);
            return Self(*blake3::keyed_hash(&self.0, &bytes).as_bytes());
        }
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for tokens in tokens.chunks(TOKENS_AT_A_TIME) {
            write_tokens(tokens, &mut bytes);
            hasher.update(&bytes[..4 * tokens.len()]);
        }
        if let Some(content) = content {
            hasher.update(&content.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The bytes of the digest.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// The digest of these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The digest behind a run that follows the prefix of this digest.
    #[must_use]
    pub fn behind(self, run: PageRun<'_>) -> Self {
        run.pages().fold(self, |digest, (tokens, content)| digest.next(tokens, content))
    }

    /// Writes the digest of each page of a run that follows the prefix of this digest to the end of `into`.
    pub fn extend_along(self, run: PageRun<'_>, into: &mut Vec<PrefixDigest>) {
        let mut digest = self;
        into.extend(run.pages().map(|(tokens, content)| {
            digest = digest.next(tokens, content);
            digest
        }));
    }
}

fn write_tokens(tokens: &[Token], bytes: &mut [u8]) {
    for (token, bytes) in tokens.iter().zip(bytes.as_chunks_mut::<4>().0) {
        *bytes = token.to_le_bytes();
    }
}

impl fmt::Debug for PrefixDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContentKey, Namespace, Passage, Sequence};

    fn digests(sequence: &Sequence) -> Vec<String> {
        let mut digests = Vec::new();
        let pages = sequence.keys().len() as u32;
        PrefixDigest::of_namespace(sequence.root())
            .extend_along(sequence.run(0, pages), &mut digests);
        digests.iter().map(|digest| format!("{digest:?}")).collect()
    }

    // Computed in another language, with another implementation of BLAKE3, by what is written above. A change of any
    // of them makes every page in L3 that of another prefix.

    #[test]
    fn digests_of_prefixes_match_the_known_answers() {
        let vectors = [
            (1, 0, "14b1933f702b8b5f5b9fceb4f12a87b21672a4fa354ed30c40bd90297f90bad4"),
            (1, 9, "4b288d019bcd421f94ff40f82698c2ede0757e684d838ee415c68ba6cca6b5d7"),
            (16, 0, "4b6412d8d6fef6ec09a6a665c0dac7fef5913db39bf3a346ae63ef0cf2a3cef0"),
            (16, 1, "dcd96188f67e2d893ac6c54ab9b2fa311d037215bd31f8360042d5fc36923b04"),
            (16, 9, "562bc952e47de5132f1ebf55614dd8bb60fa7512e68037c8328fc962ab8f629a"),
            (256, 0, "244d8a7cef801956f05a25654183a9d4800ea32537a0672e8645b36fc14f8be7"),
            (256, 9, "268cfa833daf5d65eed161f66ce67089d6cbaf0d4f94df5fc029c372bc404373"),
        ];
        for (page_size, page, digest) in vectors {
            let root = Namespace::new("tiny-llama", page_size).digest();
            let token = |index: u32| index.wrapping_mul(2_654_435_761).wrapping_add(7);
            let sequence = Sequence::new(root, page_size, (0..10 * page_size).map(token).collect());
            assert_eq!(digests(&sequence)[page], digest, "page {page} of {page_size} tokens");
        }
    }

    #[test]
    fn digests_of_pages_with_passages_match_the_known_answers() {
        let passage = |start, end, content| Passage {
            start,
            end,
            content: Some(ContentKey(content)),
            is_whole: false,
        };
        let passages =
            [passage(5, 9, 0x0123_4567_89ab_cdef_0011_2233_4455_6677), passage(9, 10, 1)];
        let root = Namespace::new("tiny-llama", 4).digest();
        let expected = [
            "d6e16cda0bf92c9ac22b92c961daaf8083d9af1305e45432a1fab0aead2b0918",
            "1dd17cb9628c6c70ba6d8c67009874c56487fef77d2fa56abdde6fb88446406c",
            "eac7efc70c600d9c1ec1ffb7764ca6925fa77a3bfc88cc3635e52479753a1efa",
            "76969be2c7d564651da9d850b4213a0aea18849f6a786b67065a21f44f4fa314",
            "3fd105950fc188fca41cc2112ba6ccc9b4e5d3737e05a7c3f91e7aa4c7f91fe6",
        ];
        // However the tokens came to be there.
        for prompt in [10, 14, 20] {
            let begun = Sequence::with_passages(root, 4, (0..prompt).collect(), &passages);
            let mut sequence = begun.expect("sound passages");
            (prompt..20).for_each(|token| sequence.extend(&[token]));
            assert_eq!(digests(&sequence), expected, "{prompt} tokens of prompt");
            assert_eq!(digests(&sequence.prefix(5)), expected);
        }
    }
}
