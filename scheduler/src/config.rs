//! Configuration: by builder, or by serde from TOML or JSON, checked either way.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrace_cache::{CacheConfig, EvictionKind, Namespace, WritePolicy};

use crate::admission_order::AdmissionOrder;
use crate::error::ConfigError;

/// Everything that can be set. The default is a small device-only cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What KV depends on besides tokens.
    pub model: ModelConfig,
    /// Page pools, eviction and write policy.
    pub cache: CacheConfig,
    /// What goes into one forward step.
    pub batch: BatchConfig,
    /// Who waits, and in which order they are admitted.
    pub queue: QueueConfig,
    /// Copies between device and host.
    pub copies: CopyConfig,
    /// The third tier; without it there is none.
    pub l3: Option<L3Config>,
    /// What is assumed about speed until it has been measured.
    pub rates: RateConfig,
    /// How many state transitions are kept for [`drain_trace`](crate::Scheduler::drain_trace); 0
    /// records none.
    pub trace_max: u32,
}

/// What KV depends on besides tokens, adapter and tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Model and weights: change it whenever the weights change.
    pub fingerprint: String,
    /// How KV lies in a page.
    pub layout: String,
    /// The element type of the KV.
    pub dtype: String,
    /// Over how many ranks a page's KV is split. Every operation is performed by all of them.
    pub ranks: u32,
    /// A secret that all have in common who share an L3: see [`Namespace::secret`]. It is in what is recorded of the
    /// configuration.
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

/// What goes into one forward step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    /// Requests that run at once: rows of the engine's page table.
    pub running_max: u32,
    /// Tokens that one step computes at the most. Those far into a prompt count for more than one each, see
    /// `context_tokens`.
    pub step_tokens_max: u32,
    /// A token of a prompt with more than so many before it counts for more in a step, with twice as many
    /// for two, since it attends to them all: steps take about as long at the end of a long prompt as at its
    /// start. With 0 all count the same.
    pub context_tokens: u32,
    /// Prompts that a step cannot finish get no more of it, all together, than is computed in a quarter of
    /// the time in which another request is expected, so that those who come meanwhile do not wait for long.
    /// So many tokens they get in any case; with `step_tokens_max` as much as there is.
    pub chunk_tokens_min: u32,
    /// Whether prefill chunks and decodes share a step.
    pub mixed: bool,
    /// Of the tokens that a step has for prompts, so many percent go to the prompts with the least left
    /// to compute, and the rest by turn: no prompt waits for all of a longer one. Who is let in for that
    /// leaves the first in line its memory. With 0 short prompts wait for long ones.
    pub shortest_first_percent: u32,
    /// After so many steps of prefill alone the decodes get their turn.
    pub prefill_streak_max: u32,
    /// Tokens that a decode computes in one step: 1, or more for speculative decoding.
    pub decode_tokens: u32,
    /// How often an engine may repeat a step of decodes before it reports: [`Plan::repeats_max`] says when.
    /// Without speculative decoding only.
    ///
    /// [`Plan::repeats_max`]: crate::Plan::repeats_max
    pub repeats_max: u32,
    /// How many steps may be in flight: with 2 the next one is planned, and can be launched, while one runs,
    /// so that the device does not wait for plans. Without speculative decoding and repetitions only.
    pub steps_in_flight_max: u32,
    /// How many different adapters may run at once, and so be part of a step; 0 for any number. Requests without
    /// one do not count.
    pub adapters_max: u32,
    /// Device pages held back for each running request when another is admitted.
    pub decode_reserve_pages: u32,
    /// A request that was part of so many failed steps in a row fails.
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
    /// How many tokens a passage may have that is not to be cut: a step has room for them beside all decodes.
    #[must_use]
    pub fn passage_tokens_max(&self) -> u32 {
        // One who computes its prompt does not decode.
        let decodes = if self.mixed { (self.running_max - 1) * self.decode_tokens } else { 0 };
        self.step_tokens_max - decodes
    }
}

/// Who waits, and in which order they are admitted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueueConfig {
    /// The order of admission.
    pub order: AdmissionOrder,
    /// Requests that may be alive at once, waiting and running.
    pub requests_max: u32,
    /// How many of the waiting a plan looks at.
    pub window: u32,
    /// Who was submitted so long ago goes first, and nobody overtakes them but those that may
    /// [preempt](Self::preempt_margin) them.
    pub wait_max_ms: u64,
    /// How long a request waits at the most for others that compute or load its prefix; for its
    /// siblings it waits as long as they go on.
    pub share_wait_max_ms: u64,
    /// And how long while nothing more of its prefix comes to be there.
    pub share_stall_max_ms: u64,
    /// How long a request may take before it runs; 0 for no limit.
    pub start_timeout_ms: u64,
    /// Whether the least urgent of those who run gives up its place to one in line that is more urgent, if
    /// there is no other for it. With admission by priority only.
    pub preempts: bool,
    /// A running request that was submitted [long ago](Self::wait_max_ms) gives up its place only to one whose priority
    /// is higher by at least this.
    pub preempt_margin: u32,
}

impl QueueConfig {
    /// The priority that a request has by its age: from this priority on, others overtake and preempt it.
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
    /// Fewer pages than this are computed again rather than loaded.
    pub load_back_threshold_pages: u32,
    /// Pages on their way to the device at the most.
    pub load_back_pages_max: u32,
    /// How long a request waits for its load-back before it computes the pages itself.
    pub load_back_timeout_ms: u64,
    /// Whether a request is part of steps while its load-back is under way. [`Prefill::waits_for`] names the
    /// load-back then, and the engine reads no layer of its pages before that layer has arrived. What was computed
    /// counts when both are reported sound. After a load-back that failed or was late none overlaps until one is
    /// sound again.
    ///
    /// [`Prefill::waits_for`]: crate::Prefill::waits_for
    pub load_back_overlaps: bool,
    /// Pages on their way to host at the most.
    pub write_back_pages_max: u32,
    /// How long a request that has all its tokens waits for its write-back before it ends.
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

/// How long a request waits for its prefetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum PrefetchPolicy {
    /// As long as it should take by the measured speed, which is less than computing would, and then
    /// until there is room to run it.
    #[serde(alias = "best_effort")]
    BestEffort,
    /// Until it is over, but no longer than this.
    Wait {
        /// The bound that keeps a lost operation from holding the request for ever.
        max_ms: u64,
    },
    /// As long as so many pages should take.
    Deadline {
        /// For any prefetch.
        base_ms: u64,
        /// And for each page of it.
        per_page_us: u64,
    },
}

/// The third tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct L3Config {
    /// Fewer pages than this are not worth a prefetch.
    pub prefetch_threshold_pages: u32,
    /// How long a request waits for its prefetch.
    pub prefetch: PrefetchPolicy,
    /// Host pages that prefetches may fill at once, late ones and those that wait for their request
    /// included; in any case no more than three quarters of the host.
    pub prefetch_pages_max: u32,
    /// Of those, pages of prefetches that nobody waits for any more; at this many no further
    /// prefetch begins. In any case no more than half of those, so that a store that hangs does not
    /// take the whole share and let later requests stand in line for it.
    pub quarantine_pages_max: u32,
    /// Probes in flight at the most.
    pub probes_max: u32,
    /// How long a request waits for its probe.
    pub probe_timeout_ms: u64,
    /// Whether host pages are stored in L3.
    pub backup: bool,
    /// Pages on their way to L3 at the most; in any case no more than three quarters of the host.
    pub backup_pages_max: u32,
    /// Backups that wait for their turn at the most; the oldest give way.
    pub backup_queue_max: u32,
    /// For how long it is believed that L3 still has what it had, twice that at the most; what is used after
    /// that is offered to it again, and taken if it has lost it. With 0 it is believed for good.
    pub doubt_after_ms: u64,
    /// For how long a page that L3 failed to deliver is not asked for.
    pub negative_ttl_ms: u64,
    /// How many such pages are remembered.
    pub negative_max: u32,
    /// The first pause after a failure; it doubles with each further one.
    pub backoff_base_ms: u64,
    /// The longest pause.
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

/// What is assumed about speed until it has been measured; the price of loading and recomputing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RateConfig {
    /// Computing one token of a prompt.
    pub prefill_ns_per_token: u64,
    /// Copying one page from host to device.
    pub load_back_ns_per_page: u64,
    /// Fetching one page from L3 to host.
    pub prefetch_ns_per_page: u64,
    /// What any prefetch takes besides.
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
    /// Starts from the default.
    #[must_use]
    pub fn builder() -> ConfigBuilder {
        ConfigBuilder { config: Config::default() }
    }

    /// The namespace of requests without adapter and salt.
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

    /// Host pages that transfers of one kind with L3 may hold: never all of the host, so that copies from
    /// the device find room.
    pub(crate) fn most_of_host(&self) -> u32 {
        self.cache.host_pages - self.cache.host_pages / 4
    }

    /// Whether this configuration can work.
    ///
    /// # Errors
    /// The first setting that cannot, and what to change.
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
    /// Model and weights: change it whenever the weights change.
    fingerprint: &str => model.fingerprint;
    /// Over how many ranks a page's KV is split.
    ranks: u32 => model.ranks;
    /// A secret that all have in common who share an L3.
    secret: &str => model.secret;
    /// Tokens in a page.
    page_size: u32 => cache.page_size;
    /// Pages of the device arena.
    device_pages: u32 => cache.device_pages;
    /// Pages of the host arena.
    host_pages: u32 => cache.host_pages;
    /// Which pages go first.
    eviction: EvictionKind => cache.eviction;
    /// When device pages are copied to host.
    write_policy: WritePolicy => cache.write_policy;
    /// How many page keys may wait in KV events that were not drained.
    kv_event_keys_max: u32 => cache.kv_event_keys_max;
    /// What goes into one forward step.
    batch: BatchConfig => batch;
    /// Who waits, and in which order they are admitted.
    queue: QueueConfig => queue;
    /// Copies between device and host.
    copies: CopyConfig => copies;
    /// The third tier.
    l3: L3Config => l3;
    /// What is assumed about speed.
    rates: RateConfig => rates;
    /// How many state transitions are kept.
    trace_max: u32 => trace_max;
}

impl ConfigBuilder {
    /// The finished configuration.
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
