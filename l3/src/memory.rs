//! In-memory backend.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::arena::{Arena, Source, Target};
use crate::catalogue::{
    Catalogue, NamespaceShare, Reserved, Slot, check_shares, leases_max, slots_of,
};
use crate::object::{HEADER_BYTES, Header, Mismatch, ObjectId, copy_with_checksum};
use crate::registry::{Registration, Registry};
use crate::stats::{StoreStats, TierStats};
use crate::store::{
    Answer, ExistsOptions, Get, GetOptions, Owner, Pin, Place, Presence, Put, PutOptions, Removal,
    Results, Served, Store, StoreError, Stored,
};
use crate::traffic::Traffic;

/// Size of a memory store, and its eviction thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Memory for payloads. The system provides it on first use, in huge pages where it has them.
    pub capacity_bytes: u64,
    /// Maximum object size; every object takes a slot of this size.
    pub object_bytes_max: usize,
    /// Eviction starts when more than this share of the slots is in use ...
    pub watermark_high: f64,
    /// ... and continues, a few objects per put, down to this share.
    pub watermark_low: f64,
    /// Duration of a lease.
    pub lease_ttl_ms: u64,
    /// Maximum share of the slots that may be leased at a time, so that puts always find room.
    pub leased_share_max: f64,
}

impl MemoryConfig {
    /// A store of `capacity_bytes` in slots of `object_bytes_max`.
    #[must_use]
    pub fn new(capacity_bytes: u64, object_bytes_max: usize) -> Self {
        Self {
            capacity_bytes,
            object_bytes_max,
            watermark_high: 0.95,
            watermark_low: 0.90,
            lease_ttl_ms: 5_000,
            leased_share_max: 0.5,
        }
    }

    fn slots(&self) -> io::Result<Slot> {
        let slots = slots_of(self.capacity_bytes, self.object_bytes_max as u64);
        check_shares(self.watermark_low, self.watermark_high, self.leased_share_max)
            .and(slots)
            .map_err(io::Error::other)
    }
}

/// A store in memory. Clones are the same store.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    shared: Arc<MemoryCore>,
}

#[derive(Debug)]
struct MemoryCore {
    config: MemoryConfig,
    arena: Arena,
    registry: Registry,
    state: Mutex<MemoryState>,
    born: Instant,
    closed: AtomicBool,
    traffic: Traffic,
}

#[derive(Debug)]
struct MemoryState {
    catalogue: Catalogue,
    headers: Vec<[u8; HEADER_BYTES]>,
    /// True from the high watermark until the low one is reached.
    making_room: bool,
    /// Slots whose write was abandoned. Their pages may still be lent.
    abandoned: Vec<Slot>,
}

impl MemoryState {
    fn publish(&mut self, slot: Slot, header: &Header) {
        self.headers[slot as usize] = header.encode();
        for replaced in self.catalogue.publish(slot) {
            self.catalogue.release(replaced);
        }
    }
}

/// Maximum number of objects that a put evicts while room is made.
const EVICTIONS_PER_PUT: usize = 4;

/// Number of bytes to copy before yielding to other tasks.
const YIELD_BYTES: usize = 1 << 20;

impl MemoryStore {
    /// Creates an empty store.
    ///
    /// # Errors
    /// If the configuration is invalid or the system has not enough memory.
    pub fn new(config: MemoryConfig) -> io::Result<Self> {
        let slots = config.slots()?;
        let shared = MemoryCore {
            arena: Arena::in_huge_pages(slots, config.object_bytes_max)?,
            registry: Registry::default(),
            state: Mutex::new(MemoryState {
                catalogue: Catalogue::new(slots, slots),
                headers: vec![[0; HEADER_BYTES]; slots as usize],
                making_room: false,
                abandoned: Vec::new(),
            }),
            born: Instant::now(),
            closed: AtomicBool::new(false),
            traffic: Traffic::default(),
            config,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Reserves a slot for an object that the caller will write; `None` if the object is present.
    pub fn reserve(
        &self,
        id: ObjectId,
        length: usize,
        pin: Option<Pin>,
    ) -> Result<Option<Reservation>, StoreError> {
        self.check_open()?;
        let max = self.shared.config.object_bytes_max;
        if length > max {
            return Err(StoreError::TooLarge { bytes: length, max });
        }
        let now_ms = self.now_ms();
        let mut state = self.shared.state.lock();
        self.reclaim(&mut state);
        loop {
            match state.catalogue.reserve(&id, length as u32, pin, now_ms)? {
                Reserved::AlreadyThere(_) => return Ok(None),
                Reserved::Slot(slot) => {
                    state.catalogue.release_doomed();
                    self.make_room(&mut state, now_ms);
                    let lent = self.shared.arena.target(slot);
                    let target = lent.expect("a free slot has no readers").first(length);
                    let store = self.clone();
                    let target = Some(target);
                    return Ok(Some(Reservation { store, slot, target, published: false }));
                }
                Reserved::NoSlot
                    if state.catalogue.doomed() > 0 || state.catalogue.evict(now_ms) =>
                {
                    state.catalogue.release_doomed();
                }
                Reserved::NoSlot => return Err(StoreError::Full),
            }
        }
    }

    /// Limits groups of namespaces to shares of the slots.
    pub fn set_shares(&self, shares: &[NamespaceShare]) {
        self.shared.state.lock().catalogue.set_shares(shares);
    }

    /// Memory of the objects, one slot per page.
    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// Lends the slot of an object for reading, with the header of its bytes. The bytes are not
    /// verified: the reader must do that.
    pub fn lend(&self, id: &ObjectId, length: usize) -> Result<SlotLoan, StoreError> {
        let lent = self.try_lend(id, length);
        self.shared.traffic.get(&lent, length);
        lent
    }

    fn try_lend(&self, id: &ObjectId, length: usize) -> Result<SlotLoan, StoreError> {
        self.check_open()?;
        let mut state = self.shared.state.lock();
        let (slot, found) = state.catalogue.begin_read(id).ok_or(StoreError::Missing)?;
        let header = state.headers[slot as usize];
        if found as usize != length {
            state.catalogue.end_read(slot);
            return Err(StoreError::Length { expected: length, found: found as usize });
        }
        drop(state);
        Ok(self.loan(slot, length, header))
    }

    /// Loan of a slot that is being read.
    fn loan(&self, slot: Slot, length: usize, header: [u8; HEADER_BYTES]) -> SlotLoan {
        let source = self.shared.arena.source(slot);
        let source = Some(source.expect("a present slot is not written").first(length));
        SlotLoan { store: self.clone(), slot, source, header }
    }

    /// Verifies an object that a reader could not verify, and removes it if it is damaged.
    pub fn inspect(&self, id: &ObjectId) {
        let Some(length) = self.length(id) else { return };
        let Ok(loan) = self.try_lend(id, length) else { return };
        let verified = Header::verify(&loan.header, id, length as u64);
        if verified.and_then(|header| header.verify_payload(loan.source())).is_err() {
            let damaged = Err::<(), _>(StoreError::Corrupt(Mismatch::Payload));
            self.shared.traffic.get(&damaged, length);
            let catalogue = &mut self.shared.state.lock().catalogue;
            catalogue.doom_if(loan.slot, id);
            catalogue.release_doomed();
        }
    }

    /// Returns true if no slot is free and none can be evicted until a pin, lease or read changes
    /// that.
    pub fn is_stuck(&self) -> bool {
        let mut state = self.shared.state.lock();
        self.reclaim(&mut state);
        state.catalogue.is_stuck(self.now_ms())
    }

    /// Marks the owner as connected: its pins last until it is [let go](Self::let_go).
    pub fn hold(&self, owner: Owner) {
        self.shared.state.lock().catalogue.hold(owner);
    }

    /// Marks the owner as disconnected: its pins last for `patience`, unless it returns.
    pub fn let_go(&self, owner: Owner, patience: Duration) {
        let until_ms = self.now_ms().saturating_add(patience.as_millis() as u64);
        self.shared.state.lock().catalogue.let_go(owner, until_ms);
    }

    /// Maximum object size.
    pub fn object_bytes_max(&self) -> usize {
        self.shared.config.object_bytes_max
    }

    /// Counts a put whose bytes were written directly to a slot.
    pub fn count_put(&self, result: &Result<Stored, StoreError>, bytes: usize) {
        self.shared.traffic.put(result, bytes);
    }

    fn length(&self, id: &ObjectId) -> Option<usize> {
        let catalogue = &self.shared.state.lock().catalogue;
        catalogue.find(id).map(|slot| catalogue.length(slot) as usize)
    }

    /// Returns true if the object is present. Unlike [`Store::exists`], it is not counted.
    pub fn contains(&self, id: &ObjectId) -> bool {
        self.shared.state.lock().catalogue.find(id).is_some()
    }

    /// Removes all lower generations of the object, which need not be present itself.
    pub fn supersede(&self, id: &ObjectId) {
        let catalogue = &mut self.shared.state.lock().catalogue;
        catalogue.doom_lower(id);
        catalogue.release_doomed();
    }

    /// Returns the error with which a removal would be refused, if any.
    pub fn check_removal(&self, id: &ObjectId, removal: Removal) -> Result<(), StoreError> {
        let state = self.shared.state.lock();
        state.catalogue.check_removal(id, removal, self.now_ms()).map(drop)
    }

    /// Stores an object and lends its slot, which prevents its eviction; `None` if the object was
    /// present.
    pub fn put_and_lend(&self, put: &Put) -> Result<Option<SlotLoan>, StoreError> {
        let lent = match self.copy_in(put, None) {
            Ok(Some((slot, header))) => slot.publish_and_lend(&header).map(Some),
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        let stored = lent.as_ref().map(|lent| stored(lent.is_some())).map_err(Clone::clone);
        self.shared.traffic.put(&stored, put.source.len());
        lent
    }

    fn put(&self, put: &Put, pin: Option<Pin>) -> Result<Stored, StoreError> {
        let copied = self.copy_in(put, pin)?;
        let is_new = copied.is_some();
        if let Some((slot, header)) = copied {
            slot.publish(&header, false);
        }
        Ok(stored(is_new))
    }

    /// Copies an object to a slot that cannot be found yet; `None` if the object is present.
    fn copy_in(
        &self,
        put: &Put,
        pin: Option<Pin>,
    ) -> Result<Option<(Reservation, Header)>, StoreError> {
        self.shared.registry.check_put(put)?;
        let Some(mut slot) = self.reserve(put.id, put.source.len(), pin)? else {
            return Ok(None);
        };
        let checksum = copy_with_checksum(&put.source, &mut slot.target());
        Ok(Some((slot, put.header_with(checksum))))
    }

    fn get(&self, get: &mut Get) -> Result<Served, StoreError> {
        self.check_open()?;
        self.shared.registry.check_get(get)?;
        let (slot, length, header) = {
            let mut state = self.shared.state.lock();
            let (slot, length) = state.catalogue.begin_read(&get.id).ok_or(StoreError::Missing)?;
            (slot, length as usize, state.headers[slot as usize])
        };
        let verified = if length == get.target.len() {
            get.verify(&header)
                .and_then(|header| {
                    let source = self.shared.arena.source(slot);
                    let source = source.expect("a present slot is not written").first(length);
                    header.verify_checksum(copy_with_checksum(&source, &mut get.target))
                })
                .map_err(StoreError::Corrupt)
        } else {
            Err(StoreError::Length { expected: get.target.len(), found: length })
        };
        let mut state = self.shared.state.lock();
        state.catalogue.end_read(slot);
        if let Err(StoreError::Corrupt(_)) = verified {
            state.catalogue.doom_if(slot, &get.id);
            state.catalogue.release_doomed();
        }
        verified.map(|()| Served { place: Place::Memory, waited: false })
    }

    /// Frees the abandoned slots whose pages are no longer lent.
    fn reclaim(&self, state: &mut MemoryState) {
        let MemoryState { catalogue, abandoned, .. } = state;
        abandoned.retain(|slot| {
            let returned = self.shared.arena.target(*slot).is_ok();
            if returned {
                catalogue.abandon(*slot);
            }
            !returned
        });
    }

    fn make_room(&self, state: &mut MemoryState, now_ms: u64) {
        let MemoryConfig { watermark_high, watermark_low, .. } = self.shared.config;
        let used_share = f64::from(state.catalogue.used()) / f64::from(state.catalogue.slots());
        state.making_room |= used_share > watermark_high;
        state.making_room &= used_share > watermark_low;
        if state.making_room {
            for _ in 0..EVICTIONS_PER_PUT {
                if !state.catalogue.evict(now_ms) {
                    break;
                }
            }
            state.catalogue.release_doomed();
        }
    }

    fn lease(&self, state: &mut MemoryState, slot: Slot) {
        let MemoryConfig { lease_ttl_ms, leased_share_max, .. } = self.shared.config;
        let leases_max = leases_max(state.catalogue.slots(), leased_share_max);
        state.catalogue.lease(slot, self.now_ms(), lease_ttl_ms, leases_max);
    }

    fn each<'a, T>(
        &'a self,
        ids: &'a [ObjectId],
        mut change: impl FnMut(&mut Catalogue, &ObjectId) -> Result<T, StoreError> + Send + 'a,
    ) -> Answer<'a, Results<T>>
    where
        T: Send,
    {
        Box::pin(async move {
            let closed = self.check_open();
            let catalogue = &mut self.shared.state.lock().catalogue;
            let change = |id| closed.clone().and_then(|()| change(catalogue, id));
            ids.iter().map(change).collect()
        })
    }

    fn check_open(&self) -> Result<(), StoreError> {
        if self.shared.closed.load(Ordering::Acquire) { Err(StoreError::Closed) } else { Ok(()) }
    }

    fn now_ms(&self) -> u64 {
        self.shared.born.elapsed().as_millis() as u64
    }
}

impl Store for MemoryStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.check_open()?;
        self.shared.registry.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(async move {
            if let Err(closed) = self.check_open() {
                return vec![Err(closed); ids.len()];
            }
            Traffic::count(&self.shared.traffic.exists, ids.len());
            let state = &mut *self.shared.state.lock();
            let find = |id| match state.catalogue.find(id) {
                Some(slot) => {
                    if options.lease {
                        self.lease(state, slot);
                    }
                    Ok(Presence::Present(Place::Memory))
                }
                None => Ok(Presence::Absent),
            };
            ids.iter().map(find).collect()
        })
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(async move {
            let mut results = Vec::with_capacity(puts.len());
            let mut copied_bytes = 0;
            for put in puts {
                let result = self.put(&put, options.pin);
                self.shared.traffic.put(&result, put.source.len());
                results.push(result);
                yield_after_copy(&mut copied_bytes, put.source.len()).await;
            }
            results
        })
    }

    fn get_into(&self, gets: Vec<Get>, _: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(async move {
            let mut results = Vec::with_capacity(gets.len());
            let mut copied_bytes = 0;
            for mut get in gets {
                let result = self.get(&mut get);
                self.shared.traffic.get(&result, get.target.len());
                results.push(result);
                yield_after_copy(&mut copied_bytes, get.target.len()).await;
            }
            results
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        let now_ms = self.now_ms();
        self.each(ids, move |catalogue, id| catalogue.pin(id, pin, now_ms).map(drop))
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        self.each(ids, move |catalogue, id| catalogue.unpin(id, pin).map(drop))
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        let now_ms = self.now_ms();
        self.each(ids, move |catalogue, id| {
            catalogue.remove(id, removal, now_ms)?;
            catalogue.release_doomed();
            Ok(())
        })
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async { self.check_open() })
    }

    fn stats(&self) -> StoreStats {
        let (slot_bytes, now_ms) = (self.shared.config.object_bytes_max, self.now_ms());
        let stats = self.shared.state.lock().catalogue.stats(slot_bytes, now_ms);
        let memory = TierStats { arenas: self.shared.registry.arenas() as u64, ..stats };
        StoreStats { memory: Some(self.shared.traffic.fill(memory)), ..StoreStats::default() }
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async {
            self.shared.closed.store(true, Ordering::Release);
            Ok(())
        })
    }
}

fn stored(is_new: bool) -> Stored {
    if is_new { Stored::New } else { Stored::AlreadyThere }
}

/// Yields to other tasks from time to time while much is copied.
async fn yield_after_copy(copied_bytes: &mut usize, more_bytes: usize) {
    *copied_bytes += more_bytes;
    if *copied_bytes >= YIELD_BYTES {
        *copied_bytes = 0;
        tokio::task::yield_now().await;
    }
}

/// A slot that is being written. Dropping it frees the slot.
#[derive(Debug)]
pub struct Reservation {
    store: MemoryStore,
    slot: Slot,
    target: Option<Target>,
    published: bool,
}

impl Reservation {
    /// Target for the object's bytes. There is only one.
    pub fn target(&mut self) -> Target {
        self.target.take().expect("a reservation has one target")
    }

    /// The bytes written, for readers; the target must have been returned.
    pub fn source(&self, length: usize) -> Source {
        let source = self.store.shared.arena.source(self.slot);
        source.expect("its target was given back").first(length)
    }

    /// Makes the object visible: its bytes are complete and match `header`.
    pub fn publish(mut self, header: &Header, lease: bool) {
        let mut state = self.store.shared.state.lock();
        self.published = true;
        state.publish(self.slot, header);
        if lease && state.catalogue.is_present(self.slot) {
            self.store.lease(&mut state, self.slot);
        }
    }

    /// Like [`Reservation::publish`], and lends the slot before the object can be evicted.
    fn publish_and_lend(mut self, header: &Header) -> Result<SlotLoan, StoreError> {
        let mut state = self.store.shared.state.lock();
        self.published = true;
        state.publish(self.slot, header);
        // A higher generation may have been published meanwhile.
        let is_present = state.catalogue.is_present(self.slot);
        let lent = is_present.then(|| state.catalogue.begin_moving(self.slot)).flatten();
        drop(state);
        lent.ok_or(StoreError::Missing)?;
        Ok(self.store.loan(self.slot, header.length as usize, header.encode()))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.target = None;
        if !self.published {
            let state = &mut *self.store.shared.state.lock();
            state.abandoned.push(self.slot);
            self.store.reclaim(state);
        }
    }
}

/// A slot that is being read, and is not reused meanwhile.
#[derive(Debug)]
pub struct SlotLoan {
    store: MemoryStore,
    slot: Slot,
    /// Present until the loan ends.
    source: Option<Source>,
    header: [u8; HEADER_BYTES],
}

impl SlotLoan {
    /// The payload.
    pub fn source(&self) -> &Source {
        self.source.as_ref().expect("it is lent until the loan ends")
    }

    /// Header that verifies the payload.
    pub fn header(&self) -> &[u8; HEADER_BYTES] {
        &self.header
    }
}

impl Drop for SlotLoan {
    fn drop(&mut self) {
        self.source = None;
        self.store.shared.state.lock().catalogue.end_read(self.slot);
    }
}
