//! One-sided reads between machines: a [`Link`] reads pages from memory that its peer has
//! registered, without involving the peer's processor.
//!
//! Memory is registered for remote reads only, so no peer can write to it. Bytes that arrive are
//! written by this side's own adapter, into [`Target`](terrace_l3::Target)s that the link holds
//! until the adapter has finished. A peer that has a link to the device and knows the key of a
//! region can read all of the region while the link exists. The layer above decides which peer
//! learns a key, and how long a page stays unchanged.
//!
//! Ports must support RoCEv2. Nothing on the wire is encrypted.

mod address;
mod counters;
mod device;
mod error;
mod link;
mod verbs;

pub use address::{ADDRESS_BYTES, LinkAddress};
pub use counters::Counters;
pub use device::{Device, Region, RemotePage};
pub use error::{PortName, RdmaError, Unusable};
pub use link::{Link, RemoteRead, Unread};
