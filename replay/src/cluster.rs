//! Worker groups, roles and outages.

use serde::{Deserialize, Serialize};
use terrace_scheduler::{Config as SchedulerConfig, RateConfig};

use crate::config::{Config, LinksConfig};
use crate::cost::CostModel;
use crate::error::ReplayError;

/// A group of further workers that differ from the first. Model and page size are the same, so that
/// all workers share L3.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerGroup {
    /// Number of workers.
    pub workers: u32,
    /// GPUs of each worker.
    pub gpus: u32,
    /// Price of a GPU hour.
    pub gpu_hour: f64,
    /// Pages of each worker's device tier.
    pub device_pages: u32,
    /// Pages of each worker's host tier.
    pub host_pages: u32,
    /// Step costs.
    pub cost: CostModel,
    /// The links of each worker.
    pub links: LinksConfig,
}

/// An outage of a worker. Its device and host tiers are lost, and its requests restart elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outage {
    /// Number of the worker, from 0.
    pub worker: u32,
    /// Time of the failure.
    pub from_us: u64,
    /// Time of the recovery, with empty caches.
    pub to_us: u64,
}

/// Role of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Prefill and decode.
    Both,
    /// Everything up to the first token.
    Prefill,
    /// Everything after the first token.
    Decode,
}

impl Config {
    /// Returns the number of workers of all groups.
    #[must_use]
    pub fn workers_in_all(&self) -> u32 {
        self.also.iter().fold(self.workers, |sum, group| sum.saturating_add(group.workers))
    }

    /// Returns the group of each worker, those of the first group first.
    pub(crate) fn kinds(&self) -> Vec<WorkerGroup> {
        let first = WorkerGroup {
            workers: self.workers,
            gpus: self.gpus,
            gpu_hour: self.prices.gpu_hour,
            device_pages: self.scheduler.cache.device_pages,
            host_pages: self.scheduler.cache.host_pages,
            cost: self.cost,
            links: self.links,
        };
        let groups = [first].into_iter().chain(self.also.iter().copied());
        groups.flat_map(|group| std::iter::repeat_n(group, group.workers as usize)).collect()
    }

    /// Returns the role of a worker.
    pub(crate) fn role(&self, worker: u32) -> Role {
        match self.prefill_workers {
            0 => Role::Both,
            prefill if worker < prefill => Role::Prefill,
            _ => Role::Decode,
        }
    }

    /// Returns the scheduler configuration of a worker: the user's settings, and rates that match
    /// its machine.
    pub(crate) fn scheduler_of(&self, kind: &WorkerGroup) -> SchedulerConfig {
        let mut scheduler = self.scheduler.clone();
        scheduler.cache.device_pages = kind.device_pages;
        scheduler.cache.host_pages = kind.host_pages;
        scheduler.rates = self.rates.clone().unwrap_or_else(|| {
            let per_page = |bytes_per_second: u64| {
                self.page_bytes().saturating_mul(1_000_000_000) / bytes_per_second
            };
            let links = &kind.links;
            let network = links.l3_to_host.bytes_per_second.min(self.store.read.bytes_per_second);
            let token_ns = kind.cost.prefill_token_ns + kind.cost.exchange_token_ns;
            RateConfig {
                prefill_ns_per_token: (token_ns as u64).max(1),
                load_back_ns_per_page: per_page(links.host_to_device.bytes_per_second),
                prefetch_ns_per_page: per_page(network),
                prefetch_latency_us: links.l3_to_host.latency_us + self.store.read.latency_us,
            }
        });
        scheduler
    }

    pub(crate) fn check_cluster(&self) -> Result<(), ReplayError> {
        let refuse =
            |setting, value: String, limits| Err(ReplayError::Setting { setting, value, limits });
        let workers = self.workers_in_all();
        for group in &self.also {
            let in_limits = group.workers >= 1
                && (1..=64).contains(&group.gpus)
                && group.device_pages >= 1
                && (0.0..=1e9).contains(&group.gpu_hour);
            if !in_limits {
                return refuse("also", format!("{group:?}"), "use workers with GPUs and memory");
            }
            group.cost.check()?;
        }
        let prefill = self.prefill_workers;
        if prefill >= workers && prefill > 0 {
            let value = format!("{prefill} of {workers}");
            return refuse("prefill_workers", value, "leave at least one worker to decode");
        }
        if prefill > 0 && (self.scheduler.l3.is_none() || self.scheduler.cache.host_pages == 0) {
            let limits = "use host memory and L3: KV moves between workers through them";
            return refuse("prefill_workers", prefill.to_string(), limits);
        }
        let is_odd = |outage: &&Outage| outage.worker >= workers || outage.from_us >= outage.to_us;
        if let Some(outage) = self.outages.iter().find(is_odd) {
            let limits = "give an existing worker, and an end after the start";
            return refuse("outages", format!("{outage:?}"), limits);
        }
        for (place, one) in self.outages.iter().enumerate() {
            let overlaps = |other: &Outage| {
                other.worker == one.worker
                    && other.from_us <= one.to_us
                    && one.from_us <= other.to_us
            };
            if self.outages[..place].iter().any(overlaps) {
                let limits = "leave time between the outages of one worker";
                return refuse("outages", format!("{one:?}"), limits);
            }
        }
        Ok(())
    }
}
