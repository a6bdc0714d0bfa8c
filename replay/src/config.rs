//! What a replay is told: the machines, the schedulers that run on them, and how requests arrive.

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

/// Everything that can be set about a replay. The same trace and the same configuration give the
/// same report, to the byte.
///
/// The default is one worker with Llama 3.1 8B on one H100, a host tier of four times the device, and
/// an L3 without a limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What the model is called. What it costs is told below.
    pub model: String,
    /// What the GPU is called.
    pub gpu: String,
    /// Workers, each with a device and a host tier of its own. They share one L3.
    pub workers: u32,
    /// GPUs of each worker: what they cost depends on it.
    pub gpus: u32,
    /// Further workers of other kinds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<WorkerGroup>,
    /// So many workers, the first, compute prompts only, and the others only decode; 0 if all do both. KV
    /// goes from one to the other through host memory and L3.
    pub prefill_workers: u32,
    /// When workers are not there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outages: Vec<Outage>,
    /// Which worker a request goes to.
    pub router: RouterConfig,
    /// How requests arrive.
    pub arrival: Arrival,
    /// Whether turns of a session wait for the answers before them.
    pub sessions: Sessions,
    /// Requests that come first are not measured: they find empty caches.
    pub warm_up: WarmUp,
    /// What users are promised.
    pub slo: Slo,
    /// What hardware costs.
    pub prices: Prices,
    /// Requests that wait at a worker's scheduler at the most; further ones wait before it, in the
    /// order of their arrival. A scheduler looks into L3 when it is given a request, so one that is
    /// given hours too early finds too little, and holds memory for nothing.
    pub waiting_max: u32,
    /// The scheduler of each worker. Replay sets what it needs itself: KV events, transitions, and
    /// the assumed rates where they are left at `None` in [`Config::rates`].
    pub scheduler: SchedulerConfig,
    /// What the schedulers assume about speed until they have measured it; without it, what the
    /// model of costs and links says.
    pub rates: Option<RateConfig>,
    /// How long a step takes.
    pub cost: CostModel,
    /// Bytes of KV for one token, each counted once however many ranks have it.
    pub kv_bytes_per_token: u64,
    /// The links of each worker.
    pub links: LinksConfig,
    /// The store that all workers share. Used only if the scheduler's configuration has an L3.
    pub store: StoreConfig,
    /// What the dice of failures start from.
    pub seed: u64,
}

/// How requests are sent to workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RouterConfig {
    /// By what they are sent.
    pub routing: Routing,
    /// What a token of the prompt of a request that is alive counts for, as a share of one that has yet
    /// to be computed: whoever decodes reads it in every step.
    pub decode_weight: f64,
    /// How long what a worker tells of its cache takes to arrive.
    pub event_delay_us: u64,
}

/// Whether turns of a session wait for the answers before them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sessions {
    /// They do, and then for as long as their user thinks. Where `speed_up` changes the pace, sessions begin
    /// sooner or later, and users think as long as ever.
    #[default]
    Wait,
    /// All requests come at the times of the trace.
    ByTheClock,
}

/// Which requests are not measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum WarmUp {
    /// The first of them, as a share of all.
    Share(f64),
    /// Those that arrive before this time.
    Until {
        /// Counted from the first arrival.
        time_us: u64,
    },
}

/// Which worker a request goes to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Routing {
    /// One after the other.
    #[default]
    #[serde(alias = "round_robin")]
    RoundRobin,
    /// Where the least is to be done.
    #[serde(alias = "least_loaded")]
    LeastLoaded,
    /// Where earlier requests of its session went; the first of a session where the least is to be
    /// done. Requests without a session belong together if their prompts begin with the same block.
    #[serde(alias = "session_affine")]
    SessionAffine,
    /// Where most of its prompt is cached, as far as KV events tell, unless that worker has much
    /// more to do than the others.
    #[serde(alias = "prefix_aware")]
    PrefixAware {
        /// How many tokens of cached prompt outweigh one token that a worker still has to compute:
        /// 0 looks at the prefix alone.
        load_weight: f64,
    },
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Arrival {
    /// At the times of the trace.
    Trace {
        /// By how much faster than the trace says: 2 halves every gap.
        speed_up: f64,
    },
    /// In the order of the trace, so that so many are alive at any time.
    ClosedLoop {
        /// Requests alive at once.
        concurrency: u32,
    },
}

/// What one link can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConfig {
    /// What every transfer takes besides its bytes.
    pub latency_us: u64,
    /// Bytes that it carries in a second.
    pub bytes_per_second: u64,
}

/// The links of one worker. Each direction is a link of its own.
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

/// The store that all workers share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreConfig {
    /// Pages that it holds at the most, the least recently used going first; without it there is no
    /// limit.
    pub pages_max: Option<u64>,
    /// How long it takes to say which pages it has.
    pub probe_latency_us: u64,
    /// What it delivers to all workers together.
    pub read: LinkConfig,
    /// What it takes from all workers together.
    pub write: LinkConfig,
    /// The share of probes that fail.
    pub probe_failure_rate: f64,
    /// The share of reads that fail.
    pub read_failure_rate: f64,
    /// The share of reads that deliver only the first of their pages.
    pub short_read_rate: f64,
    /// The share of writes that fail.
    pub write_failure_rate: f64,
}

/// Tokens in a page where nothing else is said.
const PAGE_SIZE: u32 = 16;
/// The model where nothing else is said.
pub const DEFAULT_MODEL: ModelSpec = ModelSpec::LLAMA_3_1_8B;
/// The GPU where nothing else is said.
pub const DEFAULT_GPU: Gpu = Gpu::H100;
/// GPUs of a worker where nothing else is said.
pub const DEFAULT_GPUS: u32 = 1;
/// The most workers that are simulated.
pub const WORKERS_MAX: u32 = 1024;
/// The most tokens that a device or host tier may have.
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

/// How pages are copied between host and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    /// The way.
    pub way: CopyWay,
    /// Consecutive bytes of a page in a GPU's memory; without it, what the model's layers have.
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
    /// The links of a worker with a model on so many GPUs. Each GPU has its own way to the host and its
    /// own network adapter; KV that several GPUs have goes to each of them, so that these ways together
    /// carry no more of it than there are different parts.
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
    /// One worker with a model on so many GPUs: costs, links and sizes follow from both. The device
    /// tier has [what fits](ModelSpec::device_tokens), the host four times that, and L3 has no limit.
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

    /// The model and what it runs on, as people say it. Of several kinds of workers it is the first.
    #[must_use]
    pub fn machine(&self) -> String {
        let others = if self.also.is_empty() { "" } else { " and others" };
        format!("{} on {} x {}{others}", self.model, self.gpus, self.gpu.to_uppercase())
    }

    /// Bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.kv_bytes_per_token * u64::from(self.scheduler.cache.page_size)
    }

    /// Whether this configuration can be replayed.
    ///
    /// # Errors
    /// The first setting that cannot, and its limits.
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

/// A store that is asked for everything it might have and waited for, so that what a tier is worth
/// can be seen; what it costs shows in the latencies.
fn replay_l3() -> L3Config {
    L3Config {
        prefetch_threshold_pages: 1,
        prefetch: PrefetchPolicy::Wait { max_ms: 60_000 },
        ..L3Config::default()
    }
}
