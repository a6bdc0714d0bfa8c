//! What routers are told, as metrics.

use std::fmt;

use terrace_routing::PublisherStats;

use super::exposition::Exposition;

pub(super) fn write(text: &mut Exposition<'_>, stats: &PublisherStats) -> fmt::Result {
    text.counter("terrace_kv_event_batches_total", "Batches of KV events told.", stats.batches)?;
    text.counter(
        "terrace_kv_event_bytes_total",
        "Bytes of KV events, once for all who listen.",
        stats.bytes,
    )?;
    text.counter(
        "terrace_kv_event_snapshots_total",
        "Batches that told all that is held: the first, and those after events that could not wait.",
        stats.snapshots,
    )?;
    text.gauge(
        "terrace_kv_event_subscribers",
        "Connections of those who listen to KV events.",
        stats.subscribers,
    )?;
    text.counter(
        "terrace_kv_event_missed_total",
        "Batches of KV events that somebody took too slowly to get.",
        stats.missed,
    )?;
    text.counter(
        "terrace_kv_event_replays_total",
        "Questions for KV events that were missed.",
        stats.replays,
    )
}
