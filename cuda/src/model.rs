//! Models of the Llama family on a GPU: the forward pass over paged KV in bf16, and sampling.
//!
//! The results for a token are a function of the tokens up to it alone, to the bit. Products sum in
//! an order that does not depend on the number of rows, attention visits keys in tiles and segments
//! at fixed positions, and all other computations are per token.

#![allow(unsafe_code)]

mod choices;
mod choosing;
mod few_rows;
mod forward;
mod header;
pub mod kernels;
mod matrix;
mod plain;
mod products;
mod running;
mod shaping;
mod step;
mod ticket;
mod weights;

use std::path::PathBuf;
use std::sync::Arc;

use terrace_engine::{Batch, KvLayout, KvType, Model, ModelError, StepLimits};
use terrace_model::{Shape, WeightSource};

use crate::context::Context;
use crate::driver::{Driver, Priority};
use crate::error::CudaError;
use crate::fence::CudaFence;
use crate::memory::CudaMemory;
use crate::nvrtc;
use crate::real::RealDriver;
use kernels::Kernels;
use running::Running;
pub use ticket::CudaTicket;
use weights::{Upload, Weights};

/// Version of the computation; changes when results change for the same weights.
const VERSION: u32 = 1;

/// A model of the Llama family, computed on a GPU.
#[derive(Debug)]
pub struct CudaLlama {
    context: Arc<Context>,
    driver: Arc<dyn Driver>,
    shape: Shape,
    fingerprint: String,
    segment: u32,
    /// Folder of stored matrix-product algorithms.
    choices: Option<PathBuf>,
    /// The weights, until the first step.
    weights: Option<Weights>,
    running: Option<Running>,
}

impl CudaLlama {
    /// Uploads the weights of a model to a GPU. `progress` receives the uploaded and the total
    /// bytes.
    ///
    /// # Errors
    /// Fails if the GPU lacks memory or the kernels do not support the model.
    pub fn load(
        context: &Arc<Context>,
        shape: &Shape,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, CudaError> {
        let driver = driver_of(context, shape)?;
        let stream = context.create_stream(Priority::High)?;
        let loaded =
            Upload::new(&driver, shape, source, stream, progress).and_then(|mut upload| {
                let weights = Weights::new(&driver, shape, |part, to| upload.bring(part, to))?;
                upload.end()?;
                Ok(weights)
            });
        driver.destroy_stream(stream);
        Ok(Self::of(context, driver, shape, source.fingerprint(shape), loaded?))
    }

    /// Creates a model with pseudo-random weights, for measurements.
    ///
    /// # Errors
    /// Fails if the GPU lacks memory or the kernels do not support the model.
    pub fn random(context: &Arc<Context>, shape: &Shape) -> Result<Self, CudaError> {
        let driver = driver_of(context, shape)?;
        let kernels = Kernels::new(context, shape, 1, kernels::SEGMENT)?;
        let stream = context.create_stream(Priority::High)?;
        let fill = |part, to| weights::fill(&kernels, shape, stream, part, to);
        let filled = Weights::new(&driver, shape, fill);
        driver.drain(stream)?;
        driver.destroy_stream(stream);
        Ok(Self::of(context, driver, shape, format!("random-{shape:?}"), filled?))
    }

    fn of(
        context: &Arc<Context>,
        driver: Arc<dyn Driver>,
        shape: &Shape,
        weights_fingerprint: String,
        weights: Weights,
    ) -> Self {
        // Models on other GPUs round differently, and KV must not be mixed.
        let fingerprint =
            format!("{weights_fingerprint}-cuda-{VERSION}-sm{}", context.capability());
        let (context, shape, weights) = (context.clone(), shape.clone(), Some(weights));
        let (segment, choices) = (kernels::SEGMENT, None);
        Self { context, driver, shape, fingerprint, segment, choices, weights, running: None }
    }

    /// Sets the number of keys after which the softmax restarts, [`kernels::SEGMENT`] by default;
    /// for measurements. With a smaller segment, decodes of a long context use more blocks and more
    /// device memory than [`step_bytes`](Self::step_bytes) returns.
    ///
    /// # Panics
    /// Panics unless it is a multiple of 64.
    #[must_use]
    pub fn with_segment(self, segment: u32) -> Self {
        assert!(segment > 0 && segment.is_multiple_of(kernels::TILE as u32), "a part of a tile");
        Self { segment, ..self }
    }

    /// Stores the matrix-product algorithms, which are selected by timing, in a folder, and reuses
    /// stored ones. A restart is then faster and computes in the same way. A file is ignored if it
    /// is damaged, or belongs to another GPU or to other versions of driver and libraries.
    #[must_use]
    pub fn keep_choices_in(mut self, folder: Option<PathBuf>) -> Self {
        self.choices = folder;
        self
    }

    /// Compares products of some numbers of rows with the same rows of the largest product, bit by
    /// bit, and describes the differences. For checks of a GPU. The model must have started, and no
    /// step may be in flight.
    ///
    /// # Errors
    /// Fails if the model has not started or the GPU fails.
    pub fn product_differences(
        &mut self,
        layer: usize,
        counts: &[usize],
    ) -> Result<Vec<String>, CudaError> {
        let running = self.running.as_mut();
        running.ok_or(CudaError::Config("it has not started"))?.product_differences(layer, counts)
    }

    /// Prepares for steps, and extends the fingerprint by the properties of this machine that
    /// affect results.
    fn start(
        &mut self,
        weights: Weights,
        memory: &CudaMemory,
        limits: StepLimits,
    ) -> Result<Running, CudaError> {
        let Self { context, driver, shape, segment, choices, .. } = self;
        let choices = choices.as_deref();
        let kernels = Kernels::new(context, shape, limits.page_size, *segment)?;
        let mut running = Running::new(driver, shape, kernels, weights, memory, limits, choices)?;
        let (cublaslt, (major, minor)) = (products::version()?, nvrtc::version()?);
        let bits = running.probe(limits)?;
        // Other segment sizes round differently.
        let segment = self.segment;
        self.fingerprint +=
            &format!("-cublaslt{cublaslt}-nvrtc{major}.{minor}-segment{segment}-bits{bits:016x}");
        Ok(running)
    }

    /// Returns the bytes of a model's weights on the GPU.
    #[must_use]
    pub fn weight_bytes(shape: &Shape) -> usize {
        weights::bytes(shape)
    }

    /// Returns the bytes that a model uses beside weights and KV, for steps of a size.
    #[must_use]
    pub fn step_bytes(shape: &Shape, limits: StepLimits) -> usize {
        running::bytes(shape, limits)
    }
}

/// Checks that the kernels support a model.
fn driver_of(context: &Arc<Context>, shape: &Shape) -> Result<Arc<dyn Driver>, CudaError> {
    const CAPABILITY_MIN: u32 = 80;
    let unsupported = |what: String| Err(CudaError::Unsupported(what));
    if context.capability() < CAPABILITY_MIN {
        let (name, capability) = (context.name(), context.capability());
        return unsupported(format!(
            "{name} has compute capability {}.{}, but bf16 on tensor cores needs 8.0",
            capability / 10,
            capability % 10
        ));
    }
    check_shape(shape)?;
    let (needed, most) = (kernels::shared_bytes(shape), context.block_shared_bytes()? as usize);
    if needed > most {
        return unsupported(format!(
            "with heads of {} elements a kernel block needs {} KiB of shared memory, but {} has {} \
             KiB",
            shape.head_dim,
            needed >> 10,
            context.name(),
            most >> 10
        ));
    }
    Ok(Arc::new(RealDriver::new(context)?))
}

/// Refuses sizes and parts of models that no kernel computes.
fn check_shape(shape: &Shape) -> Result<(), CudaError> {
    let unsupported = |what: String| Err(CudaError::Unsupported(what));
    if shape.qk_norm {
        return unsupported(
            "norms of queries and keys (Qwen3ForCausalLM) are not supported on GPUs".to_owned(),
        );
    }
    for (name, size) in [
        ("head_dim", shape.head_dim),
        ("hidden_size", shape.dim),
        ("intermediate_size", shape.hidden),
    ] {
        if !size.is_multiple_of(8) {
            return unsupported(format!("{name} is {size}, but the kernels need a multiple of 8"));
        }
    }
    if shape.group() > kernels::ROWS {
        return unsupported("more heads share a key head than the kernels support".to_owned());
    }
    Ok(())
}

impl Model for CudaLlama {
    type Memory = CudaMemory;
    type Fence = CudaFence;
    type Ticket = CudaTicket;

    fn kv_layout(&self) -> KvLayout {
        kv_layout(&self.shape)
    }

    fn vocabulary(&self) -> usize {
        self.shape.vocabulary
    }

    fn positions_max(&self) -> u32 {
        self.shape.positions_max
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    fn waits_for_layers(&self) -> bool {
        true
    }

    fn begin(&mut self, memory: &CudaMemory, limits: StepLimits) -> Result<(), ModelError> {
        let already = || ModelError("it has already started".to_owned());
        let weights = self.weights.take().ok_or_else(already)?;
        let running = self.start(weights, memory, limits);
        self.running = Some(running.map_err(|error| ModelError(error.to_string()))?);
        Ok(())
    }

    fn launch(&mut self, batch: &Arc<Batch>) -> Result<CudaTicket, ModelError> {
        let not_yet = || ModelError("it has not started".to_owned());
        self.running.as_mut().ok_or_else(not_yet)?.launch(batch)
    }
}

/// Returns the KV layout of a model on a GPU.
#[must_use]
pub fn kv_layout(shape: &Shape) -> KvLayout {
    KvLayout::keys_and_values(KvType::Bf16, shape.layers, shape.kv_heads, shape.head_dim)
}

#[cfg(test)]
mod tests {
    use terrace_model::unloaded_random;

    use super::*;

    #[test]
    fn a_shape_that_no_kernel_computes_is_refused() {
        let shape = unloaded_random().shape;
        check_shape(&shape).unwrap();
        let refused = |shape: Shape, words: &str| {
            let error = check_shape(&shape).unwrap_err().to_string();
            assert!(
                error.contains(words) && error.contains("run this model on the CPU"),
                "{error}"
            );
        };
        refused(Shape { qk_norm: true, ..shape.clone() }, "Qwen3ForCausalLM");
        refused(Shape { head_dim: 20, ..shape.clone() }, "head_dim is 20");
        refused(Shape { hidden: 1_001, ..shape }, "intermediate_size is 1001");
    }
}
