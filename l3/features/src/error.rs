//! What can go wrong with features.

use terrace_l3::StoreError;

/// Why a sample could not be put, read or released.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FeatureError {
    /// A name that cannot be part of a key.
    #[error("the name of {what} must have 1 to {max} bytes and no slash")]
    Name {
        /// Whose name.
        what: &'static str,
        /// The longest possible.
        max: usize,
    },
    /// A sample's name that cannot be part of a key.
    #[error("the name of a sample must have 1 to {max} bytes")]
    Sample {
        /// The longest possible.
        max: usize,
    },
    /// Settings that cannot work.
    #[error("{0}")]
    Config(String),
    /// A sample without tensors, or with too many.
    #[error("a sample must have 1 to {max} tensors, not {found}")]
    TensorCount {
        /// How many there are.
        found: usize,
        /// The most possible.
        max: usize,
    },
    /// Two tensors of the same name.
    #[error("{key} exists twice: the tensors of a sample need different names")]
    DuplicateTensor {
        /// The name, within the sample.
        key: String,
    },
    /// Bytes that are not those of such a tensor.
    #[error("{tensor} takes {expected} bytes, but {found} were given")]
    Bytes {
        /// The tensor's name.
        tensor: String,
        /// What its shape and type take.
        expected: usize,
        /// What there is.
        found: usize,
    },
    /// A shape that has no size.
    #[error("{tensor} does not fill whole bytes, or is larger than memory can be")]
    Shape {
        /// The tensor's name.
        tensor: String,
    },
    /// Not as many targets as tensors.
    #[error("the sample has {expected} tensors, but {found} targets were given")]
    TargetCount {
        /// The sample's tensors.
        expected: usize,
        /// The targets.
        found: usize,
    },
    /// A put by somebody who only consumes.
    #[error("this handle can only consume: set `FeatureConfig::owner` to put samples")]
    NotAProducer,
    /// Another process has taken the number of this producer.
    #[error(
        "this process is no longer producer {owner} of {store}: another one has taken the number, or it was given back; \
         give each producer a number of its own, or none, so that it takes a free one"
    )]
    Fenced {
        /// The store.
        store: String,
        /// The number.
        owner: u16,
    },
    /// The sample was released, aborted, superseded, or freed because nobody released it in time.
    #[error("{key} is gone: it was released, aborted or superseded, or it has expired")]
    Gone {
        /// The generation of the sample.
        key: String,
    },
    /// A later put of the same sample won.
    #[error("{key} is too late: a newer put of the sample has finished or is running")]
    Superseded {
        /// The generation that was not put.
        key: String,
    },
    /// The sample was aborted while it was being put.
    #[error("{key} was aborted while it was being put")]
    Aborted {
        /// The generation that was not put.
        key: String,
    },
    /// The ref was not made by somebody who knows the secret, or was changed since.
    #[error("the ref of {key} is not authentic: it was forged or altered, or the secrets differ")]
    Forged {
        /// What the ref claims to be.
        key: String,
    },
    /// Something in the store was not made by somebody who knows the secret, or was changed since.
    #[error("{what} {key} is not authentic: it was forged or altered, or the secrets differ")]
    ForgedObject {
        /// What it is said to be.
        what: &'static str,
        /// Whose it is said to be.
        key: String,
    },
    /// The ref belongs to another store.
    #[error("the ref belongs to the store {found}, this is {expected}")]
    OtherStore {
        /// This store's name.
        expected: String,
        /// The ref's.
        found: String,
    },
    /// The sample is larger than the budget.
    #[error(
        "a sample that takes {bytes} bytes of the store is too large: max_resident_bytes, or the capacity of the store, \
         is {max}"
    )]
    TooLarge {
        /// What the sample takes.
        bytes: u64,
        /// The budget.
        max: u64,
    },
    /// The budget is used up, and the choice was not to wait, or not for longer.
    #[error(
        "{samples} samples that take {resident} of {max} bytes are not consumed yet, no room for {bytes} \
         more: release consumed samples, or raise max_resident_bytes or samples_max"
    )]
    OverBudget {
        /// What the sample takes.
        bytes: u64,
        /// What is there.
        resident: u64,
        /// How many samples that are.
        samples: u64,
        /// The budget.
        max: u64,
    },
    /// The store had no room for the sample, and the choice was not to wait, or not for longer.
    #[error(
        "{key}: the store has no room for the sample: release consumed samples, or enlarge the store"
    )]
    StoreFull {
        /// The generation of the sample.
        key: String,
    },
    /// A tensor is short or damaged, and with it the sample.
    #[error("{key} is damaged, so the sample cannot be read: {error}")]
    Damaged {
        /// The tensor.
        key: String,
        /// What the store says.
        error: StoreError,
    },
    /// The sample is given up here, but the store could not be told: other processes may read it until it
    /// can be.
    #[error("{key} is revoked in this process, but not in the store: {error}; gc retries")]
    NotRevoked {
        /// The generation of the sample.
        key: String,
        /// What the store said.
        error: StoreError,
    },
    /// The store failed.
    #[error("{key}: {error}")]
    Store {
        /// What it failed at.
        key: String,
        /// What it says.
        error: StoreError,
    },
}
