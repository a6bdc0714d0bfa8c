//! Generations that this process has put and those that it must free. Pure bookkeeping: no IO, no
//! lock, no clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::config::{FeatureConfig, FreeConfig};
use super::keys::CELLS_OF_ONE;
use super::stats::FeatureStats;
use terrace_l3::ObjectId;
use terrace_l3::backend::after;

/// The generations of this producer, and those of others that are being freed here.
#[derive(Debug)]
pub(super) struct GenerationLedger {
    generations: BTreeMap<u64, GenerationEntry>,
    /// This producer's generations by sample.
    samples: BTreeMap<Arc<str>, SmallVec<[u64; 2]>>,
    free_slots: Vec<u32>,
    /// Slots from here on were never used.
    fresh_slot: u32,
    slots_max: u32,
    /// Bytes in the store or reserved.
    resident_bytes: u64,
    /// Generations of other producers that are being freed here.
    foreign: usize,
    free: FreeConfig,
    /// Freed generations, refused here in case the store has not really removed them.
    gone: BTreeSet<u64>,
    gone_in_order: VecDeque<u64>,
    pub(super) stats: FeatureStats,
}

/// One generation of a sample.
#[derive(Clone, Debug)]
pub(super) struct GenerationEntry {
    pub(super) sample: Arc<str>,
    /// Its objects that are not known to be gone.
    pub(super) tensors: Vec<ObjectId>,
    /// Bytes of the budget for them and the notes.
    pub(super) bytes: u64,
    /// `None` if another producer is responsible for it.
    pub(super) own: Option<Own>,
    /// No process can read it any more.
    pub(super) dead: bool,
    /// The store may have a revocation of it.
    pub(super) revoked: bool,
    /// Time until which objects may still appear after their removal.
    pub(super) unsettled_until: Option<Instant>,
    pub(super) stage: GenerationStage,
}

/// State of a generation that only its producer knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    /// Slot of its record.
    pub(super) slot: u32,
    pub(super) created_ms: u64,
    /// Cell of its claim.
    pub(super) cell: Option<Cell>,
    /// Time when it was last found complete in the store.
    pub(super) seen: Option<Instant>,
}

/// A cell for claims.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) number: u8,
    /// True if the claim there is known to be ours. Otherwise it may be another producer's.
    pub(super) is_ours: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GenerationStage {
    /// Its put has not ended.
    Putting { called_off: bool },
    /// It can be read.
    Live,
    /// It is being freed; `in_hand` while a task does so.
    Leaving { failures: u32, due: Instant, in_hand: bool },
}

/// Reserved room for one sample.
#[derive(Debug)]
pub(super) struct SampleRoom {
    pub(super) slot: u32,
    pub(super) bytes: u64,
}

/// Remaining objects of a generation that is being freed.
#[derive(Clone, Debug)]
pub(super) struct FreeingWork {
    pub(super) generation: u64,
    pub(super) entry: GenerationEntry,
}

impl GenerationLedger {
    pub(super) fn new(config: &FeatureConfig) -> Self {
        Self {
            generations: BTreeMap::new(),
            samples: BTreeMap::new(),
            free_slots: Vec::new(),
            fresh_slot: 0,
            slots_max: config.samples_max,
            resident_bytes: 0,
            foreign: 0,
            free: config.free.clone(),
            gone: BTreeSet::new(),
            gone_in_order: VecDeque::new(),
            stats: FeatureStats::default(),
        }
    }

    /// Reserves room for a sample, if it fits below `bytes_max`.
    pub(super) fn reserve(&mut self, bytes: u64, bytes_max: u64) -> Option<SampleRoom> {
        if self.resident_bytes.saturating_add(bytes) > bytes_max {
            return None;
        }
        let slot = self.take_slot()?;
        self.resident_bytes += bytes;
        self.stats.resident_most_bytes = self.stats.resident_most_bytes.max(self.resident_bytes);
        Some(SampleRoom { slot, bytes })
    }

    fn take_slot(&mut self) -> Option<u32> {
        let fresh = || (self.fresh_slot < self.slots_max).then_some(self.fresh_slot);
        let slot = self.free_slots.pop().or_else(fresh)?;
        self.fresh_slot = self.fresh_slot.max(slot + 1);
        Some(slot)
    }

    /// Returns unused room.
    pub(super) fn give_back(&mut self, room: &SampleRoom) {
        self.resident_bytes -= room.bytes;
        self.free_slots.push(room.slot);
    }

    /// Records a put that has room. If it was promised, consumers may have its ref.
    pub(super) fn begin_put(
        &mut self,
        generation: u64,
        sample: &Arc<str>,
        tensors: Vec<ObjectId>,
        room: &SampleRoom,
        created_ms: u64,
        is_promised: bool,
    ) {
        self.insert(
            generation,
            GenerationEntry {
                sample: sample.clone(),
                tensors,
                bytes: room.bytes,
                own: Some(Own { slot: room.slot, created_ms, cell: None, seen: None }),
                // Without a promise, its ref has not been given out yet.
                dead: !is_promised,
                revoked: false,
                unsettled_until: None,
                stage: GenerationStage::Putting { called_off: false },
            },
        );
    }

    /// Restores a generation found in the store. The slots between those found are free.
    pub(super) fn restore(&mut self, generation: u64, entry: GenerationEntry) {
        let slot = entry.own.expect("only own generations are found").slot;
        let unused = self.fresh_slot..slot;
        self.free_slots.extend(unused);
        self.fresh_slot = self.fresh_slot.max(slot + 1);
        self.resident_bytes += entry.bytes;
        self.insert(generation, entry);
    }

    fn insert(&mut self, generation: u64, entry: GenerationEntry) {
        if entry.own.is_some() {
            self.samples.entry(entry.sample.clone()).or_default().push(generation);
        } else {
            self.foreign += 1;
        }
        self.generations.insert(generation, entry);
    }

    /// Cells of the sample's other generations, if there may be one more; or the generation that is
    /// being freed and still has its claim.
    pub(super) fn cells_in_use(&self, generation: u64) -> Result<SmallVec<[u8; 2]>, Option<u64>> {
        let Some(entry) = self.generations.get(&generation) else { return Err(None) };
        let others = self.of_sample(&entry.sample).filter(|other| *other != generation);
        let claimed = others.filter_map(|other| Some((other, self.cell(other)?.number)));
        let claimed: SmallVec<[(u64, u8); 2]> = claimed.collect();
        if claimed.len() < CELLS_OF_ONE {
            return Ok(claimed.into_iter().map(|(_, cell)| cell).collect());
        }
        let leaving = |(generation, _): &&(u64, u8)| {
            matches!(self.generations[generation].stage, GenerationStage::Leaving { .. })
        };
        Err(claimed.iter().find(leaving).map(|(generation, _)| *generation))
    }

    /// Takes another slot for a put whose record cannot be written to its own. The old one is
    /// reused last.
    pub(super) fn other_slot(&mut self, generation: u64) -> Option<u32> {
        let other = self.take_slot()?;
        match self.own_mut(generation) {
            Some(own) => {
                let unusable = std::mem::replace(&mut own.slot, other);
                self.free_slots.insert(0, unusable);
                Some(other)
            }
            None => {
                self.free_slots.push(other);
                None
            }
        }
    }

    pub(super) fn set_cell(&mut self, generation: u64, cell: Option<Cell>) {
        if let Some(own) = self.own_mut(generation) {
            own.cell = cell;
        }
    }

    /// Marks the claim of a generation as possibly another producer's.
    pub(super) fn distrust_cell(&mut self, generation: u64) {
        if let Some(cell) = self.own_mut(generation).and_then(|own| own.cell.as_mut()) {
            cell.is_ours = false;
        }
    }

    /// Marks all claims as possibly other producers'.
    pub(super) fn distrust_cells(&mut self) {
        let own = self.generations.values_mut().filter_map(|entry| entry.own.as_mut());
        own.filter_map(|own| own.cell.as_mut()).for_each(|cell| cell.is_ours = false);
    }

    /// Completes the put of `bytes` bytes. Returns false if it was cancelled; otherwise its ref may
    /// be given out.
    pub(super) fn end_put(&mut self, generation: u64, bytes: u64) -> bool {
        let Some(entry) = self.generations.get_mut(&generation) else { return false };
        if entry.stage != (GenerationStage::Putting { called_off: false }) {
            return false;
        }
        (entry.stage, entry.dead) = (GenerationStage::Live, false);
        self.stats.puts += 1;
        self.stats.put_bytes += bytes;
        true
    }

    /// Makes generations unreadable from now on, and adds those of other producers. Returns those
    /// that were not being freed before. Cancels active puts.
    pub(super) fn doom(
        &mut self,
        generation: u64,
        now: Instant,
        foreign: impl FnOnce() -> GenerationEntry,
    ) -> bool {
        match self.generations.get_mut(&generation) {
            Some(GenerationEntry { stage: GenerationStage::Putting { called_off }, .. }) => {
                *called_off = true;
                false
            }
            Some(entry) if entry.stage == GenerationStage::Live => {
                entry.stage = leaving(now);
                true
            }
            Some(_) => false,
            None if self.gone.contains(&generation) => false,
            None => {
                self.insert(generation, GenerationEntry { stage: leaving(now), ..foreign() });
                true
            }
        }
    }

    /// Frees the remains of a failed put. If it is `unsettled`, further objects may appear, so it
    /// is removed again later.
    pub(super) fn fail_put(&mut self, generation: u64, unsettled: bool, now: Instant) {
        if let Some(entry) = self.generations.get_mut(&generation)
            && let GenerationStage::Putting { .. } = entry.stage
        {
            entry.stage = leaving(now);
            let until = after(now, Duration::from_millis(self.free.retry_max_ms));
            entry.unsettled_until = unsettled.then_some(until);
        }
    }

    /// Takes a generation in order to free it, unless another task has it.
    pub(super) fn take(&mut self, generation: u64) -> Option<FreeingWork> {
        let entry = self.generations.get_mut(&generation)?;
        match &mut entry.stage {
            GenerationStage::Leaving { in_hand, .. } if !*in_hand => *in_hand = true,
            GenerationStage::Leaving { .. }
            | GenerationStage::Live
            | GenerationStage::Putting { .. } => return None,
        }
        Some(FreeingWork { generation, entry: entry.clone() })
    }

    /// Generations whose retry is due.
    pub(super) fn due(&self, now: Instant) -> Vec<u64> {
        let is_due = |stage| match stage {
            GenerationStage::Leaving { due, in_hand, .. } => due <= now && !in_hand,
            GenerationStage::Live | GenerationStage::Putting { .. } => false,
        };
        let due = self.generations.iter().filter(|(_, entry)| is_due(entry.stage));
        due.take(self.free.retry_batch_max.max(1) as usize).map(|(number, _)| *number).collect()
    }

    /// Returns a generation with the progress of its freeing.
    pub(super) fn return_work(&mut self, work: FreeingWork, finished: bool, now: Instant) {
        let FreeingWork { generation, entry: freed_entry } = work;
        let Some(entry) = self.generations.get_mut(&generation) else { return };
        let settled = entry.unsettled_until.is_none_or(|until| until <= now);
        let tensors_gone = settled && freed_entry.tensors.is_empty() && !entry.tensors.is_empty();
        let finished = settled && finished;
        (entry.dead, entry.revoked) = (freed_entry.dead, freed_entry.revoked);
        if settled {
            entry.tensors = freed_entry.tensors;
        }
        if entry.tensors.is_empty() {
            self.resident_bytes -= std::mem::take(&mut entry.bytes);
        }
        let GenerationStage::Leaving { failures, .. } = entry.stage else { return };
        if tensors_gone {
            self.stats.freed += 1;
            self.stats.recovered += u64::from(failures > 0);
        }
        if finished {
            self.forget(generation);
            self.remember_gone(generation);
            return;
        }
        let pause = self.free.retry_ms.saturating_mul(1 << failures.min(20));
        let pause = Duration::from_millis(pause.min(self.free.retry_max_ms).max(1));
        let failures = failures.saturating_add(1);
        entry.stage = GenerationStage::Leaving { failures, due: after(now, pause), in_hand: false };
        self.stats.parked_most = self.stats.parked_most.max(self.parked());
        self.give_up_excess();
    }

    /// Drops other producers' generations beyond the limit: their producer frees them eventually.
    /// Own generations are limited by the slots.
    fn give_up_excess(&mut self) {
        while self.foreign > self.free.parked_max as usize {
            let idle = |entry: &GenerationEntry| match entry.stage {
                GenerationStage::Leaving { in_hand, .. } => entry.own.is_none() && !in_hand,
                GenerationStage::Live | GenerationStage::Putting { .. } => false,
            };
            let Some(oldest) = self.generations.iter().find(|(_, entry)| idle(entry)) else {
                return;
            };
            let oldest = *oldest.0;
            self.stats.abandoned += 1;
            self.forget(oldest);
            self.remember_gone(oldest);
        }
    }

    fn forget(&mut self, generation: u64) {
        let Some(entry) = self.generations.remove(&generation) else { return };
        self.resident_bytes -= entry.bytes;
        let Some(own) = entry.own else {
            self.foreign -= 1;
            return;
        };
        self.free_slots.push(own.slot);
        if let Some(generations) = self.samples.get_mut(&entry.sample) {
            generations.retain(|other| *other != generation);
            if generations.is_empty() {
                self.samples.remove(&entry.sample);
            }
        }
    }

    fn remember_gone(&mut self, generation: u64) {
        if self.gone.insert(generation) {
            self.gone_in_order.push_back(generation);
        }
        while self.gone.len() > self.free.tombstones_max as usize {
            let Some(oldest) = self.gone_in_order.pop_front() else { return };
            self.gone.remove(&oldest);
        }
    }

    /// Returns true if this process must refuse the generation, whatever the store says.
    pub(super) fn refuses(&self, generation: u64) -> bool {
        match self.generations.get(&generation).map(|entry| entry.stage) {
            Some(GenerationStage::Live) => false,
            Some(GenerationStage::Leaving { .. } | GenerationStage::Putting { .. }) => true,
            None => self.gone.contains(&generation),
        }
    }

    pub(super) fn entry(&self, generation: u64) -> Option<&GenerationEntry> {
        self.generations.get(&generation)
    }

    pub(super) fn stage(&self, generation: u64) -> Option<GenerationStage> {
        self.generations.get(&generation).map(|entry| entry.stage)
    }

    /// This producer's generations of a sample, in any order.
    pub(super) fn of_sample(&self, sample: &str) -> impl Iterator<Item = u64> {
        self.samples.get(sample).into_iter().flatten().copied()
    }

    /// Up to `limit` of this producer's live generations that were not checked recently, from
    /// `first` on, and the number to continue with.
    pub(super) fn live(
        &self,
        first: u64,
        max: usize,
        now: Instant,
        seen_for: Duration,
    ) -> (Vec<FreeingWork>, u64) {
        let is_due = |own: Own| own.seen.is_none_or(|seen| seen + seen_for <= now);
        let live = self.generations.range(first..).filter(|(_, entry)| {
            entry.stage == GenerationStage::Live && entry.own.is_some_and(is_due)
        });
        let work = |(generation, entry): (&u64, &GenerationEntry)| FreeingWork {
            generation: *generation,
            entry: entry.clone(),
        };
        let live: Vec<FreeingWork> = live.take(max).map(work).collect();
        let next = live.last().filter(|_| live.len() == max).map_or(0, |last| last.generation + 1);
        (live, next)
    }

    /// Records that a generation was complete.
    pub(super) fn saw(&mut self, generation: u64, now: Instant) {
        if let Some(own) = self.own_mut(generation) {
            own.seen = Some(now);
        }
    }

    /// This producer's live generations that were put before `created_ms`.
    pub(super) fn older_than(&self, created_ms: u64) -> Vec<u64> {
        let old = |entry: &GenerationEntry| {
            entry.stage == GenerationStage::Live
                && entry.own.is_some_and(|own| own.created_ms <= created_ms)
        };
        let old = self.generations.iter().filter(|(_, entry)| old(entry));
        old.map(|(generation, _)| *generation).collect()
    }

    /// The oldest live generation, its sample, and its creation time.
    pub(super) fn oldest(&self) -> Option<(u64, &str, u64)> {
        let own = |(generation, entry): (&u64, &'_ GenerationEntry)| {
            let own = entry.own.filter(|_| entry.stage == GenerationStage::Live)?;
            Some((own.created_ms, *generation))
        };
        let (created_ms, generation) = self.generations.iter().filter_map(own).min()?;
        Some((generation, &self.generations[&generation].sample, created_ms))
    }

    pub(super) fn stats(&self) -> FeatureStats {
        let count = |wanted: fn(GenerationStage) -> bool| {
            self.generations.values().filter(|entry| wanted(entry.stage)).count() as u64
        };
        FeatureStats {
            live: count(|stage| stage == GenerationStage::Live),
            putting: count(|stage| matches!(stage, GenerationStage::Putting { .. })),
            parked: self.parked(),
            resident_bytes: self.resident_bytes,
            ..self.stats.clone()
        }
    }

    fn parked(&self) -> u64 {
        let is_parked = |entry: &&GenerationEntry| match entry.stage {
            GenerationStage::Leaving { failures, .. } => failures > 0,
            GenerationStage::Live | GenerationStage::Putting { .. } => false,
        };
        self.generations.values().filter(is_parked).count() as u64
    }

    pub(super) fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    pub(super) fn samples(&self) -> u64 {
        u64::from(self.fresh_slot) - self.free_slots.len() as u64
    }

    fn cell(&self, generation: u64) -> Option<Cell> {
        self.generations.get(&generation)?.own?.cell
    }

    fn own_mut(&mut self, generation: u64) -> Option<&mut Own> {
        self.generations.get_mut(&generation)?.own.as_mut()
    }
}

fn leaving(now: Instant) -> GenerationStage {
    GenerationStage::Leaving { failures: 0, due: now, in_hand: false }
}
