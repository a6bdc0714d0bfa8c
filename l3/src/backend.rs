//! Building blocks for backends and wrappers, that is, for implementations of
//! [`Store`](crate::Store). Users of stores do not need them.
//!
//! A backend keeps a [`Registry`] of the arenas that it may use, and a [`Catalogue`] of the objects
//! in its slots. [`MemoryStore`](crate::MemoryStore) is the shortest example.

pub use crate::arena::{ALIGNMENT, Headroom};
pub use crate::catalogue::{
    Catalogue, NamespaceShare, Recorded, Reserved, Slot, check_shares, leases_max, slots_of,
};
pub use crate::departures::{Departure, Departures, SlotUse};
pub use crate::fields::Fields;
pub use crate::guard::{after, died, merge, one_each, split};
pub use crate::in_flight::{InFlight, Ticket};
pub use crate::lending::{
    Filled, LendingStore, LentObject, Offered, Room, Scratch, ScratchPage, ScratchUse, Share,
};
pub use crate::memory::{Reservation, SlotLoan};
pub use crate::object::{payload_checksum, payload_checksums};
pub use crate::pool::{PagePool, PooledPage};
pub use crate::registry::Registry;
pub use crate::share_out::cores;
pub use crate::store::either;
pub use crate::sync::Mutex;
pub use crate::traffic::Traffic;
