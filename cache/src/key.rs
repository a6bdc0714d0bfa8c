//! Namespaces and rolling page keys. Keys outlive processes and machines, so nothing here may
//! depend on either; the vectors at the end of this file pin the format down.

use std::fmt;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_128;

use crate::chain::Chain;
use crate::passage::ContentKey;
use crate::planted::{Bug, planted};
use crate::sequence::Token;

/// 128 bits that name a page together with everything before it: the namespace, all earlier
/// tokens, and the page's own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(pub u128);

impl PageKey {
    /// What a page follows that has more on it than its tokens: the key before it, and a digest of that.
    /// It is `xxh3_128` over the bytes `terrace passages 1`, the 16 bytes of this key and those of the digest,
    /// all little-endian.
    #[must_use]
    pub fn with_content(self, digest: ContentKey) -> PageKey {
        let mut bytes = [0; 50];
        bytes[..18].copy_from_slice(b"terrace passages 1");
        bytes[18..34].copy_from_slice(&self.0.to_le_bytes());
        bytes[34..].copy_from_slice(&digest.0.to_le_bytes());
        PageKey(xxh3_128(&bytes))
    }

    /// The key of the page that holds `tokens` and follows the page named by `self` (or, for the
    /// first page, the namespace whose digest `self` is).
    ///
    /// The top of `chain.rs` says what it is.
    #[must_use]
    pub fn next(self, tokens: &[Token]) -> PageKey {
        Chain::behind(self).next(tokens)
    }
}

/// Hashes the whole pages of `tokens`, which follow the page named by `before`.
pub(crate) fn hash_pages(
    before: PageKey,
    tokens: &[Token],
    page_size: usize,
    keys: &mut Vec<PageKey>,
) {
    hash_each_page(before, tokens, page_size, keys, |_| {});
}

/// The same, and does something with each page on the way.
#[inline(always)]
pub(crate) fn hash_each_page(
    before: PageKey,
    tokens: &[Token],
    page_size: usize,
    keys: &mut Vec<PageKey>,
    on_the_way: impl FnMut(&[Token]),
) {
    let chain = Chain::behind(before);
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

impl fmt::Display for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for PageKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PageKey {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let key = of_hex(&text).map(PageKey);
        key.ok_or_else(|| serde::de::Error::custom("a page key has 32 hexadecimal digits"))
    }
}

/// What 32 hexadecimal digits say. A key has one spelling: a truncated one must not pass for another.
pub(crate) fn of_hex(text: &str) -> Option<u128> {
    let has_digits_alone = text.len() == 32 && !text.starts_with('+');
    u128::from_str_radix(text, 16).ok().filter(|_| has_digits_alone)
}

/// Everything besides tokens that KV depends on. Two namespaces never share a page in any tier,
/// because the digest is the start of every chain of page keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Namespace {
    /// Model and weights: change it whenever the weights change.
    pub model: String,
    /// How KV lies in a page, for example `"layer-first"`.
    #[serde(default)]
    pub layout: String,
    /// The element type of the KV, for example `"bf16"`.
    #[serde(default)]
    pub dtype: String,
    /// Tokens in a page.
    pub page_size: u32,
    /// Into how many tensor-parallel ranks a page's KV is split.
    #[serde(default = "one")]
    pub tensor_ranks: u32,
    /// The adapter (LoRA) that the KV was computed with; empty for none.
    #[serde(default)]
    pub adapter: String,
    /// A tenant's salt; empty for none.
    #[serde(default)]
    pub salt: String,
}

fn one() -> u32 {
    1
}

impl Namespace {
    /// A namespace of the plain model: one rank, no adapter, no salt.
    #[must_use]
    pub fn new(model: impl Into<String>, page_size: u32) -> Self {
        Self {
            model: model.into(),
            layout: String::new(),
            dtype: String::new(),
            page_size,
            tensor_ranks: 1,
            adapter: String::new(),
            salt: String::new(),
        }
    }

    /// The same model under an adapter and a tenant's salt.
    #[must_use]
    pub fn with(&self, adapter: &str, salt: &str) -> Self {
        Self { adapter: adapter.to_owned(), salt: salt.to_owned(), ..self.clone() }
    }

    /// The start of every chain of page keys in this namespace.
    ///
    /// It is `xxh3_128` over the bytes `terrace namespace 2` and the fields in the order of their
    /// declaration: a text as its length (64 bits) and its bytes, a number as 32 bits, all
    /// little-endian. The lengths keep two fields from running into each other. The 2 is the version of how
    /// keys are computed, so that objects stored under another are never mistaken for these.
    #[must_use]
    pub fn digest(&self) -> PageKey {
        self.digest_with(&self.adapter, &self.salt)
    }

    /// The digest that it would have with this adapter and salt instead of its own.
    #[must_use]
    pub fn digest_with(&self, adapter: &str, salt: &str) -> PageKey {
        type Bytes = SmallVec<[u8; 256]>;
        let mut bytes = Bytes::from_slice(b"terrace namespace 2");
        let text = |bytes: &mut Bytes, field: &str| {
            bytes.extend_from_slice(&(field.len() as u64).to_le_bytes());
            bytes.extend_from_slice(field.as_bytes());
        };
        text(&mut bytes, &self.model);
        text(&mut bytes, &self.layout);
        text(&mut bytes, &self.dtype);
        bytes.extend_from_slice(&self.page_size.to_le_bytes());
        bytes.extend_from_slice(&self.tensor_ranks.to_le_bytes());
        text(&mut bytes, adapter);
        if !planted(Bug::LeaveSaltOutOfNamespace) {
            text(&mut bytes, salt);
        }
        PageKey(xxh3_128(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::Sequence;

    fn full() -> Namespace {
        Namespace {
            model: "llama-3-70b@9f2c".to_owned(),
            layout: "layer-first".to_owned(),
            dtype: "bf16".to_owned(),
            page_size: 64,
            tensor_ranks: 8,
            adapter: "sql-lora".to_owned(),
            salt: "tenant-é".to_owned(),
        }
    }

    /// Token `index` of the sequence that the vectors are about: all four of its bytes vary.
    fn token(index: u32) -> Token {
        index.wrapping_mul(2_654_435_761).wrapping_add(7)
    }

    // The values below were computed in another language, with another implementation of XXH3, by what is
    // written here and in `chain.rs`. A change of any of them orphans every page that is stored under the old
    // keys, and has to change the number in the digest of namespaces.

    #[test]
    fn digests_are_what_they_always_were() {
        let vectors = [
            (Namespace::new("", 1), 0xd3e9_ad44_b1d4_9fc8_084c_b77f_3aec_be6b),
            (Namespace::new("tiny-llama", 1), 0xc395_738c_8379_2d8b_ce60_7896_91fb_30a7),
            (Namespace::new("tiny-llama", 16), 0x41ee_d03f_8c8f_b95a_d750_eca2_e195_82f9),
            (Namespace::new("tiny-llama", 256), 0x905f_5335_f981_7bd2_7901_9142_43b4_172b),
            (full(), 0xfb13_9d92_2cb6_b34a_53ac_0dc1_ee89_0224),
        ];
        for (namespace, digest) in vectors {
            assert_eq!(namespace.digest(), PageKey(digest), "{namespace:?}");
        }
    }

    #[test]
    fn key_chains_are_what_they_always_were() {
        let vectors = [
            (1, 0, 0x62e5_260b_96a0_fe78_fbfc_f0ee_bc24_7a50),
            (1, 1, 0x3dc9_2fd0_dcf8_866a_e4aa_b6a7_40b9_4927),
            (1, 9, 0xdb65_cb4c_bb28_b6f8_5d75_cdc2_666f_4110),
            (16, 0, 0x4978_0c6b_471c_5e13_3a4c_159b_204d_87c6),
            (16, 1, 0x7438_3a6c_a97c_464b_262b_8db4_e069_153b),
            (16, 9, 0xc183_0e56_c7b5_2954_eb7a_1779_4114_0b0b),
            (256, 0, 0xc220_af1d_118f_394d_55b2_aa06_7710_c2c6),
            (256, 1, 0xc7d8_6bf5_08b1_d722_dc9d_8cee_9cf3_3b9c),
            (256, 9, 0x8d93_8d61_80f3_1fb2_1898_0ff2_ad5e_a0a9),
        ];
        for (page_size, page, key) in vectors {
            let root = Namespace::new("tiny-llama", page_size).digest();
            let sequence = Sequence::new(root, page_size, (0..10 * page_size).map(token).collect());
            assert_eq!(
                sequence.keys().get(page),
                Some(PageKey(key)),
                "page {page} of {page_size} tokens"
            );
            let chain = sequence.tokens().prompt.chunks(page_size as usize).take(page + 1);
            assert_eq!(chain.fold(root, PageKey::next), PageKey(key), "one by one");
        }
    }

    #[test]
    fn pages_of_any_length_have_keys() {
        let vectors = [
            (3, 0x5b3d_01bd_15de_78ab_b627_d22e_9006_54fb),
            (8, 0xf57f_09c0_3a13_aeaf_ca8d_355d_3da8_453e),
            (12, 0x22e9_969e_85f6_b3ef_c7fe_2130_7fc4_4d06),
        ];
        for (tokens, key) in vectors {
            let page: Vec<Token> = (0..tokens).map(token).collect();
            assert_eq!(PageKey(7).next(&page), PageKey(key), "{tokens} tokens");
        }
        assert_ne!(PageKey(7).next(&[1, 2, 3]), PageKey(7).next(&[1, 2, 3, 0]));
    }

    #[test]
    fn every_field_changes_the_digest() {
        let plain = full();
        let others = [
            Namespace { model: "other".to_owned(), ..plain.clone() },
            Namespace { layout: "other".to_owned(), ..plain.clone() },
            Namespace { dtype: "other".to_owned(), ..plain.clone() },
            Namespace { page_size: 32, ..plain.clone() },
            Namespace { tensor_ranks: 4, ..plain.clone() },
            Namespace { adapter: "other".to_owned(), ..plain.clone() },
            Namespace { salt: "other".to_owned(), ..plain.clone() },
            Namespace { page_size: 8, tensor_ranks: 64, ..plain.clone() },
            plain.with("tenant-é", "sql-lora"),
            plain,
        ];
        let mut digests: Vec<PageKey> = others.iter().map(Namespace::digest).collect();
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), others.len());
    }

    #[test]
    fn fields_do_not_run_into_each_other() {
        let texts = |model: &str, layout: &str, dtype: &str, adapter: &str, salt: &str| {
            let text = str::to_owned;
            let (model, layout, dtype) = (text(model), text(layout), text(dtype));
            let (adapter, salt) = (text(adapter), text(salt));
            Namespace { model, layout, dtype, page_size: 16, tensor_ranks: 1, adapter, salt }
                .digest()
        };
        assert_ne!(texts("ab", "", "", "", ""), texts("a", "b", "", "", ""));
        assert_ne!(texts("m", "ab", "", "", ""), texts("m", "a", "b", "", ""));
        assert_ne!(texts("m", "", "a", "", ""), texts("m", "", "", "a", ""));
        assert_ne!(texts("m", "", "", "ab", ""), texts("m", "", "", "a", "b"));
        assert_ne!(texts("m", "", "", "ab", ""), texts("m", "", "", "", "ab"));
        // A text that looks like the length of another field is still only a text.
        assert_ne!(texts("a\0\0\0\0\0\0\0\0", "", "", "", ""), texts("a", "", "", "", ""));
    }

    #[test]
    fn a_page_key_survives_serde_with_its_leading_zeros() {
        let key = PageKey(0x0059_c4b1_515d_3aa5_59c9_dbc3_ef4f_a726);
        let text = serde_json::to_string(&key).unwrap();
        assert_eq!(text, "\"0059c4b1515d3aa559c9dbc3ef4fa726\"");
        assert_eq!(serde_json::from_str::<PageKey>(&text).unwrap(), key);
        for wrong in
            ["", "xyz", "59c4b1515d3aa559c9dbc3ef4fa726", "+059c4b1515d3aa559c9dbc3ef4fa726"]
        {
            assert!(serde_json::from_value::<PageKey>(wrong.into()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_namespace_survives_serde_and_refuses_what_it_does_not_know() {
        let text = serde_json::to_string(&full()).unwrap();
        assert_eq!(serde_json::from_str::<Namespace>(&text).unwrap(), full());
        let short: Namespace = serde_json::from_str(r#"{"model":"m","page_size":16}"#).unwrap();
        assert_eq!(short, Namespace::new("m", 16));
        // A misspelt field must not silently put two tenants into one namespace.
        let misspelt = r#"{"model":"m","page_size":16,"slat":"tenant"}"#;
        assert!(serde_json::from_str::<Namespace>(misspelt).is_err());
    }
}
