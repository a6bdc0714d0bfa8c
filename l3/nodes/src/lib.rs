//! Nodes: a handful of machines that share their memory and disks as one store.
//!
//! Each machine runs a [`NodeServer`] around a store of its own. A client, [`NodesStore`], places every
//! object on the node that its name belongs to, and moves its bytes straight between registered pages
//! and the node's memory. `NODE-WIRE.md` draws what goes over the wire.
//!
//! A node never answers anybody who has not proved to know its secret, and a client never believes
//! bytes that do not fit the header of the object that it asked for.

mod client;
mod codec;
mod config;
mod direct;
mod door;
mod handshake;
mod holder;
mod holds;
mod link;
mod messages;
mod peer;
mod placement;
#[cfg(feature = "rdma")]
pub mod rdma;
mod server;
mod session;
mod transfer;

pub use client::{NodesError, NodesStore};
pub use config::{NodeAddress, NodeClient, NodeConfig, NodesConfig, RdmaChoice};
pub use handshake::{NodeSecret, SecretError};
pub use holder::Holding;
pub use peer::PeerStats;
pub use server::{NodeError, NodeServer, NodeStats, RunningNode};

/// What goes over the wire, for tools that look at it.
pub mod wire {
    pub use super::codec::Malformed;
    pub use super::handshake::{Challenge, Hello, VERSION};
    pub use super::messages::{
        Afar, Answer, FRAME_BYTES_MAX, GAUGES, Gauges, IDS_MAX, Item, LINK_BYTES, Offer, Parcel,
        Reply, Request,
    };
}
