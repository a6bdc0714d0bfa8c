//! The model's kernels, compiled by g++ and run on the CPU.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::process::Command;

use libloading::Library;
use parking_lot::Mutex;

use crate::Statement;

/// All sources except Hopper's instructions, which the shim replaces.
const SOURCES: [&str; 6] = [
    include_str!("../../kernels/common.cu"),
    include_str!("../../kernels/layers.cu"),
    include_str!("../../kernels/attention.cu"),
    include_str!("../../kernels/sample.cu"),
    include_str!("../../kernels/hopper.cu"),
    include_str!("../../kernels/few_rows.cu"),
];
const HEADERS: [(&str, &str); 2] =
    [("shim.h", include_str!("shim.h")), ("hopper.h", include_str!("hopper.h"))];
const KERNELS: [&str; 14] = [
    "take_in",
    "embed",
    "add_norm",
    "turn_and_keep",
    "attend",
    "attend_few",
    "join",
    "gate",
    "fill",
    "fill_with",
    "count",
    "shape",
    "sample",
    "score",
];
const HOPPER_KERNELS: [&str; 7] = [
    "attend_on_hopper",
    "attend_few_on_hopper",
    "few_rows_to_qkv",
    "few_rows_to_out",
    "few_rows_to_gated",
    "few_rows_to_down",
    "few_rows_to_logits",
];
/// The declaration of shared memory, and its replacement for tests: each block of a cluster has its
/// own.
const BLOCK_MEMORY: [&str; 2] =
    ["extern __shared__ __align__(1024) u8 memory[];", "u8 *memory = (u8 *)on_cpu::own_memory();"];
/// Layers of a page.
pub(crate) const LAYERS: usize = 2;
/// Tiles of `attend_few_on_hopper` in shared memory, keys or values, and its blocks on a
/// multiprocessor.
pub(crate) const FEW_PLACES: usize = 3;
const FEW_BLOCKS: usize = 4;
/// Outputs that a block of Hopper's products of few rows computes at once, by kernel.
pub(crate) const TILES: [(&str, usize); 5] = [
    ("QKV_TILE", 48),
    ("OUT_TILE", 16),
    ("GATED_TILE", 64),
    ("DOWN_TILE", 112),
    ("LOGITS_TILE", 96),
];

/// Compile-time sizes of the kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Numbers of a token between layers.
    pub(crate) dim: usize,
    pub(crate) head_dim: usize,
    pub(crate) kv_heads: usize,
    /// Query heads that share keys.
    pub(crate) group: usize,
    pub(crate) page_size: usize,
    /// Keys after which the softmax restarts.
    pub(crate) segment: usize,
}

impl Sizes {
    /// Returns whether there are Hopper kernels for these sizes.
    pub(crate) fn are_for_hopper(&self) -> bool {
        self.head_dim == 128 && self.page_size >= 8
    }

    /// Returns the elements of a token's queries.
    pub(crate) fn queries(&self) -> usize {
        self.kv_heads * self.group * self.head_dim
    }

    /// Returns the elements of a token's queries, keys and values.
    pub(crate) fn qkv(&self) -> usize {
        self.kv_heads * (self.group + 2) * self.head_dim
    }

    /// Returns the elements of a layer's keys and values in a page.
    pub(crate) fn layer(&self) -> usize {
        self.kv_heads * 2 * self.page_size * self.head_dim
    }

    /// Returns the place of a token's keys or values in a layer.
    pub(crate) fn place(&self, kv_head: usize, is_value: bool, within: usize) -> usize {
        ((kv_head * 2 + usize::from(is_value)) * self.page_size + within) * self.head_dim
    }
}

/// Execution order of concurrent operations.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Schedule {
    /// Threads run from the first to the last; asynchronous copies complete when they are waited
    /// for.
    Late,
    /// Threads run from the last to the first; copies complete at once.
    Hasty,
}

pub(crate) const SCHEDULES: [Schedule; 2] = [Schedule::Late, Schedule::Hasty];

/// Compiled kernels. They run one block at a time on the library's own threads.
#[derive(Debug)]
pub(crate) struct Compiled(Mutex<Library>);

/// Kernels and their schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels<'a> {
    pub(crate) sizes: Sizes,
    pub(crate) schedule: Schedule,
    pub(crate) compiled: &'a Compiled,
}

/// Launch parameters of the shim.
#[repr(C)]
struct Launch {
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    cluster: u32,
    is_backwards: u32,
    is_hasty: u32,
}

impl Compiled {
    pub(crate) fn new(sizes: Sizes) -> Self {
        Self::of_source(sizes, &SOURCES.concat())
    }

    /// Compiles kernels with omittable statements: each is found in the source by its text and the
    /// text before it. [`Kernels::omit`] selects the one to omit.
    pub(crate) fn with_omissions(sizes: Sizes, statements: &[Statement]) -> Self {
        let mut source = SOURCES.concat();
        // Those with the longest preceding text first, so that the text is still unchanged.
        let mut numbered: Vec<_> = (1..).zip(statements).collect();
        numbered.sort_by_key(|(_, (before, _))| std::cmp::Reverse(before.len()));
        for (number, (before, statement)) in numbered {
            let whole = format!("{before}{statement}");
            assert!(source.contains(&whole), "no kernel says {whole}");
            let omitted =
                format!("{before}{{ if (on_cpu::omitted != {number}) {{ {statement} }} }}");
            source = source.replace(&whole, &omitted);
        }
        Self::of_source(sizes, &source)
    }

    fn of_source(sizes: Sizes, kernels: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [declared, owned] = BLOCK_MEMORY;
        let mut source = format!("#include \"shim.h\"\n{}", kernels.replace(declared, owned));
        let of_hopper = if sizes.are_for_hopper() { &HOPPER_KERNELS[..] } else { &[] };
        let names = KERNELS.iter().chain(of_hopper);
        source.extend(names.map(|name| format!("LAUNCHABLE({name})\n")));
        let [from, to] = ["kernels.cpp", "kernels.so"].map(|name| folder.path().join(name));
        std::fs::write(&from, source).unwrap();
        for (name, header) in HEADERS {
            std::fs::write(folder.path().join(name), header).unwrap();
        }
        let mut definitions = vec![
            ("DIM", sizes.dim),
            ("HEAD_DIM", sizes.head_dim),
            ("KV_HEADS", sizes.kv_heads),
            ("GROUP", sizes.group),
            ("PAGE_SIZE", sizes.page_size),
            ("SEGMENT", sizes.segment),
        ];
        if sizes.are_for_hopper() {
            let of_hopper = [("HOPPER", 1), ("LAYERS", LAYERS), ("FEW_PLACES", FEW_PLACES)];
            definitions.extend(of_hopper);
            definitions.push(("FEW_BLOCKS", FEW_BLOCKS));
            definitions.extend(TILES);
        }
        // Fibers jump from stack to stack, which a fortified longjmp rejects. Rounding happens only
        // where kernels request it. Each library has its own statics.
        let compiled = Command::new("g++")
            .args([
                "-std=c++17",
                "-O2",
                "-march=native",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
            ])
            .args(["-w", "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-fno-gnu-unique", "-DON_CPU"])
            .args(definitions.iter().map(|(name, value)| format!("-D{name}={value}")))
            .arg("-o")
            .args([&to, &from])
            .output()
            .expect("g++ is needed: install it, or let scripts/test-cuda do so");
        let said = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "kernels for {sizes:?} could not be compiled:\n{said}");
        Self(Mutex::new(load(&to)))
    }
}

thread_local! {
    static POWERS: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of powers that this thread's last kernel computed: a measure of its work.
pub(crate) fn powers_taken() -> u64 {
    POWERS.get()
}

impl Kernels<'_> {
    /// Runs a kernel.
    #[track_caller]
    pub(crate) fn launch(&self, name: &str, blocks: usize, block: Block, arguments: Arguments<'_>) {
        let launched = self.try_launch(name, blocks, block, arguments);
        launched.unwrap_or_else(|wrong| panic!("{name} on the CPU: {wrong}, {:?}", self.sizes));
    }

    /// Runs a kernel, and returns the errors that the shim detected.
    pub(crate) fn try_launch(
        &self,
        name: &str,
        blocks: usize,
        block: Block,
        mut arguments: Arguments<'_>,
    ) -> Result<(), String> {
        assert!(blocks > 0, "{name} in no blocks");
        let (is_backwards, is_hasty) = match self.schedule {
            Schedule::Late => (0, 0),
            Schedule::Hasty => (1, 1),
        };
        let launch = Launch {
            blocks: blocks as u32,
            threads: block.threads as u32,
            shared_bytes: block.shared_bytes as u32,
            cluster: block.cluster as u32,
            is_backwards,
            is_hasty,
        };
        let mut pointers: Vec<*mut c_void> =
            arguments.values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let library = self.compiled.0.lock();
        let symbol = format!("launch_{name}");
        type Run = unsafe extern "C" fn(*const Launch, *mut *mut c_void) -> *const c_char;
        // SAFETY: the shim defines both, the first for each kernel; the arguments are the kernel's,
        // and memory that they name is borrowed until it has ended. The result is null or a static
        // text.
        unsafe {
            let run = library.get::<Run>(symbol.as_bytes()).unwrap();
            let wrong = run(&raw const launch, pointers.as_mut_ptr());
            let powers = library.get::<unsafe extern "C" fn() -> u64>(b"powers_taken").unwrap();
            POWERS.set(powers());
            if wrong.is_null() {
                Ok(())
            } else {
                Err(CStr::from_ptr(wrong).to_string_lossy().into_owned())
            }
        }
    }

    /// Makes kernels omit one of the statements that they were compiled with, by its number from 1;
    /// 0 omits none.
    pub(crate) fn omit(&self, statement: u32) {
        let library = self.compiled.0.lock();
        // SAFETY: the shim defines it with this signature.
        unsafe { library.get::<unsafe extern "C" fn(u32)>(b"omit").unwrap()(statement) }
    }
}

fn load(path: &Path) -> Library {
    // SAFETY: the compiled library has no initialisation.
    unsafe { Library::new(path) }.unwrap_or_else(|error| panic!("{error}"))
}

/// The size of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) threads: usize,
    pub(crate) shared_bytes: usize,
    /// Number of blocks of a cluster.
    pub(crate) cluster: usize,
}

impl Block {
    pub(crate) const fn new(threads: usize, shared_bytes: usize) -> Self {
        Self { threads, shared_bytes, cluster: 1 }
    }

    pub(crate) fn of(threads: usize) -> Self {
        Self::new(threads, 0)
    }
}

/// The arguments of a kernel, in order. Memory is borrowed until the kernel has ended.
#[derive(Default)]
pub(crate) struct Arguments<'a> {
    values: Vec<[u64; 16]>,
    lent: std::marker::PhantomData<&'a mut ()>,
}

impl<'a> Arguments<'a> {
    /// Adds a list that the kernel reads.
    pub(crate) fn list<T: Copy>(self, list: &'a [T]) -> Self {
        self.wide(list.as_ptr().addr() as u64)
    }

    /// Adds a list that the kernel writes.
    pub(crate) fn out<T: Copy>(self, list: &'a mut [T]) -> Self {
        self.wide(list.as_mut_ptr().addr() as u64)
    }

    /// Adds a list, or null.
    pub(crate) fn list_if<T: Copy>(self, list: Option<&'a [T]>) -> Self {
        match list {
            Some(list) => self.list(list),
            None => self.wide(0),
        }
    }

    pub(crate) fn wide(self, number: u64) -> Self {
        self.all(&[number])
    }

    pub(crate) fn number(self, number: usize) -> Self {
        self.wide(number as u64)
    }

    pub(crate) fn float(self, number: f32) -> Self {
        self.wide(number.to_bits().into())
    }

    /// Adds the location of pages: keys and values, the bytes of a page and before the layer, the
    /// table and its width.
    pub(crate) fn pages(
        self,
        kv: &'a [u16],
        page_bytes: usize,
        layer_offset: usize,
        table: &'a [u32],
        width: usize,
    ) -> Self {
        let (kv, table) = (kv.as_ptr().addr() as u64, table.as_ptr().addr() as u64);
        self.all(&[kv, page_bytes as u64, layer_offset as u64, table, width as u64])
    }

    /// Adds a tensor map of the shim: elements of each dimension, strides in bytes of each but the
    /// first, and elements of a box.
    pub(crate) fn map(self, at: &'a [u16], sizes: &[u64], strides: &[u64], boxed: &[u64]) -> Self {
        let padded = |numbers: &[u64], count: usize, missing: u64| {
            numbers.iter().copied().chain(std::iter::repeat(missing)).take(count).collect()
        };
        let parts: [Vec<u64>; 4] = [
            vec![at.as_ptr().addr() as u64, sizes.len() as u64],
            padded(sizes, 4, 1),
            padded(strides, 3, 0),
            padded(boxed, 4, 1),
        ];
        self.all(&parts.concat())
    }

    fn all(mut self, numbers: &[u64]) -> Self {
        let mut value = [0; 16];
        value[..numbers.len()].copy_from_slice(numbers);
        self.values.push(value);
        self
    }
}
