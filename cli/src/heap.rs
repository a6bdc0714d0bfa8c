//! Huge pages for the heap of a long computation.

/// Asks for huge pages for what the main thread allocates from now on: with pages of four kilobytes, a
/// replay spends a tenth of its time on them. Where the system has none to give, nothing changes.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the allocator's settings and advice to the kernel are C functions")]
pub(crate) fn ask_for_huge_pages() {
    /// Nothing of it is in memory before it is used.
    const ROOM: usize = 256 << 20;
    const HUGE_PAGE: usize = 2 << 20;
    // What is large comes from the heap too, and the heap gives nothing back.
    // SAFETY: both are settings of the allocator that may be changed at any time.
    let is_set = unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, i32::MAX) == 1
            && libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX) == 1
    };
    let mut room = Vec::<u8>::new();
    if !is_set || room.try_reserve_exact(ROOM + HUGE_PAGE).is_err() {
        return;
    }
    let to_border = room.as_ptr().align_offset(HUGE_PAGE);
    let first = room.as_mut_ptr().wrapping_add(to_border);
    // SAFETY: the border is less than a huge page away, so that all of it lies in the room; and the
    // advice does not change what is in memory.
    unsafe { libc::madvise(first.cast(), ROOM, libc::MADV_HUGEPAGE) };
    // Here the room goes back to the heap, which keeps it.
}

/// There is nothing to ask for.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn ask_for_huge_pages() {}
