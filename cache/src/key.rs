//! Namespaces and rolling page keys. Keys outlive processes and machines, so nothing here may
//! depend on either; the vectors at the end of this file pin the format down.

use std::fmt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::sequence::Token;

/// The largest page, in tokens.
pub(crate) const PAGE_SIZE_MAX: usize = 256;

/// 128 bits that name a page together with everything before it: the namespace, all earlier
/// tokens, and the page's own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(pub u128);

impl PageKey {
    /// The key of the page that holds `tokens` and follows the page named by `self` (or, for the
    /// first page, the namespace whose digest `self` is).
    ///
    /// It is `xxh3_128` over the 16 bytes of the former key and the tokens as 32-bit words, all
    /// little-endian.
    #[must_use]
    pub fn next(self, tokens: &[Token]) -> PageKey {
        let mut bytes = [0u8; 16 + 4 * PAGE_SIZE_MAX];
        let length = 16 + 4 * tokens.len();
        bytes[..16].copy_from_slice(&self.0.to_le_bytes());
        for (word, token) in bytes[16..length].chunks_exact_mut(4).zip(tokens) {
            word.copy_from_slice(&token.to_le_bytes());
        }
        PageKey(xxh3_128(&bytes[..length]))
    }
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
        u128::from_str_radix(&text, 16).map(PageKey).map_err(serde::de::Error::custom)
    }
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
    /// It is `xxh3_128` over the bytes `terrace namespace 1` and the fields in the order of their
    /// declaration: a text as its length (64 bits) and its bytes, a number as 32 bits, all
    /// little-endian. The lengths keep two fields from running into each other.
    #[must_use]
    pub fn digest(&self) -> PageKey {
        let mut bytes = b"terrace namespace 1".to_vec();
        let text = |bytes: &mut Vec<u8>, field: &str| {
            bytes.extend_from_slice(&(field.len() as u64).to_le_bytes());
            bytes.extend_from_slice(field.as_bytes());
        };
        text(&mut bytes, &self.model);
        text(&mut bytes, &self.layout);
        text(&mut bytes, &self.dtype);
        bytes.extend_from_slice(&self.page_size.to_le_bytes());
        bytes.extend_from_slice(&self.tensor_ranks.to_le_bytes());
        text(&mut bytes, &self.adapter);
        text(&mut bytes, &self.salt);
        PageKey(xxh3_128(&bytes))
    }
}
