//! The L3 tier: a store of KV pages that outlives requests and, on disk, the process.
//!
//! Every backend is a [`Store`]: batches of objects move from registered memory to the store
//! ([`Store::put_from`]) and back ([`Store::get_into`]) without a copy in between. [`MemoryStore`]
//! keeps them in memory. Other backends are separate crates: on a local SSD, on nodes that many
//! servers share, in a Mooncake cluster, in a bucket. [`Guarded`] adds deadlines, a circuit breaker
//! and a negative cache. The module [`backend`] has the tools for new backends.
//!
//! A store never returns bytes other than those stored under the given id. Every object has a
//! [`Header`] that its reader verifies; an object that does not verify is removed and counts as
//! missing. A store never decides anything about requests: losing an object is allowed at any time
//! and costs a recomputation.
//!
//! ```
//! use terrace_l3::{Arena, Get, GetOptions, MemoryConfig, MemoryStore, ObjectId, Put, PutOptions, Store};
//! use terrace_cache::{Namespace, PageKey};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let store = MemoryStore::new(MemoryConfig::new(64 << 20, 64 << 10))?;
//! let arena = Arena::new(8, 64 << 10)?;
//! let registration = store.register(&arena)?;
//!
//! let namespace = Namespace::new("my-model", 16).digest();
//! let id = ObjectId::page(namespace, namespace.next(namespace, &[1, 2, 3]));
//! arena.target(0)?.fill(7);
//! store.put_from(vec![Put::new(id, arena.source(0)?)], PutOptions::default()).await.remove(0)?;
//! store.get_into(vec![Get::new(id, arena.target(1)?)], GetOptions::default()).await.remove(0)?;
//! assert_eq!(arena.source(0)?[..], arena.source(1)?[..]);
//! # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
//! ```

mod arena;
pub mod backend;
mod catalogue;
mod departures;
mod fields;
mod guard;
mod in_flight;
mod lending;
mod memory;
mod object;
mod pool;
mod registry;
mod share_out;
mod stats;
mod store;
mod sync;
mod traffic;

pub use arena::{Arena, Lent, Source, Sources, Target, Targets};
pub use guard::{GuardConfig, Guarded};
pub use lending::LendingStore;
pub use memory::{MemoryConfig, MemoryStore};
pub use object::{HEADER_BYTES, Header, Mismatch, ObjectId};
pub use registry::Registration;
pub use stats::{BreakerState, Figure, FigureKind, GuardStats, StoreStats, TierStats};
pub use store::{
    Answer, ExistsOptions, Get, GetOptions, Owner, Pin, Place, Presence, Put, PutOptions, Removal,
    Results, Served, Store, StoreError, Stored,
};
