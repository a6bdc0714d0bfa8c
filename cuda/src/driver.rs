//! The seam to CUDA: what the device asks of it. The real driver is in `real.rs`; tests have one that runs on
//! threads, delays and fails (`fake.rs`).

#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

use terrace_scheduler::CopyDirection;

/// An address that the device understands: of its own memory, or of pinned host memory as it sees that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// So many bytes further.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A queue of work that is done in order: for the real driver, a `CUstream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// A point in a stream: for the real driver, a `CUevent`. Recording it again makes it another point; whoever was
/// told to wait for it before waits for the point that it was then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// Who goes first where streams want the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Copies, which should not hold up steps.
    Low,
    /// Steps.
    High,
}

/// What an event is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// To be waited for, by streams and by threads that sleep meanwhile.
    Order,
    /// To tell how long something took.
    Time,
}

/// Memory of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes that nobody has.
    pub free: usize,
    /// All bytes.
    pub total: usize,
}

/// A list of pairs of addresses in the device's own memory, each of 16 bytes: where pieces go and where they come
/// from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairList {
    /// Where the list is.
    pub at: DeviceAddress,
    /// How many pairs it has.
    pub pairs: u32,
}

/// A part of every piece of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where it begins, from the addresses in the list.
    pub offset: usize,
    /// How long it is.
    pub bytes: usize,
}

/// A piece of memory to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it goes.
    pub to: DeviceAddress,
    /// Where it comes from.
    pub from: DeviceAddress,
    /// How long it is.
    pub bytes: usize,
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {text}")]
pub struct CallError {
    /// Which call.
    pub call: &'static str,
    /// What kind of failure it is.
    pub kind: CallErrorKind,
    /// What the driver says of it.
    pub text: String,
}

/// What follows from a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallErrorKind {
    /// There is not enough memory; everything else goes on.
    OutOfMemory,
    /// Anything else: nothing more is to be expected of the device.
    Other,
}

/// What the device needs of CUDA. Every thread that calls it calls [`Driver::bind_thread`] first.
///
/// Work is handed to streams and done later. Whoever hands it over sees to it that memory stays what it is until
/// the work has been done: that is what the calls which touch memory are unsafe for.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Prepares the calling thread for other calls.
    ///
    /// # Errors
    /// When the device is lost.
    fn bind_thread(&self) -> Result<(), CallError>;

    /// Checks whether the device still works. A failure that lasts is returned by every later call.
    ///
    /// # Errors
    /// When the device is lost.
    fn check(&self) -> Result<(), CallError>;

    /// How much memory there is.
    ///
    /// # Errors
    /// When the device is lost.
    fn memory(&self) -> Result<DeviceMemory, CallError>;

    /// Takes memory of the device.
    ///
    /// # Errors
    /// When there is not so much.
    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CallError>;

    /// Gives memory of the device back.
    ///
    /// # Safety
    /// It comes from [`Driver::allocate`], and no work that is still to be done touches it.
    unsafe fn free(&self, at: DeviceAddress);

    /// Pins host memory, so that the device can reach it. Returns where it sees it.
    ///
    /// # Errors
    /// When there is not so much to be pinned, or it is pinned already.
    ///
    /// # Safety
    /// The bytes are mapped until [`Driver::unpin`] is called.
    unsafe fn pin(&self, base: NonNull<u8>, bytes: usize) -> Result<DeviceAddress, CallError>;

    /// Lets go of pinned memory.
    ///
    /// # Safety
    /// It was pinned, and no work that is still to be done touches it.
    unsafe fn unpin(&self, base: NonNull<u8>);

    /// A new stream.
    ///
    /// # Errors
    /// When the device is lost.
    fn create_stream(&self, priority: Priority) -> Result<Stream, CallError>;

    /// Ends a stream, of which nobody has any more use.
    fn destroy_stream(&self, stream: Stream);

    /// Waits until all has been done that was handed to a stream.
    ///
    /// # Errors
    /// When something of it failed.
    fn drain(&self, stream: Stream) -> Result<(), CallError>;

    /// A new event.
    ///
    /// # Errors
    /// When the device is lost.
    fn create_event(&self, kind: EventKind) -> Result<Event, CallError>;

    /// Two events that tell the time between them.
    ///
    /// # Errors
    /// When the device is lost.
    fn create_times(&self) -> Result<[Event; 2], CallError> {
        let begin = self.create_event(EventKind::Time)?;
        let end = self.create_event(EventKind::Time);
        Ok([begin, end.inspect_err(|_| self.destroy_event(begin))?])
    }

    /// Ends an event, of which nobody has any more use.
    fn destroy_event(&self, event: Event);

    /// Makes an event the point in a stream behind all that was handed to it.
    ///
    /// # Errors
    /// When the device is lost.
    fn record(&self, event: Event, stream: Stream) -> Result<(), CallError>;

    /// What is handed to a stream from here on is done behind the event.
    ///
    /// # Errors
    /// When the device is lost.
    fn wait(&self, stream: Stream, event: Event) -> Result<(), CallError>;

    /// Whether the event is passed.
    ///
    /// # Errors
    /// When something before it failed.
    fn is_passed(&self, event: Event) -> Result<bool, CallError>;

    /// The calling thread sleeps until the event is passed.
    ///
    /// # Errors
    /// When something before it failed.
    fn sleep_until(&self, event: Event) -> Result<(), CallError>;

    /// The time between two events that tell it and are passed.
    ///
    /// # Errors
    /// When they are not.
    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CallError>;

    /// Copies a few pieces at once by a small kernel, which needs no copy engine.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// Both sides of each are memory that the device can reach, and stay so until it has been done; no piece goes where
    /// another one goes or comes from.
    unsafe fn fetch_all(&self, stream: Stream, pieces: &[Piece]) -> Result<(), CallError>;

    /// Copies one piece like that.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// Both sides are memory that the device can reach, and stay so until it has been done.
    unsafe fn fetch(
        &self,
        stream: Stream,
        to: DeviceAddress,
        from: DeviceAddress,
        bytes: usize,
    ) -> Result<(), CallError> {
        // SAFETY: as the caller says.
        unsafe { self.fetch_all(stream, &[Piece { to, from, bytes }]) }
    }

    /// Copies a part of every piece of a list by the copy kernel; all go in one direction.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// As for [`Driver::fetch`], for the list and for all that it names.
    unsafe fn copy_by_kernel(
        &self,
        stream: Stream,
        direction: CopyDirection,
        list: PairList,
        part: Part,
    ) -> Result<(), CallError>;

    /// Copies pieces in one batch of the copy engines: `to`, `from` and `bytes` are equally long. The call may take as
    /// long as the copies do.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// As for [`Driver::fetch`], for all pieces.
    unsafe fn copy_by_batch(
        &self,
        stream: Stream,
        to: &mut [DeviceAddress],
        from: &mut [DeviceAddress],
        bytes: &mut [usize],
    ) -> Result<(), CallError>;

    /// Computes [`checksum`](crate::canary::checksum) of memory of the device: the n-th of `sums`, 8 bytes each, is that of the
    /// `bytes` bytes at the first address of the n-th pair of the list.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// As for [`Driver::fetch`], for the list, for what it names first, and for the sums.
    unsafe fn checksums(
        &self,
        stream: Stream,
        list: PairList,
        bytes: usize,
        sums: DeviceAddress,
    ) -> Result<(), CallError>;
}
