//! Lookups, reads, pins and removals.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bucket::DELETES_PER_REQUEST;
use super::put::SlotClaim;
use super::{BucketsCore, each};
use terrace_l3::backend::{Departure, SlotUse, leases_max};
use terrace_l3::{
    ExistsOptions, Get, ObjectId, Pin, Place, Presence, Removal, Results, Served, StoreError,
};

/// First step of a removal.
enum Begun {
    /// This one is ours to remove.
    Departure(Departure),
    /// It is not this client's, and may or may not exist.
    Others(Departure),
    /// Another task is removing it.
    Wait,
}

impl BucketsCore {
    pub(super) async fn exist(
        self: Arc<Self>,
        ids: Vec<ObjectId>,
        options: ExistsOptions,
    ) -> Results<Presence> {
        if options.lease {
            let catalogue = &mut self.ledger.lock().catalogue;
            let leases_max = leases_max(catalogue.slots(), self.config.leased_share_max);
            for slot in ids.iter().filter_map(|id| catalogue.find(id)).collect::<Vec<_>>() {
                let (now_ms, ttl_ms) = (self.ledger.now_ms(), self.config.lease_ttl_ms);
                catalogue.lease(slot, now_ms, ttl_ms, leases_max);
            }
        }
        each(ids, |id| {
            let shared = self.clone();
            async move {
                if shared.ledger.lock().is_leaving(&id) {
                    return Ok(Presence::Absent);
                }
                match shared.bucket.length(&id).await {
                    Ok(_) => Ok(Presence::Present(Place::Disk)),
                    Err(StoreError::Missing) => Ok(Presence::Absent),
                    Err(error) => Err(error),
                }
            }
        })
        .await
    }

    pub(super) async fn get(
        self: Arc<Self>,
        get: Result<Get, StoreError>,
    ) -> Result<Served, StoreError> {
        let mut get = get?;
        let result = self.try_get(&mut get).await;
        self.traffic.get(&result, get.target.len());
        result
    }

    async fn try_get(self: &Arc<Self>, get: &mut Get) -> Result<Served, StoreError> {
        let id = get.id;
        let slot = {
            let mut state = self.ledger.lock();
            if state.is_leaving(&id) {
                return Err(StoreError::Missing);
            }
            state.catalogue.begin_read(&id).map(|(slot, _)| slot)
        };
        let read = self.bucket.read(get).await;
        let departures = {
            let mut state = self.ledger.lock();
            match (&read, slot) {
                (Err(StoreError::Missing), Some(slot)) => state.end_read_of_missing(&id, slot),
                (Err(StoreError::Corrupt(_)), Some(slot)) => {
                    state.catalogue.end_read(slot);
                    state.catalogue.doom_if(slot, &id);
                }
                (Ok(()) | Err(_), Some(slot)) => state.catalogue.end_read(slot),
                (Ok(()) | Err(_), None) => {}
            }
            state.take_departures()
        };
        self.ledger.notify();
        // Objects that cannot be removed now are retried later.
        let _ = self.remove_departing(departures).await;
        if let (Err(StoreError::Corrupt(_)), None) = (&read, slot) {
            self.discard(id).await;
        }
        read.map(|()| Served { place: Place::Disk, waited: false })
    }

    /// Pins objects. Those of other clients become ours as well, until they are unpinned.
    pub(super) async fn pin(self: Arc<Self>, ids: Vec<ObjectId>, pin: Pin) -> Results<()> {
        let lengths = each(ids.clone(), |id| {
            let shared = self.clone();
            async move {
                if shared.ledger.lock().is_leaving(&id) {
                    return Err(StoreError::Missing);
                }
                shared.bucket.length(&id).await
            }
        });
        let mut results = Vec::with_capacity(ids.len());
        for (id, length) in ids.iter().zip(lengths.await) {
            results.push(match length {
                Ok(length) => self.pin_one(id, length, pin).await,
                Err(error) => Err(error),
            });
        }
        results
    }

    async fn pin_one(
        self: &Arc<Self>,
        id: &ObjectId,
        length: usize,
        pin: Pin,
    ) -> Result<(), StoreError> {
        let claim = self.claim(id, length, Some(pin), 1, false).await?;
        let departures = {
            let mut state = self.ledger.lock();
            match claim {
                SlotClaim::Mine(slot) => state.adopt(slot),
                SlotClaim::There(slot) => {
                    state.catalogue.end_read(slot);
                    Vec::new()
                }
                SlotClaim::WriteFirst => return Err(StoreError::Full),
            }
        };
        self.ledger.notify();
        let _ = self.remove_departing(departures).await;
        Ok(())
    }

    pub(super) fn unpin(&self, id: &ObjectId, pin: Pin) -> Result<(), StoreError> {
        let unpinned = self.ledger.lock().unpin(id, pin);
        self.ledger.notify();
        unpinned
    }

    pub(super) async fn remove(
        self: Arc<Self>,
        ids: Vec<ObjectId>,
        removal: Removal,
    ) -> Results<()> {
        // Ownership of each removal is decided in the batch's order.
        let begun: Vec<_> = ids.iter().map(|id| self.begin_removal(*id, removal)).collect();
        let mut results: Results<()> = vec![Err(StoreError::BeingWritten); ids.len()];
        let (mut departures, mut others, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
        for (place, begun) in begun.into_iter().enumerate() {
            match begun {
                Ok(Begun::Departure(departure)) => departures.push((place, departure)),
                Ok(Begun::Others(departure)) => others.push((place, departure)),
                Ok(Begun::Wait) => waiting.push(place),
                Err(refused) => results[place] = Err(refused),
            }
        }
        // The response does not say whether a removed object existed.
        let there = each(others.clone(), |(_, departure)| {
            let shared = self.clone();
            async move { shared.bucket.length(&departure.id).await }
        });
        for ((place, departure), length) in others.into_iter().zip(there.await) {
            match length {
                Ok(_) => departures.push((place, departure)),
                Err(error) => {
                    self.ledger.stayed(departure);
                    results[place] = Err(error);
                }
            }
        }
        let (places, departures): (Vec<usize>, Vec<Departure>) = departures.into_iter().unzip();
        for (place, removed) in places.into_iter().zip(self.remove_each(departures).await) {
            results[place] = removed;
        }
        let waited = each(waiting.iter().map(|place| ids[*place]).collect(), |id| {
            let shared = self.clone();
            async move { shared.remove_in_turn(id, removal).await }
        });
        for (place, removed) in waiting.iter().zip(waited.await) {
            results[*place] = removed;
        }
        results
    }

    fn begin_removal(&self, id: ObjectId, removal: Removal) -> Result<Begun, StoreError> {
        let mut state = self.ledger.lock();
        if state.is_leaving(&id) {
            return Ok(state.departures.take_stuck(&id).map_or(Begun::Wait, Begun::Departure));
        }
        match state.catalogue.remove(&id, removal, self.ledger.now_ms()) {
            Ok(()) => {
                let departure = state.take_departures().pop().expect("it was doomed");
                Ok(Begun::Departure(departure))
            }
            Err(StoreError::Missing) => Ok(Begun::Others(state.depart(id, SlotUse::None))),
            Err(refused) => Err(refused),
        }
    }

    /// Removes an object that another task is removing already.
    async fn remove_in_turn(
        self: &Arc<Self>,
        id: ObjectId,
        removal: Removal,
    ) -> Result<(), StoreError> {
        let until = Instant::now() + Duration::from_millis(self.config.full_wait_ms);
        loop {
            match self.begin_removal(id, removal)? {
                Begun::Departure(departure) => return self.remove_departing(vec![departure]).await,
                Begun::Others(departure) => {
                    return match self.bucket.length(&id).await {
                        Ok(_) => self.remove_departing(vec![departure]).await,
                        Err(error) => {
                            self.ledger.stayed(departure);
                            Err(error)
                        }
                    };
                }
                Begun::Wait if self.ledger.wait(until).await => {}
                Begun::Wait => return Err(StoreError::BeingWritten),
            }
        }
    }

    /// Removes a damaged or replaced object that is not this client's. Another client may have done
    /// so.
    pub(super) async fn discard(self: &Arc<Self>, id: ObjectId) {
        let departure = {
            let mut state = self.ledger.lock();
            if state.is_leaving(&id) || state.catalogue.find(&id).is_some() {
                return;
            }
            state.depart(id, SlotUse::None)
        };
        let _ = self.remove_departing(vec![departure]).await;
    }

    /// Removes departing objects from the bucket.
    pub(super) async fn remove_departing(
        self: &Arc<Self>,
        departures: Vec<Departure>,
    ) -> Result<(), StoreError> {
        self.remove_each(departures).await.into_iter().collect()
    }

    /// Like [`BucketsCore::remove_departing`], with one result per object. Removes many objects per request, if the
    /// bucket supports it.
    async fn remove_each(self: &Arc<Self>, departures: Vec<Departure>) -> Results<()> {
        let batches: Vec<_> = departures.chunks(DELETES_PER_REQUEST).map(<[_]>::to_vec).collect();
        let removals = batches.into_iter().map(|batch| {
            let shared = self.clone();
            tokio::spawn(async move {
                let ids: Vec<ObjectId> = batch.iter().map(|departure| departure.id).collect();
                let removed = shared.bucket.delete(&ids).await;
                for (departure, removed) in batch.into_iter().zip(&removed) {
                    match removed {
                        Ok(()) => shared.ledger.departed(departure),
                        Err(_) => shared.ledger.stayed(departure),
                    }
                }
                removed
            })
        });
        let mut results = Vec::with_capacity(departures.len());
        for removal in removals.collect::<Vec<_>>() {
            match removal.await {
                Ok(removed) => results.extend(removed),
                Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
            }
        }
        results
    }

    /// Retries failed removals until one fails again.
    pub(super) async fn retry_stuck(self: &Arc<Self>) -> Result<(), StoreError> {
        loop {
            let stuck =
                self.ledger.lock().departures.take_all_stuck(self.concurrent_removals_max());
            if stuck.is_empty() {
                return Ok(());
            }
            self.remove_departing(stuck).await?;
        }
    }

    /// Number of concurrent removals.
    pub(super) fn concurrent_removals_max(&self) -> usize {
        self.config.requests_max.max(1) as usize
    }
}
