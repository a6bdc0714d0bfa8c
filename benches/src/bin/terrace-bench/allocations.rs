//! A counting allocator with counters per thread, for `terrace-bench`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Allocations of a thread.
#[derive(Clone, Copy)]
struct Allocated {
    allocations: u64,
    bytes: u64,
}

thread_local! {
    // Counters are per thread: all code pays for them, and shared counters would cost more than
    // most allocations.
    static ALLOCATED: Cell<Allocated> = const { Cell::new(Allocated { allocations: 0, bytes: 0 }) };
}

/// Returns the number of allocations of this thread.
pub(crate) fn count() -> u64 {
    ALLOCATED.get().allocations
}

/// Returns the bytes allocated by this thread, freed or not.
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

// SAFETY: every call is forwarded to the system's allocator with the same arguments, so its
// guarantees hold. Counting touches only thread-local numbers, which need no allocation.
#[expect(unsafe_code, reason = "an allocator cannot be written without")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller meets the contract of `alloc`, which is also the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory came from `alloc` above, and so from the system's, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: as for `dealloc`, and the caller guarantees the size.
        unsafe { System.realloc(memory, layout, size) }
    }
}
