//! How a feature store is set up.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::FeatureError;
use super::keys::OWNERS_MAX;
use super::reference::Mac;
use terrace_l3::ReleaseConfig;

/// How one process uses a feature store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeatureConfig {
    /// The store's name, the same for all who use it: keys begin with it.
    pub store: String,
    /// Number of this producer, below [`OWNERS_MAX`]. A producer that is restarted uses the same number again, and takes
    /// care of what it has put before. Of two processes with one number the later one takes it from the other, whose puts
    /// fail from then on ([`FeatureError::Fenced`]). `None` for consumers, and with `find_owner`.
    pub owner: Option<u16>,
    /// Takes a number that no process uses.
    pub find_owner: bool,
    /// Maximum number of bytes that this producer's samples take of the store at a time, put and not yet freed: whole slots
    /// where the store has such, for the tensors and for two notes per sample. The capacity of the store limits it further.
    pub max_resident_bytes: u64,
    /// What a put does when that is reached.
    pub when_full: WhenFull,
    /// How many samples of this producer may be there at a time. A producer that is started again looks
    /// through as many, so it must not be lowered while samples are there.
    pub samples_max: u32,
    /// After this time gc frees what nobody has released; never if `None`.
    pub max_hold_ms: Option<u64>,
    /// A release leaves the sample, for further epochs; it goes by an abort, a supersession, or
    /// `max_hold_ms`. The choice travels on the refs.
    pub retain_on_release: bool,
    /// Puts are answered only when they would survive a crash, where the store survives one.
    pub durable: bool,
    /// How often a waiting put looks whether others have consumed something.
    pub poll_ms: u64,
    /// Time after which gc looks at a sample again that it found to be whole. Each look costs a few requests to the store.
    pub recheck_ms: u64,
    /// How failed frees are repeated and how many are remembered.
    pub free: ReleaseConfig,
    /// What all who use the store know, and nobody else. With it, refs, tensors and notes that were forged or
    /// altered are refused. It is never written anywhere.
    #[serde(skip)]
    pub secret: Option<Secret>,
}

/// What a put does when the budget is used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// It fails at once.
    Refuse,
    /// It waits for so long until enough is consumed, then it fails.
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
            free: ReleaseConfig::default(),
            secret: None,
        }
    }
}

impl FeatureConfig {
    /// Somebody who only consumes.
    #[must_use]
    pub fn consumer(store: impl Into<String>) -> Self {
        Self { store: store.into(), ..Self::default() }
    }

    /// The producer of that number.
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

/// A shared secret. It is not printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    refs: [u8; 32],
    notes: [u8; 32],
    tensors: [u8; 32],
}

impl Secret {
    /// Made of any bytes; those that are easily guessed make a secret that is.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        Self {
            refs: blake3::derive_key("terrace 2026 authentication of feature refs 3", bytes),
            notes: blake3::derive_key("terrace 2026 authentication of feature notes", bytes),
            tensors: blake3::derive_key("terrace 2026 authentication of feature tensors", bytes),
        }
    }

    /// Begins the code of a ref.
    pub(super) fn for_refs(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.refs)
    }

    /// Begins the code of a note.
    pub(super) fn for_notes(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.notes)
    }

    /// The code of the bytes of all tensors.
    pub(super) fn of_contents(&self, contents: &[Mac]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.tensors);
        for Mac(content) in contents {
            hasher.update(content.as_bytes());
        }
        hasher.finalize().into()
    }

    /// The code of a tensor's bytes.
    pub(super) fn of_tensor(&self, bytes: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.tensors, bytes)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}
