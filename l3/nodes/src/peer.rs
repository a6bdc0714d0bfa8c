//! A node as a client sees it: its connections, and whether it answers.
//!
//! A node that fails a call is away from then on: calls for its share end at once, and a background
//! task retries the connection until it answers. So a dead node costs a bounded time once, and then
//! nothing. A node that only takes too long for a call may be healthy and busy: if it accepts a new
//! connection it stays, unless that happens repeatedly.

use std::collections::BTreeSet;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::codec::Malformed;
use super::config::{NodeAddress, NodesConfig};
use super::direct::{Adapter, Direct, Shortcut};
use super::handshake::Hello;
use super::handshake_gate::RateLimitedWarning;
use super::link::{LinkError, NodeLink, in_time};
use super::membership::Mark;
use super::messages::{Answer, Gauges, Joining, Reply, Request};
use super::roll::MembershipView;
use terrace_l3::{Figure, Owner, Presence, Results, StoreError};

#[derive(Debug)]
pub(super) struct Peer {
    /// Index in the list.
    number: usize,
    pub(super) node: NodeAddress,
    pub(super) config: Arc<NodesConfig>,
    roll: Arc<MembershipView>,
    instance: [u8; 16],
    /// Owners that this process is connected for.
    owners: Arc<Mutex<BTreeSet<Owner>>>,
    /// Unused connections.
    idle: Mutex<Vec<NodeLink>>,
    /// Notified when a connection is returned to `idle`.
    returned: Notify,
    /// Number of connections in use.
    used: AtomicUsize,
    /// Permits for transfers, and separate ones for all other calls, so that a lookup does not wait
    /// for payloads.
    transfers: Semaphore,
    questions: Semaphore,
    /// Number of times that the node went away or came back: it is away while this is odd. A call
    /// that began before the last change says nothing about the present state.
    turns: AtomicU64,
    closed: AtomicBool,
    failures: AtomicU64,
    /// Calls that timed out since the last one that succeeded.
    late: AtomicU32,
    /// Time of the last successful check that the node is up after a timeout. Checks run one at a
    /// time.
    seen: tokio::sync::Mutex<Option<Instant>>,
    /// Maximum object size of the node, once it is known.
    object_bytes_max: AtomicU64,
    latest: Mutex<Gauges>,
    adapter: Option<Adapter>,
    /// Time until which payloads use TCP because a link has failed.
    by_tcp_until: Mutex<Option<Instant>>,
    /// Warnings about failures of the node's store.
    complaints: RateLimitedWarning,
    direct_bytes: AtomicU64,
}

/// The node did not answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Away;

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Question,
    Transfer,
}

/// A connection for one call. It is kept if the call succeeds, and closed otherwise.
pub(super) struct PeerCall<'a> {
    pub(super) peer: &'a Arc<Peer>,
    pub(super) link: NodeLink,
    /// The connection was used before, so it may have been closed meanwhile.
    is_used: bool,
    /// Value of `turns` at the start.
    began: u64,
    _use: Use<'a>,
    _permit: SemaphorePermit<'a>,
}

/// Counts a connection as used until this is dropped.
struct Use<'a>(&'a AtomicUsize);

impl<'a> Use<'a> {
    fn begin(used: &'a AtomicUsize) -> Self {
        used.fetch_add(1, Ordering::AcqRel);
        Self(used)
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Status of a node, as a client knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerStats {
    /// Name of the node.
    pub name: String,
    /// True if it answers.
    pub is_up: bool,
    /// True if it is known to be used with this list of nodes.
    pub is_member: bool,
    /// Times that it failed to answer.
    pub failures: u64,
    /// Objects on the node.
    pub objects: u64,
    /// Payload of these objects.
    pub bytes: u64,
    /// Payload that the node can hold.
    pub capacity_bytes: u64,
    /// Maximum object size; 0 until the node has been reached.
    pub object_bytes_max: u64,
    /// Payload transferred by RDMA.
    pub direct_bytes: u64,
}

impl PeerStats {
    /// Metrics of each node.
    #[must_use]
    pub fn figures(peers: &[Self]) -> Vec<Figure> {
        let each = |figure: fn(&Self) -> u64| {
            peers.iter().map(move |peer| (peer.name.clone(), figure(peer)))
        };
        let gauges = |name, help, figure| Figure::gauges(name, help, "node", each(figure));
        let counters = |name, help, figure| Figure::counters(name, help, "node", each(figure));
        vec![
            gauges("terrace_node_up", "1 if the node answers.", |node| u64::from(node.is_up)),
            gauges(
                "terrace_node_member",
                "1 if the node is known to be used with the same list of nodes.",
                |node| u64::from(node.is_member),
            ),
            counters(
                "terrace_node_failures_total",
                "Calls that the node did not answer.",
                |node| node.failures,
            ),
            gauges("terrace_node_objects", "Objects on the node.", |node| node.objects),
            gauges("terrace_node_bytes", "Payload bytes on the node.", |node| node.bytes),
            gauges("terrace_node_capacity_bytes", "Capacity of the node.", |node| {
                node.capacity_bytes
            }),
            counters(
                "terrace_node_direct_bytes_total",
                "Payload bytes to and from the node transferred by RDMA.",
                |node| node.direct_bytes,
            ),
        ]
    }
}

impl Peer {
    pub(super) fn new(
        number: usize,
        config: Arc<NodesConfig>,
        roll: Arc<MembershipView>,
        instance: [u8; 16],
        owners: Arc<Mutex<BTreeSet<Owner>>>,
        adapter: Option<Adapter>,
    ) -> Self {
        Self {
            transfers: Semaphore::new(config.connections_max),
            questions: Semaphore::new(config.connections_max),
            number,
            node: config.nodes[number].clone(),
            config,
            roll,
            instance,
            owners,
            idle: Mutex::default(),
            returned: Notify::new(),
            used: AtomicUsize::new(0),
            turns: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            failures: AtomicU64::new(0),
            late: AtomicU32::new(0),
            seen: tokio::sync::Mutex::default(),
            object_bytes_max: AtomicU64::new(0),
            latest: Mutex::default(),
            adapter,
            by_tcp_until: Mutex::default(),
            complaints: RateLimitedWarning::default(),
            direct_bytes: AtomicU64::new(0),
        }
    }

    /// Takes or opens a connection, if the node is not away.
    pub(super) async fn call(self: &Arc<Self>, purpose: Purpose) -> Result<PeerCall<'_>, Away> {
        if self.is_away() {
            return Err(Away);
        }
        let places = match purpose {
            Purpose::Question => &self.questions,
            Purpose::Transfer => &self.transfers,
        };
        let permit = places.acquire().await.map_err(|_| Away)?;
        let began = self.turns.load(Ordering::Acquire);
        // It may have gone away during the wait.
        if self.is_away() {
            return Err(Away);
        }
        let call = |link, is_used| PeerCall {
            peer: self,
            link,
            is_used,
            began,
            _use: Use::begin(&self.used),
            _permit: permit,
        };
        let until = Instant::now() + Duration::from_millis(self.config.connect_timeout_ms);
        if let Some(link) = self.take_idle() {
            return Ok(call(link, true));
        }
        match self.connect().await {
            Ok(link) => Ok(call(link, false)),
            // The node is healthy: wait for one of the existing connections.
            Err(LinkError::Crowded) => match self.wait_for_idle(until).await {
                Some(link) => Ok(call(link, true)),
                None if self.used.load(Ordering::Acquire) > 0 => Err(Away),
                None => Err(self.failed(began, &LinkError::Crowded)),
            },
            Err(error) => Err(self.failed(began, &error)),
        }
    }

    /// Sends a request that may be repeated.
    pub(super) async fn ask(
        self: &Arc<Self>,
        request: &Request,
        limit_ms: u64,
    ) -> Result<Answer, Away> {
        loop {
            let mut call = self.call(Purpose::Question).await?;
            let patience = Duration::from_millis(limit_ms);
            let limit = patience + call.link.stall;
            match in_time(limit, call.exchange(request, patience)).await {
                Ok(answer) => {
                    call.end();
                    return Ok(answer);
                }
                Err(error) if call.is_stale(&error) => {}
                Err(error) => return Err(call.failed(&error).await),
            }
        }
    }

    /// Sends a request that is answered with one result per object, or not at all.
    pub(super) async fn change(
        self: &Arc<Self>,
        request: Request,
        objects: usize,
        limit_ms: u64,
    ) -> Results<()> {
        match self.ask(&request, limit_ms).await {
            Ok(Answer::Done(results)) if results.len() == objects => results,
            Ok(_) => vec![Err(self.unexpected_answer()); objects],
            Err(Away) => vec![Err(StoreError::HolderAway); objects],
        }
    }

    /// Asks the node for its standing, and makes it a member of `store` if one is given.
    pub(super) async fn enter(self: &Arc<Self>, store: Option<Mark>) {
        let addresses = self.roll.addresses();
        let joins = store.map(|store| Joining { store, addresses, replaces: false });
        let request = Request::Enter { seat: self.roll.seat(self.number), joins };
        match self.ask(&request, self.config.control_timeout_ms).await {
            Ok(Answer::Entered(Ok(standing))) => self.roll.note(self.number, standing),
            Ok(Answer::Entered(Err(error))) => self.roll.note_refusal(self.number, &error),
            Ok(_) => drop(self.unexpected_answer()),
            Err(Away) => {}
        }
    }

    /// Converts an error of the node's store about one object for users of all nodes. An operation
    /// that failed on the node leaves the object's state unknown, and does not count against the
    /// other nodes. A missing object may be elsewhere, unless the node is confirmed as its holder
    /// in this client's list.
    pub(super) fn judge<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match result {
            Err(error) if error.is_unwell() || error == StoreError::Closed => {
                self.complaints.say(format_args!("node {}: {error}", self.node.name));
                Err(StoreError::HolderAway)
            }
            Err(StoreError::Missing) if !self.roll.is_confirmed(self.number) => {
                Err(StoreError::HolderAway)
            }
            other => other,
        }
    }

    /// Like [`Peer::judge`], for lookups.
    pub(super) fn judge_presence(
        &self,
        found: Result<Presence, StoreError>,
    ) -> Result<Presence, StoreError> {
        match self.judge(found) {
            Ok(Presence::Absent) if !self.roll.is_confirmed(self.number) => {
                Err(StoreError::HolderAway)
            }
            other => other,
        }
    }

    /// Handles an answer that does not match the request.
    pub(super) fn unexpected_answer(self: &Arc<Self>) -> StoreError {
        let now = self.turns.load(Ordering::Acquire);
        self.failed(now, &LinkError::Malformed(Malformed::Kind(0)));
        StoreError::HolderAway
    }

    /// Marks the node as away until it is reached again, unless its state has changed since the
    /// call began.
    fn failed(self: &Arc<Self>, began: u64, error: &LinkError) -> Away {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let (done, not_done) = (Ordering::AcqRel, Ordering::Acquire);
        let was_there = began.is_multiple_of(2)
            && self.turns.compare_exchange(began, began + 1, done, not_done).is_ok();
        if was_there && !self.closed.load(Ordering::Acquire) {
            self.idle.lock().clear();
            let NodeAddress { name, .. } = &self.node;
            tracing::warn!(
                "node {name} does not answer ({error}); requests compute its share of L3 until it \
                 does"
            );
            let retry = Duration::from_millis(self.config.retry_ms);
            tokio::spawn(reach(Arc::downgrade(self), retry));
        }
        Away
    }

    /// Checks whether a node that timed out is up.
    async fn is_only_late(&self) -> bool {
        /// Number of consecutive timeouts at which a node counts as away.
        const LATE_MAX: u32 = 8;
        let doubted = Instant::now();
        if self.late.fetch_add(1, Ordering::Relaxed) >= LATE_MAX {
            return false;
        }
        let mut seen = self.seen.lock().await;
        if self.is_away() || seen.is_some_and(|seen| seen > doubted) {
            return !self.is_away();
        }
        match self.connect().await {
            Ok(link) => self.idle.lock().push(link),
            Err(LinkError::Crowded) => {}
            Err(_) => return false,
        }
        *seen = Some(Instant::now());
        true
    }

    /// Closes all connections and opens no more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.idle.lock().clear();
    }

    pub(super) fn is_away(&self) -> bool {
        self.closed.load(Ordering::Acquire) || !self.turns.load(Ordering::Acquire).is_multiple_of(2)
    }

    pub(super) fn gauges(&self) -> Gauges {
        *self.latest.lock()
    }

    pub(super) fn stats(&self) -> PeerStats {
        let tier = self.gauges().tier();
        PeerStats {
            name: self.node.name.clone(),
            is_up: !self.is_away(),
            is_member: self.roll.is_member(self.number),
            failures: self.failures.load(Ordering::Relaxed),
            objects: tier.objects,
            bytes: tier.bytes,
            capacity_bytes: tier.capacity_bytes,
            object_bytes_max: self.object_bytes_max.load(Ordering::Relaxed),
            direct_bytes: self.direct_bytes.load(Ordering::Relaxed),
        }
    }

    pub(super) fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    pub(super) fn count_direct(&self, bytes: usize) {
        self.direct_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Uses TCP for payloads for a while, since a link has failed although the node may be healthy.
    pub(super) fn suspend_direct(&self, error: &str) {
        /// Long enough that a network in which links always fail costs little.
        const FOR: Duration = Duration::from_secs(30);
        let until = self.by_tcp_until.lock().replace(Instant::now() + FOR);
        if until.is_none_or(|until| until < Instant::now()) {
            let name = &self.node.name;
            tracing::warn!("pages to and from node {name} use TCP for {FOR:?}: {error}");
        }
    }

    fn may_use_direct(&self) -> bool {
        self.by_tcp_until.lock().is_none_or(|until| until < Instant::now())
    }

    /// Connects and waits for the welcome.
    async fn connect(&self) -> Result<NodeLink, LinkError> {
        let limit = Duration::from_millis(self.config.connect_timeout_ms);
        let hello = Hello::new(&self.config.name, self.instance)?;
        let connect = async {
            let stream = TcpStream::connect(&self.node.address).await?;
            let mut link = NodeLink::greet(stream, &self.config.secret, &hello, limit).await?;
            let (kind, body) = match link.receive(limit).await {
                // A node that has authenticated the client either welcomes it or closes the
                // connection.
                Err(LinkError::Io(_)) => return Err(LinkError::Crowded),
                received => received?,
            };
            let Reply { gauges, answer } = Reply::decode(kind, body)?;
            match answer {
                Answer::Welcome { object_bytes_max } => {
                    self.object_bytes_max.store(object_bytes_max, Ordering::Relaxed);
                    // A restarted node counts its answers from 0.
                    *self.latest.lock() = gauges;
                }
                _ => return Err(Malformed::Kind(kind).into()),
            }
            link.stall = Duration::from_millis(self.config.stall_timeout_ms);
            let seat = self.roll.seat(self.number);
            let request = Request::Enter { seat, joins: None };
            link.send(request.kind(), |body| request.encode(body), &[]).await?;
            let (kind, body) = link.receive(limit).await?;
            let Answer::Entered(Ok(standing)) = Reply::decode(kind, body)?.answer else {
                return Err(Malformed::Kind(kind).into());
            };
            self.roll.note(self.number, standing);
            if standing.member.is_some_and(|member| member.seat != seat) {
                return Err(LinkError::OtherList);
            }
            let owners: Vec<Owner> = self.owners.lock().iter().copied().collect();
            if !owners.is_empty() {
                let request = Request::Owners(owners);
                link.send(request.kind(), |body| request.encode(body), &[]).await?;
                let (kind, body) = link.receive(limit).await?;
                Reply::decode(kind, body)?;
            }
            Ok(link)
        };
        timeout(limit, connect).await.map_err(|_| LinkError::Stalled(limit))?
    }

    /// Takes an idle connection that is not known to be closed.
    fn take_idle(&self) -> Option<NodeLink> {
        let mut idle = self.idle.lock();
        while let Some(link) = idle.pop() {
            if link.is_quiet() {
                return Some(link);
            }
        }
        None
    }

    /// Waits for a connection that another call returns, as long as there are any.
    async fn wait_for_idle(&self, until: Instant) -> Option<NodeLink> {
        loop {
            let mut returned = pin!(self.returned.notified());
            returned.as_mut().enable();
            // Read before checking `idle`: a call returns its connection before it is no longer
            // counted.
            let used = self.used.load(Ordering::Acquire);
            if let Some(link) = self.take_idle() {
                return Some(link);
            }
            let waits = used > 0 && !self.is_away();
            if !waits || timeout_at(until, returned).await.is_err() {
                return None;
            }
        }
    }

    /// Answers overtake each other; the latest statistics count.
    fn note(&self, gauges: Gauges) {
        let mut latest = self.latest.lock();
        if gauges.stamp >= latest.stamp {
            *latest = gauges;
        }
    }
}

impl PeerCall<'_> {
    pub(super) async fn send(&mut self, request: &Request) -> Result<(), LinkError> {
        self.link.send(request.kind(), |body| request.encode(body), &[]).await
    }

    pub(super) async fn receive(&mut self, patience: Duration) -> Result<Answer, LinkError> {
        let (kind, body) = self.link.receive(patience).await?;
        let Reply { gauges, answer } = Reply::decode(kind, body)?;
        self.peer.note(gauges);
        Ok(answer)
    }

    pub(super) async fn exchange(
        &mut self,
        request: &Request,
        patience: Duration,
    ) -> Result<Answer, LinkError> {
        self.send(request).await?;
        self.receive(patience).await
    }

    /// RDMA link of the connection, if both sides have an adapter.
    pub(super) async fn direct(
        &mut self,
        patience: Duration,
    ) -> Result<Option<Arc<Direct>>, LinkError> {
        let Some(adapter) = self.peer.adapter().filter(|_| self.peer.may_use_direct()) else {
            return Ok(None);
        };
        match &self.link.shortcut {
            Shortcut::Linked(direct) => return Ok(Some(direct.clone())),
            Shortcut::None => return Ok(None),
            Shortcut::Untried => self.link.shortcut = Shortcut::None,
        }
        let direct = match adapter.link() {
            Ok(direct) => direct,
            Err(error) => {
                self.peer.suspend_direct(&error);
                return Ok(None);
            }
        };
        let request = Request::Link(direct.end());
        let answer = self.exchange(&request, patience).await?;
        let Answer::Linked(end) = answer else {
            return Err(Malformed::Kind(request.kind()).into());
        };
        let refused = || Err("the node has no RDMA adapter for this client".to_owned());
        match end.map_or_else(refused, |end| direct.connect(&end)) {
            Ok(()) => {
                let direct = Arc::new(direct);
                self.link.shortcut = Shortcut::Linked(direct.clone());
                Ok(Some(direct))
            }
            Err(error) => {
                self.peer.suspend_direct(&error);
                Ok(None)
            }
        }
    }

    /// Records that the connection's link has failed.
    pub(super) fn lose_direct(&mut self, error: &str) {
        self.link.shortcut = Shortcut::None;
        self.peer.suspend_direct(error);
    }

    /// Records that the call has failed because of the node.
    pub(super) async fn failed(&self, error: &LinkError) -> Away {
        if matches!(error, LinkError::Stalled(_)) && self.peer.is_only_late().await {
            self.peer.failures.fetch_add(1, Ordering::Relaxed);
            return Away;
        }
        self.peer.failed(self.began, error)
    }

    /// Returns true if the connection had been closed before the call: the node may be healthy.
    pub(super) fn is_stale(&self, error: &LinkError) -> bool {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        match error {
            LinkError::Io(error) => {
                let closed = [BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof];
                self.is_used && closed.contains(&error.kind())
            }
            LinkError::Stalled(_)
            | LinkError::Malformed(_)
            | LinkError::Version(_)
            | LinkError::Refused
            | LinkError::OtherList
            | LinkError::NotAdmitted
            | LinkError::Crowded => false,
        }
    }

    /// Returns the connection for further calls.
    pub(super) fn end(self) {
        let PeerCall { peer, link, .. } = self;
        peer.late.store(0, Ordering::Relaxed);
        if !peer.is_away() {
            peer.idle.lock().push(link);
            peer.returned.notify_one();
        }
    }
}

/// Tries to reach a node until it answers.
async fn reach(peer: Weak<Peer>, mut pause: Duration) {
    loop {
        sleep(pause).await;
        let Some(peer) = peer.upgrade() else { return };
        if peer.closed.load(Ordering::Acquire) {
            return;
        }
        match peer.connect().await {
            Ok(link) => {
                peer.idle.lock().push(link);
                peer.turns.fetch_add(1, Ordering::AcqRel);
                tracing::warn!("node {} answers again and is used", peer.node.name);
                return;
            }
            Err(error) => tracing::debug!("node {} still does not answer: {error}", peer.node.name),
        }
        pause = (2 * pause).min(Duration::from_millis(peer.config.retry_max_ms));
    }
}
