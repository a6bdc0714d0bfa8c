//! Errors of the CUDA device, with remedies.

use std::io;

use crate::driver::CallError;

/// A failure of CUDA or of its setup.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "NVIDIA's driver library (libcuda.so.1) was not found: install the driver, version 580 or \
         later; start a container with its GPUs (docker run --gpus all)"
    )]
    NoDriver,
    /// The driver is too old.
    #[error(
        "NVIDIA's driver supports CUDA {}.{}, but CUDA 13.0 is needed: install driver version 580 \
         or later", .version / 1000, .version % 1000 / 10
    )]
    DriverTooOld {
        /// 1,000 times the major version plus 10 times the minor.
        version: i32,
    },
    /// There is a driver and no GPU.
    #[error(
        "NVIDIA's driver finds no GPU: check that `nvidia-smi` lists one, and that \
         CUDA_VISIBLE_DEVICES, if set, selects one"
    )]
    NoGpu,
    /// The requested GPU does not exist.
    #[error(
        "there is no GPU {ordinal}: there are {count}, counted from 0 (CUDA_VISIBLE_DEVICES may hide others)"
    )]
    NoSuchGpu {
        /// Number of the requested GPU.
        ordinal: u32,
        /// Number of GPUs.
        count: u32,
    },
    /// The kernel compiler is missing.
    #[error(
        "the kernel compiler (NVRTC, libnvrtc.so.13) was not found: install it (package \
         cuda-nvrtc-13-0, or nvidia-cuda-nvrtc from PyPI) and add its folder to LD_LIBRARY_PATH, \
         or set TERRACE_NVRTC to the file{}",
        .tried.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
    )]
    NoNvrtc {
        /// Error of loading the file that TERRACE_NVRTC names, if set.
        tried: Option<String>,
    },
    /// The library for matrix products is missing.
    #[error(
        "the library for matrix products (cuBLASLt, libcublasLt.so.13) was not found: install it \
         (package libcublas-13-0, or nvidia-cublas from PyPI) and add its folder to \
         LD_LIBRARY_PATH"
    )]
    NoCublas,
    /// The kernels do not support the model.
    #[error("{0}; run this model on the CPU: leave out --device cuda")]
    Unsupported(String),
    /// A kernel does not compile.
    #[error("{kernel} could not be compiled for {architecture}: {log}")]
    Compile {
        /// Kernel file.
        kernel: String,
        /// Target architecture.
        architecture: String,
        /// Log of the compiler.
        log: String,
    },
    /// Device memory is short.
    #[error(
        "the GPU has no room for {pages} pages of {page_bytes} bytes ({} MiB): {} of {} MiB are \
         free. Use fewer device pages, or stop other processes that use the GPU", mebibytes(*.pages, *.page_bytes), .free >> 20, .total >> 20
    )]
    OutOfDeviceMemory {
        /// Requested pages.
        pages: u32,
        /// Bytes of a page.
        page_bytes: usize,
        /// Free bytes on the device.
        free: usize,
        /// Total bytes on the device.
        total: usize,
    },
    /// Host memory cannot be pinned.
    #[error(
        "{} MiB of host memory could not be pinned for the GPU ({source}): use fewer host pages, \
         free some memory, or raise the limit of locked memory (ulimit -l)", .bytes >> 20
    )]
    NotPinned {
        /// Requested bytes.
        bytes: usize,
        /// Error of the driver.
        source: CallError,
    },
    /// Host memory for pages cannot be allocated.
    #[error("there is no address space for host pages: {0}")]
    HostMemory(#[source] io::Error),
    /// The configuration is invalid.
    #[error("{0}")]
    Config(&'static str),
    /// A fence was never recorded, so the state before it is unknown.
    #[error(
        "a copy or step waits for a step that was never launched on the GPU; its data cannot be \
         trusted"
    )]
    NeverRecorded,
    /// A load-back that a step waits for failed.
    #[error(transparent)]
    Copy(#[from] terrace_engine::CopyError),
    /// A thread could not be started.
    #[error("cannot start a thread for copies: {0}")]
    Thread(#[source] io::Error),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

fn mebibytes(pages: u32, page_bytes: usize) -> usize {
    (pages as usize).saturating_mul(page_bytes) >> 20
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_state_the_value_and_the_remedy() {
        let memory = CudaError::OutOfDeviceMemory {
            pages: 100_000,
            page_bytes: 2 << 20,
            free: 100 << 30,
            total: 139 << 30,
        };
        assert_eq!(
            memory.to_string(),
            "the GPU has no room for 100000 pages of 2097152 bytes (200000 MiB): 102400 of 142336 MiB are free. Use \
             fewer device pages, or stop other processes that use the GPU"
        );
        let driver = CudaError::DriverTooOld { version: 12_080 };
        assert!(driver.to_string().contains("supports CUDA 12.8, but"), "{driver}");
        let nvrtc = CudaError::NoNvrtc { tried: Some("x.so: no such file".to_owned()) };
        assert!(
            nvrtc.to_string().ends_with("TERRACE_NVRTC to the file (x.so: no such file)"),
            "{nvrtc}"
        );
    }
}
