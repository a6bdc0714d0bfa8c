//! What can go wrong with CUDA, and what to do about it.

use std::io;

use crate::driver::CallError;

/// CUDA cannot be used, or what was asked of it did not work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "NVIDIA's driver library (libcuda.so.1) was not found: install the driver, version 580 or \
         later; start a container with its GPUs (docker run --gpus all)"
    )]
    NoDriver,
    /// The driver does not know what is needed of it.
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
    /// There are GPUs, but not this one.
    #[error(
        "there is no GPU {ordinal}: there are {count}, counted from 0 (CUDA_VISIBLE_DEVICES may hide others)"
    )]
    NoSuchGpu {
        /// The one that was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// There is no compiler for kernels.
    #[error(
        "the kernel compiler (NVRTC, libnvrtc.so.13) was not found: install it (package \
         cuda-nvrtc-13-0, or nvidia-cuda-nvrtc from PyPI) and add its folder to LD_LIBRARY_PATH, \
         or set TERRACE_NVRTC to the file{}",
        .tried.as_ref().map(|why| format!(" ({why})")).unwrap_or_default()
    )]
    NoNvrtc {
        /// What came of trying the file that TERRACE_NVRTC names.
        tried: Option<String>,
    },
    /// There is no library for matrix products.
    #[error(
        "the library for matrix products (cuBLASLt, libcublasLt.so.13) was not found: install it \
         (package libcublas-13-0, or nvidia-cublas from PyPI) and add its folder to \
         LD_LIBRARY_PATH"
    )]
    NoCublas,
    /// A model that the kernels cannot compute.
    #[error("{0}; run this model on the CPU: leave out --device cuda")]
    Unsupported(String),
    /// A kernel was not compiled.
    #[error("{kernel} could not be compiled for {architecture}: {log}")]
    Compile {
        /// Its file.
        kernel: String,
        /// What for.
        architecture: String,
        /// What the compiler says.
        log: String,
    },
    /// The device has not so much memory.
    #[error(
        "the GPU has no room for {pages} pages of {page_bytes} bytes ({} MiB): {} of {} MiB are \
         free. Use fewer device pages, or stop other processes that use the GPU", mebibytes(*.pages, *.page_bytes), .free >> 20, .total >> 20
    )]
    OutOfDeviceMemory {
        /// Pages that were asked for.
        pages: u32,
        /// Bytes of each.
        page_bytes: usize,
        /// Bytes that are free on the device.
        free: usize,
        /// Bytes that the device has.
        total: usize,
    },
    /// Host memory cannot be pinned.
    #[error(
        "{} MiB of host memory could not be pinned for the GPU ({source}): use fewer host pages, \
         free some memory, or raise the limit of locked memory (ulimit -l)", .bytes >> 20
    )]
    NotPinned {
        /// How many bytes were asked for.
        bytes: usize,
        /// What the driver says.
        source: CallError,
    },
    /// There is no room for host pages.
    #[error("there is no address space for host pages: {0}")]
    HostMemory(#[source] io::Error),
    /// Something that cannot work was asked for.
    #[error("{0}")]
    Config(&'static str),
    /// A fence that was never recorded: nothing can be known of what lies before it.
    #[error(
        "a copy or step waits for a step that was never launched on the GPU; its data cannot be \
         trusted"
    )]
    NeverRecorded,
    /// A load-back that a step waits for did not come.
    #[error(transparent)]
    Copy(#[from] terrace_engine::CopyError),
    /// A thread could not be started.
    #[error("cannot start a thread for copies: {0}")]
    Thread(#[source] io::Error),
    /// A call failed.
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
    fn errors_say_what_there_is_and_what_to_do() {
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
