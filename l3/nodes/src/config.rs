//! Configuration of nodes and their clients.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use terrace_cache::PageKey;

use super::handshake::NodeSecret;

/// Configuration of a node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Clients that may use the node.
    pub clients: Vec<NodeClient>,
    /// Maximum number of connections.
    pub connections_max: usize,
    /// Maximum number of unauthenticated connections. Beyond it, the oldest connection from the
    /// address with the most of them is closed.
    pub strangers_max: usize,
    /// Maximum duration of a handshake.
    pub handshake_timeout_ms: u64,
    /// Maximum time without progress of a client during a call. A transfer as a whole may take this
    /// time plus the time of its bytes at 4 MB per second.
    pub stall_timeout_ms: u64,
    /// Maximum idle time of a connection.
    pub idle_timeout_ms: u64,
    /// Maximum memory of one call.
    pub call_bytes_max: usize,
    /// Maximum wait of a put for room.
    pub full_wait_ms: u64,
    /// Number of scratch pages for transfers of objects that are only on disk.
    pub scratch_pages: u32,
    /// Time for which the hard pins of a client stay after its last connection has ended.
    pub pins_kept_ms: u64,
    /// RDMA adapter to use.
    pub rdma: RdmaChoice,
    /// Maximum time that a client may take to read lent objects by RDMA.
    pub rdma_lease_ms: u64,
    /// Folder for the record of the store that the node belongs to. Use that of its disk store, so
    /// that both are lost together. `None` if its objects do not survive a restart.
    pub folder: Option<PathBuf>,
}

impl NodeConfig {
    /// A node for all clients that have this secret.
    #[must_use]
    pub fn new(secret: NodeSecret) -> Self {
        let anybody = NodeClient { name: String::new(), secret, limits: None };
        Self {
            clients: vec![anybody],
            connections_max: 512,
            strangers_max: 64,
            handshake_timeout_ms: 2_000,
            stall_timeout_ms: 10_000,
            idle_timeout_ms: 300_000,
            call_bytes_max: 64 << 20,
            full_wait_ms: 1_000,
            scratch_pages: 32,
            pins_kept_ms: 600_000,
            rdma: RdmaChoice::Auto,
            rdma_lease_ms: 20_000,
            folder: None,
        }
    }
}

/// A client of a node.
#[derive(Clone, Debug)]
pub struct NodeClient {
    /// Name of the client; empty for all clients without a name.
    pub name: String,
    /// Secret of the client.
    pub secret: NodeSecret,
    /// Namespaces that the client may use, and its share of the node; unlimited if `None`.
    pub limits: Option<ClientLimits>,
}

/// Limits of a client.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientLimits {
    /// Digests of the namespaces that the client may use. A namespace of several clients counts for
    /// the first of them.
    pub namespaces: BTreeSet<PageKey>,
    /// Share of the node's memory and disk for objects of these namespaces, and of its connections
    /// for the client: more than 0, and at most 1.
    pub share: f64,
}

impl ClientLimits {
    /// These namespaces, and half of the node.
    #[must_use]
    pub fn new(namespaces: BTreeSet<PageKey>) -> Self {
        Self { namespaces, share: 0.5 }
    }
}

/// A node in a client's list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeAddress {
    /// Name that determines the node's share of the objects: a node that keeps its name keeps its
    /// share.
    pub name: String,
    /// Address as HOST:PORT.
    pub address: String,
    /// Weight of its share relative to other nodes.
    pub weight: f64,
}

impl FromStr for NodeAddress {
    type Err = String;

    /// Parses HOST:PORT or NAME=HOST:PORT, each optionally followed by *WEIGHT.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| format!("{text:?}: {what}; write it as [NAME=]HOST:PORT[*WEIGHT]");
        let (place, weight) = match text.rsplit_once('*') {
            Some((place, weight)) => {
                (place, weight.parse::<f64>().map_err(|_| wrong("the weight is not a number"))?)
            }
            None => (text, 1.0),
        };
        if !(weight > 0.0 && weight.is_finite()) {
            return Err(wrong("the weight must be more than 0"));
        }
        let (name, address) = place.split_once('=').unwrap_or((place, place));
        let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        if name.is_empty() || port.is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
            return Err(wrong("this is not the address of a node"));
        }
        Ok(Self { name: name.to_owned(), address: address.to_owned(), weight })
    }
}

/// Configuration of a client.
#[derive(Clone, Debug)]
pub struct NodesConfig {
    /// List of nodes.
    pub nodes: Vec<NodeAddress>,
    /// Secret shared by nodes and clients.
    pub secret: NodeSecret,
    /// Name of this client, for nodes that have a list of clients.
    pub name: String,
    /// Number of nodes that hold each object: 1, or 2 so that a node's failure costs no hits.
    pub copies: usize,
    /// Maximum number of connections to each node.
    pub connections_max: usize,
    /// Timeout for connecting to a node.
    pub connect_timeout_ms: u64,
    /// Timeout for lookups.
    pub exists_timeout_ms: u64,
    /// Timeout for the start of a read, including any wait for promotions.
    pub get_timeout_ms: u64,
    /// Timeout for finding room for objects, and for storing them.
    pub put_timeout_ms: u64,
    /// Timeout for pins, unpins and removals.
    pub control_timeout_ms: u64,
    /// Timeout for flushes.
    pub flush_timeout_ms: u64,
    /// Maximum time without progress of a node during a transfer.
    pub stall_timeout_ms: u64,
    /// Initial delay before a node that did not answer is retried; it doubles with each failure ...
    pub retry_ms: u64,
    /// ... up to this maximum.
    pub retry_max_ms: u64,
    /// Interval of pings by an otherwise idle client that has pins: well below the time for which
    /// its nodes keep the pins of disconnected owners.
    pub show_up_ms: u64,
    /// RDMA adapter to use.
    pub rdma: RdmaChoice,
}

/// RDMA adapter to use, in builds with RDMA support. Without one, all transfers use TCP. Written as
/// `auto`, `never` or the adapter's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum RdmaChoice {
    /// First suitable adapter.
    #[default]
    Auto,
    /// No adapter.
    Never,
    /// Adapter with this name, as printed by `rdma link`.
    Device(String),
}

impl From<String> for RdmaChoice {
    fn from(text: String) -> Self {
        match text.as_str() {
            "auto" => Self::Auto,
            "never" => Self::Never,
            _ => Self::Device(text),
        }
    }
}

impl From<RdmaChoice> for String {
    fn from(choice: RdmaChoice) -> Self {
        match choice {
            RdmaChoice::Auto => "auto".to_owned(),
            RdmaChoice::Never => "never".to_owned(),
            RdmaChoice::Device(name) => name,
        }
    }
}

impl NodesConfig {
    /// One copy of each object on these nodes.
    #[must_use]
    pub fn new(nodes: Vec<NodeAddress>, secret: NodeSecret) -> Self {
        Self {
            nodes,
            secret,
            name: String::new(),
            copies: 1,
            connections_max: 8,
            connect_timeout_ms: 250,
            exists_timeout_ms: 100,
            get_timeout_ms: 700,
            put_timeout_ms: 4_000,
            control_timeout_ms: 700,
            flush_timeout_ms: 20_000,
            stall_timeout_ms: 500,
            retry_ms: 50,
            retry_max_ms: 2_000,
            show_up_ms: 5_000,
            rdma: RdmaChoice::Auto,
        }
    }

    /// Checks the configuration.
    ///
    /// # Errors
    /// What to change.
    pub fn check(&self) -> Result<(), String> {
        let names: BTreeSet<&str> = self.nodes.iter().map(|node| node.name.as_str()).collect();
        if self.nodes.is_empty() {
            return Err("give at least one node".to_owned());
        }
        if names.len() < self.nodes.len() {
            return Err("two nodes have the same name: give each a unique name".to_owned());
        }
        if !(1..=2).contains(&self.copies) || self.copies > self.nodes.len() {
            return Err("use 1 copy, or 2 with at least 2 nodes".to_owned());
        }
        if self.connections_max == 0 {
            return Err("allow at least one connection to each node".to_owned());
        }
        Ok(())
    }
}
