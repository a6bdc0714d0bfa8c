//! Commits that make changes durable.
//!
//! A commit syncs the data, then writes and syncs the index. So an entry reaches the disk after the
//! bytes that it names, and a slot is reused after the entry of its old object has left the disk.
//! When an object replaces a lower generation, its own entry is written first, and the entry of the
//! replaced one is removed by the next commit: a crash finds at least one of the two.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::blocking::write_index;
use super::io::{BLOCK_BYTES, Blocks, DiskFile, Parts};
use super::layout::{ENTRIES_PER_BLOCK, Layout, write_entry};
use super::store::{DiskCore, DiskState};
use terrace_l3::StoreError;
use terrace_l3::backend::{Catalogue, Slot};

/// Progress of the commits.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// Number of finished commits.
    pub(super) rounds: u64,
    /// Error that has ended the commits, if any.
    pub(super) broken: Option<StoreError>,
}

/// Changes of one commit.
struct Round {
    /// Objects to add to the index.
    fresh: Vec<Slot>,
    /// Objects that the fresh ones replace.
    superseded: Vec<Slot>,
    /// Objects to remove from the index.
    tombs: Vec<Slot>,
    /// Objects whose owner may differ from the index.
    repinned: Vec<Slot>,
}

/// Maximum number of objects that a commit evicts.
const EVICTIONS_PER_ROUND: u32 = 4096;

impl DiskCore {
    /// Commits until the store is closed, with a last commit then.
    pub(super) fn commit_rounds(&self) {
        loop {
            let mut state = self.state.lock();
            let mut since = None;
            while !(state.wants_round || state.closing) {
                #[cfg(test)]
                {
                    state.committer_polls += 1;
                }
                if !state.is_dirty() {
                    since = None;
                    let step = self.config.grow_slots(state.catalogue.usable());
                    if let Some(slots) = self.growth_wanted(&state, step - 1) {
                        MutexGuard::unlocked(&mut state, || self.grow(slots));
                        continue;
                    }
                    state.committer_sleeps = true;
                    self.round_wanted.wait(&mut state);
                    state.committer_sleeps = false;
                    continue;
                }
                let interval = Duration::from_millis(self.config.commit_interval_ms);
                let deadline = *since.get_or_insert_with(Instant::now) + interval;
                if self.round_wanted.wait_until(&mut state, deadline).timed_out() {
                    break;
                }
            }
            // Replaced objects leave the index one commit later than removed ones.
            let closing = state.closing && !state.is_dirty();
            let step = self.config.grow_slots(state.catalogue.usable());
            let growth = self.growth_wanted(&state, step / 2);
            drop(state);
            if let Some(slots) = growth {
                self.grow(slots);
            }
            let result = self.round();
            // Waiters must learn the result of the commit.
            if let Err(error) = &result {
                self.stop_commits(error);
            }
            self.progress.send_modify(|progress| progress.rounds += 1);
            if closing || result.is_err() {
                return;
            }
        }
    }

    /// Stops all further commits after a failed sync: the state of everything written since the
    /// last one is unknown for good.
    pub(super) fn stop_commits(&self, error: &io::Error) {
        let path = self.config.path.display();
        tracing::error!(
            "the store in {path} accepts no more objects, because changes cannot be made durable: \
             {error}; its objects can still be read. Repair the disk, then restart"
        );
        let broken = Some(StoreError::io("making changes durable", error));
        self.progress.send_modify(|progress| progress.broken = broken);
    }

    fn round(&self) -> io::Result<()> {
        let round = self.begin_round();
        if !round.fresh.is_empty() {
            self.disk.sync(DiskFile::Data)?;
        }
        let blocks = self.record(&round);
        if !blocks.is_empty() {
            write_index(&self.disk, blocks)?;
            self.disk.sync(DiskFile::Index)?;
            self.commits.fetch_add(1, Ordering::Relaxed);
        }
        let state = &mut *self.state.lock();
        for slot in round.tombs {
            state.catalogue.release(slot);
        }
        state.tombs.extend(round.superseded);
        Ok(())
    }

    /// Evicts if necessary and takes the changes.
    fn begin_round(&self) -> Round {
        let now_ms = self.now_ms();
        let state = &mut *self.state.lock();
        self.make_room(state, now_ms);
        state.wants_round = false;
        state.rounds_begun += 1;
        let mut tombs = std::mem::take(&mut state.tombs);
        tombs.extend(state.catalogue.take_doomed());
        let mut fresh = std::mem::take(&mut state.fresh);
        // Skip objects that are gone. One that is removed from here on is recorded all the same: it
        // may replace another, whose entry leaves with the next commit.
        fresh.retain(|slot| state.catalogue.is_present(*slot));
        let superseded = std::mem::take(&mut state.superseded);
        Round { fresh, superseded, tombs, repinned: std::mem::take(&mut state.repinned) }
    }

    /// Changed blocks of the index, with their new content.
    fn record(&self, round: &Round) -> Vec<(u64, Parts)> {
        let state = &mut *self.state.lock();
        let catalogue = &mut state.catalogue;
        let mut blocks = BTreeSet::new();
        for slot in &round.fresh {
            catalogue.set_recorded(*slot, true);
            blocks.insert(slot / ENTRIES_PER_BLOCK);
        }
        for slot in &round.tombs {
            if catalogue.recorded(*slot).is_some() {
                catalogue.set_recorded(*slot, false);
                blocks.insert(slot / ENTRIES_PER_BLOCK);
            }
        }
        let recorded = |slot: &&Slot| catalogue.recorded(**slot).is_some();
        blocks.extend(round.repinned.iter().filter(recorded).map(|slot| slot / ENTRIES_PER_BLOCK));
        let render = |block: u32| {
            let entries = Blocks::holding(&entries_of(catalogue, block));
            (Layout::index_offset(block), super::blocking::blocks(entries))
        };
        blocks.into_iter().map(render).collect()
    }

    /// Dooms objects while the store is too full, or when a put waits for room. Slots that are
    /// about to leave the index count as free: they become free without eviction.
    fn make_room(&self, state: &mut DiskState, now_ms: u64) {
        let leaving = state.tombs.len() + state.superseded.len() + state.catalogue.doomed();
        let waited_for =
            std::mem::take(&mut state.wants_room) && !state.catalogue.has_free() && leaving == 0;
        let slots = f64::from(state.slots_max.max(1));
        let low = (slots * self.config.watermark_low) as u32;
        let staying = state.catalogue.used().saturating_sub(leaving as u32);
        if !waited_for && f64::from(staying) <= slots * self.config.watermark_high {
            return;
        }
        let excess = staying.saturating_sub(low).max(u32::from(waited_for));
        for _ in 0..excess.min(EVICTIONS_PER_ROUND) {
            if !state.catalogue.evict(now_ms) {
                break;
            }
        }
    }

    /// Number of slots that the data file should grow to so that more than `ahead` are free, if it
    /// has fewer. A file system blocks all writes while the file grows, so an idle store grows
    /// further ahead.
    fn growth_wanted(&self, state: &DiskState, ahead: Slot) -> Option<Slot> {
        let usable = state.catalogue.usable();
        let step = self.config.grow_slots(usable);
        let short = state.catalogue.used().saturating_add(ahead) >= usable;
        (short && usable < state.slots_max)
            .then(|| usable.saturating_add(step).min(state.slots_max))
    }

    /// Grows both files, by less if the disk is short of space. If there is none, the store keeps
    /// its size.
    pub(super) fn grow(&self, slots: Slot) {
        let usable = self.state.lock().catalogue.usable();
        let mut more = slots.saturating_sub(usable);
        loop {
            let grown = self.grow_by(usable, more);
            let mut state = self.state.lock();
            match grown {
                Ok(()) => return state.catalogue.set_usable(usable + more),
                Err(error) if more <= 1 => {
                    state.slots_max = usable;
                    state.growth_error = Some(StoreError::io("letting the store grow", &error));
                    self.disk_full.fetch_add(1, Ordering::Relaxed);
                    let (path, objects) = (self.config.path.display(), usable);
                    tracing::warn!(
                        "the store in {path} cannot grow beyond {objects} objects: {error}"
                    );
                    return;
                }
                Err(_) => more /= 2,
            }
        }
    }

    fn grow_by(&self, usable: Slot, more: Slot) -> io::Result<()> {
        let layout = self.config.layout();
        let data_bytes = layout.slot_offset(usable + more);
        let index_bytes = Layout::index_bytes(usable + more);
        let growth =
            data_bytes - layout.slot_offset(usable) + index_bytes - Layout::index_bytes(usable);
        let reserve = self.config.reserve_bytes;
        match self.disk.available() {
            Some(free) if free.saturating_sub(reserve) < growth => {
                let message = format!(
                    "the file system has {free} bytes free, and {reserve} of them must stay free"
                );
                Err(io::Error::new(io::ErrorKind::StorageFull, message))
            }
            Some(_) | None => {
                self.disk.grow(DiskFile::Index, index_bytes)?;
                self.disk.grow(DiskFile::Data, data_bytes)
            }
        }
    }
}

/// Encodes the entries of a block of the index.
pub(super) fn entries_of(catalogue: &Catalogue, block: u32) -> Vec<u8> {
    let mut entries = vec![0; BLOCK_BYTES];
    let first = block * ENTRIES_PER_BLOCK;
    for slot in first..(first + ENTRIES_PER_BLOCK).min(catalogue.slots()) {
        if let Some(recorded) = catalogue.recorded(slot) {
            write_entry(&mut entries, slot, &recorded);
        }
    }
    entries
}
