//! A store at work, and a record of what it has answered.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use terrace_tests::l3::objects::HARD;

use terrace_cache::PageKey;
use terrace_kit::Dice;
use terrace_l3::{
    Arena, ExistsOptions, ObjectId, Pin, PutOptions, Removal, Store, StoreError, Stored,
};
use terrace_l3_disk::{BLOCK_BYTES, DiskConfig, DiskFile, DiskStore};
use terrace_tests::l3::objects;
use terrace_tests::l3::simulated_disk::{History, SimulatedDisk};
use tokio::task::JoinSet;

use super::calls::{Answered, Call, OBJECT_BYTES_MAX};

const SLOT_BYTES: u64 = (BLOCK_BYTES + OBJECT_BYTES_MAX) as u64;
const OBJECTS_PER_CALL_MAX: u64 = 5;
const HARD_PINS_MAX: usize = 6;

/// What is to be done.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// How many objects fit.
    pub(crate) slots: u64,
    /// How many names there are, not counting generations.
    pub(crate) keys: u64,
    /// How many calls of the store are made, at least.
    pub(crate) calls: usize,
    /// How many of them at a time, at most.
    pub(crate) at_a_time: u64,
    /// When rounds come by themselves; in an hour they come on demand only.
    pub(crate) commit_interval_ms: u64,
    /// Whether the disk keeps no order.
    pub(crate) shuffled: bool,
    /// A file whose syncs do nothing.
    pub(crate) lie: Option<DiskFile>,
}

impl Plan {
    pub(crate) fn config(&self) -> DiskConfig {
        DiskConfig {
            grow_bytes: 16 * SLOT_BYTES,
            commit_interval_ms: self.commit_interval_ms,
            full_wait_ms: 5_000,
            lease_ttl_ms: 2,
            ..DiskConfig::new("simulated", self.slots * SLOT_BYTES, OBJECT_BYTES_MAX)
        }
    }
}

/// What a store was asked and has answered.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) history: History,
    pub(crate) steps: Vec<Step>,
    /// All names that were ever used.
    pub(crate) ids: BTreeSet<ObjectId>,
    pub(crate) calls: usize,
    pub(crate) evicted: u64,
    pub(crate) superseded: u64,
}

/// Some calls at the same time, and what was there afterwards.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// How many events the disk had seen before the first call.
    pub(crate) begin: usize,
    /// How many it had seen after the last answer and before the look at what is there.
    pub(crate) end: usize,
    /// Objects that were new.
    pub(crate) stored: BTreeSet<ObjectId>,
    /// Objects that the store has said to be durable.
    pub(crate) durable: BTreeSet<ObjectId>,
    /// Objects that were removed.
    pub(crate) removed: BTreeSet<ObjectId>,
    /// Whether everything from before has been flushed.
    pub(crate) flushed: bool,
    /// Whether anything may have been evicted.
    pub(crate) evicting: bool,
    /// What was there.
    pub(crate) present: BTreeSet<ObjectId>,
}

impl Step {
    /// Whether this step has stored the object in any generation.
    pub(crate) fn stores_any_of(&self, id: &ObjectId) -> bool {
        from_generation(&self.stored, &id.with_generation(0)).next().is_some()
    }

    /// Whether this step has removed the object in this generation or a later one.
    pub(crate) fn removes_from(&self, id: &ObjectId) -> bool {
        from_generation(&self.removed, id).next().is_some()
    }

    /// Whether the object was there in this generation or a later one.
    pub(crate) fn has_from(&self, id: &ObjectId) -> bool {
        from_generation(&self.present, id).next().is_some()
    }
}

/// This generation of an object and later ones.
pub(crate) fn from_generation<'a>(
    ids: &'a BTreeSet<ObjectId>,
    id: &ObjectId,
) -> impl Iterator<Item = &'a ObjectId> + use<'a> {
    ids.range(*id..=id.with_generation(u64::MAX))
}

struct Workload {
    plan: Plan,
    disk: Arc<SimulatedDisk>,
    store: DiskStore,
    arena: Arena,
    dice: Dice,
    ids: BTreeSet<ObjectId>,
    /// The latest generation of every key, as far as used.
    latest: Vec<u64>,
    pinned: Vec<ObjectId>,
    steps: Vec<Step>,
    calls: usize,
    evicted: u64,
}

/// Carries out a plan on a disk. If the disk is not new, `ids` are the objects that may be on it.
pub(crate) async fn work(plan: &Plan, disk: SimulatedDisk, ids: BTreeSet<ObjectId>) -> Record {
    let disk = Arc::new(if plan.shuffled { disk.shuffled(plan.seed) } else { disk });
    if let Some(file) = plan.lie {
        disk.lie_about_sync(file);
    }
    let store = DiskStore::open_on(disk.clone(), plan.config()).expect("the disk can be used");
    let pages = plan.at_a_time * OBJECTS_PER_CALL_MAX;
    let arena = Arena::new(pages as u32, OBJECT_BYTES_MAX).expect("there is memory");
    let registration = store.register(&arena).expect("the arena is new");
    let newest = |number| from_generation(&ids, &name(number)).last().map_or(0, |id| id.generation);
    let mut workload = Workload {
        plan: plan.clone(),
        latest: (0..plan.keys).map(newest).collect(),
        dice: Dice::new(plan.seed),
        disk,
        store,
        arena,
        ids,
        pinned: Vec::new(),
        steps: Vec::new(),
        calls: 0,
        evicted: 0,
    };
    let begin = workload.disk.position();
    workload.observe(Step { begin, ..Step::default() }).await;
    // What is found on a disk is durable.
    let first = &mut workload.steps[0];
    first.durable.clone_from(&first.present);
    while workload.calls < plan.calls {
        workload.step().await;
    }
    let begin = workload.disk.position();
    workload.store.flush().await.expect("the disk is well");
    workload.observe(Step { begin, flushed: true, ..Step::default() }).await;
    workload.store.shutdown().await.expect("the disk is well");
    let stats = workload.store.stats().disk.expect("it has a disk");
    drop(registration);
    let Workload { disk, store, ids, steps, calls, .. } = workload;
    drop(store);
    let (evicted, superseded) = (stats.evicted, stats.superseded);
    Record { history: disk.history(), steps, ids, calls, evicted, superseded }
}

/// The object of that number, in its first generation.
fn name(number: u64) -> ObjectId {
    let page = objects::page(number);
    ObjectId { namespace: PageKey(page.namespace.0 + u128::from(number % 2)), ..page }
}

/// Waits until the disk has seen so many events, but not for long.
async fn reached(disk: &SimulatedDisk, position: usize) {
    const PATIENCE: Duration = Duration::from_micros(300);
    let start = Instant::now();
    while disk.position() < position && start.elapsed() < PATIENCE {
        tokio::task::yield_now().await;
    }
}

impl Workload {
    /// Makes some calls at once, checks their answers and looks what is there.
    async fn step(&mut self) {
        let begin = self.disk.position();
        let width = 1 + self.dice.below(self.plan.at_a_time);
        let calls: Vec<Call> = (0..width).map(|_| self.call()).collect();
        let mut running = JoinSet::new();
        for (number, call) in calls.iter().enumerate() {
            let page = (number as u64 * OBJECTS_PER_CALL_MAX) as u32;
            let answer = call.clone().start(self.store.clone(), self.arena.clone(), page);
            let later = begin + number * self.dice.below(6) as usize;
            let disk = self.disk.clone();
            running.spawn(async move {
                reached(&disk, later).await;
                (number, answer.await)
            });
        }
        let mut step = Step { begin, ..Step::default() };
        let mut missing = Vec::new();
        while let Some(answered) = running.join_next().await {
            let (number, answered) = answered.expect("the store does not panic");
            self.note(&calls[number], answered, &mut step, &mut missing);
        }
        self.calls += calls.len();
        self.observe(step).await;
        let [.., before, step] = &self.steps[..] else { unreachable!("there is a first step") };
        for id in step.stored.union(&step.durable) {
            let may_be_gone = step.evicting || step.removes_from(id);
            assert!(may_be_gone || step.has_from(id), "{id:?} was stored and is not there");
        }
        for id in &missing {
            let may_be_gone = step.evicting || step.removes_from(id) || step.stores_any_of(id);
            assert!(may_be_gone || !before.present.contains(id), "{id:?} was there and not read");
        }
    }

    fn call(&mut self) -> Call {
        let may_pin = self.pinned.len() < HARD_PINS_MAX;
        match self.dice.below(20) {
            0..8 => {
                let pin = if may_pin && self.dice.one_in(20) {
                    Some(self.dice.pick(&[Pin::Soft, HARD]))
                } else {
                    None
                };
                let options = PutOptions { pin, durable: self.dice.one_in(3) };
                Call::Put(self.names(OBJECTS_PER_CALL_MAX), options)
            }
            8..11 => Call::Get(self.names(OBJECTS_PER_CALL_MAX)),
            11..15 => {
                let removal = self.dice.pick(&[Removal::Plain, Removal::Forced]);
                Call::Remove(self.names(3), removal)
            }
            15 => Call::Lease(self.names(OBJECTS_PER_CALL_MAX)),
            16 if may_pin => Call::Pin(self.names(1)[0]),
            16 | 17 if !self.pinned.is_empty() => {
                let choice = self.dice.below(self.pinned.len() as u64) as usize;
                Call::Unpin(self.pinned.swap_remove(choice))
            }
            16.. => Call::Flush,
        }
    }

    /// Up to `count` names of objects, mostly of those that are used often.
    fn names(&mut self, count: u64) -> Vec<ObjectId> {
        let count = 1 + self.dice.below(count);
        (0..count).map(|_| self.name()).collect()
    }

    fn name(&mut self) -> ObjectId {
        let keys = if self.dice.one_in(3) { 8.min(self.plan.keys) } else { self.plan.keys };
        let number = self.dice.below(keys);
        let latest = &mut self.latest[number as usize];
        let has_generations = number.is_multiple_of(3);
        if has_generations && self.dice.one_in(4) {
            *latest += 1;
        }
        let back = u64::from(self.dice.one_in(8));
        let id = name(number).with_generation(latest.saturating_sub(back));
        self.ids.insert(id);
        id
    }

    fn note(
        &mut self,
        call: &Call,
        answered: Answered,
        step: &mut Step,
        missing: &mut Vec<ObjectId>,
    ) {
        match (call, answered) {
            (Call::Put(ids, options), Answered::Put(results)) => {
                for (id, result) in ids.iter().zip(results) {
                    match result {
                        Ok(Stored::New) => drop(step.stored.insert(*id)),
                        Ok(Stored::AlreadyThere) => {}
                        Err(StoreError::Superseded { .. } | StoreError::BeingWritten) => continue,
                        Err(error) => panic!("{id:?} could not be stored: {error}"),
                    }
                    if options.pin == Some(HARD) {
                        self.pinned.push(*id);
                    }
                    if options.durable {
                        step.durable.insert(*id);
                    }
                }
            }
            (Call::Get(ids), Answered::Get(results)) => {
                for (id, result) in ids.iter().zip(results) {
                    match result {
                        Ok(_) => {}
                        Err(StoreError::Missing) => missing.push(*id),
                        Err(error) => panic!("{id:?} could not be read: {error}"),
                    }
                }
            }
            (Call::Remove(ids, _), Answered::Remove(results)) => {
                let removed = ids.iter().zip(results).filter(|(_, result)| result.is_ok());
                step.removed.extend(removed.map(|(id, _)| *id));
            }
            (Call::Pin(id), Answered::Pin(Ok(()))) => self.pinned.push(*id),
            (Call::Flush, Answered::Flush(result)) => {
                result.expect("the disk is well");
                step.flushed = true;
            }
            (_, Answered::Pin(Err(_)) | Answered::Other) => {}
            (call, answered) => unreachable!("{call:?} was answered by {answered:?}"),
        }
    }

    /// Looks what is there, after everything that a step has done.
    async fn observe(&mut self, mut step: Step) {
        // In this order: what is evicted meanwhile counts as evicted in the next step, and the
        // events counted all came before the look.
        step.end = self.disk.position();
        let evicted = self.store.stats().disk.expect("it has a disk").evicted;
        step.evicting = evicted > self.evicted;
        self.evicted = evicted;
        let ids: Vec<ObjectId> = self.ids.iter().copied().collect();
        let presences = self.store.exists(&ids, ExistsOptions::default()).await;
        for (id, presence) in ids.into_iter().zip(presences) {
            if presence.expect("the store is open").is_present() {
                step.present.insert(id);
            }
        }
        self.steps.push(step);
    }
}
