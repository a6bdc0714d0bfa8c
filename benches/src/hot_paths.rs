//! The operations of every request or step, each measured alone: `scripts/instructions` counts
//! their instructions and `cargo bench` measures their times.
//!
//! Preparation and cleanup of a path are not measured.

use std::hint::black_box;
use std::mem;

use terrace_cache::{Cache, CacheConfig, Cursor, Namespace, PageKey, Sequence, Token};
use terrace_l3::{
    Arena, ExistsOptions, MemoryConfig, MemoryStore, ObjectId, Presence, Put, PutOptions, Results,
    Store,
};
use terrace_scheduler::{Event, Request, StepResult};
use tokio::runtime::Runtime;

use crate::steps::Bench;

/// A frequent operation.
pub trait HotPath {
    /// Creates the state before the operation.
    fn prepare() -> Self;

    /// Runs the operation, once per preparation.
    fn run(&mut self);
}

/// An action on each hot path.
pub trait Visitor {
    /// Acts on one path.
    fn visit<P: HotPath>(&mut self, name: &str);
}

/// Passes all hot paths to `visitor`.
pub fn visit_all(visitor: &mut impl Visitor) {
    visitor.visit::<Hash>("cache_hash");
    visitor.visit::<Lookup>("cache_lookup");
    visitor.visit::<Insert>("cache_insert");
    visitor.visit::<EvictInsert>("cache_evict_insert");
    visitor.visit::<DecodeStepInPage>("scheduler_decode_step");
    visitor.visit::<DecodeStepAtFirstPageEnd>("scheduler_decode_step_at_first_page_end");
    visitor.visit::<DecodeStepAtPageEnd>("scheduler_decode_step_at_page_end");
    visitor.visit::<StepShortOfMemory>("scheduler_step_short_of_memory");
    visitor.visit::<Admission>("scheduler_admission");
    visitor.visit::<Stats>("scheduler_stats");
    visitor.visit::<Exists>("l3_exists");
}

const PAGE_SIZE: u32 = 16;

/// Returns whole pages that share no prefix with those of another `number`.
fn prompt(number: u32, pages: u32) -> Vec<Token> {
    let first = number << 16;
    (first..first + pages * PAGE_SIZE).collect()
}

fn root() -> PageKey {
    Namespace::new("bench", PAGE_SIZE).digest()
}

fn sequence(tokens: Vec<Token>) -> Sequence {
    Sequence::new(root(), PAGE_SIZE, tokens)
}

fn cache(device_pages: u32) -> Cache {
    Cache::new(&CacheConfig { page_size: PAGE_SIZE, device_pages, ..CacheConfig::default() })
}

/// Inserts a prompt of which the cache has the pages up to `found`.
fn insert(cache: &mut Cache, sequence: &Sequence, found: Cursor) {
    let pages = sequence.keys().len() as u32;
    let mut pin = cache.pin_device(sequence.root(), found);
    let missing = (pages - found.depth) as usize;
    assert!(cache.free_device_pages(missing), "nothing but this prompt is pinned");
    let mut new = cache.take_device_pages(missing).expect("room was made");
    cache.publish_device(&mut pin, sequence.run(found.depth, pages), &mut new, 0);
    cache.give_device_pages(new);
    cache.unpin_device(pin);
}

fn find(cache: &Cache, sequence: &Sequence) -> Cursor {
    cache.lookup(sequence, u32::MAX).device
}

/// Hashing of a prompt of 1,024 pages.
#[derive(Debug)]
pub struct Hash {
    tokens: Vec<Token>,
    root: PageKey,
    hashed: Option<Sequence>,
}

impl HotPath for Hash {
    fn prepare() -> Self {
        Self { tokens: prompt(0, 1024), root: root(), hashed: None }
    }

    fn run(&mut self) {
        self.hashed = Some(Sequence::new(self.root, PAGE_SIZE, mem::take(&mut self.tokens)));
    }
}

/// Lookup of a cached prompt of 1,024 pages in eight nodes.
#[derive(Debug)]
pub struct Lookup {
    cache: Cache,
    sequence: Sequence,
    found: Cursor,
}

impl HotPath for Lookup {
    fn prepare() -> Self {
        let mut cache = cache(8192);
        let sequence = sequence(prompt(0, 1024));
        insert(&mut cache, &sequence, Cursor::START);
        for branch in 1..8 {
            let tokens = [prompt(0, 128 * branch), prompt(branch, 8)].concat();
            let other = self::sequence(tokens);
            let found = find(&cache, &other);
            insert(&mut cache, &other, found);
        }
        Self { cache, sequence, found: Cursor::START }
    }

    fn run(&mut self) {
        self.found = find(&self.cache, &self.sequence);
    }
}

/// Insertion of the second half of a prompt of 1,024 pages whose first half is cached.
#[derive(Debug)]
pub struct Insert {
    cache: Cache,
    sequence: Sequence,
    found: Cursor,
}

impl HotPath for Insert {
    fn prepare() -> Self {
        let mut cache = cache(8192);
        insert(&mut cache, &sequence(prompt(0, 1024)), Cursor::START);
        let sequence = sequence([prompt(0, 512), prompt(1, 512)].concat());
        let found = find(&cache, &sequence);
        Self { cache, sequence, found }
    }

    fn run(&mut self) {
        insert(&mut self.cache, &self.sequence, self.found);
    }
}

/// Insertion of sixteen prompts of 64 pages into a full cache: each evicts the oldest.
#[derive(Debug)]
pub struct EvictInsert {
    cache: Cache,
    sequences: Vec<Sequence>,
}

impl HotPath for EvictInsert {
    fn prepare() -> Self {
        let mut cache = cache(64 * 64);
        // Twice as many prompts as fit, for a cache in steady state.
        for number in 0..128 {
            insert(&mut cache, &sequence(prompt(number, 64)), Cursor::START);
        }
        let sequences = (128..144).map(|number| sequence(prompt(number, 64))).collect();
        Self { cache, sequences }
    }

    fn run(&mut self) {
        for sequence in &self.sequences {
            insert(&mut self.cache, sequence, Cursor::START);
        }
    }
}

/// A scheduler with 256 decoding requests with prompts of 1,024 tokens.
#[derive(Debug)]
struct Decodes {
    bench: Bench,
    results: Vec<StepResult<'static>>,
}

impl Decodes {
    /// Creates the state in which the step in flight computes the token at `place` behind the
    /// prompts.
    fn at(place: u32) -> Self {
        let bench = Bench::new(PAGE_SIZE, 32_768, 256, 1).expect("it can work");
        let mut decodes = Self { bench, results: Vec::with_capacity(256) };
        let prompts: Vec<_> = (0..256).map(|request| prompt(request, 64)).collect();
        decodes.bench.wave(&prompts, 64);
        // The admission of the requests ends with the first decode.
        decodes.bench.next_plan();
        decodes.note_results();
        for _ in 1..place {
            decodes.next_step();
            decodes.note_results();
        }
        decodes
    }

    /// Processes the results of the step in flight and plans the next.
    fn next_step(&mut self) {
        let Bench { scheduler, plan, now, .. } = &mut self.bench;
        let step = plan.step.expect("a step is in flight");
        let event = Event::StepDone { step, results: &self.results, failed: &[] };
        scheduler.advance(*now, event).expect("the results fit the step");
        scheduler.plan_into(*now, plan);
    }

    fn note_results(&mut self) {
        self.results.clear();
        self.results.extend(self.bench.producers());
    }
}

/// A decode step of 256 requests at token `PLACE` behind their prompts: its results, and the plan
/// of the next.
#[derive(Debug)]
pub struct DecodeStep<const PLACE: u32>(Decodes);

/// In the middle of pages: only counters change.
pub type DecodeStepInPage = DecodeStep<{ PAGE_SIZE / 2 }>;

/// At the first page end: the completed page is published as a new node, and a page is allocated.
pub type DecodeStepAtFirstPageEnd = DecodeStep<{ PAGE_SIZE - 1 }>;

/// At later page ends: the node is extended.
pub type DecodeStepAtPageEnd = DecodeStep<{ 2 * PAGE_SIZE - 1 }>;

impl<const PLACE: u32> HotPath for DecodeStep<PLACE> {
    fn prepare() -> Self {
        Self(Decodes::at(PLACE))
    }

    fn run(&mut self) {
        self.0.next_step();
    }
}

/// A decode step of two requests while a third waits for memory: half of its 2,048 pages are
/// cached, and there is no room for the others.
#[derive(Debug)]
pub struct StepShortOfMemory(Decodes);

impl HotPath for StepShortOfMemory {
    fn prepare() -> Self {
        let mut bench = Bench::new(PAGE_SIZE, 2560, 3, 1).expect("it can work");
        bench.wave(&[prompt(0, 1024), prompt(1, 1024)], 64);
        let waits = [prompt(0, 1024), prompt(2, 1024)].concat();
        let request = Request::new(1000, waits, 64);
        bench.scheduler.submit(bench.now, request).expect("it fits when the others have ended");
        bench.next_plan();
        let mut decodes = Decodes { bench, results: Vec::with_capacity(2) };
        decodes.note_results();
        Self(decodes)
    }

    fn run(&mut self) {
        self.0.next_step();
    }
}

/// A thousand reads of the counters of a busy scheduler.
#[derive(Debug)]
pub struct Stats(Decodes);

impl HotPath for Stats {
    fn prepare() -> Self {
        Self(Decodes::at(1))
    }

    fn run(&mut self) {
        for _ in 0..1000 {
            black_box(black_box(&self.0.bench.scheduler).stats());
        }
    }
}

/// Submission and admission of a request with a fully cached prompt of 64 pages and a token.
#[derive(Debug)]
pub struct Admission {
    bench: Bench,
    request: Option<Request>,
}

impl HotPath for Admission {
    fn prepare() -> Self {
        let mut bench = Bench::new(PAGE_SIZE, 32_768, 256, 1).expect("it can work");
        let prompts: Vec<_> =
            (0..256).map(|number| [prompt(number, 64), vec![7]].concat()).collect();
        bench.wave(&prompts, 1);
        bench.finish(256);
        let request = Request::new(1000, prompts[100].clone(), 200);
        Self { bench, request: Some(request) }
    }

    fn run(&mut self) {
        let Bench { scheduler, plan, now, .. } = &mut self.bench;
        let request = self.request.take().expect("there is one for each preparation");
        scheduler.submit(*now, request).expect("it fits");
        scheduler.plan_into(*now, plan);
    }
}

/// Lookup of 1,024 existing objects in a memory store.
#[derive(Debug)]
pub struct Exists {
    runtime: Runtime,
    store: MemoryStore,
    ids: Vec<ObjectId>,
    answers: Results<Presence>,
}

impl HotPath for Exists {
    fn prepare() -> Self {
        const OBJECT_BYTES: usize = 64;
        let runtime =
            tokio::runtime::Builder::new_current_thread().build().expect("it needs nothing");
        let config = MemoryConfig::new(4096 * OBJECT_BYTES as u64, OBJECT_BYTES);
        let store = MemoryStore::new(config).expect("it is small");
        let arena = Arena::new(1, OBJECT_BYTES).expect("it is small");
        let registration = store.register(&arena).expect("it is the first");
        let keys = sequence(prompt(0, 1024)).keys().to_vec();
        let ids: Vec<_> = keys.into_iter().map(|key| ObjectId::page(root(), key)).collect();
        let source = || arena.source(0).expect("the page has no writer");
        let puts = ids.iter().map(|&id| Put::new(id, source())).collect();
        for stored in runtime.block_on(store.put_from(puts, PutOptions::default())) {
            stored.expect("the store has room");
        }
        drop(registration);
        Self { runtime, store, ids, answers: Vec::new() }
    }

    fn run(&mut self) {
        let answers = self.store.exists(&self.ids, ExistsOptions::default());
        self.answers = self.runtime.block_on(answers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done<P: HotPath>() -> P {
        let mut path = P::prepare();
        path.run();
        path
    }

    #[test]
    fn paths_hit_insert_and_evict() {
        assert_eq!(done::<Hash>().hashed.unwrap().keys().len(), 1024);
        assert_eq!(done::<Lookup>().found.depth, 1024);
        let Insert { cache, sequence, found } = done();
        assert_eq!((found.depth, find(&cache, &sequence).depth), (512, 1024));
        assert_eq!(EvictInsert::prepare().cache.usage().device.free_pages, 0);
        let EvictInsert { cache, sequences } = done();
        assert!(sequences.iter().all(|sequence| find(&cache, sequence).depth == 64));
        assert_eq!(cache.usage().device.free_pages, 0);
    }

    #[test]
    fn decodes_are_at_the_expected_position() {
        assert_eq!(taken_pages::<{ PAGE_SIZE / 2 }>(), 0);
        assert_eq!(taken_pages::<{ PAGE_SIZE - 1 }>(), 256);
        assert_eq!(taken_pages::<{ PAGE_SIZE }>(), 0);
        assert_eq!(taken_pages::<{ 2 * PAGE_SIZE - 1 }>(), 256);
    }

    #[test]
    fn request_without_memory_waits() {
        let StepShortOfMemory(Decodes { bench, .. }) = done();
        let stats = bench.scheduler.stats();
        assert_eq!((stats.waiting, stats.running, bench.plan.decodes.len()), (1, 2, 2));
    }

    fn taken_pages<const PLACE: u32>() -> usize {
        let mut path = DecodeStep::<PLACE>::prepare();
        assert_eq!(path.0.bench.plan.decodes.len(), 256);
        let free =
            |path: &DecodeStep<PLACE>| path.0.bench.scheduler.stats().cache.device.free_pages;
        let before = free(&path);
        path.run();
        before - free(&path)
    }

    #[test]
    fn admitted_request_hits_all_pages() {
        let Admission { bench, .. } = done();
        let [prefill] = bench.plan.prefills[..] else { panic!("one is admitted") };
        assert_eq!((prefill.start, prefill.tokens), (1024, 1));
    }

    #[test]
    fn all_objects_exist() {
        let Exists { answers, .. } = done();
        assert_eq!(answers.len(), 1024);
        assert!(
            answers.iter().all(|answer| matches!(answer, Ok(presence) if presence.is_present()))
        );
    }
}
