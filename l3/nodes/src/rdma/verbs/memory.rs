//! Memory that an adapter may use.

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::{Context, check};
use terrace_l3::Arena;

/// Protection domain: memory regions and queue pairs of one domain may be used together.
pub(in crate::rdma) struct ProtectionDomain {
    raw: NonNull<sys::ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: the library's functions may be called from any thread, and nothing here changes the object.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(in crate::rdma) fn new(context: Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is open, and `context` keeps it open.
        let raw = unsafe { sys::ibv_alloc_pd(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { raw, context })
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw.as_ptr()
    }

    pub(in crate::rdma) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProtectionDomain")
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: this is its only owner; regions and queue pairs of it hold an `Arc`, so none is left.
        let freed = check(unsafe { sys::ibv_dealloc_pd(self.raw()) });
        if let Err(error) = freed {
            tracing::warn!(%error, "an RDMA protection domain could not be freed");
        }
    }
}

/// An arena that the adapter may write to for this side and read from for peers.
pub(in crate::rdma) struct MemoryRegion {
    raw: NonNull<sys::ibv_mr>,
    arena: Arena,
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: the library's functions may be called from any thread, and the keys, which are all that is read
// of the object, never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    pub(in crate::rdma) fn new(domain: Arc<ProtectionDomain>, arena: &Arena) -> io::Result<Self> {
        let access = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        // SAFETY: the domain exists. The memory is the arena's, which the region holds, so it stays
        // mapped until the region is gone. The adapter writes to it only for requests that name the
        // local key, which only a `QueuePair` posts. Peers only read it, at any time: they may see
        // torn bytes of a concurrent write, and nothing else can happen.
        let raw = unsafe {
            sys::ibv_reg_mr(
                domain.raw(),
                arena.base().as_ptr().cast(),
                arena.bytes(),
                access.0.cast_signed(),
            )
        };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { raw, arena: arena.clone(), _domain: domain })
    }

    /// Key of the memory for local requests.
    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: the object exists until `self` is dropped, and nothing writes to it.
        unsafe { self.raw.as_ref().lkey }
    }

    /// Key of the memory for peers.
    pub(in crate::rdma) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }

    pub(in crate::rdma) fn arena(&self) -> &Arena {
        &self.arena
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion of {:?}", self.arena)
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: this is its only owner, and requests in flight hold an `Arc` of it, so there are
        // none.
        let freed = check(unsafe { sys::ibv_dereg_mr(self.raw.as_ptr()) });
        if let Err(error) = freed {
            // Peers may still read the memory, so it must stay mapped.
            std::mem::forget(self.arena.clone());
            tracing::error!(%error, "RDMA memory could not be freed and stays allocated");
        }
    }
}
