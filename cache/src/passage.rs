//! Passages: parts of a prompt that their tokens do not tell, as the placeholders of an image do not tell the
//! image.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::chain::{Chain, Words, hash_pages};
use crate::key::{PageKey, Token, of_hex, strong_hash};
use crate::planted::{Bug, planted};

/// 128 bits that name what the tokens of a passage stand for: a strong hash of the image or sound. Matches go
/// by it, so two contents must never have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentKey(pub u128);

impl fmt::Display for ContentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for ContentKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        of_hex(text).map(ContentKey).ok_or("the key of a content must have 32 hexadecimal digits")
    }
}

impl Serialize for ContentKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ContentKey {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Consecutive tokens of a prompt of which more is to be known than the tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passage {
    /// The position of the first token.
    pub start: u32,
    /// The position after the last.
    pub end: u32,
    /// Content that the tokens stand for, if not for themselves. It is part of the keys of all pages that the passage
    /// touches, and so of those behind them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<ContentKey>,
    /// True if no step may end inside the passage, as where the tokens of an image attend to each other. Cached
    /// prefixes may end inside: they were computed with all of the passage.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_whole: bool,
}

impl Passage {
    /// Number of tokens.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "an empty one is refused")]
    pub fn len(&self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    /// Returns true if a step that ends at this position cuts the passage.
    #[must_use]
    pub fn is_cut_at(&self, position: u32) -> bool {
        self.is_whole && self.start < position && position < self.end
    }

    /// Checks that every passage is within this number of tokens, not empty, and behind those before it.
    ///
    /// # Errors
    /// What about them cannot be.
    pub fn check_all(passages: &[Passage], tokens: usize) -> Result<(), PassageError> {
        let mut free_from = 0;
        for (place, passage) in passages.iter().enumerate() {
            let fault = match passage {
                Passage { start, end, .. } if start >= end => PassageFault::Empty,
                Passage { end, .. } if *end as usize > tokens => {
                    PassageFault::OutOfRange { tokens }
                }
                Passage { start, .. } if *start < free_from => {
                    PassageFault::OutOfOrder { free_from }
                }
                Passage { end, .. } => {
                    free_from = *end;
                    continue;
                }
            };
            return Err(PassageError { place, start: passage.start, end: passage.end, fault });
        }
        Ok(())
    }
}

/// Passages that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassageError {
    /// Which of them, from 0.
    pub place: usize,
    /// Where it begins.
    pub start: u32,
    /// Where it ends.
    pub end: u32,
    /// Fault of the passage.
    pub fault: PassageFault,
}

/// Fault of a passage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassageFault {
    /// It has no token.
    Empty,
    /// It ends behind the prompt.
    OutOfRange {
        /// Tokens of the prompt.
        tokens: usize,
    },
    /// It begins before the one before it ends.
    OutOfOrder {
        /// Where that one ends.
        free_from: u32,
    },
}

impl fmt::Display for PassageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, start, end, fault } = self;
        write!(f, "passage {place}, {start}..{end}, ")?;
        match fault {
            PassageFault::Empty => f.write_str("has no tokens: leave it out"),
            PassageFault::OutOfRange { tokens } => {
                write!(f, "ends after the prompt, which has {tokens} tokens: shorten it")
            }
            PassageFault::OutOfOrder { free_from } => write!(
                f,
                "begins before {free_from}, where the previous one ends: sort passages by their \
                 start, without overlaps"
            ),
        }
    }
}

impl std::error::Error for PassageError {}

/// Content other than tokens on the pages of a prompt: the place of each page that passages with a content touch, and
/// a digest of those. Nodes keep it with their tokens.
#[derive(Debug)]
pub(crate) struct Marks(Vec<(u32, u128)>);

impl Marks {
    /// Marks of a prompt; `None` if no passage has a content.
    ///
    /// The digest is the first 16 bytes of BLAKE3 over the 16 bytes of each passage's content and its start and end
    /// as 32-bit words, all little-endian.
    pub(crate) fn new(passages: &[Passage], page_size: usize) -> Option<Arc<Self>> {
        let page_size = page_size as u32;
        let mut touched: Vec<(u32, Vec<u8>)> = Vec::new();
        for passage in passages {
            let Some(content) = passage.content else { continue };
            for page in passage.start / page_size..=(passage.end - 1) / page_size {
                if touched.last().is_none_or(|(last, _)| *last < page) {
                    touched.push((page, Vec::new()));
                }
                let bytes = &mut touched.last_mut().expect("it was just pushed").1;
                bytes.extend_from_slice(&content.0.to_le_bytes());
                bytes.extend_from_slice(&passage.start.to_le_bytes());
                bytes.extend_from_slice(&passage.end.to_le_bytes());
            }
        }
        let marks = touched.iter().map(|(page, bytes)| (*page, strong_hash(bytes))).collect();
        (!touched.is_empty()).then(|| Arc::new(Self(marks)))
    }

    /// Predecessor of a page: the page before it, and its content other than tokens.
    ///
    /// Without anything there it is the former key itself, else [that and the digest](PageKey::with_content).
    pub(crate) fn follow(&self, before: PageKey, page: u32) -> PageKey {
        let Some(content) = self.content(page) else { return before };
        if planted(Bug::LeaveContentOutOfKey) {
            return before;
        }
        before.with_content(ContentKey(content))
    }

    /// The digest of what stands on a page besides its tokens, if anything does.
    pub(crate) fn content(&self, page: u32) -> Option<u128> {
        let place = self.0.binary_search_by_key(&page, |&(page, _)| page).ok()?;
        Some(self.0[place].1)
    }

    /// Marks of the pages from one place in the prompt up to another.
    pub(crate) fn within(&self, pages: Range<u32>) -> &[(u32, u128)] {
        let place = |page: u32| self.0.partition_point(|&(marked, _)| marked < page);
        &self.0[place(pages.start)..place(pages.end)]
    }

    /// Hashes the whole pages of a prompt.
    pub(crate) fn hash(
        &self,
        words: &Words,
        root: PageKey,
        tokens: &[Token],
        page_size: usize,
        keys: &mut Vec<PageKey>,
    ) {
        let (mut before, mut hashed) = (root, 0);
        for &(page, _) in &self.0 {
            let start = page as usize * page_size;
            let Some(marked) = tokens.get(start..start + page_size) else { break };
            hash_pages(words, before, &tokens[hashed..start], page_size, keys);
            let follows = self.follow(keys.last().copied().unwrap_or(root), page);
            before = Chain::behind(follows, words).next(marked);
            keys.push(before);
            hashed = start + page_size;
        }
        hash_pages(words, before, &tokens[hashed..], page_size, keys);
    }
}

impl PageKey {
    /// Predecessor of a page with content other than tokens: the key before it, and a digest of that content. It is
    /// the first 16 bytes of BLAKE3 over the bytes `terrace passages 2`, the 16 bytes of this key and those of the
    /// digest, all little-endian.
    #[must_use]
    pub fn with_content(self, digest: ContentKey) -> PageKey {
        let mut bytes = [0; 50];
        bytes[..18].copy_from_slice(b"terrace passages 2");
        bytes[18..34].copy_from_slice(&self.0.to_le_bytes());
        bytes[34..].copy_from_slice(&digest.0.to_le_bytes());
        PageKey(strong_hash(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Namespace, Sequence};

    fn passage(start: u32, end: u32, content: u128) -> Passage {
        Passage { start, end, content: Some(ContentKey(content)), is_whole: false }
    }

    fn keys(page_size: u32, tokens: u32, passages: &[Passage]) -> Vec<PageKey> {
        let root = Namespace::new("tiny-llama", page_size).digest();
        let sequence = Sequence::with_passages(root, page_size, (0..tokens).collect(), passages);
        sequence.expect("sound passages").keys().to_vec()
    }

    // Computed in another language, with another implementation of BLAKE3.
    #[test]
    fn keys_of_passages_match_the_known_answers() {
        let passages = [
            passage(5, 9, 0x0123_4567_89ab_cdef_0011_2233_4455_6677),
            passage(9, 10, 1),
            Passage { start: 12, end: 14, content: None, is_whole: true },
        ];
        let expected = VECTORS.map(PageKey);
        assert_eq!(keys(4, 20, &passages), expected);
        // However the tokens came to be there.
        let root = Namespace::new("tiny-llama", 4).digest();
        for prompt in 14..20 {
            let begun = Sequence::with_passages(root, 4, (0..prompt).collect(), &passages);
            let mut sequence = begun.expect("sound passages");
            (prompt..20).for_each(|token| sequence.extend(&[token]));
            assert_eq!(sequence.keys().to_vec(), expected, "{prompt} tokens of prompt");
        }
    }

    const VECTORS: [u128; 5] = [
        0x2f10_80ac_4cd8_ce4e_9ffe_0a0d_3d66_8f63,
        0x327b_cf6b_4287_35d5_c0be_f4b6_7255_ffa1,
        0xdfb1_a495_5b6a_e427_e348_6641_9cdd_3b53,
        0x906f_a021_fc2f_9072_355f_82b5_0fb0_f3b6,
        0xa505_5df6_d2a8_0d27_0167_7465_766f_ab62,
    ];

    #[test]
    fn a_content_changes_the_keys_from_its_first_page_on_and_no_others() {
        let plain = keys(4, 40, &[]);
        for (start, end) in [(0, 1), (3, 4), (4, 5), (7, 9), (10, 23), (36, 40)] {
            let first = start as usize / 4;
            let one = keys(4, 40, &[passage(start, end, 1)]);
            let other = keys(4, 40, &[passage(start, end, 2)]);
            assert_eq!(one, keys(4, 40, &[passage(start, end, 1)]));
            assert_eq!((&one[..first], &other[..first]), (&plain[..first], &plain[..first]));
            for page in first..10 {
                assert!(one[page] != other[page] && one[page] != plain[page], "{start}, {page}");
            }
        }
        // Where it begins and ends counts too.
        assert_ne!(keys(4, 8, &[passage(1, 3, 1)]), keys(4, 8, &[passage(1, 4, 1)]));
        assert_ne!(keys(4, 8, &[passage(1, 3, 1)]), keys(4, 8, &[passage(2, 3, 1)]));
        assert_ne!(
            keys(4, 8, &[passage(0, 2, 1), passage(2, 4, 2)]),
            keys(4, 8, &[passage(0, 4, 1)])
        );
        // One that stands for itself changes nothing.
        let whole = Passage { start: 3, end: 9, content: None, is_whole: true };
        assert_eq!(keys(4, 40, &[whole]), plain);
    }

    #[test]
    fn a_passage_that_ends_in_the_last_page_counts_once_that_is_full() {
        let root = PageKey(7);
        let grown = |content| {
            let sequence =
                Sequence::with_passages(root, 4, (0..7).collect(), &[passage(5, 7, content)]);
            let mut sequence = sequence.expect("sound passages");
            sequence.extend(&[7, 8]);
            sequence.keys().to_vec()
        };
        assert_eq!((grown(1)[0], grown(1).len()), (grown(2)[0], 2));
        assert_ne!(grown(1)[1], grown(2)[1]);
    }

    #[test]
    fn invalid_passages_are_rejected() {
        let refused = |passages: &[Passage]| {
            let refused = Sequence::with_passages(PageKey(7), 4, (0..8).collect(), passages);
            refused.expect_err("it was taken").to_string()
        };
        assert_eq!(refused(&[passage(3, 3, 1)]), "passage 0, 3..3, has no tokens: leave it out");
        assert_eq!(refused(&[passage(4, 3, 1)]), "passage 0, 4..3, has no tokens: leave it out");
        assert_eq!(
            refused(&[passage(0, 2, 1), passage(7, 9, 1)]),
            "passage 1, 7..9, ends after the prompt, which has 8 tokens: shorten it"
        );
        let unsorted = "passage 1, 1..2, begins before 4, where the previous one ends: sort passages by \
                        their start, without overlaps";
        assert_eq!(refused(&[passage(2, 4, 1), passage(1, 2, 1)]), unsorted);
        let overlaps = [passage(0, 2, 1), passage(1, 2, 1)];
        assert!(refused(&overlaps).contains("begins before 2"));
        assert!(Passage::check_all(&[passage(0, 2, 1), passage(2, 8, 1)], 8).is_ok(), "neighbours");
    }

    #[test]
    fn a_passage_round_trips_through_serde() {
        let whole = Passage { is_whole: true, ..passage(1, 5, 0xab) };
        let text = serde_json::to_string(&whole).unwrap();
        assert_eq!(
            text,
            r#"{"start":1,"end":5,"content":"000000000000000000000000000000ab","is_whole":true}"#
        );
        assert_eq!(serde_json::from_str::<Passage>(&text).unwrap(), whole);
        assert!(serde_json::from_str::<Passage>(r#"{"start":1,"end":5,"content":"ab"}"#).is_err());
    }
}
