//! What can go wrong, and what to do about it.

use std::fmt;
use std::io;
use std::sync::Arc;

/// A port of a device, as `rdma link` writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortName {
    /// The device.
    pub device: Arc<str>,
    /// Its port, from 1.
    pub port: u8,
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.device, self.port)
    }
}

/// Why a port cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// The device has no such port.
    #[error("there is no such port; the device has {ports}")]
    NoSuchPort {
        /// How many it has.
        ports: u8,
    },
    /// It is not up.
    #[error("its state is {state}, not active; bring its network interface up and check its cable")]
    Inactive {
        /// What it says of itself.
        state: String,
    },
    /// It is not an Ethernet port.
    #[error("it is not an Ethernet port, and only RoCEv2 is supported")]
    NotEthernet,
    /// It has no address to be reached by.
    #[error(
        "it has no RoCEv2 address; give its network interface an IPv4 address (`rdma link` names \
         the interface, `ip address add` gives it one)"
    )]
    NoAddress,
}

/// Why pages cannot be read by RDMA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// There is no device at all.
    #[error(
        "this machine has no RDMA device: `rdma link` lists them; load the adapter's driver, and \
         pass /dev/infiniband to a container"
    )]
    NoDevice,
    /// There is no device of that name.
    #[error("this machine has no RDMA device {name:?}; it has {present}")]
    NoSuchDevice {
        /// What was asked for.
        name: String,
        /// What is there.
        present: String,
    },
    /// No device was asked for by name, and none will do.
    #[error("no RDMA device of this machine can be used: {reasons}")]
    NoneUsable {
        /// Each port, and why not.
        reasons: String,
    },
    /// The port that was asked for cannot be used.
    #[error("RDMA port {port} cannot be used: {why}")]
    Unusable {
        /// Which port.
        port: PortName,
        /// Why.
        why: Unusable,
    },
    /// A name that is not DEVICE or DEVICE/PORT.
    #[error("{name:?} is not an RDMA port; write DEVICE or DEVICE/PORT, as in `rdma link`")]
    BadName {
        /// What was written.
        name: String,
    },
    /// The system refused something.
    #[error("RDMA device {device}: cannot {action}: {message}{}", advice(*kind, action))]
    System {
        /// Which device, and its port where one is concerned.
        device: String,
        /// What was tried.
        action: &'static str,
        /// The kind of error.
        kind: io::ErrorKind,
        /// What the system said.
        message: String,
    },
    /// The arena of a target is not registered with the link's device.
    #[error(
        "arena {arena} is not registered with RDMA device {port}: call `Device::register` first"
    )]
    NotRegistered {
        /// Which arena, as its `Debug` output names it.
        arena: u64,
        /// Which device.
        port: PortName,
    },
    /// A page is longer than can be read at a time.
    #[error("RDMA port {port} reads up to {max} bytes at a time, not {bytes}")]
    TooLong {
        /// Which port.
        port: PortName,
        /// The page's length.
        bytes: usize,
        /// The most that can be read.
        max: usize,
    },
    /// A read failed, and with it the link.
    #[error("RDMA port {port}: a read failed ({status}); the link is closed; create a new one")]
    ReadFailed {
        /// Which port of this side.
        port: PortName,
        /// What the adapter says.
        status: String,
    },
    /// The link is closed.
    #[error("RDMA port {port}: the link is closed")]
    Closed {
        /// Which port of this side.
        port: PortName,
    },
    /// The peer sent something that is not an address.
    #[error("the peer's RDMA address is malformed: {what}")]
    BadAddress {
        /// What is wrong with it.
        what: &'static str,
    },
}

impl RdmaError {
    pub(super) fn system(
        device: impl fmt::Display,
        action: &'static str,
        error: &io::Error,
    ) -> Self {
        Self::System {
            device: device.to_string(),
            action,
            kind: error.kind(),
            message: error.to_string(),
        }
    }
}

/// What the action of registering memory is called.
pub(super) const REGISTER: &str = "register memory";

fn advice(kind: io::ErrorKind, action: &str) -> &'static str {
    match kind {
        io::ErrorKind::OutOfMemory if action == REGISTER => {
            "; registered memory is locked, so raise that limit (`ulimit -l`, or LimitMEMLOCK= in a \
             systemd unit)"
        }
        io::ErrorKind::PermissionDenied => {
            "; give this user access to /dev/infiniband/uverbs* (often the group rdma)"
        }
        _ => "",
    }
}
