//! Interface to the store's library, which is opened at run time. The only module that calls it.
//!
//! The library uses memory whose address is passed to it until the call returns, so the types below
//! borrow it. Only after a failed transfer may it access the memory later: the library has stopped
//! waiting, but the transfer may continue. Such memory is given to the [`Client`]
//! ([`Client::keep`]), and is released with it.

#![allow(unsafe_code)]

#[cfg(test)]
pub(super) mod scripted;

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libloading::os::unix::{Library as Shared, RTLD_LAZY, RTLD_LOCAL};
use parking_lot::Mutex;

use terrace_l3::backend::Headroom;
use terrace_l3::{Arena, HEADER_BYTES, Source, Target};

/// Reason why the library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// The library cannot be opened.
    #[error(
        "cannot open the Mooncake library {}: {message}; give the libmooncake_store.so of your \
         installation, and check that its dependencies are found (`ldd` lists them)",
        path.display()
    )]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// Message of the loader.
        message: String,
    },
    /// A required function is missing.
    #[error(
        "{} has no function {function}: it is a different library, or Mooncake is older than \
         0.3.10.post2",
        path.display()
    )]
    Function {
        /// Path of the file.
        path: PathBuf,
        /// Name of the function.
        function: String,
    },
}

type ClientHandle = *mut c_void;

/// Replication and protection of values, as the library's header declares it.
#[repr(C)]
struct Replication {
    replicas: usize,
    with_soft_pin: c_int,
    with_hard_pin: c_int,
    preferred_segments: *const *const c_char,
    preferred_segments_count: usize,
}

macro_rules! functions {
    ($($name:ident: $symbol:literal, fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions used, as the library's header declares them.
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn find(library: &Shared, path: &Path) -> Result<Self, LibraryError> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the declaration in the library's header,
                        // which is the same in all versions that have all of these functions.
                        let found = unsafe { library.get($symbol.to_bytes_with_nul()) };
                        *found.map_err(|_| LibraryError::Function {
                            path: path.to_owned(),
                            function: $symbol.to_string_lossy().into_owned(),
                        })?
                    },)*
                })
            }
        }
    };
}

functions! {
    create: c"mooncake_store_create", fn() -> ClientHandle;
    destroy: c"mooncake_store_destroy", fn(ClientHandle);
    setup: c"mooncake_store_setup",
        fn(ClientHandle, *const c_char, *const c_char, u64, u64, *const c_char, *const c_char,
           *const c_char) -> c_int;
    hostname: c"mooncake_store_get_hostname", fn(ClientHandle, *mut c_char, usize) -> c_int;
    batch_put_from: c"mooncake_store_batch_put_from",
        fn(ClientHandle, *mut *const c_char, *mut *mut c_void, *const usize, usize, *const Replication,
           *mut c_int) -> c_int;
    batch_get_into: c"mooncake_store_batch_get_into",
        fn(ClientHandle, *mut *const c_char, *mut *mut c_void, *const usize, usize, *mut i64) -> c_int;
    batch_is_exist: c"mooncake_store_batch_is_exist",
        fn(ClientHandle, *mut *const c_char, usize, *mut c_int) -> c_int;
    object_size: c"mooncake_store_get_size", fn(ClientHandle, *const c_char) -> i64;
    remove: c"mooncake_store_remove", fn(ClientHandle, *const c_char, c_int) -> c_int;
    register_buffer: c"mooncake_store_register_buffer", fn(ClientHandle, *mut c_void, usize) -> c_int;
    unregister_buffer: c"mooncake_store_unregister_buffer", fn(ClientHandle, *mut c_void) -> c_int;
}

/// The opened library.
pub(crate) struct Library {
    functions: Functions,
    /// Never unloaded: the library has threads and destructors of its own.
    _library: ManuallyDrop<Shared>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Library")
    }
}

impl Library {
    /// Opens the library. Its dependencies are bound on first call, since parts of it are for
    /// hardware that may be absent.
    pub(crate) fn open(path: &Path) -> Result<Self, LibraryError> {
        // SAFETY: opening runs the library's initialisers. Configuring a file as the store's
        // library means trusting it with this process, as with any plug-in.
        let library = unsafe { Shared::open(Some(path), RTLD_LAZY | RTLD_LOCAL) };
        let library = library.map_err(|error| LibraryError::Open {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        let functions = Functions::find(&library, path)?;
        Ok(Self { functions, _library: ManuallyDrop::new(library) })
    }
}

/// Addresses of the store.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    pub(crate) local_host: CString,
    pub(crate) metadata: CString,
    pub(crate) protocol: CString,
    pub(crate) device: CString,
    pub(crate) master: CString,
}

/// Memory that the library allocates for a client when it connects.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClientMemory {
    /// Memory contributed to the cluster. Objects placed there are lost with the client.
    pub(crate) segment_bytes: u64,
    /// Memory for the library's own use.
    pub(crate) buffer_bytes: u64,
}

/// Placement of the objects that a client puts.
#[derive(Clone, Debug)]
pub(crate) struct SegmentPlacement {
    /// Number of segments that hold each object.
    pub(crate) replicas: usize,
    /// Segments tried before all others.
    pub(crate) preferred: Vec<CString>,
}

/// Protection of an object from the cluster's own eviction, from its first moment on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    None,
    Soft,
    Hard,
}

/// A client of the cluster, used by any number of threads.
pub(crate) struct Client {
    library: Arc<Library>,
    handle: NonNull<c_void>,
    placement: SegmentPlacement,
    // The following are dropped after `drop` has ended the client, since the library may access
    // them until then.
    /// Memory registered with the library.
    known: Mutex<Vec<Known>>,
    kept: Mutex<Kept>,
}

/// Memory registered with the library, and the arenas that use it. The library accepts no address
/// twice, so overlapping arenas share a registration: one that is registered again while earlier
/// transfers are in flight, or several over the same memory, as when a Python array is put twice
/// concurrently.
struct Known {
    /// Arena for which it was registered. Keeps the memory.
    arena: Arena,
    users: Vec<u64>,
}

impl Known {
    fn covers(&self, arena: &Arena) -> bool {
        let range = |arena: &Arena| {
            let start = arena.base().addr().get();
            (start, start + arena.bytes())
        };
        let ((start, end), (first, last)) = (range(&self.arena), range(arena));
        start <= first && last <= end
    }
}

/// Memory that the library may access although no call is in flight.
#[derive(Default)]
struct Kept {
    since: Option<Instant>,
    memory: Vec<Box<dyn Any + Send>>,
}

// SAFETY: the library's clients may be called from many threads at once, and are bound to none.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Connects to the master. Pages are transferred directly between arenas and segments. Waits a
    /// minute and a half for a master that does not answer.
    pub(crate) fn connect(
        library: &Arc<Library>,
        endpoint: &Endpoint,
        memory: ClientMemory,
        placement: SegmentPlacement,
    ) -> Result<Self, c_int> {
        // SAFETY: it takes no arguments, and its result is checked.
        let handle = unsafe { (library.functions.create)() };
        let client = Self {
            library: library.clone(),
            handle: NonNull::new(handle).ok_or(-1)?,
            placement,
            known: Mutex::default(),
            kept: Mutex::default(),
        };
        // SAFETY: the handle was just created; the strings are zero-terminated and live until the
        // call returns.
        let code = unsafe {
            (library.functions.setup)(
                handle,
                endpoint.local_host.as_ptr(),
                endpoint.metadata.as_ptr(),
                memory.segment_bytes,
                memory.buffer_bytes,
                endpoint.protocol.as_ptr(),
                endpoint.device.as_ptr(),
                endpoint.master.as_ptr(),
            )
        };
        if code == 0 { Ok(client) } else { Err(code) }
    }

    /// Name of this client in the cluster, which is also that of its segment.
    pub(crate) fn name(&self) -> Option<CString> {
        const NAME_BYTES_MAX: usize = 512;
        let mut name = vec![0u8; NAME_BYTES_MAX];
        // SAFETY: the handle is valid as long as the client, and at most `name.len()` bytes are
        // written, including the terminating zero.
        let code = unsafe {
            let start = name.as_mut_ptr().cast();
            (self.library.functions.hostname)(self.handle.as_ptr(), start, name.len())
        };
        let name = CStr::from_bytes_until_nul(&name).ok()?;
        (code == 0 && !name.is_empty()).then(|| name.to_owned())
    }

    /// Stores pieces of memory, one under each key, and returns a code for each. A value that exists stays
    /// as it is, and its code is that of a success.
    pub(crate) fn put(
        &self,
        keys: &[CString],
        pieces: &[Readable<'_>],
        protection: Protection,
    ) -> Vec<c_int> {
        assert_eq!(keys.len(), pieces.len());
        if keys.is_empty() {
            return Vec::new();
        }
        let preferred = pointers(&self.placement.preferred);
        let replication = Replication {
            replicas: self.placement.replicas,
            with_soft_pin: c_int::from(protection == Protection::Soft),
            with_hard_pin: c_int::from(protection == Protection::Hard),
            preferred_segments: preferred.as_ptr(),
            preferred_segments_count: preferred.len(),
        };
        let mut names = pointers(keys);
        let mut starts: Vec<*mut c_void> = pieces.iter().map(|it| it.span.start.cast()).collect();
        let sizes: Vec<usize> = pieces.iter().map(|it| it.span.bytes).collect();
        let mut codes = vec![NO_ANSWER; keys.len()];
        // SAFETY: the arrays have `keys.len()` elements each. The keys are zero-terminated. Each
        // piece is borrowed until the call returns, has the given size, and is only read, although
        // the declaration has no `const`. The same holds for the names of segments. The codes are
        // written to the last array.
        let code = unsafe {
            (self.library.functions.batch_put_from)(
                self.handle.as_ptr(),
                names.as_mut_ptr(),
                starts.as_mut_ptr(),
                sizes.as_ptr(),
                keys.len(),
                &raw const replication,
                codes.as_mut_ptr(),
            )
        };
        if code == 0 { codes } else { vec![code; keys.len()] }
    }

    /// Reads values into pieces of memory, and returns for each its size or a code below zero.
    pub(crate) fn get(&self, keys: &[CString], pieces: &mut [Writable<'_>]) -> Vec<i64> {
        assert_eq!(keys.len(), pieces.len());
        if keys.is_empty() {
            return Vec::new();
        }
        let mut names = pointers(keys);
        let mut starts: Vec<*mut c_void> = pieces.iter().map(|it| it.span.start.cast()).collect();
        let sizes: Vec<usize> = pieces.iter().map(|it| it.span.bytes).collect();
        let mut codes = vec![i64::from(NO_ANSWER); keys.len()];
        // SAFETY: as for `put`; each piece is borrowed exclusively, so only the library writes to
        // it until the call returns, and not beyond its size.
        let code = unsafe {
            (self.library.functions.batch_get_into)(
                self.handle.as_ptr(),
                names.as_mut_ptr(),
                starts.as_mut_ptr(),
                sizes.as_ptr(),
                keys.len(),
                codes.as_mut_ptr(),
            )
        };
        if code == 0 { codes } else { vec![code.into(); keys.len()] }
    }

    /// Returns for each key 1 if it exists, 0 if not, or a code below zero. Grants leases.
    pub(crate) fn exist(&self, keys: &[CString]) -> Vec<c_int> {
        let mut names = pointers(keys);
        let mut codes = vec![NO_ANSWER; keys.len()];
        // SAFETY: the arrays have `keys.len()` elements each, and the keys are zero-terminated.
        let code = unsafe {
            (self.library.functions.batch_is_exist)(
                self.handle.as_ptr(),
                names.as_mut_ptr(),
                keys.len(),
                codes.as_mut_ptr(),
            )
        };
        if code == 0 { codes } else { vec![code; keys.len()] }
    }

    /// Size of a value, or a code below zero.
    pub(crate) fn size(&self, key: &CStr) -> i64 {
        // SAFETY: the handle is valid as long as the client, and the key is zero-terminated.
        unsafe { (self.library.functions.object_size)(self.handle.as_ptr(), key.as_ptr()) }
    }

    /// Removes a value. A leased one is only removed if `forced`.
    pub(crate) fn remove(&self, key: &CStr, forced: bool) -> c_int {
        // SAFETY: the handle is valid as long as the client, and the key is zero-terminated.
        unsafe {
            (self.library.functions.remove)(self.handle.as_ptr(), key.as_ptr(), c_int::from(forced))
        }
    }

    /// Registers an arena's memory with the transport.
    pub(crate) fn register(&self, arena: &Arena) -> c_int {
        let mut known = self.known.lock();
        if let Some(shared) = known.iter_mut().find(|known| known.covers(arena)) {
            shared.users.push(arena.id());
            return 0;
        }
        // SAFETY: it records an address and, on hardware that needs it, pins the memory, which
        // lives until it is unregistered or the client is gone. Nothing is read or written until a
        // call passes a piece of it.
        let code = unsafe {
            (self.library.functions.register_buffer)(
                self.handle.as_ptr(),
                arena.base().as_ptr().cast(),
                arena.bytes(),
            )
        };
        if code == 0 {
            known.push(Known { arena: arena.clone(), users: vec![arena.id()] });
        }
        code
    }

    /// Removes one registration.
    pub(crate) fn unregister(&self, arena: &Arena) {
        let mut known = self.known.lock();
        let place = |known: &Known| known.users.iter().position(|user| *user == arena.id());
        let Some((at, user)) = known.iter().enumerate().find_map(|(at, it)| Some((at, place(it)?)))
        else {
            return;
        };
        known[at].users.swap_remove(user);
        if known[at].users.is_empty() {
            let base = known[at].arena.base().as_ptr().cast();
            // SAFETY: it removes an address that is registered.
            unsafe { (self.library.functions.unregister_buffer)(self.handle.as_ptr(), base) };
            known.swap_remove(at);
        }
    }

    /// Keeps memory of a failed transfer, which may still be in flight, until the client is gone.
    pub(crate) fn keep(&self, memory: impl Any + Send) {
        let mut kept = self.kept.lock();
        kept.since.get_or_insert_with(Instant::now);
        kept.memory.push(Box::new(memory));
    }

    /// Number of pieces of memory kept.
    pub(crate) fn kept(&self) -> usize {
        self.kept.lock().memory.len()
    }

    /// Returns true if it has kept memory for at least `time`.
    pub(crate) fn has_kept_for(&self, time: Duration) -> bool {
        self.kept.lock().since.is_some_and(|since| since.elapsed() >= time)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: the handle came from `create` and is destroyed once; no call is in flight, since
        // calls borrow the client.
        unsafe { (self.library.functions.destroy)(self.handle.as_ptr()) }
    }
}

/// Initial code of an element, in case the library does not set it.
const NO_ANSWER: c_int = -1;

fn pointers(keys: &[CString]) -> Vec<*const c_char> {
    keys.iter().map(|key| key.as_ptr()).collect()
}

/// A range of memory.
#[derive(Clone, Copy)]
struct Span {
    start: *mut u8,
    bytes: usize,
}

/// Memory that a call may read.
pub(crate) struct Readable<'a> {
    span: Span,
    _borrowed: PhantomData<&'a [u8]>,
}

impl<'a> Readable<'a> {
    /// A header, directly followed by its page.
    pub(crate) fn page(headroom: &'a Headroom, source: &'a Source) -> Self {
        let start = headroom.start();
        assert_eq!(start.addr() + HEADER_BYTES, source.start().addr(), "the page's own headroom");
        let span = Span { start, bytes: HEADER_BYTES + source.len() };
        Self { span, _borrowed: PhantomData }
    }

    pub(crate) fn bytes(bytes: &'a [u8]) -> Self {
        let span = Span { start: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
        Self { span, _borrowed: PhantomData }
    }
}

/// Memory that a call may write to exclusively.
pub(crate) struct Writable<'a> {
    span: Span,
    _borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Writable<'a> {
    /// Memory for a header, directly followed by its page.
    pub(crate) fn page(headroom: &'a mut Headroom, target: &'a mut Target) -> Self {
        let start = headroom.start();
        assert_eq!(start.addr() + HEADER_BYTES, target.start().addr(), "the page's own headroom");
        let span = Span { start, bytes: HEADER_BYTES + target.len() };
        Self { span, _borrowed: PhantomData }
    }

    pub(crate) fn bytes(bytes: &'a mut [u8]) -> Self {
        let span = Span { start: bytes.as_mut_ptr(), bytes: bytes.len() };
        Self { span, _borrowed: PhantomData }
    }
}
