//! Putting objects.
//!
//! The cluster answers a put of a key that it has like one of a key that it has not, even while the
//! first put of it has not ended. So a put of a plain page counts as maybe there: nothing remembers it
//! as seen, the first who wants it asks, and whoever reads it verifies it. One that must not vanish is
//! looked for before and after, and if it is small also looked at: of several clients that write different
//! bytes under one name, each is told truly whether its own are there.

use std::ffi::{CStr, CString};
use std::io;
use std::time::{Duration, Instant};

use super::Shared;
use super::codes::{Call, Outcome};
use super::connection::Buffered;
use super::control::failure;
use super::get::header_of;
use super::library::{Client, Protection, Readable, payload_key};
use super::worker::{BOUNCE_PAGES, Worker};
use terrace_l3::backend::{Headroom, Reserved, Slot, payload_checksums};
use terrace_l3::{
    HEADER_BYTES, ObjectId, Pin, Put, PutOptions, Results, StoreError, Stored, Target,
};

/// An object that has its slot.
struct Claimed {
    /// Its place in the batch.
    place: usize,
    id: ObjectId,
    slot: Slot,
}

/// One that was written, with this header and a payload of so many bytes.
struct Written {
    claimed: Claimed,
    header: [u8; HEADER_BYTES],
    length: usize,
}

/// Objects up to this size are looked at after a put, if they must not vanish: what that takes is little
/// against the calls that are made anyhow.
const LOOKED_AT_BYTES_MAX: usize = 16 << 10;

/// One that is about to be written.
struct Writing {
    claimed: Claimed,
    put: Buffered<Put>,
}

/// What came of the wish to put an object.
enum Claim {
    Mine(Slot),
    There,
    /// The batch itself has all slots: write what it has first.
    WriteFirst,
}

impl Shared {
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
            Batch { shared: self, client, options, round: Vec::new(), there: Vec::new() };
        for (place, put) in puts.into_iter().enumerate() {
            match put {
                Ok(put) => batch.add(worker, place, put, &mut results),
                Err(error) => results[place] = Err(error),
            }
        }
        batch.write(worker, &mut results);
        for (place, put) in batch.gone(&mut results) {
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

    /// Takes a slot for an object, making room if need be.
    fn claim(
        &self,
        client: &Client,
        put: &Put,
        pin: Option<Pin>,
        batch_has_slots: bool,
    ) -> Result<Claim, StoreError> {
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
                        state.hold(put.id);
                    }
                    return Ok(Claim::There);
                }
                Reserved::Slot(slot) => return Ok(Claim::Mine(slot)),
                Reserved::NoSlot => {}
            }
            if state.catalogue.evict(now_ms) {
                let departures = state.take_departures();
                drop(state);
                departures.into_iter().try_for_each(|it| self.expel(client, it).map(drop))?;
                state = self.ledger.lock();
            } else if batch_has_slots {
                return Ok(Claim::WriteFirst);
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
    ) -> Vec<Outcome> {
        const PAUSE: Duration = Duration::from_millis(10);
        let until = Instant::now() + Duration::from_millis(self.config.full_wait_ms);
        let count = |code| self.outcome(Call::Put, i64::from(code));
        let mut outcomes: Vec<Outcome> =
            client.put(keys, &pieces, protection).into_iter().map(count).collect();
        let mut pieces: Vec<Option<Readable<'_>>> = pieces.into_iter().map(Some).collect();
        loop {
            let full: Vec<usize> =
                (0..keys.len()).filter(|at| outcomes[*at] == Outcome::Full).collect();
            if full.is_empty() || Instant::now() >= until {
                return outcomes;
            }
            // The cluster makes room in the background, once it has refused something.
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

/// A batch of puts on its way.
struct Batch<'a> {
    shared: &'a Shared,
    client: &'a Client,
    options: PutOptions,
    round: Vec<Writing>,
    /// Objects that are there already, as far as this client knows.
    there: Vec<(usize, Buffered<Put>)>,
}

impl Batch<'_> {
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
                Ok(Claim::Mine(slot)) => {
                    let claimed = Claimed { place, id: put.id, slot };
                    self.round.push(Writing { claimed, put });
                    return;
                }
                Ok(Claim::There) => {
                    self.there.push((place, put));
                    return;
                }
                Ok(Claim::WriteFirst) => self.write(worker, results),
                Err(error) => {
                    results[place] = Err(error);
                    return;
                }
            }
        }
    }

    /// Whether what is put must not vanish.
    fn is_precious(&self) -> bool {
        self.options.durable || is_hard(self.options.pin)
    }

    /// Writes what has slots, and settles the results.
    fn write(&mut self, worker: &mut Worker, results: &mut Results<Stored>) {
        let mut round = std::mem::take(&mut self.round);
        if self.is_precious() && !round.is_empty() {
            round = self.adopt(worker, round, results);
        }
        let mut direct = Vec::with_capacity(round.len());
        let (mut apart, mut bounced) = (Vec::new(), Vec::new());
        for writing in round {
            match writing.put.source.headroom() {
                Some(headroom) => direct.push((writing, headroom)),
                None if writing.put.source.len() >= self.shared.config.apart_bytes_min => {
                    apart.push(writing);
                }
                None => bounced.push(writing),
            }
        }
        self.write_direct(worker, direct, results);
        let mut apart = apart.into_iter().peekable();
        while apart.peek().is_some() {
            let some = apart.by_ref().take(BOUNCE_PAGES as usize).collect();
            self.write_apart(worker, some, results);
        }
        let mut bounced = bounced.into_iter().peekable();
        while bounced.peek().is_some() {
            let some = bounced.by_ref().take(BOUNCE_PAGES as usize).collect();
            self.write_bounced(worker, some, results);
        }
    }

    fn write_direct(
        &self,
        worker: &mut Worker,
        mut round: Vec<(Writing, Headroom)>,
        results: &mut Results<Stored>,
    ) {
        if round.is_empty() {
            return;
        }
        let payloads: Vec<&[u8]> = round.iter().map(|(it, _)| &*it.put.source).collect();
        let sums = payload_checksums(&payloads);
        for ((Writing { put, .. }, headroom), sum) in round.iter_mut().zip(sums) {
            headroom.write(&put.header_with(sum).encode());
        }
        let keys = self.shared.keys(round.iter().map(|(writing, _)| &writing.put.id));
        let pieces = round.iter().map(|(it, headroom)| Readable::page(headroom, &it.put.source));
        let outcomes = self.shared.send(self.client, &keys, pieces.collect(), self.protection());
        let end = |((writing, headroom), outcome): ((Writing, Headroom), &Outcome)| {
            let (header, length) = (headroom.read(), writing.put.source.len());
            if outcome.may_go_on() {
                self.client.keep((writing.put, headroom));
            }
            Written { claimed: writing.claimed, header, length }
        };
        let round = round.into_iter().zip(&outcomes).map(end).collect();
        self.settle(worker, &keys, round, outcomes, results);
    }

    /// Writes payloads straight from where they are, and their headers through the thread's own memory.
    fn write_apart(&self, worker: &mut Worker, round: Vec<Writing>, results: &mut Results<Stored>) {
        let keys = self.shared.keys(round.iter().map(|writing| &writing.put.id));
        let mut headers = match worker.copies(round.iter().map(|_| HEADER_BYTES)) {
            Ok(headers) => headers,
            Err(error) => {
                round.iter().for_each(|it| self.give_up(&it.claimed, error.clone(), results));
                return;
            }
        };
        let payloads: Vec<&[u8]> = round.iter().map(|it| &*it.put.source).collect();
        let sums = payload_checksums(&payloads);
        for ((header, Writing { put, .. }), sum) in headers.iter_mut().zip(&round).zip(sums) {
            let encoded = put.header_with(sum).encode();
            header.copy_from_slice(&encoded);
        }
        if self.is_precious() {
            // There is no header, so what there may be of a payload was left by a put that has failed.
            let payloads: Vec<CString> = keys.iter().map(|key| payload_key(key)).collect();
            for (key, _) in payloads.iter().zip(self.client.exist(&payloads)).filter(|it| it.1 == 1)
            {
                self.client.remove(key, true, false);
            }
        }
        self.shared.ledger.lock().may_be_apart.extend(round.iter().map(|it| it.put.id));
        let pieces = headers.iter().zip(payloads);
        let pieces = pieces.map(|(header, payload)| Readable::apart(header, payload)).collect();
        let outcomes = self.shared.send(self.client, &keys, pieces, self.protection());
        let written = |((writing, header), outcome): ((Writing, Buffered<Target>), &Outcome)| {
            let (bytes, length) = (header_of(&header), writing.put.source.len());
            if outcome.may_go_on() {
                self.client.keep((writing.put, header));
            }
            Written { claimed: writing.claimed, header: bytes, length }
        };
        let round = round.into_iter().zip(headers).zip(&outcomes).map(written).collect();
        self.settle(worker, &keys, round, outcomes, results);
    }

    fn write_bounced(
        &self,
        worker: &mut Worker,
        round: Vec<Writing>,
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
        for (copy, Writing { put, .. }) in copies.iter_mut().zip(&round) {
            copy[..HEADER_BYTES].copy_from_slice(&put.header().encode());
            copy[HEADER_BYTES..].copy_from_slice(&put.source);
            self.shared.bounced(put.source.len());
        }
        let pieces = copies.iter().map(|copy| Readable::bytes(copy)).collect();
        let outcomes = self.shared.send(self.client, &keys, pieces, self.protection());
        let headers: Vec<[u8; HEADER_BYTES]> = copies.iter().map(|copy| header_of(copy)).collect();
        for (copy, outcome) in copies.into_iter().zip(&outcomes) {
            if outcome.may_go_on() {
                self.client.keep(copy);
            }
        }
        let written = |(Writing { claimed, put }, header)| {
            let length = put.source.len();
            Written { claimed, header, length }
        };
        let round = round.into_iter().zip(headers).map(written).collect();
        self.settle(worker, &keys, round, outcomes, results);
    }

    /// The object is not stored after all.
    fn give_up(&self, claimed: &Claimed, error: StoreError, results: &mut Results<Stored>) {
        results[claimed.place] = Err(error);
        let mut state = self.shared.ledger.lock();
        state.catalogue.abandon(claimed.slot);
        state.may_be_apart.remove(&claimed.id);
        drop(state);
        self.shared.ledger.notify();
    }

    /// Publishes what was written and gives up what was not.
    fn settle(
        &self,
        worker: &mut Worker,
        keys: &[CString],
        round: Vec<Written>,
        outcomes: Vec<Outcome>,
        results: &mut Results<Stored>,
    ) {
        let is_there: Vec<bool> = if self.is_precious() {
            let codes = self.client.exist(keys).into_iter();
            codes.map(|code| self.shared.found(code) == Ok(true)).collect()
        } else {
            vec![true; keys.len()]
        };
        let each = round.into_iter().zip(keys).zip(outcomes).zip(is_there);
        for (((written, key), outcome), is_there) in each {
            let Written { claimed, .. } = &written;
            let error = match outcome {
                Outcome::Done | Outcome::AlreadyThere if is_there => {
                    match self.is_ours(worker, key, &written) {
                        Ok(is_ours) => {
                            let is_stiff = is_ours && is_hard(self.options.pin);
                            if !is_ours {
                                self.shared.ledger.lock().may_be_apart.insert(claimed.id);
                            }
                            self.publish(&claimed.id, claimed.slot, is_stiff);
                            let stored = if is_ours { Stored::New } else { Stored::AlreadyThere };
                            results[claimed.place] = Ok(stored);
                        }
                        Err(error) => self.give_up(claimed, error, results),
                    }
                    continue;
                }
                // Somebody else's put of the key has not ended, and may never.
                Outcome::Done | Outcome::AlreadyThere | Outcome::Unfinished => {
                    StoreError::BeingWritten
                }
                Outcome::Full => StoreError::Full,
                Outcome::Absent => given_up(),
                Outcome::BadLength
                | Outcome::Leased
                | Outcome::LeaseLapsed
                | Outcome::TransferFailed
                | Outcome::MasterGone
                | Outcome::Other => failure("putting an object", outcome),
            };
            self.give_up(claimed, error, results);
        }
    }

    /// Whether an object that is there is the one that was written, and not another's, as far as it must be
    /// known.
    fn is_ours(
        &self,
        worker: &mut Worker,
        key: &CStr,
        written: &Written,
    ) -> Result<bool, StoreError> {
        let bytes = HEADER_BYTES + written.length;
        if !self.is_precious() || bytes > LOOKED_AT_BYTES_MAX {
            return Ok(true);
        }
        let (code, copy) = worker.read(self.client, key, bytes)?;
        match (self.shared.outcome(Call::Get, code), copy) {
            (_, Some(copy)) => Ok(header_of(&copy) == written.header),
            // Of another size, so another's.
            (Outcome::Done | Outcome::BadLength, None) => Ok(false),
            (Outcome::Absent | Outcome::Unfinished, None) => Err(StoreError::BeingWritten),
            (other, None) => Err(failure("looking at an object", other)),
        }
    }

    /// The object can be had from now on, and lower generations of it cannot.
    fn publish(&self, id: &ObjectId, slot: Slot, is_stiff: bool) {
        let pin = self.options.pin;
        let mut state = self.shared.ledger.lock();
        let replaced = state.catalogue.publish(slot);
        if is_stiff {
            state.stiff.insert(*id, None);
        } else if is_hard(pin) {
            state.hold(*id);
        }
        let departures: Vec<_> = replaced.into_iter().map(|slot| state.depart(slot)).collect();
        drop(state);
        self.shared.ledger.notify();
        for departure in departures {
            // One that cannot be removed now is by the keeper.
            let _ = self.shared.expel(self.client, departure);
        }
    }

    /// Looks which of the objects the cluster has already, sound; the others remain to be written.
    fn adopt(
        &self,
        worker: &mut Worker,
        round: Vec<Writing>,
        results: &mut Results<Stored>,
    ) -> Vec<Writing> {
        let keys = self.shared.keys(round.iter().map(|writing| &writing.put.id));
        let present = self.client.exist(&keys);
        let mut rest = Vec::with_capacity(round.len());
        for ((writing, key), present) in round.into_iter().zip(&keys).zip(present) {
            let Writing { claimed, put } = &writing;
            if present != 1 {
                rest.push(writing);
                continue;
            }
            match self.shared.is_sound(worker, self.client, key, &put.id, put.source.len()) {
                Ok(true) => {
                    self.shared.ledger.lock().may_be_apart.insert(put.id);
                    self.publish(&put.id, claimed.slot, false);
                    results[claimed.place] = Ok(Stored::AlreadyThere);
                }
                Ok(false) => {
                    self.client.remove(key, true, true);
                    rest.push(writing);
                }
                Err(error) => self.give_up(claimed, error, results),
            }
        }
        rest
    }

    /// Those of the objects that are there which the cluster has lost; nobody has them any more. Where it
    /// does not say, the put has failed.
    fn gone(&mut self, results: &mut Results<Stored>) -> Vec<(usize, Buffered<Put>)> {
        let there = std::mem::take(&mut self.there);
        let (seen, unsure): (Vec<_>, Vec<_>) = {
            let state = self.shared.ledger.lock();
            let precious = self.is_precious();
            there.into_iter().partition(|(_, put)| !precious && state.seen.contains(&put.id))
        };
        self.there = seen;
        if unsure.is_empty() {
            return unsure;
        }
        let keys = self.shared.keys(unsure.iter().map(|(_, put)| &put.id));
        let mut gone = Vec::new();
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
                    gone.push((place, put));
                }
                (Ok(false), None) => self.there.push((place, put)),
                (Err(other), _) => results[place] = Err(failure("looking up an object", other)),
            }
        }
        gone
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

/// A put whose end the master does not know: it gives up those that take too long.
fn given_up() -> StoreError {
    let message = "the Mooncake master dropped the put because it took too long (its \
                   put_start_discard_timeout_sec): put it again";
    StoreError::io("putting an object", &io::Error::new(io::ErrorKind::TimedOut, message))
}
