//! Which worker a request goes to.

use terrace_cache::HashedMap;
use terrace_scheduler::{KvEvent, KvEvents, KvTier, PageKey};

use crate::config::Routing;
use crate::page_set::digest;

/// Chooses a worker for each request.
#[derive(Debug)]
pub(crate) struct Router {
    routing: Routing,
    next: usize,
    workers: Vec<Known>,
}

/// What the router knows about a worker.
#[derive(Debug, Default)]
struct Known {
    /// Pages that it holds, and in which tiers: a bit for each.
    pages: HashedMap<u64, u8>,
    /// Tokens that it still has to compute before its requests have their first tokens.
    pending_tokens: u64,
    requests: u64,
}

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) worker: usize,
    /// What that worker will have to compute of it, as far as the router knows.
    pub(crate) tokens: u32,
}

impl Router {
    pub(crate) fn new(routing: Routing, workers: usize) -> Self {
        Self { routing, next: 0, workers: (0..workers).map(|_| Known::default()).collect() }
    }

    /// Whether it wants to hear KV events, and to see page keys.
    pub(crate) fn wants_events(&self) -> bool {
        match self.routing {
            Routing::RoundRobin => false,
            Routing::PrefixAware { .. } => self.workers.len() > 1,
        }
    }

    /// Chooses a worker for a request; its page keys are needed only where events are wanted.
    pub(crate) fn route(&mut self, input_tokens: u32, page_size: u32, keys: &[PageKey]) -> Route {
        let route = match self.routing {
            Routing::PrefixAware { load_weight } if self.workers.len() > 1 => {
                self.cheapest(load_weight, input_tokens, page_size, keys)
            }
            Routing::PrefixAware { .. } | Routing::RoundRobin => {
                let worker = self.next;
                self.next = (self.next + 1) % self.workers.len();
                Route { worker, tokens: input_tokens }
            }
        };
        self.workers[route.worker].pending_tokens += u64::from(route.tokens);
        self.workers[route.worker].requests += 1;
        route
    }

    /// The worker that has the least to do, counting what it would have to compute of the request.
    /// Among equals the one with the fewest requests so far.
    fn cheapest(
        &self,
        load_weight: f64,
        input_tokens: u32,
        page_size: u32,
        keys: &[PageKey],
    ) -> Route {
        let price = |worker: &Known| {
            let pages = keys.iter().take_while(|&&key| worker.pages.contains_key(&digest(key)));
            let tokens = input_tokens.saturating_sub(pages.count() as u32 * page_size).max(1);
            (f64::from(tokens) + load_weight * worker.pending_tokens as f64, tokens)
        };
        let prices = self.workers.iter().map(price).zip(&self.workers).enumerate();
        let cheapest = prices.min_by(|(_, ((a, _), x)), (_, ((b, _), y))| {
            a.total_cmp(b).then(x.requests.cmp(&y.requests))
        });
        let (worker, ((_, tokens), _)) = cheapest.expect("there is at least one worker");
        Route { worker, tokens }
    }

    /// A request has its first token, or will never have one: what it cost is done.
    pub(crate) fn started(&mut self, route: Route) {
        self.workers[route.worker].pending_tokens -= u64::from(route.tokens);
    }

    /// Hears what a worker holds.
    pub(crate) fn hear(&mut self, worker: usize, events: &KvEvents) {
        if events.is_snapshot {
            self.workers[worker].pages.clear();
        }
        events.iter().for_each(|event| self.hear_one(worker, &event));
    }

    fn hear_one(&mut self, worker: usize, event: &KvEvent<'_>) {
        let pages = &mut self.workers[worker].pages;
        match event {
            // All workers share L3: what is there speaks for none of them.
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

    #[test]
    fn round_robin_goes_round() {
        let mut router = Router::new(Routing::RoundRobin, 3);
        let workers: Vec<_> = (0..7).map(|_| router.route(100, 16, &[]).worker).collect();
        assert_eq!(workers, [0, 1, 2, 0, 1, 2, 0]);
    }

    #[test]
    fn a_request_goes_where_its_prefix_is_until_that_worker_is_busy() {
        let mut router = Router::new(Routing::PrefixAware { load_weight: 1.0 }, 2);
        router.hear_one(1, &stored(KvTier::Device, keys(4)));
        let first = router.route(80, 16, &keys(5));
        assert_eq!(first, Route { worker: 1, tokens: 16 });
        let second = router.route(800, 16, &keys(5));
        assert_eq!(second, Route { worker: 1, tokens: 736 });
        let third = router.route(80, 16, &keys(5));
        assert_eq!(third, Route { worker: 0, tokens: 80 });
        router.started(second);
        assert_eq!(router.route(80, 16, &keys(5)).worker, 1);
    }

    #[test]
    fn a_page_is_there_until_it_has_left_both_tiers() {
        let mut router = Router::new(Routing::PrefixAware { load_weight: 0.0 }, 2);
        router.hear_one(1, &stored(KvTier::Device, keys(2)));
        router.hear_one(1, &stored(KvTier::Host, keys(2)));
        router.hear_one(1, &removed(KvTier::Device, keys(2)));
        assert_eq!(router.route(40, 16, &keys(2)).worker, 1);
        router.hear_one(1, &removed(KvTier::Host, keys(2)));
        assert_eq!(router.route(40, 16, &keys(2)), Route { worker: 0, tokens: 40 });
        router.hear_one(1, &stored(KvTier::Host, keys(2)));
        router.hear_one(1, &KvEvent::Cleared);
        assert_eq!(router.route(40, 16, &keys(2)).tokens, 40);
    }
}
