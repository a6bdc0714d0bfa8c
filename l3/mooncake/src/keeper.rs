//! What must be done again and again: leases of pinned objects are renewed, failed removals tried again,
//! and pins that nobody wants any more taken off.

use std::ffi::CString;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::codes::{Call, Outcome};
use super::get::is_whole;
use super::library::{Client, Protection, Readable, payload_key};
use super::worker::Worker;
use super::{HEADER_BYTES, Shared};
use terrace_l3::ObjectId;

/// So long somebody who has unpinned an object has time to remove it.
const GRACE: Duration = Duration::from_secs(1);

/// How many objects are asked about at a time.
const BATCH: usize = 256;

/// Starts the thread. It ends with the store.
pub(super) fn start(shared: &Arc<Shared>, mut worker: Worker) -> io::Result<()> {
    let interval = Duration::from_millis(shared.config.keep_interval_ms.max(1));
    let weak: Weak<Shared> = Arc::downgrade(shared);
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

impl Shared {
    fn keep(&self, worker: &mut Worker, client: &Client) {
        if client.has_kept_for(Duration::from_millis(self.config.quarantine_ms)) {
            // If there is no thread for it now, there may be one next time.
            let _ = self.connection.connect();
        }
        self.expel_stuck(client);
        self.renew(client);
        if self.config.pinned_stay {
            // Putting an object again could bring back what another client removes meanwhile.
            return;
        }
        let unwanted: Vec<ObjectId> = {
            let state = self.ledger.lock();
            let is_unwanted =
                |since: &Option<Instant>| since.is_some_and(|it| it.elapsed() > GRACE);
            let unwanted = state.stiff.iter().filter(|(_, since)| is_unwanted(since));
            unwanted.map(|(id, _)| *id).take(BATCH).collect()
        };
        for id in unwanted {
            self.soften(worker, client, &id);
        }
    }

    /// Tries once more to remove what is to leave. It ends at the first failure: more of them would
    /// take seconds each.
    fn expel_stuck(&self, client: &Client) {
        for _ in 0..BATCH {
            let stuck = self.ledger.lock().take_stuck(None);
            match stuck.map(|departure| self.expel(client, departure)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return,
            }
        }
    }

    /// Asking renews a lease, and what is leased is not evicted.
    fn renew(&self, client: &Client) {
        let (held, apart): (Vec<ObjectId>, Vec<ObjectId>) = {
            let state = self.ledger.lock();
            let apart = state.held.intersection(&state.may_be_apart).copied().collect();
            (state.held.iter().copied().collect(), apart)
        };
        for some in apart.chunks(BATCH) {
            let keys: Vec<CString> = self.keys(some).iter().map(|key| payload_key(key)).collect();
            client.exist(&keys);
        }
        for some in held.chunks(BATCH) {
            for (id, code) in some.iter().zip(client.exist(&self.keys(some))) {
                let found = self.found(code);
                let mut state = self.ledger.lock();
                if let (Ok(false), Some(slot)) = (found, state.catalogue.find(id)) {
                    state.forget(id, slot);
                }
            }
        }
    }

    /// Takes the cluster's own pin off an object, which is: puts it again without.
    fn soften(&self, worker: &mut Worker, client: &Client, id: &ObjectId) {
        let Some(length) = self.ledger.lock().begin_softening(id) else { return };
        let keys = [self.key(id)];
        let read = worker.read(client, &keys[0], HEADER_BYTES + length as usize);
        let copy = read.ok().and_then(|(_, copy)| copy).filter(|copy| is_whole(copy, id));
        // What another client has removed meanwhile stays removed.
        let may_be_apart = self.ledger.lock().may_be_apart.contains(id);
        let taken = copy.filter(|_| client.remove(&keys[0], true, may_be_apart) == 0);
        let put = taken.map(|copy| {
            let code = client.put(&keys, &[Readable::bytes(&copy)], Protection::None)[0];
            if Outcome::of(code.into()).may_go_on() {
                client.keep(copy);
            }
            code
        });
        let mut state = self.ledger.lock();
        let slot = state.end_softening(id);
        match (put, slot) {
            (Some(0), Some(_)) => {
                state.stiff.remove(id);
                state.may_be_apart.remove(id);
                // It may have been pinned again meanwhile, and the cluster does not know.
                if state.catalogue.is_pinned(id) {
                    state.hold(*id);
                }
            }
            (Some(_), Some(slot)) => state.forget(id, slot),
            // It is leaving, or cannot be read or taken out right now: another time.
            (Some(_) | None, None) | (None, Some(_)) => {}
        }
        drop(state);
        self.ledger.notify();
    }

    /// Removes what the cluster would keep for ever because of our pins, before the client goes: what
    /// nobody else wants, and what was to be removed anyway.
    pub(super) fn expel_last(&self) {
        let Ok(client) = self.connection.client() else { return };
        self.expel_stuck(&client);
        let stiff: Vec<ObjectId> = {
            let state = self.ledger.lock();
            let goes = |since: &Option<Instant>| !self.config.pinned_stay || since.is_some();
            state.stiff.iter().filter(|(_, since)| goes(since)).map(|(id, _)| *id).collect()
        };
        for id in stiff {
            let may_be_apart = self.ledger.lock().may_be_apart.contains(&id);
            let code = client.remove(&self.key(&id), true, may_be_apart);
            self.outcome(Call::Remove, code.into());
        }
    }
}
