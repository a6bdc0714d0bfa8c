//! Selection of a worker for a request: the tokens to compute there, weighed against the worker's
//! load.

/// Load of the workers, by the requests that the router has sent them.
#[derive(Debug)]
pub struct Balance {
    workers: Vec<Load>,
    load_weight: f64,
    decode_weight: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    /// Prompt tokens still to compute.
    pending_tokens: u64,
    /// Prompt tokens of live requests, which every step reads.
    context_tokens: u64,
    /// Number of requests so far.
    requests: u64,
    alive: u64,
}

/// A request at a worker, until it has [ended](Balance::ended).
#[derive(Debug)]
pub struct Route {
    worker: usize,
    /// Prompt tokens still to compute.
    pending_tokens: u64,
    context_tokens: u64,
}

impl Route {
    /// Returns the worker.
    #[must_use]
    pub fn worker(&self) -> usize {
        self.worker
    }
}

impl Balance {
    /// Creates an idle state. A token that a worker has to compute for other requests counts
    /// `load_weight` of one of the request's own; a context token of a decode counts
    /// `decode_weight` of that.
    #[must_use]
    pub fn new(workers: usize, load_weight: f64, decode_weight: f64) -> Self {
        Self { workers: vec![Load::default(); workers], load_weight, decode_weight }
    }

    /// Returns the worker with the lowest cost for a request of `tokens` tokens, among those with a
    /// known state, and the number of tokens that it has cached. Of equals, the one with the fewest
    /// requests so far.
    pub fn choose(
        &self,
        tokens: u32,
        cached: impl IntoIterator<Item = Option<u32>>,
    ) -> Option<usize> {
        let priced =
            self.workers.iter().zip(cached).enumerate().filter_map(|(worker, (load, cached))| {
                let decodes = self.decode_weight * load.context_tokens as f64;
                let price = f64::from(to_compute(tokens, cached?))
                    + self.load_weight * (load.pending_tokens as f64 + decodes);
                Some((worker, price, load.requests))
            });
        let cheapest = priced.min_by(|(_, a, x), (_, b, y)| a.total_cmp(b).then(x.cmp(y)));
        cheapest.map(|(worker, ..)| worker)
    }

    /// Records a request sent to a worker that has `cached` of its tokens.
    pub fn send(&mut self, worker: usize, tokens: u32, cached: u32) -> Route {
        let load = &mut self.workers[worker];
        let pending_tokens = u64::from(to_compute(tokens, cached));
        load.pending_tokens += pending_tokens;
        load.context_tokens += u64::from(tokens);
        load.requests += 1;
        load.alive += 1;
        Route { worker, pending_tokens, context_tokens: u64::from(tokens) }
    }

    /// Records the first token of a request.
    pub fn started(&mut self, route: &mut Route) {
        self.workers[route.worker].pending_tokens -= std::mem::take(&mut route.pending_tokens);
    }

    /// Records the end of a request.
    pub fn ended(&mut self, mut route: Route) {
        self.started(&mut route);
        let load = &mut self.workers[route.worker];
        load.context_tokens -= route.context_tokens;
        load.alive -= 1;
    }

    /// Returns the live requests of a worker.
    #[must_use]
    pub fn alive(&self, worker: usize) -> u64 {
        self.workers[worker].alive
    }
}

/// The last token is always computed, because its output is needed.
fn to_compute(tokens: u32, cached: u32) -> u32 {
    tokens.saturating_sub(cached).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefers_the_prefix_until_that_worker_is_busy() {
        let mut balance = Balance::new(2, 1.0, 0.0);
        let cached = [Some(0), Some(64)];
        assert_eq!(balance.choose(80, cached), Some(1));
        let mut busy = balance.send(1, 800, 64);
        assert_eq!(balance.choose(80, cached), Some(0));
        balance.started(&mut busy);
        assert_eq!(balance.choose(80, cached), Some(1));
        assert_eq!((balance.alive(1), balance.alive(0)), (1, 0));
        balance.ended(busy);
        assert_eq!(balance.alive(1), 0);
        assert!(balance.workers.iter().all(|load| load.pending_tokens + load.context_tokens == 0));
    }

    #[test]
    fn skips_unknown_workers_and_alternates_equals() {
        let mut balance = Balance::new(3, 1.0, 0.0);
        let turns = [0; 4].map(|_| {
            let worker = balance.choose(10, [Some(0), None, Some(0)]).unwrap();
            let route = balance.send(worker, 10, 0);
            balance.ended(route);
            worker
        });
        assert_eq!(turns, [0, 2, 0, 2]);
        assert_eq!(balance.choose(10, [None, None, None]), None);
    }

    #[test]
    fn decode_load_reduces_preference() {
        let mut balance = Balance::new(2, 1.0, 0.25);
        let mut long = balance.send(0, 4000, 0);
        balance.started(&mut long);
        assert_eq!(balance.choose(100, [Some(90), Some(0)]), Some(1));
        balance.ended(long);
        assert_eq!(balance.choose(100, [Some(90), Some(0)]), Some(0));
    }
}
