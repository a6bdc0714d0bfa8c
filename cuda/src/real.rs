//! The real CUDA driver.

#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};
use terrace_scheduler::CopyDirection;

use crate::context::{Context, call};
use crate::driver::{
    CallError, CallErrorKind, DeviceAddress, DeviceMemory, Driver, Event, EventKind, PairList,
    Part, Piece, Priority, Stream,
};
use crate::error::CudaError;
use crate::nvrtc;

/// Source of the copy and checksum kernels.
const KERNELS: &str = include_str!("../kernels/copy.cu");
/// Number of blocks: enough threads to saturate the link, in small blocks that fit on a
/// multiprocessor beside those of steps. While both directions are in use, reads from the host get
/// less of the link than writes. More reads in flight make both together faster.
const TO_DEVICE_BLOCKS: u32 = 64;
const TO_HOST_BLOCKS: u32 = 16;
const COPY_THREADS: u32 = 256;
/// Pieces that `fetch` copies at once; must match the kernel's list.
const FETCHED_MAX: usize = 8;
/// Largest block.
const BLOCK_THREADS: u32 = 1024;
/// Enough threads to read memory at full speed; must match the kernel's shared memory.
const CHECKSUM_THREADS: u32 = 256;

/// A GPU, with the kernels for copies.
#[derive(Debug)]
pub(crate) struct RealDriver {
    context: Arc<Context>,
    module: sys::CUmodule,
    fetch: sys::CUfunction,
    copy_parts: sys::CUfunction,
    checksums: sys::CUfunction,
}

// SAFETY: driver calls may come from any thread, and the handles stored here never change.
unsafe impl Send for RealDriver {}
// SAFETY: as above.
unsafe impl Sync for RealDriver {}

impl RealDriver {
    /// Compiles and loads the kernels.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let image = nvrtc::compile("copy.cu", KERNELS, context.capability(), &[])?;
        // SAFETY: the image is whole, as the compiler has written it, and is copied by the call.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let module = call("cuModuleLoadData", module)?;
        let function = |name| {
            // SAFETY: the module is loaded, and unloaded when this is dropped.
            let function = unsafe { result::module::get_function(module, name) };
            call("cuModuleGetFunction", function)
        };
        let name = |name: &std::ffi::CStr| name.to_owned();
        let copy_parts = function(name(c"copy_parts"))?;
        // A multiprocessor's shared memory is divided as steps need it; otherwise their blocks and
        // these could not run together.
        let divided = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function exists.
        let set = unsafe { sys::cuFuncSetAttribute(copy_parts, divided, 100) };
        call("cuFuncSetAttribute", set.result())?;
        Ok(Self {
            context: context.clone(),
            module,
            fetch: function(name(c"fetch"))?,
            copy_parts,
            checksums: function(name(c"checksums"))?,
        })
    }

    /// # Safety
    /// The parameters must match the kernel's in order and type. Memory that they name must be
    /// accessible to the device until the kernel is done.
    unsafe fn launch(
        &self,
        function: sys::CUfunction,
        (blocks, threads): (u32, u32),
        stream: Stream,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CallError> {
        let (grid, block) = ((blocks, 1, 1), (threads, 1, 1));
        // SAFETY: guaranteed by the caller; the function belongs to a module that is loaded.
        let launched =
            unsafe { result::launch_kernel(function, grid, block, 0, stream.raw(), parameters) };
        call("cuLaunchKernel", launched)
    }
}

impl Drop for RealDriver {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: launched kernels have ended before the driver is dropped.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

impl Driver for RealDriver {
    fn bind_thread(&self) -> Result<(), CallError> {
        self.context.bind()
    }

    fn check(&self) -> Result<(), CallError> {
        /// The stream of the calling thread (`CU_STREAM_PER_THREAD`), in which nothing runs.
        const OF_THREAD: Stream = Stream(2);
        // SAFETY: the stream always exists, and the call only queries it.
        match unsafe { sys::cuStreamQuery(OF_THREAD.raw()) }.result() {
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {}
            other => call("cuStreamQuery", other)?,
        }
        self.memory().map(drop)
    }

    fn memory(&self) -> Result<DeviceMemory, CallError> {
        self.context.memory()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CallError> {
        // SAFETY: the memory is new.
        let at = call("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?;
        // Zeroed, because kernels read bytes before they write them, such as the rest of a box of
        // tokens, and must get the same value each time. SAFETY: the memory has that size. The
        // stream is that of the call before, whose end other streams do not wait for.
        let cleared =
            call("cuMemsetD8", unsafe { result::memset_d8_sync(at, 0, bytes) }).and_then(|()| {
                // SAFETY: as above.
                let ended = unsafe { result::stream::synchronize(std::ptr::null_mut()) };
                call("cuStreamSynchronize", ended)
            });
        let at = DeviceAddress(at);
        // SAFETY: it was not used yet.
        cleared.map(|()| at).inspect_err(|_| unsafe { self.free(at) })
    }

    unsafe fn free(&self, at: DeviceAddress) {
        // SAFETY: guaranteed by the caller.
        let freed = call("cuMemFree", unsafe { result::free_sync(at.0) });
        warn_of(freed);
    }

    unsafe fn pin(&self, base: NonNull<u8>, bytes: usize) -> Result<DeviceAddress, CallError> {
        let at = base.as_ptr().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller says that the bytes are mapped until they are unpinned.
        let pinned = unsafe { sys::cuMemHostRegister_v2(at, bytes, flags) };
        call("cuMemHostRegister", pinned.result())?;
        let mut seen = 0;
        // SAFETY: the memory is registered, and the call writes one address.
        let told = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut seen, at, 0) };
        call("cuMemHostGetDevicePointer", told.result())
            .map(|()| DeviceAddress(seen))
            // SAFETY: it was not used yet.
            .inspect_err(|_| unsafe { self.unpin(base) })
    }

    unsafe fn unpin(&self, base: NonNull<u8>) {
        // SAFETY: guaranteed by the caller.
        let unpinned = unsafe { sys::cuMemHostUnregister(base.as_ptr().cast()) };
        warn_of(call("cuMemHostUnregister", unpinned.result()));
    }

    fn create_stream(&self, priority: Priority) -> Result<Stream, CallError> {
        self.context.create_stream(priority)
    }

    fn destroy_stream(&self, stream: Stream) {
        // SAFETY: the owner of the stream gives it up.
        warn_of(call("cuStreamDestroy", unsafe { result::stream::destroy(stream.raw()) }));
    }

    fn drain(&self, stream: Stream) -> Result<(), CallError> {
        // SAFETY: the stream exists as long as its owner uses it.
        call("cuStreamSynchronize", unsafe { result::stream::synchronize(stream.raw()) })
    }

    fn create_event(&self, kind: EventKind) -> Result<Event, CallError> {
        let flags = match kind {
            EventKind::Order => {
                sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32
                    | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            }
            EventKind::Time => sys::CUevent_flags::CU_EVENT_DEFAULT as u32,
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: it writes one handle.
        call("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) }.result())?;
        Ok(Event(event.expose_provenance() as u64))
    }

    fn destroy_event(&self, event: Event) {
        // SAFETY: the owner of the event gives it up.
        warn_of(call("cuEventDestroy", unsafe { result::event::destroy(event.raw()) }));
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), CallError> {
        // SAFETY: both exist as long as their owners use them.
        call("cuEventRecord", unsafe { result::event::record(event.raw(), stream.raw()) })
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), CallError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as for recording.
        let waits = unsafe { result::stream::wait_event(stream.raw(), event.raw(), flags) };
        call("cuStreamWaitEvent", waits)
    }

    fn is_passed(&self, event: Event) -> Result<bool, CallError> {
        // SAFETY: as for recording.
        match unsafe { result::event::query(event.raw()) } {
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            other => call("cuEventQuery", other).map(|()| true),
        }
    }

    fn sleep_until(&self, event: Event) -> Result<(), CallError> {
        // SAFETY: as for recording.
        call("cuEventSynchronize", unsafe { result::event::synchronize(event.raw()) })
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CallError> {
        // SAFETY: as for recording.
        let elapsed = unsafe { result::event::elapsed(from.raw(), to.raw()) };
        let milliseconds = call("cuEventElapsedTime", elapsed)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }

    unsafe fn fetch_all(&self, stream: Stream, pieces: &[Piece]) -> Result<(), CallError> {
        for some in pieces.chunks(FETCHED_MAX) {
            let mut list = [[0_u64; 3]; FETCHED_MAX];
            for (entry, Piece { to, from, bytes }) in list.iter_mut().zip(some) {
                *entry = [to.0, from.0, *bytes as u64];
            }
            let shape = (some.len() as u32, BLOCK_THREADS);
            // SAFETY: `fetch` has one list of that length, and a block for each entry; the memory is the caller's promise.
            unsafe { self.launch(self.fetch, shape, stream, &mut [parameter(&mut list)])? };
        }
        Ok(())
    }

    unsafe fn copy_by_kernel(
        &self,
        stream: Stream,
        direction: CopyDirection,
        list: PairList,
        part: Part,
    ) -> Result<(), CallError> {
        let (mut at, mut pairs) = (list.at.0, list.pairs);
        let (mut offset, mut bytes) = (part.offset as u64, part.bytes as u64);
        let mut parameters = [
            parameter(&mut at),
            parameter(&mut pairs),
            parameter(&mut offset),
            parameter(&mut bytes),
        ];
        let blocks = match direction {
            CopyDirection::LoadBack => TO_DEVICE_BLOCKS,
            CopyDirection::WriteBack => TO_HOST_BLOCKS,
        };
        let shape = (blocks, COPY_THREADS);
        // SAFETY: `copy_parts` has the list, its length and two numbers; the memory is the caller's promise.
        unsafe { self.launch(self.copy_parts, shape, stream, &mut parameters) }
    }

    unsafe fn copy_by_batch(
        &self,
        stream: Stream,
        to: &mut [DeviceAddress],
        from: &mut [DeviceAddress],
        bytes: &mut [usize],
    ) -> Result<(), CallError> {
        let pieces = to.len();
        if from.len() != pieces || bytes.len() != pieces {
            let text = "the lists of a batch are not equally long".to_owned();
            return Err(CallError { call: "cuMemcpyBatchAsync", kind: CallErrorKind::Other, text });
        }
        let nowhere = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let order = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: order,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut first = 0;
        // SAFETY: three lists of `pieces` entries, of addresses that are numbers of 64 bits, and one attribute for all
        // from the first on; the lists are read during the call, and the memory is the caller's promise.
        let copied = unsafe {
            sys::cuMemcpyBatchAsync_v2(
                to.as_mut_ptr().cast(),
                from.as_mut_ptr().cast(),
                bytes.as_mut_ptr(),
                pieces,
                &raw mut attributes,
                &raw mut first,
                1,
                stream.raw(),
            )
        };
        call("cuMemcpyBatchAsync", copied.result())
    }

    unsafe fn checksums(
        &self,
        stream: Stream,
        list: PairList,
        bytes: usize,
        sums: DeviceAddress,
    ) -> Result<(), CallError> {
        let (mut at, mut bytes, mut sums) = (list.at.0, bytes as u64, sums.0);
        let mut parameters = [parameter(&mut at), parameter(&mut bytes), parameter(&mut sums)];
        let shape = (list.pairs, CHECKSUM_THREADS);
        // SAFETY: `checksums` has the list, a number and where the sums go, and a block for each pair; the memory is
        // the caller's promise.
        unsafe { self.launch(self.checksums, shape, stream, &mut parameters) }
    }
}

impl Event {
    /// Returns CUDA's handle.
    #[must_use]
    pub fn raw(self) -> sys::CUevent {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

fn parameter<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}

/// Logs a failed release. The resource leaks; a lost device is reported elsewhere.
fn warn_of(result: Result<(), CallError>) {
    if let Err(error) = result {
        tracing::warn!("{error}");
    }
}
