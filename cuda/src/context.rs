//! The context of an open GPU.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use parking_lot::{Condvar, Mutex};

use crate::driver::{CallError, CallErrorKind, DeviceAddress, DeviceMemory, Priority, Stream};
use crate::error::CudaError;

/// Minimum CUDA version of the driver: 13.0.
const VERSION_MIN: i32 = 13_000;

/// Number of contexts that are open in the process.
static OPEN: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Waits until the process has closed all GPU contexts, and returns whether it has. A program must
/// do so before it exits: engines close their contexts on background threads, and driver calls
/// during the driver's unloading are undefined.
pub fn wait_until_closed(patience: Duration) -> bool {
    let (open, changed) = &OPEN;
    let (mut open, until) = (open.lock(), Instant::now() + patience);
    while *open > 0 {
        if changed.wait_until(&mut open, until).timed_out() {
            return *open == 0;
        }
    }
    true
}

/// A GPU of this machine and its primary context, which the whole process shares. Dropping it
/// releases the context.
#[derive(Debug)]
pub struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    capability: u32,
}

// SAFETY: a context may be used by any number of threads at once; it is only a handle here.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a GPU and binds the calling thread to it.
    ///
    /// # Errors
    /// Fails if there is no driver, the driver is too old, or the GPU does not exist.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        // SAFETY: loading the driver's library runs no code of it but its own initialisation.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let version = driver_version()?;
        if version < VERSION_MIN {
            return Err(CudaError::DriverTooOld { version });
        }
        match result::init() {
            Err(result::DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
                return Err(CudaError::NoGpu);
            }
            other => call("cuInit", other)?,
        }
        let count = call("cuDeviceGetCount", result::device::get_count())?.cast_unsigned();
        if count == 0 {
            return Err(CudaError::NoGpu);
        }
        if ordinal >= count {
            return Err(CudaError::NoSuchGpu { ordinal, count });
        }
        let device = call("cuDeviceGet", result::device::get(ordinal.cast_signed()))?;
        let name = call("cuDeviceGetName", result::device::get_name(device))?;
        let attribute = |which| {
            // SAFETY: the device exists.
            call("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, which) })
        };
        let major =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor =
            attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let capability = (10 * major + minor).cast_unsigned();
        // SAFETY: the device exists, and the context is released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) };
        let context = call("cuDevicePrimaryCtxRetain", context)?;
        let context = Arc::new(Self { device, context, name, capability });
        *OPEN.0.lock() += 1;
        context.bind()?;
        Ok(context)
    }

    /// Makes this context current for the calling thread.
    ///
    /// # Errors
    /// Fails if the GPU is lost.
    pub fn bind(&self) -> Result<(), CallError> {
        // SAFETY: the context is kept as long as `self`.
        call("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }

    /// Returns the name of the GPU.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the compute capability: 90 is 9.0.
    #[must_use]
    pub fn capability(&self) -> u32 {
        self.capability
    }

    /// Returns the device handle, for other driver calls.
    #[must_use]
    pub fn device(&self) -> sys::CUdevice {
        self.device
    }

    /// Returns the CUDA version of the driver: 13,010 is 13.1.
    ///
    /// # Errors
    /// Fails if the driver does not report it.
    pub fn driver_version(&self) -> Result<i32, CallError> {
        driver_version()
    }

    /// Returns the number of multiprocessors.
    ///
    /// # Errors
    /// Fails if the GPU is lost.
    pub fn multiprocessors(&self) -> Result<u32, CallError> {
        self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
    }

    /// Returns the largest shared memory of a block, in bytes.
    ///
    /// # Errors
    /// Fails if the GPU is lost.
    pub fn block_shared_bytes(&self) -> Result<u32, CallError> {
        use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        self.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<u32, CallError> {
        // SAFETY: the device exists.
        let value = unsafe { result::device::get_attribute(self.device, which) };
        call("cuDeviceGetAttribute", value).map(i32::cast_unsigned)
    }

    /// Returns the free and total memory.
    ///
    /// # Errors
    /// Fails if the GPU is lost.
    pub fn memory(&self) -> Result<DeviceMemory, CallError> {
        self.bind()?;
        let (free, total) = call("cuMemGetInfo", result::mem_get_info())?;
        Ok(DeviceMemory { free, total })
    }

    /// Waits until the GPU is idle, and reads its memory, for inspection.
    ///
    /// # Errors
    /// Fails if submitted work failed or the memory does not exist.
    pub fn read(&self, from: DeviceAddress, to: &mut [u8]) -> Result<(), CallError> {
        self.bind()?;
        call("cuCtxSynchronize", result::ctx::synchronize())?;
        // SAFETY: the driver rejects addresses outside device memory.
        call("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(to, from.0) })
    }

    /// Creates a stream that does not synchronise with the default stream. [`Priority::Low`], for
    /// copies, is CUDA's default priority; steps use [`Priority::High`].
    ///
    /// # Errors
    /// Fails if the GPU is lost.
    pub fn create_stream(&self, priority: Priority) -> Result<Stream, CallError> {
        self.bind()?;
        let range = result::stream::get_priority_range();
        let (least, greatest) = call("cuCtxGetStreamPriorityRange", range)?;
        let priority = match priority {
            Priority::Low => least,
            Priority::High => greatest,
        };
        let kind = result::stream::StreamKind::NonBlocking;
        let stream = result::stream::create_with_priority(kind, priority);
        call("cuStreamCreateWithPriority", stream).map(Stream::from)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
        *OPEN.0.lock() -= 1;
        OPEN.1.notify_all();
    }
}

impl From<sys::CUstream> for Stream {
    fn from(stream: sys::CUstream) -> Self {
        Self(stream.expose_provenance() as u64)
    }
}

impl Stream {
    /// Returns CUDA's handle.
    #[must_use]
    pub fn raw(self) -> sys::CUstream {
        std::ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

fn driver_version() -> Result<i32, CallError> {
    let mut version = 0;
    // SAFETY: it writes one number, and may be called before anything else.
    let told = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    call("cuDriverGetVersion", told.result()).map(|()| version)
}

/// Adds the name of the call to a failure.
pub(crate) fn call<T>(
    call: &'static str,
    result: Result<T, result::DriverError>,
) -> Result<T, CallError> {
    result.map_err(|error| {
        let kind = match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => CallErrorKind::OutOfMemory,
            _ => CallErrorKind::Other,
        };
        let words = error.error_string().map(|text| text.to_string_lossy().into_owned());
        let text = match words {
            Ok(words) => format!("{words} ({:?})", error.0),
            Err(_) => format!("{:?}", error.0),
        };
        CallError { call, kind, text }
    })
}
