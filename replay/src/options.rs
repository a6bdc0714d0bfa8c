//! Settings of a replay by name, on the command line and in sweeps.

mod quantity;
mod values;

use std::fmt;

use serde::Serialize;
use terrace_cache::{EvictionKind, WritePolicy};
use terrace_scheduler::AdmissionOrder;

use crate::config::{
    Arrival, Config, Copies, DEFAULT_GPU, DEFAULT_GPUS, DEFAULT_MODEL, LinksConfig, TIER_TOKENS_MAX,
};
use crate::cost::CostModel;
use crate::error::ReplayError;
use crate::machine::{Gpu, ModelSpec};
use quantity::{Size, bytes_per_second, microseconds, size};
pub use values::page_size;
use values::{
    also, copy_way, fetch_wait, milliseconds, number, outages, piece_bytes, routing, sessions,
    share, step_tokens, warm_up, within,
};

/// Settings on top of the default configuration. Their order does not matter.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Measured step costs; derived from model and GPU if absent.
    pub cost: Option<CostModel>,
    chosen: Vec<(Setting, String)>,
}

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// There is no such setting.
    #[error("there is no setting {name:?}; there are {}", Setting::names())]
    Unknown {
        /// Requested name.
        name: String,
    },
    /// The value is invalid for the setting.
    #[error("{setting} {value}: {problem}")]
    Value {
        /// The setting.
        setting: Setting,
        /// Value.
        value: String,
        /// Valid values.
        problem: String,
    },
    /// The combination of settings is invalid.
    #[error(transparent)]
    Config(#[from] ReplayError),
}

macro_rules! settings {
    ($($(#[$doc:meta])* $variant:ident = $name:literal $(or $other:literal)?;)*) => {
        /// A setting by name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Setting {
            $($(#[$doc])* $variant,)*
        }

        impl Setting {
            /// All settings.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// Returns the setting of a name.
            ///
            /// # Errors
            /// Fails if it is unknown; the error lists the known ones.
            pub fn named(name: &str) -> Result<Self, OptionError> {
                match name.replace('_', "-").as_str() {
                    $($name $(| $other)? => Ok(Self::$variant),)*
                    _ => Err(OptionError::Unknown { name: name.to_owned() }),
                }
            }
        }
    };
}

settings! {
    /// The model, by name.
    Model = "model";
    /// The GPU, by name.
    Gpu = "gpu";
    /// GPUs that share the model.
    Gpus = "gpus";
    /// Tokens in a page.
    Page = "page-size" or "page";
    /// The size of the device tier.
    Device = "device" or "device-tokens";
    /// The size of the host tier.
    Host = "host" or "host-tokens";
    /// The size of L3.
    L3 = "l3" or "l3-tokens";
    /// Eviction policy.
    Policy = "policy";
    /// Write-back policy.
    WritePolicy = "write-policy";
    /// Admission order.
    Order = "order";
    /// Largest number of tokens per step.
    StepTokens = "step-tokens";
    /// Largest number of running requests.
    RunningMax = "running-max";
    /// Largest number of requests at a worker's scheduler; the others wait in front of it.
    WaitingMax = "waiting-max";
    /// Smallest number of pages fetched from L3.
    FetchThreshold = "fetch-threshold";
    /// Longest wait of a request for L3.
    FetchWait = "fetch-wait";
    /// Smallest number of pages loaded from host.
    LoadThreshold = "load-threshold";
    /// Number of workers, each with a device and a host tier.
    Workers = "workers";
    /// Worker groups beyond the first.
    Also = "also";
    /// Number of workers that only compute prompts, while the others only decode.
    PrefillWorkers = "prefill-workers";
    /// Outages of workers.
    Outages = "outages";
    /// Routing policy.
    Routing = "routing";
    /// Load weight of a context token of a live request.
    DecodeWeight = "decode-weight";
    /// Delay of KV events to the router.
    EventDelay = "event-delay";
    /// Dependence of session turns on earlier answers.
    Sessions = "sessions";
    /// Requests excluded from measurement.
    WarmUp = "warm-up";
    /// Limit of the time to the first token.
    SloTtft = "slo-ttft";
    /// Limit of the mean time between tokens of an answer.
    SloTpot = "slo-tpot";
    /// Share of requests that must meet the limits.
    SloShare = "slo-share";
    /// Price of a GPU hour.
    GpuPrice = "gpu-price";
    /// Price of a gigabyte of host memory per month.
    HostPrice = "host-price";
    /// Price of a gigabyte of L3 per month.
    L3Price = "l3-price";
    /// Speed relative to the trace.
    SpeedUp = "speed-up";
    /// Number of live requests, independent of the trace's times.
    Concurrency = "concurrency";
    /// Bandwidth between host and device.
    HostBandwidth = "host-bandwidth";
    /// Copy method between host and device.
    CopyWay = "copy-way";
    /// Consecutive bytes of a page in a GPU's memory.
    CopyPiece = "copy-piece";
    /// Bandwidth between L3 and one worker.
    L3Bandwidth = "l3-bandwidth";
    /// Bandwidth between L3 and all workers.
    StoreBandwidth = "store-bandwidth";
    /// Latency of every L3 transfer.
    L3Latency = "l3-latency";
    /// Share of L3 operations that fail.
    L3Failures = "l3-failures";
    /// Seed.
    Seed = "seed";
}

impl Setting {
    fn names() -> String {
        Self::ALL.iter().map(|setting| setting.name()).collect::<Vec<_>>().join(", ")
    }

    /// Returns the magnitude of a value, if the setting is a size, for sorting. Bytes and tokens
    /// are not comparable here.
    pub(crate) fn magnitude(self, value: &str) -> Option<f64> {
        let sized = || match size(value).ok()? {
            Size::Tokens(number) | Size::Bytes(number) => Some(number),
            Size::Unlimited => Some(f64::MAX),
        };
        let time = || microseconds(value).ok().map(|us| us as f64);
        let rate = || bytes_per_second(value).ok().map(|rate| rate as f64);
        let portion = || share(value).ok();
        value.parse().ok().or_else(portion).or_else(time).or_else(rate).or_else(sized)
    }

    /// Returns whether it is the size of a tier.
    #[must_use]
    pub fn is_size(self) -> bool {
        matches!(self, Self::Device | Self::Host | Self::L3)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Setting {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Options {
    /// Sets a value, replacing an earlier one.
    pub fn set(&mut self, setting: Setting, value: &str) {
        self.chosen.retain(|(other, _)| *other != setting);
        self.chosen.push((setting, value.trim().to_owned()));
    }

    /// Returns the resulting configuration.
    ///
    /// # Errors
    /// Returns the first invalid setting and its valid values.
    pub fn config(&self) -> Result<Config, OptionError> {
        let model = self.parsed(Setting::Model, |name| Ok(ModelSpec::named(name)?))?;
        let gpu = self.parsed(Setting::Gpu, |name| Ok(Gpu::named(name)?))?;
        let (model, gpu) = (model.unwrap_or(DEFAULT_MODEL), gpu.unwrap_or(DEFAULT_GPU));
        let gpus = self.parsed(Setting::Gpus, |text| within(text, 1, 64))?.unwrap_or(DEFAULT_GPUS);
        let mut config = Config::for_machine(&model, &gpu, gpus);
        if let Some(cost) = self.cost {
            config.cost = cost;
        }
        let usual = config.scheduler.batch.step_tokens_max;
        let step_tokens = self.parsed(Setting::StepTokens, step_tokens)?.unwrap_or(usual);
        self.size_tiers(&mut config, model.device_tokens(&gpu, gpus, step_tokens))?;
        let copies = Copies {
            way: self.parsed(Setting::CopyWay, copy_way)?.unwrap_or_default(),
            piece_bytes: self.parsed(Setting::CopyPiece, piece_bytes)?,
            page_size: config.scheduler.cache.page_size,
        };
        config.links = LinksConfig::of_machine(&model, &gpu, gpus, &copies);
        if self.chosen(Setting::SpeedUp).and(self.chosen(Setting::Concurrency)).is_some() {
            let problem = "speed-up has no effect with concurrency, which ignores the times of the trace: \
                 give only one of the two";
            return Err(self.refusal(Setting::SpeedUp, problem.into()));
        }
        config.also = self
            .parsed(Setting::Also, |text| also(text, &model, &copies, step_tokens, &config))?
            .unwrap_or_default();
        for (setting, value) in &self.chosen {
            let applied = apply(&mut config, *setting, value);
            applied.map_err(|problem| self.refusal(*setting, problem))?;
        }
        if self.chosen(Setting::RunningMax).is_none() {
            let batch = &mut config.scheduler.batch;
            batch.running_max = batch.running_max.min(batch.step_tokens_max);
        }
        config.check()?;
        Ok(config)
    }

    fn size_tiers(&self, config: &mut Config, free_tokens: u64) -> Result<(), OptionError> {
        let page_size = self.parsed(Setting::Page, |text| Ok(page_size(text)?))?.unwrap_or(16);
        let bytes_per_token = config.kv_bytes_per_token;
        let tier = |setting| {
            self.parsed(setting, |text| match size(text)? {
                Size::Unlimited if setting == Setting::L3 => Ok(None),
                Size::Unlimited => Err("only L3 can be unlimited; give a size".into()),
                Size::Tokens(tokens) => Ok(Some(tokens)),
                Size::Bytes(bytes) => Ok(Some(bytes / bytes_per_token as f64)),
            })
        };
        let pages = |setting, tokens: f64, most: f64| {
            if 0.0 < tokens && tokens < f64::from(page_size) {
                let problem = format!("less than a page of {page_size} tokens; use 0 for none");
                return Err(self.refusal(setting, problem.into()));
            }
            if (0.0..=most).contains(&tokens) {
                return Ok((tokens / f64::from(page_size)) as u64);
            }
            let gib = most * bytes_per_token as f64 / (1u64 << 30) as f64;
            Err(self.refusal(setting, format!("use 0 to {most} tokens ({gib:.0} GiB)").into()))
        };
        let most = (TIER_TOKENS_MAX.min(u64::from(page_size) << 28)) as f64;
        let device = match tier(Setting::Device)?.flatten() {
            Some(tokens) if tokens < f64::from(page_size) => {
                let problem = format!("a device needs at least one page of {page_size} tokens");
                return Err(self.refusal(Setting::Device, problem.into()));
            }
            Some(tokens) => pages(Setting::Device, tokens, most)?,
            None if free_tokens < u64::from(page_size) => {
                let problem = "the weights leave no room for KV on this GPU; use more GPUs (gpus)";
                return Err(self.refusal(Setting::Gpu, problem.into()));
            }
            None => free_tokens / u64::from(page_size),
        };
        let host = match tier(Setting::Host)?.flatten() {
            Some(tokens) => pages(Setting::Host, tokens, most)?,
            None => device * 4,
        };
        let l3 = match tier(Setting::L3)? {
            Some(None) | None => None,
            Some(Some(tokens)) => {
                Some(pages(Setting::L3, tokens, f64::from(page_size) * f64::from(i32::MAX))?)
            }
        };
        let cache = &mut config.scheduler.cache;
        cache.page_size = page_size;
        cache.device_pages = device.min(1 << 28) as u32;
        cache.host_pages = host.min(1 << 28) as u32;
        config.store.pages_max = l3;
        // L3 is reached only through host memory.
        if host == 0 || l3 == Some(0) {
            config.scheduler.l3 = None;
            config.store.pages_max = None;
        }
        Ok(())
    }

    fn parsed<T>(
        &self,
        setting: Setting,
        parse: impl FnOnce(&str) -> Result<T, Problem>,
    ) -> Result<Option<T>, OptionError> {
        let Some(value) = self.chosen(setting) else { return Ok(None) };
        parse(value).map(Some).map_err(|problem| self.refusal(setting, problem))
    }

    /// Returns the value set for a setting.
    #[must_use]
    pub fn chosen(&self, setting: Setting) -> Option<&str> {
        let mut chosen = self.chosen.iter();
        chosen.find(|(other, _)| *other == setting).map(|(_, value)| value.as_str())
    }

    fn refusal(&self, setting: Setting, problem: Problem) -> OptionError {
        match problem {
            Problem::Text(problem) => {
                let value = self.chosen(setting).unwrap_or("by default").to_owned();
                OptionError::Value { setting, value, problem }
            }
            Problem::Replay(error) => OptionError::Config(error),
        }
    }
}

/// The reason for which a value is invalid.
pub(crate) enum Problem {
    Text(String),
    Replay(ReplayError),
}

impl From<&str> for Problem {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Problem {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<ReplayError> for Problem {
    fn from(error: ReplayError) -> Self {
        Self::Replay(error)
    }
}

/// Applies settings that do not concern the machine or the sizes of its tiers.
fn apply(config: &mut Config, setting: Setting, text: &str) -> Result<(), Problem> {
    let scheduler = &mut config.scheduler;
    match setting {
        Setting::Model
        | Setting::Gpu
        | Setting::Gpus
        | Setting::Page
        | Setting::Device
        | Setting::Host
        | Setting::L3
        | Setting::CopyWay
        | Setting::CopyPiece
        | Setting::Also => {}
        Setting::PrefillWorkers => config.prefill_workers = within(text, 0, 1023)?,
        Setting::Outages => config.outages = outages(text)?,
        Setting::Policy => scheduler.cache.eviction = text.parse::<EvictionKind>()?,
        Setting::WritePolicy => scheduler.cache.write_policy = text.parse::<WritePolicy>()?,
        Setting::Order => scheduler.queue.order = text.parse::<AdmissionOrder>()?,
        Setting::StepTokens => scheduler.batch.step_tokens_max = step_tokens(text)?,
        Setting::RunningMax => scheduler.batch.running_max = within(text, 1, 65_536)?,
        Setting::WaitingMax => config.waiting_max = within(text, 1, 1 << 24)?,
        Setting::FetchThreshold => {
            let pages = within(text, 1, 1 << 20)?;
            if let Some(l3) = &mut scheduler.l3 {
                l3.prefetch_threshold_pages = pages;
            }
        }
        Setting::FetchWait => {
            let policy = fetch_wait(text)?;
            if let Some(l3) = &mut scheduler.l3 {
                l3.prefetch = policy;
            }
        }
        Setting::LoadThreshold => {
            scheduler.copies.load_back_threshold_pages = within(text, 1, 1 << 20)?;
        }
        Setting::Workers => config.workers = within(text, 1, 1024)?,
        Setting::Routing => config.router.routing = routing(text)?,
        Setting::DecodeWeight => config.router.decode_weight = number(text, 0.0, 1e6)?,
        Setting::EventDelay => config.router.event_delay_us = microseconds(text)?,
        Setting::Sessions => config.sessions = sessions(text)?,
        Setting::WarmUp => config.warm_up = warm_up(text)?,
        Setting::SloTtft => config.slo.ttft_ms = Some(milliseconds(text)?),
        Setting::SloTpot => config.slo.tpot_ms = Some(milliseconds(text)?),
        Setting::SloShare => config.slo.share = share(text)?,
        Setting::GpuPrice => config.prices.gpu_hour = number(text, 0.0, 1e9)?,
        Setting::HostPrice => config.prices.host_gb_month = number(text, 0.0, 1e9)?,
        Setting::L3Price => config.prices.l3_gb_month = number(text, 0.0, 1e9)?,
        Setting::SpeedUp => {
            config.arrival = Arrival::Trace { speed_up: number(text, 1e-6, 1e9)? };
        }
        Setting::Concurrency => {
            config.arrival = Arrival::ClosedLoop { concurrency: within(text, 1, 1 << 24)? };
        }
        Setting::HostBandwidth => {
            let bandwidth = bytes_per_second(text)?;
            config.links.host_to_device.bytes_per_second = bandwidth;
            config.links.device_to_host.bytes_per_second = bandwidth;
        }
        Setting::L3Bandwidth => {
            let bandwidth = bytes_per_second(text)?;
            config.links.l3_to_host.bytes_per_second = bandwidth;
            config.links.host_to_l3.bytes_per_second = bandwidth;
        }
        Setting::StoreBandwidth => {
            let bandwidth = bytes_per_second(text)?;
            config.store.read.bytes_per_second = bandwidth;
            config.store.write.bytes_per_second = bandwidth;
        }
        Setting::L3Latency => {
            let latency_us = microseconds(text)?;
            config.store.read.latency_us = latency_us;
            config.store.write.latency_us = latency_us;
            config.store.probe_latency_us = latency_us;
        }
        Setting::L3Failures => {
            let rate = number(text, 0.0, 1.0)?;
            config.store.probe_failure_rate = rate;
            config.store.read_failure_rate = rate;
            config.store.write_failure_rate = rate;
        }
        Setting::Seed => config.seed = text.parse().map_err(|_| "use an integer")?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::PrefetchPolicy;

    use super::*;
    use crate::cluster::Outage;
    use crate::config::{Routing, WarmUp};
    use crate::slo::Slo;

    fn config(choices: &[(&str, &str)]) -> Result<Config, OptionError> {
        let mut options = Options::default();
        for (name, value) in choices {
            options.set(Setting::named(name)?, value);
        }
        options.config()
    }

    fn refusal(choices: &[(&str, &str)]) -> String {
        config(choices).unwrap_err().to_string()
    }

    #[test]
    fn empty_options_are_the_default() {
        assert_eq!(config(&[]).unwrap(), Config::default());
    }

    #[test]
    fn sizes_are_tokens_or_bytes_of_the_model() {
        let config = config(&[
            ("page-size", "64"),
            ("device-tokens", "1048576"),
            ("host", "64GiB"),
            ("l3", "2M"),
        ]);
        let config = config.unwrap();
        let cache = &config.scheduler.cache;
        assert_eq!((cache.device_pages, cache.host_pages), (16_384, 64 * 8192 / 64));
        assert_eq!(config.store.pages_max, Some(31_250));
    }

    #[test]
    fn parses_cluster_notation() {
        let config = config(&[
            ("gpu", "h200"),
            ("gpus", "4"),
            ("also", "2xl40s:4+1xh100:2"),
            ("prefill-workers", "2"),
            ("outages", "1:10s-20s+0:500ms-1s"),
        ])
        .unwrap();
        let groups: Vec<_> = config.also.iter().map(|group| (group.workers, group.gpus)).collect();
        assert_eq!((groups, config.workers_in_all()), (vec![(2, 4), (1, 2)], 4));
        assert!(config.also[0].device_pages > config.also[1].device_pages);
        assert!(config.also[0].cost.prefill_token_ns > config.cost.prefill_token_ns);
        let second = Outage { worker: 0, from_us: 500_000, to_us: 1_000_000 };
        assert_eq!((config.prefill_workers, config.outages[1]), (2, second));
        for (choices, expected) in [
            (&[("also", "h100:1")][..], "write it like 2xh100:1"),
            (&[("also", "1xabacus:1")], "unknown GPU"),
            (&[("prefill-workers", "1")], "leave at least one worker to decode"),
            (&[("workers", "2"), ("prefill-workers", "1"), ("l3", "0")], "use host memory and L3"),
            (&[("outages", "3:1s-2s")], "give an existing worker"),
            (&[("outages", "0:1s-5s+0:2s-3s")], "leave time between the outages"),
        ] {
            let refused = refusal(choices);
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn sorts_values_of_a_setting() {
        let sorted = |setting: Setting, values: &[&str]| {
            let sizes: Option<Vec<f64>> =
                values.iter().map(|value| setting.magnitude(value)).collect();
            sizes.is_some_and(|sizes| sizes.is_sorted())
        };
        assert!(sorted(Setting::Host, &["0", "64GiB", "1TiB", "2TiB"]));
        assert!(sorted(Setting::L3, &["0", "512GiB", "unlimited"]));
        assert!(sorted(Setting::L3Latency, &["300us", "2ms", "1s"]));
        assert!(sorted(Setting::Workers, &["2", "4", "16"]));
        assert_eq!(Setting::Policy.magnitude("lru"), None);
    }

    #[test]
    fn a_tier_of_size_0_is_absent_and_without_host_there_is_no_l3() {
        assert!(config(&[("l3", "0")]).unwrap().scheduler.l3.is_none());
        let without_host = config(&[("host", "0"), ("l3", "unlimited")]).unwrap();
        assert!(without_host.scheduler.l3.is_none());
        assert!(config(&[("l3", "unlimited")]).unwrap().scheduler.l3.is_some());
    }

    #[test]
    fn applies_other_settings() {
        let config = config(&[
            ("gpu", "h200"),
            ("gpus", "4"),
            ("policy", "s3fifo"),
            ("write_policy", "selective_write_through:3"),
            ("order", "longest_prefix"),
            ("routing", "prefix-aware:2"),
            ("decode-weight", "0.5"),
            ("event-delay", "2ms"),
            ("warm-up", "90s"),
            ("slo-ttft", "1.5s"),
            ("slo-tpot", "50ms"),
            ("slo-share", "99%"),
            ("l3-price", "0.05"),
            ("workers", "4"),
            ("l3-latency", "2ms"),
            ("l3-bandwidth", "10GB/s"),
            ("copy-way", "single"),
            ("copy-piece", "64KiB"),
            ("l3-failures", "0.25"),
            ("concurrency", "64"),
            ("fetch-wait", "best-effort"),
        ])
        .unwrap();
        assert_eq!(config.scheduler.cache.eviction, EvictionKind::S3Fifo);
        let write_policy = WritePolicy::SelectiveWriteThrough { hits: 3 };
        assert_eq!(config.scheduler.cache.write_policy, write_policy);
        assert_eq!(config.scheduler.queue.order, AdmissionOrder::LongestPrefix);
        assert_eq!(config.router.routing, Routing::PrefixAware { load_weight: 2.0 });
        assert_eq!((config.router.decode_weight, config.router.event_delay_us), (0.5, 2000));
        assert_eq!(config.warm_up, WarmUp::Until { time_us: 90_000_000 });
        let slo = Slo { ttft_ms: Some(1500.0), tpot_ms: Some(50.0), share: 0.99 };
        assert_eq!((config.slo, config.prices.l3_gb_month), (slo, 0.05));
        assert_eq!((config.workers, config.store.read.latency_us), (4, 2000));
        assert_eq!(config.links.l3_to_host.bytes_per_second, 10_000_000_000);
        let copied = config.links.host_to_device.bytes_per_second;
        assert!((59_000_000_000..61_000_000_000).contains(&copied), "four GPUs: {copied}");
        assert_eq!(config.store.read_failure_rate, 0.25);
        assert_eq!(config.arrival, Arrival::ClosedLoop { concurrency: 64 });
        assert_eq!(config.scheduler.l3.unwrap().prefetch, PrefetchPolicy::BestEffort);
    }

    #[test]
    fn rejects_invalid_values_with_the_limit() {
        let cases: [(&[(&str, &str)], &str); 18] = [
            (&[("warm-up", "100%")], "use a share of the requests like 10%"),
            (&[("slo-ttft", "0ms")], "use a time above 0"),
            (&[("copy-way", "carrier")], "use kernel, batch or single"),
            (&[("hots", "1")], "there is no setting \"hots\"; there are model, gpu"),
            (&[("device", "0")], "device 0: a device needs at least one page of 16 tokens"),
            (&[("device", "-5")], "device -5: a device needs"),
            (&[("host", "1e30")], "host 1e30: use 0 to 4294967296 tokens (524288 GiB)"),
            (&[("host", "many")], "host many: write tokens like"),
            (&[("host", "unlimited")], "only L3 can be unlimited"),
            (&[("page", "48")], "page-size 48: use a power of two from 1 to 256"),
            (&[("policy", "random")], "policy random: use lru, lfu"),
            (&[("workers", "0")], "use a number from 1 to 1024"),
            (&[("l3-failures", "7")], "l3-failures 7: use a number from 0 to 1"),
            (&[("host", "5")], "host 5: less than a page of 16 tokens; use 0 for none"),
            (&[("speed-up", "2"), ("concurrency", "3")], "give only one of the two"),
            (&[("workers", "1024"), ("host", "4294967296")], "2^30 pages"),
            (
                &[("model", "llama-3.1-70b"), ("gpu", "l40s"), ("gpus", "1")],
                "the weights leave no room",
            ),
            (&[("gpu", "abacus")], ": use one of a100"),
        ];
        for (choices, expected) in cases {
            let refused = refusal(choices);
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
