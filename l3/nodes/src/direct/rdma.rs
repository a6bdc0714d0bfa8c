//! RDMA adapter of this machine, if it has one.

use super::FailedRead;
use crate::config::RdmaChoice;
use crate::messages::{Afar, LINK_BYTES};
use crate::rdma::{self, Device, Link, LinkAddress, RemotePage, RemoteRead};
use terrace_l3::{Arena, Source, Target};

const _: () = assert!(LINK_BYTES == rdma::ADDRESS_BYTES);

#[derive(Clone, Debug)]
pub(crate) struct Adapter(Device);

#[derive(Debug)]
pub(crate) struct Direct(Link);

#[derive(Clone, Debug)]
pub(crate) struct Region(rdma::Region);

impl Adapter {
    pub(crate) fn open(choice: &RdmaChoice) -> Option<Self> {
        let name = match choice {
            RdmaChoice::Auto => None,
            RdmaChoice::Never => return None,
            RdmaChoice::Device(name) => Some(name.as_str()),
        };
        match Device::open(name) {
            Ok(device) => {
                tracing::info!(
                    "pages use RDMA port {} if the other side supports it",
                    device.port()
                );
                Some(Self(device))
            }
            Err(error) => {
                tracing::warn!("pages use TCP: {error}");
                None
            }
        }
    }

    /// Registers memory with the adapter while the region exists. Without a region, its pages use
    /// TCP.
    pub(crate) fn register(&self, arena: &Arena) -> Option<Region> {
        match self.0.register(arena) {
            Ok(region) => Some(Region(region)),
            Err(error) => {
                tracing::warn!("pages of {arena:?} use TCP: {error}");
                None
            }
        }
    }

    /// Region of registered memory.
    pub(crate) fn region(&self, arena: &Arena) -> Option<Region> {
        self.0.region(arena).map(Region)
    }

    /// Creates this side's end of a link.
    pub(crate) fn link(&self) -> Result<Direct, String> {
        Link::new(&self.0).map(Direct).map_err(|error| error.to_string())
    }
}

impl Region {
    /// Location from which the other side can read a page.
    pub(crate) fn place(&self, source: &Source) -> Afar {
        let RemotePage { address, key } = self.0.page(source);
        Afar { address, key }
    }
}

impl Direct {
    pub(crate) fn end(&self) -> [u8; LINK_BYTES] {
        self.0.address().encode()
    }

    pub(crate) fn connect(&self, peer: &[u8; LINK_BYTES]) -> Result<(), String> {
        let connected = LinkAddress::decode(peer).and_then(|peer| self.0.connect(peer));
        connected.map_err(|error| error.to_string())
    }

    /// Reads payloads, all of them or none.
    pub(crate) async fn read(
        &self,
        reads: impl Iterator<Item = (Target, Afar)>,
    ) -> Result<Vec<Target>, FailedRead> {
        let reads = reads.map(|(target, Afar { address, key })| RemoteRead {
            target,
            page: RemotePage { address, key },
        });
        self.0.read(reads.collect()).await.map_err(|rdma::Unread { error, targets }| FailedRead {
            message: error.to_string(),
            targets,
        })
    }

    /// Ends all reads of either side at once.
    pub(crate) fn close(&self) {
        self.0.close();
    }
}
