//! Huge pages for the heap of a long computation.

/// Memory for which huge pages are asked for. None of it is taken before it is used.
const ROOM: usize = 256 << 20;
/// The size of a huge page, or a multiple of it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const HUGE_PAGE: usize = 2 << 20;

/// Asks for huge pages for what this thread allocates from now on. Going through tens of megabytes in
/// pages of four kilobytes, a processor looks for pages a tenth of the time. Where the system has none
/// to give, nothing changes.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the allocator's settings and the kernel's advice are C functions")]
pub(crate) fn ask_for_huge_pages() {
    // What is large comes from the heap too, and what is given back to it stays there.
    let kept = i32::MAX;
    // SAFETY: both are settings of the allocator that may be changed at any time.
    let is_set = unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, kept) == 1
            && libc::mallopt(libc::M_TRIM_THRESHOLD, kept) == 1
    };
    let mut room = Vec::<u8>::new();
    if !is_set || room.try_reserve_exact(ROOM + HUGE_PAGE).is_err() {
        return;
    }
    let unaligned = room.as_ptr().align_offset(HUGE_PAGE);
    let first = room.as_mut_ptr().wrapping_add(unaligned);
    // SAFETY: the room reaches a huge page further than what is advised about, and so from `first` on it
    // is all of that; the advice changes nothing about what is in memory.
    unsafe { libc::madvise(first.cast(), ROOM, libc::MADV_HUGEPAGE) };
    // The room goes back to the heap here, and the heap keeps it.
}

/// There is nothing to ask for.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn ask_for_huge_pages() {}
