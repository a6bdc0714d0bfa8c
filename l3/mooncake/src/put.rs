//! Puts.
//!
//! The cluster reports success for a put of an existing key, even while the first put of it has not
//! ended. So after a put of a plain page, the object may or may not exist: it does not count as
//! seen, the first reader looks it up, and readers verify it. Objects that must persist are looked
//! up before and after. Small ones are also read back: if several clients write different bytes
//! under one id, each learns whether its own were stored.

use std::ffi::{CStr, CString};
use std::io;
use std::time::{Duration, Instant};

use super::MooncakeCore;
use super::codes::{CallOutcome, CountedCall};
use super::connection::Buffered;
use super::control::failure;
use super::get::header_of;
use super::library::{Client, Protection, Readable};
use super::worker::{BOUNCE_PAGES, Worker};
use terrace_l3::backend::{Headroom, Reserved, Slot, payload_checksums};
use terrace_l3::{HEADER_BYTES, ObjectId, Pin, Put, PutOptions, Results, StoreError, Stored};

/// An object that has its slot.
struct Claimed {
    /// Index in the batch.
    place: usize,
    id: ObjectId,
    slot: Slot,
}

/// An object that was written, with its header and the length of its payload.
struct WrittenObject {
    claimed: Claimed,
    header: [u8; HEADER_BYTES],
    length: usize,
}

/// Maximum size of objects that are read back after a put, if they must persist. For small objects,
/// this costs little compared with the other calls.
const READ_BACK_BYTES_MAX: usize = 16 << 10;

/// An object that is about to be written.
struct PendingWrite {
    claimed: Claimed,
    put: Buffered<Put>,
}

/// Result of claiming a slot for a put.
enum SlotOffer {
    Mine(Slot),
    There,
    /// The batch itself uses all slots: write its objects first.
    WriteFirst,
}

impl MooncakeCore {
    pub(super) fn put(
        &self,
        worker: &mut Worker,
        client: &Client,
        puts: Results<Buffered<Put>>,
        options: PutOptions,
    ) -> Results<Stored> {
        let length = |put: &Result<Buffered<Put>, _>| put.as_ref().map_or(0, |it| it.source.len());
        let lengths: Vec<usize> = puts.iter().map(length).collect();
        let mut results: Results<Stored> = vec![Err(StoreError::BeingWritten); puts.len()];
        let mut batch =
            PutBatch { shared: self, client, options, round: Vec::new(), there: Vec::new() };
        for (place, put) in puts.into_iter().enumerate() {
            match put {
                Ok(put) => batch.add(worker, place, put, &mut results),
                Err(error) => results[place] = Err(error),
            }
        }
        batch.write(worker, &mut results);
        for (place, put) in batch.take_lost(&mut results) {
            // The cluster has lost it: it is put like a new one.
            batch.add(worker, place, put, &mut results);
        }
        batch.write(worker, &mut results);
        for (place, _) in std::mem::take(&mut batch.there) {
            results[place] = Ok(Stored::AlreadyThere);
        }
        for (result, bytes) in results.iter().zip(lengths) {
            self.traffic.put(result, bytes);
        }
        results
    }

    /// Reserves a slot for an object, evicting if necessary.
    fn claim(
        &self,
        client: &Client,
        put: &Put,
        pin: Option<Pin>,
        batch_has_slots: bool,
    ) -> Result<SlotOffer, StoreError> {
        let until = Instant::now() + Duration::from_millis(self.config.full_wait_ms);
        let max = self.config.object_bytes_max;
        if put.source.len() > max {
            return Err(StoreError::TooLarge { bytes: put.source.len(), max });
        }
        let mut state = self.ledger.lock();
        loop {
            if state.is_leaving(&put.id) {
                if !self.ledger.wait(&mut state, until) {
                    return Err(StoreError::BeingWritten);
                }
                continue;
            }
            let (length, now_ms) = (put.source.len() as u32, self.ledger.now_ms());
            match state.catalogue.reserve(&put.id, length, pin, now_ms)? {
                Reserved::AlreadyThere(_) => {
                    if is_hard(pin) {
                        state.note_pinned(put.id);
                    }
                    return Ok(SlotOffer::There);
                }
                Reserved::Slot(slot) => return Ok(SlotOffer::Mine(slot)),
                Reserved::NoSlot => {}
            }
            if state.catalogue.evict(now_ms) {
                let departures = state.take_departures();
                drop(state);
                departures
                    .into_iter()
                    .try_for_each(|it| self.remove_departing(client, it).map(drop))?;
                state = self.ledger.lock();
            } else if batch_has_slots {
                return Ok(SlotOffer::WriteFirst);
            } else if state.catalogue.is_stuck(now_ms) || !self.ledger.wait(&mut state, until) {
                return Err(StoreError::Full);
            }
        }
    }

    /// Writes pieces under keys, waiting a while for room.
    fn send(
        &self,
        client: &Client,
        keys: &[CString],
        pieces: Vec<Readable<'_>>,
        protection: Protection,
    ) -> Vec<CallOutcome> {
        const PAUSE: Duration = Duration::from_millis(10);
        let until = Instant::now() + Duration::from_millis(self.config.full_wait_ms);
        let count = |code| self.outcome(CountedCall::Put, i64::from(code));
        let mut outcomes: Vec<CallOutcome> =
            client.put(keys, &pieces, protection).into_iter().map(count).collect();
        let mut pieces: Vec<Option<Readable<'_>>> = pieces.into_iter().map(Some).collect();
        loop {
            let full: Vec<usize> =
                (0..keys.len()).filter(|at| outcomes[*at] == CallOutcome::Full).collect();
            if full.is_empty() || Instant::now() >= until {
                return outcomes;
            }
            // The cluster makes room in the background after it has refused a put.
            std::thread::sleep(PAUSE);
            let again: Vec<CString> = full.iter().map(|at| keys[*at].clone()).collect();
            let taken: Vec<_> =
                full.iter().map(|at| pieces[*at].take().expect("it comes back")).collect();
            let codes = client.put(&again, &taken, protection);
            for ((at, piece), code) in full.into_iter().zip(taken).zip(codes) {
                pieces[at] = Some(piece);
                outcomes[at] = count(code);
            }
        }
    }
}

/// A batch of puts in progress.
struct PutBatch<'a> {
    shared: &'a MooncakeCore,
    client: &'a Client,
    options: PutOptions,
    round: Vec<PendingWrite>,
    /// Objects that exist as far as this client knows.
    there: Vec<(usize, Buffered<Put>)>,
}

impl PutBatch<'_> {
    fn add(
        &mut self,
        worker: &mut Worker,
        place: usize,
        put: Buffered<Put>,
        results: &mut Results<Stored>,
    ) {
        loop {
            let has_slots = !self.round.is_empty();
            match self.shared.claim(self.client, &put, self.options.pin, has_slots) {
                Ok(SlotOffer::Mine(slot)) => {
                    let claimed = Claimed { place, id: put.id, slot };
                    self.round.push(PendingWrite { claimed, put });
                    return;
                }
                Ok(SlotOffer::There) => {
                    self.there.push((place, put));
                    return;
                }
                Ok(SlotOffer::WriteFirst) => self.write(worker, results),
                Err(error) => {
                    results[place] = Err(error);
                    return;
                }
            }
        }
    }

    /// Returns true if the objects must persist.
    fn must_persist(&self) -> bool {
        self.options.durable || is_hard(self.options.pin)
    }

    /// Writes the objects that have slots, and sets their results.
    fn write(&mut self, worker: &mut Worker, results: &mut Results<Stored>) {
        let mut round = std::mem::take(&mut self.round);
        if self.must_persist() && !round.is_empty() {
            round = self.adopt(worker, round, results);
        }
        let mut direct = Vec::with_capacity(round.len());
        let mut bounced = Vec::new();
        for writing in round {
            match writing.put.source.headroom() {
                Some(headroom) => direct.push((writing, headroom)),
                None => bounced.push(writing),
            }
        }
        self.write_direct(worker, direct, results);
        let mut bounced = bounced.into_iter().peekable();
        while bounced.peek().is_some() {
            let some = bounced.by_ref().take(BOUNCE_PAGES as usize).collect();
            self.write_bounced(worker, some, results);
        }
    }

    fn write_direct(
        &self,
        worker: &mut Worker,
        mut round: Vec<(PendingWrite, Headroom)>,
        results: &mut Results<Stored>,
    ) {
        if round.is_empty() {
            return;
        }
        let payloads: Vec<&[u8]> = round.iter().map(|(it, _)| &*it.put.source).collect();
        let sums = payload_checksums(&payloads);
        for ((PendingWrite { put, .. }, headroom), sum) in round.iter_mut().zip(sums) {
            headroom.write(&put.header_with(sum).encode());
        }
        let keys = self.shared.keys(round.iter().map(|(writing, _)| &writing.put.id));
        let pieces = round.iter().map(|(it, headroom)| Readable::page(headroom, &it.put.source));
        let outcomes = self.shared.send(self.client, &keys, pieces.collect(), self.protection());
        let end = |((writing, headroom), outcome): ((PendingWrite, Headroom), &CallOutcome)| {
            let (header, length) = (headroom.read(), writing.put.source.len());
            if outcome.may_continue() {
                self.client.keep((writing.put, headroom));
            }
            WrittenObject { claimed: writing.claimed, header, length }
        };
        let round = round.into_iter().zip(&outcomes).map(end).collect();
        self.settle(worker, &keys, round, outcomes, results);
    }

    fn write_bounced(
        &self,
        worker: &mut Worker,
        round: Vec<PendingWrite>,
        results: &mut Results<Stored>,
    ) {
        let keys = self.shared.keys(round.iter().map(|writing| &writing.put.id));
        let bytes = round.iter().map(|writing| HEADER_BYTES + writing.put.source.len());
        let mut copies = match worker.copies(bytes) {
            Ok(copies) => copies,
            Err(error) => {
                round.iter().for_each(|it| self.give_up(&it.claimed, error.clone(), results));
                return;
            }
        };
        for (copy, PendingWrite { put, .. }) in copies.iter_mut().zip(&round) {
            copy[..HEADER_BYTES].copy_from_slice(&put.header().encode());
            copy[HEADER_BYTES..].copy_from_slice(&put.source);
            self.shared.bounced(put.source.len());
        }
        let pieces = copies.iter().map(|copy| Readable::bytes(copy)).collect();
        let outcomes = self.shared.send(self.client, &keys, pieces, self.protection());
        let headers: Vec<[u8; HEADER_BYTES]> = copies.iter().map(|copy| header_of(copy)).collect();
        for (copy, outcome) in copies.into_iter().zip(&outcomes) {
            if outcome.may_continue() {
                self.client.keep(copy);
            }
        }
        let written = |(PendingWrite { claimed, put }, header)| {
            let length = put.source.len();
            WrittenObject { claimed, header, length }
        };
        let round = round.into_iter().zip(headers).map(written).collect();
        self.settle(worker, &keys, round, outcomes, results);
    }

    /// Releases the slot of an object that was not stored.
    fn give_up(&self, claimed: &Claimed, error: StoreError, results: &mut Results<Stored>) {
        results[claimed.place] = Err(error);
        let mut state = self.shared.ledger.lock();
        state.catalogue.abandon(claimed.slot);
        drop(state);
        self.shared.ledger.notify();
    }

    /// Publishes objects that were written, and releases the slots of the others.
    fn settle(
        &self,
        worker: &mut Worker,
        keys: &[CString],
        round: Vec<WrittenObject>,
        outcomes: Vec<CallOutcome>,
        results: &mut Results<Stored>,
    ) {
        let is_there: Vec<bool> = if self.must_persist() {
            let codes = self.client.exist(keys).into_iter();
            codes.map(|code| self.shared.found(code) == Ok(true)).collect()
        } else {
            vec![true; keys.len()]
        };
        let each = round.into_iter().zip(keys).zip(outcomes).zip(is_there);
        for (((written, key), outcome), is_there) in each {
            let WrittenObject { claimed, .. } = &written;
            let error = match outcome {
                CallOutcome::Done | CallOutcome::AlreadyThere if is_there => {
                    match self.is_ours(worker, key, &written) {
                        Ok(is_ours) => {
                            let is_cluster_pinned = is_ours && is_hard(self.options.pin);
                            self.publish(&claimed.id, claimed.slot, is_cluster_pinned);
                            let stored = if is_ours { Stored::New } else { Stored::AlreadyThere };
                            results[claimed.place] = Ok(stored);
                        }
                        Err(error) => self.give_up(claimed, error, results),
                    }
                    continue;
                }
                // Another put of the key has not ended, and may never end.
                CallOutcome::Done | CallOutcome::AlreadyThere | CallOutcome::Unfinished => {
                    StoreError::BeingWritten
                }
                CallOutcome::Full => StoreError::Full,
                CallOutcome::Absent => given_up(),
                CallOutcome::BadLength
                | CallOutcome::Leased
                | CallOutcome::LeaseLapsed
                | CallOutcome::TransferFailed
                | CallOutcome::MasterGone
                | CallOutcome::Other => failure("putting an object", outcome),
            };
            self.give_up(claimed, error, results);
        }
    }

    /// Checks that the stored object is the one that was written, if the put requires it.
    fn is_ours(
        &self,
        worker: &mut Worker,
        key: &CStr,
        written: &WrittenObject,
    ) -> Result<bool, StoreError> {
        let bytes = HEADER_BYTES + written.length;
        if !self.must_persist() || bytes > READ_BACK_BYTES_MAX {
            return Ok(true);
        }
        let (code, copy) = worker.read(self.client, key, bytes)?;
        match (self.shared.outcome(CountedCall::Get, code), copy) {
            (_, Some(copy)) => Ok(header_of(&copy) == written.header),
            // The size differs, so it is another client's.
            (CallOutcome::Done | CallOutcome::BadLength, None) => Ok(false),
            (CallOutcome::Absent | CallOutcome::Unfinished, None) => Err(StoreError::BeingWritten),
            (other, None) => Err(failure("looking at an object", other)),
        }
    }

    /// Makes the object visible, and removes lower generations of it.
    fn publish(&self, id: &ObjectId, slot: Slot, is_cluster_pinned: bool) {
        let pin = self.options.pin;
        let mut state = self.shared.ledger.lock();
        let replaced = state.catalogue.publish(slot);
        if is_cluster_pinned {
            state.cluster_pinned.insert(*id, None);
        } else if is_hard(pin) {
            state.note_pinned(*id);
        }
        let departures: Vec<_> = replaced.into_iter().map(|slot| state.depart(slot)).collect();
        drop(state);
        self.shared.ledger.notify();
        for departure in departures {
            // The keeper retries removals that fail.
            let _ = self.shared.remove_departing(self.client, departure);
        }
    }

    /// Publishes the objects that the cluster has already, intact; returns the others, which remain
    /// to be written.
    fn adopt(
        &self,
        worker: &mut Worker,
        round: Vec<PendingWrite>,
        results: &mut Results<Stored>,
    ) -> Vec<PendingWrite> {
        let keys = self.shared.keys(round.iter().map(|writing| &writing.put.id));
        let present = self.client.exist(&keys);
        let mut rest = Vec::with_capacity(round.len());
        for ((writing, key), present) in round.into_iter().zip(&keys).zip(present) {
            let PendingWrite { claimed, put } = &writing;
            if present != 1 {
                rest.push(writing);
                continue;
            }
            match self.shared.is_sound(worker, self.client, key, &put.id, put.source.len()) {
                Ok(true) => {
                    self.publish(&put.id, claimed.slot, false);
                    results[claimed.place] = Ok(Stored::AlreadyThere);
                }
                Ok(false) => {
                    self.client.remove(key, true);
                    rest.push(writing);
                }
                Err(error) => self.give_up(claimed, error, results),
            }
        }
        rest
    }

    /// Returns the supposedly existing objects that the cluster has lost, after forgetting them. If
    /// a lookup fails, so does the put.
    fn take_lost(&mut self, results: &mut Results<Stored>) -> Vec<(usize, Buffered<Put>)> {
        let there = std::mem::take(&mut self.there);
        let (seen, unsure): (Vec<_>, Vec<_>) = {
            let state = self.shared.ledger.lock();
            let precious = self.must_persist();
            there.into_iter().partition(|(_, put)| !precious && state.seen.contains(&put.id))
        };
        self.there = seen;
        if unsure.is_empty() {
            return unsure;
        }
        let keys = self.shared.keys(unsure.iter().map(|(_, put)| &put.id));
        let mut lost = Vec::new();
        for ((place, put), code) in unsure.into_iter().zip(self.client.exist(&keys)) {
            let found = self.shared.found(code);
            let mut state = self.shared.ledger.lock();
            match (found, state.catalogue.find(&put.id)) {
                (Ok(true), _) => {
                    state.seen.insert(put.id);
                    self.there.push((place, put));
                }
                (Ok(false), Some(slot)) => {
                    state.forget(&put.id, slot);
                    lost.push((place, put));
                }
                (Ok(false), None) => self.there.push((place, put)),
                (Err(other), _) => results[place] = Err(failure("looking up an object", other)),
            }
        }
        lost
    }

    fn protection(&self) -> Protection {
        match self.options.pin {
            None => Protection::None,
            Some(Pin::Soft) => Protection::Soft,
            Some(Pin::Hard(_)) => Protection::Hard,
        }
    }
}

fn is_hard(pin: Option<Pin>) -> bool {
    matches!(pin, Some(Pin::Hard(_)))
}

/// Error of a put that the master has dropped because it took too long.
fn given_up() -> StoreError {
    let message = "the Mooncake master dropped the put because it took too long (its \
                   put_start_discard_timeout_sec): put it again";
    StoreError::io("putting an object", &io::Error::new(io::ErrorKind::TimedOut, message))
}
