//! Nodes on this machine, in this process.

use terrace_l3::node::{Holding, NodeAddress, NodeConfig, NodeSecret, NodeServer, RunningNode};
use terrace_l3::{NodesConfig, NodesStore};

/// Several nodes that serve, and how to use them.
#[derive(Debug)]
pub struct LocalNodes {
    /// The nodes.
    pub nodes: Vec<RunningNode>,
    /// What a client needs to use them.
    pub config: NodesConfig,
}

impl LocalNodes {
    /// So many nodes, each with a store of its own, on free ports of the loopback interface. Their names
    /// are always the same, so that objects are always in the same places.
    ///
    /// # Panics
    /// When there is no tokio runtime, or no port is left.
    #[must_use]
    pub fn start(count: usize, holding: impl Fn() -> Holding) -> Self {
        let secret = secret();
        let mut nodes = Vec::new();
        let mut addresses = Vec::new();
        for number in 0..count {
            let config = NodeConfig { full_wait_ms: 5_000, ..NodeConfig::new(secret.clone()) };
            let server = NodeServer::bind("127.0.0.1:0", holding(), config).expect("a free port");
            let node = server.start().expect("a runtime with input and output");
            let address = node.address().to_string();
            addresses.push(NodeAddress { name: format!("node-{number}"), address, weight: 1.0 });
            nodes.push(node);
        }
        Self { nodes, config: patient(NodesConfig::new(addresses, secret)) }
    }

    /// A client of all of them.
    ///
    /// # Panics
    /// When the configuration was changed so that it cannot work.
    #[must_use]
    pub fn store(&self) -> NodesStore {
        NodesStore::new(self.config.clone()).expect("a configuration that works")
    }
}

/// What the nodes of tests and their clients know.
///
/// # Panics
/// Never: it is long enough.
#[must_use]
pub fn secret() -> NodeSecret {
    NodeSecret::new(b"known to all of these tests").expect("it is long enough")
}

/// Deadlines that a slow machine does not reach.
#[must_use]
pub fn patient(config: NodesConfig) -> NodesConfig {
    const PATIENCE_MS: u64 = 120_000;
    NodesConfig {
        connect_timeout_ms: PATIENCE_MS,
        exists_timeout_ms: PATIENCE_MS,
        get_timeout_ms: PATIENCE_MS,
        put_timeout_ms: PATIENCE_MS,
        control_timeout_ms: PATIENCE_MS,
        flush_timeout_ms: PATIENCE_MS,
        stall_timeout_ms: PATIENCE_MS,
        ..config
    }
}
