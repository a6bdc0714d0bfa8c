//! L3 on a local SSD ([`DiskStore`]), and in memory over it ([`TieredStore`]).
//!
//! There are two files: slots with objects, and an index that says what is in which slot
//! (`FORMAT.md` describes the bytes). Objects are transferred directly between registered memory
//! and their slot, by direct IO. The index in memory is authoritative while the store is open. A
//! thread writes its changes to disk in rounds (`commit.rs`), in an order that keeps the index on
//! disk consistent at every moment: it names only objects whose bytes are durable, and a slot is
//! reused only when the index on disk no longer names it. So opening reads only the index, and
//! every object that it finds there exists.

mod blocking;
mod commit;
mod engine;
mod files;
mod folder;
mod io;
mod joined;
mod layout;
mod open;
mod promotion;
mod secret;
mod shrink;
mod space;
mod store;
mod threads;
mod tiered;
mod transfer;
#[cfg(target_os = "linux")]
mod uring;

pub use files::FileDisk;
pub use folder::{OpenedInFolder, OtherStore, StoreFolder};
pub use io::{BLOCK_BYTES, Direction, Disk, DiskFile, Transfer};
pub use open::{DiskConfig, IoEngine, OpenError, Opening, Shortage};
pub use promotion::{PromotionConfig, PromotionStats};
pub use secret::SecretError;
pub use shrink::Dropped;
pub use space::usual_reserve_bytes;
pub use store::DiskStore;
pub use tiered::{TieredConfig, TieredStore, WriteBehindStats};
