//! Memory over disk: objects are stored in both, and read from memory if possible.
//!
//! The disk is authoritative, and memory caches a part of it. Every change of both tiers changes
//! the disk first, then revokes active promotions, then changes memory: so no promotion restores an
//! object that was removed or replaced meanwhile (see [`Board::revoke`]). Only new objects may be
//! in memory first, if so configured; changes to them wait until they are on disk
//! (`write_behind.rs`).

mod lending;
mod walk;
mod write_behind;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use self::walk::{FromDisk, Numbered, TierReader};
use self::write_behind::WriteBehind;
pub use self::write_behind::WriteBehindStats;
use crate::DiskStore;
use crate::promotion::{
    Board, PromotionConfig, PromotionOutcome, PromotionStats, PromotionTicket, PromotionWorkers,
};
use terrace_l3::backend::{NamespaceShare, either, merge, split};
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, MemoryStore, ObjectId, Owner, Pin, Place,
    Presence, Put, PutOptions, Registration, Removal, Results, Served, Store, StoreError,
    StoreStats, Stored,
};

/// Configuration of two tiers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TieredConfig {
    /// Promotions from disk to memory.
    pub promotion: PromotionConfig,
    /// Acknowledge new objects as soon as they are in memory, and write them to disk later: when no
    /// call stores or loads, at the latest after a quarter of a second. Objects that have not been
    /// written are lost with the process. Puts that are durable or pin their objects wait for the
    /// disk all the same.
    pub write_behind: bool,
}

/// A store in memory over one on disk. Clones are the same store.
#[derive(Clone, Debug)]
pub struct TieredStore {
    shared: Arc<TieredCore>,
}

#[derive(Debug)]
struct TieredCore {
    memory: MemoryStore,
    disk: DiskStore,
    config: TieredConfig,
    board: Board,
    crew: PromotionWorkers,
    behind: WriteBehind,
    gets_from_memory: AtomicU64,
    gets_after_waiting: AtomicU64,
    gets_from_disk: AtomicU64,
    waits_expired: AtomicU64,
    /// Registration of the memory store's slots with the disk: promotions read directly into them.
    _slots: Registration,
}

impl TieredStore {
    /// Combines `memory` and `disk`. Neither may be used directly afterwards.
    ///
    /// # Errors
    /// If one of them is a tier of another store already.
    pub fn new(
        memory: MemoryStore,
        disk: DiskStore,
        config: TieredConfig,
    ) -> Result<Self, StoreError> {
        let slots = disk.register(memory.arena())?;
        let crew = PromotionWorkers::new(config.promotion.workers, {
            let (memory, disk) = (memory.clone(), disk.clone());
            move |ticket| promote(memory.clone(), disk.clone(), ticket)
        });
        let shared = TieredCore {
            behind: WriteBehind::new(config.write_behind, memory.clone(), disk.clone()),
            memory,
            disk,
            board: Board::new(&config.promotion),
            crew,
            config,
            gets_from_memory: AtomicU64::new(0),
            gets_after_waiting: AtomicU64::new(0),
            gets_from_disk: AtomicU64::new(0),
            waits_expired: AtomicU64::new(0),
            _slots: slots,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Marks the owner as connected: its pins last until it is [let go](Self::let_go).
    pub fn hold(&self, owner: Owner) {
        self.shared.memory.hold(owner);
        self.shared.disk.hold(owner);
    }

    /// Marks the owner as disconnected: its pins last for `patience`, unless it returns.
    pub fn let_go(&self, owner: Owner, patience: Duration) {
        self.shared.memory.let_go(owner, patience);
        self.shared.disk.let_go(owner, patience);
    }

    /// Limits groups of namespaces to shares of both tiers.
    pub fn set_shares(&self, shares: &[NamespaceShare]) {
        self.shared.memory.set_shares(shares);
        self.shared.disk.set_shares(shares);
    }

    /// Statistics of promotions.
    #[must_use]
    pub fn promotion_stats(&self) -> PromotionStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PromotionStats {
            gets_from_memory: read(&self.shared.gets_from_memory),
            gets_after_waiting: read(&self.shared.gets_after_waiting),
            gets_from_disk: read(&self.shared.gets_from_disk),
            waits_expired: read(&self.shared.waits_expired),
            ..self.shared.board.stats(Instant::now())
        }
    }
}

impl Store for TieredStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        let with_memory = self.shared.memory.register(arena)?;
        let with_disk = self.shared.disk.register(arena)?;
        Ok(Registration::new((with_memory, with_disk)))
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(self.shared.exists(ids, options))
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        // In a task, since a put that is cancelled half-way would leave the tiers inconsistent.
        let (shared, count) = (self.shared.clone(), puts.len());
        Box::pin(async move {
            let put = tokio::spawn(async move { shared.put(puts, options).await });
            put.await.unwrap_or_else(|_| vec![Err(StoreError::Closed); count])
        })
    }

    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(async move {
            let _loads = self.shared.behind.transfers();
            self.shared.walk(&Gets(&self.shared), gets, options).await
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(async move {
            let _claim = self.shared.behind.claim(ids.iter()).await;
            let on_disk = self.shared.disk.pin(ids, pin).await;
            // Memory is not asked for objects whose pin the disk has refused.
            let mut refused = on_disk.iter().map(|pinned| *pinned == Err(StoreError::Pinned));
            let (asked, refused) = split(ids.to_vec(), |_| refused.next() == Some(true));
            let in_memory = self.shared.memory.pin(&asked, pin).await;
            both(on_disk, merge(&refused, in_memory, &Err(StoreError::Pinned)))
        })
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(async move {
            let _claim = self.shared.behind.claim(ids.iter()).await;
            let on_disk = self.shared.disk.unpin(ids, pin).await;
            both(on_disk, self.shared.memory.unpin(ids, pin).await)
        })
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        Box::pin(self.shared.remove(ids, removal))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async {
            self.shared.behind.settled().await;
            self.shared.disk.flush().await
        })
    }

    fn stats(&self) -> StoreStats {
        let mut figures = self.promotion_stats().figures();
        figures.extend(self.shared.behind.stats().iter().flat_map(WriteBehindStats::figures));
        StoreStats {
            memory: self.shared.memory.stats().memory,
            disk: self.shared.disk.stats().disk,
            figures,
            ..StoreStats::default()
        }
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async {
            self.shared.crew.stop().await;
            self.shared.behind.settled().await;
            let disk = self.shared.disk.shutdown().await;
            let memory = self.shared.memory.shutdown().await;
            disk.and(memory)
        })
    }
}

impl TieredCore {
    async fn exists(&self, ids: &[ObjectId], options: ExistsOptions) -> Results<Presence> {
        if !options.prefetch_to_memory {
            return self.lookup(ids, options).await;
        }
        let mut results = Vec::with_capacity(ids.len());
        for chunk in ids.chunks(self.config.promotion.chunk_keys.max(1) as usize) {
            let found = self.lookup(chunk, options).await;
            let now = Instant::now();
            let on_disk = chunk.iter().zip(&found).filter(|(_, presence)| match presence {
                Ok(Presence::Present(Place::Disk)) => true,
                Ok(Presence::Present(Place::Memory) | Presence::Absent) | Err(_) => false,
            });
            let tickets: Vec<_> =
                on_disk.filter_map(|(id, _)| self.board.trigger(*id, now)).collect();
            if !tickets.is_empty() {
                self.crew.enqueue(tickets);
                // On a single-threaded runtime, the promotions start only if this task yields.
                tokio::task::yield_now().await;
            }
            results.extend(found);
        }
        results
    }

    async fn lookup(&self, ids: &[ObjectId], options: ExistsOptions) -> Results<Presence> {
        let options = ExistsOptions { prefetch_to_memory: false, ..options };
        let mut results = self.memory.exists(ids, options).await;
        let absent = |number: &usize| !results[*number].as_ref().is_ok_and(|it| it.is_present());
        let numbers: Vec<usize> = (0..ids.len()).filter(absent).collect();
        let left: Vec<ObjectId> = numbers.iter().map(|number| ids[*number]).collect();
        if !left.is_empty() {
            let on_disk = self.disk.exists(&left, options).await;
            for (number, presence) in numbers.into_iter().zip(on_disk) {
                results[number] = presence;
            }
        }
        results
    }

    async fn put(&self, puts: Vec<Put>, options: PutOptions) -> Results<Stored> {
        if !self.behind.allows(options) {
            return self.put_through(puts, options).await;
        }
        let stores = self.behind.transfers();
        let (mut results, mut unwritten) = (Vec::with_capacity(puts.len()), Vec::new());
        let (mut numbers, mut left) = (Vec::new(), Vec::new());
        for (number, put) in puts.into_iter().enumerate() {
            let taken = self.behind.take(&put, &mut unwritten);
            // Objects that memory did not take are answered below.
            results.push(Ok(taken.unwrap_or(Stored::New)));
            if taken.is_none() {
                numbers.push(number);
                left.push(put);
            }
            // Copying takes time; let other tasks run.
            tokio::task::yield_now().await;
        }
        drop(stores);
        self.behind.write(unwritten);
        if !left.is_empty() {
            let stored = self.put_through(left, options).await;
            numbers.into_iter().zip(stored).for_each(|(number, stored)| results[number] = stored);
        }
        results
    }

    /// Stores on disk, then in memory.
    async fn put_through(&self, puts: Vec<Put>, options: PutOptions) -> Results<Stored> {
        let _claim = self.behind.claim(puts.iter().map(|put| &put.id)).await;
        // The pages stay lent until they are in memory, too.
        let copies: Vec<Put> = puts.iter().map(Put::share).collect();
        let mut results = self.disk.put_from(puts, options).await;
        let mut numbers = Vec::new();
        let mut wanted = Vec::new();
        for (number, copy) in copies.into_iter().enumerate() {
            let id = copy.id;
            let copies_it = match &results[number] {
                Ok(Stored::New) => true,
                // Memory must not publish these bytes, which were not compared with the stored
                // ones.
                Ok(Stored::AlreadyThere) => false,
                // Without the disk, lower generations could still be read from there.
                Err(error) => may_be_in_memory_only(&id, options, error),
            };
            // A put that only failed to become durable has replaced them all the same.
            if id.generation > 0 && (results[number].is_ok() || self.disk.length(&id).is_some()) {
                self.board.revoke_lower(&id);
                self.memory.supersede(&id);
            }
            if copies_it {
                numbers.push((number, id));
                wanted.push(copy);
            }
        }
        let in_memory = PutOptions { durable: false, ..options };
        let copied = self.memory.put_from(wanted, in_memory).await;
        for ((number, id), copied) in numbers.into_iter().zip(copied) {
            match copied {
                Ok(stored) if results[number].is_err() => results[number] = Ok(stored),
                // Removed or replaced before it was in memory, so the other call found it only on
                // disk.
                Ok(_) if self.disk.length(&id).is_none() => {
                    remove_stray(&self.memory, &id).await;
                }
                // Replaced by an object that only memory has.
                Err(StoreError::Superseded { present }) => {
                    remove_stray(&self.disk, &id).await;
                    results[number] = Err(StoreError::Superseded { present });
                }
                Ok(_) | Err(_) => {}
            }
        }
        results
    }

    fn count_from_memory(&self, waited: bool) {
        self.gets_from_memory.fetch_add(1, Ordering::Relaxed);
        self.gets_after_waiting.fetch_add(u64::from(waited), Ordering::Relaxed);
    }

    fn count_from_disk(&self, served: usize) {
        self.gets_from_disk.fetch_add(served as u64, Ordering::Relaxed);
    }

    fn count_expired(&self) {
        self.waits_expired.fetch_add(1, Ordering::Relaxed);
    }

    async fn remove(&self, ids: &[ObjectId], removal: Removal) -> Results<()> {
        let _claim = self.behind.claim(ids.iter()).await;
        // An object that either tier refuses to remove stays in both.
        let mut results: Results<()> = ids.iter().map(|id| self.check(id, removal)).collect();
        let numbers: Vec<usize> = (0..ids.len()).filter(|it| results[*it].is_ok()).collect();
        let allowed: Vec<ObjectId> = numbers.iter().map(|number| ids[*number]).collect();
        // The check is done: a lease granted since then must not leave the object in one tier.
        let removal = if removal == Removal::Plain { Removal::Forced } else { removal };
        let on_disk = self.disk.remove(&allowed, removal).await;
        for ((number, id), on_disk) in numbers.into_iter().zip(allowed).zip(on_disk) {
            results[number] = match on_disk {
                Ok(()) | Err(StoreError::Missing) => {
                    self.board.revoke(&id);
                    let id = std::slice::from_ref(&id);
                    match self.memory.remove(id, removal).await.remove(0) {
                        // An object that is only being written cannot be read, and its promotion is
                        // revoked.
                        Err(StoreError::Missing | StoreError::BeingWritten) => on_disk,
                        in_memory => in_memory,
                    }
                }
                Err(error) => Err(error),
            };
        }
        results
    }

    /// Returns the error with which a removal would be refused, if any.
    fn check(&self, id: &ObjectId, removal: Removal) -> Result<(), StoreError> {
        match self.memory.check_removal(id, removal) {
            // Memory is about to receive the object from its promotion, or from a concurrent put.
            Ok(()) | Err(StoreError::Missing | StoreError::BeingWritten) => {}
            Err(error) => return Err(error),
        }
        match self.disk.check_removal(id, removal) {
            Ok(()) | Err(StoreError::Missing) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Reads into targets.
struct Gets<'a>(&'a TieredCore);

impl TierReader for Gets<'_> {
    type Wanted = Get;
    type Output = Served;

    fn id(get: &Get) -> ObjectId {
        get.id
    }

    async fn read_memory(
        &self,
        gets: Numbered<Get>,
        waited: bool,
        answered: &mut Numbered<Result<Served, StoreError>>,
    ) -> Numbered<Get> {
        let TieredCore { memory, .. } = self.0;
        let (found, mut left): (Numbered<Get>, Numbered<Get>) =
            gets.into_iter().partition(|(_, get)| memory.contains(&get.id));
        let target = |(_, get): &(usize, Get)| {
            (get.id, get.prefix, get.target.arena(), get.target.page(), get.target.len())
        };
        let targets: Vec<_> = found.iter().map(target).collect();
        let (numbers, found): (Vec<usize>, Vec<Get>) = found.into_iter().unzip();
        let results = memory.get_into(found, GetOptions::default()).await;
        for ((number, result), (id, prefix, arena, page, length)) in
            numbers.into_iter().zip(results).zip(targets)
        {
            match result {
                Ok(Served { place, .. }) => {
                    self.0.count_from_memory(waited);
                    answered.push((number, Ok(Served { place, waited })));
                }
                // Evicted meanwhile, or damaged: the disk may have it. Its target was returned, so
                // another caller may have it by now.
                Err(error @ (StoreError::Missing | StoreError::Corrupt(_))) => {
                    match arena.target(page) {
                        Ok(target) => {
                            let target = target.first(length);
                            left.push((number, Get { id, target, prefix }));
                        }
                        Err(_) => answered.push((number, Err(error))),
                    }
                }
                Err(error) => answered.push((number, Err(error))),
            }
        }
        left
    }

    async fn read_disk(
        &self,
        gets: Numbered<Get>,
        FromDisk { waited, .. }: FromDisk,
    ) -> Numbered<Result<Served, StoreError>> {
        let (numbers, gets): (Vec<usize>, Vec<Get>) = gets.into_iter().unzip();
        let results = self.0.disk.get_into(gets, GetOptions::default()).await;
        self.0.count_from_disk(results.iter().filter(|result| result.is_ok()).count());
        let mark = |result: Result<Served, StoreError>| result.map(|it| Served { waited, ..it });
        numbers.into_iter().zip(results.into_iter().map(mark)).collect()
    }
}

/// Performs one promotion.
async fn promote(memory: MemoryStore, disk: DiskStore, mut ticket: PromotionTicket) {
    ticket.start();
    let ending = copy_to_memory(&memory, &disk, &ticket).await;
    ticket.end(ending, Instant::now());
}

async fn copy_to_memory(
    memory: &MemoryStore,
    disk: &DiskStore,
    ticket: &PromotionTicket,
) -> PromotionOutcome {
    let id = ticket.id();
    let Some(length) = disk.length(&id) else { return PromotionOutcome::Vanished };
    let mut slot = match memory.reserve(id, length, None) {
        Ok(Some(slot)) => slot,
        Ok(None) | Err(StoreError::BeingWritten) => return PromotionOutcome::AlreadyResident,
        Err(StoreError::Full) => return PromotionOutcome::NoMemory,
        Err(StoreError::Superseded { .. }) => return PromotionOutcome::Vanished,
        Err(_) => return PromotionOutcome::Failed,
    };
    let get = Get::new(id, slot.target());
    match disk.fetch(vec![get]).await.remove(0) {
        Ok(header) if ticket.unless_revoked(|| slot.publish(&header, true)) => {
            PromotionOutcome::Done
        }
        Ok(_) | Err(StoreError::Missing) => PromotionOutcome::Vanished,
        Err(_) => PromotionOutcome::Failed,
    }
}

/// Removes an object that must not be in a tier.
async fn remove_stray(tier: &dyn Store, id: &ObjectId) {
    // The object may be gone already.
    let _ = tier.remove(std::slice::from_ref(id), Removal::Final).await;
}

/// Returns true if an object that the disk could not take may be in memory only. Not for a higher
/// generation, since lower ones could still be read from disk. Not for a pinned object, which must
/// not depend on memory without an error when the disk fails.
fn may_be_in_memory_only(id: &ObjectId, options: PutOptions, error: &StoreError) -> bool {
    if options.durable || id.generation > 0 {
        return false;
    }
    match error {
        StoreError::Full | StoreError::TooLarge { .. } => true,
        StoreError::Io { .. } | StoreError::TimedOut(_) | StoreError::Unavailable { .. } => {
            !matches!(options.pin, Some(Pin::Hard(_)))
        }
        StoreError::NotRegistered { .. }
        | StoreError::AlreadyRegistered { .. }
        | StoreError::Missing
        | StoreError::BeingWritten
        | StoreError::Superseded { .. }
        | StoreError::Length { .. }
        | StoreError::Leased
        | StoreError::Pinned
        | StoreError::NotPinned
        | StoreError::Corrupt(_)
        | StoreError::HolderAway
        | StoreError::Forbidden
        | StoreError::Closed => false,
    }
}

/// Merges the results of both tiers.
fn both(on_disk: Results<()>, in_memory: Results<()>) -> Results<()> {
    on_disk.into_iter().zip(in_memory).map(|(disk, memory)| either(disk, memory)).collect()
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
