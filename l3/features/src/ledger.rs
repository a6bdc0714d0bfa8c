//! What this process has put and what it must free. Pure bookkeeping: no IO, no lock, no clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::config::FeatureConfig;
use super::keys::CELLS_OF_ONE;
use super::stats::FeatureStats;
use terrace_l3::backend::after;
use terrace_l3::{ObjectId, ReleaseConfig};

/// The generations that are this producer's, and those of others that are being freed here.
#[derive(Debug)]
pub(super) struct Ledger {
    generations: BTreeMap<u64, Entry>,
    /// Of each sample, this producer's generations.
    samples: BTreeMap<Arc<str>, SmallVec<[u64; 2]>>,
    free_slots: Vec<u32>,
    /// Slots from here on were never used.
    fresh_slot: u32,
    slots_max: u32,
    /// Bytes that are there, or are about to be.
    resident_bytes: u64,
    /// Generations of others that are being freed here.
    foreign: usize,
    free: ReleaseConfig,
    /// Freed generations, refused here in case that the store only says that they are gone.
    gone: BTreeSet<u64>,
    gone_in_order: VecDeque<u64>,
    pub(super) stats: FeatureStats,
}

/// One generation of a sample.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) sample: Arc<str>,
    /// Its objects, as long as they are not known to be gone.
    pub(super) tensors: Vec<ObjectId>,
    /// What they and its notes take of the budget.
    pub(super) bytes: u64,
    /// `None` if another producer takes care of it.
    pub(super) own: Option<Own>,
    /// Nobody anywhere can read it any more.
    pub(super) dead: bool,
    /// The store may have a note that says so.
    pub(super) revoked: bool,
    /// Until then objects may yet arrive that a store had not got when it was asked to remove them.
    pub(super) unsettled_until: Option<Instant>,
    pub(super) stage: Stage,
}

/// What only this producer knows of a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    /// Under which number its record is.
    pub(super) slot: u32,
    pub(super) created_ms: u64,
    /// Where its claim is.
    pub(super) cell: Option<Cell>,
    /// When all of it was last found in the store.
    pub(super) seen: Option<Instant>,
}

/// A place for claims.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) number: u8,
    /// Whether the claim there is known to be ours. Otherwise it may be another's.
    pub(super) is_ours: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its put has not ended.
    Putting { called_off: bool },
    /// It can be read.
    Live,
    /// It is being freed; `in_hand` if somebody is at it.
    Leaving { failures: u32, due: Instant, in_hand: bool },
}

/// Room for one sample.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) slot: u32,
    pub(super) bytes: u64,
}

/// What remains to be removed of a generation.
#[derive(Clone, Debug)]
pub(super) struct Burial {
    pub(super) generation: u64,
    pub(super) entry: Entry,
}

impl Ledger {
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

    /// Sets room aside for a sample, if there is any below `bytes_max`.
    pub(super) fn reserve(&mut self, bytes: u64, bytes_max: u64) -> Option<Room> {
        if self.resident_bytes.saturating_add(bytes) > bytes_max {
            return None;
        }
        let slot = self.take_slot()?;
        self.resident_bytes += bytes;
        self.stats.resident_most_bytes = self.stats.resident_most_bytes.max(self.resident_bytes);
        Some(Room { slot, bytes })
    }

    fn take_slot(&mut self) -> Option<u32> {
        let fresh = || (self.fresh_slot < self.slots_max).then_some(self.fresh_slot);
        let slot = self.free_slots.pop().or_else(fresh)?;
        self.fresh_slot = self.fresh_slot.max(slot + 1);
        Some(slot)
    }

    /// Gives back room that nothing was put in.
    pub(super) fn give_back(&mut self, room: &Room) {
        self.resident_bytes -= room.bytes;
        self.free_slots.push(room.slot);
    }

    /// Notes a put that has found room. If it was promised, somebody may have its ref.
    pub(super) fn begin_put(
        &mut self,
        generation: u64,
        sample: &Arc<str>,
        tensors: Vec<ObjectId>,
        room: &Room,
        created_ms: u64,
        is_promised: bool,
    ) {
        self.insert(
            generation,
            Entry {
                sample: sample.clone(),
                tensors,
                bytes: room.bytes,
                own: Some(Own { slot: room.slot, created_ms, cell: None, seen: None }),
                // Nobody has a ref yet, unless it was promised.
                dead: !is_promised,
                revoked: false,
                unsettled_until: None,
                stage: Stage::Putting { called_off: false },
            },
        );
    }

    /// Takes up a generation that was found in the store. The slots between those that were found are
    /// free.
    pub(super) fn restore(&mut self, generation: u64, entry: Entry) {
        let slot = entry.own.expect("only own generations are found").slot;
        let unused = self.fresh_slot..slot;
        self.free_slots.extend(unused);
        self.fresh_slot = self.fresh_slot.max(slot + 1);
        self.resident_bytes += entry.bytes;
        self.insert(generation, entry);
    }

    fn insert(&mut self, generation: u64, entry: Entry) {
        if entry.own.is_some() {
            self.samples.entry(entry.sample.clone()).or_default().push(generation);
        } else {
            self.foreign += 1;
        }
        self.generations.insert(generation, entry);
    }

    /// Where other generations of the same sample have their claims, if there may be one more; or the
    /// generation whose freeing has kept its claim so far.
    pub(super) fn cells_in_use(&self, generation: u64) -> Result<SmallVec<[u8; 2]>, Option<u64>> {
        let Some(entry) = self.generations.get(&generation) else { return Err(None) };
        let others = self.of_sample(&entry.sample).filter(|other| *other != generation);
        let claimed = others.filter_map(|other| Some((other, self.cell(other)?.number)));
        let claimed: SmallVec<[(u64, u8); 2]> = claimed.collect();
        if claimed.len() < CELLS_OF_ONE {
            return Ok(claimed.into_iter().map(|(_, cell)| cell).collect());
        }
        let leaving = |(generation, _): &&(u64, u8)| {
            matches!(self.generations[generation].stage, Stage::Leaving { .. })
        };
        Err(claimed.iter().find(leaving).map(|(generation, _)| *generation))
    }

    /// Another slot for a put whose own cannot be written to. That one is the last to be used again.
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

    /// The claim of a generation may be another's.
    pub(super) fn doubt_cell(&mut self, generation: u64) {
        if let Some(cell) = self.own_mut(generation).and_then(|own| own.cell.as_mut()) {
            cell.is_ours = false;
        }
    }

    /// All claims may be others'.
    pub(super) fn doubt_cells(&mut self) {
        let own = self.generations.values_mut().filter_map(|entry| entry.own.as_mut());
        own.filter_map(|own| own.cell.as_mut()).for_each(|cell| cell.is_ours = false);
    }

    /// The put of so many bytes is complete, and unless it was called off its ref may be given out.
    pub(super) fn end_put(&mut self, generation: u64, bytes: u64) -> bool {
        let Some(entry) = self.generations.get_mut(&generation) else { return false };
        if entry.stage != (Stage::Putting { called_off: false }) {
            return false;
        }
        (entry.stage, entry.dead) = (Stage::Live, false);
        self.stats.puts += 1;
        self.stats.put_bytes += bytes;
        true
    }

    /// Nobody may read these from now on: notes those that others have put, and answers which of them
    /// were not being freed before. Puts under way are told to give up.
    pub(super) fn doom(
        &mut self,
        generation: u64,
        now: Instant,
        foreign: impl FnOnce() -> Entry,
    ) -> bool {
        match self.generations.get_mut(&generation) {
            Some(Entry { stage: Stage::Putting { called_off }, .. }) => {
                *called_off = true;
                false
            }
            Some(entry) if entry.stage == Stage::Live => {
                entry.stage = leaving(now);
                true
            }
            Some(_) => false,
            None if self.gone.contains(&generation) => false,
            None => {
                self.insert(generation, Entry { stage: leaving(now), ..foreign() });
                true
            }
        }
    }

    /// The put has failed: what there is of it must go. If it is `unsettled`, nobody knows whether more
    /// will come, so it is removed again after a while.
    pub(super) fn fail_put(&mut self, generation: u64, unsettled: bool, now: Instant) {
        if let Some(entry) = self.generations.get_mut(&generation)
            && let Stage::Putting { .. } = entry.stage
        {
            entry.stage = leaving(now);
            let until = after(now, Duration::from_millis(self.free.retry_max_ms));
            entry.unsettled_until = unsettled.then_some(until);
        }
    }

    /// Takes a generation in hand to free it, unless somebody has it.
    pub(super) fn take(&mut self, generation: u64) -> Option<Burial> {
        let entry = self.generations.get_mut(&generation)?;
        match &mut entry.stage {
            Stage::Leaving { in_hand, .. } if !*in_hand => *in_hand = true,
            Stage::Leaving { .. } | Stage::Live | Stage::Putting { .. } => return None,
        }
        Some(Burial { generation, entry: entry.clone() })
    }

    /// Takes everything in hand whose time has come.
    pub(super) fn due(&self, now: Instant) -> Vec<u64> {
        let is_due = |stage| match stage {
            Stage::Leaving { due, in_hand, .. } => due <= now && !in_hand,
            Stage::Live | Stage::Putting { .. } => false,
        };
        let due = self.generations.iter().filter(|(_, entry)| is_due(entry.stage));
        due.take(self.free.retry_batch_max.max(1) as usize).map(|(number, _)| *number).collect()
    }

    /// Notes how far the freeing of a generation has come, and that nobody is at it any more.
    pub(super) fn put_down(&mut self, burial: Burial, finished: bool, now: Instant) {
        let Burial { generation, entry: buried } = burial;
        let Some(entry) = self.generations.get_mut(&generation) else { return };
        let settled = entry.unsettled_until.is_none_or(|until| until <= now);
        let tensors_gone = settled && buried.tensors.is_empty() && !entry.tensors.is_empty();
        let finished = settled && finished;
        (entry.dead, entry.revoked) = (buried.dead, buried.revoked);
        if settled {
            entry.tensors = buried.tensors;
        }
        if entry.tensors.is_empty() {
            self.resident_bytes -= std::mem::take(&mut entry.bytes);
        }
        let Stage::Leaving { failures, .. } = entry.stage else { return };
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
        entry.stage = Stage::Leaving { failures, due: after(now, pause), in_hand: false };
        self.stats.parked_most = self.stats.parked_most.max(self.parked());
        self.give_up_excess();
    }

    /// Those of others are given up when there are too many: their producer frees them in the end. Of our
    /// own there are never more than slots.
    fn give_up_excess(&mut self) {
        while self.foreign > self.free.parked_max as usize {
            let idle = |entry: &Entry| match entry.stage {
                Stage::Leaving { in_hand, .. } => entry.own.is_none() && !in_hand,
                Stage::Live | Stage::Putting { .. } => false,
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

    /// Whether this process must refuse the generation, whatever the store says.
    pub(super) fn refuses(&self, generation: u64) -> bool {
        match self.generations.get(&generation).map(|entry| entry.stage) {
            Some(Stage::Live) => false,
            Some(Stage::Leaving { .. } | Stage::Putting { .. }) => true,
            None => self.gone.contains(&generation),
        }
    }

    pub(super) fn entry(&self, generation: u64) -> Option<&Entry> {
        self.generations.get(&generation)
    }

    pub(super) fn stage(&self, generation: u64) -> Option<Stage> {
        self.generations.get(&generation).map(|entry| entry.stage)
    }

    /// This producer's generations of a sample, the oldest first or not.
    pub(super) fn of_sample(&self, sample: &str) -> impl Iterator<Item = u64> {
        self.samples.get(sample).into_iter().flatten().copied()
    }

    /// Up to so many of this producer's live generations that were not seen for so long, from `first` on, and the number
    /// to go on with.
    pub(super) fn live(
        &self,
        first: u64,
        max: usize,
        now: Instant,
        seen_for: Duration,
    ) -> (Vec<Burial>, u64) {
        let is_due = |own: Own| own.seen.is_none_or(|seen| seen + seen_for <= now);
        let live = self
            .generations
            .range(first..)
            .filter(|(_, entry)| entry.stage == Stage::Live && entry.own.is_some_and(is_due));
        let burial = |(generation, entry): (&u64, &Entry)| Burial {
            generation: *generation,
            entry: entry.clone(),
        };
        let live: Vec<Burial> = live.take(max).map(burial).collect();
        let next = live.last().filter(|_| live.len() == max).map_or(0, |last| last.generation + 1);
        (live, next)
    }

    /// All of a generation was there just now.
    pub(super) fn saw(&mut self, generation: u64, now: Instant) {
        if let Some(own) = self.own_mut(generation) {
            own.seen = Some(now);
        }
    }

    /// This producer's live generations that were put before `created_ms`.
    pub(super) fn older_than(&self, created_ms: u64) -> Vec<u64> {
        let old = |entry: &Entry| {
            entry.stage == Stage::Live && entry.own.is_some_and(|own| own.created_ms <= created_ms)
        };
        let old = self.generations.iter().filter(|(_, entry)| old(entry));
        old.map(|(generation, _)| *generation).collect()
    }

    /// The live generation that is there longest, its sample, and since when.
    pub(super) fn oldest(&self) -> Option<(u64, &str, u64)> {
        let own = |(generation, entry): (&u64, &'_ Entry)| {
            let own = entry.own.filter(|_| entry.stage == Stage::Live)?;
            Some((own.created_ms, *generation))
        };
        let (created_ms, generation) = self.generations.iter().filter_map(own).min()?;
        Some((generation, &self.generations[&generation].sample, created_ms))
    }

    pub(super) fn stats(&self) -> FeatureStats {
        let count = |wanted: fn(Stage) -> bool| {
            self.generations.values().filter(|entry| wanted(entry.stage)).count() as u64
        };
        FeatureStats {
            live: count(|stage| stage == Stage::Live),
            putting: count(|stage| matches!(stage, Stage::Putting { .. })),
            parked: self.parked(),
            resident_bytes: self.resident_bytes,
            ..self.stats.clone()
        }
    }

    fn parked(&self) -> u64 {
        let is_parked = |entry: &&Entry| match entry.stage {
            Stage::Leaving { failures, .. } => failures > 0,
            Stage::Live | Stage::Putting { .. } => false,
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

fn leaving(now: Instant) -> Stage {
    Stage::Leaving { failures: 0, due: now, in_hand: false }
}
