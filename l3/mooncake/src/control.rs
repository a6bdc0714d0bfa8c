//! Lookups, pins and removals.

use std::io;
use std::time::{Duration, Instant};

use super::codes::{CallOutcome, CountedCall};
use super::library::Client;
use super::{MooncakeConfig, MooncakeCore};
use terrace_l3::backend::{Departure, Reserved, leases_max};
use terrace_l3::{ExistsOptions, ObjectId, Pin, Place, Presence, Removal, Results, StoreError};

impl MooncakeCore {
    pub(super) fn exist(
        &self,
        client: &Client,
        ids: &[ObjectId],
        options: ExistsOptions,
    ) -> Results<Presence> {
        let present = Ok(Presence::Present(Place::Memory));
        let mut results: Results<Presence> = vec![Ok(Presence::Absent); ids.len()];
        let mut asked = Vec::new();
        {
            let mut state = self.ledger.lock();
            for (place, id) in ids.iter().enumerate() {
                if state.is_leaving(id) && !state.is_stuck(id) {
                    continue;
                }
                let slot = state.catalogue.find(id);
                if let (Some(slot), true) = (slot, options.lease) {
                    let MooncakeConfig { lease_ttl_ms, leased_share_max, .. } = self.config;
                    let leases_max = leases_max(state.catalogue.slots(), leased_share_max);
                    let now_ms = self.ledger.now_ms();
                    state.catalogue.lease(slot, now_ms, lease_ttl_ms, leases_max);
                }
                if !options.lease && state.seen.contains(id) {
                    results[place] = present.clone();
                } else {
                    asked.push((place, slot));
                }
            }
        }
        if asked.is_empty() {
            return results;
        }
        let keys = self.keys(asked.iter().map(|(place, _)| &ids[*place]));
        for ((place, slot), code) in asked.into_iter().zip(client.exist(&keys)) {
            let id = &ids[place];
            let found = self.found(code);
            let mut state = self.ledger.lock();
            results[place] = match found {
                Ok(true) => {
                    if !state.is_leaving(id) {
                        state.seen.insert(*id);
                    }
                    present.clone()
                }
                Ok(false) => {
                    if let Some(slot) = slot {
                        state.forget(id, slot);
                    }
                    Ok(Presence::Absent)
                }
                Err(other) => Err(failure("looking up an object", other)),
            };
        }
        results
    }

    /// Pins objects. Those of other clients become ours as well.
    pub(super) fn pin(&self, client: &Client, ids: &[ObjectId], pin: Pin) -> Results<()> {
        let codes = client.exist(&self.keys(ids));
        let pin_one = |(id, code): (&ObjectId, i32)| -> Result<(), StoreError> {
            let found = self.found(code);
            let mut state = self.ledger.lock();
            let slot = state.catalogue.find(id);
            match (found, slot) {
                (Ok(true), _) if state.is_leaving(id) => return Err(StoreError::Missing),
                (Ok(true), Some(_)) => {
                    state.catalogue.pin(id, pin, self.ledger.now_ms())?;
                }
                (Ok(true), None) => {
                    drop(state);
                    let length = self.length(client.size(&self.key(id)))?;
                    state = self.ledger.lock();
                    let now_ms = self.ledger.now_ms();
                    match state.catalogue.reserve(id, length as u32, Some(pin), now_ms)? {
                        Reserved::Slot(slot) => {
                            for replaced in state.catalogue.publish(slot) {
                                state.park(replaced);
                            }
                        }
                        Reserved::AlreadyThere(_) => {}
                        Reserved::NoSlot => return Err(StoreError::Full),
                    }
                }
                (Ok(false), slot) => {
                    if let Some(slot) = slot {
                        state.forget(id, slot);
                    }
                    return Err(StoreError::Missing);
                }
                (Err(other), _) => return Err(failure("pinning an object", other)),
            }
            if let Pin::Hard(_) = pin {
                state.note_pinned(*id);
            }
            Ok(())
        };
        ids.iter().zip(codes).map(pin_one).collect()
    }

    pub(super) fn unpin(&self, id: &ObjectId, pin: Pin) -> Result<(), StoreError> {
        let mut state = self.ledger.lock();
        state.catalogue.unpin(id, pin)?;
        if !state.catalogue.is_pinned(id) {
            state.note_unpinned(id);
            // Objects of other clients belong to them again, and are not ours to evict.
            if self.config.pinned_stay
                && !state.cluster_pinned.contains_key(id)
                && let Some(slot) = state.catalogue.find(id)
            {
                state.forget(id, slot);
            }
        }
        drop(state);
        self.ledger.notify();
        Ok(())
    }

    pub(super) fn remove(
        &self,
        client: &Client,
        ids: &[ObjectId],
        removal: Removal,
    ) -> Results<()> {
        ids.iter().map(|id| self.remove_one(client, id, removal)).collect()
    }

    fn remove_one(
        &self,
        client: &Client,
        id: &ObjectId,
        removal: Removal,
    ) -> Result<(), StoreError> {
        let until = Instant::now() + Duration::from_millis(self.config.full_wait_ms);
        let departures = {
            let mut state = self.ledger.lock();
            while state.is_leaving(id) {
                // The other removal may fail; then the object still exists.
                if let Some(stuck) = state.departures.take_stuck(id) {
                    drop(state);
                    return self.remove_departing(client, stuck).and_then(was_there);
                }
                if !self.ledger.wait(&mut state, until) {
                    return Err(StoreError::BeingWritten);
                }
            }
            match state.catalogue.remove(id, removal, self.ledger.now_ms()) {
                Ok(()) => state.take_departures(),
                // It may be another client's, whose leases only the cluster knows.
                Err(StoreError::Missing) => Vec::new(),
                Err(refused) => return Err(refused),
            }
        };
        if departures.is_empty() {
            let code = client.remove(&self.key(id), removal != Removal::Plain);
            self.ledger.lock().seen.remove(id);
            return removed(self.outcome(CountedCall::Remove, code.into()));
        }
        departures
            .into_iter()
            .try_for_each(|departure| self.remove_departing(client, departure).and_then(was_there))
    }

    /// Removes a departing object from the cluster when no call uses it any more. Returns whether
    /// the cluster had it: another client may have removed it.
    pub(super) fn remove_departing(
        &self,
        client: &Client,
        departure: Departure,
    ) -> Result<bool, StoreError> {
        self.ledger.wait_for_users(&departure);
        let code = client.remove(&self.key(&departure.id), true);
        match removed(self.outcome(CountedCall::Remove, code.into())) {
            done @ (Ok(()) | Err(StoreError::Missing)) => {
                self.ledger.departed(departure);
                Ok(done.is_ok())
            }
            Err(error) => {
                self.ledger.stayed(departure);
                Err(error)
            }
        }
    }
}

fn was_there(was_there: bool) -> Result<(), StoreError> {
    if was_there { Ok(()) } else { Err(StoreError::Missing) }
}

/// Converts the outcome of a removal.
fn removed(outcome: CallOutcome) -> Result<(), StoreError> {
    match outcome {
        CallOutcome::Done => Ok(()),
        CallOutcome::Absent => Err(StoreError::Missing),
        CallOutcome::Unfinished => Err(StoreError::BeingWritten),
        CallOutcome::Leased => Err(StoreError::Leased),
        CallOutcome::Full
        | CallOutcome::BadLength
        | CallOutcome::AlreadyThere
        | CallOutcome::LeaseLapsed
        | CallOutcome::TransferFailed
        | CallOutcome::MasterGone
        | CallOutcome::Other => Err(failure("removing an object", outcome)),
    }
}

/// Converts an outcome that means a failure of the cluster.
pub(super) fn failure(during: &'static str, outcome: CallOutcome) -> StoreError {
    let (kind, message) = match outcome {
        CallOutcome::MasterGone => (
            io::ErrorKind::NotConnected,
            "the Mooncake master does not answer, or its version differs from that of the library"
                .to_owned(),
        ),
        CallOutcome::TransferFailed => {
            (io::ErrorKind::ConnectionReset, "a Mooncake storage node does not answer".to_owned())
        }
        CallOutcome::Done
        | CallOutcome::Full
        | CallOutcome::BadLength
        | CallOutcome::Unfinished
        | CallOutcome::Absent
        | CallOutcome::AlreadyThere
        | CallOutcome::Leased
        | CallOutcome::LeaseLapsed
        | CallOutcome::Other => {
            (io::ErrorKind::Other, format!("Mooncake returned an unexpected result ({outcome:?})"))
        }
    };
    StoreError::io(during, &io::Error::new(kind, message))
}
