//! Checks that the kernel compiler accepts every kernel. Needs no GPU.

use std::path::Path;

use terrace_cuda::model::kernels;
use terrace_cuda::{CudaError, nvrtc};
use terrace_model::{Rope, Scaling, Shape};

/// Environment variable with the folder of CUDA's headers, for kernels that need them.
const HEADERS_VARIABLE: &str = "TERRACE_CUDA_HEADERS";

/// Ampere is the oldest architecture that serves models in bf16; Hopper and Blackwell are the usual
/// ones.
const CAPABILITIES: [u32; 3] = [80, 90, 100];

fn assert_compiles(name: &str, source: &str, options: &[String]) {
    for capability in CAPABILITIES {
        let image = nvrtc::compile(name, source, capability, options);
        let image = image.unwrap_or_else(|error| panic!("{options:?}: {error}"));
        assert!(image.starts_with(b"\x7fELF"), "{name} is what the driver loads");
    }
}

/// Kernels that are compiled separately. All others are parts of the model's source.
#[test]
#[ignore = "needs NVRTC: scripts/test-cuda installs it"]
fn every_kernel_compiles() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let headers = std::env::var(HEADERS_VARIABLE);
    let options: Vec<String> =
        headers.iter().map(|folder| format!("--include-path={folder}")).collect();
    let (mut alone, model) = (Vec::new(), kernels::source());
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "cu") {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        if !model.contains(&source) {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            assert_compiles(&name, &source, &options);
            alone.push(name);
        }
    }
    assert_eq!(alone, ["copy.cu"]);
}

#[test]
#[ignore = "needs NVRTC: scripts/test-cuda installs it"]
fn model_kernels_compile_for_many_shapes() {
    // Elements of a head, heads, KV heads, and tokens of a page: usual values, those with Hopper
    // kernels, and unusual ones.
    let sizes = [(128, 28, 4, 64), (64, 14, 2, 16), (16, 4, 4, 1), (96, 32, 32, 8)];
    for (head_dim, heads, kv_heads, page_size) in sizes {
        let shape = Shape {
            vocabulary: 1_000,
            dim: heads * head_dim,
            layers: 2,
            heads,
            kv_heads,
            head_dim,
            hidden: 1_024,
            norm_epsilon: 1e-5,
            positions_max: 4_096,
            rope: Rope { theta: 10_000.0, scaling: Scaling::None },
            qkv_bias: true,
            qk_norm: false,
            tied: false,
        };
        let definitions = kernels::definitions(&shape, page_size, kernels::SEGMENT, 132);
        assert_compiles("model.cu", &kernels::source(), &definitions);
    }
}

#[test]
#[ignore = "needs NVRTC: scripts/test-cuda installs it"]
fn compile_error_includes_the_log() {
    let source = "extern \"C\" __global__ void wrong() { int x = nobody; }";
    let error = nvrtc::compile("wrong.cu", source, 90, &[]).unwrap_err();
    let CudaError::Compile { .. } = &error else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.starts_with("wrong.cu could not be compiled for sm_90"), "{text}");
    assert!(text.contains("wrong.cu(1)") && text.contains("\"nobody\" is undefined"), "{text}");
}

/// Without a driver, a program with this crate starts and reports what is missing.
#[test]
fn error_without_a_gpu_states_the_remedy() {
    match terrace_cuda::Context::open(u32::MAX) {
        Ok(context) => panic!("there is no GPU with that number: {context:?}"),
        Err(CudaError::NoDriver | CudaError::NoGpu | CudaError::DriverTooOld { .. }) => {}
        Err(CudaError::NoSuchGpu { ordinal, count }) => {
            assert!(ordinal >= count, "{ordinal} of {count}");
        }
        Err(other) => panic!("{other}"),
    }
}
