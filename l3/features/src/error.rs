//! Errors of a feature store.

use terrace_l3::StoreError;

/// Reason why a sample could not be put, read or released.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FeatureError {
    /// A name that cannot be part of a key.
    #[error("the name of {what} must have 1 to {max} bytes and no slash")]
    Name {
        /// Kind of the name.
        what: &'static str,
        /// Maximum length in bytes.
        max: usize,
    },
    /// A sample's name that cannot be part of a key.
    #[error("the name of a sample must have 1 to {max} bytes")]
    Sample {
        /// Maximum length in bytes.
        max: usize,
    },
    /// Invalid settings.
    #[error("{0}")]
    Config(String),
    /// A sample without tensors, or with too many.
    #[error("a sample must have 1 to {max} tensors, not {found}")]
    TensorCount {
        /// Number of tensors.
        found: usize,
        /// Maximum number.
        max: usize,
    },
    /// Two tensors with the same name.
    #[error("{key} exists twice: the tensors of a sample need different names")]
    DuplicateTensor {
        /// Key of the tensors.
        key: String,
    },
    /// The length of the data does not match the tensor.
    #[error("{tensor} takes {expected} bytes, but {found} were given")]
    Bytes {
        /// Name of the tensor.
        tensor: String,
        /// Length required by its shape and type.
        expected: usize,
        /// Length of the data.
        found: usize,
    },
    /// A shape without a valid size.
    #[error("{tensor} does not fill whole bytes, or is larger than memory can be")]
    Shape {
        /// Name of the tensor.
        tensor: String,
    },
    /// The number of targets differs from the number of tensors.
    #[error("the sample has {expected} tensors, but {found} targets were given")]
    TargetCount {
        /// Number of tensors.
        expected: usize,
        /// Number of targets.
        found: usize,
    },
    /// A put by a consumer.
    #[error("this handle can only consume: set `FeatureConfig::owner` to put samples")]
    NotAProducer,
    /// Another process has taken the number of this producer.
    #[error(
        "this process is no longer producer {owner} of {store}: another one has taken the number, or it was given back; \
         give each producer a number of its own, or none, so that it takes a free one"
    )]
    Fenced {
        /// Name of the store.
        store: String,
        /// Number of the producer.
        owner: u16,
    },
    /// The sample was released, aborted or superseded, or it expired.
    #[error("{key} is gone: it was released, aborted or superseded, or it has expired")]
    Gone {
        /// Key of the generation.
        key: String,
    },
    /// A later put of the same sample won.
    #[error("{key} is too late: a newer put of the sample has finished or is running")]
    Superseded {
        /// Key of the generation that was not put.
        key: String,
    },
    /// The sample was aborted while it was being put.
    #[error("{key} was aborted while it was being put")]
    Aborted {
        /// Key of the generation that was not put.
        key: String,
    },
    /// The ref was not created with the secret, or was changed since.
    #[error("the ref of {key} is not authentic: it was forged or altered, or the secrets differ")]
    Forged {
        /// Claimed key of the generation.
        key: String,
    },
    /// An object in the store was not created with the secret, or was changed since.
    #[error("{what} {key} is not authentic: it was forged or altered, or the secrets differ")]
    ForgedObject {
        /// Kind of the object.
        what: &'static str,
        /// Key that it claims to belong to.
        key: String,
    },
    /// The ref belongs to another store.
    #[error("the ref belongs to the store {found}, this is {expected}")]
    OtherStore {
        /// Name of this store.
        expected: String,
        /// Name of the ref's store.
        found: String,
    },
    /// The sample is larger than the budget.
    #[error(
        "a sample that takes {bytes} bytes of the store is too large: max_resident_bytes, or the capacity of the store, \
         is {max}"
    )]
    TooLarge {
        /// Bytes that the sample takes.
        bytes: u64,
        /// The budget in bytes.
        max: u64,
    },
    /// The budget is used up, and the put may not wait, or not longer.
    #[error(
        "{samples} samples that take {resident} of {max} bytes are not consumed yet, no room for {bytes} \
         more: release consumed samples, or raise max_resident_bytes or samples_max"
    )]
    OverBudget {
        /// Bytes that the sample takes.
        bytes: u64,
        /// Bytes in use.
        resident: u64,
        /// Number of samples in use.
        samples: u64,
        /// The budget in bytes.
        max: u64,
    },
    /// The store had no room for the sample, and the put may not wait, or not longer.
    #[error(
        "{key}: the store has no room for the sample: release consumed samples, or enlarge the store"
    )]
    StoreFull {
        /// Key of the generation.
        key: String,
    },
    /// A tensor is short or damaged, so the sample is unreadable.
    #[error("{key} is damaged, so the sample cannot be read: {error}")]
    Damaged {
        /// Key of the tensor.
        key: String,
        /// Error of the store.
        error: StoreError,
    },
    /// The sample is revoked in this process, but that could not be recorded in the store: until it
    /// is, other processes may read the sample.
    #[error("{key} is revoked in this process, but not in the store: {error}; gc retries")]
    NotRevoked {
        /// Key of the generation.
        key: String,
        /// Error of the store.
        error: StoreError,
    },
    /// The store failed.
    #[error("{key}: {error}")]
    Store {
        /// Key of the failed operation's object.
        key: String,
        /// Error of the store.
        error: StoreError,
    },
}
