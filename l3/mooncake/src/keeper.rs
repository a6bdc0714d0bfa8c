//! Periodic maintenance: renews leases of pinned objects, retries failed removals, and removes the
//! cluster's pins of objects that are no longer pinned here.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::codes::{CallOutcome, CountedCall};
use super::get::is_intact;
use super::library::{Client, Protection, Readable};
use super::worker::Worker;
use super::{HEADER_BYTES, MooncakeCore};
use terrace_l3::ObjectId;

/// Time between an unpin and the removal of the cluster's pin, in which the caller usually removes
/// the object.
const UNPIN_DELAY: Duration = Duration::from_secs(1);

/// Maximum number of objects per call.
const OBJECTS_PER_CALL: usize = 256;

/// Starts the thread. It ends with the store.
pub(super) fn start(shared: &Arc<MooncakeCore>, mut worker: Worker) -> io::Result<()> {
    let interval = Duration::from_millis(shared.config.keep_interval_ms.max(1));
    let weak: Weak<MooncakeCore> = Arc::downgrade(shared);
    std::thread::Builder::new().name("terrace-mooncake-keep".to_owned()).spawn(move || {
        loop {
            std::thread::sleep(interval);
            let Some(shared) = weak.upgrade() else { return };
            if shared.check_open().is_err() {
                return;
            }
            if let Ok(client) = shared.connection.client() {
                shared.keep(&mut worker, &client);
            }
        }
    })?;
    Ok(())
}

impl MooncakeCore {
    fn keep(&self, worker: &mut Worker, client: &Client) {
        if client.has_kept_for(Duration::from_millis(self.config.quarantine_ms)) {
            // If no thread can be started, the next round retries.
            let _ = self.connection.connect();
        }
        self.retry_stuck(client);
        self.renew(client);
        if self.config.pinned_stay {
            // Putting an object again could restore one that another client removes meanwhile.
            return;
        }
        let unwanted: Vec<ObjectId> = {
            let state = self.ledger.lock();
            let is_unwanted =
                |since: &Option<Instant>| since.is_some_and(|it| it.elapsed() > UNPIN_DELAY);
            let unwanted = state.cluster_pinned.iter().filter(|(_, since)| is_unwanted(since));
            unwanted.map(|(id, _)| *id).take(OBJECTS_PER_CALL).collect()
        };
        for id in unwanted {
            self.unpin_in_cluster(worker, client, &id);
        }
    }

    /// Retries failed removals. It stops at the first failure, since further ones would take
    /// seconds each.
    fn retry_stuck(&self, client: &Client) {
        for _ in 0..OBJECTS_PER_CALL {
            let stuck = self.ledger.lock().departures.take_all_stuck(1).pop();
            match stuck.map(|departure| self.remove_departing(client, departure)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return,
            }
        }
    }

    /// Renews leases by lookups; leased objects are not evicted.
    fn renew(&self, client: &Client) {
        let lease_pinned: Vec<ObjectId> = self.ledger.lock().lease_pinned.iter().copied().collect();
        for some in lease_pinned.chunks(OBJECTS_PER_CALL) {
            for (id, code) in some.iter().zip(client.exist(&self.keys(some))) {
                let found = self.found(code);
                let mut state = self.ledger.lock();
                if let (Ok(false), Some(slot)) = (found, state.catalogue.find(id)) {
                    state.forget(id, slot);
                }
            }
        }
    }

    /// Removes the cluster's pin of an object by putting it again without one.
    fn unpin_in_cluster(&self, worker: &mut Worker, client: &Client, id: &ObjectId) {
        let Some(length) = self.ledger.lock().begin_unpinning(id) else { return };
        let keys = [self.key(id)];
        let read = worker.read(client, &keys[0], HEADER_BYTES + length as usize);
        let copy = read.ok().and_then(|(_, copy)| copy).filter(|copy| is_intact(copy, id));
        // An object that another client has removed meanwhile stays removed.
        let taken = copy.filter(|_| client.remove(&keys[0], true) == 0);
        let put = taken.map(|copy| {
            let code = client.put(&keys, &[Readable::bytes(&copy)], Protection::None)[0];
            if CallOutcome::of(code.into()).may_continue() {
                client.keep(copy);
            }
            code
        });
        let mut state = self.ledger.lock();
        let slot = state.end_unpinning(id);
        match (put, slot) {
            (Some(0), Some(_)) => {
                state.cluster_pinned.remove(id);
                // The object may have been pinned again meanwhile, which the cluster does not know.
                if state.catalogue.is_pinned(id) {
                    state.note_pinned(*id);
                }
            }
            (Some(_), Some(slot)) => state.forget(id, slot),
            // It is departing, or cannot be read or removed now: a later round retries.
            (Some(_) | None, None) | (None, Some(_)) => {}
        }
        drop(state);
        self.ledger.notify();
    }

    /// Before shutdown, removes the objects that the cluster would keep forever because of our
    /// pins, except those that other clients want, and retries failed removals.
    pub(super) fn remove_last(&self) {
        let Ok(client) = self.connection.client() else { return };
        self.retry_stuck(&client);
        let cluster_pinned: Vec<ObjectId> = {
            let state = self.ledger.lock();
            let goes = |since: &Option<Instant>| !self.config.pinned_stay || since.is_some();
            state
                .cluster_pinned
                .iter()
                .filter(|(_, since)| goes(since))
                .map(|(id, _)| *id)
                .collect()
        };
        for id in cluster_pinned {
            let code = client.remove(&self.key(&id), true);
            self.outcome(CountedCall::Remove, code.into());
        }
    }
}
