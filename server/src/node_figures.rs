//! The figures of a node, as Prometheus reads them.

use std::io;
use std::sync::Arc;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use terrace_l3::StoreStats;
use terrace_l3::node::{NodeStats, RunningNode};
use tokio::net::TcpListener;

use crate::exposition::{Exposition, Kind};
use crate::figures;

/// Answers `GET /metrics` with the figures of a node until the task is dropped.
///
/// # Errors
/// When the listener fails.
pub async fn serve_node_figures(listener: TcpListener, node: Arc<RunningNode>) -> io::Result<()> {
    let render = move || {
        let text = node_figures(&node.stats(), &node.store_stats());
        async move { ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text) }
    };
    axum::serve(listener, Router::new().route("/metrics", get(render))).await
}

/// Everything there is to measure about a node.
#[must_use]
pub fn node_figures(node: &NodeStats, store: &StoreStats) -> String {
    let mut text = Exposition::default();
    text.gauge("terrace_node_connections", "Connections of clients.", node.connections);
    text.counter(
        "terrace_node_accepted_total",
        "Connections whose client proved that it may use the node.",
        node.accepted,
    );
    text.counter(
        "terrace_node_refused_total",
        "Connections closed because of a failed handshake or a limit.",
        node.refused,
    );
    text.counter("terrace_node_requests_total", "Requests answered.", node.requests);
    text.counter(
        "terrace_node_malformed_total",
        "Connections closed because of something that is no request.",
        node.malformed,
    );
    text.counter(
        "terrace_node_forbidden_total",
        "Objects that clients asked for and may not use.",
        node.forbidden,
    );
    text.metric(
        Kind::Counter,
        "terrace_node_payload_bytes_total",
        "Payload that went over the network.",
        &[("sent", node.sent_bytes), ("received", node.received_bytes)],
        "direction",
    );
    figures::store(&mut text, store);
    if let Some(promotion) = &store.promotion {
        text.metric(
            Kind::Counter,
            "terrace_node_gets_total",
            "Objects read, by where they were.",
            &[("memory", promotion.gets_from_memory), ("disk", promotion.gets_from_disk)],
            "place",
        );
        text.counter(
            "terrace_node_promotions_total",
            "Objects moved from disk to memory.",
            promotion.done,
        );
    }
    text.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_l3::TierStats;

    #[test]
    fn a_node_tells_what_it_holds_and_whom_it_refused() {
        let node = NodeStats { refused: 3, sent_bytes: 77, ..NodeStats::default() };
        let memory = TierStats { objects: 5, ..TierStats::default() };
        let store = StoreStats { memory: Some(memory), ..StoreStats::default() };
        let text = node_figures(&node, &store);
        for line in [
            "terrace_node_refused_total 3",
            "terrace_node_payload_bytes_total{direction=\"sent\"} 77",
            "terrace_l3_objects{place=\"memory\"} 5",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is missing:\n{text}");
        }
    }
}
