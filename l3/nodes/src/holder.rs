//! The store of a node as its sessions use it: slots are lent and filled in place.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::messages::{GAUGES, Gauges};
use terrace_l3::backend::{
    Filled, LendingStore, LentObject, NamespaceShare, Offered, Scratch, ScratchUse, Share,
};
use terrace_l3::{
    Arena, GetOptions, ObjectId, Owner, Pin, PutOptions, Results, StoreError, Stored, TierStats,
};

/// A node's store, with the scratch memory that its transfers need.
#[derive(Debug)]
pub(super) struct Holder {
    store: Arc<dyn LendingStore>,
    scratch: Option<Scratch>,
    /// Notified when a slot may have become available.
    changed: Notify,
}

impl Holder {
    pub(super) fn new(
        store: Arc<dyn LendingStore>,
        scratch_pages: u32,
    ) -> Result<Self, StoreError> {
        let scratch = store.scratch(scratch_pages)?;
        Ok(Self { store, scratch, changed: Notify::new() })
    }

    /// Quota of one client of the scratch memory, if there is any.
    pub(super) fn share(&self) -> Option<Share> {
        self.scratch.as_ref().map(Scratch::share)
    }

    /// Limits groups of namespaces to shares of all tiers.
    pub(super) fn set_shares(&self, shares: &[NamespaceShare]) {
        self.store.set_shares(shares);
    }

    /// Number of objects that fit in memory, in slots or in transfer.
    pub(super) fn slots(&self) -> u32 {
        self.arenas().into_iter().map(Arena::pages).sum()
    }

    pub(super) fn store(&self) -> &dyn LendingStore {
        &*self.store
    }

    /// All memory that objects are lent from and received into.
    pub(super) fn arenas(&self) -> Vec<&Arena> {
        let scratch = self.scratch.as_ref().map(Scratch::arena);
        std::iter::once(self.store.slots()).chain(scratch).collect()
    }

    pub(super) fn object_bytes_max(&self) -> usize {
        self.store.object_bytes_max()
    }

    /// Lends objects; `None` for those that must be requested again.
    pub(super) async fn lend(
        &self,
        wanted: &[(ObjectId, usize)],
        options: GetOptions,
        share: Option<&Share>,
    ) -> Results<Option<LentObject>> {
        self.store.lend(wanted, options, self.scratch_use(share)).await
    }

    /// Finds memory for the bytes of an object. Waits until `deadline` for room.
    pub(super) async fn offer(
        &self,
        id: &ObjectId,
        length: usize,
        pin: Option<Pin>,
        deadline: Instant,
        share: Option<&Share>,
    ) -> Result<Offered, StoreError> {
        /// Interval of checks for leases that have expired, which nothing reports.
        const LEASE_CHECK: Duration = Duration::from_millis(20);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            match self.store.offer(id, length, pin, self.scratch_use(share)).await? {
                Offered::NoRoom if Instant::now() < deadline && !self.store.is_stuck() => {}
                offered => return Ok(offered),
            }
            let _ = timeout(LEASE_CHECK, changed).await;
        }
    }

    /// Stores objects whose bytes have arrived. Must not be cancelled half-way.
    pub(super) async fn keep(&self, filled: Vec<Filled>, options: PutOptions) -> Results<Stored> {
        let results = self.store.accept(filled, options).await;
        self.note_change();
        results
    }

    /// Verifies an object that a client could not verify, and removes it if it is damaged.
    pub(super) fn inspect(&self, id: &ObjectId) {
        self.store.inspect(id);
    }

    /// Marks the owner as connected.
    pub(super) fn hold(&self, owner: Owner) {
        self.store.hold(owner);
    }

    /// Marks the owner as disconnected, perhaps for good.
    pub(super) fn let_go(&self, owner: Owner, patience: Duration) {
        self.store.let_go(owner, patience);
    }

    /// Reports that a slot may have become available.
    pub(super) fn note_change(&self) {
        self.changed.notify_waiters();
    }

    fn scratch_use<'a>(&'a self, share: Option<&'a Share>) -> Option<ScratchUse<'a>> {
        Some(ScratchUse { pages: self.scratch.as_ref()?, share: share? })
    }

    /// Statistics for clients: those of the authoritative tier, with the leases and failures of
    /// both.
    pub(super) fn gauges(&self, stamp: u64) -> Gauges {
        let stats = self.store.stats();
        let memory = stats.memory.unwrap_or_default();
        let mut tier = match stats.disk {
            Some(disk) => TierStats {
                leases: disk.leases + memory.leases,
                leases_refused: disk.leases_refused + memory.leases_refused,
                corrupt: disk.corrupt + memory.corrupt,
                ..disk
            },
            None => memory,
        };
        Gauges { stamp, values: gauge_fields(&mut tier).map(|figure| *figure) }
    }
}

/// Statistics that are sent, in their order on the wire.
fn gauge_fields(tier: &mut TierStats) -> [&mut u64; GAUGES] {
    [
        &mut tier.objects,
        &mut tier.bytes,
        &mut tier.resident_bytes,
        &mut tier.capacity_bytes,
        &mut tier.index_bytes,
        &mut tier.hard_pinned,
        &mut tier.soft_pinned,
        &mut tier.leases,
        &mut tier.leases_refused,
        &mut tier.evicted,
        &mut tier.removed,
        &mut tier.superseded,
        &mut tier.corrupt,
        &mut tier.io_errors,
        &mut tier.disk_full,
    ]
}

impl Gauges {
    /// Converts to tier statistics, of which clients count the rest themselves.
    pub(super) fn tier(&self) -> TierStats {
        let mut tier = TierStats::default();
        for (figure, value) in gauge_fields(&mut tier).into_iter().zip(self.values) {
            *figure = value;
        }
        tier
    }

    /// Adds other gauges.
    pub(super) fn plus(mut self, other: &Self) -> Self {
        for (value, more) in self.values.iter_mut().zip(other.values) {
            *value += more;
        }
        self
    }
}
