//! The model's kernels: compiled for its shape and the GPU, and launched.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use cudarc::driver::{result, sys};
use smallvec::SmallVec;
use terrace_model::Shape;

use super::plain::Pages;
use crate::context::{Context, call};
use crate::driver::{CallError, DeviceAddress, Stream};
use crate::error::CudaError;
use crate::memory::CudaMemory;
use crate::nvrtc;

/// Sources, concatenated in this order.
const SOURCES: [&str; 7] = [
    include_str!("../../kernels/common.cu"),
    include_str!("../../kernels/layers.cu"),
    include_str!("../../kernels/attention.cu"),
    include_str!("../../kernels/sample.cu"),
    include_str!("../../kernels/hopper_instructions.cu"),
    include_str!("../../kernels/hopper.cu"),
    include_str!("../../kernels/few_rows.cu"),
];

/// Keys of a tile of attention.
pub(super) const TILE: usize = 64;
/// Keys after which the softmax restarts, by default.
pub const SEGMENT: u32 = 1024;
/// Rows (query heads of tokens) that one block of `attend` computes.
pub(super) const ROWS: usize = 128;
/// Rows that one block of `attend_few` computes.
pub(super) const FEW_ROWS: usize = 16;
/// Tiles of `attend` and `attend_few` in shared memory, keys and values each.
const STAGES: usize = 2;
const FEW_STAGES: usize = 3;
/// Tiles in shared memory on Hopper, keys or values.
const HOPPER_PLACES: usize = 8;
const FEW_HOPPER_PLACES: usize = 3;
/// Resident blocks of a multiprocessor: while some compute, tiles of others are loaded.
pub(super) const FEW_HOPPER_BLOCKS: usize = 4;
/// Threads of `join`, which joins rows of many sequences at once, and its blocks for each
/// multiprocessor.
const JOIN_THREADS: usize = 256;
pub(super) const JOIN_BLOCKS: usize = 4;
/// Threads of a product of few rows, and shared memory of its block.
const FEW_ROWS_THREADS: usize = 192;
const FEW_ROWS_BYTES: usize = 216 << 10;
/// Shared memory of the sampling kernel: bins and a list of candidates.
const SELECTION_BYTES: usize = 2048 * 8 * 3 + 34 * 8 + 16;

/// Returns the source of all kernels.
pub fn source() -> String {
    SOURCES.concat()
}

/// Returns the definitions for the model and the GPU.
pub fn definitions(
    shape: &Shape,
    page_size: u32,
    segment: u32,
    multiprocessors: u32,
) -> Vec<String> {
    let tiles = Tiles::new(shape, multiprocessors);
    let all = [
        ("DIM", shape.dim),
        ("HEAD_DIM", shape.head_dim),
        ("KV_HEADS", shape.kv_heads),
        ("GROUP", shape.group()),
        ("PAGE_SIZE", page_size as usize),
        ("SEGMENT", segment as usize),
        ("LAYERS", shape.layers),
        ("FEW_PLACES", FEW_HOPPER_PLACES),
        ("FEW_BLOCKS", FEW_HOPPER_BLOCKS),
        ("QKV_TILE", tiles.qkv),
        ("OUT_TILE", tiles.out),
        ("GATED_TILE", tiles.gated),
        ("DOWN_TILE", tiles.down),
        ("LOGITS_TILE", tiles.logits),
    ];
    all.into_iter().map(|(name, value)| format!("-D{name}={value}")).collect()
}

/// Returns the shared memory of a block of the largest kernel without Hopper's kernels.
pub(super) fn shared_bytes(shape: &Shape) -> usize {
    let depth = shape.head_dim.next_multiple_of(16);
    STAGES * 2 * TILE * depth * 2 + ROWS * depth * (2 + 4)
}

/// Outputs of each matrix that a block computes at once for few rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    pub(super) qkv: usize,
    pub(super) out: usize,
    pub(super) gated: usize,
    pub(super) down: usize,
    pub(super) logits: usize,
}

impl Tiles {
    pub(super) fn new(shape: &Shape, multiprocessors: u32) -> Self {
        // The largest tile whose sums fit in registers and that gives every block the same number
        // of turns.
        let tile = |outputs: usize, most: usize| {
            let turns = outputs.div_ceil(multiprocessors as usize * most);
            outputs.div_ceil(multiprocessors as usize * turns).next_multiple_of(16)
        };
        const MOST: usize = 224;
        Self {
            qkv: tile(shape.qkv(), MOST),
            out: tile(shape.dim, MOST),
            // Each output has a gate.
            gated: tile(shape.hidden, MOST / 2),
            down: tile(shape.dim, MOST),
            logits: tile(shape.vocabulary, MOST),
        }
    }
}

/// Products of few rows with each of the model's matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct FewRowsKernels {
    pub(super) to_qkv: Kernel,
    pub(super) to_out: Kernel,
    pub(super) to_gated: Kernel,
    pub(super) to_down: Kernel,
    pub(super) to_logits: Kernel,
}

/// A kernel with its launch parameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    function: sys::CUfunction,
    threads: u32,
    shared_bytes: u32,
    /// True if the kernel waits for its predecessor itself, and so may start before that has ended.
    follows: bool,
}

/// All kernels of one shape.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) context: Arc<Context>,
    module: sys::CUmodule,
    /// Keys after which the softmax restarts.
    pub(super) segment: u32,
    pub(super) take_in: Kernel,
    pub(super) embed: Kernel,
    pub(super) add_norm: Kernel,
    pub(super) turn_and_keep: Kernel,
    pub(super) attend: Kernel,
    pub(super) attend_few: Kernel,
    pub(super) join: Kernel,
    pub(super) gate: Kernel,
    pub(super) count: Kernel,
    pub(super) shape: Kernel,
    pub(super) sample: Kernel,
    pub(super) score: Kernel,
    pub(super) fill: Kernel,
    pub(super) fill_with: Kernel,
    /// None on GPUs other than Hopper.
    pub(super) few_rows: Option<FewRowsKernels>,
    /// True if `attend` and `attend_few` load pages by Hopper's copy engine and need a tensor map.
    pub(super) by_map: bool,
}

// SAFETY: functions and modules are handles, which any thread may use.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Compiles and loads the kernels.
    pub(super) fn new(
        context: &Arc<Context>,
        shape: &Shape,
        page_size: u32,
        segment: u32,
    ) -> Result<Self, CudaError> {
        context.bind()?;
        let multiprocessors = context.multiprocessors()?;
        let options = definitions(shape, page_size, segment, multiprocessors);
        let image = nvrtc::compile("model.cu", &source(), context.capability(), &options)?;
        // SAFETY: the image is whole, as the compiler has written it, and is copied by the call.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let module = call("cuModuleLoadData", module)?;
        let kernel = |name: &CStr, threads: usize, shared_bytes: usize| {
            // SAFETY: the module is loaded, and unloaded when what it is kept in is dropped.
            let function = unsafe { result::module::get_function(module, name.to_owned()) };
            let function = call("cuModuleGetFunction", function)?;
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let carved =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            if shared_bytes > 0 {
                for (attribute, value) in [(most, shared_bytes as i32), (carved, 100)] {
                    // SAFETY: the function exists.
                    let set = unsafe { sys::cuFuncSetAttribute(function, attribute, value) };
                    call("cuFuncSetAttribute", set.result())?;
                }
            }
            let (threads, shared_bytes) = (threads as u32, shared_bytes as u32);
            Ok::<_, CudaError>(Kernel { function, threads, shared_bytes, follows: false })
        };
        let can_follow = context.capability() >= 90;
        let following = |name: &CStr, threads: usize, shared_bytes: usize| {
            Ok::<_, CudaError>(Kernel {
                follows: can_follow,
                ..kernel(name, threads, shared_bytes)?
            })
        };
        let depth = shape.head_dim.next_multiple_of(16);
        let (row_bytes, tile_bytes) = (depth * 2, TILE * depth * 2);
        let queries_and_joined = ROWS * row_bytes + ROWS * depth * 4;
        let few_queries = FEW_ROWS * row_bytes + FEW_ROWS * TILE * 2;
        let by_map = context.capability() == 90 && shape.head_dim == 128 && page_size >= 8;
        let (attend, attend_few) = if by_map {
            let attend = HOPPER_PLACES * tile_bytes + queries_and_joined;
            let few = FEW_HOPPER_PLACES * tile_bytes + few_queries;
            (
                following(c"attend_on_hopper", 384, attend)?,
                following(c"attend_few_on_hopper", 160, few)?,
            )
        } else {
            let attend = shared_bytes(shape);
            let few = FEW_STAGES * 2 * tile_bytes + few_queries;
            (following(c"attend", 256, attend)?, following(c"attend_few", 128, few)?)
        };
        let of_few_rows = |name| following(name, FEW_ROWS_THREADS, FEW_ROWS_BYTES);
        let few_rows = (context.capability() == 90).then(|| {
            Ok::<_, CudaError>(FewRowsKernels {
                to_qkv: of_few_rows(c"few_rows_to_qkv")?,
                to_out: of_few_rows(c"few_rows_to_out")?,
                to_gated: of_few_rows(c"few_rows_to_gated")?,
                to_down: of_few_rows(c"few_rows_to_down")?,
                to_logits: of_few_rows(c"few_rows_to_logits")?,
            })
        });
        Ok(Self {
            context: context.clone(),
            module,
            segment,
            few_rows: few_rows.transpose()?,
            take_in: kernel(c"take_in", 256, 0)?,
            embed: following(c"embed", 128, 0)?,
            add_norm: following(c"add_norm", 256, 0)?,
            turn_and_keep: following(c"turn_and_keep", 256, 0)?,
            attend,
            attend_few,
            join: following(c"join", JOIN_THREADS, 0)?,
            gate: following(c"gate", 256, 0)?,
            count: kernel(c"count", 256, 0)?,
            shape: kernel(c"shape", 1024, 0)?,
            sample: kernel(c"sample", 1024, SELECTION_BYTES)?,
            score: kernel(c"score", 1024, 0)?,
            fill: kernel(c"fill", 256, 0)?,
            fill_with: kernel(c"fill_with", 256, 0)?,
            by_map,
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: launched kernels have ended before this is dropped.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// A tensor map of the copy engine, as the driver encodes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Map([u64; 16]);

impl Map {
    /// Creates a map of consecutive pages.
    pub(super) fn of_pages(shape: &Shape, memory: &CudaMemory) -> Result<Self, CallError> {
        let page_size = u64::from(memory.layout().page_size());
        let blocks = u64::from(memory.pages()) * (shape.layers * shape.kv_heads * 2) as u64;
        let token_bytes = shape.head_dim as u64 * 2;
        let dimensions = [64, page_size, shape.head_dim as u64 / 64, blocks];
        let strides = [token_bytes, 128, page_size * token_bytes];
        let boxed = [64, page_size.min(TILE as u64) as u32, 1, 1];
        Self::new(memory.base(), &dimensions, &strides, &boxed)
    }

    /// Creates a map of a matrix of which `rows` rows are copied at once.
    pub(super) fn of_matrix(
        at: DeviceAddress,
        rows: usize,
        columns: usize,
        rows_at_once: usize,
    ) -> Result<Self, CallError> {
        let dimensions = [columns as u64, rows as u64];
        Self::new(at, &dimensions, &[columns as u64 * 2], &[64, rows_at_once as u32])
    }

    /// Creates a map of bf16, copied in swizzled rows of 64 elements.
    fn new(
        at: DeviceAddress,
        dimensions: &[u64],
        strides: &[u64],
        boxed: &[u32],
    ) -> Result<Self, CallError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let rank = dimensions.len() as u32;
        // SAFETY: the lists are as long as the rank says, and the memory is as large.
        let made = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                rank,
                at.0 as usize as *mut c_void,
                dimensions.as_ptr(),
                strides.as_ptr(),
                boxed.as_ptr(),
                [1; 4].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        call("cuTensorMapEncodeTiled", made.result())?;
        Ok(Self(map.opaque))
    }
}

/// The parameters of a kernel, in order.
#[derive(Debug, Default)]
pub(super) struct Parameters {
    values: SmallVec<[[u64; 16]; 12]>,
}

impl Parameters {
    /// Adds an address or another 64-bit number.
    pub(super) fn wide(self, value: u64) -> Self {
        self.all(&[value])
    }

    /// Adds a 32-bit number.
    pub(super) fn narrow(self, value: u32) -> Self {
        self.wide(u64::from(value))
    }

    /// Adds a floating-point number.
    pub(super) fn float(self, value: f32) -> Self {
        self.narrow(value.to_bits())
    }

    /// Adds the location of pages.
    pub(super) fn pages(self, pages: Pages) -> Self {
        let Pages { kv, page_bytes, layer_offset, table, row_entries } = pages;
        self.all(&[kv, page_bytes, layer_offset, table, row_entries])
    }

    /// Adds a tensor map.
    pub(super) fn map(self, map: &Map) -> Self {
        self.all(&map.0)
    }

    fn all(mut self, numbers: &[u64]) -> Self {
        let mut value = [0; 16];
        value[..numbers.len()].copy_from_slice(numbers);
        self.values.push(value);
        self
    }
}

impl Kernel {
    /// Makes the kernel start only after all work before it has ended.
    pub(super) fn alone(self) -> Self {
        Self { follows: false, ..self }
    }

    /// Submits the kernel to a stream in `blocks` blocks.
    ///
    /// # Safety
    /// The parameters must match the kernel's in order and type. Memory that they name must be
    /// device memory of the size that the kernel expects, until the kernel is done.
    pub(super) unsafe fn launch(
        &self,
        stream: Stream,
        blocks: usize,
        parameters: Parameters,
    ) -> Result<(), CallError> {
        let mut values = parameters.values;
        let mut pointers: SmallVec<[*mut c_void; 12]> =
            values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let mut follows = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: blocks as u32,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.raw(),
            attrs: &raw mut follows,
            numAttrs: u32::from(self.follows),
        };
        // SAFETY: guaranteed by the caller; the function belongs to a module that is loaded.
        let launched = unsafe {
            let parameters = pointers.as_mut_ptr();
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function,
                parameters,
                std::ptr::null_mut(),
            )
        };
        call("cuLaunchKernelEx", launched.result())
    }
}
