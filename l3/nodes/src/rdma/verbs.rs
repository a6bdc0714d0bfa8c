//! Interface to libibverbs, with all `unsafe` code of the module.
//!
//! The library's objects form a chain: a protection domain belongs to a context, memory regions and
//! queue pairs belong to the domain, and none may outlive the object that it belongs to. So each
//! type owns exactly one object, is the only one to destroy it, and holds an `Arc` of the object
//! that it belongs to. Fields are dropped after `drop` has run, so an object is destroyed before
//! the one it belongs to.
//!
//! Beyond lifetimes there is one danger: the adapter writes to memory by itself. It does so only
//! for reads that were posted to a [`QueuePair`], which owns the [`Target`](terrace_l3::Target)s of
//! those reads until the adapter reports completion or the queue pair is destroyed. Peers may only
//! read registered memory, which nothing in this process can notice.
//!
//! All functions of the library may be called from any thread.

#![expect(unsafe_code, reason = "libibverbs is a C library")]

mod context;
mod memory;
mod queue_pair;

pub(super) use context::{Context, Devices, Gid, PortState};
pub(super) use memory::{MemoryRegion, ProtectionDomain};
pub(super) use queue_pair::{Completion, Ends, Events, QueuePair, Read};

use std::io;

/// Checks the return value of a library function: zero or an error number.
fn check(returned: i32) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(returned)) }
}
