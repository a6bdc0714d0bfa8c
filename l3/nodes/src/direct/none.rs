//! Adapter of builds without RDMA support.

use std::convert::Infallible;

use super::FailedRead;
use crate::config::RdmaChoice;
use crate::messages::{Afar, LINK_BYTES};
use terrace_l3::{Arena, Source, Target};

#[derive(Clone, Debug)]
pub(crate) struct Adapter(Infallible);

#[derive(Debug)]
pub(crate) struct Direct(Infallible);

#[derive(Clone, Debug)]
pub(crate) struct Region(Infallible);

impl Adapter {
    pub(crate) fn open(choice: &RdmaChoice) -> Option<Self> {
        if let RdmaChoice::Device(name) = choice {
            tracing::warn!(
                "this build does not support RDMA, so {name} is not used and pages use TCP: build \
                 it with `--features rdma`"
            );
        }
        None
    }

    pub(crate) fn register(&self, _: &Arena) -> Option<Region> {
        match self.0 {}
    }

    pub(crate) fn region(&self, _: &Arena) -> Option<Region> {
        match self.0 {}
    }

    pub(crate) fn link(&self) -> Result<Direct, String> {
        match self.0 {}
    }
}

impl Region {
    pub(crate) fn place(&self, _: &Source) -> Afar {
        match self.0 {}
    }
}

impl Direct {
    pub(crate) fn end(&self) -> [u8; LINK_BYTES] {
        match self.0 {}
    }

    pub(crate) fn connect(&self, _: &[u8; LINK_BYTES]) -> Result<(), String> {
        match self.0 {}
    }

    pub(crate) async fn read(
        &self,
        _: impl Iterator<Item = (Target, Afar)>,
    ) -> Result<Vec<Target>, FailedRead> {
        match self.0 {}
    }

    pub(crate) fn close(&self) {
        match self.0 {}
    }
}
