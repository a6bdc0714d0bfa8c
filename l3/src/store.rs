//! The interface of L3 stores.

use std::fmt;
use std::future::Future;
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrace_cache::PrefixDigest;

use crate::arena::{Arena, Source, Target};
use crate::object::{HEADER_BYTES, Header, Mismatch, ObjectId, payload_checksum};
use crate::registry::Registration;
use crate::stats::StoreStats;

/// Future that an asynchronous call of a [`Store`] returns.
///
/// Dropping it ends the wait, not the transfer: an operation that has begun continues, and keeps
/// its pages lent until the backend has released them ([`Arena::returned`]).
pub type Answer<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// One result per object of a batch, in the batch's order.
pub type Results<T> = Vec<Result<T, StoreError>>;

/// A store of objects, in batches.
///
/// Memory that objects are written from and read into must be registered first, on every backend.
/// Each object has its own result: a failure does not affect its neighbours. A page whose transfer
/// failed may stay lent as long as the backend cannot exclude further access to it
/// ([`Arena::is_lent`], [`Arena::returned`]).
pub trait Store: Send + Sync + fmt::Debug {
    /// Lets the store use the arena until the registration is dropped.
    ///
    /// # Errors
    /// If the arena is registered already, or the transport cannot use it.
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError>;

    /// Looks up objects. [`Presence::Absent`] means that the object is known to be absent; if that
    /// is unknown, for example while its holder does not answer, the result is an error.
    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>>;

    /// Stores objects. `Ok` means that the object can be read from now on.
    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>>;

    /// Reads objects. `Ok` means that the target holds exactly the object's verified bytes;
    /// otherwise its content is undefined.
    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>>;

    /// Protects objects from eviction. Pinning again has no effect; an object that another owner
    /// has pinned is refused with [`StoreError::Pinned`].
    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>>;

    /// Removes pins.
    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>>;

    /// Removes objects. They cannot be read afterwards, even if their bytes remain for a while.
    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>>;

    /// Waits until all earlier puts, pins and removals would survive a crash, as far as the backend
    /// is persistent.
    fn flush(&self) -> Answer<'_, Result<(), StoreError>>;

    /// Returns counters and gauges.
    fn stats(&self) -> StoreStats;

    /// Refuses new calls, waits for those in flight and makes everything durable. Files are closed
    /// when the last handle of the store is dropped.
    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>>;
}

/// An object to store.
#[derive(Debug)]
pub struct Put {
    /// Id of the object.
    pub id: ObjectId,
    /// Its bytes.
    pub source: Source,
    /// Prefix that the bytes are the KV of.
    prefix: Option<PrefixDigest>,
    /// Checksum of the bytes, if it was computed before.
    checksum: Option<u64>,
}

impl Put {
    /// Stores the bytes of `source` as `id`. The id must prove the content by itself, as a
    /// cryptographic hash does: pages with keys of [`terrace_cache`] need their
    /// [prefix](Self::with_prefix).
    #[must_use]
    pub fn new(id: ObjectId, source: Source) -> Self {
        Self { id, source, prefix: None, checksum: None }
    }

    /// Adds the digest of the prefix to the put of a page whose key alone does not prove its
    /// content.
    ///
    /// # Panics
    /// If the object has a generation.
    #[must_use]
    pub fn with_prefix(self, prefix: PrefixDigest) -> Self {
        assert_eq!(self.id.generation, 0, "a page has no generations");
        Self { prefix: Some(prefix), ..self }
    }

    /// Prefix that the bytes are the KV of.
    #[must_use]
    pub fn prefix(&self) -> Option<PrefixDigest> {
        self.prefix
    }

    /// Stores the bytes of `source`, which `header` describes. A store that writes [`Put::header`]
    /// beside them, such as a disk, need not compute the checksum again; if the bytes have changed
    /// since, readers detect it.
    #[must_use]
    pub fn described(header: &Header, source: Source) -> Self {
        Self { id: header.id, source, prefix: header.prefix, checksum: Some(header.checksum) }
    }

    /// Copies the put; the source is shared.
    pub fn share(&self) -> Self {
        Self { source: self.source.share(), ..*self }
    }

    /// Header that verifies the object.
    pub fn header(&self) -> Header {
        self.header_with(self.checksum.unwrap_or_else(|| payload_checksum(&self.source)))
    }

    /// Header of the object, if the source is known to have this checksum.
    pub fn header_with(&self, checksum: u64) -> Header {
        Header::with_checksum(self.id, &self.source, checksum).with_prefix(self.prefix)
    }
}

/// An object to read.
#[derive(Debug)]
pub struct Get {
    /// Id of the object.
    pub id: ObjectId,
    /// Target of its bytes; the object must be exactly as long.
    pub target: Target,
    /// Prefix that they must be the KV of.
    pub prefix: Option<PrefixDigest>,
}

impl Get {
    /// Reads `id` into `target`.
    #[must_use]
    pub fn new(id: ObjectId, target: Target) -> Self {
        Self { id, target, prefix: None }
    }

    /// Requires the page to be the KV of this prefix. An object that does not prove it is
    /// [corrupt](Mismatch::Prefix).
    #[must_use]
    pub fn with_prefix(self, prefix: PrefixDigest) -> Self {
        Self { prefix: Some(prefix), ..self }
    }

    /// Verifies the header of the object, without the payload.
    ///
    /// # Errors
    /// The first part that does not match.
    pub fn verify(&self, header: &[u8; HEADER_BYTES]) -> Result<Header, Mismatch> {
        Header::verify(header, &self.id, self.target.len() as u64)?.verify_prefix(self.prefix)
    }
}

/// Options of a lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExistsOptions {
    /// Start to promote objects that are only on SSD to memory, without waiting for it. A hint:
    /// stores without memory over their SSD ignore it, and so does a Mooncake cluster.
    pub prefetch_to_memory: bool,
    /// Protect found objects from eviction for the store's lease time. A lookup without it never
    /// protects anything.
    pub lease: bool,
}

/// Options of a put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// Pin that the objects have from the first moment on.
    pub pin: Option<Pin>,
    /// Return only when the objects would survive a crash.
    pub durable: bool,
}

/// Options of a get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// Maximum wait of the whole batch for promotions in flight; the store's own setting if `None`.
    pub promotion_wait: Option<Duration>,
}

/// Kind of protection from eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pin {
    /// Evicted only if there is no other victim. Lasts until it is removed: a store full of such
    /// objects keeps others only briefly.
    Soft,
    /// In use by its owner: neither evicted nor removed, but replaced by a put of a higher
    /// generation. Lasts until it is removed, or until its owner has been gone for longer than the
    /// store's patience. Survives a restart if the objects do.
    Hard(Owner),
}

/// Owner of hard pins. A process that must find its pins after a restart uses the same owner again.
/// An object has one owner at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Owner(pub NonZeroU64);

impl Owner {
    /// Owner with this name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self(NonZeroU64::new(payload_checksum(name.as_bytes())).unwrap_or(NonZeroU64::MIN))
    }
}

/// Strength of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Refused for leased objects.
    Plain,
    /// Ignores leases.
    Forced,
    /// Ignores leases and all pins: the object is consumed.
    Final,
}

/// Tier that holds the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// In memory.
    Memory,
    /// On disk.
    Disk,
}

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// The object is absent.
    Absent,
    /// The object can be read.
    Present(Place),
}

impl Presence {
    /// Returns true for [`Presence::Present`].
    #[must_use]
    pub fn is_present(self) -> bool {
        self != Presence::Absent
    }
}

/// Result of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The object is new.
    New,
    /// The same object was present; its bytes were not compared. It now has the pin of the put.
    AlreadyThere,
}

/// Result of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Tier that the bytes came from.
    pub place: Place,
    /// True if the get waited for a promotion.
    pub waited: bool,
}

/// Reason why an object could not be stored, read or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The buffer's arena is not registered with this store.
    #[error(
        "arena {arena} is not registered with this store: call `Store::register` once, and keep the \
         registration as long as its pages are used"
    )]
    NotRegistered {
        /// Id of the arena, as in its `Debug` output.
        arena: u64,
    },
    /// The arena is registered already.
    #[error("arena {arena} is registered with this store already; drop that registration first")]
    AlreadyRegistered {
        /// Id of the arena, as in its `Debug` output.
        arena: u64,
    },
    /// The object is absent.
    #[error("no such object")]
    Missing,
    /// Another put of the same object, or of a higher generation of it, is in flight.
    #[error("another put of this object has not finished yet")]
    BeingWritten,
    /// A later generation of the object was stored.
    #[error("generation {present} of this object has replaced the requested one")]
    Superseded {
        /// Generation that is stored.
        present: u64,
    },
    /// The object is larger than the store's slots.
    #[error("an object of {bytes} bytes is too large: this store takes up to {max}")]
    TooLarge {
        /// Size of the object.
        bytes: usize,
        /// Maximum size.
        max: usize,
    },
    /// The object and the target differ in length.
    #[error("the object has {found} bytes, but the target has {expected}")]
    Length {
        /// Length of the target.
        expected: usize,
        /// Length of the object.
        found: usize,
    },
    /// All objects are pinned, leased or in use.
    #[error("the store is full of objects that may not be evicted")]
    Full,
    /// A lease protects the object from plain removal.
    #[error("the object is leased; wait, or remove it by force")]
    Leased,
    /// A hard pin protects the object from removal.
    #[error("the object is pinned; unpin it first")]
    Pinned,
    /// The object is not pinned.
    #[error("the object has no such pin")]
    NotPinned,
    /// The object did not verify and was removed.
    #[error("the object was corrupt and has been removed: {0}")]
    Corrupt(#[from] Mismatch),
    /// The medium failed.
    #[error("{during}: {message}")]
    Io {
        /// Operation that failed.
        during: &'static str,
        /// Kind of error.
        kind: io::ErrorKind,
        /// Message of the system.
        message: Arc<str>,
    },
    /// The call has exceeded its deadline. The operation continues: see [`Arena::returned`].
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The store has failed too often recently, and the circuit breaker is open.
    #[error(
        "the store is failing and its circuit breaker is open; next attempt in {retry_after:?}"
    )]
    Unavailable {
        /// Time until the next attempt.
        retry_after: Duration,
    },
    /// The node that owns the object does not answer, its disk fails, or it was used with another
    /// list of nodes. The state of the object is unknown.
    #[error(
        "the node that would hold this object does not answer, its disk fails, or it was used with another list of \
         nodes"
    )]
    HolderAway,
    /// This client may not use the object's namespace.
    #[error("this client may not use the object's namespace: see the nodes' list of clients")]
    Forbidden,
    /// The store is shut down.
    #[error("the store is shut down")]
    Closed,
}

impl StoreError {
    /// Creates [`StoreError::Io`] from a system error.
    #[must_use]
    pub fn io(during: &'static str, error: &io::Error) -> Self {
        Self::Io { during, kind: error.kind(), message: error.to_string().into() }
    }

    /// Returns true if the store itself has failed, rather than the object or the caller being at
    /// fault.
    #[must_use]
    pub fn is_unwell(&self) -> bool {
        match self {
            Self::Io { .. } | Self::TimedOut(_) | Self::Unavailable { .. } => true,
            Self::NotRegistered { .. }
            | Self::AlreadyRegistered { .. }
            | Self::Missing
            | Self::BeingWritten
            | Self::Superseded { .. }
            | Self::TooLarge { .. }
            | Self::Length { .. }
            | Self::Full
            | Self::Leased
            | Self::Pinned
            | Self::NotPinned
            | Self::Corrupt(_)
            | Self::HolderAway
            | Self::Forbidden
            | Self::Closed => false,
        }
    }
    /// Returns true if the operation may have taken effect all the same, so that it must be
    /// repeated to be sure.
    #[must_use]
    pub fn may_have_happened(&self) -> bool {
        self.is_unwell() || *self == Self::HolderAway
    }
}

/// Merges the results of two holders of an object: success if either succeeded, else the error of
/// the one that has the object.
pub fn either(
    one: Result<(), StoreError>,
    other: Result<(), StoreError>,
) -> Result<(), StoreError> {
    match (one, other) {
        (Ok(()), _) | (_, Ok(())) => Ok(()),
        (Err(StoreError::Missing | StoreError::HolderAway), other) => other,
        (one, Err(_)) => one,
    }
}
