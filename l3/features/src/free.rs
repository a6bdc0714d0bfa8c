//! Ending generations: nobody can read them any more, and their memory comes back.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::config::WhenFull;
use super::error::FeatureError;
use super::ledger::{Burial, Entry, Stage};
use super::notes::NoteError;
use super::record::Record;
use super::{GcReport, Shared};
use terrace_l3::{ObjectId, Results, StoreError};

/// How far the freeing of a generation has come.
#[derive(Clone, Debug, Default)]
pub(super) struct Freed {
    /// It was whole before.
    pub(super) found: bool,
    /// Nobody anywhere can read it.
    pub(super) dead: bool,
    /// Nothing is left of it.
    pub(super) complete: bool,
    /// Why not.
    error: Option<StoreError>,
}

/// What a look for samples that others have ended has found.
#[derive(Debug, Default)]
struct Reaped {
    consumed: u64,
    /// Why not all could be told.
    error: Option<FeatureError>,
}

/// Generations in hand. What is still there when it is dropped is put down.
struct InHand {
    shared: Arc<Shared>,
    burials: Vec<(Burial, Freed)>,
}

impl Drop for InHand {
    fn drop(&mut self) {
        let (mut ledger, now) = (self.shared.ledger.lock(), Instant::now());
        for (burial, freed) in self.burials.drain(..) {
            ledger.put_down(burial, freed.complete, now);
        }
        drop(ledger);
        self.shared.freed.notify_waiters();
    }
}

impl Shared {
    /// Ends a generation, which `entry` describes if it is not this producer's.
    pub(super) async fn end(self: &Arc<Self>, generation: u64, entry: Entry) -> Freed {
        let fresh = self.ledger.lock().doom(generation, Instant::now(), || entry);
        loop {
            let mut put_down = std::pin::pin!(self.freed.notified());
            put_down.as_mut().enable();
            if let Some(freed) = self.free(vec![generation]).await.pop() {
                return Freed { found: freed.found && fresh, ..freed };
            }
            match self.ledger.lock().entry(generation).map(|entry| entry.stage) {
                // Whoever has it in hand puts it down in the end.
                Some(Stage::Leaving { .. }) => {}
                // A put that was told to give up has given no ref to anybody.
                Some(Stage::Putting { .. } | Stage::Live) | None => {
                    return Freed { found: false, dead: true, complete: true, error: None };
                }
            }
            put_down.await;
        }
    }

    /// Complains if a generation can still be read somewhere.
    pub(super) fn revoked(
        &self,
        sample: &str,
        generation: u64,
        freed: &Freed,
    ) -> Result<(), FeatureError> {
        if freed.dead {
            return Ok(());
        }
        let key = self.keys.sample_key(sample, generation);
        let error = freed.error.clone().unwrap_or(StoreError::BeingWritten);
        Err(FeatureError::NotRevoked { key, error })
    }

    /// Frees what nobody has in hand. It goes on if the caller does not wait for it.
    pub(super) async fn free(self: &Arc<Self>, generations: Vec<u64>) -> Vec<Freed> {
        let burials: Vec<_> = {
            let mut ledger = self.ledger.lock();
            let taken = generations.into_iter().filter_map(|number| ledger.take(number));
            taken.map(|burial| (burial, Freed::default())).collect()
        };
        if burials.is_empty() {
            return Vec::new();
        }
        let mut in_hand = InHand { shared: self.clone(), burials };
        let task = tokio::spawn(async move {
            let shared = in_hand.shared.clone();
            shared.bury(&mut in_hand.burials).await;
            in_hand.burials.iter().map(|(_, freed)| freed.clone()).collect()
        });
        task.await.unwrap_or_default()
    }

    async fn bury(&self, burials: &mut [(Burial, Freed)]) {
        self.remove_tensors(burials).await;
        for (burial, freed) in burials.iter_mut() {
            let Burial { generation, entry } = burial;
            if !entry.dead {
                match self.revoke(*generation, entry).await {
                    Ok(()) => entry.dead = true,
                    Err(error) => freed.error = Some(error),
                }
            }
            freed.dead = entry.dead;
        }
        self.remove_notes(burials).await;
    }

    /// None of the objects of a generation could be removed. Perhaps one can be added: a note that says
    /// that it is over.
    async fn revoke(&self, generation: u64, entry: &mut Entry) -> Result<(), StoreError> {
        // A note about what is gone already would be nobody's to remove.
        let mut unknown = Ok(());
        for there in self.notes.are_there(&entry.tensors).await {
            match there {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => unknown = Err(error),
            }
        }
        unknown?;
        // Even if it fails it may be there.
        entry.revoked = true;
        let note = self.keys.revocation(&entry.sample, generation);
        let record = Record {
            sample: entry.sample.to_string(),
            generation,
            owner: self.number().unwrap_or(u16::MAX),
            ..Record::default()
        };
        self.notes.write(note, &record, self.config.durable).await
    }

    async fn remove_tensors(&self, burials: &mut [(Burial, Freed)]) {
        let tensors = burials.iter().flat_map(|(burial, _)| burial.entry.tensors.iter().copied());
        let tensors: Vec<ObjectId> = tensors.collect();
        let mut results = self.remove(&tensors).await.into_iter();
        for (burial, freed) in burials.iter_mut() {
            let entry = &mut burial.entry;
            let tensors = std::mem::take(&mut entry.tensors);
            entry.dead |= tensors.is_empty();
            freed.found = !tensors.is_empty();
            for (tensor, result) in tensors.into_iter().zip(&mut results) {
                match result {
                    Ok(()) => entry.dead = true,
                    Err(StoreError::Missing | StoreError::Superseded { .. }) => {
                        (freed.found, entry.dead) = (false, true);
                    }
                    Err(error) => {
                        freed.error = Some(error);
                        entry.tensors.push(tensor);
                    }
                }
            }
        }
    }

    /// Removes what was noted about generations of which nothing else is left.
    async fn remove_notes(&self, burials: &mut [(Burial, Freed)]) {
        let done = |(burial, _): &&mut (Burial, Freed)| burial.entry.tensors.is_empty();
        let mut done: Vec<_> = burials.iter_mut().filter(done).collect();
        if done.iter().any(|(burial, _)| burial.entry.own.is_some()) {
            match self.check_owner(None).await {
                // They are of whoever has the number now.
                Err(FeatureError::Fenced { .. }) => {
                    let own = |(burial, _): &&mut &mut (Burial, Freed)| burial.entry.own.is_some();
                    done.iter_mut().filter(own).for_each(|(_, freed)| freed.complete = true);
                    done.retain(|(burial, _)| burial.entry.own.is_none());
                }
                Err(FeatureError::Store { error, .. }) => {
                    done.iter_mut().for_each(|(_, freed)| freed.error = Some(error.clone()));
                    return;
                }
                Ok(_) | Err(_) => {}
            }
            // After a crash no record may be missing of a tensor that is there.
            if let Err(error) = self.store.flush().await {
                done.iter_mut().for_each(|(_, freed)| freed.error = Some(error.clone()));
                return;
            }
        }
        for (burial, freed) in &mut done {
            freed.complete = true;
            if let Err(error) = self.disown(burial).await {
                (freed.complete, freed.error) = (false, Some(error));
            }
        }
        // The record goes last: by it the others are found.
        for notes_of in [Self::notes_of, Self::record_of] {
            done.retain(|(_, freed)| freed.complete);
            let notes: Vec<_> = done.iter().map(|(burial, _)| notes_of(self, burial)).collect();
            // Once its claim may be gone, another's may be in its place: whoever has to try again looks first.
            for (burial, _) in &done {
                self.ledger.lock().doubt_cell(burial.generation);
            }
            let mut results = self.remove(&notes.concat()).await.into_iter();
            for ((_, freed), notes) in done.iter_mut().zip(notes) {
                for result in results.by_ref().take(notes.len()) {
                    match result {
                        Ok(()) | Err(StoreError::Missing | StoreError::Superseded { .. }) => {}
                        Err(error) => (freed.complete, freed.error) = (false, Some(error)),
                    }
                }
            }
        }
    }

    pub(super) fn notes_of(&self, burial: &Burial) -> Vec<ObjectId> {
        let Burial { generation, entry } = burial;
        let mut notes = Vec::new();
        if entry.revoked || entry.own.is_some() {
            notes.push(self.keys.revocation(&entry.sample, *generation));
        }
        let is_ours = entry.own.and_then(|own| own.cell).is_some_and(|cell| cell.is_ours);
        notes.extend(self.claim_of(entry).filter(|_| is_ours));
        notes
    }

    fn claim_of(&self, entry: &Entry) -> Option<ObjectId> {
        Some(self.keys.claim(&entry.sample, entry.own?.cell?.number))
    }

    /// Looks whose claim it is that may be ours, since the answer to its put was lost. Only what is known to
    /// be ours is removed; one that is not there may come later, and is looked for again while it may.
    pub(super) async fn disown(&self, burial: &mut Burial) -> Result<(), StoreError> {
        let Burial { generation, entry } = burial;
        let claim = self.claim_of(entry);
        let cell = entry.own.as_mut().and_then(|own| own.cell.as_mut());
        let (Some(claim), Some(cell)) = (claim, cell.filter(|cell| !cell.is_ours)) else {
            return Ok(());
        };
        match self.notes.read(&[claim]).await.remove(0) {
            Ok(record) => cell.is_ours = record.generation == *generation,
            Err(NoteError::Forged | NoteError::Store(StoreError::Missing)) => {}
            Err(NoteError::Store(error)) => return Err(error),
        }
        Ok(())
    }

    fn record_of(&self, burial: &Burial) -> Vec<ObjectId> {
        let own = burial.entry.own.zip(self.number());
        own.map(|(own, owner)| self.keys.record(owner, own.slot)).into_iter().collect()
    }

    /// Removes objects, whoever has pinned them.
    pub(super) async fn remove(&self, ids: &[ObjectId]) -> Results<()> {
        self.notes.remove(ids).await
    }

    /// Frees what can be freed. Samples that were whole less than `seen_for` ago are not looked at again.
    pub(super) async fn gc(self: &Arc<Self>, seen_for: Duration) -> Result<GcReport, FeatureError> {
        self.check_owner(None).await?;
        self.show().await;
        let mut report = GcReport::default();
        let mut unknown = None;
        let mut from = 0;
        loop {
            let (reaped, next) = self.reap(from, seen_for).await;
            report.consumed += reaped.consumed;
            unknown = reaped.error.or(unknown);
            from = next;
            if from == 0 {
                break;
            }
        }
        report.expired = self.expire().await;
        report.freed = self.retry().await;
        report.parked = self.ledger.lock().stats().parked;
        unknown.map_or(Ok(report), Err)
    }

    /// A little gc, for a put that waits. Where the store cannot be asked nothing is freed, and the put waits on.
    pub(super) async fn make_room(self: &Arc<Self>) -> Result<(), FeatureError> {
        if let Err(fenced @ FeatureError::Fenced { .. }) = self.check_owner(None).await {
            return Err(fenced);
        }
        self.show().await;
        let from = *self.reap_from.lock();
        let seen_for = match self.config.when_full {
            // It looks once.
            WhenFull::Refuse => Duration::ZERO,
            WhenFull::WaitMs(_) => Duration::from_millis(self.config.poll_ms),
        };
        let (_, next) = self.reap(from, seen_for).await;
        *self.reap_from.lock() = next;
        self.expire().await;
        self.retry().await;
        Ok(())
    }

    /// Looks which of this producer's samples others have ended, from one of them on, and where to go on.
    /// One whose claim is lost is ended, since nobody else could find it to supersede it. What cannot be
    /// told ends nothing.
    async fn reap(self: &Arc<Self>, from: u64, seen_for: Duration) -> (Reaped, u64) {
        const SAMPLES: usize = 64;
        let now = Instant::now();
        let (live, next) = self.ledger.lock().live(from, SAMPLES, now, seen_for);
        let mut ids = Vec::new();
        for Burial { generation, entry } in &live {
            ids.push(self.keys.revocation(&entry.sample, *generation));
            ids.extend(self.claim_of(entry));
            ids.extend_from_slice(&entry.tensors);
        }
        let mut there = self.notes.are_there(&ids).await.into_iter();
        let mut reaped = Reaped::default();
        let mut ended = Vec::new();
        for Burial { generation, entry } in &live {
            let wanted = self.claim_of(entry).iter().len() + entry.tensors.len();
            let (mut is_over, mut is_known) = (false, true);
            for (number, there) in there.by_ref().take(1 + wanted).enumerate() {
                match there {
                    // The first is the note that it is revoked; all others it needs.
                    Ok(true) if number == 0 => {
                        let key = self.keys.sample_key(&entry.sample, *generation);
                        let note = self.keys.revocation(&entry.sample, *generation);
                        match self.notes.is_authentic(note).await {
                            Ok(revoked) => is_over |= revoked,
                            Err(error) => {
                                let error = self.note_failed("the revocation of", &key, error);
                                (reaped.error, is_known) = (Some(error), false);
                            }
                        }
                    }
                    Ok(there) => is_over |= there == (number == 0),
                    Err(error) => {
                        (reaped.error, is_known) = (Some(self.failed(error)), false);
                    }
                }
            }
            if is_over {
                ended.push(*generation);
            } else if is_known {
                self.ledger.lock().saw(*generation, now);
            }
        }
        let consumed = self.doom_all(&ended);
        reaped.consumed = consumed.len() as u64;
        self.ledger.lock().stats.consumed_elsewhere += reaped.consumed;
        self.free(consumed).await;
        (reaped, next)
    }

    async fn expire(self: &Arc<Self>) -> u64 {
        let Some(max_hold_ms) = self.config.max_hold_ms else { return 0 };
        let Some(before_ms) = self.clock.now_ms().checked_sub(max_hold_ms) else { return 0 };
        let old = self.ledger.lock().older_than(before_ms);
        let expired = self.doom_all(&old);
        let count = expired.len() as u64;
        self.ledger.lock().stats.expired += count;
        self.free(expired).await;
        count
    }

    async fn retry(self: &Arc<Self>) -> u64 {
        let due = {
            let mut ledger = self.ledger.lock();
            let due = ledger.due(Instant::now());
            ledger.stats.retries += due.len() as u64;
            due
        };
        self.free(due).await.iter().filter(|freed| freed.complete).count() as u64
    }

    /// Those of this producer's live generations that were not doomed by somebody else meanwhile.
    fn doom_all(&self, generations: &[u64]) -> Vec<u64> {
        let (mut ledger, now) = (self.ledger.lock(), Instant::now());
        let own = generations.iter().copied().filter(|number| ledger.entry(*number).is_some());
        let own: Vec<u64> = own.collect();
        let none = || unreachable!("it is in the ledger");
        own.into_iter().filter(|number| ledger.doom(*number, now, none)).collect()
    }
}
