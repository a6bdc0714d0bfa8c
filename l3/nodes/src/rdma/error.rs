//! Errors, with advice.

use std::fmt;
use std::io;
use std::sync::Arc;

/// A port of a device, as printed by `rdma link`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortName {
    /// Name of the device.
    pub device: Arc<str>,
    /// Number of the port, from 1.
    pub port: u8,
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.device, self.port)
    }
}

/// Reason why a port cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// The device has no such port.
    #[error("there is no such port; the device has {ports}")]
    NoSuchPort {
        /// Number of its ports.
        ports: u8,
    },
    /// The port is not up.
    #[error("its state is {state}, not active; bring its network interface up and check its cable")]
    Inactive {
        /// State that it reports.
        state: String,
    },
    /// The port is not an Ethernet port.
    #[error("it is not an Ethernet port, and only RoCEv2 is supported")]
    NotEthernet,
    /// The port has no address.
    #[error(
        "it has no RoCEv2 address; give its network interface an IPv4 address (`rdma link` names \
         the interface, `ip address add` gives it one)"
    )]
    NoAddress,
}

/// Reason why pages cannot be read by RDMA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// There is no device.
    #[error(
        "this machine has no RDMA device: `rdma link` lists them; load the adapter's driver, and \
         pass /dev/infiniband to a container"
    )]
    NoDevice,
    /// There is no device with this name.
    #[error("this machine has no RDMA device {name:?}; it has {present}")]
    NoSuchDevice {
        /// Requested name.
        name: String,
        /// Existing devices.
        present: String,
    },
    /// No name was given, and no device is usable.
    #[error("no RDMA device of this machine can be used: {reasons}")]
    NoneUsable {
        /// Each port, with the reason.
        reasons: String,
    },
    /// The requested port cannot be used.
    #[error("RDMA port {port} cannot be used: {why}")]
    Unusable {
        /// Name of the port.
        port: PortName,
        /// Reason.
        why: Unusable,
    },
    /// The name is not DEVICE or DEVICE/PORT.
    #[error("{name:?} is not an RDMA port; write DEVICE or DEVICE/PORT, as in `rdma link`")]
    BadName {
        /// The name.
        name: String,
    },
    /// A system call failed.
    #[error("RDMA device {device}: cannot {action}: {message}{}", advice(*kind, action))]
    System {
        /// Name of the device, with its port if relevant.
        device: String,
        /// Action that failed.
        action: &'static str,
        /// Kind of error.
        kind: io::ErrorKind,
        /// Message of the system.
        message: String,
    },
    /// The arena of a target is not registered with the link's device.
    #[error(
        "arena {arena} is not registered with RDMA device {port}: call `Device::register` first"
    )]
    NotRegistered {
        /// Id of the arena, as in its `Debug` output.
        arena: u64,
        /// Name of the port.
        port: PortName,
    },
    /// A page exceeds the maximum size of a read.
    #[error("RDMA port {port} reads up to {max} bytes at a time, not {bytes}")]
    TooLong {
        /// Name of the port.
        port: PortName,
        /// Length of the page.
        bytes: usize,
        /// Maximum size.
        max: usize,
    },
    /// A read failed, and with it the link.
    #[error("RDMA port {port}: a read failed ({status}); the link is closed; create a new one")]
    ReadFailed {
        /// Name of the local port.
        port: PortName,
        /// Status reported by the adapter.
        status: String,
    },
    /// The link is closed.
    #[error("RDMA port {port}: the link is closed")]
    Closed {
        /// Name of the local port.
        port: PortName,
    },
    /// The peer sent an invalid address.
    #[error("the peer's RDMA address is malformed: {what}")]
    BadAddress {
        /// Reason.
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

/// Name of the action of registering memory.
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
