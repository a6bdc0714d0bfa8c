//! The only place that talks to libibverbs, and the only one here with `unsafe` code.
//!
//! The library's objects form a chain: a context is opened, a protection domain belongs to it, memory
//! regions and queue pairs belong to the domain, and none may outlive what it belongs to. So each type
//! owns exactly one object, is the only one to destroy it, and holds an `Arc` of what that
//! object belongs to. Fields are dropped after `drop` has run, so an object goes before what it
//! belongs to.
//!
//! Beyond lifetimes there is one danger: the adapter writes to memory on its own. It does so only for
//! reads that a [`QueuePair`] was given, and that one owns the [`Target`](terrace_l3::Target)s of those reads until the
//! adapter reports them done or the queue pair is no more. What peers may do to registered memory is to
//! read it, which nothing in this process can notice.
//!
//! All functions of the library may be called from any thread.

#![expect(unsafe_code, reason = "libibverbs is a C library")]

mod context;
mod memory;
mod queue_pair;

pub(super) use context::{Context, Devices, Gid, PortState};
pub(super) use memory::{MemoryRegion, ProtectionDomain};
pub(super) use queue_pair::{Done, Ends, Events, QueuePair, Read};

use std::io;

/// What a function of the library returned, which is zero or an error number.
fn check(returned: i32) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(returned)) }
}
