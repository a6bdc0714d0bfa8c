//! The metrics of a router.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;

use super::exposition::Exposition;
use super::exposition::Kind::{self, Counter, Gauge};
use super::{OwnProcess, page};
use crate::route::Worker;

/// The metrics of a router.
#[derive(Debug)]
pub(crate) struct RouteMetrics(Registry);

impl RouteMetrics {
    pub(crate) fn new(workers: Arc<[Arc<Worker>]>) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(RouteFigures(workers)));
        registry.register_collector(Box::new(OwnProcess));
        Self(registry)
    }

    pub(crate) fn render(&self) -> String {
        page(&self.0)
    }
}

#[derive(Debug)]
struct RouteFigures(Arc<[Arc<Worker>]>);

/// A figure of each worker.
type Figure = (Kind, &'static str, &'static str, fn(&Worker) -> u64);

const FIGURES: [Figure; 12] = [
    (Gauge, "terrace_route_worker_up", "1 if the worker answers.", |worker| {
        u64::from(worker.is_up())
    }),
    (Counter, "terrace_route_requests_total", "Requests sent to the worker.", |worker| {
        worker.counts.requests.load(Relaxed)
    }),
    (
        Counter,
        "terrace_route_failures_total",
        "Requests that the worker did not answer and that went to another worker.",
        |worker| worker.counts.failures.load(Relaxed),
    ),
    (Counter, "terrace_route_prompt_tokens_total", "Prompt tokens sent to the worker.", |worker| {
        worker.counts.prompt_tokens.load(Relaxed)
    }),
    (
        Counter,
        "terrace_route_cached_tokens_total",
        "Prompt tokens that the worker had cached when they were sent, according to its KV events.",
        |worker| worker.counts.cached_tokens.load(Relaxed),
    ),
    (Gauge, "terrace_route_blocks", "Blocks that the worker is known to hold.", |worker| {
        worker.index.lock().len() as u64
    }),
    (
        Counter,
        "terrace_route_unplaced_blocks_total",
        "Blocks of KV events that were ignored because their parent is unknown or the index is full.",
        |worker| {
            let stats = worker.index.lock().stats();
            stats.orphans + stats.refused
        },
    ),
    (
        Gauge,
        "terrace_route_events_connected",
        "1 if the router is subscribed to the worker's KV events.",
        |worker| u64::from(worker.following.is_connected.load(Relaxed)),
    ),
    (Counter, "terrace_route_event_batches_total", "Batches of KV events received.", |worker| {
        worker.following.batches.load(Relaxed)
    }),
    (Counter, "terrace_route_event_gaps_total", "Gaps in the batches of KV events.", |worker| {
        worker.following.gaps.load(Relaxed)
    }),
    (
        Counter,
        "terrace_route_event_replays_total",
        "Successful replays of missing batches, including those at the start of a connection.",
        |worker| worker.following.replays.load(Relaxed),
    ),
    (
        Counter,
        "terrace_route_event_forgotten_total",
        "Times that the known blocks of a worker were dropped, including when it disconnected.",
        |worker| worker.following.forgotten.load(Relaxed) + worker.counts.unreadable.load(Relaxed),
    ),
];

impl Collector for RouteFigures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut text = Exposition::new(encoder);
        for (kind, name, help, figure) in FIGURES {
            let values: Vec<_> =
                self.0.iter().map(|worker| (&*worker.place.url, figure(worker))).collect();
            text.metric(kind, name, help, &values, "worker")?;
        }
        Ok(())
    }
}
