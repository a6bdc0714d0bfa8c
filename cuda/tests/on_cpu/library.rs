//! The model's kernels, compiled by g++ and launched on the CPU.

use std::ffi::c_void;
use std::path::Path;
use std::process::Command;

use libloading::Library;
use parking_lot::Mutex;

/// All but those that need instructions of Hopper's.
const SOURCES: [&str; 4] = [
    include_str!("../../kernels/common.cu"),
    include_str!("../../kernels/layers.cu"),
    include_str!("../../kernels/attention.cu"),
    include_str!("../../kernels/sample.cu"),
];
const SHIM: &str = include_str!("shim.h");
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

/// What kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Numbers of a token between layers.
    pub(crate) dim: usize,
    pub(crate) head_dim: usize,
    pub(crate) kv_heads: usize,
    /// Query heads that share keys.
    pub(crate) group: usize,
    pub(crate) page_size: usize,
}

impl Sizes {
    /// Elements of a token's queries.
    pub(crate) fn queries(&self) -> usize {
        self.kv_heads * self.group * self.head_dim
    }

    /// Elements of a token's queries, keys and values.
    pub(crate) fn qkv(&self) -> usize {
        self.kv_heads * (self.group + 2) * self.head_dim
    }

    /// Elements of a layer's keys and values in a page.
    pub(crate) fn layer(&self) -> usize {
        self.kv_heads * 2 * self.page_size * self.head_dim
    }

    /// Where a token's keys or values begin in those.
    pub(crate) fn place(&self, kv_head: usize, is_value: bool, within: usize) -> usize {
        ((kv_head * 2 + usize::from(is_value)) * self.page_size + within) * self.head_dim
    }
}

/// In which order things happen that may happen in any order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Schedule {
    /// From the first thread on; copies in the background are done when they are waited for.
    Late,
    /// From the last thread back; copies are done at once.
    Hasty,
}

pub(crate) const SCHEDULES: [Schedule; 2] = [Schedule::Late, Schedule::Hasty];

/// Compiled kernels. Theirs are the threads that they run in, one block at a time.
#[derive(Debug)]
pub(crate) struct Compiled(Mutex<Library>);

/// Kernels, and how they are run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels<'a> {
    pub(crate) sizes: Sizes,
    pub(crate) schedule: Schedule,
    pub(crate) compiled: &'a Compiled,
}

/// What the shim is told of a launch.
#[repr(C)]
struct Launch {
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    is_backwards: u32,
    is_hasty: u32,
}

impl Compiled {
    pub(crate) fn new(sizes: Sizes) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // A block's memory without a size is declared where it is used, and defined by the shim.
        let mut source = SOURCES.concat().replace("extern __shared__", "extern");
        source.insert_str(0, "#include \"shim.h\"\n");
        source.extend(KERNELS.map(|name| format!("LAUNCHABLE({name})\n")));
        let [from, header, to] =
            ["kernels.cpp", "shim.h", "kernels.so"].map(|name| folder.path().join(name));
        std::fs::write(&from, source).unwrap();
        std::fs::write(header, SHIM).unwrap();
        let definitions = [
            ("DIM", sizes.dim),
            ("HEAD_DIM", sizes.head_dim),
            ("KV_HEADS", sizes.kv_heads),
            ("GROUP", sizes.group),
            ("PAGE_SIZE", sizes.page_size),
        ];
        // Fibers jump from stack to stack, which a fortified longjmp takes for a mistake. Numbers are rounded where
        // kernels say so.
        let compiled = Command::new("g++")
            .args([
                "-std=c++17",
                "-O2",
                "-march=native",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
            ])
            .args(["-w", "-U_FORTIFY_SOURCE", "-fPIC", "-shared", "-DON_CPU"])
            .args(definitions.map(|(name, value)| format!("-D{name}={value}")))
            .arg("-o")
            .args([&to, &from])
            .output()
            .expect("g++ is needed: install it, or let scripts/test-cuda do so");
        let said = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "kernels for {sizes:?} could not be compiled:\n{said}");
        Self(Mutex::new(load(&to)))
    }
}

impl Kernels<'_> {
    /// Runs a kernel.
    pub(crate) fn launch(
        &self,
        name: &str,
        blocks: usize,
        block: Block,
        mut arguments: Arguments<'_>,
    ) {
        assert!(blocks > 0, "{name} in no blocks");
        let (is_backwards, is_hasty) = match self.schedule {
            Schedule::Late => (0, 0),
            Schedule::Hasty => (1, 1),
        };
        let launch = Launch {
            blocks: blocks as u32,
            threads: block.threads as u32,
            shared_bytes: block.shared_bytes as u32,
            is_backwards,
            is_hasty,
        };
        let mut pointers: Vec<*mut c_void> =
            arguments.values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let library = self.compiled.0.lock();
        let symbol = format!("launch_{name}");
        // SAFETY: the shim defines it so for each kernel; the arguments are the kernel's, and what they name is lent until
        // it has ended.
        unsafe {
            let run = library
                .get::<unsafe extern "C" fn(*const Launch, *mut *mut c_void)>(symbol.as_bytes());
            run.unwrap()(&raw const launch, pointers.as_mut_ptr());
        }
    }
}

fn load(path: &Path) -> Library {
    // SAFETY: what was compiled does nothing when it is loaded.
    unsafe { Library::new(path) }.unwrap_or_else(|error| panic!("{error}"))
}

/// The size of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) threads: usize,
    pub(crate) shared_bytes: usize,
}

impl Block {
    pub(crate) fn of(threads: usize) -> Self {
        Self { threads, shared_bytes: 0 }
    }
}

/// The arguments of a kernel, in its order. What is lent to it is lent until it has ended.
#[derive(Default)]
pub(crate) struct Arguments<'a> {
    values: Vec<[u64; 5]>,
    lent: std::marker::PhantomData<&'a mut ()>,
}

impl<'a> Arguments<'a> {
    /// What it only reads.
    pub(crate) fn list<T: Copy>(self, list: &'a [T]) -> Self {
        self.wide(list.as_ptr().addr() as u64)
    }

    /// What it writes.
    pub(crate) fn out<T: Copy>(self, list: &'a mut [T]) -> Self {
        self.wide(list.as_mut_ptr().addr() as u64)
    }

    /// A list, or none.
    pub(crate) fn list_if<T: Copy>(self, list: Option<&'a [T]>) -> Self {
        match list {
            Some(list) => self.list(list),
            None => self.wide(0),
        }
    }

    pub(crate) fn wide(self, number: u64) -> Self {
        self.all([number, 0, 0, 0, 0])
    }

    pub(crate) fn number(self, number: usize) -> Self {
        self.wide(number as u64)
    }

    pub(crate) fn float(self, number: f32) -> Self {
        self.wide(number.to_bits().into())
    }

    /// Where pages are: keys and values, the bytes of a page and before the layer, the table and its width.
    pub(crate) fn pages(
        self,
        kv: &'a [u16],
        page_bytes: usize,
        layer_offset: usize,
        table: &'a [u32],
        width: usize,
    ) -> Self {
        let (kv, table) = (kv.as_ptr().addr() as u64, table.as_ptr().addr() as u64);
        self.all([kv, page_bytes as u64, layer_offset as u64, table, width as u64])
    }

    fn all(mut self, numbers: [u64; 5]) -> Self {
        self.values.push(numbers);
        self
    }
}
