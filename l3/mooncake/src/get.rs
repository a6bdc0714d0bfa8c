//! Reads and their verification.

use std::collections::BTreeSet;
use std::ffi::CStr;

use super::MooncakeCore;
use super::codes::{CallOutcome, CountedCall};
use super::connection::Buffered;
use super::control::failure;
use super::library::{Client, Writable};
use super::worker::{BOUNCE_PAGES, Worker};
use terrace_l3::backend::{Headroom, Slot, payload_checksums};
use terrace_l3::{
    Get, HEADER_BYTES, Header, Mismatch, ObjectId, Place, Results, Served, StoreError,
};

/// An object that is being read.
struct ClusterRead {
    /// Index in the batch.
    place: usize,
    get: Buffered<Get>,
    /// Its slot, if this client has put it.
    slot: Option<Slot>,
}

impl MooncakeCore {
    pub(super) fn get(
        &self,
        worker: &mut Worker,
        client: &Client,
        gets: Results<Buffered<Get>>,
    ) -> Results<Served> {
        let length = |get: &Result<Buffered<Get>, _>| get.as_ref().map_or(0, |it| it.target.len());
        let lengths: Vec<usize> = gets.iter().map(length).collect();
        let mut results: Results<Served> = vec![Err(StoreError::Missing); gets.len()];
        let mut batch = Vec::with_capacity(gets.len());
        for (place, get) in gets.into_iter().enumerate() {
            match get.and_then(|get| self.begin(place, get)) {
                Ok(reading) => batch.push(reading),
                Err(error) => results[place] = Err(error),
            }
        }
        // The library accepts each key once per batch.
        while !batch.is_empty() {
            let mut keys = BTreeSet::new();
            let (first, again) =
                batch.into_iter().partition(|it: &ClusterRead| keys.insert(it.get.id));
            self.read(worker, client, first, &mut results);
            batch = again;
        }
        for (result, bytes) in results.iter().zip(lengths) {
            self.traffic.get(result, bytes);
        }
        results
    }

    fn begin(&self, place: usize, get: Buffered<Get>) -> Result<ClusterRead, StoreError> {
        let mut state = self.ledger.lock();
        if state.is_leaving(&get.id) {
            return Err(StoreError::Missing);
        }
        let found = state.catalogue.begin_read(&get.id);
        if let Some((slot, length)) = found
            && length as usize != get.target.len()
        {
            state.catalogue.end_read(slot);
            let (expected, found) = (get.target.len(), length as usize);
            return Err(StoreError::Length { expected, found });
        }
        Ok(ClusterRead { place, get, slot: found.map(|(slot, _)| slot) })
    }

    fn read(
        &self,
        worker: &mut Worker,
        client: &Client,
        batch: Vec<ClusterRead>,
        results: &mut Results<Served>,
    ) {
        let mut direct = Vec::with_capacity(batch.len());
        let mut bounced = Vec::new();
        for reading in batch {
            match reading.get.target.headroom() {
                Some(headroom) => direct.push((reading, headroom)),
                None => bounced.push(reading),
            }
        }
        if !direct.is_empty() {
            self.read_direct(worker, client, direct, results);
        }
        let mut bounced = bounced.into_iter().peekable();
        while bounced.peek().is_some() {
            let some = bounced.by_ref().take(BOUNCE_PAGES as usize).collect();
            self.read_bounced(worker, client, some, results);
        }
    }

    fn read_direct(
        &self,
        worker: &mut Worker,
        client: &Client,
        mut batch: Vec<(ClusterRead, Headroom)>,
        results: &mut Results<Served>,
    ) {
        let keys = self.keys(batch.iter().map(|(reading, _)| &reading.get.id));
        let mut pieces: Vec<_> = batch
            .iter_mut()
            .map(|(reading, headroom)| Writable::page(headroom, &mut reading.get.target))
            .collect();
        let codes = client.get(&keys, &mut pieces);
        drop(pieces);
        // Only of payloads that arrived.
        let payloads = batch
            .iter()
            .zip(&codes)
            .map(|((reading, _), code)| if arrived(*code) { &*reading.get.target } else { &[] });
        let sums = payload_checksums(&payloads.collect::<Vec<&[u8]>>());
        for ((((reading, headroom), key), code), sum) in
            batch.into_iter().zip(&keys).zip(codes).zip(sums)
        {
            let get = &reading.get;
            let verified = self.judge(worker, client, key, get, code, || {
                get.verify(&headroom.read())?.verify_checksum(sum)
            });
            results[reading.place] = self.end(client, key, &reading, verified);
            if CallOutcome::of(code).may_continue() {
                client.keep((reading.get, headroom));
            }
        }
    }

    fn read_bounced(
        &self,
        worker: &mut Worker,
        client: &Client,
        batch: Vec<ClusterRead>,
        results: &mut Results<Served>,
    ) {
        let keys = self.keys(batch.iter().map(|reading| &reading.get.id));
        let bytes = batch.iter().map(|reading| HEADER_BYTES + reading.get.target.len());
        let mut copies = match worker.copies(bytes) {
            Ok(copies) => copies,
            Err(error) => {
                for (reading, key) in batch.iter().zip(&keys) {
                    results[reading.place] = self.end(client, key, reading, Err(error.clone()));
                }
                return;
            }
        };
        let mut pieces: Vec<_> = copies.iter_mut().map(|copy| Writable::bytes(copy)).collect();
        let codes = client.get(&keys, &mut pieces);
        drop(pieces);
        let mut batch = batch;
        for ((reading, copy), code) in batch.iter_mut().zip(&copies).zip(&codes) {
            if arrived(*code) {
                reading.get.target.copy_from_slice(&copy[HEADER_BYTES..]);
                self.bounced(reading.get.target.len());
            }
        }
        let headers: Vec<[u8; HEADER_BYTES]> = copies.iter().map(|copy| header_of(copy)).collect();
        for (copy, code) in copies.into_iter().zip(&codes) {
            if CallOutcome::of(*code).may_continue() {
                client.keep(copy);
            }
        }
        for (((reading, header), key), code) in batch.into_iter().zip(headers).zip(&keys).zip(codes)
        {
            let get = &reading.get;
            let verified = self.judge(worker, client, key, get, code, || {
                get.verify(&header)?.verify_payload(&get.target)
            });
            results[reading.place] = self.end(client, key, &reading, verified);
        }
    }

    /// Result for an object that was read, given its code.
    fn judge(
        &self,
        worker: &mut Worker,
        client: &Client,
        key: &CStr,
        get: &Get,
        code: i64,
        verify: impl FnOnce() -> Result<(), Mismatch>,
    ) -> Result<(), StoreError> {
        let expected = get.target.len();
        match self.outcome(CountedCall::Get, code) {
            CallOutcome::Done if code == (HEADER_BYTES + expected) as i64 => {
                verify().map_err(|mismatch| match mismatch {
                    // The header itself is intact, as its own checksum shows.
                    Mismatch::Prefix => StoreError::Corrupt(mismatch),
                    mismatch => self.classify_mismatch(worker, client, key, get, mismatch),
                })
            }
            // The length differs: it is that of the object only if its header confirms it.
            CallOutcome::Done | CallOutcome::BadLength => {
                let size = if code >= 0 { code } else { client.size(key) };
                let found = self.length(size)?;
                if self.is_sound(worker, client, key, &get.id, found)? {
                    Err(StoreError::Length { expected, found })
                } else if client.size(key) < 0 {
                    Err(StoreError::Missing)
                } else {
                    Err(StoreError::Corrupt(Mismatch::Length))
                }
            }
            // The bytes arrived, but the cluster was free to overwrite them meanwhile. If they
            // verify, it did not.
            CallOutcome::LeaseLapsed => verify().map_err(|_| StoreError::Missing),
            CallOutcome::Absent | CallOutcome::Unfinished => Err(StoreError::Missing),
            // The object may exist: its node does not answer, or memory is not registered
            // correctly.
            other @ (CallOutcome::TransferFailed
            | CallOutcome::Full
            | CallOutcome::AlreadyThere
            | CallOutcome::Leased
            | CallOutcome::MasterGone
            | CallOutcome::Other) => Err(failure("reading an object", other)),
        }
    }

    /// Error for an object that does not verify: either its value is damaged, or the object was
    /// removed during the read and another one has its place. In the second case the object is
    /// missing, or present again for the next read.
    fn classify_mismatch(
        &self,
        worker: &mut Worker,
        client: &Client,
        key: &CStr,
        get: &Get,
        mismatch: Mismatch,
    ) -> StoreError {
        if client.size(key) != (HEADER_BYTES + get.target.len()) as i64 {
            return StoreError::Missing;
        }
        match self.is_sound(worker, client, key, &get.id, get.target.len()) {
            Ok(true) => StoreError::Missing,
            Ok(false) => StoreError::Corrupt(mismatch),
            Err(error) => error,
        }
    }

    /// Length of an object whose value has this size; the size may be an error code.
    pub(super) fn length(&self, size: i64) -> Result<usize, StoreError> {
        match self.outcome(CountedCall::Get, size) {
            CallOutcome::Done => {}
            CallOutcome::Absent | CallOutcome::Unfinished => return Err(StoreError::Missing),
            other => return Err(failure("reading an object", other)),
        }
        let length = (size as usize).checked_sub(HEADER_BYTES);
        length.ok_or(StoreError::Corrupt(Mismatch::Length))
    }

    /// Records the end of a read, and removes an object that does not verify.
    fn end(
        &self,
        client: &Client,
        key: &CStr,
        reading: &ClusterRead,
        verified: Result<(), StoreError>,
    ) -> Result<Served, StoreError> {
        let id = &reading.get.id;
        let mut departures = Vec::new();
        {
            let mut state = self.ledger.lock();
            if let Some(slot) = reading.slot {
                state.catalogue.end_read(slot);
            }
            match (&verified, reading.slot) {
                (Ok(()), _) if !state.is_leaving(id) => state.seen.insert(*id),
                (Err(StoreError::Missing), Some(slot)) => state.forget(id, slot),
                (Err(StoreError::Corrupt(_)), Some(slot)) => {
                    state.catalogue.doom_if(slot, id);
                    departures = state.take_departures();
                }
                (Ok(()) | Err(_), _) => state.seen.remove(id),
            }
        }
        self.ledger.notify();
        if let (Err(StoreError::Corrupt(_)), None) = (&verified, reading.slot) {
            self.outcome(CountedCall::Remove, client.remove(key, true).into());
        }
        for departure in departures {
            // The keeper retries removals that fail.
            let _ = self.remove_departing(client, departure);
        }
        verified.map(|()| Served { place: Place::Memory, waited: false })
    }

    /// Checks whether the cluster has the object, intact and with a payload of `length` bytes. It
    /// is read into the thread's own memory.
    pub(super) fn is_sound(
        &self,
        worker: &mut Worker,
        client: &Client,
        key: &CStr,
        id: &ObjectId,
        length: usize,
    ) -> Result<bool, StoreError> {
        if length > self.config.object_bytes_max {
            return Ok(false);
        }
        let (code, copy) = worker.read(client, key, HEADER_BYTES + length)?;
        match self.outcome(CountedCall::Get, code) {
            CallOutcome::Done
            | CallOutcome::LeaseLapsed
            | CallOutcome::BadLength
            | CallOutcome::Absent
            | CallOutcome::Unfinished => Ok(copy.is_some_and(|copy| is_intact(&copy, id))),
            other => Err(failure("reading an object", other)),
        }
    }
}

/// Returns true if bytes arrived, valid or not.
fn arrived(code: i64) -> bool {
    code >= 0 || CallOutcome::of(code) == CallOutcome::LeaseLapsed
}

/// Returns true if these bytes are the object, header and payload.
pub(super) fn is_intact(object: &[u8], id: &ObjectId) -> bool {
    verify(&header_of(object), id, &object[HEADER_BYTES..]).is_ok()
}

fn verify(header: &[u8; HEADER_BYTES], id: &ObjectId, payload: &[u8]) -> Result<(), Mismatch> {
    Header::verify(header, id, payload.len() as u64)?.verify_payload(payload)
}

pub(super) fn header_of(object: &[u8]) -> [u8; HEADER_BYTES] {
    object[..HEADER_BYTES].try_into().expect("an object begins with its header")
}
