//! What backends and wrappers are built with, besides the [`Store`](crate::Store) that they are. Whoever only
//! uses stores needs nothing of this.
//!
//! A backend keeps a [`Registry`] of the arenas that it may use, and a [`Catalogue`] of which object is in
//! which of its slots. [`MemoryStore`](crate::MemoryStore) is the shortest example.

pub use crate::arena::{ALIGNMENT, Headroom};
pub use crate::catalogue::{
    Catalogue, NamespaceShare, Recorded, Reserved, Slot, check_shares, leases_max, slots_of,
};
pub use crate::fields::Fields;
pub use crate::guard::{after, died, merge, one_each, split};
pub use crate::in_flight::{InFlight, Ticket};
pub use crate::memory::{Reservation, SlotLoan};
pub use crate::object::{payload_checksum, payload_checksums};
pub use crate::pool::{PagePool, PooledPage};
pub use crate::registry::Registry;
pub use crate::share_out::cores;
pub use crate::store::either;
pub use crate::sync::Mutex;
pub use crate::traffic::Traffic;
