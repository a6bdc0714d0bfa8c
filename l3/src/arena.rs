//! Page memory, and the loans that record which transfer uses which page.
//!
//! A transfer outlives the call that started it: its caller may stop waiting. So a page is lent to
//! it, as a [`Source`] with any number of readers or as a [`Target`] with one writer; [`Sources`]
//! and [`Targets`] lend many pages at once. All are move-only, and dropping one returns the page.
//! Until then the arena refuses conflicting loans. Reusing a page too early is therefore an error,
//! never wrong bytes.

#![allow(unsafe_code)]

mod loans;

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use memmap2::{MmapMut, MmapRaw};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::object::HEADER_BYTES;
use crate::sync::{AtomicU32, Ordering};

pub use loans::{Sources, Targets};

/// Alignment that direct IO requires of memory, in bytes.
pub const ALIGNMENT: usize = 4096;

/// Pages of memory, all of one size. Clones are the same memory.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Slab>,
}

struct Slab {
    id: u64,
    base: NonNull<u8>,
    page_bytes: usize,
    /// Bytes before each page that belong to the store that borrows the page.
    headroom_bytes: usize,
    lending: Box<[Lending]>,
    /// Per page, true while its headroom is in use. Empty for an arena without headroom.
    headrooms: Box<[AtomicBool]>,
    returned: Notify,
    /// Values that must be dropped before the memory is.
    attached: Mutex<Vec<Box<dyn Any + Send + Sync>>>,
    /// Owner of the memory; dropped last. A [`MmapRaw`] if the arena has mapped it itself.
    owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: `base` points to memory that `owner` keeps, and every access to it goes through a
// `Source` or a `Target`, whose exclusion `Lending` enforces across threads.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

/// Error: the page is in use and cannot be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "page {page} of the arena is in use by another transfer; wait for its outcome \
     (`Arena::returned`) before using it again"
)]
pub struct Lent {
    /// Index of the page.
    pub page: u32,
}

impl Arena {
    /// Allocates zeroed memory for `pages` pages of `page_bytes` each, aligned for direct IO. The
    /// system provides it on first touch.
    ///
    /// # Errors
    /// If the address space is exhausted, or if the size is zero.
    pub fn new(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, 0, false)
    }

    /// Like [`Arena::new`], in huge pages where the system has them, which makes the first touch of
    /// the memory several times as fast.
    pub(crate) fn in_huge_pages(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, 0, true)
    }

    /// Like [`Arena::new`], with room for an object's header directly before each page, so that a
    /// store that keeps header and payload in one piece moves both without a copy. The alignment
    /// for direct IO is kept. Unused headroom never takes physical memory.
    ///
    /// # Errors
    /// If the address space is exhausted, or if the size is zero.
    pub fn with_headroom(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, Self::headroom_bytes(page_bytes), false)
    }

    /// Like [`Arena::with_headroom`], in huge pages where the system has them: for memory that is
    /// populated at once ([`Arena::populate`]) and pinned by a device or an adapter.
    ///
    /// # Errors
    /// If the address space is exhausted, or if the size is zero.
    pub fn with_headroom_in_huge_pages(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, Self::headroom_bytes(page_bytes), true)
    }

    /// Returns the number of bytes that [`Arena::with_headroom`] reserves before each page of this
    /// size.
    #[must_use]
    pub fn headroom_bytes(page_bytes: usize) -> usize {
        if page_bytes.is_multiple_of(ALIGNMENT) { ALIGNMENT } else { HEADER_BYTES }
    }

    fn map(pages: u32, page_bytes: usize, headroom_bytes: usize, huge: bool) -> io::Result<Self> {
        let bytes = page_bytes.checked_add(headroom_bytes).filter(|_| page_bytes > 0);
        let bytes = bytes.and_then(|bytes| bytes.checked_mul(pages as usize));
        let bytes = bytes.filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| io::Error::other("an arena needs at least one byte"))?;
        let mapping = if huge { map_in_huge_pages(bytes)? } else { MmapMut::map_anon(bytes)? };
        let mapping = MmapRaw::from(mapping);
        let base = NonNull::new(mapping.as_mut_ptr()).expect("a mapping has an address");
        // SAFETY: the mapping has `bytes` readable and writable bytes, nothing else knows its
        // address, and it lives as long as the owner.
        Ok(unsafe { Self::from_parts(base, pages, page_bytes, headroom_bytes, Box::new(mapping)) })
    }

    /// Wraps memory that another component has allocated, for example pinned for a device.
    ///
    /// # Safety
    /// `base` must point to `pages * page_bytes` readable and writable bytes that stay valid until
    /// `owner` is dropped. Any other user of a page (a device, another library) must hold a
    /// [`Source`] or [`Target`] of it meanwhile.
    #[must_use]
    pub unsafe fn from_raw(
        base: NonNull<u8>,
        pages: u32,
        page_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: the caller guarantees exactly this, for an arena without headroom.
        unsafe { Self::from_parts(base, pages, page_bytes, 0, owner) }
    }

    /// Like [`Arena::from_raw`], with room for an object's header directly before each page, as in
    /// [`Arena::with_headroom`]. Pages of a slab whose owner leaves `headroom_bytes` before each of
    /// them move without a copy through stores that keep header and payload in one piece.
    ///
    /// # Safety
    /// `base` must point to `pages * (headroom_bytes + page_bytes)` readable and writable bytes
    /// that stay valid until `owner` is dropped. Only the arena may touch the headroom; for the
    /// pages, the rules of [`Arena::from_raw`] apply.
    ///
    /// # Panics
    /// If a header does not fit into the headroom.
    #[must_use]
    pub unsafe fn from_raw_with_headroom(
        base: NonNull<u8>,
        pages: u32,
        page_bytes: usize,
        headroom_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        assert!(headroom_bytes >= HEADER_BYTES, "a header has {HEADER_BYTES} bytes");
        // SAFETY: the caller guarantees exactly this.
        unsafe { Self::from_parts(base, pages, page_bytes, headroom_bytes, owner) }
    }

    /// # Safety
    /// Like [`Arena::from_raw`], with `headroom_bytes` more before each page.
    unsafe fn from_parts(
        base: NonNull<u8>,
        pages: u32,
        page_bytes: usize,
        headroom_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let inner = Slab {
            id: NEXT_ID.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            base,
            page_bytes,
            headroom_bytes,
            lending: (0..pages).map(|_| Lending::default()).collect(),
            headrooms: (0..if headroom_bytes > 0 { pages } else { 0 })
                .map(|_| AtomicBool::new(false))
                .collect(),
            returned: Notify::new(),
            attached: Mutex::default(),
            owner,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Lends a page for reading.
    ///
    /// # Errors
    /// If the page is lent for writing.
    ///
    /// # Panics
    /// If the arena has no such page.
    pub fn source(&self, page: u32) -> Result<Source, Lent> {
        if !self.inner.lending[page as usize].share() {
            return Err(Lent { page });
        }
        Ok(Source(Loan { inner: self.inner.clone(), page, length: self.inner.page_bytes }))
    }

    /// Lends a page for writing.
    ///
    /// # Errors
    /// If the page is lent, for reading or writing.
    ///
    /// # Panics
    /// If the arena has no such page.
    pub fn target(&self, page: u32) -> Result<Target, Lent> {
        if !self.inner.lending[page as usize].lend_exclusively() {
            return Err(Lent { page });
        }
        Ok(Target(Loan { inner: self.inner.clone(), page, length: self.inner.page_bytes }))
    }

    /// Returns true while the page is lent.
    #[must_use]
    pub fn is_lent(&self, page: u32) -> bool {
        !self.inner.lending[page as usize].is_idle()
    }

    /// Waits until the page is no longer lent. After a transfer that was given up, its page may be
    /// reused from then on.
    pub async fn returned(&self, page: u32) {
        loop {
            let mut returned = std::pin::pin!(self.inner.returned.notified());
            returned.as_mut().enable();
            if !self.is_lent(page) {
                return;
            }
            returned.await;
        }
    }

    /// Attaches a value that is dropped before the memory is, for example the registration of the
    /// memory with a device.
    pub fn attach(&self, keep: Box<dyn Any + Send + Sync>) {
        self.inner.attached.lock().push(keep);
    }

    /// Makes the system provide a range of the memory in the calling thread; its content stays as
    /// it is. Several threads populate several ranges faster than one. Does nothing for foreign
    /// memory and on systems without such a call, where memory is provided on first touch.
    pub fn populate(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Some(mapping) = self.inner.owner.downcast_ref::<MmapRaw>() {
            // A shortage of memory shows later, when the memory is touched.
            let _ = mapping.advise_range(memmap2::Advice::PopulateWrite, range.start, range.len());
        }
        #[cfg(not(target_os = "linux"))]
        drop(range);
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.inner.lending.len() as u32
    }

    /// Size of a page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.inner.page_bytes
    }

    /// Start of the memory, for drivers that register it with a device. Access bytes only through
    /// [`Arena::source`] and [`Arena::target`].
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.inner.base
    }

    /// Size of the memory, pages and headroom.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.inner.stride() * self.inner.lending.len()
    }

    /// Id of the arena, unique within the process.
    pub fn id(&self) -> u64 {
        self.inner.id
    }
}

/// Maps anonymous memory in huge pages: transparent ones, or those that the operator has reserved
/// where the system has no transparent ones. Falls back to normal pages.
fn map_in_huge_pages(bytes: usize) -> io::Result<MmapMut> {
    #[cfg(target_os = "linux")]
    {
        /// Size of the huge pages that are requested, as a power of two: 2 MiB.
        const PAGE_BITS: u8 = 21;
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        if enabled.is_ok_and(|choices| !choices.contains("[never]")) {
            let mapping = MmapMut::map_anon(bytes)?;
            let _ = mapping.advise(memmap2::Advice::HugePage);
            return Ok(mapping);
        }
        if let Some(bytes) = bytes.checked_next_multiple_of(1 << PAGE_BITS)
            && let Ok(mapping) =
                memmap2::MmapOptions::new().len(bytes).huge(Some(PAGE_BITS)).map_anon()
        {
            return Ok(mapping);
        }
    }
    MmapMut::map_anon(bytes)
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Slab { id, page_bytes, lending, .. } = &*self.inner;
        write!(f, "Arena {id} of {} x {page_bytes} bytes", lending.len())
    }
}

impl Slab {
    /// Distance from one page to the next.
    fn stride(&self) -> usize {
        self.headroom_bytes + self.page_bytes
    }

    /// Address of a page.
    fn start(&self, page: u32) -> *mut u8 {
        assert!((page as usize) < self.lending.len(), "the arena has no page {page}");
        let offset = page as usize * self.stride() + self.headroom_bytes;
        // SAFETY: the page lies in the allocation, as the assertion checks.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

/// Loan of a page, or of its first `length` bytes.
struct Loan {
    inner: Arc<Slab>,
    page: u32,
    length: usize,
}

impl Loan {
    fn start(&self) -> *mut u8 {
        self.inner.start(self.page)
    }

    /// Takes the headroom of the page, if the arena has headroom and it is not in use: several
    /// loans may read a page, and each would write a header of its own there.
    fn headroom(&self) -> Option<Headroom> {
        let in_use = self.inner.headrooms.get(self.page as usize)?;
        let taken = in_use.swap(true, std::sync::atomic::Ordering::Acquire);
        (!taken).then(|| Headroom { inner: self.inner.clone(), page: self.page })
    }

    fn shorten(&mut self, length: usize) {
        assert!(length <= self.length, "a page has {} bytes, not {length}", self.length);
        self.length = length;
    }

    fn arena(&self) -> Arena {
        Arena { inner: self.inner.clone() }
    }

    fn give_back(&self, how: fn(&Lending)) {
        how(&self.inner.lending[self.page as usize]);
        self.inner.returned.notify_waiters();
    }
}

/// The [`HEADER_BYTES`] directly before a page on loan. Dropping it lets other loans of the page
/// use them.
pub struct Headroom {
    inner: Arc<Slab>,
    page: u32,
}

impl Headroom {
    /// Address of the first byte; the page follows without a gap.
    pub fn start(&self) -> *mut u8 {
        let page = self.page as usize * self.inner.stride() + self.inner.headroom_bytes;
        // SAFETY: an arena with headroom has at least `HEADER_BYTES` before each page, and `page`
        // was checked when the page was lent.
        unsafe { self.inner.base.as_ptr().add(page - HEADER_BYTES) }
    }

    /// Writes a header.
    pub fn write(&mut self, header: &[u8; HEADER_BYTES]) {
        // SAFETY: the bytes lie in the allocation, after the previous page and before this one, so
        // no loan reaches them; `in_use` excludes every other `Headroom` of the page.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), self.start(), HEADER_BYTES) }
    }

    /// Returns the bytes in the headroom.
    pub fn read(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        // SAFETY: as for writing.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start(), header.as_mut_ptr(), HEADER_BYTES);
        }
        header
    }
}

impl fmt::Debug for Headroom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Headroom of page {}", self.page)
    }
}

impl Drop for Headroom {
    fn drop(&mut self) {
        let in_use = &self.inner.headrooms[self.page as usize];
        in_use.store(false, std::sync::atomic::Ordering::Release);
    }
}

/// A page lent for reading.
pub struct Source(Loan);

/// A page lent for writing.
pub struct Target(Loan);

macro_rules! loan {
    ($name:ident) => {
        impl $name {
            /// Restricts the loan to the first `length` bytes of the page.
            ///
            /// # Panics
            /// If the page is shorter.
            #[must_use]
            pub fn first(mut self, length: usize) -> Self {
                self.0.shorten(length);
                self
            }

            /// Arena that the page belongs to.
            #[must_use]
            pub fn arena(&self) -> Arena {
                self.0.arena()
            }

            /// Index of the page in its arena.
            #[must_use]
            pub fn page(&self) -> u32 {
                self.0.page
            }

            /// [`Arena::id`] of its arena.
            pub fn arena_id(&self) -> u64 {
                self.0.inner.id
            }

            /// Address of the bytes, for transfers that the kernel performs.
            pub fn start(&self) -> *mut u8 {
                self.0.start()
            }

            /// Takes the headroom of the page, if the arena has headroom and it is not in use.
            pub fn headroom(&self) -> Option<Headroom> {
                self.0.headroom()
            }
        }

        impl Deref for $name {
            type Target = [u8];

            fn deref(&self) -> &[u8] {
                // SAFETY: the bytes are initialised memory of the arena, and while this loan lasts
                // nothing else writes to them.
                unsafe { std::slice::from_raw_parts(self.0.start(), self.0.length) }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Loan { inner, page, length } = &self.0;
                write!(
                    f,
                    "{} of {length} bytes, page {page} of arena {}",
                    stringify!($name),
                    inner.id
                )
            }
        }
    };
}

loan!(Source);
loan!(Target);

impl DerefMut for Target {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for reading, and nothing else reads them either.
        unsafe { std::slice::from_raw_parts_mut(self.0.start(), self.0.length) }
    }
}

impl Source {
    /// Lends the same bytes once more.
    #[must_use]
    pub fn share(&self) -> Self {
        let again = self.arena().source(self.page());
        again.expect("a page with a reader takes another").first(self.len())
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.0.give_back(Lending::unshare);
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.0.give_back(Lending::release_writer);
    }
}

/// Use of a page: 0 while it is idle, else the number of readers, or `WRITER`.
#[derive(Debug, Default)]
struct Lending(AtomicU32);

impl Lending {
    const WRITER: u32 = u32::MAX;

    fn share(&self) -> bool {
        let mut readers = self.0.load(Ordering::Relaxed);
        while readers < Self::WRITER - 1 {
            match self.0.compare_exchange_weak(
                readers,
                readers + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => readers = now,
            }
        }
        false
    }

    /// Returns true if the page can be shared, as a hint: a writer may take it at once.
    fn is_shareable(&self) -> bool {
        self.0.load(Ordering::Relaxed) < Self::WRITER - 1
    }

    fn unshare(&self) {
        let readers = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(readers != 0 && readers != Self::WRITER);
    }

    fn lend_exclusively(&self) -> bool {
        self.0.compare_exchange(0, Self::WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn release_writer(&self) {
        self.0.store(0, Ordering::Release);
    }

    fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_many_readers_or_one_writer() {
        let arena = Arena::new(2, 4096).unwrap();
        let mut target = arena.target(0).unwrap();
        target.fill(9);
        assert_eq!(arena.source(0).unwrap_err(), Lent { page: 0 });
        assert!(arena.target(0).is_err());
        assert!(arena.target(1).is_ok(), "each page for itself");
        drop(target);
        let (one, two) = (arena.source(0).unwrap(), arena.source(0).unwrap().first(10));
        assert_eq!((one[4095], two.len()), (9, 10));
        assert!(arena.target(0).is_err());
        drop((one, two));
        assert!(arena.target(0).is_ok());
    }

    #[tokio::test]
    async fn returning_a_page_wakes_its_waiters() {
        let arena = Arena::new(1, 64).unwrap();
        let target = arena.target(0).unwrap();
        let waiter = tokio::spawn({
            let arena = arena.clone();
            async move { arena.returned(0).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(target);
        waiter.await.unwrap();
    }

    #[test]
    fn headroom_lies_right_before_its_page_and_has_one_user() {
        for page_bytes in [8192, 1001] {
            let arena = Arena::with_headroom(3, page_bytes).unwrap();
            let (one, two) = (arena.source(1).unwrap(), arena.source(1).unwrap());
            let mut headroom = one.headroom().unwrap();
            assert!(two.headroom().is_none(), "two headers would be mixed");
            headroom.write(&[7; HEADER_BYTES]);
            assert_eq!(headroom.read(), [7; HEADER_BYTES]);
            assert_eq!(headroom.start() as usize + HEADER_BYTES, one.start() as usize);
            assert_eq!(one.start().addr().is_multiple_of(ALIGNMENT), page_bytes == 8192);
            for page in 0..3 {
                assert!(arena.source(page).unwrap().iter().all(|byte| *byte == 0), "page {page}");
            }
            drop(headroom);
            assert!(two.headroom().is_some());
        }
        assert!(Arena::new(1, 8192).unwrap().source(0).unwrap().headroom().is_none());
    }

    #[test]
    fn memory_in_huge_pages_is_the_same_and_populating_changes_nothing() {
        const PAGE_BYTES: usize = 1 << 20;
        let arena = Arena::with_headroom_in_huge_pages(6, PAGE_BYTES).unwrap();
        arena.target(1).unwrap().fill(3);
        let stride = arena.bytes() / 6;
        arena.populate(0..3 * stride);
        arena.populate(3 * stride..arena.bytes());
        for page in 0..6 {
            let expected = if page == 1 { 3 } else { 0 };
            let source = arena.source(page).unwrap();
            assert!(source.iter().all(|byte| *byte == expected), "page {page}");
            assert!(source.headroom().is_some());
        }
    }

    #[test]
    fn memory_lives_as_long_as_its_last_loan() {
        let arena = Arena::new(1, 64).unwrap();
        arena.target(0).unwrap().fill(5);
        let source = arena.source(0).unwrap();
        drop(arena);
        assert_eq!(source[63], 5);
    }

    #[test]
    fn foreign_memory_is_kept_by_its_owner() {
        let mut bytes = vec![1u8; 256].into_boxed_slice();
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
        // SAFETY: the box has 2 * 128 bytes, moves into the arena, and is not touched otherwise.
        let arena = unsafe { Arena::from_raw(base, 2, 128, Box::new(bytes)) };
        arena.target(1).unwrap().fill(2);
        assert_eq!((arena.source(0).unwrap()[0], arena.source(1).unwrap()[0]), (1, 2));
    }

    #[test]
    fn attachments_are_dropped_after_the_last_loan_and_before_the_memory() {
        struct Goes(&'static str, Arc<Mutex<Vec<&'static str>>>);
        impl Drop for Goes {
            fn drop(&mut self) {
                self.1.lock().push(self.0);
            }
        }
        let gone = Arc::new(Mutex::new(Vec::new()));
        let mut bytes = vec![0u8; 64].into_boxed_slice();
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
        let owner = Box::new((bytes, Goes("memory", gone.clone())));
        // SAFETY: the box has as many bytes, moves into the arena, and is not touched otherwise.
        let arena = unsafe { Arena::from_raw(base, 1, 64, owner) };
        arena.attach(Box::new(Goes("attached", gone.clone())));
        let source = arena.source(0).unwrap();
        drop(arena);
        assert!(gone.lock().is_empty(), "the page is lent");
        drop(source);
        assert_eq!(*gone.lock(), ["attached", "memory"]);
    }

    #[test]
    fn foreign_memory_may_have_headroom() {
        const STRIDE: usize = 4096;
        let mut bytes = vec![1u8; 2 * STRIDE].into_boxed_slice();
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
        let (room, page) = (HEADER_BYTES + 16, STRIDE - HEADER_BYTES - 16);
        // SAFETY: the box has as many bytes, moves into the arena, and is not touched otherwise.
        let arena = unsafe { Arena::from_raw_with_headroom(base, 2, page, room, Box::new(bytes)) };
        let source = arena.source(1).unwrap();
        let mut headroom = source.headroom().unwrap();
        headroom.write(&[7; HEADER_BYTES]);
        assert_eq!(headroom.start() as usize + HEADER_BYTES, source.start() as usize);
        assert_eq!(source.start().addr() - base.as_ptr().addr(), STRIDE + room);
        assert!(source.iter().chain(&*arena.source(0).unwrap()).all(|byte| *byte == 1));
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::thread;

    /// Two writers and a reader contend for one page; loom reports any two of them inside at once.
    #[test]
    fn loom_lending_excludes() {
        loom::model(|| {
            let page = loom::sync::Arc::new((Lending::default(), UnsafeCell::new(0)));
            let writers: Vec<_> = (0..2)
                .map(|_| {
                    let page = page.clone();
                    thread::spawn(move || {
                        if page.0.lend_exclusively() {
                            // SAFETY: seized, so no other thread is inside; loom checks exactly
                            // that.
                            page.1.with_mut(|value| unsafe { *value += 1 });
                            page.0.release_writer();
                        }
                    })
                })
                .collect();
            if page.0.share() {
                // SAFETY: shared, so there is no writer; loom checks exactly that.
                page.1.with(|value| unsafe { assert!(*value <= 2) });
                page.0.unshare();
            }
            for writer in writers {
                writer.join().unwrap();
            }
            assert!(page.0.is_idle());
        });
    }
}
