//! A node: accepts connections and serves its store to authenticated clients.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::config::{ClientLimits, NodeClient, NodeConfig};
use super::direct::{Adapter, Region};
use super::handshake::{Hello, NodeSecret};
use super::handshake_gate::{HandshakeGate, RateLimitedWarning};
use super::holder::Holder;
use super::holds::{Holds, Portion, User};
use super::link::{LinkError, NodeLink, in_time};
use super::membership::Member;
use super::session::Session;
use terrace_l3::backend::{LendingStore, NamespaceShare};
use terrace_l3::{StoreError, StoreStats};

/// A node that listens and does not serve yet.
#[derive(Debug)]
pub struct NodeServer {
    listener: std::net::TcpListener,
    address: SocketAddr,
    shared: Arc<NodeCore>,
}

/// A node that serves. Dropping it cuts all connections.
#[derive(Debug)]
pub struct RunningNode {
    address: SocketAddr,
    shared: Arc<NodeCore>,
    draining: watch::Sender<bool>,
    /// Taken when the node is stopped.
    accepting: Mutex<Option<JoinHandle<()>>>,
}

/// Reason why a node cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The address cannot be used.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: String,
        /// Message of the system.
        error: io::Error,
    },
    /// The configuration has no clients.
    #[error("a node needs a secret that its clients know, or a list of clients")]
    NoClients,
    /// A client's share is out of range.
    #[error("the share of client {name:?} must be more than 0 and at most 1, not {share}")]
    Share {
        /// Name of the client.
        name: String,
        /// Its share.
        share: f64,
    },
    /// Two clients have the same name.
    #[error("two clients have the name {0:?}: give each a unique name")]
    SameName(String),
    /// The store cannot be served.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// The system has no random numbers.
    #[error("the system has no random numbers: {0}")]
    Random(io::Error),
    /// The record of the node's membership cannot be used.
    #[error("cannot use {}: {error}", path.display())]
    Membership {
        /// The file or its folder.
        path: PathBuf,
        /// Reason.
        error: io::Error,
    },
}

#[derive(Debug)]
pub(super) struct NodeCore {
    pub(super) holder: Holder,
    pub(super) config: NodeConfig,
    /// RDMA adapter, if the machine has one.
    pub(super) adapter: Option<Adapter>,
    /// Registrations of the store's memory.
    _regions: Vec<Region>,
    pub(super) counters: NodeCounters,
    pub(super) holds: Holds,
    pub(super) member: Member,
    clients: BTreeMap<String, Arc<NodeClient>>,
    /// Secret for clients with unknown names, so that a handshake does not reveal which names
    /// exist.
    decoy_secret: NodeSecret,
    answers: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct NodeCounters {
    connections: AtomicU64,
    accepted: AtomicU64,
    refused: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) forbidden: AtomicU64,
    pub(super) sent_bytes: AtomicU64,
    pub(super) received_bytes: AtomicU64,
    pub(super) direct_bytes: AtomicU64,
}

/// Statistics of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeStats {
    /// Current connections.
    pub connections: u64,
    /// Connections whose client was authenticated.
    pub accepted: u64,
    /// Connections closed because of a failed handshake or a limit.
    pub refused: u64,
    /// Requests answered.
    pub requests: u64,
    /// Connections closed because of a malformed request.
    pub malformed: u64,
    /// Objects that clients requested without permission.
    pub forbidden: u64,
    /// Payload sent.
    pub sent_bytes: u64,
    /// Payload received.
    pub received_bytes: u64,
    /// Part of the payload that was transferred by RDMA.
    pub direct_bytes: u64,
}

impl NodeServer {
    /// Listens at `address`.
    ///
    /// # Errors
    /// If the address cannot be used, or the configuration is invalid.
    pub fn bind(
        address: &str,
        store: Arc<dyn LendingStore>,
        config: NodeConfig,
    ) -> Result<Self, NodeError> {
        let unusable = |error| NodeError::Listen { address: address.to_owned(), error };
        let listener = std::net::TcpListener::bind(address).map_err(unusable)?;
        listener.set_nonblocking(true).map_err(unusable)?;
        let local = listener.local_addr().map_err(unusable)?;
        let mut clients = BTreeMap::new();
        let mut shares = Vec::new();
        for client in &config.clients {
            if let Some(ClientLimits { namespaces, share }) = &client.limits {
                if !(*share > 0.0 && *share <= 1.0) {
                    return Err(NodeError::Share { name: client.name.clone(), share: *share });
                }
                shares.push(NamespaceShare { namespaces: namespaces.clone(), share: *share });
            }
            if clients.insert(client.name.clone(), Arc::new(client.clone())).is_some() {
                return Err(NodeError::SameName(client.name.clone()));
            }
        }
        if clients.is_empty() {
            return Err(NodeError::NoClients);
        }
        let folder = config.folder.as_deref();
        let member = Member::open(folder).map_err(|error| {
            let path = folder.unwrap_or(Path::new("")).join("membership");
            NodeError::Membership { path, error }
        })?;
        let holder = Holder::new(store, config.scratch_pages)?;
        holder.set_shares(&shares);
        let (adapter, regions) = open_adapter(&holder, &config);
        let shared = NodeCore {
            holder,
            config,
            adapter,
            _regions: regions,
            counters: NodeCounters::default(),
            holds: Holds::default(),
            member,
            clients,
            decoy_secret: NodeSecret::random_secret().map_err(NodeError::Random)?,
            answers: AtomicU64::new(0),
        };
        Ok(Self { listener, address: local, shared: Arc::new(shared) })
    }

    /// Address of the listener.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves in the background. Call it in a tokio runtime.
    ///
    /// # Errors
    /// If the runtime cannot use the listener.
    pub fn start(self) -> io::Result<RunningNode> {
        let Self { listener, address, shared } = self;
        let listener = TcpListener::from_std(listener)?;
        let (draining, drain) = watch::channel(false);
        let accepting = tokio::spawn(accept(listener, shared.clone(), drain));
        let accepting = Mutex::new(Some(accepting));
        Ok(RunningNode { address, shared, draining, accepting })
    }
}

impl RunningNode {
    /// Address of the listener.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops accepting connections and requests, waits up to `patience` for those in progress, and
    /// shuts the store down. Returns whether all of them ended in time.
    ///
    /// # Errors
    /// As reported by the store.
    pub async fn stop(&self, patience: Duration) -> Result<bool, StoreError> {
        self.draining.send_replace(true);
        let accepting = self.accepting.lock().take();
        let mut ended = true;
        if let Some(mut accepting) = accepting {
            ended = timeout(patience, &mut accepting).await.is_ok();
            if !ended {
                accepting.abort();
                let _ = accepting.await;
            }
        }
        self.shared.holder.store().shutdown().await?;
        Ok(ended)
    }

    /// Statistics of the node.
    #[must_use]
    pub fn stats(&self) -> NodeStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let NodeCounters {
            connections,
            accepted,
            refused,
            requests,
            malformed,
            forbidden,
            sent_bytes,
            received_bytes,
            direct_bytes,
        } = &self.shared.counters;
        NodeStats {
            connections: read(connections),
            accepted: read(accepted),
            refused: read(refused),
            requests: read(requests),
            malformed: read(malformed),
            forbidden: read(forbidden),
            sent_bytes: read(sent_bytes),
            received_bytes: read(received_bytes),
            direct_bytes: read(direct_bytes),
        }
    }

    /// Statistics of its store.
    #[must_use]
    pub fn store_stats(&self) -> StoreStats {
        self.shared.holder.store().stats()
    }
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        if let Some(accepting) = &*self.accepting.lock() {
            accepting.abort();
        }
    }
}

impl NodeCore {
    /// Number of the next answer.
    pub(super) fn stamp(&self) -> u64 {
        self.answers.fetch_add(1, Ordering::Relaxed)
    }

    /// Quota of one user: transfers may use half of the memory.
    fn portion(&self) -> Portion {
        let objects = Arc::new(Semaphore::new((self.holder.slots() as usize / 2).max(1)));
        Portion { objects, scratch: self.holder.share() }
    }

    /// Maximum number of connections of a client.
    fn connections_max(&self, client: &NodeClient) -> usize {
        client.limits.as_ref().map_or(usize::MAX, |limits| {
            ((self.config.connections_max as f64 * limits.share) as usize).max(1)
        })
    }

    fn secret_of(&self, hello: &Hello) -> NodeSecret {
        self.clients.get(&hello.name).map_or(&self.decoy_secret, |client| &client.secret).clone()
    }
}

/// Accepts connections until the node is told to stop, and then waits for the remaining ones. They
/// end with the task.
async fn accept(listener: TcpListener, shared: Arc<NodeCore>, mut drain: watch::Receiver<bool>) {
    /// Retrying at once when the system has no more descriptors would only waste CPU.
    const PAUSE: Duration = Duration::from_millis(100);
    let door = HandshakeGate::new(shared.config.strangers_max);
    let refusals = Arc::new(RateLimitedWarning::default());
    let connections = Arc::new(Semaphore::new(shared.config.connections_max));
    let mut sessions = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = sessions.join_next() => continue,
            _ = drain.wait_for(|draining| *draining) => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                sleep(PAUSE).await;
                continue;
            }
        };
        let mut place = door.enter(peer.ip());
        let (shared, drain, connections) = (shared.clone(), drain.clone(), connections.clone());
        let refusals = refusals.clone();
        sessions.spawn(async move {
            let refused = |why: fmt::Arguments<'_>| {
                shared.counters.refused.fetch_add(1, Ordering::Relaxed);
                refusals.say(format_args!("{peer} was refused: {why}"));
            };
            let known = tokio::select! {
                known = greet(stream, &shared) => known,
                () = place.lost() => {
                    return refused(format_args!("it did not authenticate while others were waiting"));
                }
            };
            drop(place);
            let Ok(_place) = connections.try_acquire_owned() else {
                return refused(format_args!("the maximum number of connections is reached"));
            };
            match known {
                Ok((link, client, user)) => {
                    let connections_max = shared.connections_max(&client);
                    let portion = shared.holds.enter(&user, connections_max, || shared.portion());
                    let Some(portion) = portion else {
                        let name = &client.name;
                        return refused(format_args!(
                            "client {name} has {connections_max} connections, its share"
                        ));
                    };
                    shared.counters.accepted.fetch_add(1, Ordering::Relaxed);
                    shared.counters.connections.fetch_add(1, Ordering::Relaxed);
                    let session = Session::new(shared.clone(), link, client, portion);
                    let ended = session.run(drain).await;
                    shared.holds.leave(user);
                    shared.counters.connections.fetch_sub(1, Ordering::Relaxed);
                    if let Err(LinkError::Malformed(error)) = &ended {
                        shared.counters.malformed.fetch_add(1, Ordering::Relaxed);
                        tracing::warn!("{peer} sent a malformed request: {error}");
                    } else if let Err(error) = ended {
                        tracing::debug!("the connection of {peer} ended: {error}");
                    }
                }
                Err(error) => refused(format_args!("{error}")),
            }
        });
    }
    drop(listener);
    while sessions.join_next().await.is_some() {}
}

/// Opens the adapter, if it can use all of the store's memory.
fn open_adapter(holder: &Holder, config: &NodeConfig) -> (Option<Adapter>, Vec<Region>) {
    let Some(adapter) = Adapter::open(&config.rdma) else { return (None, Vec::new()) };
    let regions = holder.arenas().into_iter().map(|arena| adapter.register(arena));
    match regions.collect::<Option<Vec<_>>>() {
        Some(regions) => (Some(adapter), regions),
        None => (None, Vec::new()),
    }
}

/// Authenticates a client.
async fn greet(
    stream: TcpStream,
    shared: &Arc<NodeCore>,
) -> Result<(NodeLink, Arc<NodeClient>, User), LinkError> {
    let NodeConfig { handshake_timeout_ms, stall_timeout_ms, .. } = shared.config;
    let limit = Duration::from_millis(handshake_timeout_ms);
    let welcome = NodeLink::welcome(stream, |hello| shared.secret_of(hello), limit);
    let (mut link, hello) = in_time(limit, welcome).await?;
    link.stall = Duration::from_millis(stall_timeout_ms);
    // A client with an unknown name cannot know the node's random secret.
    let client = shared.clients.get(&hello.name).ok_or(LinkError::Refused)?;
    let user = match client.limits {
        Some(_) => User::Client(hello.name),
        None => User::Process(hello.instance),
    };
    Ok((link, client.clone(), user))
}
