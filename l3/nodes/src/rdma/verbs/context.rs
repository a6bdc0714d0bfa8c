//! Devices and their attributes.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::check;

/// Devices of this machine.
pub(in crate::rdma) struct Devices {
    /// An array that ends with a null pointer.
    list: NonNull<*mut sys::ibv_device>,
    count: usize,
}

impl Devices {
    /// Lists the devices.
    pub(in crate::rdma) fn list() -> io::Result<Self> {
        let mut count = 0;
        // SAFETY: the function writes one number through the pointer, which is valid.
        let list = unsafe { sys::ibv_get_device_list(&raw mut count) };
        let list = NonNull::new(list).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { list, count: usize::try_from(count).unwrap_or(0) })
    }

    /// Names of the devices.
    pub(in crate::rdma) fn names(&self) -> Vec<Arc<str>> {
        (0..self.count)
            .map(|index| {
                // SAFETY: `device` returns a device of the list, which lives as long as the list
                // does; its name is a C string inside of it, and is copied here.
                let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name(self.device(index))) };
                name.to_string_lossy().into()
            })
            .collect()
    }

    /// Opens the device with this index in [`Devices::names`].
    pub(in crate::rdma) fn open(&self, index: usize) -> io::Result<Context> {
        // SAFETY: the device is one of the list, which still exists. An open device outlives the
        // list.
        let context = unsafe { sys::ibv_open_device(self.device(index)) };
        NonNull::new(context).map(|raw| Context { raw }).ok_or_else(io::Error::last_os_error)
    }

    fn device(&self, index: usize) -> *mut sys::ibv_device {
        assert!(index < self.count, "there are {} devices", self.count);
        // SAFETY: the array has `count` elements, and the index is less.
        unsafe { *self.list.as_ptr().add(index) }
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        // SAFETY: the list came from `ibv_get_device_list` and is freed once. No pointer to an
        // unopened device remains: only the private `device` returns them.
        unsafe { sys::ibv_free_device_list(self.list.as_ptr()) }
    }
}

/// An open device.
pub(in crate::rdma) struct Context {
    raw: NonNull<sys::ibv_context>,
}

// SAFETY: the library's functions may be called from any thread, and the context's fields that are read
// here are written before it is handed out.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Limits of a device.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Limits {
    pub(in crate::rdma) ports: u8,
    /// Maximum work requests in a queue.
    pub(in crate::rdma) requests: u32,
    /// Maximum entries of a completion queue.
    pub(in crate::rdma) completions: u32,
    /// Maximum outstanding reads of a queue pair.
    pub(in crate::rdma) reads_asked: u8,
    /// Maximum concurrent reads that a queue pair serves.
    pub(in crate::rdma) reads_served: u8,
}

/// Attributes of a port.
#[derive(Clone, Debug)]
pub(in crate::rdma) struct PortState {
    pub(in crate::rdma) is_active: bool,
    pub(in crate::rdma) state: String,
    pub(in crate::rdma) is_ethernet: bool,
    /// MTU in the numbering of the verbs.
    pub(in crate::rdma) mtu: u8,
    pub(in crate::rdma) message_bytes_max: u32,
    pub(in crate::rdma) gids: u32,
}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Gid {
    pub(in crate::rdma) index: u8,
    pub(in crate::rdma) is_roce_v2: bool,
    pub(in crate::rdma) bytes: [u8; 16],
}

impl Context {
    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.raw.as_ptr()
    }

    pub(in crate::rdma) fn limits(&self) -> io::Result<Limits> {
        let mut found = sys::ibv_device_attr::default();
        // SAFETY: the context is open, and the function fills the structure it is given.
        check(unsafe { sys::ibv_query_device(self.raw(), &raw mut found) })?;
        let byte = |number: i32| u8::try_from(number.clamp(0, 255)).expect("it is clamped");
        Ok(Limits {
            ports: found.phys_port_cnt,
            requests: u32::try_from(found.max_qp_wr).unwrap_or(0),
            completions: u32::try_from(found.max_cqe).unwrap_or(0),
            reads_asked: byte(found.max_qp_init_rd_atom),
            reads_served: byte(found.max_qp_rd_atom),
        })
    }

    /// Queries a port; ports are counted from 1.
    pub(in crate::rdma) fn port(&self, port: u8) -> io::Result<PortState> {
        let mut found = sys::ibv_port_attr::default();
        // SAFETY: the context is open. The function fills an older form of the structure, which has
        // the same fields up to its end, and so fits in the given one; the rest stays zero.
        check(unsafe { sys::ibv_query_port(self.raw(), port, (&raw mut found).cast()) })?;
        // SAFETY: the function takes any number and returns a C string that is never freed.
        let state = unsafe { CStr::from_ptr(sys::ibv_port_state_str(found.state)) };
        Ok(PortState {
            is_active: found.state == sys::ibv_port_state::IBV_PORT_ACTIVE,
            state: state.to_string_lossy().into_owned(),
            is_ethernet: u32::from(found.link_layer) == sys::IBV_LINK_LAYER_ETHERNET,
            mtu: u8::try_from(found.active_mtu).unwrap_or(1),
            message_bytes_max: found.max_msg_sz,
            gids: u32::try_from(found.gid_tbl_len).unwrap_or(0),
        })
    }

    /// Address of a port at an index, if there is one.
    pub(in crate::rdma) fn gid(&self, port: u8, index: u8) -> Option<Gid> {
        let mut found = sys::ibv_gid_entry::default();
        let bytes = size_of::<sys::ibv_gid_entry>();
        // SAFETY: the context is open, and the function fills the structure, whose size is passed.
        check(unsafe {
            sys::_ibv_query_gid_ex(
                self.raw(),
                u32::from(port),
                u32::from(index),
                &raw mut found,
                0,
                bytes,
            )
        })
        .ok()?;
        Some(Gid {
            index,
            is_roce_v2: found.gid_type == sys::IBV_GID_TYPE_ROCE_V2,
            // SAFETY: both forms of the union are 16 bytes, of which every value is valid.
            bytes: unsafe { found.gid.raw },
        })
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Context")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is open and closed once: this is its only owner. Every object of it
        // holds an `Arc` of it, so none is left.
        let closed = check(unsafe { sys::ibv_close_device(self.raw()) });
        if let Err(error) = closed {
            tracing::warn!(%error, "an RDMA device could not be closed");
        }
    }
}
