//! Routing of requests to workers.

use std::collections::VecDeque;

use terrace_cache::HashedMap;
use terrace_scheduler::{KvEvent, KvEvents, KvTier, PageKey};

use crate::cluster::Role;
use crate::config::{RouterConfig, Routing};
use crate::page_set::digest;

/// Selects a worker for each request.
#[derive(Debug)]
pub(crate) struct Router {
    config: RouterConfig,
    next: usize,
    workers: Vec<WorkerState>,
    /// Events of workers that are in transit, in order of arrival.
    in_transit: VecDeque<EventsInTransit>,
    /// Worker by session or group.
    together: HashedMap<u64, usize>,
}

/// The router's view of a worker.
#[derive(Debug)]
struct WorkerState {
    /// Pages by digest, with a bit set of their tiers.
    pages: HashedMap<u64, u8>,
    /// Prompt tokens still to compute.
    pending_tokens: u64,
    /// Prompt tokens of its live requests, which decodes read in every step.
    context_tokens: u64,
    requests: u64,
    role: Role,
    is_up: bool,
    /// Time per token, relative to the fastest worker.
    slowness: f64,
}

#[derive(Debug)]
struct EventsInTransit {
    at_us: u64,
    worker: usize,
    events: KvEvents,
}

/// Destination of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) worker: usize,
    /// Estimated number of tokens that the worker has to compute.
    pub(crate) tokens: u32,
    /// Tokens of the whole prompt.
    pub(crate) context_tokens: u32,
}

/// A request, as far as routing depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoutingQuery<'a> {
    pub(crate) input_tokens: u32,
    pub(crate) page_size: u32,
    /// Page keys; needed only if the policy uses events.
    pub(crate) keys: &'a [PageKey],
    /// Number shared by the requests of a session or group.
    pub(crate) family: u64,
}

impl Router {
    /// Creates a router for workers with the given roles and times per token.
    pub(crate) fn new(config: RouterConfig, workers: &[(Role, f64)]) -> Self {
        let fastest = workers.iter().map(|(_, token_ns)| *token_ns).fold(f64::INFINITY, f64::min);
        let known = |&(role, token_ns): &(Role, f64)| WorkerState {
            pages: HashedMap::default(),
            pending_tokens: 0,
            context_tokens: 0,
            requests: 0,
            role,
            is_up: true,
            slowness: if fastest > 0.0 { token_ns / fastest } else { 1.0 },
        };
        Self {
            config,
            next: 0,
            workers: workers.iter().map(known).collect(),
            in_transit: VecDeque::new(),
            together: HashedMap::default(),
        }
    }

    /// Returns whether the policy needs KV events and page keys.
    pub(crate) fn wants_events(&self) -> bool {
        match self.config.routing {
            Routing::RoundRobin | Routing::LeastLoaded | Routing::SessionAffine => false,
            Routing::PrefixAware { .. } => self.workers.len() > 1,
        }
    }

    /// Selects a worker for an arriving request; none if all are down.
    pub(crate) fn route(&mut self, now_us: u64, asked: &RoutingQuery<'_>) -> Option<Route> {
        self.hear_what_has_come(now_us);
        let begins = |worker: &WorkerState| worker.role != Role::Decode;
        let worker = match self.config.routing {
            Routing::RoundRobin => {
                let count = self.workers.len();
                let turns = (0..count).map(|turn| (self.next + turn) % count);
                let worker = turns
                    .clone()
                    .find(|&worker| self.workers[worker].is_up && begins(&self.workers[worker]))?;
                self.next = (worker + 1) % count;
                worker
            }
            Routing::LeastLoaded => self.cheapest(1.0, asked, begins)?,
            Routing::SessionAffine => match self.together.get(&asked.family) {
                Some(&worker) if self.workers[worker].is_up => worker,
                Some(_) | None => self.cheapest(1.0, asked, begins)?,
            },
            Routing::PrefixAware { load_weight } => self.cheapest(load_weight, asked, begins)?,
        };
        if matches!(self.config.routing, Routing::SessionAffine) {
            self.together.insert(asked.family, worker);
        }
        let tokens = self.workers[worker].tokens_to_compute(asked);
        Some(self.send(worker, tokens, asked))
    }

    /// Selects a worker to decode a computed request; none if all are down.
    pub(crate) fn route_decode(&mut self, asked: &RoutingQuery<'_>) -> Option<Route> {
        let worker = self.cheapest(1.0, asked, |worker| worker.role == Role::Decode)?;
        // Its KV is transferred, so almost nothing is left to compute.
        Some(self.send(worker, 1, asked))
    }

    fn send(&mut self, worker: usize, tokens: u32, asked: &RoutingQuery<'_>) -> Route {
        let known = &mut self.workers[worker];
        known.pending_tokens += u64::from(tokens);
        known.context_tokens += u64::from(asked.input_tokens);
        known.requests += 1;
        Route { worker, tokens, context_tokens: asked.input_tokens }
    }

    /// Marks a worker as failed: it has no pages and gets no requests. Its events in transit are
    /// lost.
    pub(crate) fn down(&mut self, worker: usize) {
        let known = &mut self.workers[worker];
        known.is_up = false;
        known.pages.clear();
        self.in_transit.retain(|events| events.worker != worker);
    }

    /// Marks a worker as recovered.
    pub(crate) fn up(&mut self, worker: usize) {
        self.workers[worker].is_up = true;
    }

    /// Returns the worker with the least load, including the estimated tokens of the request. Of
    /// equals, the one with the fewest requests so far.
    fn cheapest(
        &self,
        load_weight: f64,
        asked: &RoutingQuery<'_>,
        among: impl Fn(&WorkerState) -> bool,
    ) -> Option<usize> {
        let price = |worker: &WorkerState| {
            let decodes = self.config.decode_weight * worker.context_tokens as f64;
            let load = worker.pending_tokens as f64 + decodes;
            (f64::from(worker.tokens_to_compute(asked)) + load_weight * load) * worker.slowness
        };
        let prices = self.workers.iter().map(price).zip(&self.workers).enumerate();
        let prices = prices.filter(|(_, (_, worker))| worker.is_up && among(worker));
        let cheapest = prices
            .min_by(|(_, (a, x)), (_, (b, y))| a.total_cmp(b).then(x.requests.cmp(&y.requests)));
        cheapest.map(|(worker, _)| worker)
    }

    /// Records the first token of a request: its prompt is computed.
    pub(crate) fn started(&mut self, route: Route) {
        self.workers[route.worker].pending_tokens -= u64::from(route.tokens);
    }

    /// Records the end of a request.
    pub(crate) fn ended(&mut self, route: Route, has_started: bool) {
        if !has_started {
            self.started(route);
        }
        self.workers[route.worker].context_tokens -= u64::from(route.context_tokens);
    }

    /// Sends a worker's events, which arrive after a delay. Leaves empty events behind for reuse.
    pub(crate) fn tell(&mut self, now_us: u64, worker: usize, events: &mut KvEvents) {
        if !events.is_snapshot && events.iter().next().is_none() {
            return;
        }
        let at_us = now_us + self.config.event_delay_us;
        self.in_transit.push_back(EventsInTransit {
            at_us,
            worker,
            events: std::mem::take(events),
        });
    }

    fn hear_what_has_come(&mut self, now_us: u64) {
        while self.in_transit.front().is_some_and(|events| events.at_us <= now_us)
            && let Some(EventsInTransit { worker, events, .. }) = self.in_transit.pop_front()
        {
            if events.is_snapshot {
                self.workers[worker].pages.clear();
            }
            events.iter().for_each(|event| self.hear_one(worker, &event));
        }
    }

    fn hear_one(&mut self, worker: usize, event: &KvEvent<'_>) {
        let pages = &mut self.workers[worker].pages;
        match event {
            // L3 is shared, so its pages do not favour a worker.
            KvEvent::Stored { tier: KvTier::L3, .. }
            | KvEvent::Removed { tier: KvTier::L3, .. } => {}
            KvEvent::Stored { tier, keys, .. } => {
                for &key in keys.iter() {
                    *pages.entry(digest(key)).or_insert(0) |= bit(*tier);
                }
            }
            KvEvent::Removed { tier, keys, .. } => {
                for &key in keys.iter() {
                    let key = digest(key);
                    let Some(tiers) = pages.get_mut(&key) else { continue };
                    *tiers &= !bit(*tier);
                    if *tiers == 0 {
                        pages.remove(&key);
                    }
                }
            }
            KvEvent::Cleared => pages.clear(),
        }
    }
}

impl WorkerState {
    /// Returns the estimated number of prompt tokens that the worker has to compute.
    fn tokens_to_compute(&self, asked: &RoutingQuery<'_>) -> u32 {
        let found = asked.keys.iter().take_while(|&&key| self.pages.contains_key(&digest(key)));
        asked.input_tokens.saturating_sub(found.count() as u32 * asked.page_size).max(1)
    }
}

fn bit(tier: KvTier) -> u8 {
    match tier {
        KvTier::Device => 1,
        KvTier::Host => 2,
        KvTier::L3 => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(count: u128) -> Vec<PageKey> {
        (1..=count).map(|key| PageKey(key << 64)).collect()
    }

    fn stored(tier: KvTier, keys: Vec<PageKey>) -> KvEvent<'static> {
        let (namespace, parent) = (PageKey(0), PageKey(0));
        KvEvent::Stored {
            tier,
            namespace,
            parent,
            keys: keys.into(),
            tokens: Vec::new().into(),
            contents: Vec::new().into(),
        }
    }

    fn removed(tier: KvTier, keys: Vec<PageKey>) -> KvEvent<'static> {
        KvEvent::Removed { tier, namespace: PageKey(0), keys: keys.into() }
    }

    fn router(routing: Routing, workers: usize) -> Router {
        let config = RouterConfig { routing, decode_weight: 0.0, ..RouterConfig::default() };
        Router::new(config, &vec![(Role::Both, 1.0); workers])
    }

    fn asked(input_tokens: u32, keys: &[PageKey]) -> RoutingQuery<'_> {
        RoutingQuery { input_tokens, page_size: 16, keys, family: 0 }
    }

    fn goes_to(router: &mut Router, input_tokens: u32, keys: &[PageKey]) -> (usize, u32) {
        let route = router.route(0, &asked(input_tokens, keys)).unwrap();
        (route.worker, route.tokens)
    }

    #[test]
    fn round_robin_alternates() {
        let mut router = router(Routing::RoundRobin, 3);
        let workers: Vec<_> = (0..7).map(|_| goes_to(&mut router, 100, &[]).0).collect();
        assert_eq!(workers, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn prefers_the_prefix_until_that_worker_is_busy() {
        let mut router = router(Routing::PrefixAware { load_weight: 1.0 }, 2);
        router.hear_one(1, &stored(KvTier::Device, keys(4)));
        assert_eq!(goes_to(&mut router, 80, &keys(5)), (1, 16));
        let second = router.route(0, &asked(800, &keys(5))).unwrap();
        assert_eq!((second.worker, second.tokens), (1, 736));
        assert_eq!(goes_to(&mut router, 80, &keys(5)), (0, 80));
        router.started(second);
        assert_eq!(goes_to(&mut router, 80, &keys(5)).0, 1);
    }

    #[test]
    fn decode_load_reduces_preference() {
        let mut router = router(Routing::LeastLoaded, 2);
        router.config.decode_weight = 0.25;
        let long = router.route(0, &asked(4000, &[])).unwrap();
        router.started(long);
        assert_eq!(long.worker, 0);
        // A quarter of 4,000 tokens of context outweighs 700 tokens to compute.
        assert_eq!(goes_to(&mut router, 700, &[]).0, 1);
        assert_eq!(goes_to(&mut router, 50, &[]).0, 1);
        router.ended(long, true);
        assert_eq!(goes_to(&mut router, 200, &[]).0, 0);
    }

    #[test]
    fn sessions_keep_their_worker() {
        let mut router = router(Routing::SessionAffine, 3);
        let of = |family| RoutingQuery { family, ..asked(100, &[]) };
        let workers = [7, 8, 7, 7, 9, 8].map(|family| router.route(0, &of(family)).unwrap().worker);
        assert_eq!(workers, [0, 1, 0, 0, 2, 1]);
    }

    #[test]
    fn skips_failed_workers_and_spares_slow_ones() {
        for routing in [Routing::RoundRobin, Routing::LeastLoaded, Routing::SessionAffine] {
            let mut router = router(routing, 2);
            router.down(0);
            let workers = [1, 2, 3].map(|family| {
                let asked = RoutingQuery { family, ..asked(100, &[]) };
                router.route(0, &asked).map(|route| route.worker)
            });
            assert_eq!(workers, [Some(1); 3], "{routing:?}");
            router.down(1);
            assert_eq!(router.route(0, &asked(100, &[])), None);
            router.up(0);
            assert_eq!(router.route(0, &asked(100, &[])).unwrap().worker, 0);
        }
        let config = RouterConfig { routing: Routing::LeastLoaded, ..RouterConfig::default() };
        let mut router = Router::new(config, &[(Role::Both, 30.0), (Role::Both, 90.0)]);
        let to_fast = (0..80).filter(|_| goes_to(&mut router, 100, &[]).0 == 0).count();
        assert_eq!(to_fast, 60);
    }

    #[test]
    fn decode_workers_get_no_prompts() {
        let workers = [(Role::Prefill, 1.0), (Role::Decode, 1.0), (Role::Decode, 1.0)];
        let mut router = Router::new(RouterConfig::default(), &workers);
        for _ in 0..3 {
            assert_eq!(goes_to(&mut router, 100, &[]).0, 0);
        }
        let decoders = [0; 3].map(|_| router.route_decode(&asked(100, &[])).unwrap().worker);
        assert_eq!(decoders, [1, 2, 1]);
    }

    #[test]
    fn events_take_effect_after_their_delay() {
        let mut events = KvEvents::default();
        events.is_snapshot = true;
        let mut router = router(Routing::PrefixAware { load_weight: 0.0 }, 2);
        router.hear_one(1, &stored(KvTier::Device, keys(2)));
        router.config.event_delay_us = 500;
        // A snapshot without pages: the worker has lost them.
        router.tell(1000, 1, &mut events);
        assert_eq!(router.route(1499, &asked(40, &keys(2))).unwrap().worker, 1);
        assert_eq!(router.route(1500, &asked(40, &keys(2))).unwrap().worker, 0);
    }

    #[test]
    fn page_counts_until_removed_from_both_tiers() {
        let mut router = router(Routing::PrefixAware { load_weight: 0.0 }, 2);
        router.hear_one(1, &stored(KvTier::Device, keys(2)));
        router.hear_one(1, &stored(KvTier::Host, keys(2)));
        router.hear_one(1, &removed(KvTier::Device, keys(2)));
        assert_eq!(goes_to(&mut router, 40, &keys(2)).0, 1);
        router.hear_one(1, &removed(KvTier::Host, keys(2)));
        assert_eq!(goes_to(&mut router, 40, &keys(2)), (0, 40));
        router.hear_one(1, &stored(KvTier::Host, keys(2)));
        router.hear_one(1, &KvEvent::Cleared);
        assert_eq!(goes_to(&mut router, 40, &keys(2)).1, 40);
    }
}
