//! The adapter of builds that cannot use any.

use std::convert::Infallible;

use super::Unread;
use crate::arena::{Arena, Source, Target};
use crate::node::config::RdmaChoice;
use crate::node::messages::{Afar, LINK_BYTES};

#[derive(Clone, Debug)]
pub(in crate::node) struct Adapter(Infallible);

#[derive(Debug)]
pub(in crate::node) struct Direct(Infallible);

#[derive(Clone, Debug)]
pub(in crate::node) struct Region(Infallible);

impl Adapter {
    pub(in crate::node) fn open(choice: &RdmaChoice) -> Option<Self> {
        if let RdmaChoice::Device(name) = choice {
            tracing::warn!(
                "this build has no RDMA, so {name} is not used and pages go by TCP: build it with \
                 `--features rdma`"
            );
        }
        None
    }

    pub(in crate::node) fn register(&self, _: &Arena) -> Option<Region> {
        match self.0 {}
    }

    pub(in crate::node) fn region(&self, _: &Arena) -> Option<Region> {
        match self.0 {}
    }

    pub(in crate::node) fn link(&self) -> Result<Direct, String> {
        match self.0 {}
    }
}

impl Region {
    pub(in crate::node) fn place(&self, _: &Source) -> Afar {
        match self.0 {}
    }
}

impl Direct {
    pub(in crate::node) fn end(&self) -> [u8; LINK_BYTES] {
        match self.0 {}
    }

    pub(in crate::node) fn connect(&self, _: &[u8; LINK_BYTES]) -> Result<(), String> {
        match self.0 {}
    }

    pub(in crate::node) async fn read(
        &self,
        _: impl Iterator<Item = (Target, Afar)>,
    ) -> Result<Vec<Target>, Unread> {
        match self.0 {}
    }

    pub(in crate::node) fn close(&self) {
        match self.0 {}
    }
}
