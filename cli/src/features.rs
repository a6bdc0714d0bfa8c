//! `terrace features`: passes samples of tensors from one process to another, to try a store out and to
//! load it.
//!
//! Refs go through a folder, one small file each.

mod place;
mod refs;
mod report;

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use terrace_l3::{Arena, StoreError};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureRef, Released, Secret, Tensor, TensorSpec, WhenFull,
};
use terrace_server::Size;

use crate::settings::GivenClusters;

use self::place::{AWAY_MAX, PAUSE, Place, Sizes, Turn, is_away};
use self::refs::Refs;
use self::report::{GcOutcome, Progress, Totals};

/// Arguments of `terrace features`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Put samples into a store and write their refs to a folder
    Produce {
        #[command(flatten)]
        common: Common,
        /// Number of this producer; use the same number after a restart, and another one for each producer
        #[arg(long, default_value_t = 0)]
        owner: u16,
        /// Number of samples
        #[arg(long, default_value_t = 100)]
        samples: u64,
        /// Prefix of the samples' names
        #[arg(long, default_value = "sample")]
        prefix: String,
        /// Tensors per sample
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
        tensors: u32,
        /// Maximum size of samples that are not consumed yet
        #[arg(long, default_value = "64MiB")]
        max_resident: Size,
        /// Free unconsumed samples after this time, like 30m
        #[arg(long, default_value = "30m", value_parser = humantime::parse_duration)]
        max_hold: Duration,
        /// Keep released samples, for further epochs
        #[arg(long)]
        retain: bool,
    },
    /// Read samples by the refs in a folder, check every byte and release them
    Consume {
        #[command(flatten)]
        common: Common,
        /// Stop after this many samples
        #[arg(long)]
        samples: Option<u64>,
        /// Stop when no ref has arrived for this time, like 5s
        #[arg(long, default_value = "5s", value_parser = humantime::parse_duration)]
        patience: Duration,
    },
    /// Free expired and consumed samples of a producer and report what is stored
    Gc {
        #[command(flatten)]
        common: Common,
        /// Number of the producer
        #[arg(long, default_value_t = 0)]
        owner: u16,
        /// Free samples that are older than this, like 30m
        #[arg(long, default_value = "30m", value_parser = humantime::parse_duration)]
        max_hold: Duration,
    },
}

#[derive(Args)]
struct Common {
    /// The store: disk:FOLDER, mooncake://HOST:PORT or nodes://HOST:PORT,HOST:PORT; in builds with buckets,
    /// s3://BUCKET/PREFIX or bucket:URL
    #[arg(long, value_name = "PLACE", value_parser = Place::parse)]
    store: Place,
    /// TOML file with settings of clusters and nodes, as for `terrace serve`; flags and environment
    /// variables override it
    #[arg(long, value_name = "FILE", env = "TERRACE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    clusters: GivenClusters,
    /// Capacity of a disk store, or the maximum that this process puts into a cluster
    #[arg(long, default_value = "1GiB")]
    capacity: Size,
    /// Size of a tensor; the same for all users of the store
    #[arg(long, default_value = "1MiB")]
    tensor: Size,
    /// Prefix of the keys
    #[arg(long, default_value = "features")]
    name: String,
    /// Folder through which refs are passed [default: refs in the folder of a disk store]
    #[arg(long)]
    refs: Option<PathBuf>,
    /// File with the secret that authenticates refs, tensors and records
    #[arg(long, env = "TERRACE_FEATURES_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    /// How long this process keeps a disk store open before it lets others use it
    #[arg(long, default_value = "200ms", value_parser = humantime::parse_duration)]
    turn: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

type Failure = Box<dyn Error>;

pub(crate) fn run(arguments: &Arguments) -> Result<String, Failure> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match &arguments.command {
            Command::Produce {
                common,
                owner,
                samples,
                prefix,
                tensors,
                max_resident,
                max_hold,
                retain,
            } => {
                let config = FeatureConfig {
                    owner: Some(*owner),
                    max_resident_bytes: max_resident.as_u64(),
                    // No other process can consume during this turn.
                    when_full: if common.store.takes_turns() {
                        WhenFull::Refuse
                    } else {
                        WhenFull::WaitMs(1_000)
                    },
                    max_hold_ms: Some(max_hold.as_millis() as u64),
                    retain_on_release: *retain,
                    durable: true,
                    ..common.features()?
                };
                let work = Production { prefix, tensors: *tensors, samples: *samples, next: 0 };
                produce(common, config, work).await
            }
            Command::Consume { common, samples, patience } => {
                consume(common, samples.unwrap_or(u64::MAX), *patience).await
            }
            Command::Gc { common, owner, max_hold } => gc(common, *owner, *max_hold).await,
        }
    })
}

impl Common {
    fn features(&self) -> Result<FeatureConfig, Failure> {
        let secret = match &self.secret_file {
            Some(path) => {
                let bytes = std::fs::read(path)
                    .map_err(|error| format!("--secret-file {}: {error}", path.display()))?;
                Some(Secret::new(bytes.trim_ascii_end()))
            }
            None => None,
        };
        Ok(FeatureConfig { secret, ..FeatureConfig::consumer(&self.name) })
    }

    fn refs(&self) -> Result<Refs, Failure> {
        let folder = self.refs.clone().map_or_else(|| self.store.refs(), Ok)?;
        Refs::open(&folder)
    }

    async fn turn(&self, config: &FeatureConfig, pages: u32) -> Result<Turn, Failure> {
        let sizes = Sizes {
            capacity_bytes: self.capacity.as_u64(),
            tensor_bytes: (self.tensor.as_u64() as usize).max(8),
            turn: self.turn,
        };
        let clusters = self.clusters.over(self.config.as_deref())?;
        Turn::begin(&self.store, &clusters, sizes, config, pages).await
    }
}

/// Samples to produce.
struct Production<'a> {
    prefix: &'a str,
    tensors: u32,
    samples: u64,
    next: u64,
}

/// After so long a store has forgotten a put that nobody will end: twice what Mooncake takes.
const UNFINISHED_PUTS: Duration = Duration::from_secs(60);

/// Returns whether a put may succeed later. A cluster keeps the place of a put for a while, whether its producer died
/// or the put took longer than the cluster allows.
fn is_unfinished(error: &FeatureError) -> bool {
    let FeatureError::Store { error, .. } = error else { return false };
    match error {
        StoreError::BeingWritten => true,
        StoreError::Io { kind, .. } => *kind == io::ErrorKind::TimedOut,
        _ => false,
    }
}

async fn produce(
    common: &Common,
    config: FeatureConfig,
    mut work: Production<'_>,
) -> Result<String, Failure> {
    let refs = common.refs()?;
    let mut progress = Progress::new(common.json, "put", Some(work.samples));
    let mut totals = Totals::default();
    let mut last_put = Instant::now();
    while work.next < work.samples {
        let mut turn = common.turn(&config, work.tensors).await?;
        while work.next < work.samples && !turn.is_over() {
            let sample = format!("{}-{}", work.prefix, work.next);
            match turn.features.put(&sample, tensors(&turn.arena, &sample, work.tensors)).await {
                Ok(reference) => {
                    totals.count(reference.bytes());
                    refs.push(&reference)?;
                    work.next += 1;
                    last_put = Instant::now();
                    progress.show(&totals);
                }
                Err(error) if is_unfinished(&error) && last_put.elapsed() < UNFINISHED_PUTS => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) if is_away(&error) && last_put.elapsed() < AWAY_MAX => {
                    tokio::time::sleep(PAUSE).await;
                }
                // Others must consume first: here they can, or only when this turn has ended.
                Err(FeatureError::OverBudget { .. }) if turn.is_shared() => {}
                Err(FeatureError::OverBudget { .. }) => break,
                Err(error) => return Err(error.into()),
            }
            turn.tend().await?;
        }
        if turn.offers_segment {
            eprintln!(
                "terrace: all samples are stored. They may be in the segment of this process, so it keeps \
                 running until they are consumed or expired; Ctrl-C stops it and loses them"
            );
            turn.features.consumed().await;
        }
        leave(turn, &mut totals).await?;
    }
    progress.end(&totals)
}

async fn consume(common: &Common, samples: u64, patience: Duration) -> Result<String, Failure> {
    let (refs, config) = (common.refs()?, common.features()?);
    let mut progress = Progress::new(common.json, "consumed", None);
    let mut totals = Totals::default();
    let mut last_seen = Instant::now();
    let mut kept: Option<Turn> = None;
    while totals.samples < samples && last_seen.elapsed() < patience {
        let waiting = refs.waiting()?;
        if waiting.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            if let Some(turn) = &mut kept {
                turn.tend().await?;
            }
            continue;
        }
        let tensors_max = waiting.iter().map(|(_, found)| found.tensors().len()).max().unwrap_or(0);
        let mut turn = match kept.take() {
            Some(turn) => turn,
            None => common.turn(&config, tensors_max as u32).await?,
        };
        turn.fit(tensors_max as u32)?;
        for (path, reference) in waiting {
            if totals.samples >= samples || turn.is_over() {
                break;
            }
            take(&turn, reference, &mut totals).await?;
            refs.done(&path)?;
            progress.show(&totals);
        }
        turn.tend().await?;
        last_seen = Instant::now();
        if turn.is_shared() {
            kept = Some(turn);
        } else {
            leave(turn, &mut totals).await?;
        }
    }
    if let Some(turn) = kept {
        leave(turn, &mut totals).await?;
    }
    progress.end(&totals)
}

/// Ends a turn when all is tidied up.
async fn leave(mut turn: Turn, totals: &mut Totals) -> Result<(), Failure> {
    turn.gc().await?;
    totals.features = turn.features.stats();
    turn.end().await
}

/// Reads a sample, checks every byte, and releases it.
async fn take(turn: &Turn, reference: FeatureRef, totals: &mut Totals) -> Result<(), Failure> {
    let target = |(page, spec): (u32, &TensorSpec)| {
        let target = turn.arena.target(page)?;
        Ok(target.first(spec.bytes().unwrap_or(0).min(turn.arena.page_bytes())))
    };
    let since = Instant::now();
    let taken = loop {
        let specs = (0..).zip(reference.tensors());
        let targets = specs.map(target).collect::<Result<Vec<_>, Failure>>()?;
        match turn.features.get_into(&reference, targets).await {
            Err(error) if is_away(&error) && since.elapsed() < AWAY_MAX => {
                tokio::time::sleep(PAUSE).await;
            }
            taken => break taken,
        }
    };
    match taken {
        Ok(()) => {}
        Err(FeatureError::Gone { .. }) => {
            totals.gone += 1;
            return Ok(());
        }
        Err(error @ (FeatureError::Forged { .. } | FeatureError::ForgedObject { .. })) => {
            eprintln!("terrace: {error}");
            totals.forged += 1;
            return Ok(());
        }
        Err(error @ FeatureError::Damaged { .. }) => {
            eprintln!("terrace: {error}");
            totals.damaged += 1;
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    }
    for (page, spec) in (0..).zip(reference.tensors()) {
        let found = turn.arena.source(page)?;
        let bytes = spec.bytes().unwrap_or(0);
        let mut expected = vec![0; bytes];
        fill(reference.sample(), &spec.name, &mut expected);
        if found[..bytes] != expected[..] {
            eprintln!("terrace: {} of {} has wrong bytes", spec.name, reference.sample());
            totals.wrong += 1;
        }
    }
    totals.count(reference.bytes());
    match turn.features.release(reference).await? {
        Released::Freed | Released::Lingering | Released::Retained | Released::AlreadyGone => {
            Ok(())
        }
    }
}

async fn gc(common: &Common, owner: u16, max_hold: Duration) -> Result<String, Failure> {
    let max_hold_ms = Some(max_hold.as_millis() as u64);
    let config = FeatureConfig { owner: Some(owner), max_hold_ms, ..common.features()? };
    let mut turn = common.turn(&config, 1).await?;
    let report = turn.gc().await?;
    turn.features.close().await?;
    turn.store.flush().await?;
    let (features, store) = (turn.features.stats(), turn.store.stats());
    let there = store.disk.or(store.remote).unwrap_or_default();
    turn.end().await?;
    GcOutcome { report, features, objects: there.objects, stored_bytes: there.resident_bytes }
        .print(common.json)
}

/// The tensors of a sample, in the first pages of the arena.
fn tensors(arena: &Arena, sample: &str, count: u32) -> Vec<Tensor> {
    let tensor = |page: u32| {
        let spec = TensorSpec::new(format!("layer-{page}"), Dtype::U8, [arena.page_bytes() as u64]);
        fill(sample, &spec.name, &mut arena.target(page).expect("the last put has ended"));
        Tensor::new(spec, arena.source(page).expect("nobody writes to it"))
    };
    (0..count).map(tensor).collect()
}

/// Bytes that follow from names, so that any wrong one is noticed.
fn fill(sample: &str, tensor: &str, bytes: &mut [u8]) {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for byte in sample.bytes().chain([0]).chain(tensor.bytes()) {
        state = (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23);
    }
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        let next = (state ^ (state >> 33)).to_le_bytes();
        word.copy_from_slice(&next[..word.len()]);
    }
}
