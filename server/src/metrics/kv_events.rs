//! What routers are told, as metrics.

use std::fmt;

use terrace_routing::PublisherStats;

use super::exposition::Exposition;

pub(super) fn write(text: &mut Exposition<'_>, stats: &PublisherStats) -> fmt::Result {
    text.counter(
        "terrace_kv_event_batches_total",
        "Published batches of KV events.",
        stats.batches,
    )?;
    text.counter(
        "terrace_kv_event_bytes_total",
        "Published bytes of KV events, counted once for all subscribers.",
        stats.bytes,
    )?;
    text.counter(
        "terrace_kv_event_snapshots_total",
        "Published snapshots: the first batch, and batches after a queue overflow.",
        stats.snapshots,
    )?;
    text.gauge(
        "terrace_kv_event_subscribers",
        "Connected subscribers of KV events.",
        stats.subscribers,
    )?;
    text.counter(
        "terrace_kv_event_missed_total",
        "Batches of KV events that a slow subscriber missed.",
        stats.missed,
    )?;
    text.counter(
        "terrace_kv_event_replays_total",
        "Requests for a replay of missed KV events.",
        stats.replays,
    )
}
