//! Objects that come from and go to others straight through the tiers' memory: a slot of the upper
//! tier, or a page of scratch memory for what the upper tier has no room for.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::{TieredStore, memory_may_stand_in, take_back};
use terrace_l3::backend::{Reservation, SlotLoan};
use terrace_l3::{
    Arena, Get, GetOptions, HEADER_BYTES, Header, ObjectId, Pin, Place, Put, PutOptions,
    Registration, Results, Served, Source, Store, StoreError, Stored, Target,
};

/// Pages for objects that are only on disk, or only going there. Clones are the same pages.
#[derive(Clone, Debug)]
pub struct Scratch {
    arena: Arena,
    free: Arc<Mutex<Vec<u32>>>,
    permits: Arc<Semaphore>,
    _registration: Arc<Registration>,
}

impl Scratch {
    /// So many pages, which `tiers` may use.
    pub fn new(tiers: &TieredStore, pages: u32) -> Result<Self, StoreError> {
        let bytes = tiers.shared.memory.object_bytes_max();
        let failed = |error| StoreError::io("allocating memory for transfers", &error);
        let arena = Arena::new(pages.max(1), bytes).map_err(failed)?;
        let registration = tiers.shared.disk.register(&arena)?;
        Ok(Self {
            free: Arc::new(Mutex::new((0..arena.pages()).collect())),
            permits: Arc::new(Semaphore::new(arena.pages() as usize)),
            arena,
            _registration: Arc::new(registration),
        })
    }

    /// The memory that the pages are in.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// What one of those who use the pages may have of them at a time: a part, so that whoever takes them
    /// and does nothing keeps nobody else from reading.
    pub fn share(&self) -> Share {
        Share(Arc::new(Semaphore::new((self.arena.pages() as usize / 4).max(1))))
    }

    /// At least one page, for which it waits, and up to `most` if there are so many.
    async fn take(&self, most: usize, share: &Share) -> Vec<ScratchPage> {
        const OPEN: &str = "it is never closed";
        let mut pages = Vec::new();
        if most > 0 {
            let own = share.0.clone().acquire_owned().await.expect(OPEN);
            let permit = self.permits.clone().acquire_owned().await.expect(OPEN);
            pages.push(self.page(permit, own));
        }
        pages.extend((1..most).map_while(|_| self.try_take(share)));
        pages
    }

    fn try_take(&self, share: &Share) -> Option<ScratchPage> {
        let own = share.0.clone().try_acquire_owned().ok()?;
        Some(self.page(self.permits.clone().try_acquire_owned().ok()?, own))
    }

    fn page(&self, permit: OwnedSemaphorePermit, own: OwnedSemaphorePermit) -> ScratchPage {
        let page = self.free.lock().pop().expect("there are as many as permits");
        ScratchPage { scratch: self.clone(), page, _permits: [permit, own] }
    }
}

/// Somebody's part of the pages. Clones are the same part.
#[derive(Clone, Debug)]
pub struct Share(Arc<Semaphore>);

/// A page of scratch memory; dropping it gives it back.
#[derive(Debug)]
pub struct ScratchPage {
    scratch: Scratch,
    page: u32,
    _permits: [OwnedSemaphorePermit; 2],
}

impl ScratchPage {
    fn target(&self, length: usize) -> Target {
        let target = self.scratch.arena.target(self.page);
        target.expect("nobody else has it").first(length)
    }

    fn source(&self, length: usize) -> Source {
        let source = self.scratch.arena.source(self.page);
        source.expect("nobody writes to it").first(length)
    }
}

impl Drop for ScratchPage {
    fn drop(&mut self) {
        // Before the permits are given back.
        self.scratch.free.lock().push(self.page);
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
        let mut results: Results<Option<Lent>> = Vec::with_capacity(wanted.len());
        let mut left = Vec::new();
        for (number, (id, length)) in wanted.iter().enumerate() {
            results.push(match self.lend_slot(id, *length, false) {
                Err(StoreError::Missing) => {
                    left.push(number);
                    Err(StoreError::Missing)
                }
                lent => lent.map(Some),
            });
        }
        if left.is_empty() {
            return results;
        }
        let ids: Vec<ObjectId> = left.iter().map(|number| wanted[*number].0).collect();
        let active = self.shared.board.active(ids.iter().copied());
        let wait = options.promotion_wait;
        let wait = wait.unwrap_or(Duration::from_millis(self.shared.config.promotion.get_wait_ms));
        if active.contains(&true) && !wait.is_zero() {
            if timeout(wait, self.shared.board.settled(&ids)).await.is_err() {
                self.shared.count_expired();
            }
            left.retain(|number| {
                let (id, length) = &wanted[*number];
                let lent = self.lend_slot(id, *length, true);
                let is_left = matches!(lent, Err(StoreError::Missing));
                results[*number] = lent.map(Some);
                is_left
            });
        }
        self.lend_from_disk(wanted, left, (scratch, share), &mut results).await;
        results
    }

    fn lend_slot(&self, id: &ObjectId, length: usize, waited: bool) -> Result<Lent, StoreError> {
        if !self.shared.memory.contains(id) {
            return Err(StoreError::Missing);
        }
        let slot = self.shared.memory.lend(id, length)?;
        self.shared.count_from_memory(waited);
        Ok(Lent::from_slot(slot, waited))
    }

    async fn lend_from_disk(
        &self,
        wanted: &[(ObjectId, usize)],
        mut numbers: Vec<usize>,
        (scratch, share): (&Scratch, &Share),
        results: &mut Results<Option<Lent>>,
    ) {
        let max = self.shared.memory.object_bytes_max();
        numbers.retain(|number| {
            let (id, expected) = wanted[*number];
            results[*number] = match self.shared.disk.length(&id) {
                None => Err(StoreError::Missing),
                Some(found) if found != expected || found > max => {
                    Err(StoreError::Length { expected, found })
                }
                Some(_) => Ok(None),
            };
            matches!(results[*number], Ok(None))
        });
        // Those for which there is no page stay `None`.
        let pages = scratch.take(numbers.len(), share).await;
        let get = |(number, page): (&usize, &ScratchPage)| {
            let (id, length) = wanted[*number];
            Get::new(id, page.target(length))
        };
        let gets: Vec<Get> = numbers.iter().zip(&pages).map(get).collect();
        let fetched = self.shared.disk.fetch(gets).await;
        for ((number, page), header) in numbers.into_iter().zip(pages).zip(fetched) {
            results[number] = header.map(|header| {
                self.shared.count_from_disk();
                let served = Served { place: Place::Disk, waited: false };
                let bytes = LentBytes::Scratch(page.source(wanted[number].1), page);
                Some(Lent { served, header: header.encode(), bytes })
            });
        }
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
        let put = |it: &Filled| Put::new(it.header.id, it.room.source(it.header.length as usize));
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
