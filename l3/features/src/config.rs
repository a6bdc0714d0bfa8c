//! Configuration of a feature store.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::FeatureError;
use super::keys::OWNERS_MAX;
use super::reference::Mac;

/// Configuration of a feature store in one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeatureConfig {
    /// Name of the store, the same for all its users: keys begin with it.
    pub store: String,
    /// Number of this producer, below [`OWNERS_MAX`]. A restarted producer uses the same number
    /// again and takes over the samples that it put before. If two processes use one number, the
    /// later one takes it over, and puts of the earlier one fail ([`FeatureError::Fenced`]). `None`
    /// for consumers, and with `find_owner`.
    pub owner: Option<u16>,
    /// Use a number that no other process uses.
    pub find_owner: bool,
    /// Maximum number of bytes that this producer's samples take of the store, put and not yet
    /// freed: whole slots where the store has them, for the tensors and for two notes per sample.
    /// The capacity of the store is a further limit.
    pub max_resident_bytes: u64,
    /// Behaviour of a put at this limit.
    pub when_full: WhenFull,
    /// Maximum number of this producer's samples. A restarted producer scans as many records, so do
    /// not lower the limit while samples exist.
    pub samples_max: u32,
    /// Time after which gc frees samples that were not released; `None` for never.
    pub max_hold_ms: Option<u64>,
    /// Keep released samples for further epochs, until an abort, a supersession, or `max_hold_ms`.
    /// The refs carry this choice.
    pub retain_on_release: bool,
    /// Acknowledge puts only when they would survive a crash, if the store is persistent.
    pub durable: bool,
    /// Interval at which a waiting put checks whether consumers have released samples.
    pub poll_ms: u64,
    /// Time after which gc checks a complete sample again. Each check costs a few requests to the
    /// store.
    pub recheck_ms: u64,
    /// Retries of failed frees.
    pub free: FreeConfig,
    /// Secret of all users of the store. With it, forged or altered refs, tensors and notes are
    /// refused. It is never written anywhere.
    #[serde(skip)]
    pub secret: Option<Secret>,
}

/// Retries of failed frees, and limits on what is remembered of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FreeConfig {
    /// Delay before the first retry, in milliseconds. It doubles with each further failure.
    pub retry_ms: u64,
    /// Maximum delay between retries, in milliseconds.
    pub retry_max_ms: u64,
    /// Maximum number of generations that one round retries.
    pub retry_batch_max: u32,
    /// Maximum number of other producers' generations that wait for a retry. Beyond it, the oldest are left to their
    /// producer.
    pub parked_max: u32,
    /// Maximum number of freed generations that are remembered; beyond it the oldest is forgotten.
    pub tombstones_max: u32,
}

impl Default for FreeConfig {
    fn default() -> Self {
        Self {
            retry_ms: 100,
            retry_max_ms: 30_000,
            retry_batch_max: 256,
            parked_max: 65_536,
            tombstones_max: 65_536,
        }
    }
}

/// Behaviour of a put when the budget is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// Fails at once.
    Refuse,
    /// Waits up to this time for consumers, then fails.
    WaitMs(u64),
}

impl Default for FeatureConfig {
    fn default() -> Self {
        Self {
            store: "features".to_owned(),
            owner: None,
            find_owner: false,
            max_resident_bytes: 4 << 30,
            when_full: WhenFull::WaitMs(600_000),
            samples_max: 4096,
            max_hold_ms: Some(1_800_000),
            retain_on_release: false,
            durable: false,
            poll_ms: 10,
            recheck_ms: 5_000,
            free: FreeConfig::default(),
            secret: None,
        }
    }
}

impl FeatureConfig {
    /// Configuration of a consumer.
    #[must_use]
    pub fn consumer(store: impl Into<String>) -> Self {
        Self { store: store.into(), ..Self::default() }
    }

    /// Configuration of the producer with this number.
    #[must_use]
    pub fn producer(store: impl Into<String>, owner: u16) -> Self {
        Self { store: store.into(), owner: Some(owner), ..Self::default() }
    }

    pub(super) fn check(&self) -> Result<(), FeatureError> {
        if self.find_owner && self.owner.is_some() {
            let text = "a producer has a number, or takes a free one: set owner or find_owner";
            return Err(FeatureError::Config(text.to_owned()));
        }
        if self.owner.is_some_and(|owner| owner >= OWNERS_MAX) {
            return Err(FeatureError::Config(format!("owner must be a number below {OWNERS_MAX}")));
        }
        if self.samples_max == 0 {
            return Err(FeatureError::Config("samples_max must be at least 1".to_owned()));
        }
        Ok(())
    }
}

/// A shared secret. Its `Debug` output hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    refs: [u8; 32],
    notes: [u8; 32],
    tensors: [u8; 32],
}

impl Secret {
    /// Creates a secret from any bytes. It is only as hard to guess as they are.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        Self {
            refs: blake3::derive_key("terrace 2026 authentication of feature refs 3", bytes),
            notes: blake3::derive_key("terrace 2026 authentication of feature notes", bytes),
            tensors: blake3::derive_key("terrace 2026 authentication of feature tensors", bytes),
        }
    }

    /// Starts the MAC of a ref.
    pub(super) fn for_refs(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.refs)
    }

    /// Starts the MAC of a note.
    pub(super) fn for_notes(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.notes)
    }

    /// MAC over the MACs of all tensors.
    pub(super) fn of_contents(&self, contents: &[Mac]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.tensors);
        for Mac(content) in contents {
            hasher.update(content.as_bytes());
        }
        hasher.finalize().into()
    }

    /// MAC of a tensor's bytes.
    pub(super) fn of_tensor(&self, bytes: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.tensors, bytes)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}
