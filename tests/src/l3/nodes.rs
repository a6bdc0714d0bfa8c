//! Nodes on this machine, in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use terrace_l3::LendingStore;
use terrace_l3_nodes::{
    NodeAddress, NodeConfig, NodeSecret, NodeServer, NodesConfig, NodesStore, RunningNode,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

/// Several nodes that serve, and how to use them.
#[derive(Debug)]
pub struct LocalNodes {
    /// The nodes.
    pub nodes: Vec<RunningNode>,
    /// Configuration of a client of these nodes.
    pub config: NodesConfig,
}

impl LocalNodes {
    /// Starts `count` nodes, each with its own store, on free ports of the loopback interface.
    /// Their names are constant, so that the placement of objects is too.
    ///
    /// # Panics
    /// When there is no tokio runtime, or no port is left.
    #[must_use]
    pub fn start(count: usize, holding: impl Fn() -> Arc<dyn LendingStore>) -> Self {
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

    /// Has clients reach a node through a gate.
    pub async fn put_gate_before(&mut self, number: usize) -> Arc<Gate> {
        let address = &mut self.config.nodes[number].address;
        let gate = Gate::before(address.clone()).await;
        address.clone_from(&gate.address);
        gate
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

/// Stands between clients and a node. Connections below a number are open and nothing gets through.
#[derive(Debug)]
pub struct Gate {
    address: String,
    accepted: AtomicU64,
    frozen_below: AtomicU64,
    answers_frozen: AtomicBool,
    /// Number of bytes that pass at full speed; after them, one at a time.
    freely: AtomicU64,
}

impl Gate {
    async fn before(node: String) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("the loopback interface works").to_string();
        let gate = Arc::new(Self {
            address,
            accepted: AtomicU64::new(0),
            frozen_below: AtomicU64::new(0),
            answers_frozen: AtomicBool::new(false),
            freely: AtomicU64::new(u64::MAX),
        });
        tokio::spawn({
            let gate = gate.clone();
            async move {
                loop {
                    let client = listener.accept().await.expect("the loopback interface works").0;
                    let number = gate.accepted.fetch_add(1, Ordering::SeqCst);
                    let node =
                        TcpStream::connect(&node).await.expect("the loopback interface works");
                    let (from_client, to_client) = client.into_split();
                    let (from_node, to_node) = node.into_split();
                    tokio::spawn(gate.clone().pass(number, from_client, to_node, false));
                    tokio::spawn(gate.clone().pass(number, from_node, to_client, true));
                }
            }
        });
        gate
    }

    async fn pass(
        self: Arc<Self>,
        number: u64,
        mut from: OwnedReadHalf,
        mut to: OwnedWriteHalf,
        is_answer: bool,
    ) {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut bytes).await {
            let is_frozen = || {
                number < self.frozen_below.load(Ordering::SeqCst)
                    || (is_answer && self.answers_frozen.load(Ordering::SeqCst))
            };
            while is_frozen() {
                sleep(Duration::from_millis(10)).await;
            }
            let left = self.freely.load(Ordering::SeqCst);
            if left >= length as u64 {
                if left < u64::MAX {
                    self.freely.fetch_sub(length as u64, Ordering::SeqCst);
                }
                let _ = to.write_all(&bytes[..length]).await;
                continue;
            }
            for byte in &bytes[..length] {
                if to.write_all(&[*byte]).await.is_err() {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
    }

    /// Requests of clients pass, and no answers.
    pub fn freeze_answers(&self) {
        self.answers_frozen.store(true, Ordering::SeqCst);
    }

    /// After this number of bytes, one passes at a time, twenty per second.
    pub fn drip_after(&self, bytes: u64) {
        self.freely.store(bytes, Ordering::SeqCst);
    }

    /// Nothing gets through any more.
    pub fn freeze_all(&self) {
        self.frozen_below.store(u64::MAX, Ordering::SeqCst);
    }

    /// Connections that are made from now on work, and those that there are do not.
    pub fn let_others_through(&self) {
        self.frozen_below.store(self.accepted.load(Ordering::SeqCst), Ordering::SeqCst);
        self.answers_frozen.store(false, Ordering::SeqCst);
    }
}

/// Secret of the nodes of tests and their clients.
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
