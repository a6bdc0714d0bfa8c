//! Several nodes as one store.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::time::sleep;

use super::config::NodesConfig;
use super::direct::Adapter;
use super::handshake::random;
use super::messages::{Answer as NodeAnswer, Gauges, IDS_MAX, OWNERS_MAX, Request};
use super::peer::{Away, Peer, PeerStats};
use super::placement::Placement;
use super::roll::{Agreement, MembershipView};
use super::transfer::{BatchItem, Got, Sent};
use terrace_l3::backend::{InFlight, Registry, Traffic, died, either};
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, ObjectId, Owner, Pin, Presence, Put, PutOptions,
    Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored, TierStats,
};

/// A store whose objects are on nodes, each on the node that its id determines. Clones are the same
/// store.
///
/// Calls run in tasks of their own, so they need a tokio runtime with time and IO.
#[derive(Clone, Debug)]
pub struct NodesStore {
    shared: Arc<ClientCore>,
}

/// Reason why the nodes cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodesError {
    /// The configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// The system has no random numbers.
    #[error("the system has no random numbers: {0}")]
    Random(#[from] io::Error),
    /// The nodes are used with another list.
    #[error(
        "the nodes {0} belong to different stores, or were used with another list of nodes, other names or weights \
         in it, or another number of copies; use the list that all clients use, or change it as docs/nodes.md says"
    )]
    OtherList(String),
    /// None of these nodes answers.
    #[error("none of the nodes {0} answers: do they run, and do they know this secret?")]
    Away(String),
}

#[derive(Debug)]
struct ClientCore {
    config: Arc<NodesConfig>,
    peers: Vec<Arc<Peer>>,
    placement: Placement,
    roll: Arc<MembershipView>,
    /// Time when all nodes were last asked for their standing.
    refreshed: tokio::sync::Mutex<Option<Instant>>,
    registry: Registry,
    adapter: Option<Adapter>,
    traffic: Traffic,
    /// Owners of the pins that this process has made. Every connection announces them to its node.
    owners: Arc<Mutex<BTreeSet<Owner>>>,
    calls: InFlight,
    closed: AtomicBool,
}

/// Parts of a batch, by the node that they belong to.
type NodeShares<T> = BTreeMap<usize, Vec<T>>;

impl NodesStore {
    /// Creates the store on these nodes. They are contacted when they are needed.
    ///
    /// # Errors
    /// If the configuration is invalid.
    pub fn new(config: NodesConfig) -> Result<Self, NodesError> {
        config.check().map_err(NodesError::Config)?;
        let config = Arc::new(config);
        let instance = random()?;
        let adapter = Adapter::open(&config.rdma);
        let owners = Arc::default();
        let roll = Arc::new(MembershipView::new(&config));
        let peer = |number| {
            let (owners, adapter) = (Arc::clone(&owners), adapter.clone());
            Arc::new(Peer::new(number, config.clone(), roll.clone(), instance, owners, adapter))
        };
        let shared = ClientCore {
            peers: (0..config.nodes.len()).map(peer).collect(),
            placement: Placement::new(&config.nodes),
            roll,
            refreshed: tokio::sync::Mutex::default(),
            config,
            owners,
            registry: Registry::default(),
            adapter,
            traffic: Traffic::default(),
            calls: InFlight::default(),
            closed: AtomicBool::new(false),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Status of each node.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerStats> {
        self.shared.peers.iter().map(|peer| peer.stats()).collect()
    }

    /// Names of the nodes that hold an object.
    pub fn holders(&self, id: &ObjectId) -> impl Iterator<Item = &str> {
        let ClientCore { config, .. } = &*self.shared;
        self.shared.holders(id).map(|number| &*config.nodes[number].name)
    }

    /// Pings every node and returns how many answer.
    pub async fn reach(&self) -> usize {
        let mut reached = 0;
        self.shared.refresh_standings().await;
        for peer in &self.shared.peers {
            let limit_ms = self.shared.config.control_timeout_ms;
            reached += usize::from(peer.ask(&Request::Ping, limit_ms).await.is_ok());
        }
        reached
    }

    /// Waits until all nodes answer, for at most `patience`. Fewer are enough to start.
    ///
    /// # Errors
    /// If none answers.
    pub async fn reach_within(&self, patience: Duration) -> Result<(), NodesError> {
        const PAUSE: Duration = Duration::from_millis(50);
        let since = Instant::now();
        let mut reached = self.reach().await;
        while reached < self.shared.peers.len() && since.elapsed() < patience {
            tokio::time::sleep(PAUSE).await;
            reached = self.reach().await;
        }
        let names = || {
            let names: Vec<String> = self.peers().into_iter().map(|node| node.name).collect();
            names.join(",")
        };
        match self.shared.roll.agreement() {
            Agreement::None => Err(NodesError::OtherList(names())),
            Agreement::Full | Agreement::Partial if reached == 0 => Err(NodesError::Away(names())),
            Agreement::Full | Agreement::Partial => Ok(()),
        }
    }

    /// Runs an operation in a task, which completes even if the caller stops waiting.
    async fn run<T: Clone + Send + 'static>(
        &self,
        objects: usize,
        job: impl Future<Output = Results<T>> + Send + 'static,
    ) -> Results<T> {
        let call = self.shared.calls.begin();
        if self.shared.closed.load(Ordering::SeqCst) {
            return vec![Err(StoreError::Closed); objects];
        }
        if objects == 0 {
            return Vec::new();
        }
        let task = tokio::spawn(async move {
            let results = job.await;
            drop(call);
            results
        });
        task.await.unwrap_or_else(|error| vec![Err(died(error)); objects])
    }

    /// Sends a change to every holder of each object.
    async fn change(
        &self,
        ids: &[ObjectId],
        merge: Merge,
        request: impl Fn(Vec<ObjectId>) -> Request + Clone + Send + Sync + 'static,
    ) -> Results<()> {
        let (shared, ids, objects) = (self.shared.clone(), ids.to_vec(), ids.len());
        self.run(objects, async move { shared.change(ids, merge, request).await }).await
    }
}

impl Store for NodesStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        if self.shared.closed.load(Ordering::Acquire) {
            return Err(StoreError::Closed);
        }
        let registration = self.shared.registry.register(arena)?;
        let region = self.shared.adapter.as_ref().and_then(|adapter| adapter.register(arena));
        Ok(Registration::new((registration, region)))
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        let (shared, ids) = (self.shared.clone(), ids.to_vec());
        Box::pin(async move {
            let objects = ids.len();
            Traffic::count(&shared.traffic.exists, objects);
            self.run(objects, async move { shared.exists(ids, options).await }).await
        })
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let registered: Vec<_> =
                puts.iter().map(|put| shared.registry.check_put(put)).collect();
            let objects = puts.len();
            if let Err(error) = shared.stand_for(options.pin) {
                return vec![Err(error); objects];
            }
            self.run(objects, async move { shared.put(puts, registered, options).await }).await
        })
    }

    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let registered: Vec<_> =
                gets.iter().map(|get| shared.registry.check_get(get)).collect();
            let objects = gets.len();
            self.run(objects, async move { shared.get(gets, registered, options).await }).await
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(async move {
            if let Err(error) = self.shared.stand_for(Some(pin)) {
                return vec![Err(error); ids.len()];
            }
            self.change(ids, either, move |ids| Request::Pin { pin, ids }).await
        })
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(self.change(ids, either, move |ids| Request::Unpin { pin, ids }))
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        Box::pin(self.change(ids, both, move |ids| Request::Remove { removal, ids }))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        let shared = self.shared.clone();
        Box::pin(
            async move { self.run(1, async move { vec![shared.flush().await] }).await.remove(0) },
        )
    }

    fn stats(&self) -> StoreStats {
        let ClientCore { peers, registry, traffic, .. } = &*self.shared;
        let add = |sum: Gauges, peer: &Arc<Peer>| sum.plus(&peer.gauges());
        let all = peers.iter().fold(Gauges::default(), add).tier();
        let slot_bytes = peers.iter().map(|peer| peer.stats().object_bytes_max).max().unwrap_or(0);
        let remote = TierStats { arenas: registry.arenas() as u64, slot_bytes, ..all };
        StoreStats {
            remote: Some(traffic.fill(remote)),
            figures: PeerStats::figures(&self.peers()),
            ..StoreStats::default()
        }
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async {
            self.shared.closed.store(true, Ordering::SeqCst);
            self.shared.calls.none().await;
            self.shared.peers.iter().for_each(|peer| peer.close());
            Ok(())
        })
    }
}

/// Pings every node periodically while the store exists: a restarted node must learn in time which
/// owners are connected, even without other calls.
async fn ping_periodically(shared: Weak<ClientCore>, pause: Duration) {
    loop {
        sleep(pause).await;
        let Some(shared) = shared.upgrade() else { return };
        if shared.closed.load(Ordering::Acquire) {
            return;
        }
        for peer in &shared.peers {
            let _ = peer.ask(&Request::Ping, shared.config.control_timeout_ms).await;
        }
        let _ = shared.ready().await;
    }
}

/// Merges the results of two holders of an object.
type Merge = fn(Result<(), StoreError>, Result<(), StoreError>) -> Result<(), StoreError>;

impl ClientCore {
    /// Ensures that the reachable nodes agree on their membership.
    ///
    /// # Errors
    /// If the nodes contradict each other, so that nothing they say can be trusted.
    async fn ready(&self) -> Result<(), StoreError> {
        if self.roll.agreement() != Agreement::Full {
            self.refresh_standings().await;
        }
        match self.roll.agreement() {
            Agreement::Full | Agreement::Partial => Ok(()),
            Agreement::None => Err(StoreError::HolderAway),
        }
    }

    /// Asks all nodes for their standing, unless that was done recently, and makes eligible ones
    /// members.
    async fn refresh_standings(&self) {
        let mut refreshed = self.refreshed.lock().await;
        let pause = Duration::from_millis(self.config.retry_max_ms);
        if refreshed.is_none_or(|asked| asked.elapsed() >= pause) {
            let enter = |peer: &Arc<Peer>| {
                let peer = peer.clone();
                tokio::spawn(async move { peer.enter(None).await })
            };
            let entering: Vec<_> = self.peers.iter().map(enter).collect();
            for entered in entering {
                let _ = entered.await;
            }
            *refreshed = Some(Instant::now());
        }
        for number in self.roll.order().iter().copied() {
            let Some(store) = self.roll.to_join(number) else { continue };
            self.peers[number].enter(Some(store)).await;
        }
    }

    /// Nodes that hold an object.
    fn holders(&self, id: &ObjectId) -> impl Iterator<Item = usize> + use<> {
        let (first, second) = self.placement.holders(id);
        std::iter::once(first).chain(second.filter(|_| self.config.copies > 1))
    }

    /// Node that holds copy `copy` of an object.
    fn holder(&self, id: &ObjectId, copy: usize) -> usize {
        self.holders(id).nth(copy).expect("there are so many copies")
    }

    /// Runs an operation for the share of each node, concurrently.
    async fn scatter<T, R, F>(
        self: &Arc<Self>,
        shares: NodeShares<T>,
        work: impl Fn(Arc<Peer>, Vec<T>) -> F,
    ) -> Vec<R>
    where
        R: Send + 'static,
        F: Future<Output = Vec<R>> + Send + 'static,
    {
        let mut shares = shares.into_iter();
        let Some((first, share)) = shares.next() else { return Vec::new() };
        let others: Vec<_> = shares
            .map(|(number, share)| tokio::spawn(work(self.peers[number].clone(), share)))
            .collect();
        let mut done = work(self.peers[first].clone(), share).await;
        for other in others {
            match other.await {
                Ok(more) => done.extend(more),
                // The panic continues in the caller, which lacks results.
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
        done
    }

    async fn exists(
        self: &Arc<Self>,
        ids: Vec<ObjectId>,
        options: ExistsOptions,
    ) -> Results<Presence> {
        let mut results: Results<Presence> = vec![Err(StoreError::HolderAway); ids.len()];
        if self.ready().await.is_err() {
            return results;
        }
        let ask = |peer: Arc<Peer>, share: Vec<(usize, ObjectId)>| async move {
            peer.exists(share, options).await
        };
        for copy in 0..self.config.copies {
            let mut shares: NodeShares<(usize, ObjectId)> = BTreeMap::new();
            for (number, id) in ids.iter().enumerate() {
                if !results[number].as_ref().is_ok_and(|found| found.is_present()) {
                    shares.entry(self.holder(id, copy)).or_default().push((number, *id));
                }
            }
            for (number, found) in self.scatter(shares, ask).await {
                // Absence on one holder proves nothing while another one, which may have the
                // object, does not answer.
                if copy == 0 || found != Ok(Presence::Absent) {
                    results[number] = found;
                }
            }
        }
        self.unless_all_away(results)
    }

    async fn get(
        self: &Arc<Self>,
        gets: Vec<Get>,
        registered: Vec<Result<(), StoreError>>,
        options: GetOptions,
    ) -> Results<Served> {
        let mut results: Results<Served> = vec![Err(StoreError::Missing); gets.len()];
        let lengths: Vec<usize> = gets.iter().map(|get| get.target.len()).collect();
        let mut left: Vec<Got> = Vec::new();
        if let Err(error) = self.ready().await {
            return vec![Err(error); gets.len()];
        }
        for ((number, get), registered) in gets.into_iter().enumerate().zip(registered) {
            match registered {
                Ok(()) => left.push(BatchItem::new(number, get.into())),
                Err(error) => results[number] = Err(error),
            }
        }
        let fetch =
            |peer: Arc<Peer>, share: Vec<Got>| async move { peer.get(share, options).await };
        for copy in 0..self.config.copies {
            let mut shares: NodeShares<Got> = BTreeMap::new();
            for part in left.drain(..) {
                shares.entry(self.holder(&part.job.id, copy)).or_default().push(part);
            }
            for part in self.scatter(shares, fetch).await {
                let BatchItem { number, job, result } = part;
                let holder = &self.peers[self.holder(&job.id, copy)];
                let result = holder.judge(result.expect("all have a result"));
                let may_be_elsewhere = matches!(
                    result,
                    Err(StoreError::Missing
                        | StoreError::HolderAway
                        | StoreError::Corrupt(_)
                        | StoreError::Full)
                );
                if may_be_elsewhere && copy + 1 < self.config.copies && job.target.is_some() {
                    left.push(BatchItem::new(number, job));
                }
                let not_known = result == Err(StoreError::HolderAway)
                    && results[number] == Err(StoreError::Missing);
                if copy == 0 || result.is_ok() || not_known {
                    results[number] = result;
                }
            }
        }
        let results = self.unless_all_away(results);
        for (result, length) in results.iter().zip(lengths) {
            self.traffic.get(result, length);
        }
        results
    }

    async fn put(
        self: &Arc<Self>,
        puts: Vec<Put>,
        registered: Vec<Result<(), StoreError>>,
        options: PutOptions,
    ) -> Results<Stored> {
        let objects = puts.len();
        let mut results: Results<Stored> = vec![Err(StoreError::HolderAway); objects];
        if self.ready().await.is_err() {
            return results;
        }
        let mut of_copies = results.clone();
        let lengths: Vec<usize> = puts.iter().map(|put| put.source.len()).collect();
        let ids: Vec<ObjectId> = puts.iter().map(|put| put.id).collect();
        let mut shares: NodeShares<Sent> = BTreeMap::new();
        for ((number, put), registered) in puts.into_iter().enumerate().zip(registered) {
            match registered {
                Ok(()) => {
                    for holder in self.holders(&put.id).skip(1) {
                        // The numbers of second copies start at `objects`.
                        let part = BatchItem::new(objects + number, put.share());
                        shares.entry(holder).or_default().push(part);
                    }
                    let holder = self.holder(&put.id, 0);
                    shares.entry(holder).or_default().push(BatchItem::new(number, put));
                }
                Err(error) => results[number] = Err(error),
            }
        }
        let send =
            |peer: Arc<Peer>, share: Vec<Sent>| async move { peer.put(share, options).await };
        for BatchItem { number, job, result } in self.scatter(shares, send).await {
            let copy = usize::from(number >= objects);
            let holder = &self.peers[self.holder(&job.id, copy)];
            let result = holder.judge(result.expect("all have a result"));
            match number.checked_sub(objects) {
                None => results[number] = result,
                Some(number) => of_copies[number] = result,
            }
        }
        // A put that failed must not leave a pin on the one copy that was stored.
        let mut pins_to_undo: NodeShares<(usize, ObjectId)> = BTreeMap::new();
        let mut merged = Vec::with_capacity(objects);
        for ((one, two), id) in results.into_iter().zip(of_copies).zip(ids) {
            let stored = [one.is_ok(), two.is_ok()];
            let result = either_stored(one, two);
            if options.pin.is_some() && result.is_err() {
                for (holder, _) in self.holders(&id).zip(stored).filter(|(_, stored)| *stored) {
                    pins_to_undo.entry(holder).or_default().push((merged.len(), id));
                }
            }
            merged.push(result);
        }
        if let Some(pin) = options.pin {
            self.change_shares(pins_to_undo, move |ids| Request::Unpin { pin, ids }).await;
        }
        let results = self.unless_all_away(merged);
        for (result, length) in results.iter().zip(lengths) {
            self.traffic.put(result, length);
        }
        results
    }

    /// Registers this process as connected for the owner of the pin.
    fn stand_for(self: &Arc<Self>, pin: Option<Pin>) -> Result<(), StoreError> {
        let Some(Pin::Hard(owner)) = pin else { return Ok(()) };
        let mut owners = self.owners.lock();
        if owners.contains(&owner) {
            return Ok(());
        }
        if owners.len() == OWNERS_MAX {
            return Err(StoreError::Full);
        }
        if owners.is_empty() {
            let pause = Duration::from_millis(self.config.show_up_ms.max(1));
            tokio::spawn(ping_periodically(Arc::downgrade(self), pause));
        }
        owners.insert(owner);
        Ok(())
    }

    async fn change(
        self: &Arc<Self>,
        ids: Vec<ObjectId>,
        merge: Merge,
        request: impl Fn(Vec<ObjectId>) -> Request + Clone + Send + Sync + 'static,
    ) -> Results<()> {
        if let Err(error) = self.ready().await {
            return vec![Err(error); ids.len()];
        }
        let mut shares: NodeShares<(usize, ObjectId)> = BTreeMap::new();
        for (number, id) in ids.iter().enumerate() {
            for holder in self.holders(id) {
                shares.entry(holder).or_default().push((number, *id));
            }
        }
        let mut results: Vec<Option<Result<(), StoreError>>> = vec![None; ids.len()];
        for (number, result) in self.change_shares(shares, request).await {
            let merged = match results[number].take() {
                Some(other) => merge(other, result),
                None => result,
            };
            results[number] = Some(merged);
        }
        let results = results.into_iter().map(|result| result.expect("every object has a holder"));
        self.unless_all_away(results.collect())
    }

    /// Applies a change on every node to its share of objects. Each result has the object's number.
    async fn change_shares(
        self: &Arc<Self>,
        shares: NodeShares<(usize, ObjectId)>,
        request: impl Fn(Vec<ObjectId>) -> Request + Clone + Send + Sync + 'static,
    ) -> Vec<(usize, Result<(), StoreError>)> {
        let limit_ms = self.config.control_timeout_ms;
        let change_shares = |peer: Arc<Peer>, share: Vec<(usize, ObjectId)>| {
            let request = request.clone();
            async move {
                let mut answered = Vec::with_capacity(share.len());
                for some in share.chunks(IDS_MAX) {
                    let request = request(some.iter().map(|(_, id)| *id).collect());
                    let results = peer.change(request, some.len(), limit_ms).await;
                    let results = results.into_iter().map(|result| peer.judge(result));
                    answered.extend(some.iter().map(|(number, _)| *number).zip(results));
                }
                answered
            }
        };
        self.scatter(shares, change_shares).await
    }

    async fn flush(self: &Arc<Self>) -> Result<(), StoreError> {
        self.ready().await?;
        let shares: NodeShares<()> =
            (0..self.peers.len()).map(|number| (number, vec![()])).collect();
        let limit_ms = self.config.flush_timeout_ms;
        let flush =
            |peer: Arc<Peer>, _| async move { peer.change(Request::Flush, 1, limit_ms).await };
        let flushed = self.scatter(shares, flush).await;
        // A node that does not answer keeps what it has made durable; more cannot be done.
        let of_reachable = flushed.into_iter().filter(|it| *it != Err(StoreError::HolderAway));
        let flushed: Result<Vec<()>, StoreError> = of_reachable.collect();
        match flushed {
            Ok(answered) if answered.is_empty() => Err(self.unavailable()),
            flushed => flushed.map(drop),
        }
    }

    /// A node that does not answer only affects its share, but if none answers, the store as a
    /// whole is unavailable.
    fn unless_all_away<T>(&self, mut results: Results<T>) -> Results<T> {
        if self.peers.iter().all(|peer| peer.is_away()) {
            let away = |result: &&mut Result<T, _>| matches!(result, Err(StoreError::HolderAway));
            results.iter_mut().filter(away).for_each(|result| *result = Err(self.unavailable()));
        }
        results
    }

    fn unavailable(&self) -> StoreError {
        StoreError::Unavailable { retry_after: Duration::from_millis(self.config.retry_ms) }
    }
}

/// Merges the results of a put with two holders. If several clients put the same object, the first
/// holder decides which of them is first, so that only one is.
fn either_stored(
    first: Result<Stored, StoreError>,
    second: Result<Stored, StoreError>,
) -> Result<Stored, StoreError> {
    match (first, second) {
        (Err(StoreError::HolderAway), result) | (result, Err(StoreError::HolderAway)) => result,
        // A client with a later generation stored must not learn that this one is present.
        (Err(error @ StoreError::Superseded { .. }), _)
        | (_, Err(error @ StoreError::Superseded { .. })) => Err(error),
        (first @ (Ok(_) | Err(StoreError::BeingWritten)), _) => first,
        (_, Ok(stored)) => Ok(stored),
        (Err(error), Err(_)) => Err(error),
    }
}

impl Peer {
    /// Looks up objects on this node.
    async fn exists(
        self: &Arc<Self>,
        share: Vec<(usize, ObjectId)>,
        options: ExistsOptions,
    ) -> Vec<(usize, Result<Presence, StoreError>)> {
        let mut answered = Vec::with_capacity(share.len());
        for some in share.chunks(IDS_MAX) {
            let ids = some.iter().map(|(_, id)| *id).collect();
            let request = Request::Exists { options, ids };
            let found = match self.ask(&request, self.config.exists_timeout_ms).await {
                Ok(NodeAnswer::Presences(found)) if found.len() == some.len() => found,
                Ok(_) => vec![Err(self.unexpected_answer()); some.len()],
                Err(Away) => vec![Err(StoreError::HolderAway); some.len()],
            };
            let found = found.into_iter().map(|found| self.judge_presence(found));
            answered.extend(some.iter().map(|(number, _)| *number).zip(found));
        }
        answered
    }
}

/// Merges the results of a removal: an object is removed when no holder has it.
fn both(one: Result<(), StoreError>, other: Result<(), StoreError>) -> Result<(), StoreError> {
    match (one, other) {
        (Ok(()) | Err(StoreError::Missing), Ok(())) | (Ok(()), Err(StoreError::Missing)) => Ok(()),
        (Ok(()) | Err(StoreError::Missing), other) => other,
        (one @ Err(_), _) => one,
    }
}
