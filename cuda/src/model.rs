//! Models of the Llama family on a GPU: the forward pass over paged KV in bf16, and the choice of tokens.
//!
//! What a model computes for a token depends on the tokens up to it and on nothing else, to the bit: products sum up in an
//! order that does not depend on the number of rows, attention visits keys in tiles and segments at fixed positions, and
//! everything else is computed for each token by itself.

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

/// Changes when the same weights are computed differently.
const VERSION: u32 = 1;

/// A model of the Llama family, computed on a GPU.
#[derive(Debug)]
pub struct CudaLlama {
    context: Arc<Context>,
    driver: Arc<dyn Driver>,
    shape: Shape,
    fingerprint: String,
    segment: u32,
    /// Where algorithms of products are kept.
    choices: Option<PathBuf>,
    /// Until the first step.
    weights: Option<Weights>,
    running: Option<Running>,
}

impl CudaLlama {
    /// Brings the weights of a model to a GPU. `progress` is told how many bytes have been brought, and of how many.
    ///
    /// # Errors
    /// When the GPU has no room for them, or cannot compute such a model.
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

    /// A model whose weights look random: for measurements, where they need not mean anything.
    ///
    /// # Errors
    /// When the GPU has no room for it, or cannot compute such a model.
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
        // Others round otherwise, and their KV must not be mixed with this.
        let fingerprint =
            format!("{weights_fingerprint}-cuda-{VERSION}-sm{}", context.capability());
        let (context, shape, weights) = (context.clone(), shape.clone(), Some(weights));
        let (segment, choices) = (kernels::SEGMENT, None);
        Self { context, driver, shape, fingerprint, segment, choices, weights, running: None }
    }

    /// The same model, whose softmax begins afresh after so many keys, [`kernels::SEGMENT`] otherwise: for measurements.
    /// With fewer, decodes of a long context are computed by more blocks, which takes more device memory than
    /// [`step_bytes`](Self::step_bytes) says.
    ///
    /// # Panics
    /// When it is no multiple of 64.
    #[must_use]
    pub fn with_segment(self, segment: u32) -> Self {
        assert!(segment > 0 && segment.is_multiple_of(kernels::TILE as u32), "a part of a tile");
        Self { segment, ..self }
    }

    /// Keeps the algorithms that are chosen for matrix products, by their time, in a folder, and takes those that are
    /// there. A restart then starts sooner, and computes in the same way. A file that is damaged, or of another GPU or
    /// other versions of driver and libraries, is not used.
    #[must_use]
    pub fn keep_choices_in(mut self, folder: Option<PathBuf>) -> Self {
        self.choices = folder;
        self
    }

    /// Compares products of some numbers of rows with the same rows of a product of as many rows as a step can have: all
    /// rows, and to the bit. Returns what differs, in words. For checks of a GPU; the model has begun, and no step is
    /// under way.
    ///
    /// # Errors
    /// When the model has not begun, or the GPU fails.
    pub fn product_differences(
        &mut self,
        layer: usize,
        counts: &[usize],
    ) -> Result<Vec<String>, CudaError> {
        let running = self.running.as_mut();
        running.ok_or(CudaError::Config("it has not started"))?.product_differences(layer, counts)
    }

    /// Prepares for steps, and adds to the fingerprint by what and how this machine computes.
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
        // Sums of other segments are rounded otherwise.
        let segment = self.segment;
        self.fingerprint +=
            &format!("-cublaslt{cublaslt}-nvrtc{major}.{minor}-segment{segment}-bits{bits:016x}");
        Ok(running)
    }

    /// How many bytes the weights of a model take on the GPU.
    #[must_use]
    pub fn weight_bytes(shape: &Shape) -> usize {
        weights::bytes(shape)
    }

    /// How many bytes a model takes beside its weights and KV, with steps of such a size.
    #[must_use]
    pub fn step_bytes(shape: &Shape, limits: StepLimits) -> usize {
        running::bytes(shape, limits)
    }
}

/// Looks whether a model can be computed.
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

/// How the KV of a model lies in pages on a GPU.
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
