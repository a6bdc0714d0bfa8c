//! The store that a node shares, as the network sees it: slots that are lent and filled in place.

use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::messages::{GAUGES, Gauges};
use terrace_l3::backend::NamespaceShare;
use terrace_l3::{
    Arena, GetOptions, MemoryStore, ObjectId, Owner, Pin, PutOptions, Results, Store, StoreError,
    Stored, TierStats,
};
use terrace_l3_disk::TieredStore;
use terrace_l3_disk::holding::{Filled, Lent, Offered, Room, Scratch, Share};

const SHARED: &str = "whoever uses tiers has a share of their scratch memory";

/// What a node keeps objects in.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Holding {
    /// Memory alone.
    Memory(MemoryStore),
    /// Memory over disk.
    Tiers(TieredStore),
}

/// A node's store and the memory for transfers that it needs besides.
#[derive(Debug)]
pub(super) enum Holder {
    Memory { store: MemoryStore, changed: Notify },
    Tiers { store: TieredStore, scratch: Scratch, changed: Notify },
}

impl Holder {
    pub(super) fn new(holding: Holding, scratch_pages: u32) -> Result<Self, StoreError> {
        let changed = Notify::new();
        Ok(match holding {
            Holding::Memory(store) => Self::Memory { store, changed },
            Holding::Tiers(store) => {
                let scratch = Scratch::new(&store, scratch_pages)?;
                Self::Tiers { store, scratch, changed }
            }
        })
    }

    /// What one client may have at a time of the memory for transfers that is apart from the slots, where there is such.
    pub(super) fn share(&self) -> Option<Share> {
        match self {
            Self::Memory { .. } => None,
            Self::Tiers { scratch, .. } => Some(scratch.share()),
        }
    }

    /// Limits groups of namespaces to shares of all that is here.
    pub(super) fn set_shares(&self, shares: &[NamespaceShare]) {
        match self {
            Self::Memory { store, .. } => store.set_shares(shares),
            Self::Tiers { store, .. } => store.set_shares(shares),
        }
    }

    /// How many objects there is memory for, at home or on their way.
    pub(super) fn slots(&self) -> u32 {
        match self {
            Self::Memory { store, .. } => store.arena().pages(),
            Self::Tiers { store, scratch, .. } => store.slots().pages() + scratch.arena().pages(),
        }
    }

    pub(super) fn store(&self) -> &dyn Store {
        match self {
            Self::Memory { store, .. } => store,
            Self::Tiers { store, .. } => store,
        }
    }

    /// All memory that objects are lent from and received into.
    pub(super) fn arenas(&self) -> Vec<&Arena> {
        match self {
            Self::Memory { store, .. } => vec![store.arena()],
            Self::Tiers { store, scratch, .. } => vec![store.slots(), scratch.arena()],
        }
    }

    pub(super) fn object_bytes_max(&self) -> usize {
        match self {
            Self::Memory { store, .. } => store.object_bytes_max(),
            Self::Tiers { store, .. } => store.object_bytes_max(),
        }
    }

    /// Lends objects; `None` for those that must be asked for again.
    pub(super) async fn lend(
        &self,
        wanted: &[(ObjectId, usize)],
        options: GetOptions,
        share: Option<&Share>,
    ) -> Results<Option<Lent>> {
        match self {
            Self::Memory { store, .. } => {
                let lend = |(id, length): &(ObjectId, usize)| {
                    store.lend(id, *length).map(|slot| Some(Lent::from_slot(slot, false)))
                };
                wanted.iter().map(lend).collect()
            }
            Self::Tiers { store, scratch, .. } => {
                store.lend(wanted, options, scratch, share.expect(SHARED)).await
            }
        }
    }

    /// Where the bytes of an object can go. For room it waits until `deadline`.
    pub(super) async fn offer(
        &self,
        id: &ObjectId,
        length: usize,
        pin: Option<Pin>,
        deadline: Instant,
        share: Option<&Share>,
    ) -> Result<Offered, StoreError> {
        /// Leases end without telling anybody.
        const LEASE_CHECK: Duration = Duration::from_millis(20);
        loop {
            let mut changed = std::pin::pin!(self.changed().notified());
            changed.as_mut().enable();
            match self.try_offer(id, length, pin, share).await? {
                Offered::NoRoom if Instant::now() < deadline && !self.is_stuck() => {}
                offered => return Ok(offered),
            }
            let _ = timeout(LEASE_CHECK, changed).await;
        }
    }

    async fn try_offer(
        &self,
        id: &ObjectId,
        length: usize,
        pin: Option<Pin>,
        share: Option<&Share>,
    ) -> Result<Offered, StoreError> {
        match self {
            Self::Memory { store, .. } => match store.reserve(*id, length, pin) {
                Ok(Some(slot)) => Ok(Offered::Room(Room::Slot(slot))),
                Ok(None) => {
                    store.count_put(&Ok(Stored::AlreadyThere), length);
                    Ok(Offered::There)
                }
                Err(StoreError::Full) => Ok(Offered::NoRoom),
                Err(error) => Err(error),
            },
            Self::Tiers { store, scratch, .. } => {
                store.offer(id, length, pin, scratch, share.expect(SHARED)).await
            }
        }
    }

    fn is_stuck(&self) -> bool {
        match self {
            Self::Memory { store, .. } => store.is_stuck(),
            // Scratch memory comes back in any case.
            Self::Tiers { .. } => false,
        }
    }

    /// Stores objects whose bytes have come. It must not be given up half-way.
    pub(super) async fn keep(&self, filled: Vec<Filled>, options: PutOptions) -> Results<Stored> {
        let results = match self {
            Self::Memory { store, .. } => {
                let keep = |Filled { header, room }| {
                    let Room::Slot(slot) = room else { unreachable!("memory offers slots only") };
                    slot.publish(&header, false);
                    store.count_put(&Ok(Stored::New), header.length as usize);
                    Ok(Stored::New)
                };
                filled.into_iter().map(keep).collect()
            }
            Self::Tiers { store, .. } => store.keep(filled, options).await,
        };
        self.note_change();
        results
    }

    /// Looks at an object that somebody could not verify, and removes it if it is damaged.
    pub(super) fn inspect(&self, id: &ObjectId) {
        match self {
            Self::Memory { store, .. } => store.inspect(id),
            Self::Tiers { store, .. } => store.inspect(id),
        }
    }

    /// The owner is there.
    pub(super) fn hold(&self, owner: Owner) {
        match self {
            Self::Memory { store, .. } => store.hold(owner),
            Self::Tiers { store, .. } => store.hold(owner),
        }
    }

    /// The owner is gone, perhaps for good.
    pub(super) fn let_go(&self, owner: Owner, patience: Duration) {
        match self {
            Self::Memory { store, .. } => store.let_go(owner, patience),
            Self::Tiers { store, .. } => store.let_go(owner, patience),
        }
    }

    /// Something ended that may have kept a slot.
    pub(super) fn note_change(&self) {
        self.changed().notify_waiters();
    }

    fn changed(&self) -> &Notify {
        match self {
            Self::Memory { changed, .. } | Self::Tiers { changed, .. } => changed,
        }
    }

    /// What clients are told about the store: of two tiers, the one that has the say about what there
    /// is, with the leases and failures of both.
    pub(super) fn gauges(&self, stamp: u64) -> Gauges {
        let stats = self.store().stats();
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
        Gauges { stamp, values: told(&mut tier).map(|figure| *figure) }
    }
}

/// The figures that are told, in their order on the wire.
fn told(tier: &mut TierStats) -> [&mut u64; GAUGES] {
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
    /// As the figures of a tier, of which clients count the rest.
    pub(super) fn tier(&self) -> TierStats {
        let mut tier = TierStats::default();
        for (figure, value) in told(&mut tier).into_iter().zip(self.values) {
            *figure = value;
        }
        tier
    }

    /// Both together.
    pub(super) fn plus(mut self, other: &Self) -> Self {
        for (value, more) in self.values.iter_mut().zip(other.values) {
            *value += more;
        }
        self
    }
}
