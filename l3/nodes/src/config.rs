//! What can be set about nodes and their clients.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use terrace_cache::PageKey;

use super::handshake::NodeSecret;

/// Who may use a node, and how much of it.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Who may use it.
    pub clients: Vec<NodeClient>,
    /// Connections at a time.
    pub connections_max: usize,
    /// Connections at a time that have not proved anything yet. When there are more, the oldest are closed,
    /// of the address that has the most.
    pub strangers_max: usize,
    /// How long a handshake may take.
    pub handshake_timeout_ms: u64,
    /// How long a client may do nothing in the middle of a call. A transfer as a whole may take this time, and what its
    /// bytes take at 4 MB per second.
    pub stall_timeout_ms: u64,
    /// How long a connection may be idle.
    pub idle_timeout_ms: u64,
    /// How much of the memory one call may have at a time.
    pub call_bytes_max: usize,
    /// How long a put waits for room.
    pub full_wait_ms: u64,
    /// Pages of memory for transfers of what is on disk only.
    pub scratch_pages: u32,
    /// How long the hard pins of a client stay after its last connection has ended.
    pub pins_kept_ms: u64,
    /// Which RDMA adapter to use.
    pub rdma: RdmaChoice,
    /// How long a client may take to read by RDMA what was lent to it.
    pub rdma_lease_ms: u64,
    /// Where the node remembers the store that it belongs to: the folder of its disk store, so that both are lost
    /// together. `None` if its objects do not survive its restart.
    pub folder: Option<PathBuf>,
}

impl NodeConfig {
    /// A node for everybody who has this secret.
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

/// Somebody who may use a node.
#[derive(Clone, Debug)]
pub struct NodeClient {
    /// What it calls itself; the client without a name is everybody without a name.
    pub name: String,
    /// What it must know.
    pub secret: NodeSecret,
    /// The digests of the namespaces that it may use, and how much of the node they may take; all of everything if
    /// `None`.
    pub limits: Option<ClientLimits>,
}

/// What a client is restricted to.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientLimits {
    /// The digests of the namespaces that it may use. One that several clients may use counts for the first of them.
    pub namespaces: BTreeSet<PageKey>,
    /// The share of the node's memory and disk that objects of these namespaces may take, and of its connections that
    /// the client may have: more than 0, and at most 1.
    pub share: f64,
}

impl ClientLimits {
    /// These namespaces, and half of the node.
    #[must_use]
    pub fn new(namespaces: BTreeSet<PageKey>) -> Self {
        Self { namespaces, share: 0.5 }
    }
}

/// One of the nodes that a client uses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeAddress {
    /// What decides about its share of the objects: a node that keeps its name keeps its share.
    pub name: String,
    /// Where it listens, as HOST:PORT.
    pub address: String,
    /// The size of its share, beside those of the others.
    pub weight: f64,
}

impl FromStr for NodeAddress {
    type Err = String;

    /// Reads HOST:PORT, NAME=HOST:PORT, and either with *WEIGHT after it.
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

/// Which nodes a client uses, and how.
#[derive(Clone, Debug)]
pub struct NodesConfig {
    /// The nodes.
    pub nodes: Vec<NodeAddress>,
    /// What nodes and clients must both know.
    pub secret: NodeSecret,
    /// What this client calls itself, where nodes have a list of clients.
    pub name: String,
    /// On how many nodes each object is kept: 1, or 2 so that the death of a node costs no hits.
    pub copies: usize,
    /// Connections to each node.
    pub connections_max: usize,
    /// How long connecting to a node may take.
    pub connect_timeout_ms: u64,
    /// How long a node may take to answer which objects it has.
    pub exists_timeout_ms: u64,
    /// How long a node may take to begin to send objects, with any wait for promotions.
    pub get_timeout_ms: u64,
    /// How long a node may take to find room for objects, and to store them.
    pub put_timeout_ms: u64,
    /// How long a node may take to pin, unpin or remove.
    pub control_timeout_ms: u64,
    /// How long a node may take to make everything durable.
    pub flush_timeout_ms: u64,
    /// How long a node may do nothing in the middle of a transfer.
    pub stall_timeout_ms: u64,
    /// A node that did not answer is tried again after this time, which doubles with each failure ...
    pub retry_ms: u64,
    /// ... up to this.
    pub retry_max_ms: u64,
    /// How often a client with pins says that it is there, if it has nothing else to say: some times within the
    /// patience of its nodes.
    pub show_up_ms: u64,
    /// Which RDMA adapter to use.
    pub rdma: RdmaChoice,
}

/// Which RDMA adapter to use, in builds that can use any. Without one, everything goes by TCP.
/// It is written as `auto`, `never` or the adapter's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum RdmaChoice {
    /// The first one that will do.
    #[default]
    Auto,
    /// None.
    Never,
    /// The one of that name, as `rdma link` writes it.
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
    /// One copy of everything on these nodes.
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

    /// Whether this can work.
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
