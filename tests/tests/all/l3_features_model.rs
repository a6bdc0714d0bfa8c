//! Random calls of several processes on one feature store, against a plain map, while every call of the
//! store underneath may go wrong.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_kit::Dice;
use terrace_l3::{Arena, MemoryConfig, MemoryStore, Store};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureRef, FeatureStore, FreeConfig, Released, Tensor,
    TensorSpec,
};
use terrace_tests::l3::mischief::{Asked, MischievousStore, Trick};

const SAMPLES: u64 = 4;
const TENSORS: u64 = 3;
const BYTES: u64 = 64;

/// What the map says about a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// It can be read.
    Live,
    /// Something failed that may have ended it.
    Uncertain,
    /// It cannot be read.
    Dead,
}

/// The plain map: every ref that was given out, and what is known of it.
#[derive(Default)]
struct Expectation {
    refs: Vec<(FeatureRef, Known)>,
}

impl Expectation {
    fn note(&mut self, sample: &str, becomes: Known) {
        let of_sample = self.refs.iter_mut().filter(|(other, _)| other.sample() == sample);
        for (_, known) in of_sample {
            *known = match (*known, becomes) {
                (Known::Dead, _) | (_, Known::Dead) => Known::Dead,
                (Known::Live | Known::Uncertain, becomes) => becomes,
            };
        }
    }
}

/// A process and its way to the store.
struct Process {
    features: FeatureStore,
    store: Arc<MischievousStore>,
    config: FeatureConfig,
}

struct World {
    memory: Arc<MemoryStore>,
    processes: Vec<Process>,
    /// Those whose numbers others have taken.
    former: Vec<Process>,
    expectation: Expectation,
    dice: Dice,
    /// A call of the store goes wrong once in so many times; never if 0.
    faults_one_in: u64,
    faults: Arc<AtomicU64>,
}

impl World {
    async fn new(seed: u64) -> Self {
        let config = MemoryConfig::new(4096 * 4096, 4096);
        let memory = Arc::new(MemoryStore::new(config).unwrap());
        let mut world = Self {
            memory,
            processes: Vec::new(),
            former: Vec::new(),
            expectation: Expectation::default(),
            dice: Dice::new(seed),
            faults_one_in: [0, 40, 12, 5][seed as usize % 4],
            faults: Arc::default(),
        };
        for owner in [Some(0), Some(1), None] {
            let free = FreeConfig { retry_ms: 10, retry_max_ms: 100, ..FreeConfig::default() };
            let config = FeatureConfig { owner, free, ..FeatureConfig::consumer("model") };
            let process = world.open(config).await;
            world.processes.push(process);
        }
        world
    }

    async fn open(&mut self, config: FeatureConfig) -> Process {
        let store = Arc::new(MischievousStore::new(self.memory.clone(), |_| Trick::None));
        let features = FeatureStore::open(store.clone(), config.clone()).await.unwrap();
        let (mut dice, one_in) = (Dice::new(self.dice.below(u64::MAX)), self.faults_one_in);
        let faults = self.faults.clone();
        store.set(move |asked| {
            if one_in == 0 || !dice.one_in(one_in) {
                return Trick::None;
            }
            faults.fetch_add(1, Ordering::Relaxed);
            match asked {
                Asked::Get => {
                    dice.pick(&[Trick::Refuse, Trick::Half, Trick::Damage, Trick::Shorten])
                }
                _ => dice.pick(&[Trick::Refuse, Trick::LoseAnswer, Trick::Half]),
            }
        });
        Process { features, store, config }
    }

    async fn step(&mut self) {
        let who = self.dice.below(3) as usize;
        match self.dice.below(10) {
            0..3 => self.put(who % 2).await,
            3..6 => self.get(who).await,
            6..8 => self.release(who).await,
            8 if self.dice.one_in(3) => self.abort(who).await,
            8 => drop(self.processes[who].features.gc().await),
            _ if self.dice.one_in(4) => {
                let config = self.processes[who].config.clone();
                let process = self.open(config).await;
                let former = std::mem::replace(&mut self.processes[who], process);
                self.former.extend(Some(former).filter(|former| former.config.owner.is_some()));
            }
            _ if self.dice.one_in(3) => {
                let Some(last) = self.former.last() else { return };
                let (sample, salt) = (format!("{}", self.dice.below(SAMPLES)), 7);
                let put = last.features.put(&sample, tensors(&last.features, salt)).await;
                assert!(put.is_err(), "a process without its number has put a sample");
                assert!(last.features.gc().await.is_err(), "or frees what is not its own");
            }
            _ => tokio::time::sleep(std::time::Duration::from_millis(30)).await,
        }
    }

    async fn put(&mut self, who: usize) {
        let sample = format!("{}", self.dice.below(SAMPLES));
        let salt = self.dice.below(1 << 30);
        let features = &self.processes[who].features;
        match features.put(&sample, tensors(features, salt)).await {
            Ok(reference) => {
                let live = self.expectation.refs.iter().filter(|(_, known)| *known == Known::Live);
                let live = live.map(|(other, _)| other).filter(|other| other.sample() == sample);
                let newest = live.map(FeatureRef::generation).max().unwrap_or(0);
                assert!(reference.generation() > newest, "later puts have higher numbers");
                self.expectation.note(&sample, Known::Dead);
                self.expectation.refs.push((reference, Known::Live));
            }
            Err(_) => {
                assert!(self.faults_one_in > 0, "a put failed without a fault");
                self.expectation.note(&sample, Known::Uncertain);
            }
        }
    }

    async fn get(&mut self, who: usize) {
        let Some(number) = self.pick() else { return };
        let (reference, known) = &self.expectation.refs[number];
        match self.processes[who].features.get(reference).await {
            Ok(tensors) => {
                assert_ne!(*known, Known::Dead, "{reference:?} was read after its end");
                check(&tensors);
            }
            Err(FeatureError::Gone { .. }) => {
                assert_ne!(*known, Known::Live, "{reference:?} is gone too early");
            }
            // A damaged object is gone for whoever reads it next, but here only the answer was.
            Err(_) => assert!(self.faults_one_in > 0, "a get failed without a fault"),
        }
    }

    async fn release(&mut self, who: usize) {
        let Some(number) = self.pick() else { return };
        let (reference, known) = &mut self.expectation.refs[number];
        match self.processes[who].features.release(reference.clone()).await {
            Ok(Released::Freed | Released::Lingering) => {
                // Whether it is gone already may be just what could not be asked.
                let fine = *known != Known::Dead || self.faults_one_in > 0;
                assert!(fine, "{reference:?} was freed twice");
                *known = Known::Dead;
            }
            Ok(Released::AlreadyGone) => {
                assert_ne!(*known, Known::Live, "{reference:?} is gone too early");
            }
            Ok(Released::Retained) => panic!("nothing is retained here"),
            Err(_) if *known == Known::Live => *known = Known::Uncertain,
            Err(_) => {}
        }
    }

    async fn abort(&mut self, who: usize) {
        let sample = format!("{}", self.dice.below(SAMPLES));
        let aborted = self.processes[who].features.abort(&sample).await;
        let becomes = if aborted.is_ok() { Known::Dead } else { Known::Uncertain };
        self.expectation.note(&sample, becomes);
    }

    /// Mostly a ref that is not dead.
    fn pick(&mut self) -> Option<usize> {
        let refs = self.expectation.refs.len() as u64;
        if refs == 0 {
            return None;
        }
        let first = self.dice.below(refs) as usize;
        let mut from_there = (first..refs as usize).chain(0..first);
        let alive = from_there.find(|number| self.expectation.refs[*number].1 != Known::Dead);
        if self.dice.one_in(3) { Some(first) } else { alive.or(Some(first)) }
    }

    /// The store is well again, everything is called off, and nothing is left.
    async fn end(self) {
        for process in &self.processes {
            process.store.set(|_| Trick::None);
        }
        for round in 0..100 {
            for sample in 0..SAMPLES {
                for process in &self.processes {
                    process.features.abort(&sample.to_string()).await.unwrap();
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            for process in &self.processes {
                process.features.gc().await.unwrap();
            }
            // Three notes of each producer say who has its number.
            if self.memory.stats().memory.unwrap().objects == 6 {
                break;
            }
            assert!(round < 99, "objects are left: {:#?}", self.processes[0].features.stats());
        }
        for (reference, _) in &self.expectation.refs {
            let read = self.processes[2].features.get(reference).await;
            assert!(matches!(read, Err(FeatureError::Gone { .. })), "{reference:?} lives again");
        }
        for process in &self.processes {
            let stats = process.features.stats();
            assert_eq!((stats.resident_bytes, stats.live, stats.parked), (0, 0, 0));
        }
    }
}

/// Tensors that say in their bytes whose they are.
fn tensors(features: &FeatureStore, salt: u64) -> Vec<Tensor> {
    let arena = Arena::new(TENSORS as u32, BYTES as usize).unwrap();
    // It lives as long as the store, which is not long.
    std::mem::forget(features.register(&arena).unwrap());
    let tensor = |number: u32| {
        let mut target = arena.target(number).unwrap();
        for word in target.chunks_mut(8) {
            word.copy_from_slice(&(salt + u64::from(number)).to_le_bytes());
        }
        drop(target);
        let spec = TensorSpec::new(format!("{number}"), Dtype::U64, [BYTES / 8]);
        Tensor::new(spec, arena.source(number).unwrap())
    };
    (0..TENSORS as u32).map(tensor).collect()
}

/// All tensors are of the same put.
fn check(tensors: &[Tensor]) {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let salt = word(&tensors[0][..8]);
    for (number, tensor) in (0..).zip(tensors) {
        assert!(tensor.chunks(8).all(|bytes| word(bytes) == salt + number), "bytes are mixed up");
    }
}

#[test]
fn a_plain_map_agrees_whatever_goes_wrong() {
    let number = |name, default| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (seeds, steps) = (number("TERRACE_SEEDS", 60), number("TERRACE_STEPS", 250));
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..seeds {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        let world = std::panic::catch_unwind(|| {
            runtime.block_on(async {
                let mut world = World::new(seed).await;
                for _ in 0..steps {
                    world.step().await;
                }
                let refs = world.expectation.refs.len() as u64;
                let faults = world.faults.load(Ordering::Relaxed);
                world.end().await;
                (refs, faults)
            })
        });
        let (refs, faults) = world.unwrap_or_else(|_| panic!("TERRACE_SEEDS: seed {seed}"));
        *seen.entry("refs").or_default() += refs;
        *seen.entry("faults").or_default() += faults;
    }
    assert!(seen["refs"] > seeds * steps / 10, "little was put: {seen:?}");
    assert!(seen["faults"] > seeds * steps / 10, "little went wrong: {seen:?}");
}
