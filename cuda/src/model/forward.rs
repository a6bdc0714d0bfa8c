//! The forward pass: the GPU work for the tokens of a step.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use terrace_engine::{CopyProgress, StepLimits};
use terrace_model::Shape;

use super::choices::Choices;
use super::few_rows::{FEW_ROWS_MAX, FewRows, Places};
use super::kernels::{FEW_HOPPER_BLOCKS, JOIN_BLOCKS, Kernel, Kernels, Map, Parameters};
use super::matrix::Matrix;
use super::plain::Pages;
use super::products::{Operands, Products, Size};
use super::weights::Weights;
use crate::context::{Context, call};
use crate::driver::{CallError, DeviceAddress, Driver, Priority, Stream};
use crate::error::CudaError;
use crate::memory::{Allocation, CudaMemory};

/// Largest step that is computed by a graph, if each of its tokens is of another sequence.
pub(super) const GRAPH_TOKENS_MAX: usize = 256;

/// Largest number of rows for which algorithms are timed instead of following cuBLASLt's heuristic.
/// With few rows and no split sums, the heuristic's choice can take more than twice as long.
const TUNED_ROWS_MAX: usize = 1024;

/// Rows of logits that are computed at once.
pub(super) const LOGITS_ROWS: usize = 256;

/// Returns the number of computed rows for a number of tokens. Rounding bounds the number of graphs
/// and plans; small rounding steps bound the unused rows.
pub(super) fn rounded(tokens: usize) -> usize {
    match tokens {
        few if few <= 8 => few.next_power_of_two(),
        some if some <= 64 => some.next_multiple_of(8),
        many if many <= GRAPH_TOKENS_MAX => many.next_multiple_of(16),
        most => most.next_multiple_of(64),
    }
}

/// Iterates over all numbers of rows that are computed by graphs.
fn graph_rows() -> impl Iterator<Item = usize> {
    (1..=GRAPH_TOKENS_MAX).filter(|rows| rounded(*rows) == *rows)
}

/// The device state of the forward pass.
#[derive(Debug)]
pub(super) struct Forward {
    pub(super) shape: Shape,
    pub(super) kernels: Kernels,
    pub(super) stream: Stream,
    weights: Weights,
    products: Products,
    /// Special kernels, if they exist and gave the same bits in a check.
    few_rows: Option<FewRows>,
    memory: CudaMemory,
    map: Option<Map>,
    buffers: Buffers,
    graphs: BTreeMap<usize, sys::CUgraphExec>,
    multiprocessors: usize,
    /// Rows of the largest step.
    rows_max: usize,
    context: Arc<Context>,
}

// SAFETY: graphs are handles, which any thread may use.
unsafe impl Send for Forward {}

/// Buffers between kernels; bf16 and `[token][element]` unless stated otherwise.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Residual stream between layers.
    x: Allocation,
    normed: Allocation,
    qkv: Allocation,
    found: Allocation,
    /// Output of the last half layer, to be added.
    added: Allocation,
    gate_up: Allocation,
    gated: Allocation,
    partials: Allocation,
    /// `[position][pair]`, f32.
    cosines: Allocation,
    sines: Allocation,
    /// `[row][entry]`.
    pub(super) table: Allocation,
    pub(super) row_entries: u32,
    /// `[row][token]`, f32.
    pub(super) logits: Allocation,
}

/// Addresses and lengths of a step's lists.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lists {
    pub(super) tokens: DeviceAddress,
    pub(super) many: DeviceAddress,
    pub(super) few: DeviceAddress,
    pub(super) few_count: DeviceAddress,
    pub(super) segments: DeviceAddress,
    pub(super) segments_counts: DeviceAddress,
    pub(super) logits_of: DeviceAddress,
}

/// Size of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Rounded number of tokens.
    pub(super) tokens: usize,
    pub(super) many: usize,
    pub(super) has_few: bool,
    pub(super) has_segments: bool,
}

/// The bytes of each buffer, in their order.
pub(super) struct BufferBytes {
    pub(super) x: usize,
    qkv: usize,
    found: usize,
    gate_up: usize,
    gated: usize,
    partials: usize,
    angles: usize,
    table: usize,
    pub(super) logits: usize,
    pub(super) partials_max: u32,
    row_entries: u32,
}

impl BufferBytes {
    pub(super) fn new(shape: &Shape, limits: StepLimits, segment: u32) -> Self {
        // Only many long sequences at once would need more; some of them then use fewer blocks.
        let results_max = 4096 * super::kernels::SEGMENT / segment;
        /// Largest number of tiles of a prompt whose segments are computed separately; more tiles
        /// fill the device without it.
        const TILES: u32 = 16;
        let tokens = rounded(limits.tokens_max as usize).max(GRAPH_TOKENS_MAX);
        let depth = shape.head_dim.next_multiple_of(16);
        let segments = shape.positions_max.div_ceil(segment);
        let of_tiles = TILES * (super::kernels::ROWS / super::kernels::FEW_ROWS) as u32;
        let partials_max = (limits.rows + of_tiles).saturating_mul(segments).min(results_max);
        let partial = shape.kv_heads * super::kernels::FEW_ROWS * (depth + 2) * 4;
        let row_entries = shape.positions_max.div_ceil(limits.page_size);
        Self {
            x: tokens * shape.dim * 2,
            qkv: tokens * shape.qkv() * 2,
            found: tokens * shape.queries() * 2,
            gate_up: tokens * 2 * shape.hidden * 2,
            gated: tokens * shape.hidden * 2,
            partials: partials_max as usize * partial,
            angles: shape.positions_max as usize * (shape.head_dim / 2) * 4,
            table: limits.rows as usize * row_entries as usize * 4,
            logits: LOGITS_ROWS * shape.vocabulary * 4,
            partials_max,
            row_entries,
        }
    }

    pub(super) fn total(&self) -> usize {
        3 * self.x
            + self.qkv
            + self.found
            + self.gate_up
            + self.gated
            + self.partials
            + 2 * self.angles
            + self.table
            + self.logits
    }
}

impl Buffers {
    fn new(
        driver: &Arc<dyn Driver>,
        shape: &Shape,
        bytes: &BufferBytes,
    ) -> Result<Self, CudaError> {
        let get = |bytes| Allocation::new(driver, bytes).map_err(CudaError::from);
        let (cosines, sines) = (get(bytes.angles)?, get(bytes.angles)?);
        let frequencies = shape.frequencies();
        let angles = (0..shape.positions_max).flat_map(|position| {
            frequencies.iter().map(move |each| (position as f32 * each).sin_cos())
        });
        let (all_sines, all_cosines): (Vec<f32>, Vec<f32>) = angles.unzip();
        for (to, numbers) in [(&cosines, &all_cosines), (&sines, &all_sines)] {
            // SAFETY: the memory has the same size.
            let copied = unsafe { result::memcpy_htod_sync(to.at().0, numbers) };
            call("cuMemcpyHtoD", copied)?;
        }
        Ok(Self {
            x: get(bytes.x)?,
            normed: get(bytes.x)?,
            qkv: get(bytes.qkv)?,
            found: get(bytes.found)?,
            added: get(bytes.x)?,
            gate_up: get(bytes.gate_up)?,
            gated: get(bytes.gated)?,
            partials: get(bytes.partials.max(1))?,
            cosines,
            sines,
            table: get(bytes.table)?,
            row_entries: bytes.row_entries,
            logits: get(bytes.logits)?,
        })
    }
}

impl Forward {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        shape: &Shape,
        kernels: Kernels,
        weights: Weights,
        memory: &CudaMemory,
        limits: StepLimits,
        choices: Choices,
    ) -> Result<Self, CudaError> {
        let context = kernels.context.clone();
        let stream = driver.create_stream(Priority::High)?;
        let map = kernels.by_map.then(|| Map::of_pages(shape, memory)).transpose()?;
        let mut forward = Self {
            shape: shape.clone(),
            stream,
            weights,
            products: Products::new(driver, choices)?,
            few_rows: None,
            memory: memory.clone(),
            map,
            buffers: Buffers::new(
                driver,
                shape,
                &BufferBytes::new(shape, limits, kernels.segment),
            )?,
            graphs: BTreeMap::new(),
            multiprocessors: context.multiprocessors()? as usize,
            rows_max: rounded(limits.tokens_max as usize),
            kernels,
            context,
        };
        forward.tune(&**driver)?;
        Ok(forward)
    }

    pub(super) fn group(&self) -> usize {
        self.shape.group()
    }

    pub(super) fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Submits the layers to the stream.
    pub(super) fn layers(
        &mut self,
        extent: Extent,
        lists: &Lists,
        arriving: &[CopyProgress],
    ) -> Result<(), CudaError> {
        let tokens = extent.tokens;
        let (x, added) = (self.buffers.x.at(), self.buffers.added.at());
        let embeddings = self.weights.embeddings.at();
        let words = Parameters::default().wide(embeddings.0).wide(lists.tokens.0).wide(x.0);
        // SAFETY, here and below: buffers are as large as the largest step, lists were sent before,
        // and all of them live as long as `self`, which is kept until the stream has ended.
        unsafe { self.kernels.embed.launch(self.stream, tokens, words) }?;
        for layer in 0..self.shape.layers {
            let weights = &self.weights.layers[layer];
            let norms = [&weights.attention_norm, &weights.feed_forward_norm].map(Allocation::at);
            let bias = weights.qkv_bias.as_ref().map_or(0, |bias| bias.at().0);
            let before = if layer > 0 { added.0 } else { 0 };
            self.add_norm(tokens, before, norms[0], None)?;
            self.product(Matrix::Qkv, layer, tokens)?;
            self.turn_and_keep(layer, tokens, bias, lists)?;
            for progress in arriving {
                self.memory.wait_for_layer(self.stream, progress, layer)?;
            }
            self.attend(layer, extent, lists, !arriving.is_empty())?;
            self.product(Matrix::Out, layer, tokens)?;
            self.add_norm(tokens, added.0, norms[1], None)?;
            self.product(Matrix::GateUp, layer, tokens)?;
            self.product(Matrix::Down, layer, tokens)?;
        }
        Ok(())
    }

    /// Submits the logits of some tokens: those that a list names, or the first ones.
    pub(super) fn logits(
        &mut self,
        rows: usize,
        list: Option<DeviceAddress>,
    ) -> Result<(), CudaError> {
        let (added, norm) = (self.buffers.added.at(), self.weights.final_norm.at());
        self.add_norm(rows, added.0, norm, list)?;
        Ok(self.product(Matrix::Head, 0, rounded(rows))?)
    }

    /// Submits a step of tokens of different sequences, with the logits behind each, as a graph.
    pub(super) fn by_graph(&mut self, tokens: usize, lists: &Lists) -> Result<(), CudaError> {
        let graph = match self.graphs.get(&tokens) {
            Some(graph) => *graph,
            None => {
                let graph = self.capture(tokens, lists)?;
                self.graphs.insert(tokens, graph);
                graph
            }
        };
        // SAFETY: the graph exists as long as `self`.
        let launched = unsafe { result::graph::launch(graph, self.stream.raw()) };
        Ok(call("cuGraphLaunch", launched)?)
    }

    fn capture(&mut self, tokens: usize, lists: &Lists) -> Result<sys::CUgraphExec, CudaError> {
        let extent = Extent { tokens, many: 0, has_few: true, has_segments: true };
        let stream = self.stream.raw();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream exists; what is captured is what would be launched.
        call("cuStreamBeginCapture", unsafe { result::stream::begin_capture(stream, mode) })?;
        let handed = self.layers(extent, lists, &[]).and_then(|()| self.logits(tokens, None));
        // SAFETY: the capture has begun, and ends in any case.
        let graph = call("cuStreamEndCapture", unsafe { result::stream::end_capture(stream) });
        handed?;
        let graph = graph?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was captured, and is not needed once it is instantiated.
        let (instance, destroyed) =
            unsafe { (result::graph::instantiate(graph, flags), result::graph::destroy(graph)) };
        let instance = call("cuGraphInstantiate", instance)?;
        call("cuGraphDestroy", destroyed)?;
        Ok(instance)
    }

    fn add_norm(
        &self,
        rows: usize,
        added: u64,
        weights: DeviceAddress,
        list: Option<DeviceAddress>,
    ) -> Result<(), CallError> {
        let Buffers { x, normed, .. } = &self.buffers;
        let parameters = Parameters::default()
            .wide(x.at().0)
            .wide(added)
            .wide(weights.0)
            .wide(normed.at().0)
            .wide(list.map_or(0, |list| list.0))
            .float(self.shape.norm_epsilon);
        // SAFETY: as above.
        unsafe { self.kernels.add_norm.launch(self.stream, rows, parameters) }
    }

    /// Submits a product, and the gates behind a gated one.
    fn product(&mut self, matrix: Matrix, layer: usize, rows: usize) -> Result<(), CallError> {
        if rows <= FEW_ROWS_MAX && self.few_rows.is_some() {
            return self.product_of_few_rows(matrix, layer, rows);
        }
        let operands = self.operands(matrix, layer);
        let size = self.size(matrix, rows);
        // SAFETY: as above.
        unsafe { self.products.multiply(self.stream, size, operands) }?;
        if matrix == Matrix::GateUp { self.gate(rows) } else { Ok(()) }
    }

    fn product_of_few_rows(
        &self,
        matrix: Matrix,
        layer: usize,
        rows: usize,
    ) -> Result<(), CallError> {
        let few_rows = self.few_rows.as_ref().expect("callers check for special kernels first");
        // SAFETY: as above.
        unsafe { few_rows.multiply(self.stream, matrix, layer, rows, self.outcome(matrix)) }
    }

    /// Returns the address of the result of a product.
    fn outcome(&self, matrix: Matrix) -> DeviceAddress {
        let Buffers { qkv, added, gated, logits, .. } = &self.buffers;
        match matrix {
            Matrix::Qkv => qkv.at(),
            Matrix::Out | Matrix::Down => added.at(),
            Matrix::GateUp => gated.at(),
            Matrix::Head => logits.at(),
        }
    }

    fn operands(&self, matrix: Matrix, layer: usize) -> Operands {
        let Places { weights, rows } = self.places(matrix, layer);
        let is_to_be_gated = matrix == Matrix::GateUp;
        let out = if is_to_be_gated { self.buffers.gate_up.at() } else { self.outcome(matrix) };
        Operands { weights, rows, out }
    }

    fn places(&self, matrix: Matrix, layer: usize) -> Places {
        let Buffers { normed, found, gated, .. } = &self.buffers;
        let layer = &self.weights.layers[layer];
        let (weights, rows) = match matrix {
            Matrix::Qkv => (layer.qkv.at(), normed),
            Matrix::Out => (layer.attention_out.at(), found),
            Matrix::GateUp => (layer.gate_up.at(), normed),
            Matrix::Down => (layer.down.at(), gated),
            Matrix::Head => (self.weights.head(), normed),
        };
        Places { weights, rows: rows.at() }
    }

    fn size(&self, matrix: Matrix, rows: usize) -> Size {
        let (inputs, outputs) = matrix.size(&self.shape);
        Size { rows, outputs, inputs, is_wide: matrix == Matrix::Head }
    }

    fn gate(&self, rows: usize) -> Result<(), CallError> {
        let (hidden, Buffers { gate_up, gated, .. }) = (self.shape.hidden, &self.buffers);
        let count = rows * hidden / 8;
        let parameters = Parameters::default().wide(gate_up.at().0).wide(gated.at().0);
        let parameters = parameters.narrow(hidden as u32).wide(count as u64);
        // SAFETY: as above.
        unsafe { self.kernels.gate.launch(self.stream, count.div_ceil(256), parameters) }
    }

    fn turn_and_keep(
        &self,
        layer: usize,
        tokens: usize,
        bias: u64,
        lists: &Lists,
    ) -> Result<(), CallError> {
        let Buffers { qkv, cosines, sines, .. } = &self.buffers;
        let pages = self.pages(layer);
        let parameters = Parameters::default()
            .wide(qkv.at().0)
            .wide(bias)
            .wide(lists.tokens.0)
            .wide(cosines.at().0)
            .wide(sines.at().0)
            .wide(pages.kv)
            .wide(pages.page_bytes)
            .wide(pages.layer_offset)
            .narrow(tokens as u32);
        let threads = tokens * self.shape.qkv() / 4;
        // SAFETY: as above; places are in pages that the step writes to.
        unsafe { self.kernels.turn_and_keep.launch(self.stream, threads.div_ceil(256), parameters) }
    }

    /// Submits attention. Attention kernels start only when all pages have been written.
    fn attend(
        &self,
        layer: usize,
        extent: Extent,
        lists: &Lists,
        waits_for_pages: bool,
    ) -> Result<(), CallError> {
        let Buffers { qkv, found, partials, .. } = &self.buffers;
        let (pages, kv_heads) = (self.pages(layer), self.shape.kv_heads);
        let launch = |kernel: &Kernel, blocks, parameters| {
            let kernel = if waits_for_pages { kernel.alone() } else { *kernel };
            // SAFETY: as above; items name tokens of the step, and pages that hold what they look at.
            unsafe { kernel.launch(self.stream, blocks, parameters) }
        };
        let common = || Parameters::default().wide(qkv.at().0).wide(found.at().0).pages(pages);
        let mapped = |parameters: Parameters| match &self.map {
            Some(map) => parameters.map(map).narrow(layer as u32),
            None => parameters,
        };
        if extent.many > 0 {
            let parameters = mapped(common().wide(lists.many.0).wide(partials.at().0));
            launch(&self.kernels.attend, extent.many * kv_heads, parameters)?;
        }
        if extent.has_few {
            let parameters =
                common().wide(lists.few.0).wide(lists.few_count.0).wide(partials.at().0);
            let blocks = FEW_HOPPER_BLOCKS * self.multiprocessors;
            launch(&self.kernels.attend_few, blocks, mapped(parameters))?;
        }
        if extent.has_segments {
            let parameters = Parameters::default()
                .wide(partials.at().0)
                .wide(lists.segments.0)
                .wide(lists.segments_counts.0)
                .wide(found.at().0);
            launch(&self.kernels.join, JOIN_BLOCKS * self.multiprocessors, parameters)?;
        }
        Ok(())
    }

    fn pages(&self, layer: usize) -> Pages {
        let layout = self.memory.layout();
        let place = layout.layer(layer).next().expect("all layers are in the one slab");
        Pages {
            kv: self.memory.base().0,
            page_bytes: self.memory.page_bytes() as u64,
            layer_offset: place.start as u64,
            table: self.buffers.table.at().0,
            row_entries: u64::from(self.buffers.row_entries),
        }
    }

    /// Selects the fastest algorithms for products of the usual sizes, and checks that all of them
    /// agree.
    fn tune(&mut self, driver: &dyn Driver) -> Result<(), CudaError> {
        let most = self.rows_max;
        let usual = (GRAPH_TOKENS_MAX + 64..=TUNED_ROWS_MAX).step_by(64);
        let mut sizes: Vec<usize> = graph_rows().chain(usual).filter(|rows| *rows < most).collect();
        sizes.push(most);
        if let Some(kernels) = &self.kernels.few_rows {
            let multiprocessors = self.context.multiprocessors()?;
            let places = |matrix, layer| self.places(matrix, layer);
            self.few_rows = FewRows::new(&self.shape, kernels, multiprocessors, places)?;
        }
        for matrix in Matrix::ALL {
            let rows_max = if matrix == Matrix::Head { LOGITS_ROWS } else { most };
            let sizes = sizes.iter().filter(|rows| **rows <= rows_max);
            let sizes: Vec<Size> = sizes.map(|rows| self.size(matrix, *rows)).collect();
            let operands = self.operands(matrix, 0);
            self.fill_rows(matrix, rows_max)?;
            // SAFETY: buffers are as large as the largest step, and nothing else uses them yet.
            unsafe { self.products.settle(driver, self.stream, &sizes, operands) }?;
            if self.few_rows.is_some() && !self.few_rows_agree(driver, matrix, rows_max)? {
                tracing::warn!(
                    "products with few rows of {matrix:?} are not bit-identical to those with many \
                     rows: using slower cuBLASLt instead"
                );
                self.few_rows = None;
            }
        }
        self.products.save_choices();
        Ok(())
    }

    /// Compares products of some numbers of rows with the same rows of the largest product, bit by
    /// bit, and describes the differences. No other work is in flight.
    pub(super) fn product_differences(
        &mut self,
        driver: &dyn Driver,
        layer: usize,
        counts: &[usize],
    ) -> Result<Vec<String>, CudaError> {
        let mut differences = Vec::new();
        for matrix in Matrix::ALL {
            let most = if matrix == Matrix::Head { LOGITS_ROWS } else { self.rows_max };
            self.fill_rows(matrix, most)?;
            self.product(matrix, layer, most)?;
            let among_all = self.outcome_bytes(driver, matrix, most)?;
            for &rows in counts.iter().filter(|rows| **rows < most) {
                self.clear_outcome(matrix, rows)?;
                self.product(matrix, layer, rows)?;
                let found = self.outcome_bytes(driver, matrix, rows)?;
                let row_bytes = self.outcome_row_bytes(matrix);
                let pairs = found.chunks(row_bytes).zip(among_all.chunks(row_bytes));
                let differ = pairs.filter(|(found, expected)| found != expected).count();
                if differ > 0 {
                    differences.push(format!(
                        "{differ} of {rows} rows of {matrix:?} in layer {layer} are not those of {most} rows"
                    ));
                }
            }
        }
        Ok(differences)
    }

    /// Fills the rows of a product with pseudo-random numbers.
    fn fill_rows(&self, matrix: Matrix, rows: usize) -> Result<(), CallError> {
        let count = (rows * self.size(matrix, rows).inputs) as u64;
        let parameters = Parameters::default().wide(self.places(matrix, 0).rows.0).wide(count);
        // SAFETY: buffers are as large as the largest step.
        unsafe { self.kernels.fill.launch(self.stream, 1024, parameters.wide(7 << 50).float(1.0)) }
    }

    fn outcome_row_bytes(&self, matrix: Matrix) -> usize {
        let (_, outputs) = matrix.size(&self.shape);
        match matrix {
            Matrix::GateUp => outputs,
            Matrix::Head => outputs * 4,
            Matrix::Qkv | Matrix::Out | Matrix::Down => outputs * 2,
        }
    }

    fn clear_outcome(&self, matrix: Matrix, rows: usize) -> Result<(), CallError> {
        let (at, bytes) = (self.outcome(matrix), rows * self.outcome_row_bytes(matrix));
        // SAFETY: the rows exist, and no other work is in flight.
        let cleared = unsafe { result::memset_d8_async(at.0, 0, bytes, self.stream.raw()) };
        call("cuMemsetD8Async", cleared)
    }

    /// Waits for a product and returns its result.
    fn outcome_bytes(
        &self,
        driver: &dyn Driver,
        matrix: Matrix,
        rows: usize,
    ) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0_u8; rows * self.outcome_row_bytes(matrix)];
        driver.drain(self.stream)?;
        // SAFETY: that many rows were computed.
        let copied = unsafe { result::memcpy_dtoh_sync(&mut bytes, self.outcome(matrix).0) };
        call("cuMemcpyDtoH", copied)?;
        Ok(bytes)
    }

    /// Returns whether the special kernels give the same bits as large products.
    fn few_rows_agree(
        &mut self,
        driver: &dyn Driver,
        matrix: Matrix,
        most: usize,
    ) -> Result<bool, CudaError> {
        let (operands, size) = (self.operands(matrix, 0), self.size(matrix, most));
        // SAFETY: as above.
        unsafe { self.products.multiply(self.stream, size, operands) }?;
        if matrix == Matrix::GateUp {
            self.gate(most)?;
        }
        let most_few = FEW_ROWS_MAX.min(most);
        let among_many = self.outcome_bytes(driver, matrix, most_few)?;
        for rows in graph_rows().take_while(|rows| *rows <= most_few) {
            self.clear_outcome(matrix, rows)?;
            self.product_of_few_rows(matrix, 0, rows)?;
            if !among_many.starts_with(&self.outcome_bytes(driver, matrix, rows)?) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for graph in self.graphs.values() {
                // SAFETY: the stream has ended before.
                let _ = unsafe { result::graph::exec_destroy(*graph) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_wastes_few_rows_and_needs_few_graphs() {
        for tokens in 1..=GRAPH_TOKENS_MAX {
            let rows = rounded(tokens);
            assert!(rows >= tokens && rounded(rows) == rows, "{tokens} tokens take {rows} rows");
            let in_vain = rows - tokens;
            assert!(
                in_vain < 8 || (tokens > 64 && in_vain < 16),
                "{tokens} tokens take {rows} rows"
            );
        }
        assert_eq!([1, 2, 3, 9, 65, 81, 256, 257].map(rounded), [1, 2, 4, 16, 80, 96, 256, 320]);
        assert_eq!(graph_rows().count(), 23);
    }
}
