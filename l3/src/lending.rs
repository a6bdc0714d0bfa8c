//! Stores that lend their own memory, so that objects are transferred without a copy.
//!
//! A node serves such a store: it sends objects directly from the store's slots, and receives them
//! directly into slots. Objects that have no slot in memory use scratch pages.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::arena::{Arena, Source, Target};
use crate::catalogue::NamespaceShare;
use crate::memory::{MemoryStore, Reservation, SlotLoan};
use crate::object::{HEADER_BYTES, Header, ObjectId};
use crate::pool::{PagePool, PooledPage};
use crate::registry::Registration;
use crate::store::{
    Answer, GetOptions, Owner, Pin, Place, PutOptions, Results, Served, Store, StoreError, Stored,
};

/// A store that lends the memory of its objects, and accepts objects in memory that it has offered.
pub trait LendingStore: Store {
    /// Maximum object size.
    fn object_bytes_max(&self) -> usize;

    /// Arena of the slots.
    fn slots(&self) -> &Arena;

    /// Allocates scratch pages, if the store needs any.
    ///
    /// # Errors
    /// If the memory cannot be allocated or registered.
    fn scratch(&self, _pages: u32) -> Result<Option<Scratch>, StoreError> {
        Ok(None)
    }

    /// Lends objects, each with its required length. `None` stands for an object that needs a scratch
    /// page when there is none; it must be requested again.
    fn lend<'a>(
        &'a self,
        wanted: &'a [(ObjectId, usize)],
        options: GetOptions,
        scratch: Option<ScratchUse<'a>>,
    ) -> Answer<'a, Results<Option<LentObject>>>;

    /// Decides whether an offered object is wanted, and where its bytes can go.
    fn offer<'a>(
        &'a self,
        id: &'a ObjectId,
        length: usize,
        pin: Option<Pin>,
        scratch: Option<ScratchUse<'a>>,
    ) -> Answer<'a, Result<Offered, StoreError>>;

    /// Stores objects whose bytes have arrived. The future must not be dropped before it is complete.
    fn accept(&self, filled: Vec<Filled>, options: PutOptions) -> Answer<'_, Results<Stored>>;

    /// Verifies an object that a reader could not verify, and removes it if it is damaged.
    fn inspect(&self, id: &ObjectId);

    /// Returns true if room for an offered object can only be made by removing a pin or a lease.
    fn is_stuck(&self) -> bool;

    /// Limits groups of namespaces to shares of the slots.
    fn set_shares(&self, shares: &[NamespaceShare]);

    /// Marks the owner as connected: its pins last until [`LendingStore::let_go`].
    fn hold(&self, owner: Owner);

    /// Marks the owner as disconnected: its pins last for `patience`, unless it returns.
    fn let_go(&self, owner: Owner, patience: Duration);
}

/// Scratch pages, and the quota of their user.
#[derive(Clone, Copy, Debug)]
pub struct ScratchUse<'a> {
    /// The pages.
    pub pages: &'a Scratch,
    /// Quota of the user.
    pub share: &'a Share,
}

impl LendingStore for MemoryStore {
    fn object_bytes_max(&self) -> usize {
        Self::object_bytes_max(self)
    }

    fn slots(&self) -> &Arena {
        self.arena()
    }

    fn lend<'a>(
        &'a self,
        wanted: &'a [(ObjectId, usize)],
        _: GetOptions,
        _: Option<ScratchUse<'a>>,
    ) -> Answer<'a, Results<Option<LentObject>>> {
        let lend = |(id, length): &(ObjectId, usize)| {
            Self::lend(self, id, *length).map(|slot| Some(LentObject::from_slot(slot, false)))
        };
        Box::pin(async move { wanted.iter().map(lend).collect() })
    }

    fn offer<'a>(
        &'a self,
        id: &'a ObjectId,
        length: usize,
        pin: Option<Pin>,
        _: Option<ScratchUse<'a>>,
    ) -> Answer<'a, Result<Offered, StoreError>> {
        Box::pin(async move {
            match self.reserve(*id, length, pin) {
                Ok(Some(slot)) => Ok(Offered::Room(Room::Slot(slot))),
                Ok(None) => {
                    self.count_put(&Ok(Stored::AlreadyThere), length);
                    Ok(Offered::There)
                }
                Err(StoreError::Full) => Ok(Offered::NoRoom),
                Err(error) => Err(error),
            }
        })
    }

    fn accept(&self, filled: Vec<Filled>, _: PutOptions) -> Answer<'_, Results<Stored>> {
        let accept = |Filled { header, room }| {
            let Room::Slot(slot) = room else { unreachable!("a memory store offers slots only") };
            slot.publish(&header, false);
            self.count_put(&Ok(Stored::New), header.length as usize);
            Ok(Stored::New)
        };
        Box::pin(async move { filled.into_iter().map(accept).collect() })
    }

    fn inspect(&self, id: &ObjectId) {
        Self::inspect(self, id);
    }

    fn is_stuck(&self) -> bool {
        Self::is_stuck(self)
    }

    fn set_shares(&self, shares: &[NamespaceShare]) {
        Self::set_shares(self, shares);
    }

    fn hold(&self, owner: Owner) {
        Self::hold(self, owner);
    }

    fn let_go(&self, owner: Owner, patience: Duration) {
        Self::let_go(self, owner, patience);
    }
}

/// Scratch pages for objects that are only on disk, or only going there. Clones share the pages.
#[derive(Clone, Debug)]
pub struct Scratch {
    pages: PagePool,
    _registration: Arc<Registration>,
}

impl Scratch {
    /// Allocates `pages` pages of `page_bytes`, and registers them with the tier that uses them.
    ///
    /// # Errors
    /// If the memory cannot be allocated or registered.
    pub fn new(pages: u32, page_bytes: usize, tier: &dyn Store) -> Result<Self, StoreError> {
        let failed = |error| StoreError::io("allocating memory for transfers", &error);
        let arena = Arena::new(pages.max(1), page_bytes).map_err(failed)?;
        let registration = Arc::new(tier.register(&arena)?);
        Ok(Self { pages: PagePool::new(arena), _registration: registration })
    }

    /// Arena of the pages.
    pub fn arena(&self) -> &Arena {
        self.pages.arena()
    }

    /// Quota of one user of the pages: a part of them, so that a user that holds pages without
    /// using them cannot block the others.
    pub fn share(&self) -> Share {
        Share(Arc::new(Semaphore::new((self.arena().pages() as usize / 4).max(1))))
    }

    /// Takes up to `most` pages, as many as are free; at least one if `waits`.
    pub async fn take(&self, most: usize, share: &Share, waits: bool) -> Vec<ScratchPage> {
        let mut pages = Vec::new();
        if waits && most > 0 {
            let own = share.0.clone().acquire_owned().await.expect("it is never closed");
            let page = self.pages.take(1).await.remove(0);
            pages.push(ScratchPage { page, _own: own });
        }
        pages.extend((pages.len()..most).map_while(|_| self.try_take(share)));
        pages
    }

    /// Takes a page, if one is free within the quota.
    pub fn try_take(&self, share: &Share) -> Option<ScratchPage> {
        let own = share.0.clone().try_acquire_owned().ok()?;
        self.pages.try_take().map(|page| ScratchPage { page, _own: own })
    }
}

/// Quota of one user of the pages. Clones share it.
#[derive(Clone, Debug)]
pub struct Share(Arc<Semaphore>);

/// A page of scratch memory; dropping it returns the page.
#[derive(Debug)]
pub struct ScratchPage {
    page: PooledPage,
    _own: OwnedSemaphorePermit,
}

impl ScratchPage {
    /// Target for the first `length` bytes.
    ///
    /// # Panics
    /// While another loan of the page exists.
    pub fn target(&self, length: usize) -> Target {
        self.page.target(length).expect("the page has one user")
    }

    /// The first `length` bytes, for reading.
    ///
    /// # Panics
    /// While the page is lent for writing.
    pub fn source(&self, length: usize) -> Source {
        self.page.source(length).expect("the page is no longer written to")
    }
}

/// An object lent for reading.
#[derive(Debug)]
pub struct LentObject {
    served: Served,
    header: [u8; HEADER_BYTES],
    bytes: LentBytes,
}

#[derive(Debug)]
enum LentBytes {
    Slot(SlotLoan),
    /// The source is dropped before the page.
    Scratch(Source, #[expect(dead_code, reason = "keeps the page")] ScratchPage),
}

impl LentObject {
    /// Lends an object in a slot of memory.
    pub fn from_slot(slot: SlotLoan, waited: bool) -> Self {
        let served = Served { place: Place::Memory, waited };
        Self { served, header: *slot.header(), bytes: LentBytes::Slot(slot) }
    }

    /// Lends an object that was read into a scratch page.
    pub fn from_scratch(header: &Header, page: ScratchPage, served: Served) -> Self {
        let bytes = LentBytes::Scratch(page.source(header.length as usize), page);
        Self { served, header: header.encode(), bytes }
    }

    /// The payload.
    pub fn source(&self) -> &Source {
        match &self.bytes {
            LentBytes::Slot(slot) => slot.source(),
            LentBytes::Scratch(source, _) => source,
        }
    }

    /// Header that verifies the payload.
    pub fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    /// Tier that the object was in.
    pub fn served(&self) -> Served {
        self.served
    }
}

/// Answer to a client that offers an object.
#[derive(Debug)]
pub enum Offered {
    /// The object is present, and has the pin.
    There,
    /// The bytes can be written here.
    Room(Room),
    /// There is no room at present.
    NoRoom,
}

/// Memory for the bytes of an offered object.
#[derive(Debug)]
pub enum Room {
    /// A slot of memory.
    Slot(Reservation),
    /// A scratch page, from which the object goes to disk.
    Scratch(ScratchPage),
}

impl Room {
    /// Target for the bytes. There is only one.
    pub fn target(&mut self, length: usize) -> Target {
        match self {
            Self::Slot(slot) => slot.target(),
            Self::Scratch(page) => page.target(length),
        }
    }

    /// The first `length` bytes; the target must have been returned.
    pub fn source(&self, length: usize) -> Source {
        match self {
            Self::Slot(slot) => slot.source(length),
            Self::Scratch(page) => page.source(length),
        }
    }
}

/// An object whose bytes have arrived and match their header.
#[derive(Debug)]
pub struct Filled {
    /// Header that verifies the payload.
    pub header: Header,
    /// Memory with its bytes.
    pub room: Room,
}
