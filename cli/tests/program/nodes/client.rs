//! A client of nodes that checks every byte and every call's time.

use std::time::{Duration, Instant};

use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, ObjectId, Put, PutOptions, Registration, Results, Store,
    StoreError, Stored,
};
use terrace_l3_nodes::{NodesConfig, NodesStore};

use super::farm::Farm;
use crate::objects;

pub(crate) const PAGE_BYTES: usize = 16 << 10;

/// Objects of one batch, and pages of a client.
pub(crate) const BATCH: usize = 64;

/// What a call may take beyond the deadlines that it is under, on a machine that does other things.
const MARGIN: Duration = Duration::from_secs(10);

/// A store and memory of its own.
pub(crate) struct Client {
    pub(crate) store: NodesStore,
    pub(crate) config: NodesConfig,
    arena: Arena,
    _registration: Registration,
}

impl Client {
    pub(crate) fn new(config: NodesConfig) -> Self {
        Self::of(NodesStore::new(config.clone()).unwrap(), config)
    }

    /// Another one of the same store.
    pub(crate) fn beside(&self) -> Self {
        Self::of(self.store.clone(), self.config.clone())
    }

    fn of(store: NodesStore, config: NodesConfig) -> Self {
        let arena = Arena::new(BATCH as u32, PAGE_BYTES).unwrap();
        let registration = store.register(&arena).unwrap();
        Self { store, config, arena, _registration: registration }
    }

    /// Stores objects with the bytes that belong to their names.
    pub(crate) async fn put(&self, ids: &[ObjectId]) -> Results<Stored> {
        self.put_with(ids, PutOptions::default()).await
    }

    pub(crate) async fn put_with(&self, ids: &[ObjectId], options: PutOptions) -> Results<Stored> {
        let mut results = Vec::with_capacity(ids.len());
        for batch in ids.chunks(BATCH) {
            let put = |(page, id): (u32, &ObjectId)| {
                objects::fill(id, &mut self.arena.target(page).expect("no call has it any more"));
                Put::new(*id, self.arena.source(page).expect("nobody writes to it"))
            };
            let puts = (0..).zip(batch).map(put).collect();
            let NodesConfig { put_timeout_ms, .. } = self.config;
            // It is asked for room, and then for the result.
            let call = self.store.put_from(puts, options);
            results.extend(self.in_time("a put", 2 * put_timeout_ms, call).await);
        }
        results
    }

    /// Reads objects and checks their bytes.
    pub(crate) async fn get(&self, ids: &[ObjectId]) -> Results<()> {
        let mut results = Vec::with_capacity(ids.len());
        for batch in ids.chunks(BATCH) {
            let get = |(page, id): (u32, &ObjectId)| {
                let mut target = self.arena.target(page).expect("no call has it any more");
                target.fill(0xEE);
                Get::new(*id, target)
            };
            let gets = (0..).zip(batch).map(get).collect();
            let call = self.store.get_into(gets, GetOptions::default());
            let served = self.in_time("a get", self.config.get_timeout_ms, call).await;
            for ((page, id), served) in (0..).zip(batch).zip(served) {
                results.push(served.map(|_| {
                    let read = self.arena.source(page).expect("no call has it any more");
                    assert!(objects::is_right(id, &read), "{id:?} came with wrong bytes");
                }));
            }
        }
        results
    }

    /// Which objects are said to be there.
    pub(crate) async fn exists(&self, ids: &[ObjectId]) -> Results<bool> {
        let limit_ms = self.config.exists_timeout_ms;
        let call = self.store.exists(ids, ExistsOptions::default());
        let found = self.in_time("an exists", limit_ms, call).await;
        found.into_iter().map(|found| found.map(|presence| presence.is_present())).collect()
    }

    /// Reads everything until all of it is there, and answers how long that took.
    pub(crate) async fn hits_come_back(&self, ids: &[ObjectId]) -> Duration {
        const PATIENCE: Duration = Duration::from_secs(120);
        let began = Instant::now();
        loop {
            let missed: Vec<_> = self.get(ids).await.into_iter().filter_map(Result::err).collect();
            let Some(first) = missed.first() else {
                return began.elapsed();
            };
            let (missed, stats) = (missed.len(), self.store.peers());
            assert!(
                began.elapsed() < PATIENCE,
                "{missed} of {} miss ({first}): {stats:?}",
                ids.len()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Whether a node answers, as far as this client knows.
    pub(crate) fn is_up(&self, node: usize) -> bool {
        self.store.peers()[node].is_up
    }

    /// Has a call end within the time that it may take, which includes connecting and one stall.
    pub(crate) async fn in_time<T>(&self, what: &str, ms: u64, call: impl Future<Output = T>) -> T {
        let NodesConfig { connect_timeout_ms, stall_timeout_ms, .. } = self.config;
        let limit = Duration::from_millis(ms + connect_timeout_ms + stall_timeout_ms) + MARGIN;
        let began = Instant::now();
        let result = tokio::time::timeout(4 * limit, call).await;
        let took = began.elapsed();
        assert!(took < limit, "{what} took {took:?}, and may take {limit:?}");
        result.expect("it ended")
    }
}

/// Which node has each of the objects, which must all be there.
pub(crate) async fn owners(farm: &Farm, ids: &[ObjectId]) -> Vec<usize> {
    let client = Client::new(farm.config());
    assert!(client.exists(ids).await.into_iter().all(|found| found == Ok(true)));
    let owner = |id| {
        let name = client.store.holders(id).next().expect("every object has a holder");
        client.config.nodes.iter().position(|node| node.name == name).expect("it is in the list")
    };
    ids.iter().map(owner).collect()
}

/// Those of the objects that are, or are not, on a node.
pub(crate) fn part(
    ids: &[ObjectId],
    owners: &[usize],
    is: impl Fn(usize) -> bool,
) -> Vec<ObjectId> {
    ids.iter().zip(owners).filter(|(_, owner)| is(**owner)).map(|(id, _)| *id).collect()
}

pub(crate) fn all_ok<T>(results: &Results<T>) -> bool {
    results.iter().all(|result| result.is_ok())
}

/// Whether an error says no more than that an object cannot be had now.
pub(crate) fn is_a_miss(error: &StoreError) -> bool {
    use StoreError::{HolderAway, Missing, Unavailable};
    matches!(error, Missing | HolderAway | Unavailable { .. })
}
