//! Direct access to the tiers' memory for transfers from and to other machines: a slot of the upper
//! tier, or a scratch page if the upper tier has no room.

use std::time::Duration;

use super::walk::{FromDisk, Numbered, TierReader};
use super::{TieredCore, TieredStore, may_be_in_memory_only, remove_stray};
use terrace_l3::backend::{
    Filled, LendingStore, LentObject, NamespaceShare, Offered, Room, Scratch, ScratchPage,
    ScratchUse,
};
use terrace_l3::{
    Answer, Arena, Get, GetOptions, ObjectId, Owner, Pin, Place, Put, PutOptions, Results, Served,
    Store, StoreError, Stored,
};

/// Lends slots of memory, and scratch pages for objects that are only on disk.
struct Lends<'a> {
    tiers: &'a TieredCore,
    scratch: Option<ScratchUse<'a>>,
}

impl TierReader for Lends<'_> {
    /// An object and its required length.
    type Wanted = (ObjectId, usize);
    type Output = Option<LentObject>;

    fn id((id, _): &Self::Wanted) -> ObjectId {
        *id
    }

    async fn read_memory(
        &self,
        jobs: Numbered<Self::Wanted>,
        waited: bool,
        answered: &mut Numbered<Result<Option<LentObject>, StoreError>>,
    ) -> Numbered<Self::Wanted> {
        let TieredCore { memory, .. } = self.tiers;
        let mut left = Vec::new();
        for (number, (id, length)) in jobs {
            // Loans are counted, even those that fail.
            let lent = memory.contains(&id).then(|| memory.lend(&id, length));
            match lent {
                None | Some(Err(StoreError::Missing)) => left.push((number, (id, length))),
                Some(Err(error)) => answered.push((number, Err(error))),
                Some(Ok(slot)) => {
                    self.tiers.count_from_memory(waited);
                    answered.push((number, Ok(Some(LentObject::from_slot(slot, waited)))));
                }
            }
        }
        left
    }

    /// Objects for which there is no page are answered with `None`. A call that has pages for
    /// another part of the batch does not wait for more: its own pages might be those it waits for.
    async fn read_disk(
        &self,
        jobs: Numbered<Self::Wanted>,
        FromDisk { waited, alone }: FromDisk,
    ) -> Numbered<Result<Option<LentObject>, StoreError>> {
        let TieredCore { memory, disk, .. } = self.tiers;
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
        let pages = match self.scratch {
            Some(ScratchUse { pages, share }) => pages.take(wanted.len(), share, alone).await,
            None => Vec::new(),
        };
        let without_page = wanted.split_off(pages.len());
        answered.extend(without_page.into_iter().map(|(number, ..)| (number, Ok(None))));
        let get = |((_, id, length), page): (&(usize, ObjectId, usize), &ScratchPage)| {
            Get::new(*id, page.target(*length))
        };
        let gets: Vec<Get> = wanted.iter().zip(&pages).map(get).collect();
        let fetched = disk.fetch(gets).await;
        for (((number, ..), page), header) in wanted.into_iter().zip(pages).zip(fetched) {
            let lent = header.map(|header| {
                self.tiers.count_from_disk(1);
                let served = Served { place: Place::Disk, waited };
                Some(LentObject::from_scratch(&header, page, served))
            });
            answered.push((number, lent));
        }
        answered
    }
}

impl LendingStore for TieredStore {
    fn object_bytes_max(&self) -> usize {
        self.shared.memory.object_bytes_max()
    }

    fn slots(&self) -> &Arena {
        self.shared.memory.arena()
    }

    fn scratch(&self, pages: u32) -> Result<Option<Scratch>, StoreError> {
        let page_bytes = self.shared.memory.object_bytes_max();
        Scratch::new(pages, page_bytes, &self.shared.disk).map(Some)
    }

    fn lend<'a>(
        &'a self,
        wanted: &'a [(ObjectId, usize)],
        options: GetOptions,
        scratch: Option<ScratchUse<'a>>,
    ) -> Answer<'a, Results<Option<LentObject>>> {
        Box::pin(async move {
            let lends = Lends { tiers: &self.shared, scratch };
            self.shared.walk(&lends, wanted.to_vec(), options).await
        })
    }

    fn offer<'a>(
        &'a self,
        id: &'a ObjectId,
        length: usize,
        pin: Option<Pin>,
        scratch: Option<ScratchUse<'a>>,
    ) -> Answer<'a, Result<Offered, StoreError>> {
        Box::pin(async move {
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
                Err(StoreError::Full) => {
                    let page = scratch.and_then(|it| it.pages.try_take(it.share));
                    Ok(page.map_or(Offered::NoRoom, |page| Offered::Room(Room::Scratch(page))))
                }
                Err(error) => Err(error),
            }
        })
    }

    fn accept(&self, filled: Vec<Filled>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(self.store_filled(filled, options))
    }

    /// Objects on disk are verified with every read, so only memory is checked.
    fn inspect(&self, id: &ObjectId) {
        self.shared.memory.inspect(id);
    }

    /// False: scratch pages are always returned.
    fn is_stuck(&self) -> bool {
        false
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

impl TieredStore {
    /// Stores objects on disk and in the slots that they are in.
    async fn store_filled(&self, filled: Vec<Filled>, options: PutOptions) -> Results<Stored> {
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
                    // Removed or replaced before it was in memory, so the other call found it only
                    // on disk.
                    if self.shared.disk.length(&id).is_none() {
                        remove_stray(&self.shared.memory, &id).await;
                    }
                }
                Ok(Stored::AlreadyThere) => {}
                Err(error) => {
                    if may_be_in_memory_only(&id, options, error) {
                        slot.publish(&header, false);
                        *result = Ok(Stored::New);
                        self.shared.memory.count_put(result, length);
                    }
                }
            }
        }
        results
    }
}
