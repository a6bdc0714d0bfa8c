//! Puts: each object of a batch gets its slot in the batch's order, and then all are written
//! concurrently.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;

use super::BucketsCore;
use terrace_l3::backend::{Departure, Reserved, Slot};
use terrace_l3::{ObjectId, Pin, Put, PutOptions, Results, Source, StoreError, Stored};

/// Result of claiming a slot for a put.
pub(crate) enum SlotClaim {
    Mine(Slot),
    /// The object exists as far as this client knows, and is kept until `end_read`.
    There(Slot),
    /// The batch itself uses all slots: wait for its writes.
    WriteFirst,
}

/// A page in transfer. The bucket's client may hold it slightly longer than the request.
struct Page {
    source: Source,
    _ended: oneshot::Sender<()>,
}

impl AsRef<[u8]> for Page {
    fn as_ref(&self) -> &[u8] {
        &self.source
    }
}

impl BucketsCore {
    pub(super) async fn put(
        self: Arc<Self>,
        puts: Results<Put>,
        options: PutOptions,
    ) -> Results<Stored> {
        let objects = puts.len();
        let length = |put: &Result<Put, _>| put.as_ref().map_or(0, |put| put.source.len());
        let lengths: Vec<usize> = puts.iter().map(length).collect();
        let mut results: Results<Stored> = vec![Err(StoreError::BeingWritten); objects];
        let mut writing = JoinSet::new();
        let mut unwell = None;
        for (place, put) in puts.into_iter().enumerate() {
            let begun = loop {
                let put = match (&put, &unwell) {
                    (Err(error), _) | (Ok(_), Some(error)) => break Err(StoreError::clone(error)),
                    (Ok(put), None) => put,
                };
                let (length, room_for) = (put.source.len(), objects - place);
                let has_slots = !writing.is_empty();
                match self.claim(&put.id, length, options.pin, room_for, has_slots).await {
                    Ok(SlotClaim::WriteFirst) => settle(&mut results, writing.join_next().await),
                    claim => break claim,
                }
            };
            match begun.and_then(|claim| put.map(|put| (put, claim))) {
                Ok((put, claim)) => {
                    let (shared, pin) = (self.clone(), options.pin);
                    writing.spawn(async move { (place, shared.put_one(put, claim, pin).await) });
                }
                Err(error) => {
                    // The rest will not find room either, each after its own wait.
                    unwell = unwell.or_else(|| error.is_unwell().then(|| error.clone()));
                    results[place] = Err(error);
                }
            }
        }
        while let Some(written) = writing.join_next().await {
            settle(&mut results, Some(written));
        }
        if options.durable
            && let Err(error) = self.bucket.sync().await
        {
            results.iter_mut().filter(|it| it.is_ok()).for_each(|it| *it = Err(error.clone()));
        }
        for (result, bytes) in results.iter().zip(lengths) {
            self.traffic.put(result, bytes);
        }
        results
    }

    /// Reserves a slot for an object, evicting up to `room_for` objects if necessary.
    pub(super) async fn claim(
        self: &Arc<Self>,
        id: &ObjectId,
        length: usize,
        pin: Option<Pin>,
        room_for: usize,
        batch_has_slots: bool,
    ) -> Result<SlotClaim, StoreError> {
        let max = self.config.object_bytes_max;
        if length > max {
            return Err(StoreError::TooLarge { bytes: length, max });
        }
        let until = Instant::now() + Duration::from_millis(self.config.full_wait_ms);
        loop {
            let (departures, otherwise) = {
                let now_ms = self.ledger.now_ms();
                let mut state = self.ledger.lock();
                if state.is_leaving(id) {
                    (
                        state.departures.take_stuck(id).into_iter().collect(),
                        StoreError::BeingWritten,
                    )
                } else {
                    match state.catalogue.reserve(id, length as u32, pin, now_ms)? {
                        Reserved::Slot(slot) => return Ok(SlotClaim::Mine(slot)),
                        Reserved::AlreadyThere(slot) => {
                            let readable = state.catalogue.begin_read(id).is_some();
                            return readable
                                .then_some(SlotClaim::There(slot))
                                .ok_or(StoreError::BeingWritten);
                        }
                        Reserved::NoSlot => {}
                    }
                    let room_for = room_for.min(self.concurrent_removals_max());
                    let mut departures = state.departures.take_all_stuck(room_for);
                    for _ in departures.len()..room_for {
                        if !state.catalogue.evict(now_ms) {
                            break;
                        }
                    }
                    departures.extend(state.take_departures());
                    if departures.is_empty() && batch_has_slots {
                        return Ok(SlotClaim::WriteFirst);
                    }
                    if departures.is_empty() && state.catalogue.is_stuck(now_ms) {
                        return Err(StoreError::Full);
                    }
                    (departures, StoreError::Full)
                }
            };
            if !departures.is_empty() {
                self.remove_departing(departures).await?;
            } else if !self.ledger.wait(until).await {
                return Err(otherwise);
            }
        }
    }

    async fn put_one(
        self: &Arc<Self>,
        put: Put,
        claim: SlotClaim,
        pin: Option<Pin>,
    ) -> Result<Stored, StoreError> {
        let claim = match claim {
            // Another client may have removed it.
            SlotClaim::There(slot) if !self.is_still_there(&put.id, slot).await? => {
                self.claim(&put.id, put.source.len(), pin, 1, false).await?
            }
            claim => claim,
        };
        match claim {
            SlotClaim::Mine(slot) => self.write(put, slot, pin).await,
            SlotClaim::There(slot) => {
                self.ledger.lock().catalogue.end_read(slot);
                Ok(Stored::AlreadyThere)
            }
            SlotClaim::WriteFirst => Err(StoreError::Full),
        }
    }

    /// Checks that the bucket has an object of the ledger; if not, removes it from the ledger.
    async fn is_still_there(&self, id: &ObjectId, slot: Slot) -> Result<bool, StoreError> {
        let length = self.bucket.length(id).await;
        match length {
            Ok(_) => Ok(true),
            Err(StoreError::Missing) => {
                self.ledger.lock().end_read_of_missing(id, slot);
                Ok(false)
            }
            Err(error) => {
                self.ledger.lock().catalogue.end_read(slot);
                Err(error)
            }
        }
    }

    async fn write(
        self: &Arc<Self>,
        put: Put,
        slot: Slot,
        pin: Option<Pin>,
    ) -> Result<Stored, StoreError> {
        let id = put.id;
        let lower = match self.lower_generations(&id).await {
            Ok(lower) => lower,
            Err(error) => {
                self.ledger.lock().catalogue.abandon(slot);
                self.ledger.notify();
                return Err(error);
            }
        };
        let written = self.send(put, pin).await;
        let departures: Vec<Departure> = {
            let mut state = self.ledger.lock();
            match &written {
                // An object of another client belongs to it, unless it is pinned here.
                Ok(Stored::AlreadyThere) if pin.is_none() => {
                    state.catalogue.abandon(slot);
                    Vec::new()
                }
                Ok(Stored::AlreadyThere) => state.adopt(slot),
                Ok(Stored::New) => {
                    let replaced = state.catalogue.publish(slot);
                    state.depart_from(replaced)
                }
                Err(error) if error.may_have_happened() => {
                    state.park(id, slot);
                    Vec::new()
                }
                Err(_) => {
                    state.catalogue.abandon(slot);
                    Vec::new()
                }
            }
        };
        self.ledger.notify();
        // Objects that cannot be removed now are retried later.
        let _ = self.remove_departing(departures).await;
        if written.is_ok() {
            for generation in lower {
                self.discard(id.with_generation(generation)).await;
            }
        }
        written
    }

    /// Generations that a put replaces; an error if the bucket has a higher one. Pages have one
    /// generation, and nothing is listed for them.
    async fn lower_generations(&self, id: &ObjectId) -> Result<Vec<u64>, StoreError> {
        if id.generation == 0 {
            return Ok(Vec::new());
        }
        let mut generations = self.bucket.generations(id).await?;
        let present = generations.iter().copied().max().unwrap_or(0);
        if present > id.generation {
            return Err(StoreError::Superseded { present });
        }
        generations.retain(|generation| *generation < id.generation);
        Ok(generations)
    }

    /// Writes header and payload to the bucket. An existing object that gets a pin must be sound.
    async fn send(&self, put: Put, pin: Option<Pin>) -> Result<Stored, StoreError> {
        let (_ended, ended) = oneshot::channel();
        let header = Bytes::copy_from_slice(&put.header().encode());
        let id = &put.id;
        let page = Bytes::from_owner(Page { source: put.source, _ended });
        let mut stored = Err(StoreError::BeingWritten);
        for _ in 0..2 {
            stored = match self.bucket.create(id, [header.clone(), page.clone()]).await {
                Ok(true) => Ok(Stored::New),
                Ok(false) if pin.is_none() => Ok(Stored::AlreadyThere),
                Ok(false) => match self.bucket.sound_length(id).await {
                    Ok(_) => Ok(Stored::AlreadyThere),
                    Err(StoreError::Missing) => continue,
                    Err(StoreError::Corrupt(_)) => {
                        self.bucket.delete(&[*id]).await.remove(0)?;
                        continue;
                    }
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            };
            break;
        }
        drop(page);
        let _ = timeout(self.bucket.patience(), ended).await;
        stored
    }
}

/// Result of a put, with its index in the batch.
type PutResult = (usize, Result<Stored, StoreError>);

fn settle(results: &mut Results<Stored>, written: Option<Result<PutResult, JoinError>>) {
    match written {
        Some(Ok((place, result))) => results[place] = result,
        Some(Err(panicked)) => std::panic::resume_unwind(panicked.into_panic()),
        None => {}
    }
}
