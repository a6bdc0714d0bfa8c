//! Payloads by RDMA: the adapter of this machine, and a link over it beside each connection.
//!
//! Builds without the feature `rdma` have an adapter of which there is none, so that nothing else need
//! know about the difference.

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

/// Why payloads were not read, and the targets, if the adapter has let go of all of them.
pub(super) struct Unread {
    pub(super) message: String,
    pub(super) targets: Vec<Target>,
}

/// What a client knows about a connection's link.
#[derive(Debug, Default)]
pub(super) enum Shortcut {
    /// Nobody has asked for one.
    #[default]
    Untried,
    /// There is none.
    None,
    /// There is one.
    Linked(Arc<Direct>),
}

/// Something in memory that the peer may be reading, or that is being read into. It is let go of only
/// when that has ended, or the link with it.
pub(super) struct Held<T> {
    direct: Arc<Direct>,
    what: Option<T>,
}

impl<T> Held<T> {
    pub(super) fn new(direct: &Arc<Direct>, what: T) -> Self {
        Self { direct: direct.clone(), what: Some(what) }
    }

    /// All reads have ended.
    pub(super) fn release(mut self) -> T {
        self.what.take().expect("it is released once")
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        if self.what.is_some() {
            self.direct.close();
        }
    }
}
