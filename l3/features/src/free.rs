//! Freeing of generations: they become unreadable, and their memory is released.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::config::WhenFull;
use super::error::FeatureError;
use super::ledger::{FreeingWork, GenerationEntry, GenerationStage};
use super::notes::NoteError;
use super::record::Record;
use super::{FeatureCore, GcReport};
use terrace_l3::{ObjectId, Results, StoreError};

/// Progress of freeing a generation.
#[derive(Clone, Debug, Default)]
pub(super) struct Freed {
    /// The generation was complete before.
    pub(super) found: bool,
    /// No process can read it any more.
    pub(super) dead: bool,
    /// All of its objects are gone.
    pub(super) complete: bool,
    /// Error that prevented completion.
    error: Option<StoreError>,
}

/// Result of a search for samples that other processes have ended.
#[derive(Debug, Default)]
struct ReapResult {
    consumed: u64,
    /// Error that left some samples unchecked.
    error: Option<FeatureError>,
}

/// Generations being freed. Dropping it returns the rest to the ledger.
struct FreeingGuard {
    shared: Arc<FeatureCore>,
    batch: Vec<(FreeingWork, Freed)>,
}

impl Drop for FreeingGuard {
    fn drop(&mut self) {
        let (mut ledger, now) = (self.shared.ledger.lock(), Instant::now());
        for (work, freed) in self.batch.drain(..) {
            ledger.return_work(work, freed.complete, now);
        }
        drop(ledger);
        self.shared.freed.notify_waiters();
    }
}

impl FeatureCore {
    /// Ends a generation; `entry` describes one of another producer.
    pub(super) async fn end(self: &Arc<Self>, generation: u64, entry: GenerationEntry) -> Freed {
        let fresh = self.ledger.lock().doom(generation, Instant::now(), || entry);
        loop {
            let mut return_work = std::pin::pin!(self.freed.notified());
            return_work.as_mut().enable();
            if let Some(freed) = self.free(vec![generation]).await.pop() {
                return Freed { found: freed.found && fresh, ..freed };
            }
            match self.ledger.lock().entry(generation).map(|entry| entry.stage) {
                // The other task that frees it returns it to the ledger.
                Some(GenerationStage::Leaving { .. }) => {}
                // A cancelled put has not given out its ref.
                Some(GenerationStage::Putting { .. } | GenerationStage::Live) | None => {
                    return Freed { found: false, dead: true, complete: true, error: None };
                }
            }
            return_work.await;
        }
    }

    /// Returns an error if the generation can still be read elsewhere.
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

    /// Frees the generations that no other task is freeing. Continues if the caller stops waiting.
    pub(super) async fn free(self: &Arc<Self>, generations: Vec<u64>) -> Vec<Freed> {
        let batch: Vec<_> = {
            let mut ledger = self.ledger.lock();
            let taken = generations.into_iter().filter_map(|number| ledger.take(number));
            taken.map(|work| (work, Freed::default())).collect()
        };
        if batch.is_empty() {
            return Vec::new();
        }
        let mut in_hand = FreeingGuard { shared: self.clone(), batch };
        let task = tokio::spawn(async move {
            let shared = in_hand.shared.clone();
            shared.free_objects(&mut in_hand.batch).await;
            in_hand.batch.iter().map(|(_, freed)| freed.clone()).collect()
        });
        task.await.unwrap_or_default()
    }

    async fn free_objects(&self, batch: &mut [(FreeingWork, Freed)]) {
        self.remove_tensors(batch).await;
        for (work, freed) in batch.iter_mut() {
            let FreeingWork { generation, entry } = work;
            if !entry.dead {
                match self.revoke(*generation, entry).await {
                    Ok(()) => entry.dead = true,
                    Err(error) => freed.error = Some(error),
                }
            }
            freed.dead = entry.dead;
        }
        self.remove_notes(batch).await;
    }

    /// Writes a revocation of a generation whose objects could not be removed.
    async fn revoke(&self, generation: u64, entry: &mut GenerationEntry) -> Result<(), StoreError> {
        // The revocation of a generation that is gone would never be removed.
        let mut unknown = Ok(());
        for there in self.notes.are_there(&entry.tensors).await {
            match there {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => unknown = Err(error),
            }
        }
        unknown?;
        // Even if the put fails, the revocation may exist.
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

    async fn remove_tensors(&self, batch: &mut [(FreeingWork, Freed)]) {
        let tensors = batch.iter().flat_map(|(work, _)| work.entry.tensors.iter().copied());
        let tensors: Vec<ObjectId> = tensors.collect();
        let mut results = self.remove(&tensors).await.into_iter();
        for (work, freed) in batch.iter_mut() {
            let entry = &mut work.entry;
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

    /// Removes the notes of generations that have no other objects left.
    async fn remove_notes(&self, batch: &mut [(FreeingWork, Freed)]) {
        let done = |(work, _): &&mut (FreeingWork, Freed)| work.entry.tensors.is_empty();
        let mut done: Vec<_> = batch.iter_mut().filter(done).collect();
        if done.iter().any(|(work, _)| work.entry.own.is_some()) {
            match self.check_owner(None).await {
                // They belong to the process that now has the number.
                Err(FeatureError::Fenced { .. }) => {
                    let own = |(work, _): &&mut &mut (FreeingWork, Freed)| work.entry.own.is_some();
                    done.iter_mut().filter(own).for_each(|(_, freed)| freed.complete = true);
                    done.retain(|(work, _)| work.entry.own.is_none());
                }
                Err(FeatureError::Store { error, .. }) => {
                    done.iter_mut().for_each(|(_, freed)| freed.error = Some(error.clone()));
                    return;
                }
                Ok(_) | Err(_) => {}
            }
            // A crash must not leave a tensor without its record.
            if let Err(error) = self.store.flush().await {
                done.iter_mut().for_each(|(_, freed)| freed.error = Some(error.clone()));
                return;
            }
        }
        for (work, freed) in &mut done {
            freed.complete = true;
            if let Err(error) = self.disown(work).await {
                (freed.complete, freed.error) = (false, Some(error));
            }
        }
        // The record is removed last: the other objects are found by it.
        for notes_of in [Self::notes_of, Self::record_of] {
            done.retain(|(_, freed)| freed.complete);
            let notes: Vec<_> = done.iter().map(|(work, _)| notes_of(self, work)).collect();
            // After a removal that may have succeeded, another producer's claim may be in the cell:
            // a retry checks it first.
            for (work, _) in &done {
                self.ledger.lock().distrust_cell(work.generation);
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

    pub(super) fn notes_of(&self, work: &FreeingWork) -> Vec<ObjectId> {
        let FreeingWork { generation, entry } = work;
        let mut notes = Vec::new();
        if entry.revoked || entry.own.is_some() {
            notes.push(self.keys.revocation(&entry.sample, *generation));
        }
        let is_ours = entry.own.and_then(|own| own.cell).is_some_and(|cell| cell.is_ours);
        notes.extend(self.claim_of(entry).filter(|_| is_ours));
        notes
    }

    fn claim_of(&self, entry: &GenerationEntry) -> Option<ObjectId> {
        Some(self.keys.claim(&entry.sample, entry.own?.cell?.number))
    }

    /// Checks a claim that may be ours because the result of its put was lost. Removes only claims
    /// known to be ours. An absent one may still appear, and is checked again while that is
    /// possible.
    pub(super) async fn disown(&self, work: &mut FreeingWork) -> Result<(), StoreError> {
        let FreeingWork { generation, entry } = work;
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

    fn record_of(&self, work: &FreeingWork) -> Vec<ObjectId> {
        let own = work.entry.own.zip(self.number());
        own.map(|(own, owner)| self.keys.record(owner, own.slot)).into_iter().collect()
    }

    /// Removes objects, regardless of pins.
    pub(super) async fn remove(&self, ids: &[ObjectId]) -> Results<()> {
        self.notes.remove(ids).await
    }

    /// Frees what can be freed. Samples that were complete less than `seen_for` ago are not checked
    /// again.
    pub(super) async fn gc(self: &Arc<Self>, seen_for: Duration) -> Result<GcReport, FeatureError> {
        self.check_owner(None).await?;
        self.send_heartbeat().await;
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

    /// A partial gc for a waiting put. If the store cannot be asked, nothing is freed, and the put
    /// continues to wait.
    pub(super) async fn make_room(self: &Arc<Self>) -> Result<(), FeatureError> {
        if let Err(fenced @ FeatureError::Fenced { .. }) = self.check_owner(None).await {
            return Err(fenced);
        }
        self.send_heartbeat().await;
        let from = *self.reap_from.lock();
        let seen_for = match self.config.when_full {
            // The put checks once.
            WhenFull::Refuse => Duration::ZERO,
            WhenFull::WaitMs(_) => Duration::from_millis(self.config.poll_ms),
        };
        let (_, next) = self.reap(from, seen_for).await;
        *self.reap_from.lock() = next;
        self.expire().await;
        self.retry().await;
        Ok(())
    }

    /// Checks, from `from` on, which of this producer's samples other processes have ended, and
    /// returns where to continue. A sample whose claim is lost is ended, since no other producer
    /// could find and supersede it. Samples with unknown state are kept.
    async fn reap(self: &Arc<Self>, from: u64, seen_for: Duration) -> (ReapResult, u64) {
        const SAMPLES: usize = 64;
        let now = Instant::now();
        let (live, next) = self.ledger.lock().live(from, SAMPLES, now, seen_for);
        let mut ids = Vec::new();
        for FreeingWork { generation, entry } in &live {
            ids.push(self.keys.revocation(&entry.sample, *generation));
            ids.extend(self.claim_of(entry));
            ids.extend_from_slice(&entry.tensors);
        }
        let mut there = self.notes.are_there(&ids).await.into_iter();
        let mut reaped = ReapResult::default();
        let mut ended = Vec::new();
        for FreeingWork { generation, entry } in &live {
            let wanted = self.claim_of(entry).iter().len() + entry.tensors.len();
            let (mut is_over, mut is_known) = (false, true);
            for (number, there) in there.by_ref().take(1 + wanted).enumerate() {
                match there {
                    // The first note is the revocation; all others must exist.
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

    /// Marks live generations of this producer as doomed; returns those that were not doomed
    /// before.
    fn doom_all(&self, generations: &[u64]) -> Vec<u64> {
        let (mut ledger, now) = (self.ledger.lock(), Instant::now());
        let own = generations.iter().copied().filter(|number| ledger.entry(*number).is_some());
        let own: Vec<u64> = own.collect();
        let none = || unreachable!("it is in the ledger");
        own.into_iter().filter(|number| ledger.doom(*number, now, none)).collect()
    }
}
