//! The interface to CUDA. The real driver is in `real.rs`; tests use one that runs on threads,
//! delays and fails (`fake.rs`).

#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use terrace_scheduler::CopyDirection;

/// An address that the device can access: in device memory, or in pinned host memory as mapped for
/// the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// Returns the address `bytes` further.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A queue of work that is executed in order: for the real driver, a `CUstream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// A point in a stream: for the real driver, a `CUevent`. Recording it again moves it to another
/// point; earlier waits stay with the earlier point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// Scheduling priority of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// For copies, which should not delay steps.
    Low,
    /// For steps.
    High,
}

/// Purpose of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Synchronisation of streams and of threads that sleep.
    Order,
    /// Measurement of durations.
    Time,
}

/// Device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Free bytes.
    pub free: usize,
    /// Total bytes.
    pub total: usize,
}

/// A list in device memory of pairs of addresses, 16 bytes each: destination and source of pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairList {
    /// Address of the list.
    pub at: DeviceAddress,
    /// Number of pairs.
    pub pairs: u32,
}

/// A part of every piece of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Offset from the addresses in the list.
    pub offset: usize,
    /// Length.
    pub bytes: usize,
}

/// A piece of memory to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Destination.
    pub to: DeviceAddress,
    /// Source.
    pub from: DeviceAddress,
    /// Length.
    pub bytes: usize,
}

/// A failed driver call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {text}")]
pub struct CallError {
    /// Name of the call.
    pub call: &'static str,
    /// Kind of the failure.
    pub kind: CallErrorKind,
    /// Message of the driver.
    pub text: String,
}

/// Kinds of failed calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallErrorKind {
    /// Memory is short; other work is not affected.
    OutOfMemory,
    /// Any other failure: the device is treated as lost.
    Other,
}

/// The CUDA operations that the device needs. Every calling thread calls [`Driver::bind_thread`]
/// first.
///
/// Work is submitted to streams and runs later. The caller must keep memory valid until the work is
/// done; calls that touch memory are therefore unsafe.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Prepares the calling thread for other calls.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn bind_thread(&self) -> Result<(), CallError>;

    /// Checks whether the device still works. A permanent failure is returned by every later call.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn check(&self) -> Result<(), CallError>;

    /// Returns free and total memory.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn memory(&self) -> Result<DeviceMemory, CallError>;

    /// Allocates device memory.
    ///
    /// # Errors
    /// Fails if memory is short.
    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CallError>;

    /// Frees device memory.
    ///
    /// # Safety
    /// The memory must come from [`Driver::allocate`], and no pending work may touch it.
    unsafe fn free(&self, at: DeviceAddress);

    /// Pins host memory so that the device can access it, and returns its device address.
    ///
    /// # Errors
    /// Fails if the memory cannot be pinned, or is pinned already.
    ///
    /// # Safety
    /// The bytes must stay mapped until [`Driver::unpin`] is called.
    unsafe fn pin(&self, base: NonNull<u8>, bytes: usize) -> Result<DeviceAddress, CallError>;

    /// Unpins memory.
    ///
    /// # Safety
    /// The memory must be pinned, and no pending work may touch it.
    unsafe fn unpin(&self, base: NonNull<u8>);

    /// Creates a stream.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn create_stream(&self, priority: Priority) -> Result<Stream, CallError>;

    /// Destroys a stream that is no longer used.
    fn destroy_stream(&self, stream: Stream);

    /// Waits until all work submitted to a stream is done.
    ///
    /// # Errors
    /// Fails if any of it failed.
    fn drain(&self, stream: Stream) -> Result<(), CallError>;

    /// Creates an event.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn create_event(&self, kind: EventKind) -> Result<Event, CallError>;

    /// Creates two events for the measurement of a duration.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn create_times(&self) -> Result<[Event; 2], CallError> {
        let begin = self.create_event(EventKind::Time)?;
        let end = self.create_event(EventKind::Time);
        Ok([begin, end.inspect_err(|_| self.destroy_event(begin))?])
    }

    /// Destroys an event that is no longer used.
    fn destroy_event(&self, event: Event);

    /// Records an event behind all work submitted to a stream.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn record(&self, event: Event, stream: Stream) -> Result<(), CallError>;

    /// Makes later work of a stream wait for the event.
    ///
    /// # Errors
    /// Fails if the device is lost.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), CallError>;

    /// Returns whether the event has passed.
    ///
    /// # Errors
    /// Fails if work before it failed.
    fn is_passed(&self, event: Event) -> Result<bool, CallError>;

    /// Blocks the calling thread until the event has passed.
    ///
    /// # Errors
    /// Fails if work before it failed.
    fn sleep_until(&self, event: Event) -> Result<(), CallError>;

    /// Returns the time between two passed timing events.
    ///
    /// # Errors
    /// Fails if they have not passed.
    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CallError>;

    /// Copies a few pieces at once by a small kernel, without a copy engine.
    ///
    /// # Errors
    /// Fails if the kernel cannot be launched.
    ///
    /// # Safety
    /// Both sides of each piece must be memory that the device can access until the copy is done.
    /// Destinations must not overlap other destinations or sources.
    unsafe fn fetch_all(&self, stream: Stream, pieces: &[Piece]) -> Result<(), CallError>;

    /// Copies one piece like [`fetch_all`](Self::fetch_all).
    ///
    /// # Errors
    /// Fails if the kernel cannot be launched.
    ///
    /// # Safety
    /// Both sides must be memory that the device can access until the copy is done.
    unsafe fn fetch(
        &self,
        stream: Stream,
        to: DeviceAddress,
        from: DeviceAddress,
        bytes: usize,
    ) -> Result<(), CallError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.fetch_all(stream, &[Piece { to, from, bytes }]) }
    }

    /// Copies a part of every piece of a list, in one direction, by the copy kernel.
    ///
    /// # Errors
    /// Fails if the kernel cannot be launched.
    ///
    /// # Safety
    /// Same as for [`Driver::fetch`], for the list and all memory that it names.
    unsafe fn copy_by_kernel(
        &self,
        stream: Stream,
        direction: CopyDirection,
        list: PairList,
        part: Part,
    ) -> Result<(), CallError>;

    /// Copies pieces in one batch of the copy engines: `to`, `from` and `bytes` have equal lengths.
    /// The call may take as long as the copies.
    ///
    /// # Errors
    /// Fails if the batch cannot be launched.
    ///
    /// # Safety
    /// Same as for [`Driver::fetch`], for all pieces.
    unsafe fn copy_by_batch(
        &self,
        stream: Stream,
        to: &mut [DeviceAddress],
        from: &mut [DeviceAddress],
        bytes: &mut [usize],
    ) -> Result<(), CallError>;

    /// Computes the [`checksum`](crate::canary::checksum) of device memory: the n-th of `sums`, 8
    /// bytes each, is that of the `bytes` bytes at the first address of the n-th pair of the list.
    ///
    /// # Errors
    /// Fails if the kernel cannot be launched.
    ///
    /// # Safety
    /// Same as for [`Driver::fetch`], for the list, the first address of each pair, and the sums.
    unsafe fn checksums(
        &self,
        stream: Stream,
        list: PairList,
        bytes: usize,
        sums: DeviceAddress,
    ) -> Result<(), CallError>;
}
