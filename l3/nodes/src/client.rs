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
use super::roll::{Agreement, Roll};
use super::transfer::{Got, Part, Sent};
use terrace_l3::backend::{InFlight, Registry, Traffic, died, either};
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, ObjectId, Owner, Pin, Presence, Put, PutOptions,
    Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored, TierStats,
};

/// A store whose objects are on nodes, each on the one that its name belongs to. Clones are the same
/// store.
///
/// Calls run as tasks of their own, so they need a tokio runtime with time and input and output.
#[derive(Clone, Debug)]
pub struct NodesStore {
    shared: Arc<Shared>,
}

/// Why the nodes cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodesError {
    /// The configuration cannot work.
    #[error("{0}")]
    Config(String),
    /// The system has no randomness.
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
struct Shared {
    config: Arc<NodesConfig>,
    peers: Vec<Arc<Peer>>,
    placement: Placement,
    roll: Arc<Roll>,
    /// When all nodes were last asked what they are.
    mustered: tokio::sync::Mutex<Option<Instant>>,
    registry: Registry,
    adapter: Option<Adapter>,
    traffic: Traffic,
    /// Whose pins this process has made. Every connection tells its node of them.
    owners: Arc<Mutex<BTreeSet<Owner>>>,
    calls: InFlight,
    closed: AtomicBool,
}

/// The parts of a batch by the node that each belongs to.
type Shares<T> = BTreeMap<usize, Vec<T>>;

impl NodesStore {
    /// The store on these nodes. They are looked for when they are needed.
    ///
    /// # Errors
    /// When the configuration cannot work.
    pub fn new(config: NodesConfig) -> Result<Self, NodesError> {
        config.check().map_err(NodesError::Config)?;
        let config = Arc::new(config);
        let instance = random()?;
        let adapter = Adapter::open(&config.rdma);
        let owners = Arc::default();
        let roll = Arc::new(Roll::new(&config));
        let peer = |number| {
            let (owners, adapter) = (Arc::clone(&owners), adapter.clone());
            Arc::new(Peer::new(number, config.clone(), roll.clone(), instance, owners, adapter))
        };
        let shared = Shared {
            peers: (0..config.nodes.len()).map(peer).collect(),
            placement: Placement::new(&config.nodes),
            roll,
            mustered: tokio::sync::Mutex::default(),
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

    /// What is known about each node.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerStats> {
        self.shared.peers.iter().map(|peer| peer.stats()).collect()
    }

    /// The names of the nodes that an object is kept on.
    pub fn holders(&self, id: &ObjectId) -> impl Iterator<Item = &str> {
        let Shared { config, .. } = &*self.shared;
        self.shared.holders(id).map(|number| &*config.nodes[number].name)
    }

    /// Asks every node whether it is there, and answers how many are.
    pub async fn reach(&self) -> usize {
        let mut reached = 0;
        self.shared.muster().await;
        for peer in &self.shared.peers {
            let limit_ms = self.shared.config.control_timeout_ms;
            reached += usize::from(peer.ask(&Request::Ping, limit_ms).await.is_ok());
        }
        reached
    }

    /// Waits until all nodes are there, for so long at the most; some are enough to begin with.
    ///
    /// # Errors
    /// When none is there then.
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

    /// Has a task of its own do something, which ends even if nobody waits for it.
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

    /// A change that every holder of an object is told of.
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
        let Shared { peers, registry, traffic, .. } = &*self.shared;
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

/// Asks every node now and then whether it is there, as long as the store is: one that was started again hears in
/// time whose pins still count, even if nobody has anything else to ask.
async fn show_up(shared: Weak<Shared>, pause: Duration) {
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

/// How the answers of two holders of an object are made one.
type Merge = fn(Result<(), StoreError>, Result<(), StoreError>) -> Result<(), StoreError>;

impl Shared {
    /// Sees to it that the nodes agree on what they are, as far as they are there.
    ///
    /// # Errors
    /// When nothing that they say can be believed.
    async fn ready(&self) -> Result<(), StoreError> {
        if self.roll.agreement() != Agreement::Full {
            self.muster().await;
        }
        match self.roll.agreement() {
            Agreement::Full | Agreement::Partial => Ok(()),
            Agreement::None => Err(StoreError::HolderAway),
        }
    }

    /// Asks all nodes what they are, unless that was done a moment ago, and makes members of those that can be.
    async fn muster(&self) {
        let mut mustered = self.mustered.lock().await;
        let pause = Duration::from_millis(self.config.retry_max_ms);
        if mustered.is_none_or(|asked| asked.elapsed() >= pause) {
            let enter = |peer: &Arc<Peer>| {
                let peer = peer.clone();
                tokio::spawn(async move { peer.enter(None).await })
            };
            let entering: Vec<_> = self.peers.iter().map(enter).collect();
            for entered in entering {
                let _ = entered.await;
            }
            *mustered = Some(Instant::now());
        }
        for number in self.roll.order().iter().copied() {
            let Some(store) = self.roll.to_join(number) else { continue };
            self.peers[number].enter(Some(store)).await;
        }
    }

    /// The nodes that an object is kept on.
    fn holders(&self, id: &ObjectId) -> impl Iterator<Item = usize> + use<> {
        let (first, second) = self.placement.holders(id);
        std::iter::once(first).chain(second.filter(|_| self.config.copies > 1))
    }

    /// The node that has the copy of that number.
    fn holder(&self, id: &ObjectId, copy: usize) -> usize {
        self.holders(id).nth(copy).expect("there are so many copies")
    }

    /// Has every node do its share, all at the same time.
    async fn scatter<T, R, F>(
        self: &Arc<Self>,
        shares: Shares<T>,
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
                // The caller notices what is missing, and is in no state to go on.
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
            let mut shares: Shares<(usize, ObjectId)> = BTreeMap::new();
            for (number, id) in ids.iter().enumerate() {
                if !results[number].as_ref().is_ok_and(|found| found.is_present()) {
                    shares.entry(self.holder(id, copy)).or_default().push((number, *id));
                }
            }
            for (number, found) in self.scatter(shares, ask).await {
                // That one holder has not got it says nothing while it may be where nobody answers.
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
                Ok(()) => left.push(Part::new(number, get.into())),
                Err(error) => results[number] = Err(error),
            }
        }
        let fetch =
            |peer: Arc<Peer>, share: Vec<Got>| async move { peer.get(share, options).await };
        for copy in 0..self.config.copies {
            let mut shares: Shares<Got> = BTreeMap::new();
            for part in left.drain(..) {
                shares.entry(self.holder(&part.job.id, copy)).or_default().push(part);
            }
            for part in self.scatter(shares, fetch).await {
                let Part { number, job, result } = part;
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
                    left.push(Part::new(number, job));
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
        let mut shares: Shares<Sent> = BTreeMap::new();
        for ((number, put), registered) in puts.into_iter().enumerate().zip(registered) {
            match registered {
                Ok(()) => {
                    for holder in self.holders(&put.id).skip(1) {
                        // Second copies are told from first ones by their numbers.
                        let part = Part::new(objects + number, put.share());
                        shares.entry(holder).or_default().push(part);
                    }
                    let holder = self.holder(&put.id, 0);
                    shares.entry(holder).or_default().push(Part::new(number, put));
                }
                Err(error) => results[number] = Err(error),
            }
        }
        let send =
            |peer: Arc<Peer>, share: Vec<Sent>| async move { peer.put(share, options).await };
        for Part { number, job, result } in self.scatter(shares, send).await {
            let copy = usize::from(number >= objects);
            let holder = &self.peers[self.holder(&job.id, copy)];
            let result = holder.judge(result.expect("all have a result"));
            match number.checked_sub(objects) {
                None => results[number] = result,
                Some(number) => of_copies[number] = result,
            }
        }
        // A put that failed leaves no pin on the one copy that was stored all the same.
        let mut pinned_in_vain: Shares<(usize, ObjectId)> = BTreeMap::new();
        let mut merged = Vec::with_capacity(objects);
        for ((one, two), id) in results.into_iter().zip(of_copies).zip(ids) {
            let stored = [one.is_ok(), two.is_ok()];
            let result = either_stored(one, two);
            if options.pin.is_some() && result.is_err() {
                for (holder, _) in self.holders(&id).zip(stored).filter(|(_, stored)| *stored) {
                    pinned_in_vain.entry(holder).or_default().push((merged.len(), id));
                }
            }
            merged.push(result);
        }
        if let Some(pin) = options.pin {
            self.tell(pinned_in_vain, move |ids| Request::Unpin { pin, ids }).await;
        }
        let results = self.unless_all_away(merged);
        for (result, length) in results.iter().zip(lengths) {
            self.traffic.put(result, length);
        }
        results
    }

    /// From now on this process stands for the owner of the pin.
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
            tokio::spawn(show_up(Arc::downgrade(self), pause));
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
        let mut shares: Shares<(usize, ObjectId)> = BTreeMap::new();
        for (number, id) in ids.iter().enumerate() {
            for holder in self.holders(id) {
                shares.entry(holder).or_default().push((number, *id));
            }
        }
        let mut results: Vec<Option<Result<(), StoreError>>> = vec![None; ids.len()];
        for (number, result) in self.tell(shares, request).await {
            let merged = match results[number].take() {
                Some(other) => merge(other, result),
                None => result,
            };
            results[number] = Some(merged);
        }
        let results = results.into_iter().map(|result| result.expect("every object has a holder"));
        self.unless_all_away(results.collect())
    }

    /// Has every node change its share of objects; each result comes with the object's number.
    async fn tell(
        self: &Arc<Self>,
        shares: Shares<(usize, ObjectId)>,
        request: impl Fn(Vec<ObjectId>) -> Request + Clone + Send + Sync + 'static,
    ) -> Vec<(usize, Result<(), StoreError>)> {
        let limit_ms = self.config.control_timeout_ms;
        let tell = |peer: Arc<Peer>, share: Vec<(usize, ObjectId)>| {
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
        self.scatter(shares, tell).await
    }

    async fn flush(self: &Arc<Self>) -> Result<(), StoreError> {
        self.ready().await?;
        let shares: Shares<()> = (0..self.peers.len()).map(|number| (number, vec![()])).collect();
        let limit_ms = self.config.flush_timeout_ms;
        let flush =
            |peer: Arc<Peer>, _| async move { peer.change(Request::Flush, 1, limit_ms).await };
        let flushed = self.scatter(shares, flush).await;
        // A node that is away keeps what it has made durable, and no more could be done about it.
        let of_those_there = flushed.into_iter().filter(|it| *it != Err(StoreError::HolderAway));
        let flushed: Result<Vec<()>, StoreError> = of_those_there.collect();
        match flushed {
            Ok(answered) if answered.is_empty() => Err(self.unavailable()),
            flushed => flushed.map(drop),
        }
    }

    /// One node that is away is a matter of its share, but without any the store as a whole is unwell.
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

/// What came of a put with two holders. Of several who put the same object at a time the first holder
/// decides who was first, so that only one of them was.
fn either_stored(
    first: Result<Stored, StoreError>,
    second: Result<Stored, StoreError>,
) -> Result<Stored, StoreError> {
    match (first, second) {
        (Err(StoreError::HolderAway), result) | (result, Err(StoreError::HolderAway)) => result,
        // Whoever has a later one must not be told that this one is there.
        (Err(error @ StoreError::Superseded { .. }), _)
        | (_, Err(error @ StoreError::Superseded { .. })) => Err(error),
        (first @ (Ok(_) | Err(StoreError::BeingWritten)), _) => first,
        (_, Ok(stored)) => Ok(stored),
        (Err(error), Err(_)) => Err(error),
    }
}

impl Peer {
    /// Which objects this node has.
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
                Ok(_) => vec![Err(self.nonsense()); some.len()],
                Err(Away) => vec![Err(StoreError::HolderAway); some.len()],
            };
            let found = found.into_iter().map(|found| self.judge_presence(found));
            answered.extend(some.iter().map(|(number, _)| *number).zip(found));
        }
        answered
    }
}

/// An object is removed when no holder has it any more.
fn both(one: Result<(), StoreError>, other: Result<(), StoreError>) -> Result<(), StoreError> {
    match (one, other) {
        (Ok(()) | Err(StoreError::Missing), Ok(())) | (Ok(()), Err(StoreError::Missing)) => Ok(()),
        (Ok(()) | Err(StoreError::Missing), other) => other,
        (one @ Err(_), _) => one,
    }
}
