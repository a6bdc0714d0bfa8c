//! Counts the allocations of each thread of this program, for `terrace-bench`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// What a thread has allocated.
#[derive(Clone, Copy)]
struct Allocated {
    allocations: u64,
    bytes: u64,
}

thread_local! {
    // Each thread counts for itself: everything that runs pays for this, and shared counters cost more
    // than most of the allocations that they count.
    static ALLOCATED: Cell<Allocated> = const { Cell::new(Allocated { allocations: 0, bytes: 0 }) };
}

/// How many allocations this thread has made.
pub(crate) fn count() -> u64 {
    ALLOCATED.get().allocations
}

/// How many bytes they were, given back or not.
pub(crate) fn bytes() -> u64 {
    ALLOCATED.get().bytes
}

fn note(bytes: usize) {
    ALLOCATED.with(|allocated| {
        let Allocated { allocations, bytes: before } = allocated.get();
        allocated.set(Allocated { allocations: allocations + 1, bytes: before + bytes as u64 });
    });
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is handed on to the system's allocator with the very arguments it came with, so
// what that one promises holds; counting touches nothing but numbers of the thread's own, which need
// no allocation.
#[expect(unsafe_code, reason = "an allocator cannot be written without")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps to the contract of `alloc`, which is the system's too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory came from `alloc` above, and so from the system's, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: as for `dealloc`, and the caller vouches for the size.
        unsafe { System.realloc(memory, layout, size) }
    }
}
