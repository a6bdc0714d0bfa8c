//! Memory that pages live in, and who is using which page right now.
//!
//! A transfer runs on while its caller does other things, and may go on after its caller has given
//! up. So a page is lent to it: as a [`Source`], which any number may read, or as a [`Target`], which
//! one may write; many at once as [`Sources`] and [`Targets`]. All are move-only, and giving one back is
//! dropping it; until then the arena refuses to lend the page to anybody in its way. A page that is
//! reused too early is thus an error at once and never wrong bytes later.

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

/// What direct IO wants memory to be aligned to.
pub const ALIGNMENT: usize = 4096;

/// Pages of memory, all of one size. Clones are the same memory.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

struct Inner {
    id: u64,
    base: NonNull<u8>,
    page_bytes: usize,
    /// How many bytes before each page belong to the store that the page is lent to.
    headroom_bytes: usize,
    lending: Box<[Lending]>,
    /// Which page's headroom is in use. Empty where there is none.
    headrooms: Box<[AtomicBool]>,
    returned: Notify,
    /// What must go before the memory does.
    attached: Mutex<Vec<Box<dyn Any + Send + Sync>>>,
    /// Keeps the memory; dropped last. A [`MmapRaw`] where the arena has mapped it itself.
    owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: `base` points to memory that `owner` keeps, and every access to it goes through a `Source`
// or a `Target`, whose exclusion `Lending` enforces across threads.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// The page is in use and cannot be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "page {page} of the arena is in use by another transfer; wait for its outcome \
     (`Arena::returned`) before using it again"
)]
pub struct Lent {
    /// Which page.
    pub page: u32,
}

impl Arena {
    /// Zeroed memory for `pages` pages of `page_bytes` each, aligned for direct IO. It is taken from
    /// the system as it is first touched.
    ///
    /// # Errors
    /// When the system has not so much address space left, or there is nothing to allocate.
    pub fn new(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, 0, false)
    }

    /// Like [`Arena::new`], in huge pages where the system has them: memory that is touched for the first time is then
    /// there several times as fast.
    pub(crate) fn in_huge_pages(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, 0, true)
    }

    /// Like [`Arena::new`], with room for an object's header right before each page, so that a store
    /// that keeps header and payload in one piece moves both without a copy. Pages that are aligned
    /// for direct IO stay so. Headroom that no store uses is never taken from the system.
    ///
    /// # Errors
    /// When the system has not so much address space left, or there is nothing to allocate.
    pub fn with_headroom(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, Self::headroom_bytes(page_bytes), false)
    }

    /// Like [`Arena::with_headroom`], in huge pages where the system has them: for memory that is taken from the system
    /// at once ([`Arena::populate`]), and that a device or an adapter pins.
    ///
    /// # Errors
    /// When the system has not so much address space left, or there is nothing to allocate.
    pub fn with_headroom_in_huge_pages(pages: u32, page_bytes: usize) -> io::Result<Self> {
        Self::map(pages, page_bytes, Self::headroom_bytes(page_bytes), true)
    }

    /// How many bytes [`Arena::with_headroom`] has before each page of a size.
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
        // SAFETY: the mapping has `bytes` readable and writable bytes, nobody else knows its address,
        // and it lives as long as the owner.
        Ok(unsafe { Self::from_parts(base, pages, page_bytes, headroom_bytes, Box::new(mapping)) })
    }

    /// Pages in memory that somebody else allocated, for example pinned for a device.
    ///
    /// # Safety
    /// `base` must point to `pages * page_bytes` readable and writable bytes that stay valid until
    /// `owner` is dropped. Whoever else touches a page (a device, another library) must hold a
    /// [`Source`] or [`Target`] of it meanwhile.
    #[must_use]
    pub unsafe fn from_raw(
        base: NonNull<u8>,
        pages: u32,
        page_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: what is asked of the caller is just what is needed without headroom.
        unsafe { Self::from_parts(base, pages, page_bytes, 0, owner) }
    }

    /// Like [`Arena::from_raw`], with room for an object's header right before each page, as
    /// [`Arena::with_headroom`] has it: a slab whose owner has left `headroom_bytes` before every page moves
    /// without a copy through stores that keep header and payload in one piece.
    ///
    /// # Safety
    /// `base` must point to `pages * (headroom_bytes + page_bytes)` readable and writable bytes that stay valid
    /// until `owner` is dropped. The headroom is the arena's alone; for the pages the same goes as for
    /// [`Arena::from_raw`].
    ///
    /// # Panics
    /// When a header does not fit into the headroom.
    #[must_use]
    pub unsafe fn from_raw_with_headroom(
        base: NonNull<u8>,
        pages: u32,
        page_bytes: usize,
        headroom_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        assert!(headroom_bytes >= HEADER_BYTES, "a header has {HEADER_BYTES} bytes");
        // SAFETY: it is just what is asked of the caller.
        unsafe { Self::from_parts(base, pages, page_bytes, headroom_bytes, owner) }
    }

    /// # Safety
    /// As for [`Arena::from_raw`], with `headroom_bytes` more before each page.
    unsafe fn from_parts(
        base: NonNull<u8>,
        pages: u32,
        page_bytes: usize,
        headroom_bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let inner = Inner {
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
    /// When somebody may be writing to it.
    ///
    /// # Panics
    /// When the arena has no such page.
    pub fn source(&self, page: u32) -> Result<Source, Lent> {
        if !self.inner.lending[page as usize].share() {
            return Err(Lent { page });
        }
        Ok(Source(Loan { inner: self.inner.clone(), page, length: self.inner.page_bytes }))
    }

    /// Lends a page for writing.
    ///
    /// # Errors
    /// When somebody may be reading it or writing to it.
    ///
    /// # Panics
    /// When the arena has no such page.
    pub fn target(&self, page: u32) -> Result<Target, Lent> {
        if !self.inner.lending[page as usize].seize() {
            return Err(Lent { page });
        }
        Ok(Target(Loan { inner: self.inner.clone(), page, length: self.inner.page_bytes }))
    }

    /// Whether somebody uses the page.
    #[must_use]
    pub fn is_lent(&self, page: u32) -> bool {
        !self.inner.lending[page as usize].is_idle()
    }

    /// Waits until nobody uses the page: after a transfer that was given up, the moment from which
    /// its page may be used again.
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

    /// Keeps something as long as the memory, and drops it before that goes: a device that has pinned the
    /// memory lets go of it so.
    pub fn attach(&self, keep: Box<dyn Any + Send + Sync>) {
        self.inner.attached.lock().push(keep);
    }

    /// Takes a range of its bytes from the system in the calling thread, and leaves what is written there as it is.
    /// Several threads populate several ranges faster than one. Memory that others have allocated, and memory of
    /// systems without such a call, is taken as it is first touched.
    pub fn populate(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Some(mapping) = self.inner.owner.downcast_ref::<MmapRaw>() {
            // Memory that is short is reported by whoever needs it.
            let _ = mapping.advise_range(memmap2::Advice::PopulateWrite, range.start, range.len());
        }
        #[cfg(not(target_os = "linux"))]
        drop(range);
    }

    /// How many pages it has.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.inner.lending.len() as u32
    }

    /// The size of a page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.inner.page_bytes
    }

    /// Where the memory begins, for drivers that register it with a device. Bytes are touched through
    /// [`Arena::source`] and [`Arena::target`] only.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.inner.base
    }

    /// All of its memory, pages and headroom.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.inner.stride() * self.inner.lending.len()
    }

    /// Distinguishes arenas within the process.
    pub fn id(&self) -> u64 {
        self.inner.id
    }
}

/// Anonymous memory in huge pages where there are any: transparent ones, or those that the operator has reserved where
/// the system has no transparent ones. Without both it is usual memory.
fn map_in_huge_pages(bytes: usize) -> io::Result<MmapMut> {
    #[cfg(target_os = "linux")]
    {
        /// The size of the pages that are asked for, as a power of two: 2 MiB.
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
        let Inner { id, page_bytes, lending, .. } = &*self.inner;
        write!(f, "Arena {id} of {} x {page_bytes} bytes", lending.len())
    }
}

impl Inner {
    /// From one page to the next.
    fn stride(&self) -> usize {
        self.headroom_bytes + self.page_bytes
    }

    /// Where a page begins.
    fn start(&self, page: u32) -> *mut u8 {
        assert!((page as usize) < self.lending.len(), "the arena has no page {page}");
        let offset = page as usize * self.stride() + self.headroom_bytes;
        // SAFETY: the page is one of those that lie in the allocation.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

/// A page, or its beginning, on loan.
struct Loan {
    inner: Arc<Inner>,
    page: u32,
    length: usize,
}

impl Loan {
    fn start(&self) -> *mut u8 {
        self.inner.start(self.page)
    }

    /// Takes the bytes right before the page, if there are any and nobody else has them: several may
    /// read a page, and each would write a header of its own there.
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

/// The [`HEADER_BYTES`] right before a page on loan. Dropping it lets others have them.
pub struct Headroom {
    inner: Arc<Inner>,
    page: u32,
}

impl Headroom {
    /// Where it begins; the page follows without a gap.
    pub fn start(&self) -> *mut u8 {
        let page = self.page as usize * self.inner.stride() + self.inner.headroom_bytes;
        // SAFETY: an arena with headroom has at least so many bytes of it before each page, and
        // `page` was checked when the page was lent.
        unsafe { self.inner.base.as_ptr().add(page - HEADER_BYTES) }
    }

    /// Writes a header.
    pub fn write(&mut self, header: &[u8; HEADER_BYTES]) {
        // SAFETY: the bytes lie in the allocation, before the page and behind the one before it, so
        // no loan reaches them; `in_use` keeps all other headrooms of the page away.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), self.start(), HEADER_BYTES) }
    }

    /// What is written there.
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

/// A page that is lent for reading.
pub struct Source(Loan);

/// A page that is lent for writing.
pub struct Target(Loan);

macro_rules! loan {
    ($name:ident) => {
        impl $name {
            /// Only the first `length` bytes of the page.
            ///
            /// # Panics
            /// When the page has not so many.
            #[must_use]
            pub fn first(mut self, length: usize) -> Self {
                self.0.shorten(length);
                self
            }

            /// The arena that it is lent from.
            #[must_use]
            pub fn arena(&self) -> Arena {
                self.0.arena()
            }

            /// Which page of its arena it is.
            #[must_use]
            pub fn page(&self) -> u32 {
                self.0.page
            }

            /// The [`Arena::id`] of its arena.
            pub fn arena_id(&self) -> u64 {
                self.0.inner.id
            }

            /// Where the bytes are, for transfers that the kernel performs.
            pub fn start(&self) -> *mut u8 {
                self.0.start()
            }

            /// The room for a header right before the page, if there is any and nobody uses it.
            pub fn headroom(&self) -> Option<Headroom> {
                self.0.headroom()
            }
        }

        impl Deref for $name {
            type Target = [u8];

            fn deref(&self) -> &[u8] {
                // SAFETY: the bytes are initialised memory of the arena, and while this loan lasts
                // nobody else writes to them.
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
        // SAFETY: as for reading, and nobody else reads them either.
        unsafe { std::slice::from_raw_parts_mut(self.0.start(), self.0.length) }
    }
}

impl Source {
    /// The same bytes, lent once more.
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
        self.0.give_back(Lending::yield_up);
    }
}

/// Who uses a page: nobody (0), that many readers, or one writer.
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

    /// Whether nobody writes; somebody may the next moment.
    fn is_to_be_shared(&self) -> bool {
        self.0.load(Ordering::Relaxed) < Self::WRITER - 1
    }

    fn unshare(&self) {
        let readers = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(readers != 0 && readers != Self::WRITER);
    }

    fn seize(&self) -> bool {
        self.0.compare_exchange(0, Self::WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn yield_up(&self) {
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
    async fn a_page_that_comes_back_wakes_who_waits_for_it() {
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
    fn memory_of_others_is_kept_by_its_owner() {
        let mut bytes = vec![1u8; 256].into_boxed_slice();
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
        // SAFETY: the box has 2 * 128 bytes, moves into the arena, and is not touched otherwise.
        let arena = unsafe { Arena::from_raw(base, 2, 128, Box::new(bytes)) };
        arena.target(1).unwrap().fill(2);
        assert_eq!((arena.source(0).unwrap()[0], arena.source(1).unwrap()[0]), (1, 2));
    }

    #[test]
    fn what_is_attached_goes_after_the_last_loan_and_before_the_memory() {
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
    fn memory_of_others_may_have_headroom() {
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
                        if page.0.seize() {
                            // SAFETY: seized, so nobody else is inside; loom checks just that.
                            page.1.with_mut(|value| unsafe { *value += 1 });
                            page.0.yield_up();
                        }
                    })
                })
                .collect();
            if page.0.share() {
                // SAFETY: shared, so nobody writes; loom checks just that.
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
