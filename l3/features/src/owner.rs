//! Exclusive use of a producer's number by one process.
//!
//! A process takes a number by writing notes with an *epoch* higher than that of all existing
//! notes, removing the lower ones, and only then looking for the samples of its number. A process
//! whose notes are gone has lost its number and changes nothing of it any more. It checks its notes
//! after each claim. Either they are gone, and the sample was never complete; or the process that
//! takes the number finds the claim. If no process has the number, for example because the store
//! lost everything, it takes the number again for later puts.
//!
//! The notes are replicated, so that one unreachable node does not block the process: all of them
//! must be removed to take the number, and one is enough to have it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::error::FeatureError;
use super::keys::{Keys, OWNER_CELLS, OWNER_COPIES, OWNERS_MAX};
use super::notes::{NoteError, Notes};
use super::record::Record;
use super::{Clock, FeatureCore, generation};
use terrace_l3::{ObjectId, StoreError, Stored};

/// Interval of the heartbeats of a process that found its number free.
const HEARTBEAT_MS: u64 = 20_000;

/// Time without a heartbeat after which a number that was found free is free again.
pub(super) const STALE_MS: u64 = 5 * 60_000;

/// Marker in the notes of a number that was found free: other processes may take it when its
/// process is gone. All other numbers are reserved.
const FOUND: &str = "found";

/// State of this process's number.
#[derive(Debug)]
pub(super) struct Ownership {
    pub(super) number: u16,
    pub(super) held: Mutex<NumberProof>,
    was_found: bool,
    pub(super) shown_ms: AtomicU64,
    /// Another process has the number, or it was returned.
    is_lost: AtomicBool,
    /// Lets one call at a time check whether no process has the number.
    regaining: tokio::sync::Mutex<()>,
}

/// Proof that this process has its number.
#[derive(Clone, Debug)]
pub(super) struct NumberProof {
    epoch: u64,
    /// Its notes.
    pub(super) notes: Vec<ObjectId>,
}

/// Context for taking a number.
#[derive(Debug)]
pub(super) struct NumberRegistry<'a> {
    pub(super) keys: &'a Keys,
    pub(super) notes: &'a Notes,
    pub(super) clock: Clock,
    pub(super) durable: bool,
}

impl NumberRegistry<'_> {
    /// Takes a number from any process that has it.
    pub(super) async fn take(&self, number: u16) -> Result<Ownership, FeatureError> {
        let taken = self.notes_of(number).await.map_err(|error| self.failed(number, error))?;
        let was_found = taken.first().is_some_and(|(_, record)| record.sample == FOUND);
        let own = self.try_to_take(number, &taken, was_found, false).await?;
        own.ok_or_else(|| fenced(self.keys, number))
    }

    /// Takes a free number: one whose process is long gone, with the samples that it left, or an
    /// unused one, starting with the highest, since people choose low ones.
    pub(super) async fn find(&self) -> Result<Ownership, FeatureError> {
        let mut unused = None;
        for number in (0..OWNERS_MAX).rev() {
            // A number with unreadable notes counts as taken.
            let Ok(taken) = self.notes_of(number).await else { continue };
            let is_free = if taken.is_empty() { true } else { self.is_stale(number, &taken).await };
            if !is_free {
                continue;
            }
            if taken.is_empty() {
                unused = Some(number);
                break;
            }
            if let Some(own) = self.try_to_take(number, &taken, true, false).await? {
                return Ok(own);
            }
        }
        for number in (0..=unused.unwrap_or(0)).rev() {
            // If two processes try concurrently, the one that loses continues the search.
            if let Ok(taken) = self.notes_of(number).await
                && taken.is_empty()
                && let Some(own) = self.try_to_take(number, &taken, true, true).await?
            {
                return Ok(own);
            }
        }
        let store = self.keys.store();
        let text = format!("all {OWNERS_MAX} numbers of producers of {store} are in use");
        Err(FeatureError::Config(text))
    }

    async fn notes_of(&self, number: u16) -> Result<Vec<(ObjectId, Record)>, NoteError> {
        self.notes.find_sound(&self.keys.owners(number)).await
    }

    /// Returns true if the process that found this number free has sent no heartbeat for long.
    async fn is_stale(&self, number: u16, taken: &[(ObjectId, Record)]) -> bool {
        let Ok(shown) = self.notes.find_sound(&self.keys.signs_of(number)).await else {
            return false;
        };
        let last_ms = taken.iter().chain(&shown).map(|(_, record)| record.created_ms).max();
        let all_found = taken.iter().all(|(_, record)| record.sample == FOUND);
        all_found && last_ms.unwrap_or(0).saturating_add(STALE_MS) < self.clock.now_ms()
    }

    /// Takes a number that has these notes, unless another process does so concurrently: with a
    /// higher epoch, or, if it `gives_way`, with any.
    async fn try_to_take(
        &self,
        number: u16,
        taken: &[(ObjectId, Record)],
        was_found: bool,
        gives_way: bool,
    ) -> Result<Option<Ownership>, FeatureError> {
        let failed = |error| self.failed(number, error);
        let (highest, now_ms) =
            (taken.iter().map(|(_, record)| record.generation).max(), self.clock.now_ms());
        let epoch = generation::take(highest.unwrap_or(0), now_ms, number);
        let record = Record {
            sample: if was_found { FOUND.to_owned() } else { String::new() },
            generation: epoch,
            owner: number,
            created_ms: now_ms,
            ..Record::default()
        };
        let mut notes = Vec::new();
        let written = self.write(number, taken, &record, &mut notes).await;
        let found = match written {
            Ok(true) => self.notes_of(number).await,
            Ok(false) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        };
        let is_ours = |(_, record): &&(ObjectId, Record)| record.generation == epoch;
        let won = match &found {
            Ok(found) => {
                let ours = found.iter().filter(is_ours).count();
                let others = found.iter().filter(|note| !is_ours(note));
                let mut rivals = others.filter(|note| gives_way || note.1.generation > epoch);
                ours == notes.len() && ours > 0 && rivals.next().is_none()
            }
            Err(_) => false,
        };
        if !won {
            drop(self.notes.remove(&notes).await);
            return found.map(|_| None).map_err(failed);
        }
        let lower = found.iter().flatten().filter(|note| !is_ours(note));
        let lower: Vec<ObjectId> = lower.map(|(id, _)| *id).collect();
        for removed in self.notes.remove(&lower).await {
            match removed {
                Ok(()) | Err(StoreError::Missing) => {}
                Err(error) => {
                    // Its process may still have it.
                    drop(self.notes.remove(&notes).await);
                    return Err(failed(error.into()));
                }
            }
        }
        Ok(Some(Ownership {
            number,
            held: Mutex::new(NumberProof { epoch, notes }),
            was_found,
            shown_ms: AtomicU64::new(now_ms),
            is_lost: AtomicBool::new(false),
            regaining: tokio::sync::Mutex::default(),
        }))
    }

    /// Writes a note to a free cell of each copy, and returns whether there was one.
    async fn write(
        &self,
        number: u16,
        taken: &[(ObjectId, Record)],
        record: &Record,
        notes: &mut Vec<ObjectId>,
    ) -> Result<bool, StoreError> {
        for copy in 0..OWNER_COPIES {
            let mut has_room = false;
            for cell in 0..OWNER_CELLS {
                let id = self.keys.owner(number, copy, cell);
                if taken.iter().any(|(other, _)| *other == id) {
                    continue;
                }
                match self.notes.write_if_free(id, record, self.durable).await {
                    Ok(Stored::New) => {
                        notes.push(id);
                        has_room = true;
                        break;
                    }
                    // Another process is taking it, or died while it did.
                    Ok(Stored::AlreadyThere) | Err(StoreError::BeingWritten) => {}
                    Err(error) => {
                        // If the result was lost, the note may exist.
                        notes.push(id);
                        return Err(error);
                    }
                }
            }
            if !has_room {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn failed(&self, number: u16, error: NoteError) -> FeatureError {
        let key = format!("producer {number} of {}", self.keys.store());
        match error {
            NoteError::Store(error) => FeatureError::Store { key, error },
            NoteError::Forged => FeatureError::ForgedObject { what: "a note of", key },
        }
    }
}

fn fenced(keys: &Keys, owner: u16) -> FeatureError {
    FeatureError::Fenced { store: keys.store().to_owned(), owner }
}

impl FeatureCore {
    /// Fails if another process has taken this producer's number, otherwise returns the epoch of
    /// this process. Consumers have none. An operation must end in the epoch in which it began:
    /// `since` is the result of its first check.
    pub(super) async fn check_owner(&self, since: Option<u64>) -> Result<u64, FeatureError> {
        let Some(own) = &self.own else { return Ok(0) };
        let held = own.held.lock().clone();
        let has_changed = since.is_some_and(|since| since != held.epoch);
        if own.is_lost.load(Ordering::Acquire) || has_changed {
            return Err(fenced(&self.keys, own.number));
        }
        let mut unknown = None;
        for note in &held.notes {
            match self.notes.read(&[*note]).await.remove(0) {
                Ok(record) if record.generation == held.epoch => return Ok(held.epoch),
                Ok(_) | Err(NoteError::Store(StoreError::Missing)) => {}
                // The holder of another copy may answer.
                Err(error) => unknown = Some(error),
            }
        }
        if let Some(error) = unknown {
            let whose = format!("producer {} of {}", own.number, self.keys.store());
            return Err(self.note_failed("a note of", &whose, error));
        }
        match since {
            // Another process may have had the number meanwhile, and removed incomplete samples.
            Some(_) => Err(fenced(&self.keys, own.number)),
            None => self.regain(own, held.epoch).await,
        }
    }

    /// Takes the number again after the notes of this process are gone. If no notes of another
    /// process exist, the store has lost everything, or the number was returned.
    async fn regain(&self, own: &Ownership, former: u64) -> Result<u64, FeatureError> {
        let _alone = own.regaining.lock().await;
        let now = own.held.lock().epoch;
        if now != former {
            return Ok(now);
        }
        let (keys, notes, clock) = (&self.keys, &self.notes, self.clock);
        let registry = NumberRegistry { keys, notes, clock, durable: self.config.durable };
        let taken = registry.notes_of(own.number).await;
        let taken = taken.map_err(|error| registry.failed(own.number, error))?;
        let again = match taken.is_empty() {
            true => registry.try_to_take(own.number, &[], own.was_found, true).await?,
            false => None,
        };
        let Some(again) = again else {
            own.is_lost.store(true, Ordering::Release);
            return Err(fenced(&self.keys, own.number));
        };
        // Other producers may have claims in the cells of this process by now.
        self.ledger.lock().distrust_cells();
        let held = again.held.into_inner();
        let epoch = held.epoch;
        *own.held.lock() = held;
        Ok(epoch)
    }

    /// Writes a heartbeat if this process found its number free and one is due.
    pub(super) async fn send_heartbeat(&self) {
        let Some(own) = self.own.as_ref().filter(|own| own.was_found) else { return };
        let (now_ms, shown_ms) = (self.clock.now_ms(), own.shown_ms.load(Ordering::Relaxed));
        if now_ms < shown_ms + HEARTBEAT_MS {
            return;
        }
        own.shown_ms.store(now_ms, Ordering::Relaxed);
        let record = Record {
            sample: FOUND.to_owned(),
            generation: own.held.lock().epoch,
            owner: own.number,
            created_ms: now_ms,
            ..Record::default()
        };
        // One heartbeat note stays while the other is written. If neither can be written, other
        // processes eventually treat this one as gone, and its puts are fenced.
        let signs = self.keys.signs_of(own.number);
        let sign = signs[(now_ms / HEARTBEAT_MS) as usize % signs.len()];
        drop(self.notes.write(sign, &record, false).await);
    }

    /// Returns the number if nothing in the store belongs to this producer. Later puts fail.
    pub(super) async fn give_number_back(self: &Arc<Self>) -> Result<(), FeatureError> {
        let Some(own) = &self.own else { return Ok(()) };
        match self.check_owner(None).await {
            Err(FeatureError::Fenced { .. }) => return Ok(()),
            checked => drop(checked?),
        }
        own.is_lost.store(true, Ordering::Release);
        if self.ledger.lock().samples() > 0 {
            return Ok(());
        }
        let mut notes = own.held.lock().notes.clone();
        if own.was_found {
            notes.extend(self.keys.signs_of(own.number));
        }
        for removed in self.notes.remove(&notes).await {
            match removed {
                Ok(()) | Err(StoreError::Missing) => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }
}
