//! A model on a GPU without an engine, with pages, rows and steps set by the caller.

#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::result;
use terrace_cache::{Cache, CacheConfig};
use terrace_cuda::{Context, CudaConfig, CudaDevice, CudaError, CudaLlama, CudaTicket};
use terrace_engine::{
    Arrival, Awaited, Batch, Choice, Choosing, Device, Mask, Model, ModelError, Output, RowChange,
    Sampling, Shaping, Span, StepLimits, StepTicket, Wanted,
};
use terrace_kit::Dice;
use terrace_model::{Rope, Scaling, Shape};
use terrace_scheduler::{DevicePage, Slot, Token};

/// Returns parameters of greedy sampling that report logits.
pub(crate) fn greedy() -> Choosing {
    Choosing {
        sampling: Sampling::GREEDY,
        shaping: Shaping::default(),
        ends: Arc::new([]),
        prompt: Vec::new(),
        logprobs: None,
        logits: false,
    }
}

/// Returns the shape of the measured model: a Llama of 8 billion weights.
pub(crate) fn eight_billion() -> Shape {
    Shape {
        vocabulary: 128_256,
        dim: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        hidden: 14_336,
        norm_epsilon: 1e-5,
        positions_max: 40_960,
        rope: Rope { theta: 500_000.0, scaling: Scaling::None },
        qkv_bias: false,
        qk_norm: false,
        tied: false,
    }
}

/// Returns a small shape of the same family.
pub(crate) fn small() -> Shape {
    Shape {
        vocabulary: 4096,
        dim: 1024,
        layers: 3,
        heads: 8,
        kv_heads: 2,
        hidden: 2816,
        positions_max: 8192,
        ..eight_billion()
    }
}

/// A part of a sequence to compute.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) slot: u32,
    pub(crate) start: u32,
    pub(crate) tokens: Vec<Token>,
    /// Number of answer tokens before the one to choose; none if no token is chosen.
    pub(crate) index: Option<u32>,
    /// Output of the step before that supplies the only token.
    pub(crate) awaited: Option<usize>,
    /// Tokens that may be chosen; all tokens without a mask.
    pub(crate) mask: Option<Mask>,
}

impl Part {
    pub(crate) fn new(slot: u32, start: u32, tokens: &[Token]) -> Self {
        let (tokens, index, awaited) = (tokens.to_vec(), Some(0), None);
        Self { slot, start, tokens, index, awaited, mask: None }
    }
}

/// A model with rows of equally many pages.
pub(crate) struct World {
    context: Arc<Context>,
    pub(crate) device: CudaDevice,
    model: CudaLlama,
    pages: Vec<DevicePage>,
    row_pages: usize,
    came: Vec<Arrival>,
    changes: Vec<u32>,
}

impl World {
    pub(crate) fn new(
        context: &Arc<Context>,
        mut model: CudaLlama,
        limits: StepLimits,
        row_tokens: u32,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let row_pages = row_tokens.div_ceil(limits.page_size) as usize;
        let count = row_pages * limits.rows as usize;
        let layout = model.kv_layout().pages(limits.page_size)?;
        let device_pages = count as u32;
        let config = CudaConfig { device_pages, host_pages: 0, layout, canary: None, ways: None };
        let device = CudaDevice::new(context, config)?;
        let cache =
            CacheConfig { page_size: limits.page_size, device_pages, ..CacheConfig::default() };
        let pages = Cache::new(&cache).take_device_pages(count).ok_or("pages are short")?;
        let mut pages = pages.as_slice().to_vec();
        Dice::new(5).shuffle(&mut pages);
        model.begin(device.memory(), limits)?;
        let (came, changes) = (Vec::new(), (0..limits.rows).collect());
        let context = context.clone();
        let world = Self { context, device, model, pages, row_pages, came, changes };
        world.spoil()?;
        Ok(world)
    }

    /// Fills all pages with NaN: a step may read only what it or a step before it has written.
    fn spoil(&self) -> Result<(), Box<dyn std::error::Error>> {
        let memory = self.device.memory();
        let bytes = memory.pages() as usize * memory.page_bytes();
        self.context.bind()?;
        // SAFETY: the pages are as large, and no step is under way.
        unsafe { result::memset_d8_sync(memory.base().0, 0xff, bytes)? };
        // SAFETY: it is the stream of the call before.
        unsafe { result::stream::synchronize(std::ptr::null_mut())? };
        Ok(())
    }

    /// Fills all pages with numbers of about one, as if their tokens had been computed. Reading
    /// zeros draws less power, and a GPU at its power limit is slower.
    pub(crate) fn fill(&self) -> Result<(), Box<dyn std::error::Error>> {
        let memory = self.device.memory();
        let (base, page_bytes) = (memory.base().0, memory.page_bytes());
        let bytes = memory.pages() as usize * page_bytes;
        // bf16 with any sign and fraction, and the exponents of one half and one.
        let drawn = Dice::new(6).tokens(page_bytes / 2, 1 << 16);
        let page: Vec<u16> = drawn.iter().map(|bits| 0x3f00 | (*bits as u16 & 0x80ff)).collect();
        self.context.bind()?;
        // SAFETY: a page is as large, and no step is under way.
        unsafe { result::memcpy_htod_sync(base, &page)? };
        let mut filled = page_bytes;
        while filled < bytes {
            let more = filled.min(bytes - filled);
            // SAFETY: both lie within the pages, and do not overlap.
            unsafe { result::memcpy_dtod_sync(base + filled as u64, base, more)? };
            filled += more;
        }
        Ok(())
    }

    /// Assigns a sequence to a row.
    pub(crate) fn come(&mut self, slot: u32, choosing: Choosing, produced: &[Token]) {
        let produced = produced.to_vec();
        self.came.push(Arrival { produced, ..Arrival::new(Slot(slot), Arc::new(choosing)) });
    }

    /// Returns the pages of a row.
    pub(crate) fn row(&self, slot: u32) -> &[DevicePage] {
        &self.pages[slot as usize * self.row_pages..][..self.row_pages]
    }

    pub(crate) fn launch(&mut self, parts: &[Part]) -> Result<CudaTicket, ModelError> {
        let mut batch = Batch { came: std::mem::take(&mut self.came), ..Batch::default() };
        for slot in std::mem::take(&mut self.changes) {
            let first = batch.pages.len();
            batch.pages.extend_from_slice(self.row(slot));
            let pages = first..batch.pages.len();
            batch.changes.push(RowChange { slot: Slot(slot), first_entry: 0, pages });
        }
        for (place, part) in parts.iter().enumerate() {
            let first = batch.tokens.len();
            batch.tokens.extend_from_slice(&part.tokens);
            if let Some(output) = part.awaited {
                batch.awaited.push(Awaited { token: first, output });
            }
            let (slot, tokens) = (Slot(part.slot), first..batch.tokens.len());
            let logits = usize::from(part.index.is_some());
            batch.spans.push(Span { slot, start: part.start, tokens, logits });
            if let Some(index) = part.index {
                let choice = Some(Choice { index, mask: part.mask.clone() });
                batch.wanted.push(Wanted { span: place, choice, scored: 0..0 });
            }
        }
        self.model.launch(&Arc::new(batch))
    }

    /// Computes a step and waits for it.
    pub(crate) fn step(&mut self, parts: &[Part]) -> Result<Vec<Output>, ModelError> {
        self.launch(parts)?.finish().result
    }

    /// Returns the fingerprint that names the model's KV.
    pub(crate) fn fingerprint(&self) -> String {
        self.model.fingerprint()
    }

    /// Returns a description of the products whose bits depend on the number of rows.
    pub(crate) fn product_differences(
        &mut self,
        layer: usize,
        counts: &[usize],
    ) -> Result<Vec<String>, CudaError> {
        self.model.product_differences(layer, counts)
    }

    /// Returns the content of the pages that hold a row's first tokens.
    pub(crate) fn kv(&self, slot: u32, tokens: u32) -> Result<Vec<Vec<u8>>, CudaError> {
        let page_size = self.device.layout().page_size();
        let pages = &self.row(slot)[..(tokens / page_size) as usize];
        let memory = self.device.memory();
        let read = |page: &DevicePage| {
            let mut bytes = vec![0; memory.page_bytes()];
            self.context.read(memory.address(*page), &mut bytes)?;
            Ok(bytes)
        };
        pages.iter().map(read).collect()
    }
}
