//! L3 on nodes: a few machines that share their memory and disks as one store.
//!
//! Each machine runs a [`NodeServer`] around its own store. A client, [`NodesStore`], places every
//! object on the node that its name determines, and transfers its bytes directly between registered
//! pages and the node's memory. `NODE-WIRE.md` describes the wire format.
//!
//! A node never answers a client that has not proved that it knows the node's secret, and a client
//! never accepts bytes that do not match the header of the requested object.

mod client;
mod codec;
mod config;
mod direct;
mod handshake;
mod handshake_gate;
mod holder;
mod holds;
mod link;
mod membership;
mod messages;
mod peer;
mod placement;
#[cfg(feature = "rdma")]
pub mod rdma;
mod roll;
mod server;
mod session;
mod survey;
mod transfer;

pub use client::{NodesError, NodesStore};
pub use config::{ClientLimits, NodeAddress, NodeClient, NodeConfig, NodesConfig, RdmaChoice};
pub use handshake::{NodeSecret, SecretError};
pub use membership::{Mark, Membership, Standing};
pub use peer::PeerStats;
pub use server::{NodeError, NodeServer, NodeStats, RunningNode};
pub use survey::{ChangeError, Surveyed, change_list, survey};

/// Wire format, for tools that inspect it.
pub mod wire {
    pub use super::codec::Malformed;
    pub use super::handshake::{Challenge, Hello, VERSION};
    pub use super::messages::{
        Afar, Answer, FRAME_BYTES_MAX, GAUGES, Gauges, IDS_MAX, Item, Joining, LINK_BYTES, Offer,
        Parcel, Reply, Request,
    };
}
