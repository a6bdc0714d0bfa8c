//! A [`World`] with helpers for short tests.

use std::collections::BTreeSet;

use terrace_cache::Sequence;
use terrace_scheduler::{
    Config, DevicePage, HostPage, OpId, Outcome, PageKey, Plan, Request, RequestId, StateName,
    Stats, Token,
};
use terrace_tests::{Transfer, World};

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Probe,
    Prefetch,
    LoadBack,
    WriteBack,
    Backup,
}

/// A world in which the audit runs after every event.
pub(crate) struct Stage {
    pub(crate) world: World,
    /// Operations that have not released their pages, by rank.
    open: BTreeSet<(OpId, u32)>,
    next_op: OpId,
}

impl Stage {
    pub(crate) fn new(config: Config) -> Self {
        let world = World::new(config).expect("the configuration can work");
        Self { world, open: BTreeSet::new(), next_op: OpId(0) }
    }

    // ---- input ----

    pub(crate) fn submit(&mut self, id: u64, prompt: impl IntoIterator<Item = Token>, new: u32) {
        self.submit_request(Request::new(id, prompt.into_iter().collect(), new));
    }

    pub(crate) fn submit_request(&mut self, request: Request) {
        self.world.submit(request).expect("a sound request");
        self.audit();
    }

    pub(crate) fn abort(&mut self, id: u64) {
        self.world.scheduler.abort(self.world.now, RequestId(id)).expect("a live request");
        self.audit();
    }

    pub(crate) fn plan(&mut self) -> &Plan {
        self.world.plan();
        let ranks = self.world.scheduler.config().model.ranks;
        for (&op, _) in self.world.transfers.range(self.next_op..) {
            self.open.extend((0..ranks).map(|rank| (op, rank)));
            self.next_op = OpId(op.0 + 1);
        }
        self.audit();
        self.world.last_plan()
    }

    /// Executes the step in flight, which takes a millisecond for each prompt token. A wrong page
    /// fails the test.
    pub(crate) fn compute(&mut self) {
        let tokens: u32 = self.world.last_plan().prefills.iter().map(|p| p.tokens).sum();
        self.wait_ms(tokens.into());
        self.world.check_rows().unwrap_or_else(|request| panic!("{request} has a wrong row"));
        self.world.finish_step().unwrap_or_else(|wrong| panic!("{wrong}"));
        self.audit();
    }

    /// Plans and executes a step, which must exist.
    pub(crate) fn step(&mut self) {
        assert!(self.plan().step.is_some(), "there is nothing to compute");
        self.compute();
    }

    /// Reports an outcome on all ranks.
    pub(crate) fn report(&mut self, op: OpId, outcome: Outcome) {
        for rank in 0..self.world.scheduler.config().model.ranks {
            self.report_rank(op, rank, outcome);
        }
    }

    pub(crate) fn report_rank(&mut self, op: OpId, rank: u32, outcome: Outcome) {
        self.world.report(op, rank, outcome).expect("an operation that was planned");
        if outcome != Outcome::TimedOut {
            self.open.remove(&(op, rank));
        }
        self.audit();
    }

    /// Completes the latest operation of this kind and returns its id.
    pub(crate) fn done(&mut self, kind: Kind) -> OpId {
        self.ends(kind, Outcome::Done)
    }

    /// Reports an outcome of the latest operation of this kind and returns its id.
    pub(crate) fn ends(&mut self, kind: Kind, outcome: Outcome) -> OpId {
        let op = self.latest(kind);
        self.report(op, outcome);
        op
    }

    pub(crate) fn wait_ms(&mut self, ms: u64) {
        self.world.now.0 += ms * 1000;
    }

    /// Advances the time to the scheduler's deadline.
    pub(crate) fn wait_for_deadline(&mut self) {
        let deadline = self.world.scheduler.deadline().expect("every wait has a bound");
        self.world.now = self.world.now.max(deadline);
    }

    /// Evicts all unpinned pages from device and host.
    pub(crate) fn clear(&mut self) {
        self.world.scheduler.clear_cache();
        self.audit();
    }

    /// Submits a request and completes all work successfully.
    pub(crate) fn run(&mut self, id: u64, prompt: impl IntoIterator<Item = Token>) {
        self.submit(id, prompt, 1);
        self.settle();
    }

    /// Completes all work successfully, now and later.
    pub(crate) fn settle(&mut self) {
        for _ in 0..10_000 {
            let idle = self.plan().is_idle();
            if self.world.in_step() {
                self.compute();
            }
            let open = std::mem::take(&mut self.open);
            if idle && open.is_empty() {
                match self.world.scheduler.deadline() {
                    Some(deadline) => self.world.now = self.world.now.max(deadline),
                    None => return,
                }
            }
            for (op, rank) in open {
                self.world.report(op, rank, Outcome::Done).expect("it was planned");
                self.audit();
            }
        }
        panic!("it never comes to rest");
    }

    /// Ends a test: all work completes, no request waits, no page is pinned, and the audit passes.
    pub(crate) fn finish(mut self) {
        self.settle();
        let stats = self.stats();
        assert_eq!((stats.waiting, stats.running, stats.draining), (0, 0, 0), "a request waits");
        for tier in [stats.cache.device, stats.cache.host] {
            assert_eq!(tier.available_pages(), tier.total_pages, "a page is leaked");
        }
        self.clear();
        let stats = self.stats();
        for tier in [stats.cache.device, stats.cache.host] {
            assert_eq!(tier.free_pages, tier.total_pages, "a page is lost");
        }
    }

    // ---- queries ----

    pub(crate) fn audit(&self) {
        self.world.scheduler.audit();
    }

    pub(crate) fn stats(&self) -> Stats {
        self.world.scheduler.stats()
    }

    pub(crate) fn state(&self, id: u64) -> Option<StateName> {
        self.world.scheduler.state(RequestId(id))
    }

    /// Returns the number of a prompt's pages on device, and of those behind them on host.
    pub(crate) fn cached(&self, prompt: impl IntoIterator<Item = Token>) -> (u32, u32) {
        let prompt: Vec<Token> = prompt.into_iter().collect();
        let cached = self.world.scheduler.cached(&prompt, "", "");
        (cached.device_pages, cached.host_pages)
    }

    /// Returns the keys of a prompt's whole pages.
    pub(crate) fn keys(&self, prompt: impl IntoIterator<Item = Token>) -> Vec<PageKey> {
        let namespace = self.world.scheduler.namespace_of("", "");
        let page_size = self.world.scheduler.config().cache.page_size;
        Sequence::new(namespace, page_size, prompt.into_iter().collect()).keys().to_vec()
    }

    /// Returns the latest operation of this kind.
    pub(crate) fn latest(&self, kind: Kind) -> OpId {
        let mut latest_first = self.world.transfers.iter().rev();
        let found = latest_first.find(|(_, transfer)| kind_of(transfer) == kind);
        *found.unwrap_or_else(|| panic!("there was no {kind:?}")).0
    }

    pub(crate) fn l3_keys(&self, op: OpId) -> &[PageKey] {
        match &self.world.transfers[&op] {
            Transfer::Probe(keys) | Transfer::Prefetch(keys, _) | Transfer::Backup(keys, _) => keys,
            Transfer::LoadBack(..) | Transfer::WriteBack(..) => panic!("{op} has no keys"),
        }
    }

    pub(crate) fn host_pages(&self, op: OpId) -> &[HostPage] {
        match &self.world.transfers[&op] {
            Transfer::LoadBack(pages, _)
            | Transfer::WriteBack(_, pages)
            | Transfer::Prefetch(_, pages)
            | Transfer::Backup(_, pages) => pages,
            Transfer::Probe(_) => panic!("{op} has no pages"),
        }
    }

    pub(crate) fn device_pages(&self, op: OpId) -> &[DevicePage] {
        match &self.world.transfers[&op] {
            Transfer::LoadBack(_, pages) | Transfer::WriteBack(pages, _) => pages,
            Transfer::Probe(_) | Transfer::Prefetch(..) | Transfer::Backup(..) => {
                panic!("{op} has no device pages")
            }
        }
    }

    /// Returns the row of a running request.
    pub(crate) fn row(&self, id: u64) -> Vec<DevicePage> {
        self.world.scheduler.row(RequestId(id)).expect("it runs")
    }

    /// Returns the start of a request's prefill in the last plan.
    pub(crate) fn prefill_start(&self, id: u64) -> Option<u32> {
        let prefills = &self.world.last_plan().prefills;
        prefills
            .iter()
            .find(|prefill| prefill.request == RequestId(id))
            .map(|prefill| prefill.start)
    }
}

fn kind_of(transfer: &Transfer) -> Kind {
    match transfer {
        Transfer::Probe(_) => Kind::Probe,
        Transfer::Prefetch(..) => Kind::Prefetch,
        Transfer::LoadBack(..) => Kind::LoadBack,
        Transfer::WriteBack(..) => Kind::WriteBack,
        Transfer::Backup(..) => Kind::Backup,
    }
}
