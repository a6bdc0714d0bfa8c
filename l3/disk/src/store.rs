//! The disk store.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::commit::Progress;
use super::engine::join;
use super::files::FileDisk;
use super::io::{Direction, Disk, DiskFile, Parts, Transfer};
use super::open::{DiskConfig, OpenError, Opening, read_index};
use super::transfer::{BatchResults, ObjectRead, transfer_error, write_parts};
use terrace_l3::backend::{
    Catalogue, InFlight, NamespaceShare, Registry, Reserved, Slot, Ticket, Traffic, leases_max,
};
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, Header, ObjectId, Owner, Pin, Place, Presence,
    Put, PutOptions, Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored,
    TierStats,
};

/// A store on disk. Clones are the same store; dropping the last one makes everything durable.
#[derive(Clone, Debug)]
pub struct DiskStore {
    handle: Arc<OpenStore>,
}

/// Keeps a store open.
#[derive(Debug)]
struct OpenStore {
    core: Arc<DiskCore>,
    in_flight: InFlight,
    committer: Mutex<Option<JoinHandle<()>>>,
}

/// State shared by transfers and the committer.
#[derive(Debug)]
pub(super) struct DiskCore {
    pub(super) config: DiskConfig,
    pub(super) disk: Arc<dyn Disk>,
    pub(super) state: Mutex<DiskState>,
    pub(super) round_wanted: Condvar,
    pub(super) progress: watch::Sender<Progress>,
    /// Notified when a slot may have become available.
    changed: Notify,
    pub(super) commits: AtomicU64,
    pub(super) disk_full: AtomicU64,
    registry: Registry,
    traffic: Traffic,
    io_errors: AtomicU64,
    bounced_bytes: AtomicU64,
    opening: Opening,
    born: Instant,
}

#[derive(Debug)]
pub(super) struct DiskState {
    pub(super) catalogue: Catalogue,
    /// Objects stored since the last commit.
    pub(super) fresh: Vec<Slot>,
    /// Objects replaced since the last commit.
    pub(super) superseded: Vec<Slot>,
    /// Objects to remove from the index with the next commit.
    pub(super) tombs: Vec<Slot>,
    /// Objects pinned or unpinned since the last commit.
    pub(super) repinned: Vec<Slot>,
    /// Maximum number of slots; less than configured when the disk is full.
    pub(super) slots_max: Slot,
    pub(super) growth_error: Option<StoreError>,
    /// A caller waits for a commit.
    pub(super) wants_round: bool,
    /// A put waits for a free slot.
    pub(super) wants_room: bool,
    /// The last handle was dropped.
    pub(super) closing: bool,
    /// New calls are refused.
    closed: bool,
    /// Number of commits started.
    pub(super) rounds_begun: u64,
    /// The committer is idle and has not been notified.
    pub(super) committer_sleeps: bool,
    /// Times that the committer has checked for work.
    #[cfg(test)]
    pub(super) committer_polls: u64,
}

impl DiskState {
    pub(super) fn is_dirty(&self) -> bool {
        !self.fresh.is_empty()
            || !self.superseded.is_empty()
            || !self.tombs.is_empty()
            || !self.repinned.is_empty()
            || self.catalogue.doomed() > 0
    }

    /// Records that a pin of the object in `slot` has changed.
    fn note_pin(&mut self, slot: Slot, pin: Pin) {
        if let Pin::Hard(_) = pin {
            self.repinned.push(slot);
        }
    }

    fn check_open(&self) -> Result<(), StoreError> {
        if self.closed { Err(StoreError::Closed) } else { Ok(()) }
    }
}

/// Result of reserving a slot for a put.
enum SlotRequest {
    Slot(SlotWrite),
    /// The object is present.
    Nothing,
    NoRoom(Put),
}

/// An object that has a slot and is about to be written.
struct SlotWrite {
    put: Put,
    slot: Slot,
    /// Index in the batch.
    number: usize,
    ticket: Ticket,
}

/// Number of reserved bytes at which writing starts: the disk works while further objects are
/// prepared.
const START_BYTES: usize = 1 << 20;

impl DiskStore {
    /// Opens the store in `config.path`, or creates it.
    ///
    /// # Errors
    /// If the directory cannot be used, is in use, or holds a store of another kind.
    pub fn open(config: DiskConfig) -> Result<Self, OpenError> {
        config.slots()?;
        let disk = FileDisk::open(&config.path, config.io, config.depth)?;
        Self::open_on(Arc::new(disk), config)
    }

    /// Opens the store on the given disk; errors name it by `config.path`.
    ///
    /// # Errors
    /// If the disk cannot be used or holds a store of another kind.
    pub fn open_on(disk: Arc<dyn Disk>, config: DiskConfig) -> Result<Self, OpenError> {
        let (catalogue, opening) = read_index(&disk, &config)?;
        let slots = catalogue.slots();
        let core = Arc::new(DiskCore {
            disk,
            state: Mutex::new(DiskState {
                catalogue,
                fresh: Vec::new(),
                superseded: Vec::new(),
                tombs: Vec::new(),
                repinned: Vec::new(),
                slots_max: slots,
                growth_error: None,
                wants_round: false,
                wants_room: false,
                closing: false,
                closed: false,
                rounds_begun: 0,
                committer_sleeps: false,
                #[cfg(test)]
                committer_polls: 0,
            }),
            round_wanted: Condvar::new(),
            progress: watch::Sender::new(Progress::default()),
            changed: Notify::new(),
            commits: AtomicU64::new(0),
            disk_full: AtomicU64::new(u64::from(opening.shortage.is_some())),
            registry: Registry::default(),
            traffic: Traffic::default(),
            io_errors: AtomicU64::new(0),
            bounced_bytes: AtomicU64::new(0),
            opening,
            born: Instant::now(),
            config,
        });
        if core.state.lock().catalogue.usable() == 0 {
            core.grow(core.config.grow_slots(0).min(slots));
            if let Some(error) = core.state.lock().growth_error.take() {
                let error = io::Error::other(error.to_string());
                return Err(OpenError::NoRoom { path: core.config.path.clone(), error });
            }
        }
        let commit = std::thread::Builder::new().name("terrace-commit".to_owned()).spawn({
            let core = core.clone();
            move || {
                // Waiters must learn that there will be no more commits.
                if catch_unwind(AssertUnwindSafe(|| core.commit_rounds())).is_err() {
                    core.stop_commits(&io::Error::other("the thread that does it has panicked"));
                }
            }
        });
        let unusable = |error| OpenError::Directory { path: core.config.path.clone(), error };
        let committer = Mutex::new(Some(commit.map_err(unusable)?));
        let in_flight = InFlight::default();
        Ok(Self { handle: Arc::new(OpenStore { core, in_flight, committer }) })
    }

    /// Effects of opening the store.
    #[must_use]
    pub fn opening(&self) -> Opening {
        self.core().opening
    }

    /// Marks the owner as connected: its pins last until it is [let go](Self::let_go).
    pub fn hold(&self, owner: Owner) {
        self.core().state.lock().catalogue.hold(owner);
    }

    /// Marks the owner as disconnected: its pins last for `patience`, unless it returns.
    pub fn let_go(&self, owner: Owner, patience: Duration) {
        let until_ms = self.core().now_ms().saturating_add(patience.as_millis() as u64);
        self.core().state.lock().catalogue.let_go(owner, until_ms);
    }

    /// Limits groups of namespaces to shares of the slots.
    pub fn set_shares(&self, shares: &[NamespaceShare]) {
        self.core().state.lock().catalogue.set_shares(shares);
    }

    /// Length of the payload, if the object is present.
    pub(crate) fn length(&self, id: &ObjectId) -> Option<usize> {
        let state = self.core().state.lock();
        state.catalogue.find(id).map(|slot| state.catalogue.length(slot) as usize)
    }

    /// Returns true if any generation of the object is present or being written.
    pub(crate) fn knows(&self, id: &ObjectId) -> bool {
        self.core().state.lock().catalogue.knows(id)
    }

    /// Returns the error with which a removal would be refused, if any.
    pub(crate) fn check_removal(&self, id: &ObjectId, removal: Removal) -> Result<(), StoreError> {
        let now_ms = self.core().now_ms();
        self.core().state.lock().catalogue.check_removal(id, removal, now_ms).map(drop)
    }

    /// Reads objects and returns their verified headers.
    pub(crate) fn fetch(&self, gets: Vec<Get>) -> Answer<'_, Results<Header>> {
        Box::pin(async move {
            let (batch, results) = BatchResults::new(gets.len());
            let mut transfers = Vec::new();
            for (number, get) in gets.into_iter().enumerate() {
                match self.start_get(get, number, &batch) {
                    Ok(transfer) => transfers.push(transfer),
                    Err(error) => {
                        let failed = Err(error);
                        self.core().traffic.get(&failed, 0);
                        batch.set(number, failed);
                    }
                }
            }
            self.core().disk.start(transfers);
            batch.seal();
            results.await.expect("every transfer ends")
        })
    }

    fn start_get(
        &self,
        get: Get,
        number: usize,
        batch: &Arc<BatchResults<Header>>,
    ) -> Result<Transfer, StoreError> {
        let core = self.core().clone();
        // Before the check: a shutdown waits for every call that found the store open.
        let ticket = self.handle.in_flight.begin();
        core.registry.check_get(&get)?;
        let (slot, length) = {
            let state = &mut *core.state.lock();
            state.check_open()?;
            let catalogue = &mut state.catalogue;
            let (slot, length) = catalogue.begin_read(&get.id).ok_or(StoreError::Missing)?;
            if length as usize != get.target.len() {
                catalogue.end_read(slot);
                let (expected, found) = (get.target.len(), length as usize);
                return Err(StoreError::Length { expected, found });
            }
            (slot, length)
        };
        let (arrival, parts, copied) = ObjectRead::new(get);
        Traffic::count(&core.bounced_bytes, copied);
        let offset = core.config.layout().slot_offset(slot);
        let batch = batch.clone();
        let done = move |result: io::Result<()>, parts: Parts| {
            let id = arrival.id;
            let result = match result {
                Ok(()) => arrival.verify(parts).map_err(StoreError::Corrupt),
                Err(error) => {
                    // Return the page before the result is reported.
                    drop((arrival, parts));
                    Err(transfer_error("reading an object", &error))
                }
            };
            core.end_get(slot, &id, &result);
            core.traffic.get(&result, length as usize);
            batch.set(number, result);
            drop(core);
            drop(ticket);
        };
        Ok(Transfer::new(Direction::Read, DiskFile::Data, offset, parts, done))
    }

    /// Reserves a slot for an object.
    fn reserve(
        &self,
        put: Put,
        pin: Option<Pin>,
        number: usize,
        batch: &BatchResults<Stored>,
    ) -> Result<SlotRequest, StoreError> {
        let core = self.core();
        let ticket = self.handle.in_flight.begin();
        core.registry.check_put(&put)?;
        let (bytes, max) = (put.source.len(), core.config.object_bytes_max);
        if bytes > max {
            return Err(StoreError::TooLarge { bytes, max });
        }
        Ok(match core.try_reserve(&put.id, bytes as u32, pin)? {
            Reserved::Slot(slot) => SlotRequest::Slot(SlotWrite { put, slot, number, ticket }),
            Reserved::AlreadyThere(_) => {
                core.traffic.put(&Ok(Stored::AlreadyThere), bytes);
                batch.set(number, Ok(Stored::AlreadyThere));
                SlotRequest::Nothing
            }
            Reserved::NoSlot => SlotRequest::NoRoom(put),
        })
    }

    /// Starts to write objects whose slots were reserved together and are mostly adjacent.
    fn start_puts(&self, writings: Vec<SlotWrite>, batch: &Arc<BatchResults<Stored>>) {
        let transfer = |writing| self.put_transfer(writing, batch.clone());
        self.core().disk.start(writings.into_iter().map(transfer).collect());
    }

    fn put_transfer(&self, writing: SlotWrite, batch: Arc<BatchResults<Stored>>) -> Transfer {
        let core = self.core().clone();
        let SlotWrite { put, slot, number, ticket } = writing;
        let length = put.source.len();
        let header = put.header();
        let (parts, copied) = write_parts(&header, put.source);
        Traffic::count(&core.bounced_bytes, copied);
        let offset = core.config.layout().slot_offset(slot);
        let done = move |result: io::Result<()>, parts: Parts| {
            drop(parts);
            let result = match result {
                Ok(()) => Ok(Stored::New),
                Err(error) => Err(StoreError::io("writing an object", &error)),
            };
            core.end_put(slot, &result);
            core.traffic.put(&result, length);
            batch.set(number, result);
            drop(core);
            drop(ticket);
        };
        Transfer::new(Direction::Write, DiskFile::Data, offset, parts, done)
    }

    fn core(&self) -> &Arc<DiskCore> {
        &self.handle.core
    }
}

impl DiskCore {
    fn try_reserve(
        &self,
        id: &ObjectId,
        length: u32,
        pin: Option<Pin>,
    ) -> Result<Reserved, StoreError> {
        if let Some(error) = &self.progress.borrow().broken {
            return Err(error.clone());
        }
        let state = &mut *self.state.lock();
        state.check_open()?;
        let reserved = state.catalogue.reserve(id, length, pin, self.now_ms())?;
        if let (Reserved::AlreadyThere(slot), Some(pin)) = (&reserved, pin) {
            state.note_pin(*slot, pin);
        }
        Ok(reserved)
    }

    /// Waits until a slot may be free.
    async fn room(&self, deadline: Instant) -> Result<(), StoreError> {
        /// Interval of checks for leases that have expired, which nothing reports.
        const LEASE_CHECK: Duration = Duration::from_millis(50);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let round = {
                let state = &mut *self.state.lock();
                state.wants_room = true;
                self.want_round(state)
            };
            match tokio::time::timeout_at(deadline, self.round_done(round)).await {
                Ok(result) => result?,
                Err(_) => return Err(StoreError::Full),
            }
            {
                let catalogue = &self.state.lock().catalogue;
                if catalogue.has_free() {
                    return Ok(());
                }
                if catalogue.is_stuck(self.now_ms()) || Instant::now() >= deadline {
                    return Err(StoreError::Full);
                }
            }
            // All slots are being written or read; the first to be released can be evicted.
            let _ = tokio::time::timeout(LEASE_CHECK, changed).await;
        }
    }

    fn end_put(&self, slot: Slot, result: &Result<Stored, StoreError>) {
        let mut state = self.state.lock();
        if result.is_err() {
            Traffic::count(&self.io_errors, 1);
            state.catalogue.abandon(slot);
        } else {
            let replaced = state.catalogue.publish(slot);
            if !replaced.contains(&slot) {
                state.fresh.push(slot);
            }
            state.superseded.extend(replaced);
        }
        self.note_change(state);
    }

    fn end_get(&self, slot: Slot, id: &ObjectId, result: &Result<Header, StoreError>) {
        let mut state = self.state.lock();
        state.catalogue.end_read(slot);
        match result {
            Ok(_) => {}
            Err(StoreError::Corrupt(_)) => state.catalogue.doom_if(slot, id),
            Err(_) => Traffic::count(&self.io_errors, 1),
        }
        self.note_change(state);
    }

    /// Notifies puts that wait for room, and the committer if it is idle and has work. Wakers may
    /// run arbitrary code, so it happens outside the lock.
    fn note_change(&self, mut state: MutexGuard<'_, DiskState>) {
        let wakes = state.committer_sleeps && state.is_dirty();
        // One notification is enough.
        state.committer_sleeps &= !wakes;
        drop(state);
        if wakes {
            self.round_wanted.notify_all();
        }
        self.changed.notify_waiters();
    }

    /// Requests a commit and returns its number. It includes all changes so far.
    fn want_round(&self, state: &mut DiskState) -> u64 {
        state.wants_round = true;
        self.round_wanted.notify_all();
        // Replaced objects leave the index one commit later.
        state.rounds_begun + 1 + u64::from(!state.superseded.is_empty())
    }

    /// Waits until all changes so far are durable.
    async fn flush(&self) -> Result<(), StoreError> {
        let round = {
            let state = &mut *self.state.lock();
            self.want_round(state)
        };
        self.round_done(round).await
    }

    async fn round_done(&self, round: u64) -> Result<(), StoreError> {
        let mut progress = self.progress.subscribe();
        let reached = |progress: &Progress| progress.rounds >= round || progress.broken.is_some();
        loop {
            let ready = {
                let progress = progress.borrow_and_update();
                reached(&progress).then(|| progress.broken.clone())
            };
            match ready {
                Some(None) => return Ok(()),
                Some(Some(broken)) => return Err(broken),
                None => {
                    self.state.lock().wants_round = true;
                    self.round_wanted.notify_all();
                }
            }
            progress.changed().await.map_err(|_| StoreError::Closed)?;
        }
    }

    /// Applies an operation to each object, and notifies puts that wait for room.
    fn each<'a, T: Send>(
        &'a self,
        ids: &'a [ObjectId],
        mut change: impl FnMut(&mut DiskState, &ObjectId) -> Result<T, StoreError> + Send + 'a,
    ) -> Answer<'a, Results<T>> {
        Box::pin(async move {
            let mut state = self.state.lock();
            let open = state.check_open();
            let change = |id| open.clone().and_then(|()| change(&mut state, id));
            let results = ids.iter().map(change).collect();
            self.note_change(state);
            results
        })
    }

    pub(super) fn now_ms(&self) -> u64 {
        self.born.elapsed().as_millis() as u64
    }
}

impl Store for DiskStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.core().state.lock().check_open()?;
        self.core().registry.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        let core = self.core();
        Traffic::count(&core.traffic.exists, ids.len());
        core.each(ids, move |state, id| {
            let Some(slot) = state.catalogue.find(id) else { return Ok(Presence::Absent) };
            if options.lease {
                let DiskConfig { lease_ttl_ms, leased_share_max, .. } = core.config;
                let leases_max = leases_max(state.slots_max, leased_share_max);
                state.catalogue.lease(slot, core.now_ms(), lease_ttl_ms, leases_max);
            }
            Ok(Presence::Present(Place::Disk))
        })
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(async move {
            let core = self.core();
            let (batch, results) = BatchResults::new(puts.len());
            let wait = Duration::from_millis(core.config.full_wait_ms);
            let mut deadline = None;
            // Empty at every await: if the caller left then, the slots would not be released.
            let mut writings = Vec::new();
            let mut ready_bytes = 0;
            for (number, mut put) in puts.into_iter().enumerate() {
                let taken = loop {
                    match self.reserve(put, options.pin, number, &batch) {
                        Ok(SlotRequest::NoRoom(waiting)) => {
                            // The wait may be for slots of these very writes.
                            self.start_puts(std::mem::take(&mut writings), &batch);
                            // One deadline for the whole batch.
                            let until = *deadline.get_or_insert_with(|| Instant::now() + wait);
                            match core.room(until).await {
                                Ok(()) => put = waiting,
                                Err(error) => break Err(error),
                            }
                        }
                        taken => break taken,
                    }
                };
                match taken {
                    Ok(SlotRequest::Slot(writing)) => {
                        deadline = None;
                        ready_bytes += writing.put.source.len();
                        writings.push(writing);
                    }
                    Ok(SlotRequest::Nothing | SlotRequest::NoRoom(_)) => {}
                    Err(error) => {
                        let failed = Err(error);
                        core.traffic.put(&failed, 0);
                        batch.set(number, failed);
                    }
                }
                if ready_bytes >= START_BYTES {
                    ready_bytes = 0;
                    self.start_puts(std::mem::take(&mut writings), &batch);
                    tokio::task::yield_now().await;
                }
            }
            self.start_puts(writings, &batch);
            batch.seal();
            let mut results = results.await.expect("every transfer ends");
            if options.durable
                && let Err(error) = core.flush().await
            {
                for result in &mut results {
                    if result.is_ok() {
                        *result = Err(error.clone());
                    }
                }
            }
            results
        })
    }

    fn get_into(&self, gets: Vec<Get>, _: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(async move {
            let served = Served { place: Place::Disk, waited: false };
            self.fetch(gets).await.into_iter().map(|result| result.map(|_| served)).collect()
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        let now_ms = self.core().now_ms();
        self.core().each(ids, move |state, id| {
            let slot = state.catalogue.pin(id, pin, now_ms)?;
            state.note_pin(slot, pin);
            Ok(())
        })
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        self.core().each(ids, move |state, id| {
            let slot = state.catalogue.unpin(id, pin)?;
            state.note_pin(slot, pin);
            Ok(())
        })
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        let now_ms = self.core().now_ms();
        self.core().each(ids, move |state, id| state.catalogue.remove(id, removal, now_ms))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.core().state.lock().check_open()?;
            self.core().flush().await
        })
    }

    fn stats(&self) -> StoreStats {
        let core = self.core();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (stats, slots_max) = {
            let state = core.state.lock();
            (state.catalogue.stats(core.config.object_bytes_max, core.now_ms()), state.slots_max)
        };
        let stats = core.traffic.fill(TierStats {
            arenas: core.registry.arenas() as u64,
            // Less than configured if the disk is full.
            capacity_bytes: u64::from(slots_max) * core.config.object_bytes_max as u64,
            io_errors: read(&core.io_errors),
            bounced_bytes: read(&core.bounced_bytes),
            commits: read(&core.commits),
            disk_full: read(&core.disk_full),
            broken: u64::from(core.progress.borrow().broken.is_some()),
            ..stats
        });
        StoreStats { disk: Some(stats), ..StoreStats::default() }
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.core().state.lock().closed = true;
            self.handle.in_flight.none().await;
            self.core().flush().await
        })
    }
}

impl Drop for OpenStore {
    fn drop(&mut self) {
        self.in_flight.none_blocking();
        self.core.state.lock().closing = true;
        self.core.round_wanted.notify_all();
        if let Some(committer) = self.committer.lock().take() {
            join(committer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_cache::PageKey;

    /// Lookups give the committer no work.
    #[tokio::test]
    async fn lookups_let_the_committer_sleep() {
        let folder = tempfile::tempdir().unwrap();
        let store = DiskStore::open(DiskConfig::new(folder.path(), 1 << 20, 4096)).unwrap();
        let arena = Arena::new(1, 4096).unwrap();
        let _registration = store.register(&arena).unwrap();
        let id = ObjectId::page(PageKey(1), PageKey(2));
        let put = Put::new(id, arena.source(0).unwrap());
        store.put_from(vec![put], PutOptions::default()).await.remove(0).unwrap();
        store.flush().await.unwrap();
        let core = store.core();
        while !core.state.lock().committer_sleeps {
            tokio::task::yield_now().await;
        }
        let looks = core.state.lock().committer_polls;
        for _ in 0..1000 {
            let there = store.exists(&[id], ExistsOptions::default()).await.remove(0).unwrap();
            assert!(there.is_present());
            let get = Get::new(id, arena.target(0).unwrap());
            store.get_into(vec![get], GetOptions::default()).await.remove(0).unwrap();
        }
        assert_eq!(core.state.lock().committer_polls, looks);
        let rounds = core.progress.borrow().rounds;
        store.remove(&[id], Removal::Forced).await.remove(0).unwrap();
        while core.progress.borrow().rounds == rounds {
            tokio::task::yield_now().await;
        }
    }
}
