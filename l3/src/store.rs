//! The seam between whoever needs pages kept and whatever keeps them.

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

/// What an asynchronous call of a [`Store`] returns.
///
/// Dropping it ends the waiting, not the transfer: what has begun goes on, and keeps the pages lent to
/// it, until the backend has let go of them ([`Arena::returned`]).
pub type Answer<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// One result for each object of a batch, in the batch's order.
pub type Results<T> = Vec<Result<T, StoreError>>;

/// A store of objects, in batches.
///
/// Memory that objects are written from and read into must be registered first, on every backend. A
/// backend answers for each object by itself: one that fails does not fail its neighbours. A page whose
/// transfer has failed may stay lent for a while, as long as the backend cannot exclude that it is still
/// touched ([`Arena::is_lent`], [`Arena::returned`]).
pub trait Store: Send + Sync + fmt::Debug {
    /// Lets the store use the arena until the registration is dropped.
    ///
    /// # Errors
    /// When the arena is registered already, or the transport cannot take it.
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError>;

    /// Which of the objects could be had. [`Presence::Absent`] means that the object is known not to be
    /// there; where that cannot be told, as while its holder is away, the answer is an error.
    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>>;

    /// Stores objects. A result of `Ok` means that the object can be had from now on.
    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>>;

    /// Reads objects. A result of `Ok` means that the target holds exactly the object's verified
    /// bytes; after any other its content is undefined.
    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>>;

    /// Protects objects from eviction. Pinning what one has pinned already changes nothing; what another
    /// owner has pinned is refused with [`StoreError::Pinned`].
    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>>;

    /// Takes back pins.
    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>>;

    /// Removes objects. From then on they cannot be had, even if their bytes linger.
    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>>;

    /// Waits until everything that was put, pinned or removed before would survive a crash, as far as the
    /// backend keeps anything.
    fn flush(&self) -> Answer<'_, Result<(), StoreError>>;

    /// Counters and gauges.
    fn stats(&self) -> StoreStats;

    /// Refuses new calls, waits for those in flight and makes everything durable. Files are closed when
    /// the last handle of the store is dropped.
    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>>;
}

/// An object to store.
#[derive(Debug)]
pub struct Put {
    /// Its name.
    pub id: ObjectId,
    /// Its bytes.
    pub source: Source,
    /// What they are the KV of.
    prefix: Option<PrefixDigest>,
    /// What they came to when somebody looked at them before.
    checksum: Option<u64>,
}

impl Put {
    /// Stores the bytes of `source` as `id`. The name must be proof of the content by itself, as a cryptographic hash
    /// is: pages with keys of [`terrace_cache`] need their [prefix](Self::with_prefix).
    #[must_use]
    pub fn new(id: ObjectId, source: Source) -> Self {
        Self { id, source, prefix: None, checksum: None }
    }

    /// The same put of a page whose key does not prove what it is the KV of: the digest of its prefix does.
    ///
    /// # Panics
    /// If the object has a generation.
    #[must_use]
    pub fn with_prefix(self, prefix: PrefixDigest) -> Self {
        assert_eq!(self.id.generation, 0, "a page has no generations");
        Self { prefix: Some(prefix), ..self }
    }

    /// What the bytes are the KV of.
    #[must_use]
    pub fn prefix(&self) -> Option<PrefixDigest> {
        self.prefix
    }

    /// Stores the bytes of `source`, which `header` describes. A store that writes a [`Put::header`] beside them, like
    /// one on disk, need not look at them again; should they have changed since, whoever reads the object is told so.
    #[must_use]
    pub fn described(header: &Header, source: Source) -> Self {
        Self { id: header.id, source, prefix: header.prefix, checksum: Some(header.checksum) }
    }

    /// The same put once more: sources are shared.
    pub fn share(&self) -> Self {
        Self { source: self.source.share(), ..*self }
    }

    /// What the object is verified by.
    pub fn header(&self) -> Header {
        self.header_with(self.checksum.unwrap_or_else(|| payload_checksum(&self.source)))
    }

    /// The same, if the source is known to have this checksum.
    pub fn header_with(&self, checksum: u64) -> Header {
        Header::with_checksum(self.id, &self.source, checksum).with_prefix(self.prefix)
    }
}

/// An object to read.
#[derive(Debug)]
pub struct Get {
    /// Its name.
    pub id: ObjectId,
    /// Where its bytes go; the object must be exactly as long.
    pub target: Target,
    /// What they must be the KV of.
    pub prefix: Option<PrefixDigest>,
}

impl Get {
    /// Reads `id` into `target`.
    #[must_use]
    pub fn new(id: ObjectId, target: Target) -> Self {
        Self { id, target, prefix: None }
    }

    /// The same get of a page that must be the KV of this prefix. An object that does not prove it is
    /// [corrupt](Mismatch::Prefix).
    #[must_use]
    pub fn with_prefix(self, prefix: PrefixDigest) -> Self {
        Self { prefix: Some(prefix), ..self }
    }

    /// Checks everything about the header of the object but the payload.
    ///
    /// # Errors
    /// Whatever does not fit.
    pub fn verify(&self, header: &[u8; HEADER_BYTES]) -> Result<Header, Mismatch> {
        Header::verify(header, &self.id, self.target.len() as u64)?.verify_prefix(self.prefix)
    }
}

/// How to look for objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExistsOptions {
    /// Start moving objects that are only on SSD to memory, and do not wait for it. A hint: stores without
    /// memory over their SSD do nothing, and neither does a Mooncake cluster.
    pub prefetch_to_memory: bool,
    /// Protect what is found from eviction for the store's lease time. Asking without it never
    /// protects anything.
    pub lease: bool,
}

/// How to store objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOptions {
    /// A pin that the objects have from the first moment on.
    pub pin: Option<Pin>,
    /// Answer only when the objects would survive a crash.
    pub durable: bool,
}

/// How to read objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetOptions {
    /// How long the whole batch may wait for promotions in flight; the store's own setting if `None`.
    pub promotion_wait: Option<Duration>,
}

/// How strongly an object is protected from eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pin {
    /// It is evicted when nothing else is left to evict. It lasts until it is taken back: a store full of
    /// such objects keeps others only for a moment.
    Soft,
    /// It is in use by its owner: neither evicted nor removed, but a put of a higher generation replaces it.
    /// It lasts until it is taken back, or its owner is gone for longer than the store's patience; where
    /// objects survive a restart, so does it.
    Hard(Owner),
}

/// Whose hard pins they are. A process that is to find its pins again when it is started again has the same
/// owner then; an object has one owner at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Owner(pub NonZeroU64);

impl Owner {
    /// The owner of that name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self(NonZeroU64::new(payload_checksum(name.as_bytes())).unwrap_or(NonZeroU64::MIN))
    }
}

/// How insistent a removal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Leaves leased objects alone.
    Plain,
    /// Ignores leases.
    Forced,
    /// Ignores leases and pins, whoever has them: nobody needs the object any more.
    Final,
}

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// In memory.
    Memory,
    /// On disk.
    Disk,
}

/// Whether an object can be had, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It is not there.
    Absent,
    /// It is there.
    Present(Place),
}

impl Presence {
    /// Whether it is there at all.
    #[must_use]
    pub fn is_present(self) -> bool {
        self != Presence::Absent
    }
}

/// What a put came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// The object is new.
    New,
    /// The same object was there already, complete; its bytes were not looked at. It has the pin that
    /// the put asked for.
    AlreadyThere,
}

/// Where a get was served from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Where the bytes came from.
    pub place: Place,
    /// Whether the get waited for the object's promotion.
    pub waited: bool,
}

/// Why an object could not be stored, read or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The buffer's arena is not registered with this store.
    #[error(
        "arena {arena} is not registered with this store: call `Store::register` once, and keep the \
         registration as long as its pages are used"
    )]
    NotRegistered {
        /// Which arena, as its `Debug` output names it.
        arena: u64,
    },
    /// The arena is registered already.
    #[error("arena {arena} is registered with this store already; drop that registration first")]
    AlreadyRegistered {
        /// Which arena, as its `Debug` output names it.
        arena: u64,
    },
    /// There is no such object, or it was removed.
    #[error("no such object")]
    Missing,
    /// Another put of the same object, or of a higher generation of it, is under way.
    #[error("another put of this object has not finished yet")]
    BeingWritten,
    /// A later generation of the object was stored.
    #[error("generation {present} of this object has replaced the requested one")]
    Superseded {
        /// The generation that is there.
        present: u64,
    },
    /// The object is larger than the store's slots.
    #[error("an object of {bytes} bytes is too large: this store takes up to {max}")]
    TooLarge {
        /// The object's size.
        bytes: usize,
        /// The largest that fits.
        max: usize,
    },
    /// The object has not the length of the target.
    #[error("the object has {found} bytes, but the target has {expected}")]
    Length {
        /// The target's length.
        expected: usize,
        /// The object's length.
        found: usize,
    },
    /// Everything there is pinned, leased or in use.
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
        /// What was being done.
        during: &'static str,
        /// The kind of error.
        kind: io::ErrorKind,
        /// What the system said.
        message: Arc<str>,
    },
    /// The call took longer than it may. What it began goes on: see [`Arena::returned`].
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The store has failed too often lately and is left alone for a while.
    #[error(
        "the store is failing and its circuit breaker is open; next attempt in {retry_after:?}"
    )]
    Unavailable {
        /// When it is asked again.
        retry_after: Duration,
    },
    /// The node that the object belongs to does not answer, its disk fails, or it was used with another list of nodes.
    /// Nothing is known about the object.
    #[error(
        "the node that would hold this object does not answer, its disk fails, or it was used with another list of \
         nodes"
    )]
    HolderAway,
    /// The object is in a namespace that this client may not use.
    #[error("this client may not use the object's namespace: see the nodes' list of clients")]
    Forbidden,
    /// The store was shut down.
    #[error("the store is shut down")]
    Closed,
}

impl StoreError {
    /// What the system said while `during`.
    #[must_use]
    pub fn io(during: &'static str, error: &io::Error) -> Self {
        Self::Io { during, kind: error.kind(), message: error.to_string().into() }
    }

    /// Whether the store itself is to blame, rather than the object or the caller.
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
    /// Whether what was asked for may have happened all the same, so that it must be asked for again to
    /// be sure.
    #[must_use]
    pub fn may_have_happened(&self) -> bool {
        self.is_unwell() || *self == Self::HolderAway
    }
}

/// What has worked with one holder of an object has worked; otherwise the one that has it knows why.
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
