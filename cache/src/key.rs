//! Namespaces and rolling page keys. Keys outlive processes and machines, so nothing here may
//! depend on either; the vectors at the end of this file pin the format down.

use std::fmt;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::planted::{Bug, planted};

/// A token of the model's vocabulary.
pub type Token = u32;

/// 128 bits that name a page together with everything before it: the namespace, all earlier
/// tokens, and the page's own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(pub u128);

/// Collision-resistant hash of 128 bits, even for inputs that are chosen freely.
pub(crate) fn strong_hash(bytes: &[u8]) -> u128 {
    let hash = blake3::hash(bytes);
    u128::from_le_bytes(*hash.as_bytes().first_chunk().expect("it has 32 bytes"))
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
        key.ok_or_else(|| serde::de::Error::custom("a page key must have 32 hexadecimal digits"))
    }
}

/// Value of 32 hexadecimal digits. A key has one spelling: a truncated one must not pass for another.
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
    /// Layout of the KV in a page, for example `"layer-first"`.
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
    /// Secret of all users of an L3. Without it tokens cannot be chosen such that two prompts share a key, of which
    /// L3 would keep one. Empty for none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub secret: String,
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
            secret: String::new(),
        }
    }

    /// The same model under an adapter and a tenant's salt.
    #[must_use]
    pub fn with(&self, adapter: &str, salt: &str) -> Self {
        Self { adapter: adapter.to_owned(), salt: salt.to_owned(), ..self.clone() }
    }

    /// The start of every chain of page keys in this namespace.
    ///
    /// It is the first 16 bytes of BLAKE3 over the bytes `terrace namespace 3` and the fields in the order of their
    /// declaration: a text as its length (64 bits) and its bytes, a number as 32 bits, all
    /// little-endian. The lengths keep two fields from running into each other. The 3 is the version of how
    /// keys are computed, so that objects stored under another are never mistaken for these.
    #[must_use]
    pub fn digest(&self) -> PageKey {
        self.digest_with(&self.adapter, &self.salt)
    }

    /// The digest that it would have with this adapter and salt instead of its own.
    #[must_use]
    pub fn digest_with(&self, adapter: &str, salt: &str) -> PageKey {
        type Bytes = SmallVec<[u8; 256]>;
        let mut bytes = Bytes::from_slice(b"terrace namespace 3");
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
        text(&mut bytes, &self.secret);
        PageKey(strong_hash(&bytes))
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
            secret: "quiet".to_owned(),
        }
    }

    /// Token `index` of the sequence that the vectors are about: all four of its bytes vary.
    fn token(index: u32) -> Token {
        index.wrapping_mul(2_654_435_761).wrapping_add(7)
    }

    // The values below were computed in another language, with another implementation of BLAKE3, by what is
    // written here and in `chain.rs`. A change of any of them orphans every page that is stored under the old
    // keys, and has to change the number in the digest of namespaces.

    #[test]
    fn digests_match_the_known_answers() {
        let vectors = [
            (Namespace::new("", 1), 0x0ad0_6ef4_c195_54ca_a424_d53b_ed6a_c655),
            (Namespace::new("tiny-llama", 1), 0xe85b_e7b2_998c_4a33_d98f_f225_aa3d_c122),
            (Namespace::new("tiny-llama", 16), 0xb4bd_207e_cb3d_d70e_3a54_fa1e_7688_c2ef),
            (Namespace::new("tiny-llama", 256), 0x1521_09cf_02af_abcf_808b_55b4_43f0_d558),
            (full(), 0xf3d4_518f_3df3_60d3_5072_bce2_d9e6_f44a),
        ];
        for (namespace, digest) in vectors {
            assert_eq!(namespace.digest(), PageKey(digest), "{namespace:?}");
        }
    }

    #[test]
    fn key_chains_match_the_known_answers() {
        let vectors = [
            (1, 0, 0x3ab9_bb13_d506_6526_d1f2_e8ff_3a85_609a),
            (1, 1, 0x8746_1254_a7b5_f3e6_f85f_f8d6_e31e_1608),
            (1, 9, 0x2178_484c_132b_0dd8_bee7_b6f5_79df_b82e),
            (16, 0, 0x0fa5_5629_cd06_80c7_c90d_4a96_282e_3ee0),
            (16, 1, 0x15c3_1315_4ddc_672d_081d_bb50_d836_700c),
            (16, 9, 0x96af_7b08_472a_8f32_5757_faaa_e3ed_a6e8),
            (256, 0, 0xe90d_9892_63c2_af18_6641_6d97_b970_6fd8),
            (256, 1, 0x6d70_4c96_27dd_5814_135b_8f98_acc6_e7e1),
            (256, 9, 0xd52d_ba34_ecc1_95df_0a52_6f9f_ee34_ac9b),
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
            let by_one = chain.fold(root, |before, page| before.next(root, page));
            assert_eq!(by_one, PageKey(key), "one by one");
        }
    }

    #[test]
    fn pages_of_any_length_have_keys() {
        let vectors = [
            (3, 0x09b0_8a3c_3487_ce19_32a5_3f61_aae3_326a),
            (8, 0x1bf9_1536_fc89_828f_13f5_443b_0961_dc2a),
            (12, 0xd647_f05e_da9c_f3da_95da_65c8_78fd_113f),
            (20, 0x87e5_a23b_4eb6_2b64_5d78_fda1_8066_d1a1),
        ];
        for (tokens, key) in vectors {
            let page: Vec<Token> = (0..tokens).map(token).collect();
            assert_eq!(PageKey(7).next(PageKey(5), &page), PageKey(key), "{tokens} tokens");
        }
        let of = |page: &[Token]| PageKey(7).next(PageKey(5), page);
        assert_ne!(of(&[1, 2, 3]), of(&[1, 2, 3, 0]));
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
            Namespace { secret: "other".to_owned(), ..plain.clone() },
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
    fn fields_are_delimited_in_the_digest() {
        let texts = |model: &str, layout: &str, dtype: &str, adapter: &str, salt: &str| {
            let text = str::to_owned;
            let (layout, dtype) = (text(layout), text(dtype));
            Namespace { layout, dtype, ..Namespace::new(model, 16) }.digest_with(adapter, salt)
        };
        assert_ne!(texts("ab", "", "", "", ""), texts("a", "b", "", "", ""));
        assert_ne!(texts("m", "ab", "", "", ""), texts("m", "a", "b", "", ""));
        assert_ne!(texts("m", "", "a", "", ""), texts("m", "", "", "a", ""));
        assert_ne!(texts("m", "", "", "ab", ""), texts("m", "", "", "a", "b"));
        assert_ne!(texts("m", "", "", "ab", ""), texts("m", "", "", "", "ab"));
        let secret = Namespace { secret: "ab".to_owned(), ..Namespace::new("m", 16) };
        assert_ne!(texts("m", "", "", "", "ab"), secret.digest());
        // A text that looks like the length of another field is still only a text.
        assert_ne!(texts("a\0\0\0\0\0\0\0\0", "", "", "", ""), texts("a", "", "", "", ""));
    }

    #[test]
    fn a_page_key_round_trips_with_leading_zeros() {
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
    fn a_namespace_round_trips_and_rejects_unknown_fields() {
        let text = serde_json::to_string(&full()).unwrap();
        assert_eq!(serde_json::from_str::<Namespace>(&text).unwrap(), full());
        let short: Namespace = serde_json::from_str(r#"{"model":"m","page_size":16}"#).unwrap();
        assert_eq!(short, Namespace::new("m", 16));
        // A misspelt field must not silently put two tenants into one namespace.
        let misspelt = r#"{"model":"m","page_size":16,"slat":"tenant"}"#;
        assert!(serde_json::from_str::<Namespace>(misspelt).is_err());
    }
}
