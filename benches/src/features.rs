//! The feature store: large tensors compared with memory copies, and memory use by lease duration.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_l3::{Arena, ExistsOptions, MemoryConfig, MemoryStore, Store};
use terrace_l3_features::{Dtype, FeatureConfig, FeatureRef, FeatureStore, Tensor, TensorSpec};

/// Parameters of the benchmark.
#[derive(Clone, Debug)]
pub struct FeaturesWorkload {
    /// Size of a tensor.
    pub tensor_bytes: usize,
    /// Tensors per sample.
    pub tensors: u32,
    /// Number of speed measurements; the best counts, since noise only slows.
    pub rounds: u32,
    /// Lease durations, one run each.
    pub lease_ttls: Vec<Duration>,
    /// Duration of each run.
    pub run: Duration,
    /// Samples in flight in these runs.
    pub concurrency: u32,
    /// Called with a message when a phase begins.
    pub progress: fn(&str),
}

/// Results of the benchmark. Speeds are in 10^9 bytes per second.
#[derive(Clone, Debug, Serialize)]
pub struct FeaturesFigures {
    /// Speed of puts.
    pub put_gb_s: f64,
    /// Speed of reads into the caller's memory.
    pub get_gb_s: f64,
    /// Speed of memory copies.
    pub copy_gb_s: f64,
    /// `put_gb_s` as a share of `copy_gb_s`.
    pub put_share: f64,
    /// `get_gb_s` as a share of `copy_gb_s`.
    pub get_share: f64,
    /// Memory use for each lease duration.
    pub residency: Vec<Residency>,
    /// Spread of the mean memory use, as a share of the largest.
    pub residency_spread: f64,
}

/// Memory use while samples are passed on.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Residency {
    /// Lease duration.
    pub lease_ttl_s: f64,
    /// Samples passed on.
    pub samples: u64,
    /// Mean memory use.
    pub mean_bytes: u64,
    /// Largest memory use.
    pub max_bytes: u64,
    /// Memory use at the end.
    pub end_bytes: u64,
    /// Evicted objects; 0 is expected.
    pub evicted: u64,
}

type Failure = Box<dyn Error + Send + Sync>;

/// Objects beside the tensors of each sample: a record and a claim.
const NOTES: u64 = 2;

impl FeaturesWorkload {
    /// Measures speeds, then memory use.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub fn run(&self) -> Result<FeaturesFigures, Failure> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build()?;
        let [copy, put, get] = runtime.block_on(self.speeds())?;
        let residency = |ttl: &Duration| runtime.block_on(self.residency(*ttl));
        let residency = self.lease_ttls.iter().map(residency).collect::<Result<Vec<_>, _>>()?;
        let means = residency.iter().map(|run| run.mean_bytes);
        let (least, most) = (means.clone().min().unwrap_or(0), means.max().unwrap_or(0));
        let bytes = self.tensor_bytes as f64 * f64::from(self.tensors);
        let speed = |took: Duration| bytes / took.as_secs_f64() / 1e9;
        Ok(FeaturesFigures {
            put_gb_s: speed(put),
            get_gb_s: speed(get),
            copy_gb_s: speed(copy),
            put_share: copy.as_secs_f64() / put.as_secs_f64(),
            get_share: copy.as_secs_f64() / get.as_secs_f64(),
            residency,
            residency_spread: 1.0 - least as f64 / most.max(1) as f64,
        })
    }

    /// Returns the shortest times of copying, putting and getting a sample, measured in turn.
    async fn speeds(&self) -> Result<[Duration; 3], Failure> {
        let pages = self.tensors;
        let slots = 2 * (u64::from(pages) + NOTES);
        let config = MemoryConfig {
            watermark_high: 1.0,
            watermark_low: 1.0,
            ..MemoryConfig::new(slots * self.tensor_bytes as u64, self.tensor_bytes)
        };
        let store = Arc::new(MemoryStore::new(config)?);
        let features = FeatureStore::open(store, FeatureConfig::producer("bench", 0)).await?;
        let arena = Arena::new(2 * pages, self.tensor_bytes)?;
        let _registration = features.register(&arena)?;
        for page in 0..2 * pages {
            arena.target(page)?.fill(page as u8 + 1);
        }
        let (from, mut to) = (vec![1u8; self.tensor_bytes], vec![2u8; self.tensor_bytes]);
        let mut best = [Duration::MAX; 3];
        for round in 0..=self.rounds {
            (self.progress)(&format!("round {round} of {}", self.rounds));
            let began = Instant::now();
            for _ in 0..pages {
                to.copy_from_slice(std::hint::black_box(&from));
                std::hint::black_box(&mut to);
            }
            let copied = began.elapsed();
            let began = Instant::now();
            let reference = self.put(&features, &arena, "sample", 0).await?;
            let put = began.elapsed();
            let began = Instant::now();
            self.get(&features, &arena, &reference, pages).await?;
            let got = began.elapsed();
            if arena.source(0)?[..] != arena.source(pages)?[..] {
                return Err("what came back is not what was put".into());
            }
            features.release(reference).await?;
            // The first rounds touch memory for the first time.
            if round > 0 {
                for (best, took) in best.iter_mut().zip([copied, put, got]) {
                    *best = (*best).min(took);
                }
            }
        }
        Ok(best)
    }

    async fn residency(&self, ttl: Duration) -> Result<Residency, Failure> {
        const TENSOR_BYTES: usize = 1 << 20;
        (self.progress)(&format!("leases of {ttl:?} for {:?}", self.run));
        let small = FeaturesWorkload { tensor_bytes: TENSOR_BYTES, tensors: 2, ..self.clone() };
        let config = MemoryConfig {
            lease_ttl_ms: ttl.as_millis() as u64,
            leased_share_max: 1.0,
            ..MemoryConfig::new(1 << 30, TENSOR_BYTES)
        };
        let memory = Arc::new(MemoryStore::new(config)?);
        let features =
            FeatureStore::open(memory.clone(), FeatureConfig::producer("bench", 0)).await?;
        let arena = Arena::new(4 * self.concurrency, TENSOR_BYTES)?;
        let registration = Arc::new(features.register(&arena)?);
        let (samples, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let worker = |number: u32| {
            let (small, features, memory) = (small.clone(), features.clone(), memory.clone());
            let (arena, samples, over) = (arena.clone(), samples.clone(), over.clone());
            let registration = registration.clone();
            async move {
                while !over.load(Ordering::Relaxed) {
                    let sample = format!("{number}/{}", samples.fetch_add(1, Ordering::Relaxed));
                    let reference = small.put(&features, &arena, &sample, 4 * number).await?;
                    let ids = features.objects(&reference).into_iter().map(|(_, id)| id);
                    let leased = ExistsOptions { lease: true, ..ExistsOptions::default() };
                    memory.exists(&ids.collect::<Vec<_>>(), leased).await;
                    small.get(&features, &arena, &reference, 4 * number + 2).await?;
                    // The trainer's work on it. The load is the same for all lease durations.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    features.release(reference).await?;
                }
                drop(registration);
                Ok::<(), Failure>(())
            }
        };
        let workers: Vec<_> =
            (0..self.concurrency).map(|number| tokio::spawn(worker(number))).collect();
        let resident = || memory.stats().memory.map_or(0, |memory| memory.resident_bytes);
        let (began, mut held) = (Instant::now(), Vec::new());
        while began.elapsed() < self.run {
            tokio::time::sleep(Duration::from_millis(2)).await;
            held.push(resident());
        }
        over.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.await??;
        }
        Ok(Residency {
            lease_ttl_s: ttl.as_secs_f64(),
            samples: samples.load(Ordering::Relaxed),
            mean_bytes: held.iter().sum::<u64>() / held.len().max(1) as u64,
            max_bytes: held.iter().copied().max().unwrap_or(0),
            end_bytes: resident(),
            evicted: memory.stats().memory.map_or(0, |memory| memory.evicted),
        })
    }

    /// Puts a sample from consecutive pages of the arena.
    async fn put(
        &self,
        features: &FeatureStore,
        arena: &Arena,
        sample: &str,
        first: u32,
    ) -> Result<FeatureRef, Failure> {
        let mut tensors = Vec::new();
        for page in first..first + self.tensors {
            let spec =
                TensorSpec::new(format!("layer-{page}"), Dtype::U8, [self.tensor_bytes as u64]);
            tensors.push(Tensor::new(spec, arena.source(page)?));
        }
        Ok(features.put(sample, tensors).await?)
    }

    /// Reads a sample into consecutive pages of the arena.
    async fn get(
        &self,
        features: &FeatureStore,
        arena: &Arena,
        reference: &FeatureRef,
        first: u32,
    ) -> Result<(), Failure> {
        let mut targets = Vec::new();
        for page in first..first + self.tensors {
            targets.push(arena.target(page)?);
        }
        Ok(features.get_into(reference, targets).await?)
    }
}
