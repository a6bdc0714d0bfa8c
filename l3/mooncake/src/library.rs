//! The store's library, opened at run time, and the only place that talks to it.
//!
//! Memory whose address goes into a call of its C interface is used until that call returns, so the types
//! below make a caller borrow. Afterwards it is not used any more, unless the transfer has failed: one
//! that the library has stopped waiting for may still be under way. The memory of such a one belongs to
//! the [`Client`] from then on ([`Client::keep`]), and is given back when the client is gone.

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

/// Why the library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// It cannot be opened.
    #[error(
        "cannot open the Mooncake library {}: {message}; give the libmooncake_store.so of your \
         installation, and check that its dependencies are found (`ldd` lists them)",
        path.display()
    )]
    Open {
        /// Which file.
        path: PathBuf,
        /// What the loader says.
        message: String,
    },
    /// It has not the functions that are needed.
    #[error(
        "{} has no function {function}: it is a different library, or Mooncake is older than \
         0.3.10.post2",
        path.display()
    )]
    Function {
        /// Which file.
        path: PathBuf,
        /// Which function.
        function: String,
    },
}

type Handle = *mut c_void;

/// How the library is told to protect what is put.
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
        /// The functions that are used, as the library's header declares them.
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn find(library: &Shared, path: &Path) -> Result<Self, LibraryError> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function's declaration in the library's
                        // header, which is the same in all versions that have all of these.
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
    create: c"mooncake_store_create", fn() -> Handle;
    destroy: c"mooncake_store_destroy", fn(Handle);
    setup: c"mooncake_store_setup",
        fn(Handle, *const c_char, *const c_char, u64, u64, *const c_char, *const c_char,
           *const c_char) -> c_int;
    hostname: c"mooncake_store_get_hostname", fn(Handle, *mut c_char, usize) -> c_int;
    batch_put_from: c"mooncake_store_batch_put_from",
        fn(Handle, *mut *const c_char, *mut *mut c_void, *const usize, usize, *const Replication,
           *mut c_int) -> c_int;
    batch_get_into: c"mooncake_store_batch_get_into",
        fn(Handle, *mut *const c_char, *mut *mut c_void, *const usize, usize, *mut i64) -> c_int;
    batch_is_exist: c"mooncake_store_batch_is_exist",
        fn(Handle, *mut *const c_char, usize, *mut c_int) -> c_int;
    object_size: c"mooncake_store_get_size", fn(Handle, *const c_char) -> i64;
    remove: c"mooncake_store_remove", fn(Handle, *const c_char, c_int) -> c_int;
    register_buffer: c"mooncake_store_register_buffer", fn(Handle, *mut c_void, usize) -> c_int;
    unregister_buffer: c"mooncake_store_unregister_buffer", fn(Handle, *mut c_void) -> c_int;
}

/// The opened library.
pub(crate) struct Library {
    functions: Functions,
    /// It has threads and destructors of its own, and does not survive being unloaded.
    _library: ManuallyDrop<Shared>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Library")
    }
}

impl Library {
    /// Opens the library. What it needs itself is bound when it is first called, since parts of it
    /// are for hardware that is not there.
    pub(crate) fn open(path: &Path) -> Result<Self, LibraryError> {
        // SAFETY: opening runs the library's initialisers. Whoever names a file as the library of the
        // store trusts it with this process, as with any plug-in.
        let library = unsafe { Shared::open(Some(path), RTLD_LAZY | RTLD_LOCAL) };
        let library = library.map_err(|error| LibraryError::Open {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        let functions = Functions::find(&library, path)?;
        Ok(Self { functions, _library: ManuallyDrop::new(library) })
    }
}

/// Where the store is and how to reach it.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    pub(crate) local_host: CString,
    pub(crate) metadata: CString,
    pub(crate) protocol: CString,
    pub(crate) device: CString,
    pub(crate) master: CString,
}

/// Memory that the library takes for a client when it connects.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClientMemory {
    /// What the client gives to the cluster. Objects that it is used for are gone when the client is.
    pub(crate) segment_bytes: u64,
    /// What the library has for itself.
    pub(crate) buffer_bytes: u64,
}

/// Where the objects go that a client puts.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    /// In how many segments each of them is.
    pub(crate) replicas: usize,
    /// Segments that are tried before all others.
    pub(crate) preferred: Vec<CString>,
}

/// How an object is protected from the store's own eviction, from its first moment on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protection {
    None,
    Soft,
    Hard,
}

/// A client of the store: what all calls are made through, by any number of threads.
pub(crate) struct Client {
    library: Arc<Library>,
    handle: NonNull<c_void>,
    placement: Placement,
    // What the library may touch is dropped after `drop` has ended the client.
    /// The memory that was made known to it.
    known: Mutex<Vec<Known>>,
    kept: Mutex<Kept>,
}

/// Memory that the library knows, and the arenas that use it. The library takes no address twice, so arenas share what is
/// known: one that is registered again while transfers of before are under way, and several over the same memory, as when
/// an array of Python is put twice at the same time.
struct Known {
    /// The arena that it was made known for. It keeps the memory.
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

/// Memory that the library may touch although no call is under way.
#[derive(Default)]
struct Kept {
    since: Option<Instant>,
    memory: Vec<Box<dyn Any + Send>>,
}

// SAFETY: the library's clients are made for being called from many threads at once, and are bound to
// none.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Connects to the master. Pages go straight between arenas and segments, whoever's these are. A
    /// master that does not answer is waited for a minute and a half.
    pub(crate) fn connect(
        library: &Arc<Library>,
        endpoint: &Endpoint,
        memory: ClientMemory,
        placement: Placement,
    ) -> Result<Self, c_int> {
        // SAFETY: it takes nothing, and what it answers is checked.
        let handle = unsafe { (library.functions.create)() };
        let client = Self {
            library: library.clone(),
            handle: NonNull::new(handle).ok_or(-1)?,
            placement,
            known: Mutex::default(),
            kept: Mutex::default(),
        };
        // SAFETY: the handle is one that was just made; the strings end with a zero and live until
        // the call returns.
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

    /// What the cluster calls this client, and with it the segment that it offers.
    pub(crate) fn name(&self) -> Option<CString> {
        const NAME_BYTES_MAX: usize = 512;
        let mut name = vec![0u8; NAME_BYTES_MAX];
        // SAFETY: the handle is valid as long as the client, and no more than `name.len()` bytes are
        // written, the zero at the end included.
        let code = unsafe {
            let start = name.as_mut_ptr().cast();
            (self.library.functions.hostname)(self.handle.as_ptr(), start, name.len())
        };
        let name = CStr::from_bytes_until_nul(&name).ok()?;
        (code == 0 && !name.is_empty()).then(|| name.to_owned())
    }

    /// Stores pieces of memory, one under each key, and answers a code for each. What is there
    /// already stays as it is, and is answered like a success. Payloads that have their header elsewhere are
    /// stored first, under names of their own: whoever finds a header finds the payload.
    pub(crate) fn put(
        &self,
        keys: &[CString],
        pieces: &[Readable<'_>],
        protection: Protection,
    ) -> Vec<c_int> {
        assert_eq!(keys.len(), pieces.len());
        let apart: Vec<usize> =
            (0..pieces.len()).filter(|at| pieces[*at].header.is_some()).collect();
        if apart.is_empty() {
            let spans: Vec<Span> = pieces.iter().map(|piece| piece.span).collect();
            return self.put_spans(keys, &spans, protection);
        }
        let names: Vec<CString> = apart.iter().map(|at| payload_key(&keys[*at])).collect();
        let spans: Vec<Span> = apart.iter().map(|at| pieces[*at].span).collect();
        let mut codes = vec![0; keys.len()];
        for (at, code) in apart.into_iter().zip(self.put_spans(&names, &spans, protection)) {
            codes[at] = code;
        }
        let rest: Vec<usize> = (0..keys.len()).filter(|at| codes[*at] == 0).collect();
        let names: Vec<CString> = rest.iter().map(|at| keys[*at].clone()).collect();
        let span = |at: &usize| pieces[*at].header.unwrap_or(pieces[*at].span);
        let spans: Vec<Span> = rest.iter().map(span).collect();
        for (at, code) in rest.into_iter().zip(self.put_spans(&names, &spans, protection)) {
            codes[at] = code;
        }
        codes
    }

    /// The spans must be borrowed by the caller.
    fn put_spans(&self, keys: &[CString], spans: &[Span], protection: Protection) -> Vec<c_int> {
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
        let mut starts: Vec<*mut c_void> = spans.iter().map(|it| it.start.cast()).collect();
        let sizes: Vec<usize> = spans.iter().map(|it| it.bytes).collect();
        let mut codes = vec![NO_ANSWER; keys.len()];
        // SAFETY: the arrays have `keys.len()` elements each. The keys end with zeros; each piece is
        // borrowed until the call returns, as long as its size says, and only read, although the
        // declaration has no `const`. So are the names of segments. The codes are written to the last
        // array.
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

    /// Reads objects into pieces of memory, and answers for each its size or a code below zero. Objects
    /// whose payload is apart are read into pieces of both kinds; one that is not does not go into a piece
    /// that is, which is answered by [`IS_WHOLE`].
    pub(crate) fn get(&self, keys: &[CString], pieces: &mut [Writable<'_>]) -> Vec<i64> {
        assert_eq!(keys.len(), pieces.len());
        let (mut names, mut spans) = (Vec::new(), Vec::new());
        for (key, piece) in keys.iter().zip(&*pieces) {
            names.push(key.clone());
            spans.push(piece.header.unwrap_or(piece.span));
            if piece.header.is_some() {
                names.push(payload_key(key));
                spans.push(piece.span);
            }
        }
        let mut answers = self.get_spans(&names, &spans).into_iter();
        let mut answer = || answers.next().unwrap_or(i64::from(NO_ANSWER));
        let of_both = |header: i64, payload: i64| match header {
            BUFFER_TOO_SMALL => IS_WHOLE,
            HEADER_SIZE if payload >= 0 => HEADER_SIZE + payload,
            HEADER_SIZE if payload == i64::from(ABSENT) => PAYLOAD_LOST,
            HEADER_SIZE => payload,
            other => other,
        };
        let mut codes: Vec<i64> = pieces
            .iter()
            .map(|piece| match piece.header {
                None => answer(),
                Some(_) => {
                    let header = answer();
                    of_both(header, answer())
                }
            })
            .collect();
        // A header without its payload: that is elsewhere.
        let is_apart = |at: &usize| {
            let piece = &pieces[*at];
            piece.header.is_none() && codes[*at] == HEADER_SIZE && piece.span.bytes > HEADER_BYTES
        };
        let apart: Vec<usize> = (0..keys.len()).filter(is_apart).collect();
        let names: Vec<CString> = apart.iter().map(|at| payload_key(&keys[*at])).collect();
        let spans: Vec<Span> = apart.iter().map(|at| pieces[*at].span.behind_header()).collect();
        for (at, payload) in apart.into_iter().zip(self.get_spans(&names, &spans)) {
            codes[at] = of_both(HEADER_SIZE, payload);
        }
        codes
    }

    /// The spans must be borrowed by the caller, exclusively.
    fn get_spans(&self, keys: &[CString], spans: &[Span]) -> Vec<i64> {
        if keys.is_empty() {
            return Vec::new();
        }
        let mut names = pointers(keys);
        let mut starts: Vec<*mut c_void> = spans.iter().map(|it| it.start.cast()).collect();
        let sizes: Vec<usize> = spans.iter().map(|it| it.bytes).collect();
        let mut codes = vec![i64::from(NO_ANSWER); keys.len()];
        // SAFETY: as for putting; each piece is borrowed exclusively, so the library alone writes to
        // it until the call returns, and no further than its size says.
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

    /// For each key 1 if it is there, 0 if not, or a code below zero. It grants leases.
    pub(crate) fn exist(&self, keys: &[CString]) -> Vec<c_int> {
        let mut names = pointers(keys);
        let mut codes = vec![NO_ANSWER; keys.len()];
        // SAFETY: the arrays have `keys.len()` elements each, and the keys end with zeros.
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

    /// The size of an object, its payload included if it is apart, or a code below zero.
    pub(crate) fn size(&self, key: &CStr) -> i64 {
        match self.size_of(key) {
            HEADER_SIZE => HEADER_SIZE + self.size_of(&payload_key(key)).max(0),
            other => other,
        }
    }

    fn size_of(&self, key: &CStr) -> i64 {
        // SAFETY: the handle is valid as long as the client, and the key ends with a zero.
        unsafe { (self.library.functions.object_size)(self.handle.as_ptr(), key.as_ptr()) }
    }

    /// Removes an object; a lease keeps it unless it is forced. If its payload may be apart, that is removed
    /// as well.
    pub(crate) fn remove(&self, key: &CStr, forced: bool, may_be_apart: bool) -> c_int {
        let code = self.remove_one(key, forced);
        if !may_be_apart || !matches!(code, 0 | ABSENT) {
            return code;
        }
        // Without its header nobody reads it, so leases do not matter. If it stays, so does the object.
        match self.remove_one(&payload_key(key), true) {
            0 | ABSENT => code,
            failed => failed,
        }
    }

    fn remove_one(&self, key: &CStr, forced: bool) -> c_int {
        // SAFETY: the handle is valid as long as the client, and the key ends with a zero.
        unsafe {
            (self.library.functions.remove)(self.handle.as_ptr(), key.as_ptr(), c_int::from(forced))
        }
    }

    /// Makes an arena's memory known to the transport.
    pub(crate) fn register(&self, arena: &Arena) -> c_int {
        let mut known = self.known.lock();
        if let Some(shared) = known.iter_mut().find(|known| known.covers(arena)) {
            shared.users.push(arena.id());
            return 0;
        }
        // SAFETY: it notes an address and, on hardware that needs it, pins its memory, which lives
        // until it is unregistered or the client is gone. Nothing is read or written until a call names
        // a piece of it.
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

    /// Takes back one registration.
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
            // SAFETY: it forgets an address that it knows.
            unsafe { (self.library.functions.unregister_buffer)(self.handle.as_ptr(), base) };
            known.swap_remove(at);
        }
    }

    /// Takes memory whose transfer has failed and may be under way all the same, until the client is
    /// gone.
    pub(crate) fn keep(&self, memory: impl Any + Send) {
        let mut kept = self.kept.lock();
        kept.since.get_or_insert_with(Instant::now);
        kept.memory.push(Box::new(memory));
    }

    /// How many pieces of memory it keeps.
    pub(crate) fn kept(&self) -> usize {
        self.kept.lock().memory.len()
    }

    /// Whether it has kept memory for so long.
    pub(crate) fn has_kept_for(&self, time: Duration) -> bool {
        self.kept.lock().since.is_some_and(|since| since.elapsed() >= time)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: the handle came from `create` and is given back once; no call is under way, since
        // calls borrow the client.
        unsafe { (self.library.functions.destroy)(self.handle.as_ptr()) }
    }
}

/// What an element of a batch has if the library did not write to it.
const NO_ANSWER: c_int = -1;

fn pointers(keys: &[CString]) -> Vec<*const c_char> {
    keys.iter().map(|key| key.as_ptr()).collect()
}

/// What the library answers to a buffer that is smaller than the object.
const BUFFER_TOO_SMALL: i64 = -600;
const ABSENT: c_int = -704;
const HEADER_SIZE: i64 = HEADER_BYTES as i64;

/// Instead of a code: the object is in one piece, and was to be read into two.
pub(crate) const IS_WHOLE: i64 = i64::MIN;

/// Instead of a code: there was a header, or something as long, and no payload.
pub(crate) const PAYLOAD_LOST: i64 = i64::MIN + 1;

/// The name of a payload that is not behind its header.
pub(crate) fn payload_key(key: &CStr) -> CString {
    let name = [key.to_bytes(), b"/payload"].concat();
    CString::new(name).expect("a name has no zero in it")
}

/// So many bytes from there on.
#[derive(Clone, Copy)]
struct Span {
    start: *mut u8,
    bytes: usize,
}

impl Span {
    /// What is left of it without a header.
    fn behind_header(self) -> Self {
        assert!(self.bytes >= HEADER_BYTES);
        Self { start: self.start.wrapping_add(HEADER_BYTES), bytes: self.bytes - HEADER_BYTES }
    }
}

/// Memory that a call may read: an object in one piece, or a payload and its header.
pub(crate) struct Readable<'a> {
    span: Span,
    header: Option<Span>,
    _borrowed: PhantomData<&'a [u8]>,
}

impl<'a> Readable<'a> {
    /// A header and the page right behind it.
    pub(crate) fn page(headroom: &'a Headroom, source: &'a Source) -> Self {
        let start = headroom.start();
        assert_eq!(start.addr() + HEADER_BYTES, source.start().addr(), "the page's own headroom");
        let span = Span { start, bytes: HEADER_BYTES + source.len() };
        Self { span, header: None, _borrowed: PhantomData }
    }

    pub(crate) fn bytes(bytes: &'a [u8]) -> Self {
        let span = Span { start: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
        Self { span, header: None, _borrowed: PhantomData }
    }

    /// A header and the payload, wherever they are.
    pub(crate) fn apart(header: &'a [u8], payload: &'a [u8]) -> Self {
        assert_eq!(header.len(), HEADER_BYTES);
        Self { header: Some(Self::bytes(header).span), ..Self::bytes(payload) }
    }
}

/// Memory that a call may write to, and nobody else meanwhile: for an object in one piece, or for a payload
/// and its header.
pub(crate) struct Writable<'a> {
    span: Span,
    header: Option<Span>,
    _borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Writable<'a> {
    /// Room for a header and the page right behind it.
    pub(crate) fn page(headroom: &'a mut Headroom, target: &'a mut Target) -> Self {
        let start = headroom.start();
        assert_eq!(start.addr() + HEADER_BYTES, target.start().addr(), "the page's own headroom");
        let span = Span { start, bytes: HEADER_BYTES + target.len() };
        Self { span, header: None, _borrowed: PhantomData }
    }

    pub(crate) fn bytes(bytes: &'a mut [u8]) -> Self {
        let span = Span { start: bytes.as_mut_ptr(), bytes: bytes.len() };
        Self { span, header: None, _borrowed: PhantomData }
    }

    /// Room for a header and for the payload, wherever they are.
    pub(crate) fn apart(header: &'a mut [u8], payload: &'a mut [u8]) -> Self {
        assert_eq!(header.len(), HEADER_BYTES);
        Self { header: Some(Self::bytes(header).span), ..Self::bytes(payload) }
    }
}
