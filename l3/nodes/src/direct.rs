//! Payload transfers by RDMA: the adapter of this machine, and a link beside each connection.
//!
//! Builds without the feature `rdma` use an adapter type without values, so that other code need
//! not distinguish them.

#[cfg(not(feature = "rdma"))]
mod none;
#[cfg(feature = "rdma")]
mod rdma;

use std::sync::Arc;

#[cfg(not(feature = "rdma"))]
pub(super) use none::{Adapter, Direct, Region};
#[cfg(feature = "rdma")]
pub(super) use rdma::{Adapter, Direct, Region};

use terrace_l3::Target;

/// Error of a failed read, and the targets, if the adapter has released all of them.
pub(super) struct FailedRead {
    pub(super) message: String,
    pub(super) targets: Vec<Target>,
}

/// State of a connection's RDMA link, on the client.
#[derive(Debug, Default)]
pub(super) enum Shortcut {
    /// Not requested yet.
    #[default]
    Untried,
    /// Not available.
    None,
    /// Established.
    Linked(Arc<Direct>),
}

/// A value whose memory the peer may be reading, or is being read into. It is released only when
/// that has ended, or the link with it.
pub(super) struct HeldForReads<T> {
    direct: Arc<Direct>,
    what: Option<T>,
}

impl<T> HeldForReads<T> {
    pub(super) fn new(direct: &Arc<Direct>, what: T) -> Self {
        Self { direct: direct.clone(), what: Some(what) }
    }

    /// Returns the value; all reads must have ended.
    pub(super) fn release(mut self) -> T {
        self.what.take().expect("it is released once")
    }
}

impl<T> Drop for HeldForReads<T> {
    fn drop(&mut self) {
        if self.what.is_some() {
            self.direct.close();
        }
    }
}
