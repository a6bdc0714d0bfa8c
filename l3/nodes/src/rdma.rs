//! One-sided reads between machines: a [`Link`] reads pages out of the memory that its peer has
//! registered, without the peer's processor taking part.
//!
//! Memory is registered for reading from afar and for nothing else, so no peer can ever write to it;
//! what arrives is written by this side's own adapter, into [`Target`](terrace_l3::Target)s that the link
//! holds until the adapter is done with them. Whoever knows the key of a region and has a link to its
//! device can read all of the region as long as the link lasts: what may be told to whom, and for how
//! long a page stays as it is, is for the layer above to say.
//!
//! Ports must speak RoCEv2. Nothing on the wire is encrypted.

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
