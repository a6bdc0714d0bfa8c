//! Objects that come from and go to others straight through the tiers' memory: a slot of the upper
//! tier, or a page of scratch memory for what the upper tier has no room for.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::walk::{FromDisk, Numbered, Reading};
use super::{Shared, TieredStore, memory_may_stand_in, take_back};
use terrace_l3::backend::{PagePool, PooledPage, Reservation, SlotLoan};
use terrace_l3::{
    Arena, Get, GetOptions, HEADER_BYTES, Header, ObjectId, Pin, Place, Put, PutOptions,
    Registration, Results, Served, Source, Store, StoreError, Stored, Target,
};

/// Pages for objects that are only on disk, or only going there. Clones are the same pages.
#[derive(Clone, Debug)]
pub struct Scratch {
    pages: PagePool,
    _registration: Arc<Registration>,
}

impl Scratch {
    /// So many pages, which `tiers` may use.
    pub fn new(tiers: &TieredStore, pages: u32) -> Result<Self, StoreError> {
        let bytes = tiers.shared.memory.object_bytes_max();
        let failed = |error| StoreError::io("allocating memory for transfers", &error);
        let arena = Arena::new(pages.max(1), bytes).map_err(failed)?;
        let registration = Arc::new(tiers.shared.disk.register(&arena)?);
        Ok(Self { pages: PagePool::new(arena), _registration: registration })
    }

    /// The memory that the pages are in.
    pub fn arena(&self) -> &Arena {
        self.pages.arena()
    }

    /// What one of those who use the pages may have of them at a time: a part, so that whoever takes them
    /// and does nothing keeps nobody else from reading.
    pub fn share(&self) -> Share {
        Share(Arc::new(Semaphore::new((self.arena().pages() as usize / 4).max(1))))
    }

    /// Up to `most` pages: as many as there are, and at least one if it `waits`.
    async fn take(&self, most: usize, share: &Share, waits: bool) -> Vec<ScratchPage> {
        let mut pages = Vec::new();
        if waits && most > 0 {
            let own = share.0.clone().acquire_owned().await.expect("it is never closed");
            let page = self.pages.take(1).await.remove(0);
            pages.push(ScratchPage { page, _own: own });
        }
        pages.extend((pages.len()..most).map_while(|_| self.try_take(share)));
        pages
    }

    fn try_take(&self, share: &Share) -> Option<ScratchPage> {
        let own = share.0.clone().try_acquire_owned().ok()?;
        self.pages.try_take().map(|page| ScratchPage { page, _own: own })
    }
}

/// Somebody's part of the pages. Clones are the same part.
#[derive(Clone, Debug)]
pub struct Share(Arc<Semaphore>);

/// A page of scratch memory; dropping it gives it back.
#[derive(Debug)]
pub struct ScratchPage {
    page: PooledPage,
    _own: OwnedSemaphorePermit,
}

impl ScratchPage {
    fn target(&self, length: usize) -> Target {
        self.page.target(length).expect("nobody else has it")
    }

    fn source(&self, length: usize) -> Source {
        self.page.source(length).expect("nobody writes to it")
    }
}

/// An object that is lent for reading.
#[derive(Debug)]
pub struct Lent {
    served: Served,
    header: [u8; HEADER_BYTES],
    bytes: LentBytes,
}

#[derive(Debug)]
enum LentBytes {
    Slot(SlotLoan),
    /// The source goes before the page.
    Scratch(Source, #[expect(dead_code, reason = "keeps the page")] ScratchPage),
}

impl Lent {
    /// One that lies in a slot of memory.
    pub fn from_slot(slot: SlotLoan, waited: bool) -> Self {
        let served = Served { place: Place::Memory, waited };
        Self { served, header: *slot.header(), bytes: LentBytes::Slot(slot) }
    }

    /// The payload.
    pub fn source(&self) -> &Source {
        match &self.bytes {
            LentBytes::Slot(slot) => slot.source(),
            LentBytes::Scratch(source, _) => source,
        }
    }

    /// What it is verified by.
    pub fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }

    /// Where it was.
    pub fn served(&self) -> Served {
        self.served
    }
}

/// What becomes of an object that somebody could send.
#[derive(Debug)]
pub enum Offered {
    /// It is there already, and has the pin.
    There,
    /// Its bytes can go here.
    Room(Room),
    /// There is no room at the moment.
    NoRoom,
}

/// Where an object's bytes can go.
#[derive(Debug)]
pub enum Room {
    /// A slot of memory.
    Slot(Reservation),
    /// A page on the way to disk.
    Scratch(ScratchPage),
}

impl Room {
    /// The place itself. There is only one.
    pub fn target(&mut self, length: usize) -> Target {
        match self {
            Self::Slot(slot) => slot.target(),
            Self::Scratch(page) => page.target(length),
        }
    }

    fn source(&self, length: usize) -> Source {
        match self {
            Self::Slot(slot) => slot.source(length),
            Self::Scratch(page) => page.source(length),
        }
    }
}

/// An object whose bytes have come and fit their header.
#[derive(Debug)]
pub struct Filled {
    /// What it is verified by.
    pub header: Header,
    /// Where its bytes are.
    pub room: Room,
}

/// Lends slots of memory, and pages into which is read what only the disk has.
struct Lends<'a> {
    tiers: &'a Shared,
    scratch: &'a Scratch,
    share: &'a Share,
}

impl Reading for Lends<'_> {
    /// An object and the length that it must have.
    type Job = (ObjectId, usize);
    type Answer = Option<Lent>;

    fn id((id, _): &Self::Job) -> ObjectId {
        *id
    }

    async fn read_memory(
        &self,
        jobs: Numbered<Self::Job>,
        waited: bool,
        answered: &mut Numbered<Result<Option<Lent>, StoreError>>,
    ) -> Numbered<Self::Job> {
        let Shared { memory, .. } = self.tiers;
        let mut left = Vec::new();
        for (number, (id, length)) in jobs {
            // Lending is counted, even if it fails.
            let lent = memory.contains(&id).then(|| memory.lend(&id, length));
            match lent {
                None | Some(Err(StoreError::Missing)) => left.push((number, (id, length))),
                Some(Err(error)) => answered.push((number, Err(error))),
                Some(Ok(slot)) => {
                    self.tiers.count_from_memory(waited);
                    answered.push((number, Ok(Some(Lent::from_slot(slot, waited)))));
                }
            }
        }
        left
    }

    /// Those for which there is no page are answered with `None`. Whoever has pages for another part of the batch
    /// does not wait for more: they might be what it waits for.
    async fn read_disk(
        &self,
        jobs: Numbered<Self::Job>,
        FromDisk { waited, alone }: FromDisk,
    ) -> Numbered<Result<Option<Lent>, StoreError>> {
        let Shared { memory, disk, .. } = self.tiers;
        let mut answered = Vec::with_capacity(jobs.len());
        let mut wanted = Vec::new();
        for (number, (id, expected)) in jobs {
            match disk.length(&id) {
                None => answered.push((number, Err(StoreError::Missing))),
                Some(found) if found != expected || found > memory.object_bytes_max() => {
                    answered.push((number, Err(StoreError::Length { expected, found })));
                }
                Some(length) => wanted.push((number, id, length)),
            }
        }
        let pages = self.scratch.take(wanted.len(), self.share, alone).await;
        let without_page = wanted.split_off(pages.len());
        answered.extend(without_page.into_iter().map(|(number, ..)| (number, Ok(None))));
        let get = |((_, id, length), page): (&(usize, ObjectId, usize), &ScratchPage)| {
            Get::new(*id, page.target(*length))
        };
        let gets: Vec<Get> = wanted.iter().zip(&pages).map(get).collect();
        let fetched = disk.fetch(gets).await;
        for (((number, _, length), page), header) in wanted.into_iter().zip(pages).zip(fetched) {
            let lent = header.map(|header| {
                self.tiers.count_from_disk(1);
                let served = Served { place: Place::Disk, waited };
                let bytes = LentBytes::Scratch(page.source(length), page);
                Some(Lent { served, header: header.encode(), bytes })
            });
            answered.push((number, lent));
        }
        answered
    }
}

impl TieredStore {
    /// Lends objects, each with the length that it must have. One that is only on disk is read into
    /// scratch memory; `None` if there was not enough of that.
    pub async fn lend(
        &self,
        wanted: &[(ObjectId, usize)],
        options: GetOptions,
        scratch: &Scratch,
        share: &Share,
    ) -> Results<Option<Lent>> {
        let lends = Lends { tiers: &self.shared, scratch, share };
        self.shared.walk(&lends, wanted.to_vec(), options).await
    }

    /// Whether an object that somebody could send is wanted, and where its bytes can go.
    pub async fn offer(
        &self,
        id: &ObjectId,
        length: usize,
        pin: Option<Pin>,
        scratch: &Scratch,
        share: &Share,
    ) -> Result<Offered, StoreError> {
        let is_there = match pin {
            Some(pin) => match self.pin(std::slice::from_ref(id), pin).await.remove(0) {
                Err(StoreError::Missing) => false,
                pinned => pinned.map(|()| true)?,
            },
            None => self.shared.memory.contains(id) || self.shared.disk.length(id).is_some(),
        };
        if is_there {
            return Ok(Offered::There);
        }
        match self.shared.memory.reserve(*id, length, pin) {
            Ok(Some(slot)) => Ok(Offered::Room(Room::Slot(slot))),
            Ok(None) => Ok(Offered::There),
            Err(StoreError::Full) => Ok(match scratch.try_take(share) {
                Some(page) => Offered::Room(Room::Scratch(page)),
                None => Offered::NoRoom,
            }),
            Err(error) => Err(error),
        }
    }

    /// Stores objects whose bytes have come. It must not be given up half-way.
    pub async fn keep(&self, filled: Vec<Filled>, options: PutOptions) -> Results<Stored> {
        let _claim = self.shared.behind.claim(filled.iter().map(|it| &it.header.id)).await;
        let put =
            |it: &Filled| Put::described(&it.header, it.room.source(it.header.length as usize));
        let puts = filled.iter().map(put).collect();
        let mut results = self.shared.disk.put_from(puts, options).await;
        for (Filled { header, room }, result) in filled.into_iter().zip(&mut results) {
            let id = header.id;
            if id.generation > 0 && (result.is_ok() || self.shared.disk.length(&id).is_some()) {
                self.shared.board.revoke_lower(&id);
                self.shared.memory.supersede(&id);
            }
            let Room::Slot(slot) = room else { continue };
            let length = header.length as usize;
            match result {
                Ok(Stored::New) => {
                    slot.publish(&header, false);
                    self.shared.memory.count_put(&Ok(Stored::New), length);
                    // Removed or replaced before it was in memory: whoever did that found it on disk
                    // only.
                    if self.shared.disk.length(&id).is_none() {
                        take_back(&self.shared.memory, &id).await;
                    }
                }
                Ok(Stored::AlreadyThere) => {}
                Err(error) => {
                    if memory_may_stand_in(&id, options, error) {
                        slot.publish(&header, false);
                        *result = Ok(Stored::New);
                        self.shared.memory.count_put(result, length);
                    }
                }
            }
        }
        results
    }

    /// Looks at objects that somebody could not verify, and removes what is damaged. What is on disk is
    /// verified with every read.
    pub fn inspect(&self, id: &ObjectId) {
        self.shared.memory.inspect(id);
    }

    /// The memory of the upper tier.
    pub fn slots(&self) -> &Arena {
        self.shared.memory.arena()
    }

    /// The largest object.
    pub fn object_bytes_max(&self) -> usize {
        self.shared.memory.object_bytes_max()
    }
}
