//! The adapter of this machine, if it has one.

use super::Unread;
use crate::arena::{Arena, Source, Target};
use crate::node::config::RdmaChoice;
use crate::node::messages::{Afar, LINK_BYTES};
use crate::rdma::{self, Device, Link, LinkAddress, RemotePage, RemoteRead};

const _: () = assert!(LINK_BYTES == rdma::ADDRESS_BYTES);

#[derive(Clone, Debug)]
pub(in crate::node) struct Adapter(Device);

#[derive(Debug)]
pub(in crate::node) struct Direct(Link);

#[derive(Clone, Debug)]
pub(in crate::node) struct Region(rdma::Region);

impl Adapter {
    pub(in crate::node) fn open(choice: &RdmaChoice) -> Option<Self> {
        let name = match choice {
            RdmaChoice::Auto => None,
            RdmaChoice::Never => return None,
            RdmaChoice::Device(name) => Some(name.as_str()),
        };
        match Device::open(name) {
            Ok(device) => {
                tracing::info!("pages go by RDMA port {} where the other side can", device.port());
                Some(Self(device))
            }
            Err(error) => {
                tracing::warn!("pages go by TCP: {error}");
                None
            }
        }
    }

    /// Has the adapter use the memory as long as the region lasts. Without one, its pages go by TCP.
    pub(in crate::node) fn register(&self, arena: &Arena) -> Option<Region> {
        match self.0.register(arena) {
            Ok(region) => Some(Region(region)),
            Err(error) => {
                tracing::warn!("pages of {arena:?} go by TCP: {error}");
                None
            }
        }
    }

    /// The region of memory that is registered.
    pub(in crate::node) fn region(&self, arena: &Arena) -> Option<Region> {
        self.0.region(arena).map(Region)
    }

    /// This side's end of a link.
    pub(in crate::node) fn link(&self) -> Result<Direct, String> {
        Link::new(&self.0).map(Direct).map_err(|error| error.to_string())
    }
}

impl Region {
    /// Where the other side can read a page.
    pub(in crate::node) fn place(&self, source: &Source) -> Afar {
        let RemotePage { address, key } = self.0.page(source);
        Afar { address, key }
    }
}

impl Direct {
    pub(in crate::node) fn end(&self) -> [u8; LINK_BYTES] {
        self.0.address().encode()
    }

    pub(in crate::node) fn connect(&self, peer: &[u8; LINK_BYTES]) -> Result<(), String> {
        let connected = LinkAddress::decode(peer).and_then(|peer| self.0.connect(peer));
        connected.map_err(|error| error.to_string())
    }

    /// Reads payloads, all of them or none.
    pub(in crate::node) async fn read(
        &self,
        reads: impl Iterator<Item = (Target, Afar)>,
    ) -> Result<Vec<Target>, Unread> {
        let reads = reads.map(|(target, Afar { address, key })| RemoteRead {
            target,
            page: RemotePage { address, key },
        });
        self.0.read(reads.collect()).await.map_err(|rdma::Unread { error, targets }| Unread {
            message: error.to_string(),
            targets,
        })
    }

    /// Ends all reads of either side, now.
    pub(in crate::node) fn close(&self) {
        self.0.close();
    }
}
