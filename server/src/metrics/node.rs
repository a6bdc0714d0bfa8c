//! The metrics of a node.

use std::fmt;
use std::io;
use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use terrace_l3::StoreStats;
use terrace_l3_nodes::{NodeStats, RunningNode};
use tokio::net::TcpListener;

use super::exposition::{Exposition, Kind};
use super::{CONTENT_TYPE, OwnProcess, figures, page};

/// Answers `GET /metrics` with the figures of a node, and `GET /health` with whether all is well, until the
/// task is dropped.
///
/// # Errors
/// When the listener fails.
pub async fn serve_node_figures(listener: TcpListener, node: Arc<RunningNode>) -> io::Result<()> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(NodeFigures(node.clone())));
    registry.register_collector(Box::new(OwnProcess));
    let registry = Arc::new(registry);
    let render = move || {
        let page = page(&registry);
        async move { ([(header::CONTENT_TYPE, CONTENT_TYPE)], page) }
    };
    let health = move || {
        let health = health(&node.store_stats());
        async move { health }
    };
    let routes = Router::new().route("/metrics", get(render)).route("/health", get(health));
    axum::serve(listener, routes).await
}

/// A node whose disk takes nothing more serves what it has, and its clients put what they pin elsewhere.
fn health(store: &StoreStats) -> (StatusCode, &'static str) {
    match store.disk {
        Some(disk) if disk.broken > 0 => (
            StatusCode::SERVICE_UNAVAILABLE,
            "the disk store accepts no more objects, because changes cannot be made durable: the \
             log says why. Repair the disk, then restart the node\n",
        ),
        Some(_) | None => (StatusCode::OK, "ok\n"),
    }
}

#[derive(Debug)]
struct NodeFigures(Arc<RunningNode>);

impl Collector for NodeFigures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        write(&mut Exposition::new(encoder), &self.0.stats(), &self.0.store_stats())
    }
}

/// Everything there is to measure about a node.
pub(super) fn write(
    text: &mut Exposition<'_>,
    node: &NodeStats,
    store: &StoreStats,
) -> fmt::Result {
    text.gauge("terrace_node_connections", "Client connections.", node.connections)?;
    text.counter("terrace_node_accepted_total", "Authenticated connections.", node.accepted)?;
    text.counter(
        "terrace_node_refused_total",
        "Connections closed because of a failed handshake or a limit.",
        node.refused,
    )?;
    text.counter("terrace_node_requests_total", "Requests answered.", node.requests)?;
    text.counter(
        "terrace_node_malformed_total",
        "Connections closed because of a malformed request.",
        node.malformed,
    )?;
    text.counter(
        "terrace_node_forbidden_total",
        "Objects requested by clients that may not use them.",
        node.forbidden,
    )?;
    text.metric(
        Kind::Counter,
        "terrace_node_payload_bytes_total",
        "Payload bytes sent and received over the network.",
        &[("sent", node.sent_bytes), ("received", node.received_bytes)],
        "direction",
    )?;
    figures::store(text, store)
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_l3::TierStats;

    #[test]
    fn a_node_whose_disk_takes_nothing_more_is_not_well() {
        let with = |broken| StoreStats {
            disk: Some(TierStats { broken, ..TierStats::default() }),
            ..StoreStats::default()
        };
        assert_eq!(health(&StoreStats::default()).0, StatusCode::OK);
        assert_eq!(health(&with(0)).0, StatusCode::OK);
        assert_eq!(health(&with(1)).0, StatusCode::SERVICE_UNAVAILABLE);
    }
}
