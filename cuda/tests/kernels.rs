//! Every kernel is accepted by the compiler that compiles it when a device is opened. It needs no GPU for that.

use std::path::Path;

use terrace_cuda::{CudaError, nvrtc};

/// Names a folder with CUDA's headers, for kernels that need some.
const HEADERS_VARIABLE: &str = "TERRACE_CUDA_HEADERS";

#[test]
#[ignore = "needs NVRTC: scripts/test-cuda installs it"]
fn every_kernel_can_be_compiled() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let headers = std::env::var(HEADERS_VARIABLE);
    let options: Vec<String> =
        headers.iter().map(|folder| format!("--include-path={folder}")).collect();
    let mut kernels = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "cu") {
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let source = std::fs::read_to_string(&path).unwrap();
        // Ampere is the oldest that serves models in bf16; Hopper and Blackwell are what they are served on.
        for capability in [80, 90, 100] {
            let image = nvrtc::compile(&name, &source, capability, &options);
            let image = image.unwrap_or_else(|error| panic!("{error}"));
            assert!(image.starts_with(b"\x7fELF"), "{name} is what the driver loads");
        }
        kernels += 1;
    }
    assert!(kernels > 0, "there are kernels");
}

#[test]
#[ignore = "needs NVRTC: scripts/test-cuda installs it"]
fn what_the_compiler_says_of_a_mistake_is_told() {
    let source = "extern \"C\" __global__ void wrong() { int x = nobody; }";
    let error = nvrtc::compile("wrong.cu", source, 90, &[]).unwrap_err();
    let CudaError::Compile { .. } = &error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.starts_with("wrong.cu could not be compiled for sm_90"), "{text}");
    assert!(text.contains("wrong.cu(1)") && text.contains("\"nobody\" is undefined"), "{text}");
}

/// On a machine without a driver, a program with this crate in it says what is missing.
#[test]
fn without_a_gpu_the_error_says_what_to_do() {
    match terrace_cuda::Context::open(u32::MAX) {
        Ok(context) => panic!("there is no GPU with that number: {context:?}"),
        Err(CudaError::NoDriver | CudaError::NoGpu | CudaError::DriverTooOld { .. }) => {}
        Err(CudaError::NoSuchGpu { ordinal, count }) => {
            assert!(ordinal >= count, "{ordinal} of {count}");
        }
        Err(other) => panic!("{other}"),
    }
}
