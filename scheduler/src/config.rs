//! Configuration: by builder, or by serde from TOML or JSON, checked either way.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrace_cache::{CacheConfig, EvictionKind, Namespace, WritePolicy};

use crate::admission_order::AdmissionOrder;
use crate::error::ConfigError;

/// All settings. The default is a small device-only cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Properties of the model that KV depends on.
    pub model: ModelConfig,
    /// Page pools, eviction and write policy.
    pub cache: CacheConfig,
    /// Limits and contents of a forward step.
    pub batch: BatchConfig,
    /// Queue of requests and their order of admission.
    pub queue: QueueConfig,
    /// Copies between device and host.
    pub copies: CopyConfig,
    /// L3, the third tier; none by default.
    pub l3: Option<L3Config>,
    /// Speeds that are assumed until they are measured.
    pub rates: RateConfig,
    /// Maximum number of recorded state transitions for [`drain_trace`](crate::Scheduler::drain_trace); 0 records
    /// none.
    pub trace_max: u32,
}

/// Properties of the model that KV depends on, besides tokens, adapter and tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Name of the model and its weights. It must change whenever the weights change.
    pub fingerprint: String,
    /// Layout of the KV in a page.
    pub layout: String,
    /// Element type of the KV.
    pub dtype: String,
    /// Number of ranks that a page's KV is split over. All of them perform every operation.
    pub ranks: u32,
    /// Secret that all users of an L3 share, see [`Namespace::secret`]. Recordings of the configuration contain it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub secret: String,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            fingerprint: "model".to_owned(),
            layout: String::new(),
            dtype: String::new(),
            ranks: 1,
            secret: String::new(),
        }
    }
}

/// Limits and contents of a forward step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    /// Maximum number of running requests: rows of the engine's page table.
    pub running_max: u32,
    /// Maximum number of tokens in a step. Tokens far into a prompt count for more than one each, see
    /// `context_tokens`.
    pub step_tokens_max: u32,
    /// A prompt token at a position above this one counts for more in a step, in proportion to the position, because
    /// it attends to all tokens before it. So steps take about as long at the end of a long prompt as at its start.
    /// With 0 all tokens count the same.
    pub context_tokens: u32,
    /// Minimum number of tokens in a step for prompts that it cannot finish. Together they get at most what is
    /// computed in a quarter of the expected time until the next request, so that new requests do not wait for long.
    /// With `step_tokens_max` there is no such limit.
    pub chunk_tokens_min: u32,
    /// Lets prefill chunks and decodes share a step.
    pub mixed: bool,
    /// Percentage of the prompt tokens of a step for the prompts with the least left to compute; the rest is shared
    /// by turn. So no prompt waits for the whole of a longer one. A request that is admitted early for this leaves
    /// the first in the queue its memory. With 0 short prompts wait for long ones.
    pub shortest_first_percent: u32,
    /// Maximum number of consecutive steps with prefills alone; decodes are next.
    pub prefill_streak_max: u32,
    /// Tokens that a decode computes in one step: 1, or more for speculative decoding.
    pub decode_tokens: u32,
    /// Maximum number of repetitions of a step of decodes before the engine reports it, see [`Plan::repeats_max`].
    /// Requires steps without speculative decoding.
    ///
    /// [`Plan::repeats_max`]: crate::Plan::repeats_max
    pub repeats_max: u32,
    /// Maximum number of steps in flight. With 2 the next step is planned, and can be launched, while one runs, so
    /// that the device does not wait for plans. Requires steps without speculative decoding and repetitions.
    pub steps_in_flight_max: u32,
    /// Maximum number of different adapters in a step; 0 for no limit. Requests without an adapter do not count.
    pub adapters_max: u32,
    /// Device pages held back for each running request when another is admitted.
    pub decode_reserve_pages: u32,
    /// A request fails after this number of failed steps in a row.
    pub step_failures_max: u32,
}

impl Default for BatchConfig {
    fn default() -> Self {
        Self {
            running_max: 256,
            step_tokens_max: 8192,
            context_tokens: 49_152,
            chunk_tokens_min: 128,
            mixed: true,
            shortest_first_percent: 75,
            prefill_streak_max: 8,
            decode_tokens: 1,
            repeats_max: 0,
            steps_in_flight_max: 1,
            adapters_max: 0,
            decode_reserve_pages: 1,
            step_failures_max: 3,
        }
    }
}

impl BatchConfig {
    /// Maximum length of a passage that is not cut: a step has room for it beside all decodes.
    #[must_use]
    pub fn passage_tokens_max(&self) -> u32 {
        // A request that prefills does not decode.
        let decodes = if self.mixed { (self.running_max - 1) * self.decode_tokens } else { 0 };
        self.step_tokens_max - decodes
    }
}

/// Queue of requests and their order of admission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueueConfig {
    /// Order of admission.
    pub order: AdmissionOrder,
    /// Maximum number of live requests, waiting and running.
    pub requests_max: u32,
    /// Maximum number of queued requests that a plan considers.
    pub window: u32,
    /// Age from which a request is first in the queue, in milliseconds. Only requests that may
    /// [preempt](Self::preempt_margin) it overtake it.
    pub wait_max_ms: u64,
    /// Maximum time that a request waits for others that compute or load its prefix. For siblings it waits as long as
    /// they progress.
    pub share_wait_max_ms: u64,
    /// Maximum time of such a wait without progress of the cached prefix.
    pub share_stall_max_ms: u64,
    /// Maximum time before a request runs; 0 for no limit.
    pub start_timeout_ms: u64,
    /// Lets the running request of the lowest priority give up its place to a queued one of higher priority that has
    /// no other place. Requires admission by priority.
    pub preempts: bool,
    /// A running request of [great age](Self::wait_max_ms) gives up its place only to one whose priority is higher by
    /// at least this margin.
    pub preempt_margin: u32,
}

impl QueueConfig {
    /// Priority from which others overtake and preempt a request, by its age.
    pub(crate) fn priority_by_age(&self, priority: i32, is_overdue: bool) -> i32 {
        match is_overdue {
            true if self.preempts => priority.saturating_add_unsigned(self.preempt_margin),
            true => i32::MAX,
            false => priority.saturating_add(1),
        }
    }
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            order: AdmissionOrder::Arrival,
            requests_max: 65_536,
            window: 64,
            wait_max_ms: 10_000,
            share_wait_max_ms: 60_000,
            share_stall_max_ms: 1_000,
            start_timeout_ms: 0,
            preempts: false,
            preempt_margin: 10,
        }
    }
}

/// Copies between device and host. The shares are separate, so that none starves another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CopyConfig {
    /// Load-backs of fewer pages than this are not worth it: the pages are recomputed.
    pub load_back_threshold_pages: u32,
    /// Maximum number of pages in flight to the device.
    pub load_back_pages_max: u32,
    /// Maximum time that a request waits for its load-back before it recomputes the pages.
    pub load_back_timeout_ms: u64,
    /// Lets a request be part of steps while its load-back is in flight. [`Prefill::waits_for`] names the load-back,
    /// and the engine reads a layer of its pages only after that layer has arrived. The results count when both are
    /// reported as sound. After a load-back that failed or was late, none overlaps until one is sound again.
    ///
    /// [`Prefill::waits_for`]: crate::Prefill::waits_for
    pub load_back_overlaps: bool,
    /// Maximum number of pages in flight to host.
    pub write_back_pages_max: u32,
    /// Maximum time that a completed request waits for its write-back before it ends.
    pub write_back_timeout_ms: u64,
}

impl Default for CopyConfig {
    fn default() -> Self {
        Self {
            load_back_threshold_pages: 1,
            load_back_pages_max: 65_536,
            load_back_timeout_ms: 10_000,
            load_back_overlaps: false,
            write_back_pages_max: 65_536,
            write_back_timeout_ms: 60_000,
        }
    }
}

/// Time that a request waits for its prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum PrefetchPolicy {
    /// The time that the prefetch should take at the measured speed, which is less than recomputing takes. After that
    /// it continues while the request is queued for admission.
    #[serde(alias = "best_effort")]
    BestEffort,
    /// Until the prefetch has ended, at most this time.
    Wait {
        /// Bound for a prefetch whose outcome never arrives.
        max_ms: u64,
    },
    /// A time in proportion to the number of pages.
    Deadline {
        /// Time for any prefetch.
        base_ms: u64,
        /// Additional time for each page.
        per_page_us: u64,
    },
}

/// L3, the third tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct L3Config {
    /// Prefetches of fewer pages than this are not worth it.
    pub prefetch_threshold_pages: u32,
    /// Time that a request waits for its prefetch.
    pub prefetch: PrefetchPolicy,
    /// Maximum number of host pages that prefetches hold, late ones and those of queued requests included. It is at
    /// most three quarters of the host.
    pub prefetch_pages_max: u32,
    /// Maximum number of those pages that belong to prefetches without a waiting request. At this number no further
    /// prefetch starts. It is at most half of the share, so that a store that hangs does not take all of it.
    pub quarantine_pages_max: u32,
    /// Maximum number of probes in flight.
    pub probes_max: u32,
    /// Maximum time that a request waits for its probe.
    pub probe_timeout_ms: u64,
    /// Stores host pages in L3.
    pub backup: bool,
    /// Maximum number of pages in flight to L3. It is at most three quarters of the host.
    pub backup_pages_max: u32,
    /// Maximum number of queued backups; the oldest are dropped.
    pub backup_queue_max: u32,
    /// Time for which L3 is assumed to keep a page, and at most twice as long. A page that is used after that is
    /// offered to L3 again, and stored if L3 has lost it. With 0 L3 is assumed to keep all pages.
    pub doubt_after_ms: u64,
    /// Time for which a page that L3 failed to deliver is not requested again.
    pub negative_ttl_ms: u64,
    /// Maximum number of such pages.
    pub negative_max: u32,
    /// First back-off after a failure. Each further failure doubles it.
    pub backoff_base_ms: u64,
    /// Maximum back-off.
    pub backoff_max_ms: u64,
}

impl Default for L3Config {
    fn default() -> Self {
        Self {
            prefetch_threshold_pages: 4,
            prefetch: PrefetchPolicy::Deadline { base_ms: 500, per_page_us: 500 },
            prefetch_pages_max: 16_384,
            quarantine_pages_max: 8_192,
            probes_max: 64,
            probe_timeout_ms: 200,
            backup: true,
            backup_pages_max: 16_384,
            backup_queue_max: 1_024,
            doubt_after_ms: 600_000,
            negative_ttl_ms: 10_000,
            negative_max: 65_536,
            backoff_base_ms: 100,
            backoff_max_ms: 30_000,
        }
    }
}

/// Speeds that are assumed until they are measured. They set the price of loading against recomputing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RateConfig {
    /// Time to compute one prompt token.
    pub prefill_ns_per_token: u64,
    /// Time to copy one page from host to device.
    pub load_back_ns_per_page: u64,
    /// Time to fetch one page from L3 to host.
    pub prefetch_ns_per_page: u64,
    /// Additional time of any prefetch.
    pub prefetch_latency_us: u64,
}

impl Default for RateConfig {
    fn default() -> Self {
        Self {
            prefill_ns_per_token: 50_000,
            load_back_ns_per_page: 20_000,
            prefetch_ns_per_page: 100_000,
            prefetch_latency_us: 2_000,
        }
    }
}

impl Config {
    /// Makes a builder with the default settings.
    #[must_use]
    pub fn builder() -> ConfigBuilder {
        ConfigBuilder { config: Config::default() }
    }

    /// Namespace of requests without adapter and salt.
    #[must_use]
    pub fn namespace(&self) -> Namespace {
        Namespace {
            model: self.model.fingerprint.clone(),
            layout: self.model.layout.clone(),
            dtype: self.model.dtype.clone(),
            page_size: self.cache.page_size,
            tensor_ranks: self.model.ranks,
            adapter: String::new(),
            salt: String::new(),
            secret: self.model.secret.clone(),
        }
    }

    /// Maximum number of host pages that L3 transfers of one kind hold: never all, so that write-backs find room.
    pub(crate) fn most_of_host(&self) -> u32 {
        self.cache.host_pages - self.cache.host_pages / 4
    }

    /// Checks that this configuration can work.
    ///
    /// # Errors
    /// The first setting that cannot work, and what to change.
    pub fn check(&self) -> Result<(), ConfigError> {
        let page_size = self.cache.page_size;
        if !page_size.is_power_of_two() || page_size > 256 {
            return Err(ConfigError::new(
                "cache.page_size",
                page_size.into(),
                "use a power of two from 1 to 256",
            ));
        }
        let at_least_one = [
            ("cache.device_pages", self.cache.device_pages),
            ("batch.running_max", self.batch.running_max),
            ("batch.step_tokens_max", self.batch.step_tokens_max),
            ("batch.chunk_tokens_min", self.batch.chunk_tokens_min),
            ("batch.prefill_streak_max", self.batch.prefill_streak_max),
            ("batch.decode_tokens", self.batch.decode_tokens),
            ("batch.step_failures_max", self.batch.step_failures_max),
            ("queue.requests_max", self.queue.requests_max),
            ("queue.window", self.queue.window),
            ("queue.preempt_margin", self.queue.preempt_margin),
            ("copies.load_back_threshold_pages", self.copies.load_back_threshold_pages),
            ("copies.load_back_pages_max", self.copies.load_back_pages_max),
            ("copies.write_back_pages_max", self.copies.write_back_pages_max),
        ];
        positive(&at_least_one)?;
        if !(1..=64).contains(&self.model.ranks) {
            return Err(ConfigError::new("model.ranks", self.model.ranks.into(), "use 1 to 64"));
        }
        if self.batch.shortest_first_percent > 100 {
            return Err(ConfigError::new(
                "batch.shortest_first_percent",
                self.batch.shortest_first_percent.into(),
                "use 0 to 100",
            ));
        }
        let decodes = u64::from(self.batch.running_max) * u64::from(self.batch.decode_tokens);
        if decodes > self.batch.step_tokens_max.into() {
            return Err(ConfigError::new(
                "batch.step_tokens_max",
                self.batch.step_tokens_max.into(),
                "raise it to at least batch.running_max x batch.decode_tokens, so that all decodes \
                 fit into a step",
            ));
        }
        if self.batch.decode_tokens > 1 && self.batch.repeats_max > 0 {
            return Err(ConfigError::new(
                "batch.repeats_max",
                self.batch.repeats_max.into(),
                "use 0 with batch.decode_tokens above 1: how many draft tokens are accepted is \
                 known only after the step",
            ));
        }
        self.check_steps_in_flight()?;
        if self.queue.preempts && self.queue.order != AdmissionOrder::Priority {
            return Err(ConfigError::new(
                "queue.preempts",
                1,
                "preemption needs queue.order = \"priority\": otherwise a preempted request is \
                 admitted again at once",
            ));
        }
        let threshold = self.copies.load_back_threshold_pages;
        if threshold > self.copies.load_back_pages_max {
            return Err(ConfigError::new(
                "copies.load_back_threshold_pages",
                threshold.into(),
                "it exceeds copies.load_back_pages_max, so nothing would ever be loaded: lower it",
            ));
        }
        match self.cache.write_policy {
            WritePolicy::SelectiveWriteThrough { hits: 0 } => {
                return Err(ConfigError::new(
                    "cache.write_policy.selective-write-through.hits",
                    0,
                    "use at least 1, or write-through",
                ));
            }
            WritePolicy::SelectiveWriteThrough { .. }
            | WritePolicy::WriteThrough
            | WritePolicy::WriteBack => {}
        }
        self.l3.as_ref().map_or(Ok(()), |l3| self.check_l3(l3))
    }

    fn check_steps_in_flight(&self) -> Result<(), ConfigError> {
        let BatchConfig { steps_in_flight_max, decode_tokens, repeats_max, .. } = self.batch;
        let refused = |advice| {
            let steps = u64::from(steps_in_flight_max);
            Err(ConfigError::new("batch.steps_in_flight_max", steps, advice))
        };
        match steps_in_flight_max {
            1 => Ok(()),
            2 if decode_tokens > 1 => refused(
                "use 1 with batch.decode_tokens above 1: where the next step begins is known only \
                 after the draft was verified",
            ),
            2 if repeats_max > 0 => refused(
                "use 1 with batch.repeats_max: repetition and steps in flight exclude each other",
            ),
            2 => Ok(()),
            _ => refused("use 1 or 2"),
        }
    }

    fn check_l3(&self, l3: &L3Config) -> Result<(), ConfigError> {
        if self.cache.host_pages == 0 {
            return Err(ConfigError::new(
                "cache.host_pages",
                0,
                "L3 needs host pages for its transfers: raise it, or leave out [l3]",
            ));
        }
        positive(&[
            ("l3.prefetch_threshold_pages", l3.prefetch_threshold_pages),
            ("l3.prefetch_pages_max", l3.prefetch_pages_max),
            ("l3.quarantine_pages_max", l3.quarantine_pages_max),
            ("l3.probes_max", l3.probes_max),
            ("l3.backup_pages_max", l3.backup_pages_max),
            ("l3.backup_queue_max", l3.backup_queue_max),
        ])?;
        if l3.probe_timeout_ms == 0 {
            return Err(ConfigError::new(
                "l3.probe_timeout_ms",
                0,
                "use at least 1, or leave out [l3]: with 0 every L3 call would time out",
            ));
        }
        let threshold = l3.prefetch_threshold_pages;
        if threshold > l3.prefetch_pages_max {
            return Err(ConfigError::new(
                "l3.prefetch_threshold_pages",
                threshold.into(),
                "it exceeds l3.prefetch_pages_max, so nothing would ever be prefetched: lower it",
            ));
        }
        if threshold > self.cache.host_pages {
            return Err(ConfigError::new(
                "l3.prefetch_threshold_pages",
                threshold.into(),
                "it exceeds cache.host_pages, so nothing would ever be prefetched: lower it",
            ));
        }
        if l3.backoff_base_ms > l3.backoff_max_ms {
            return Err(ConfigError::new(
                "l3.backoff_base_ms",
                l3.backoff_base_ms,
                "it exceeds l3.backoff_max_ms: lower it",
            ));
        }
        Ok(())
    }
}

fn positive(settings: &[(&'static str, u32)]) -> Result<(), ConfigError> {
    match settings.iter().find(|(_, value)| *value == 0) {
        Some((setting, _)) => Err(ConfigError::new(setting, 0, "use at least 1")),
        None => Ok(()),
    }
}

/// Builds a [`Config`] step by step.
///
/// ```
/// use terrace_scheduler::{Config, L3Config};
///
/// let config = Config::builder()
///     .page_size(64)
///     .device_pages(10_000)
///     .host_pages(100_000)
///     .l3(L3Config::default())
///     .build()?;
/// assert_eq!(config.cache.page_size, 64);
///
/// let error = Config::builder().page_size(48).build().unwrap_err();
/// assert_eq!(error.to_string(), "cache.page_size = 48: use a power of two from 1 to 256");
/// # Ok::<(), terrace_scheduler::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ConfigBuilder {
    config: Config,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $($field:ident).+;)*) => {
        impl ConfigBuilder {
            $(
                $(#[$doc])*
                #[must_use]
                pub fn $name(mut self, $name: $type) -> Self {
                    self.config.$($field).+ = $name.into();
                    self
                }
            )*
        }
    };
}

setters! {
    /// Name of the model and its weights. It must change whenever the weights change.
    fingerprint: &str => model.fingerprint;
    /// Number of ranks that a page's KV is split over.
    ranks: u32 => model.ranks;
    /// Secret that all users of an L3 share.
    secret: &str => model.secret;
    /// Tokens in a page.
    page_size: u32 => cache.page_size;
    /// Pages of the device arena.
    device_pages: u32 => cache.device_pages;
    /// Pages of the host arena.
    host_pages: u32 => cache.host_pages;
    /// Eviction policy.
    eviction: EvictionKind => cache.eviction;
    /// Write policy: the time at which device pages are copied to host.
    write_policy: WritePolicy => cache.write_policy;
    /// Maximum number of page keys in KV events that are not drained.
    kv_event_keys_max: u32 => cache.kv_event_keys_max;
    /// Limits and contents of a forward step.
    batch: BatchConfig => batch;
    /// Queue of requests and their order of admission.
    queue: QueueConfig => queue;
    /// Copies between device and host.
    copies: CopyConfig => copies;
    /// L3, the third tier.
    l3: L3Config => l3;
    /// Speeds that are assumed until they are measured.
    rates: RateConfig => rates;
    /// Maximum number of recorded state transitions.
    trace_max: u32 => trace_max;
}

impl ConfigBuilder {
    /// Returns the configuration.
    ///
    /// # Errors
    /// The first setting that cannot work, and what to change.
    pub fn build(self) -> Result<Config, ConfigError> {
        self.config.check()?;
        Ok(self.config)
    }
}

pub(crate) fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}
