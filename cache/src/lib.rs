//! The KV cache index: which pages are cached, in which tier, and which may be evicted.
//!
//! One radix tree over runs of pages says for every prefix which tiers hold its bytes. Pages and
//! pins are move-only values: the holder owns them, and releasing them consumes them.
//! [`Cache::audit`] checks that nothing was lost or handed out twice.
//!
//! ```
//! use terrace_cache::{Cache, CacheConfig, Cursor, Namespace, Sequence};
//!
//! let mut cache = Cache::new(&CacheConfig { page_size: 4, device_pages: 8, ..CacheConfig::default() });
//! let root = Namespace::new("my-model", 4).digest();
//! let sequence = Sequence::new(root, 4, vec![1, 2, 3, 4, 5, 6, 7, 8, 9]);
//!
//! // Nothing is known of these tokens: compute both whole pages, then publish them.
//! assert_eq!(cache.lookup(&sequence, 2).device.depth, 0);
//! let mut pages = cache.take_device_pages(2).expect("the pool has eight");
//! let mut pin = cache.pin_device(root, Cursor::START);
//! cache.publish_device(&mut pin, sequence.run(0, 2), &mut pages, 0);
//! cache.unpin_device(pin);
//!
//! // The next request with this prefix finds them.
//! assert_eq!(cache.lookup(&sequence, 2).device.depth, 2);
//! ```
//!
//! This crate does no IO, reads no clock and uses no randomness: the same calls give byte-identical
//! results on every machine.

#![forbid(unsafe_code)]

mod audit;
mod cache;
mod chain;
mod events;
mod evict;
mod excerpt;
mod hash;
mod in_parts;
mod key;
mod name;
mod node;
mod passage;
mod pin;
pub mod planted;
mod pool;
mod prefix;
mod reach;
mod run;
mod sequence;
mod text;
mod tier;
mod tree;
mod view;
mod write_policy;

pub use audit::{Claims, Fault};
pub use cache::{
    Arrival, Cache, CacheConfig, CacheMemory, CacheUse, Freed, Published, TierUse, Victim,
};
pub use events::{KvEvent, KvEvents, KvTier, PageContent};
pub use evict::EvictionKind;
pub use hash::{HashedMap, HashedSet, KeepBits};
pub use in_parts::{InParts, Keys, Tokens};
pub use key::{Namespace, PageKey, Token};
pub use name::is_name_of;
pub use passage::{ContentKey, Passage, PassageError, PassageFault};
pub use pin::{DevicePin, HostPin, Pin};
pub use prefix::PrefixDigest;
pub use reach::Reach;
pub use run::{KeptRun, PageRun};
pub use sequence::Sequence;
pub use tier::{
    Device, DevicePage, DevicePages, Host, HostPage, HostPages, Page, Pages, Tier, TierName,
};
pub use tree::{Cursor, Depths, Match, NodeId};
pub use view::NodeView;
pub use write_policy::WritePolicy;
