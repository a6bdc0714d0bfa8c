//! Configuration of a replay: the machines, their schedulers, and the arrival of requests.

use serde::{Deserialize, Serialize};
use terrace_scheduler::{
    BatchConfig, CacheConfig, Config as SchedulerConfig, L3Config, PrefetchPolicy, QueueConfig,
    RateConfig,
};

use crate::cluster::{Outage, WorkerGroup};
use crate::copies::CopyWay;
use crate::cost::CostModel;
use crate::error::ReplayError;
use crate::machine::{Gpu, ModelSpec};
use crate::prices::Prices;
use crate::slo::Slo;

/// Complete configuration of a replay. The same trace and configuration give a byte-identical
/// report.
///
/// The default is one worker with Llama 3.1 8B on one H100, a host tier of four times the device,
/// and an L3 without a limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Name of the model. Its costs are set below.
    pub model: String,
    /// Name of the GPU.
    pub gpu: String,
    /// Number of workers, each with its own device and host tier. They share one L3.
    pub workers: u32,
    /// GPUs of each worker; prices depend on it.
    pub gpus: u32,
    /// Worker groups beyond the first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<WorkerGroup>,
    /// Number of leading workers that only compute prompts, while the others only decode; 0 if all
    /// do both. KV passes between them through host memory and L3.
    pub prefill_workers: u32,
    /// Outages of workers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outages: Vec<Outage>,
    /// Routing of requests.
    pub router: RouterConfig,
    /// Arrival of requests.
    pub arrival: Arrival,
    /// Dependence of session turns on earlier answers.
    pub sessions: Sessions,
    /// Initial requests excluded from measurement: they find empty caches.
    pub warm_up: WarmUp,
    /// Service-level objective.
    pub slo: Slo,
    /// Prices of hardware.
    pub prices: Prices,
    /// Largest number of requests that wait at a worker's scheduler; further ones wait in front of
    /// it, in order of arrival. A scheduler looks a request up in L3 when it gets it: a lookup
    /// hours too early finds too little, and prefetched pages occupy memory.
    pub waiting_max: u32,
    /// Scheduler configuration of each worker. The replay sets KV events, transitions, and the
    /// assumed rates that [`Config::rates`] leaves at `None`.
    pub scheduler: SchedulerConfig,
    /// Initial rate assumptions of the schedulers; `None` takes them from the cost and link models.
    pub rates: Option<RateConfig>,
    /// Step costs.
    pub cost: CostModel,
    /// Bytes of KV per token, not counting copies on other ranks.
    pub kv_bytes_per_token: u64,
    /// The links of each worker.
    pub links: LinksConfig,
    /// The shared store. Used only if the scheduler's configuration has an L3.
    pub store: StoreConfig,
    /// Seed of random failures.
    pub seed: u64,
}

/// Configuration of the router.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// Routing policy.
    pub routing: Routing,
    /// Load weight of a context token of a live request, relative to a token to compute: a decode
    /// reads it in every step.
    pub decode_weight: f64,
    /// Delay of KV events on their way to the router.
    pub event_delay_us: u64,
}

/// Dependence of session turns on earlier answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sessions {
    /// A turn waits for the answer before it, plus the user's think time. `speed_up` changes the
    /// start of sessions, but not think times.
    #[default]
    Wait,
    /// All requests arrive at the times of the trace.
    ByTheClock,
}

/// Requests excluded from measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum WarmUp {
    /// A leading share of all requests.
    Share(f64),
    /// Requests that arrive before a time.
    Until {
        /// Time from the first arrival.
        time_us: u64,
    },
}

/// Policy that selects the worker of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Routing {
    /// In turn.
    #[default]
    #[serde(alias = "round_robin")]
    RoundRobin,
    /// The worker with the least load.
    #[serde(alias = "least_loaded")]
    LeastLoaded,
    /// The worker of the session's earlier requests; for a first request the least loaded. Requests
    /// without a session form a group if their prompts begin with the same block.
    #[serde(alias = "session_affine")]
    SessionAffine,
    /// The worker with the longest cached prefix, as reported by KV events, unless its load is much
    /// higher than that of the others.
    #[serde(alias = "prefix_aware")]
    PrefixAware {
        /// Number of cached prompt tokens that outweigh one token of load: 0 considers only the
        /// prefix.
        load_weight: f64,
    },
}

/// Arrival of requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Arrival {
    /// At the times of the trace.
    Trace {
        /// Speed relative to the trace: 2 halves every gap.
        speed_up: f64,
    },
    /// In the order of the trace, with a fixed number of live requests.
    ClosedLoop {
        /// Number of live requests.
        concurrency: u32,
    },
}

/// Performance of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConfig {
    /// Time of each transfer beside its bytes.
    pub latency_us: u64,
    /// Bandwidth.
    pub bytes_per_second: u64,
}

/// The links of one worker; the directions are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LinksConfig {
    /// Host to device: load-backs.
    pub host_to_device: LinkConfig,
    /// Device to host: write-backs.
    pub device_to_host: LinkConfig,
    /// L3 to host: prefetches.
    pub l3_to_host: LinkConfig,
    /// Host to L3: backups.
    pub host_to_l3: LinkConfig,
}

/// The shared store.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreConfig {
    /// Capacity in pages, with LRU eviction; unlimited if absent.
    pub pages_max: Option<u64>,
    /// Time of a lookup.
    pub probe_latency_us: u64,
    /// Read bandwidth of all workers together.
    pub read: LinkConfig,
    /// Write bandwidth of all workers together.
    pub write: LinkConfig,
    /// Share of lookups that fail.
    pub probe_failure_rate: f64,
    /// Share of reads that fail.
    pub read_failure_rate: f64,
    /// Share of reads that return only a prefix of their pages.
    pub short_read_rate: f64,
    /// Share of writes that fail.
    pub write_failure_rate: f64,
}

/// Default number of tokens in a page.
const PAGE_SIZE: u32 = 16;
/// Default model.
pub const DEFAULT_MODEL: ModelSpec = ModelSpec::LLAMA_3_1_8B;
/// Default GPU.
pub const DEFAULT_GPU: Gpu = Gpu::H100;
/// Default number of GPUs per worker.
pub const DEFAULT_GPUS: u32 = 1;
/// Largest number of simulated workers.
pub const WORKERS_MAX: u32 = 1024;
/// Largest device or host tier, in tokens.
pub const TIER_TOKENS_MAX: u64 = 1 << 36;

impl Default for Config {
    fn default() -> Self {
        Self::for_machine(&DEFAULT_MODEL, &DEFAULT_GPU, DEFAULT_GPUS)
    }
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self { routing: Routing::default(), decode_weight: 0.25, event_delay_us: 5_000 }
    }
}

impl Default for WarmUp {
    fn default() -> Self {
        Self::Share(0.1)
    }
}

impl Default for Arrival {
    fn default() -> Self {
        Self::Trace { speed_up: 1.0 }
    }
}

impl Default for LinksConfig {
    fn default() -> Self {
        Self::of_machine(&DEFAULT_MODEL, &DEFAULT_GPU, DEFAULT_GPUS, &Copies::default())
    }
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            pages_max: None,
            probe_latency_us: 200,
            read: LinkConfig { latency_us: 300, bytes_per_second: 200_000_000_000 },
            write: LinkConfig { latency_us: 300, bytes_per_second: 200_000_000_000 },
            probe_failure_rate: 0.0,
            read_failure_rate: 0.0,
            short_read_rate: 0.0,
            write_failure_rate: 0.0,
        }
    }
}

/// Copies of pages between host and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    /// Copy method.
    pub way: CopyWay,
    /// Consecutive bytes of a page in GPU memory; derived from the model if absent.
    pub piece_bytes: Option<u64>,
    /// Tokens in a page.
    pub page_size: u32,
}

impl Default for Copies {
    fn default() -> Self {
        Self { way: CopyWay::default(), piece_bytes: None, page_size: PAGE_SIZE }
    }
}

impl LinksConfig {
    /// Returns the links of a worker with a model on `tensor_parallel` GPUs. Each GPU has its own
    /// link to the host and its own network adapter. KV that several GPUs replicate is sent to each
    /// of them, so the combined bandwidth counts only distinct parts.
    #[must_use]
    pub fn of_machine(model: &ModelSpec, gpu: &Gpu, tensor_parallel: u32, copies: &Copies) -> Self {
        let piece_bytes =
            copies.piece_bytes.unwrap_or(model.piece_bytes(copies.page_size, tensor_parallel));
        let peak = gpu.host_bytes_per_second as f64;
        let copy = |reached: f64| LinkConfig {
            latency_us: 20,
            bytes_per_second: (reached * model.kv_parts(tensor_parallel)) as u64,
        };
        let network = LinkConfig {
            latency_us: 100,
            bytes_per_second: gpu.network_bytes_per_second * u64::from(tensor_parallel),
        };
        Self {
            host_to_device: copy(copies.way.to_device(piece_bytes, peak)),
            device_to_host: copy(copies.way.to_host(piece_bytes, peak)),
            l3_to_host: network,
            host_to_l3: network,
        }
    }
}

impl Config {
    /// Returns the configuration of one worker with a model on `tensor_parallel` GPUs, with costs,
    /// links and sizes derived from both. The device tier holds [what
    /// fits](ModelSpec::device_tokens), the host tier four times that, and L3 is unlimited.
    #[must_use]
    pub fn for_machine(model: &ModelSpec, gpu: &Gpu, tensor_parallel: u32) -> Self {
        let page_size = PAGE_SIZE;
        let batch = BatchConfig { repeats_max: 255, ..BatchConfig::default() };
        let device_tokens = model.device_tokens(gpu, tensor_parallel, batch.step_tokens_max);
        let device_tokens = device_tokens.max(u64::from(page_size));
        let device_pages = (device_tokens / u64::from(page_size)).min(1 << 28) as u32;
        let scheduler = SchedulerConfig {
            cache: CacheConfig {
                page_size,
                device_pages,
                host_pages: device_pages * 4,
                ..CacheConfig::default()
            },
            batch,
            queue: QueueConfig {
                requests_max: 1 << 24,
                share_wait_max_ms: 600_000,
                share_stall_max_ms: 600_000,
                ..QueueConfig::default()
            },
            l3: Some(replay_l3()),
            ..SchedulerConfig::default()
        };
        Self {
            model: model.name.to_owned(),
            gpu: gpu.name.to_owned(),
            workers: 1,
            gpus: tensor_parallel,
            also: Vec::new(),
            prefill_workers: 0,
            outages: Vec::new(),
            router: RouterConfig::default(),
            arrival: Arrival::default(),
            sessions: Sessions::default(),
            warm_up: WarmUp::default(),
            slo: Slo::default(),
            prices: Prices { gpu_hour: gpu.hour_price, ..Prices::default() },
            waiting_max: 8,
            scheduler,
            rates: None,
            cost: CostModel::of_machine(model, gpu, tensor_parallel),
            kv_bytes_per_token: model.kv_bytes_per_token(),
            links: LinksConfig::of_machine(model, gpu, tensor_parallel, &Copies::default()),
            store: StoreConfig::default(),
            seed: 0,
        }
    }

    /// Returns a readable name of the model and its hardware; that of the first worker group.
    #[must_use]
    pub fn machine(&self) -> String {
        let others = if self.also.is_empty() { "" } else { " and others" };
        format!("{} on {} x {}{others}", self.model, self.gpus, self.gpu.to_uppercase())
    }

    /// Returns the bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.kv_bytes_per_token * u64::from(self.scheduler.cache.page_size)
    }

    /// Checks that this configuration can be replayed.
    ///
    /// # Errors
    /// Returns the first invalid setting and its limits.
    pub fn check(&self) -> Result<(), ReplayError> {
        self.scheduler.check()?;
        let refuse =
            |setting, value: String, limits| Err(ReplayError::Setting { setting, value, limits });
        let workers = self.workers_in_all();
        if self.workers == 0 || !(1..=WORKERS_MAX).contains(&workers) {
            return refuse("workers", workers.to_string(), "use 1 to 1024");
        }
        self.check_cluster()?;
        match self.arrival {
            Arrival::Trace { speed_up } if !(1e-6..=1e9).contains(&speed_up) => {
                return refuse("arrival.speed_up", speed_up.to_string(), "use 0.000001 to 1e9");
            }
            Arrival::ClosedLoop { concurrency } if !(1..=1 << 24).contains(&concurrency) => {
                let value = concurrency.to_string();
                return refuse("arrival.concurrency", value, "use 1 to 16777216");
            }
            Arrival::Trace { .. } | Arrival::ClosedLoop { .. } => {}
        }
        if let Routing::PrefixAware { load_weight } = self.router.routing
            && !(0.0..=1e6).contains(&load_weight)
        {
            let value = load_weight.to_string();
            return refuse("router.routing.load_weight", value, "use 0 to 1000000");
        }
        if !(0.0..=1e6).contains(&self.router.decode_weight) {
            let value = self.router.decode_weight.to_string();
            return refuse("router.decode_weight", value, "use 0 to 1000000");
        }
        if self.router.event_delay_us > 3_600_000_000 {
            let value = self.router.event_delay_us.to_string();
            return refuse("router.event_delay_us", value, "use at most an hour");
        }
        if let WarmUp::Share(share) = self.warm_up
            && !(0.0..1.0).contains(&share)
        {
            return refuse(
                "warm_up",
                share.to_string(),
                "use a share of at least 0 and less than 1",
            );
        }
        let positive = |limit: Option<f64>| limit.is_none_or(|ms| ms > 0.0 && ms <= 1e9);
        if !positive(self.slo.ttft_ms) || !positive(self.slo.tpot_ms) {
            let value = format!("{:?} and {:?}", self.slo.ttft_ms, self.slo.tpot_ms);
            return refuse("slo", value, "use times above 0");
        }
        if !(0.0..=1.0).contains(&self.slo.share) {
            return refuse("slo.share", self.slo.share.to_string(), "use 0 to 1");
        }
        let prices = [self.prices.gpu_hour, self.prices.host_gb_month, self.prices.l3_gb_month];
        if prices.iter().any(|price| !(0.0..=1e9).contains(price)) {
            return refuse("prices", format!("{prices:?}"), "use 0 to 1e9");
        }
        if self.waiting_max == 0 {
            return refuse("waiting_max", "0".to_owned(), "use at least 1");
        }
        if self.scheduler.model.ranks != 1 {
            let value = self.scheduler.model.ranks.to_string();
            return refuse(
                "scheduler.model.ranks",
                value,
                "use 1: the cost model includes the ranks",
            );
        }
        if self.scheduler.batch.decode_tokens != 1 {
            let value = self.scheduler.batch.decode_tokens.to_string();
            return refuse(
                "scheduler.batch.decode_tokens",
                value,
                "use 1: speculative decoding is not simulated",
            );
        }
        if self.scheduler.copies.load_back_overlaps {
            return refuse(
                "scheduler.copies.load_back_overlaps",
                "true".to_owned(),
                "leave it out: layers are not simulated",
            );
        }
        if !(1..=1 << 32).contains(&self.kv_bytes_per_token) {
            let value = self.kv_bytes_per_token.to_string();
            return refuse("kv_bytes_per_token", value, "use 1 to 4294967296");
        }
        if self.store.pages_max.is_some_and(|pages| !(1..=u64::from(u32::MAX / 2)).contains(&pages))
        {
            let value = self.store.pages_max.unwrap_or(0).to_string();
            return refuse("store.pages_max", value, "use 1 to 2147483647, or leave it out");
        }
        let rates = [
            ("store.probe_failure_rate", self.store.probe_failure_rate),
            ("store.read_failure_rate", self.store.read_failure_rate),
            ("store.short_read_rate", self.store.short_read_rate),
            ("store.write_failure_rate", self.store.write_failure_rate),
        ];
        if let Some((setting, rate)) = rates.iter().find(|(_, rate)| !(0.0..=1.0).contains(rate)) {
            return refuse(setting, rate.to_string(), "use 0 to 1");
        }
        let pages = u64::from(self.scheduler.cache.device_pages)
            + u64::from(self.scheduler.cache.host_pages);
        let further = self.also.iter().map(|group| {
            let pages = u64::from(group.device_pages) + u64::from(group.host_pages);
            u64::from(group.workers) * pages
        });
        if u64::from(self.workers) * pages + further.sum::<u64>() > 1 << 30 {
            let value = format!("{} of {pages} pages", self.workers);
            return refuse("workers", value, "use at most 2^30 pages on device and host together");
        }
        if self.store.probe_latency_us > 3_600_000_000 {
            let value = self.store.probe_latency_us.to_string();
            return refuse("store.probe_latency_us", value, "use at most an hour");
        }
        let links = [
            ("links.host_to_device", self.links.host_to_device),
            ("links.device_to_host", self.links.device_to_host),
            ("links.l3_to_host", self.links.l3_to_host),
            ("links.host_to_l3", self.links.host_to_l3),
            ("store.read", self.store.read),
            ("store.write", self.store.write),
        ];
        for (setting, link) in links {
            let in_limits = (1_000..=1 << 50).contains(&link.bytes_per_second)
                && link.latency_us <= 3_600_000_000;
            if !in_limits {
                let value = format!("{link:?}");
                return refuse(setting, value, "use 1000 to 2^50 bytes/s and at most an hour");
            }
        }
        self.cost.check()
    }
}

/// Returns an L3 configuration that reads all it can and waits for it, so that the benefit of a
/// tier is visible; its cost shows in the latencies.
fn replay_l3() -> L3Config {
    L3Config {
        prefetch_threshold_pages: 1,
        prefetch: PrefetchPolicy::Wait { max_ms: 60_000 },
        ..L3Config::default()
    }
}
