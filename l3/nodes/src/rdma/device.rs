//! A device, its port, and the memory registered with it.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::Ipv6Addr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::counters::{Counters, Counting};
use super::error::{PortName, REGISTER, RdmaError, Unusable};
use super::verbs::{Context, Devices, Gid, MemoryRegion, PortState, ProtectionDomain};
use terrace_l3::{Arena, Source};

/// A port of an RDMA adapter. Clones share it.
#[derive(Clone)]
pub struct Device {
    inner: Arc<OpenPort>,
}

struct OpenPort {
    port: PortName,
    gid: Gid,
    mtu: u8,
    message_bytes_max: usize,
    reads_max: u32,
    reads_asked: u8,
    reads_served: u8,
    domain: Arc<ProtectionDomain>,
    /// By the id of the arena.
    regions: Mutex<BTreeMap<u64, Weak<MemoryRegion>>>,
    counting: Counting,
}

/// Maximum number of reads in flight per link.
const READS_MAX: u32 = 256;

impl Device {
    /// Opens a port: `name` is DEVICE or DEVICE/PORT, as printed by `rdma link`. Without a name or
    /// a port, takes the first usable one.
    ///
    /// # Errors
    /// If there is none. That is common, and the caller should continue without RDMA.
    pub fn open(name: Option<&str>) -> Result<Self, RdmaError> {
        let wanted = name.map(parse).transpose()?;
        let devices = match Devices::list() {
            Ok(devices) => devices,
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOSYS.raw_os_error()) => {
                return Err(RdmaError::NoDevice);
            }
            Err(error) => return Err(RdmaError::system("list", "list devices", &error)),
        };
        let names = devices.names();
        if names.is_empty() {
            return Err(RdmaError::NoDevice);
        }
        let mut refusals = Vec::new();
        for (index, device) in names.iter().enumerate() {
            if wanted.is_some_and(|(wanted, _)| wanted != &**device) {
                continue;
            }
            let opened = devices.open(index);
            let opened = opened.map_err(|error| RdmaError::system(device, "open it", &error));
            let tried = opened.and_then(|context| {
                Self::on_some_port(&Arc::new(context), device, wanted.and_then(|(_, port)| port))
            });
            match tried {
                Ok(device) => return Ok(device),
                Err(refusal) => refusals.push(refusal),
            }
        }
        match (refusals.len(), wanted) {
            (0, Some((name, _))) => {
                Err(RdmaError::NoSuchDevice { name: name.to_owned(), present: names.join(", ") })
            }
            (1, _) => Err(refusals.remove(0)),
            _ => Err(RdmaError::NoneUsable { reasons: join(&refusals) }),
        }
    }

    fn on_some_port(
        context: &Arc<Context>,
        device: &Arc<str>,
        port: Option<u8>,
    ) -> Result<Self, RdmaError> {
        let limits = context.limits();
        let ports = limits.map_err(|error| RdmaError::system(device, "ask it", &error))?.ports;
        let candidates = port.map_or(1..=ports, |port| port..=port);
        let mut refusals = Vec::new();
        for port in candidates {
            let name = PortName { device: device.clone(), port };
            if port == 0 || port > ports {
                let why = Unusable::NoSuchPort { ports };
                return Err(RdmaError::Unusable { port: name, why });
            }
            match Self::on_port(context, name) {
                Ok(device) => return Ok(device),
                Err(refusal) => refusals.push(refusal),
            }
        }
        match refusals.len() {
            1 => Err(refusals.remove(0)),
            _ => Err(RdmaError::NoneUsable { reasons: join(&refusals) }),
        }
    }

    fn on_port(context: &Arc<Context>, port: PortName) -> Result<Self, RdmaError> {
        let system = |action| {
            let port = port.clone();
            move |error: io::Error| RdmaError::system(port, action, &error)
        };
        let limits = context.limits().map_err(system("ask it"))?;
        let state = context.port(port.port).map_err(system("ask it"))?;
        let gids = (0..state.gids.min(255)).filter_map(|index| {
            context.gid(port.port, u8::try_from(index).expect("less than 256"))
        });
        let gid = choose(&state, gids);
        let gid = gid.map_err(|why| RdmaError::Unusable { port: port.clone(), why })?;
        let domain = ProtectionDomain::new(context.clone());
        let domain = Arc::new(domain.map_err(system("make a protection domain"))?);
        let inner = OpenPort {
            gid,
            mtu: state.mtu,
            message_bytes_max: state.message_bytes_max as usize,
            reads_max: READS_MAX.min(limits.requests).min(limits.completions),
            reads_asked: limits.reads_asked,
            reads_served: limits.reads_served,
            domain,
            regions: Mutex::default(),
            counting: Counting::default(),
            port,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Registers an arena, so that links of this device can read into it and peers can read from
    /// it. If the arena is registered already, returns the same region.
    ///
    /// # Errors
    /// If the system does not allow it, usually because of the limit on locked memory.
    pub fn register(&self, arena: &Arena) -> Result<Region, RdmaError> {
        let mut regions = self.inner.regions.lock();
        regions.retain(|_, region| region.strong_count() > 0);
        if let Some(raw) = regions.get(&arena.id()).and_then(Weak::upgrade) {
            return Ok(Region { raw });
        }
        let raw = MemoryRegion::new(self.inner.domain.clone(), arena)
            .map_err(|error| RdmaError::system(&self.inner.port, REGISTER, &error))?;
        let raw = Arc::new(raw);
        regions.insert(arena.id(), Arc::downgrade(&raw));
        Ok(Region { raw })
    }

    /// Region of a registered arena.
    #[must_use]
    pub fn region(&self, arena: &Arena) -> Option<Region> {
        self.region_of(arena.id()).ok().map(|raw| Region { raw })
    }

    /// Name of the port.
    #[must_use]
    pub fn port(&self) -> &PortName {
        &self.inner.port
    }

    /// Network address of the port.
    #[must_use]
    pub fn network_address(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.inner.gid.bytes)
    }

    /// Activity of its links on this side.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.inner.counting.read()
    }

    /// Returns true if the port is up.
    pub(super) fn is_active(&self) -> bool {
        let state = self.inner.domain.context().port(self.inner.port.port);
        state.is_ok_and(|state| state.is_active)
    }

    pub(super) fn counting(&self) -> &Counting {
        &self.inner.counting
    }

    pub(super) fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.inner.domain
    }

    pub(super) fn gid(&self) -> Gid {
        self.inner.gid
    }

    pub(super) fn mtu(&self) -> u8 {
        self.inner.mtu
    }

    /// Maximum size of a read.
    pub(super) fn message_bytes_max(&self) -> usize {
        self.inner.message_bytes_max
    }

    /// Maximum number of reads in flight per link.
    pub(super) fn reads_max(&self) -> u32 {
        self.inner.reads_max
    }

    pub(super) fn reads_asked(&self) -> u8 {
        self.inner.reads_asked
    }

    pub(super) fn reads_served(&self) -> u8 {
        self.inner.reads_served
    }

    pub(super) fn region_of(&self, arena: u64) -> Result<Arc<MemoryRegion>, RdmaError> {
        let region = self.inner.regions.lock().get(&arena).and_then(Weak::upgrade);
        region.ok_or_else(|| RdmaError::NotRegistered { arena, port: self.inner.port.clone() })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device {} at {}", self.inner.port, self.network_address())
    }
}

fn parse(name: &str) -> Result<(&str, Option<u8>), RdmaError> {
    let bad = || RdmaError::BadName { name: name.to_owned() };
    let (device, port) = match name.split_once('/') {
        Some((device, port)) => (device, Some(port.parse().map_err(|_| bad())?)),
        None => (name, None),
    };
    if device.is_empty() { Err(bad()) } else { Ok((device, port)) }
}

fn join(refusals: &[RdmaError]) -> String {
    if refusals.is_empty() {
        return "they have no ports".to_owned();
    }
    refusals.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Chooses the address that peers can reach: a RoCEv2 address, preferably IPv4, and never a
/// link-local one, which is not reachable by the address alone.
fn choose(state: &PortState, gids: impl Iterator<Item = Gid>) -> Result<Gid, Unusable> {
    if !state.is_ethernet {
        return Err(Unusable::NotEthernet);
    }
    if !state.is_active {
        return Err(Unusable::Inactive { state: state.state.clone() });
    }
    let rank = |gid: &Gid| {
        let address = Ipv6Addr::from(gid.bytes);
        match address.to_ipv4_mapped() {
            Some(address) if address.is_unspecified() => None,
            Some(_) => Some((0, gid.index)),
            None if address.is_unicast_link_local() || address.is_unspecified() => None,
            None => Some((1, gid.index)),
        }
    };
    let usable = gids.filter(|gid| gid.is_roce_v2).filter_map(|gid| Some((rank(&gid)?, gid)));
    usable.min_by_key(|(rank, _)| *rank).map(|(_, gid)| gid).ok_or(Unusable::NoAddress)
}

/// Registration of an arena with a device. Clones share the registration, which ends with the last
/// of them; reads in flight keep it until they have ended.
#[derive(Clone, Debug)]
pub struct Region {
    raw: Arc<MemoryRegion>,
}

/// Location of a page for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePage {
    /// Address in the memory of the side that has the page.
    pub address: u64,
    /// Key of its region.
    pub key: u32,
}

impl Region {
    /// Location that a peer needs to read the page. The page must stay lent while the peer may read
    /// it; otherwise its content may change.
    ///
    /// # Panics
    /// If the page belongs to another arena.
    #[must_use]
    pub fn page(&self, source: &Source) -> RemotePage {
        assert_eq!(source.arena_id(), self.raw.arena().id(), "the page is of the region's arena");
        RemotePage { address: source.start().addr() as u64, key: self.raw.remote_key() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port() -> PortState {
        PortState {
            is_active: true,
            state: "active".to_owned(),
            is_ethernet: true,
            mtu: 5,
            message_bytes_max: 1 << 30,
            gids: 4,
        }
    }

    fn gid(index: u8, is_roce_v2: bool, address: &str) -> Gid {
        Gid { index, is_roce_v2, bytes: address.parse::<Ipv6Addr>().unwrap().octets() }
    }

    #[test]
    fn the_address_is_one_that_peers_can_reach() {
        let gids = [
            gid(0, false, "fe80::1"),
            gid(1, true, "fe80::1"),
            gid(2, false, "::ffff:10.0.0.1"),
            gid(3, true, "2001:db8::1"),
            gid(4, true, "::ffff:10.0.0.1"),
            gid(5, true, "::ffff:10.0.0.2"),
        ];
        let chosen = |gids: &[Gid]| choose(&port(), gids.iter().copied()).map(|gid| gid.index);
        assert_eq!(chosen(&gids), Ok(4));
        assert_eq!(chosen(&gids[..4]), Ok(3));
        assert_eq!(chosen(&gids[..3]), Err(Unusable::NoAddress));
    }

    #[test]
    fn a_port_that_cannot_be_used_says_why() {
        let gids = || std::iter::once(gid(0, true, "::ffff:10.0.0.1"));
        let down = PortState { is_active: false, state: "down".to_owned(), ..port() };
        assert_eq!(choose(&down, gids()), Err(Unusable::Inactive { state: "down".to_owned() }));
        let other = PortState { is_ethernet: false, ..port() };
        assert_eq!(choose(&other, gids()), Err(Unusable::NotEthernet));
    }

    #[test]
    fn names_are_those_of_the_system() {
        assert_eq!(parse("mlx5_0"), Ok(("mlx5_0", None)));
        assert_eq!(parse("mlx5_0/2"), Ok(("mlx5_0", Some(2))));
        for wrong in ["", "/1", "mlx5_0/", "mlx5_0/x", "mlx5_0/256"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn without_a_device_the_error_says_what_to_do() {
        let message = Device::open(Some("no-such-device")).unwrap_err().to_string();
        assert!(message.contains("this machine has no RDMA device"), "{message}");
    }
}
