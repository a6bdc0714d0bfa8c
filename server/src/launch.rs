//! From a configuration to a running engine: model, memory, store.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use terrace_cache::CacheConfig;
use terrace_engine::{CpuDevice, Engine, Forward, PageLayout, StartError, Threaded};
use terrace_l3::{GuardConfig, Guarded, MemoryConfig, MemoryStore, Store, TierStats};
use terrace_l3_disk::OpenError;
use terrace_l3_mooncake::{MooncakeError, MooncakeStore};
use terrace_l3_nodes::{NodesConfig, NodesError, NodesStore, PeerStats, RdmaChoice};
use terrace_model::{LoadError, Loaded};
use terrace_scheduler::{
    BatchConfig, CopyConfig, L3Config, PrefetchPolicy, QueueConfig, RateConfig,
};

use crate::cluster::ClusterError;
use crate::config::{Config, ConfigError, L3Choice, cores};
use crate::disk_tier::DiskTier;
use crate::recordings::Recordings;
use crate::served_model::ServedModel;
use crate::summary::{Summary, Tier};
use crate::tool_calls::ToolFormat;
use terrace_replay::Size;

/// A running engine and what is to be known about it.
#[derive(Debug)]
pub struct Launched {
    /// The engine.
    pub engine: Engine,
    /// The model that it computes.
    pub model: ServedModel,
    /// What was started.
    pub summary: Summary,
}

/// Why an engine could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model cannot be loaded.
    #[error("cannot load the model: {0}")]
    Model(#[from] LoadError),
    /// There is not enough memory for the device tier.
    #[error(
        "{memory} of device memory hold {tokens} tokens of this model's KV, at {page} a page of \
         {page_size} tokens: raise --device-memory to {needed} or more"
    )]
    DeviceMemory {
        /// What there is.
        memory: Size,
        /// What it holds.
        tokens: u64,
        /// The size of a page.
        page: Size,
        /// Tokens in a page.
        page_size: u32,
        /// The least that is useful.
        needed: Size,
    },
    /// More pages than can be counted.
    #[error(
        "{memory} are more pages of {page} than can be counted: lower it, or raise --page-size"
    )]
    TooManyPages {
        /// What there is.
        memory: Size,
        /// The size of a page.
        page: Size,
    },
    /// L3 without host memory.
    #[error("L3 moves pages through host memory: raise --host-memory, or leave out --l3")]
    NoHost,
    /// The system does not give the memory.
    #[error(
        "the system does not give {device} for the device tier and {host} for the host tier: {error}; \
         lower --device-memory or --host-memory"
    )]
    Memory {
        /// For the device.
        device: Size,
        /// For the host.
        host: Size,
        /// What the system says.
        error: io::Error,
    },
    /// There is no folder for L3.
    #[error(
        "there is no place for L3: set HOME or XDG_CACHE_HOME, or use --l3 disk:FOLDER or none"
    )]
    NoCacheFolder,
    /// Another server has the store.
    #[error(
        "the L3 store in {} is in use by {owner}: stop it, or use --l3 disk:OTHER-FOLDER or --l3 none",
        path.display()
    )]
    L3InUse {
        /// Where.
        path: PathBuf,
        /// Who.
        owner: String,
    },
    /// The store on disk cannot be opened.
    #[error("cannot open L3: {0}; --l3 disk:OTHER-FOLDER or --l3 none does without it")]
    L3Disk(OpenError),
    /// The file system has no room for the store.
    #[error(
        "there is no room for L3 in {}: the file system has {free} free, of which {reserve} stay free, and \
         the least that L3 needs is {needed}; make room, lower --l3-reserve, or use --l3 \
         disk:OTHER-FOLDER or --l3 none",
        path.display()
    )]
    L3NoRoom {
        /// Where.
        path: PathBuf,
        /// What is free.
        free: Size,
        /// What of it stays free.
        reserve: Size,
        /// The least that would do.
        needed: Size,
    },
    /// Other servers have all that the folder may take.
    #[error(
        "there is no room for L3 in {}: pages of other sizes beside it, in use by {owners}, have {taken} \
         of the {limit} for all; raise --l3-size, or use --l3 disk:OTHER-FOLDER or --l3 none",
        path.display()
    )]
    L3FolderFull {
        /// Where.
        path: PathBuf,
        /// What all may take.
        limit: Size,
        /// What others have.
        taken: Size,
        /// Who.
        owners: String,
    },
    /// A recording that cannot be made.
    #[error("cannot record into {}: {error}; give the name of a new file", file.display())]
    Record {
        /// The file.
        file: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The store in memory cannot be made.
    #[error("cannot make an L3 store in memory: {0}; choose another size, or --l3 none")]
    L3Memory(io::Error),
    /// Something is missing to use a cluster or nodes.
    #[error("L3: {0}; or use --l3 disk:FOLDER or none")]
    Cluster(#[from] ClusterError),
    /// The library cannot be used.
    #[error("cannot use Mooncake for L3: {0}; --l3 disk:FOLDER or --l3 none does without it")]
    L3Mooncake(MooncakeError),
    /// The nodes cannot be used.
    #[error("cannot use nodes for L3: {0}")]
    L3Nodes(String),
    /// The bucket cannot be used.
    #[error("cannot use a bucket for L3: {0}; --l3 disk:FOLDER or --l3 none does without it")]
    L3Bucket(String),
    /// The engine does not start.
    #[error(transparent)]
    Engine(#[from] StartError),
}

/// Starts an engine on the tokio runtime that this is called from.
///
/// # Errors
/// What cannot work, and what to change.
pub fn launch(config: &Config) -> Result<Launched, LaunchError> {
    config.check()?;
    let threads = config.threads.unwrap_or_else(cores);
    let loaded = match &config.model {
        Some(folder) => terrace_model::load(folder, threads)?,
        None => terrace_model::built_in(threads),
    };
    let sizes = Sizes::new(config, &loaded)?;
    let device = CpuDevice::new(sizes.device_pages, sizes.host_pages, sizes.layout.clone());
    let device = device.map_err(|error| LaunchError::Memory {
        device: config.device_memory,
        host: config.host_memory,
        error,
    })?;
    let opened = open_l3(config, &sizes)?;
    let Loaded { model, tokenizer, chat, stop_tokens, name } = loaded;
    let device_tokens = u64::from(sizes.device_pages) * u64::from(config.page_size);
    // The KV of the last token is never needed.
    let tokens_max = (device_tokens + 1).min(u64::from(model.positions_max())) as u32;
    let model_served = ServedModel {
        name: config.name.clone().unwrap_or_else(|| name.clone()),
        tokenizer,
        stop_tokens: stop_tokens.into(),
        tokens_max,
        tool_format: config.tool_format.or_else(|| ToolFormat::of(&chat)),
        root: config.model.as_ref().map_or(name, |folder| folder.display().to_string()),
        created: config.model.as_deref().and_then(last_written).unwrap_or_else(now),
        fingerprint: model.fingerprint(),
        chat,
    };
    let recordings = Recordings::begin(config)?;
    let summary = Summary {
        name: model_served.name.clone(),
        is_built_in: config.model.is_none(),
        threads,
        tokens_max,
        kv_bytes_per_token: (sizes.page_bytes / config.page_size as usize) as u64,
        device: sizes.tier(sizes.device_pages),
        host: (sizes.host_pages > 0).then(|| sizes.tier(sizes.host_pages)),
        l3: opened.as_ref().map(|opened| opened.tier.clone()),
        recordings: recordings.files,
    };
    let store = opened.map(|opened| opened.store);
    let (scheduler, device) = (scheduler_config(config), Arc::new(device));
    let model = Threaded::new(model);
    let engine = Engine::start_watched(scheduler, model, device, store, recordings.witnesses)?;
    Ok(Launched { engine, model: model_served, summary })
}

/// When the latest of a folder's files was written.
fn last_written(folder: &Path) -> Option<u64> {
    let files = std::fs::read_dir(folder).ok()?;
    let written = files.filter_map(|file| file.ok()?.metadata().ok()?.modified().ok());
    written.max().map(seconds)
}

fn now() -> u64 {
    seconds(SystemTime::now())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What the scheduler is to do. What the engine knows better it fills in itself.
fn scheduler_config(config: &Config) -> terrace_scheduler::Config {
    terrace_scheduler::Config {
        cache: CacheConfig {
            page_size: config.page_size,
            eviction: config.eviction,
            write_policy: config.write_policy,
            ..CacheConfig::default()
        },
        batch: BatchConfig {
            running_max: config.running_max,
            step_tokens_max: config.step_tokens,
            steps_in_flight_max: config.steps_in_flight,
            chunk_tokens_min: config.chunk_tokens,
            context_tokens: config.context_tokens,
            ..BatchConfig::default()
        },
        queue: QueueConfig {
            order: config.admission,
            requests_max: config.limits.requests_max,
            preempts: config.preempts,
            ..QueueConfig::default()
        },
        copies: CopyConfig {
            load_back_overlaps: config.load_back_overlaps,
            ..CopyConfig::default()
        },
        l3: Some(L3Config {
            prefetch_threshold_pages: 1,
            doubt_after_ms: config.l3_doubt_after.as_millis() as u64,
            prefetch: PrefetchPolicy::Deadline {
                base_ms: config.l3_wait.as_millis() as u64,
                per_page_us: 500,
            },
            probe_timeout_ms: (config.l3_wait * 2 / 5).as_millis() as u64,
            ..L3Config::default()
        }),
        // What is usual for a CPU, until it has been measured: computing is slow enough that loading
        // pays from the first request on.
        rates: RateConfig {
            prefill_ns_per_token: 400_000,
            load_back_ns_per_page: 50_000,
            prefetch_ns_per_page: 200_000,
            prefetch_latency_us: 2_000,
        },
        ..terrace_scheduler::Config::default()
    }
}

/// How many pages each tier has.
struct Sizes {
    page_size: u32,
    layout: PageLayout,
    page_bytes: usize,
    device_pages: u32,
    host_pages: u32,
}

impl Sizes {
    fn new(config: &Config, loaded: &Loaded) -> Result<Self, LaunchError> {
        /// With fewer, hardly a request would fit.
        const DEVICE_PAGES_MIN: u32 = 8;
        let page_size = config.page_size;
        let layout = loaded.model.kv_layout().pages(page_size).map_err(StartError::from)?;
        let page_bytes = layout.bytes();
        let page = Size(page_bytes as u64);
        let pages = |memory: Size| {
            let pages = memory.as_u64() / page.as_u64();
            u32::try_from(pages).map_err(|_| LaunchError::TooManyPages { memory, page })
        };
        let device_pages = pages(config.device_memory)?;
        if device_pages < DEVICE_PAGES_MIN {
            return Err(LaunchError::DeviceMemory {
                memory: config.device_memory,
                tokens: u64::from(device_pages) * u64::from(page_size),
                page,
                page_size,
                needed: Size(page.as_u64() * u64::from(DEVICE_PAGES_MIN)),
            });
        }
        Ok(Self {
            page_size,
            layout,
            page_bytes,
            device_pages,
            host_pages: pages(config.host_memory)?,
        })
    }

    fn tier(&self, pages: u32) -> Tier {
        let bytes = u64::from(pages) * self.page_bytes as u64;
        self.tier_of(bytes, u64::from(pages), 0, None)
    }

    fn tier_of(&self, bytes: u64, pages: u64, warm_pages: u64, place: Option<String>) -> Tier {
        let page_size = u64::from(self.page_size);
        Tier {
            size: Size(bytes),
            tokens: pages * page_size,
            warm_tokens: warm_pages * page_size,
            place,
            notes: Vec::new(),
        }
    }
}

struct OpenedL3 {
    store: Arc<dyn Store>,
    tier: Tier,
}

fn open_l3(config: &Config, sizes: &Sizes) -> Result<Option<OpenedL3>, LaunchError> {
    if sizes.host_pages == 0 {
        return match config.l3 {
            Some(
                L3Choice::Disk(_)
                | L3Choice::Memory(_)
                | L3Choice::Mooncake(_)
                | L3Choice::Nodes(_)
                | L3Choice::Bucket(_),
            ) => Err(LaunchError::NoHost),
            Some(L3Choice::None) | None => Ok(None),
        };
    }
    let mut guard = GuardConfig::default();
    let (mut on_nodes, mut notes) = (None, Vec::new());
    let mut on_disk = |folder: Option<&Path>| -> Result<Opened, LaunchError> {
        let disk = DiskTier::open(folder, config, sizes.page_bytes)?;
        notes = disk.notes;
        Ok((disk.store, Some(disk.place)))
    };
    let (store, place): (Arc<dyn Store>, _) = match &config.l3 {
        Some(L3Choice::None) => return Ok(None),
        Some(L3Choice::Memory(size)) => {
            let memory = MemoryConfig::new(size.as_u64(), sizes.page_bytes);
            (Arc::new(MemoryStore::new(memory).map_err(LaunchError::L3Memory)?), None)
        }
        Some(L3Choice::Mooncake(master)) => {
            // A cluster that comes back is found within seconds: one thread waits for it at a time.
            guard.pause_max_ms = 5_000;
            open_mooncake(master, config, sizes)?
        }
        Some(L3Choice::Nodes(nodes)) => {
            // Longer than a node may take: one that is away must not make the others look unwell.
            guard.exists_timeout_ms = 500;
            guard.get_timeout_ms = 2_000;
            guard.put_timeout_ms = 10_000;
            guard.control_timeout_ms = 2_000;
            guard.pause_max_ms = 2_000;
            let (opened, all) = open_nodes(nodes, config, sizes)?;
            on_nodes = Some(all);
            opened
        }
        Some(L3Choice::Bucket(url)) => {
            // A bucket that is far away takes longer than a disk, and is not unwell for that.
            guard.exists_timeout_ms = 1_000;
            guard.get_timeout_ms = 5_000;
            guard.put_timeout_ms = 10_000;
            guard.control_timeout_ms = 5_000;
            guard.pause_max_ms = 5_000;
            open_bucket(url, config, sizes)?
        }
        Some(L3Choice::Disk(folder)) => on_disk(Some(folder))?,
        None => on_disk(None)?,
    };
    let stats = store.stats();
    let lowest = on_nodes.or(stats.remote).or(stats.disk).or(stats.memory).unwrap_or_default();
    let pages = lowest.capacity_bytes / sizes.page_bytes as u64;
    let tier = sizes.tier_of(lowest.capacity_bytes, pages, lowest.objects, place);
    let tier = Tier { notes, ..tier };
    let store = Arc::new(Guarded::new(store, guard));
    Ok(Some(OpenedL3 { store, tier }))
}

/// A store, and where it is, in words.
type Opened = (Arc<dyn Store>, Option<String>);

/// Opens the library and tries the cluster. One that cannot be reached now may be later, so the server
/// starts all the same; a library that cannot be used never will.
fn open_mooncake(master: &str, config: &Config, sizes: &Sizes) -> Result<Opened, LaunchError> {
    const PATIENCE: Duration = Duration::from_secs(2);
    let mooncake = config.mooncake(master, config.l3_size.as_u64(), sizes.page_bytes)?;
    let store = MooncakeStore::open(mooncake).map_err(LaunchError::L3Mooncake)?;
    let reached = if store.wait_until_connected(PATIENCE) { "" } else { ", not reached yet" };
    Ok((Arc::new(store), Some(format!("the Mooncake cluster at {master}{reached}"))))
}

/// Nothing is asked of the bucket yet: one that cannot be reached now may be later.
#[cfg(feature = "buckets")]
fn open_bucket(url: &str, config: &Config, sizes: &Sizes) -> Result<Opened, LaunchError> {
    use terrace_l3_buckets::{BucketsConfig, BucketsStore};
    let bucket = BucketsConfig::new(url, config.l3_size.as_u64(), sizes.page_bytes);
    let store =
        BucketsStore::open(bucket).map_err(|error| LaunchError::L3Bucket(error.to_string()))?;
    Ok((Arc::new(store), Some(format!("the bucket {url}"))))
}

#[cfg(not(feature = "buckets"))]
fn open_bucket(_: &str, _: &Config, _: &Sizes) -> Result<Opened, LaunchError> {
    Err(LaunchError::L3Bucket("this build has none: build it with `--features buckets`".to_owned()))
}

/// Looks which of the nodes are there, and what they hold. Those that are not may come later, so the
/// server starts all the same.
fn open_nodes(
    nodes: &str,
    config: &Config,
    sizes: &Sizes,
) -> Result<(Opened, TierStats), LaunchError> {
    let nodes = config.nodes(nodes)?;
    let unusable = |error: NodesError| LaunchError::L3Nodes(error.to_string());
    let store = NodesStore::new(nodes.clone()).map_err(unusable)?;
    let seen = look_at(nodes).map_err(LaunchError::L3Nodes)?;
    for node in seen.iter().filter(|node| node.is_up) {
        if node.object_bytes_max < sizes.page_bytes as u64 {
            return Err(LaunchError::L3Nodes(format!(
                "node {} takes objects of {} and a page of this model has {}: start it with \
                 --object-max {} or more",
                node.name, node.object_bytes_max, sizes.page_bytes, sizes.page_bytes
            )));
        }
    }
    let reached = seen.iter().filter(|node| node.is_up).count();
    let place = match seen.len() {
        1 if reached == 1 => "a node".to_owned(),
        all if reached == all => format!("{all} nodes"),
        all => format!("{all} nodes, of which {reached} answer"),
    };
    let all = TierStats {
        objects: seen.iter().map(|node| node.objects).sum(),
        capacity_bytes: seen.iter().map(|node| node.capacity_bytes).sum(),
        ..TierStats::default()
    };
    Ok(((Arc::new(store), Some(place)), all))
}

/// What the nodes say about themselves at the moment. The runtime that this is called from cannot wait,
/// so another one does.
fn look_at(nodes: NodesConfig) -> Result<Vec<PeerStats>, String> {
    let look = move || -> Result<Vec<PeerStats>, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let nodes = NodesConfig { rdma: RdmaChoice::Never, ..nodes };
        let store = NodesStore::new(nodes).map_err(|error| error.to_string())?;
        runtime.block_on(store.reach());
        Ok(store.peers())
    };
    std::thread::spawn(look).join().map_err(|_| "looking for them failed".to_owned())?
}
