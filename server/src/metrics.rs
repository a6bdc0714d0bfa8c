//! What operators measure: one registry, read at `GET /metrics`.
//!
//! What happens to an answer is measured as it happens ([`Latency`]). Everything else is counted by
//! whoever does it, the engine and the store, and read when the page is asked for.

mod exposition;
mod figures;
mod gpu;
mod kv_events;
mod latency;
mod node;
mod recent;
mod route;
mod vllm;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::Registry;
use terrace_engine::Figures;
use terrace_kit::Process;
use terrace_routing::PublisherStats;

pub(crate) use self::latency::{AnswerClock, LatestTimes};
pub use self::node::serve_node_figures;
pub(crate) use self::route::RouteMetrics;

use self::exposition::Exposition;
use self::latency::Latency;
use self::vllm::VllmNames;
use crate::gpu::GpuFigures;

/// What the page is.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Everything that is counted elsewhere, as it was when the page was asked for.
#[derive(Debug)]
pub(crate) struct Moment {
    pub(crate) figures: Figures,
    /// Of the GPU, if there is one.
    pub(crate) gpu: Option<GpuFigures>,
    /// Of what routers are told, if they are.
    pub(crate) kv_events: Option<PublisherStats>,
}

type Latest = Arc<Mutex<Option<Moment>>>;

/// The metrics of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    latest: Latest,
    latency: Arc<Latency>,
}

impl Metrics {
    /// With the names that dashboards of vLLM know as well, if they are wanted.
    pub(crate) fn new(model_name: &str, vllm_names: bool) -> Self {
        let (latest, latency) = (Latest::default(), Arc::new(Latency::default()));
        let mut registry = Registry::default();
        registry.register_collector(Box::new(EngineFigures(latest.clone())));
        registry.register_collector(Box::new(OwnProcess));
        latency.register(&mut registry);
        if vllm_names {
            let model_name = (Cow::Borrowed("model_name"), Cow::Owned(model_name.to_owned()));
            let registry = registry.sub_registry_with_label(model_name);
            VllmNames::new(latest.clone(), latency.clone()).register(registry);
        }
        Self { registry, latest, latency }
    }

    /// Measures an answer.
    pub(crate) fn latency(&self) -> Arc<Latency> {
        self.latency.clone()
    }

    /// The page.
    pub(crate) fn render(&self, moment: Moment) -> String {
        *self.latest.lock() = Some(moment);
        page(&self.registry)
    }
}

/// Everything in a registry, as Prometheus reads it.
fn page(registry: &Registry) -> String {
    let mut page = String::new();
    text::encode(&mut page, registry).expect("writing to a string does not fail");
    page
}

/// What the engine, its store and its GPU have counted.
#[derive(Debug)]
struct EngineFigures(Latest);

impl Collector for EngineFigures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let latest = self.0.lock();
        let Some(Moment { figures, gpu, kv_events }) = &*latest else { return Ok(()) };
        let mut text = Exposition::new(encoder);
        figures::write(&mut text, figures)?;
        if let Some(kv_events) = kv_events {
            kv_events::write(&mut text, kv_events)?;
        }
        match gpu {
            Some(gpu) => gpu::write(&mut text, gpu, &figures.steps),
            None => Ok(()),
        }
    }
}

/// What the system says about this process.
#[derive(Debug)]
struct OwnProcess;

impl Collector for OwnProcess {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(bytes) = Process::Own.resident_bytes() else { return Ok(()) };
        let help = "Resident memory of the process.";
        Exposition::new(encoder).gauge("process_resident_memory_bytes", help, bytes)
    }
}

#[cfg(test)]
mod tests;
