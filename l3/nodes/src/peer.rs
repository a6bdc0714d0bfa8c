//! One node as a client sees it: its connections, and whether it answers at all.
//!
//! A node that fails a call is away from then on: calls about its share end at once, and a task in the
//! background tries to reach it until it answers. So a dead node costs a bounded time once and then
//! nothing. One that only takes too long over a call may be well and busy: if it welcomes a new connection
//! it stays, unless that happens again and again.

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
use super::door::SparingWarning;
use super::handshake::Hello;
use super::link::{Link, LinkError, in_time};
use super::membership::Mark;
use super::messages::{Answer, Gauges, Joining, Reply, Request};
use super::roll::Roll;
use terrace_l3::{Figure, Owner, Presence, Results, StoreError};

#[derive(Debug)]
pub(super) struct Peer {
    /// Its place in the list.
    number: usize,
    pub(super) node: NodeAddress,
    pub(super) config: Arc<NodesConfig>,
    roll: Arc<Roll>,
    instance: [u8; 16],
    /// Whom this process stands for.
    owners: Arc<Mutex<BTreeSet<Owner>>>,
    /// Connections that nobody uses at the moment.
    idle: Mutex<Vec<Link>>,
    /// Told of each that comes back there.
    returned: Notify,
    /// Connections that somebody uses.
    used: AtomicUsize,
    /// For transfers, and apart from them for everything else, so that a question does not wait for
    /// bytes.
    transfers: Semaphore,
    questions: Semaphore,
    /// Counts how often the node went away and came back: it is away while this is odd. A call that
    /// began before the last of these turns says nothing about the node as it is now.
    turns: AtomicU64,
    closed: AtomicBool,
    failures: AtomicU64,
    /// Calls since the last one that ended well which were not answered in time.
    late: AtomicU32,
    /// When it last welcomed somebody who doubted that it is there. They ask one after the other.
    seen: tokio::sync::Mutex<Option<Instant>>,
    /// The largest object that it takes, once it has said so.
    object_bytes_max: AtomicU64,
    latest: Mutex<Gauges>,
    adapter: Option<Adapter>,
    /// Until when payloads go by TCP because a link has failed.
    by_tcp_until: Mutex<Option<Instant>>,
    /// Failures of the node's store.
    complaints: SparingWarning,
    direct_bytes: AtomicU64,
}

/// The node did not answer, or not in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Away;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Question,
    Transfer,
}

/// A connection for one call. If the call succeeds it is put back, otherwise it is closed.
pub(super) struct Call<'a> {
    pub(super) peer: &'a Arc<Peer>,
    pub(super) link: Link,
    /// It was used before, so it may have been closed meanwhile.
    is_used: bool,
    /// The node's turns when it began.
    began: u64,
    _use: Use<'a>,
    _permit: SemaphorePermit<'a>,
}

/// Counts a connection while somebody uses it.
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

/// What a client knows about a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerStats {
    /// Its name.
    pub name: String,
    /// Whether it answers.
    pub is_up: bool,
    /// Whether it is known to be used with this list of nodes.
    pub is_member: bool,
    /// Times that it failed to.
    pub failures: u64,
    /// Objects that it has.
    pub objects: u64,
    /// Their payload.
    pub bytes: u64,
    /// What it could hold.
    pub capacity_bytes: u64,
    /// The largest object that it takes; 0 until it has been reached.
    pub object_bytes_max: u64,
    /// Payload that went by RDMA.
    pub direct_bytes: u64,
}

impl PeerStats {
    /// What is known about each node, for whoever collects metrics.
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
        roll: Arc<Roll>,
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
            complaints: SparingWarning::default(),
            direct_bytes: AtomicU64::new(0),
        }
    }

    /// A connection, if the node is there.
    pub(super) async fn call(self: &Arc<Self>, purpose: Purpose) -> Result<Call<'_>, Away> {
        if self.is_away() {
            return Err(Away);
        }
        let places = match purpose {
            Purpose::Question => &self.questions,
            Purpose::Transfer => &self.transfers,
        };
        let permit = places.acquire().await.map_err(|_| Away)?;
        let began = self.turns.load(Ordering::Acquire);
        // It may have gone while we waited.
        if self.is_away() {
            return Err(Away);
        }
        let call = |link, is_used| Call {
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
            // The node is well: one of the connections that there are will do.
            Err(LinkError::Crowded) => match self.wait_for_idle(until).await {
                Some(link) => Ok(call(link, true)),
                None if self.used.load(Ordering::Acquire) > 0 => Err(Away),
                None => Err(self.failed(began, &LinkError::Crowded)),
            },
            Err(error) => Err(self.failed(began, &error)),
        }
    }

    /// Asks a question: all may be asked twice.
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

    /// A question that is answered for each object, or with nothing.
    pub(super) async fn change(
        self: &Arc<Self>,
        request: Request,
        objects: usize,
        limit_ms: u64,
    ) -> Results<()> {
        match self.ask(&request, limit_ms).await {
            Ok(Answer::Done(results)) if results.len() == objects => results,
            Ok(_) => vec![Err(self.nonsense()); objects],
            Err(Away) => vec![Err(StoreError::HolderAway); objects],
        }
    }

    /// Has the node say what it is, and makes it a member of a store if there is one to join.
    pub(super) async fn enter(self: &Arc<Self>, store: Option<Mark>) {
        let addresses = self.roll.addresses();
        let joins = store.map(|store| Joining { store, addresses, replaces: false });
        let request = Request::Enter { seat: self.roll.seat(self.number), joins };
        match self.ask(&request, self.config.control_timeout_ms).await {
            Ok(Answer::Entered(Ok(standing))) => self.roll.note(self.number, standing),
            Ok(Answer::Entered(Err(error))) => self.roll.note_refusal(self.number, &error),
            Ok(_) => drop(self.nonsense()),
            Err(Away) => {}
        }
    }

    /// What an error of the node's store about one object says to those who use all nodes: what a node cannot tell
    /// or do is unknown, and no reason to leave the other nodes alone. Nor is an object that it has not got known to
    /// be nowhere, unless it is known to be where this client's list has it.
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

    /// The same about what was asked for without being read.
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

    /// The node answered something else than it was asked.
    pub(super) fn nonsense(self: &Arc<Self>) -> StoreError {
        let now = self.turns.load(Ordering::Acquire);
        self.failed(now, &LinkError::Malformed(Malformed::Kind(0)));
        StoreError::HolderAway
    }

    /// The node is away, until somebody reaches it again; unless that has happened since the call
    /// began, or it was away then.
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

    /// Whether a node that was late with an answer is there all the same.
    async fn is_only_late(&self) -> bool {
        /// Whoever is late so often is of no use.
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

    /// Closes all connections and makes no more.
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

    /// A link has failed while the node may be well: for a while, payloads go by TCP.
    pub(super) fn distrust_direct(&self, error: &str) {
        /// Long enough that a network in which links always fail costs little.
        const FOR: Duration = Duration::from_secs(30);
        let until = self.by_tcp_until.lock().replace(Instant::now() + FOR);
        if until.is_none_or(|until| until < Instant::now()) {
            let name = &self.node.name;
            tracing::warn!("pages to and from node {name} use TCP for {FOR:?}: {error}");
        }
    }

    fn trusts_direct(&self) -> bool {
        self.by_tcp_until.lock().is_none_or(|until| until < Instant::now())
    }

    /// Connects and waits to be welcomed.
    async fn connect(&self) -> Result<Link, LinkError> {
        let limit = Duration::from_millis(self.config.connect_timeout_ms);
        let hello = Hello::new(&self.config.name, self.instance)?;
        let connect = async {
            let stream = TcpStream::connect(&self.node.address).await?;
            let mut link = Link::greet(stream, &self.config.secret, &hello, limit).await?;
            let (kind, body) = match link.receive(limit).await {
                // Whoever is known is welcomed or, without a word, sent away.
                Err(LinkError::Io(_)) => return Err(LinkError::Crowded),
                received => received?,
            };
            let Reply { gauges, answer } = Reply::decode(kind, body)?;
            match answer {
                Answer::Welcome { object_bytes_max } => {
                    self.object_bytes_max.store(object_bytes_max, Ordering::Relaxed);
                    // A node that was started again counts its answers from 0.
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

    /// A connection that is still good, as far as one can see.
    fn take_idle(&self) -> Option<Link> {
        let mut idle = self.idle.lock();
        while let Some(link) = idle.pop() {
            if link.is_quiet() {
                return Some(link);
            }
        }
        None
    }

    /// A connection that somebody else has ended to use, if anybody does.
    async fn wait_for_idle(&self, until: Instant) -> Option<Link> {
        loop {
            let mut returned = pin!(self.returned.notified());
            returned.as_mut().enable();
            // Looked at first: whoever ends puts the connection back before.
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

    /// Answers overtake each other; the latest figures count.
    fn note(&self, gauges: Gauges) {
        let mut latest = self.latest.lock();
        if gauges.stamp >= latest.stamp {
            *latest = gauges;
        }
    }
}

impl Call<'_> {
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

    /// The link that goes with the connection, if both sides have an adapter.
    pub(super) async fn direct(
        &mut self,
        patience: Duration,
    ) -> Result<Option<Arc<Direct>>, LinkError> {
        let Some(adapter) = self.peer.adapter().filter(|_| self.peer.trusts_direct()) else {
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
                self.peer.distrust_direct(&error);
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
                self.peer.distrust_direct(&error);
                Ok(None)
            }
        }
    }

    /// The connection's link has failed.
    pub(super) fn lose_direct(&mut self, error: &str) {
        self.link.shortcut = Shortcut::None;
        self.peer.distrust_direct(error);
    }

    /// The node did not do its part.
    pub(super) async fn failed(&self, error: &LinkError) -> Away {
        if matches!(error, LinkError::Stalled(_)) && self.peer.is_only_late().await {
            self.peer.failures.fetch_add(1, Ordering::Relaxed);
            return Away;
        }
        self.peer.failed(self.began, error)
    }

    /// Whether the connection had been closed before the call: the node may be well.
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

    /// All has been said: somebody else may use the connection.
    pub(super) fn end(self) {
        let Call { peer, link, .. } = self;
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
