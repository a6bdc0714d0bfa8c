//! The forward pass.

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use terrace_engine::{
    CpuMemory, Forward, KvLayout, KvShape, Logits, ModelError, NewWeights, Span, Step, StepPages,
    WeightsError,
};

use crate::attention::Attention;
use crate::math::{rms_norm, rms_norm_in_place, swiglu};
use crate::product::{Before, arithmetic};
use crate::rope;
use crate::shape::Shape;
use crate::weights::{Layer, Weights};

/// Rows that go through the feed-forward part together.
const ROWS: usize = 512;
/// Maximum number of threads.
const THREADS_MAX: usize = 1024;

/// A model of the Llama family, computed on the CPU.
///
/// The result for a token depends on the tokens up to it and on nothing else, to the bit:
/// matrix products sum up in the order of inputs whatever the number of rows, and attention visits
/// keys in tiles at fixed positions.
#[derive(Debug)]
pub struct Llama {
    shape: Shape,
    weights: Weights,
    fingerprint: String,
    frequencies: Vec<f32>,
    pool: ThreadPool,
    attention: Attention,
    scratch: Scratch,
}

/// Buffers of a step. They grow to the largest step so far.
#[derive(Debug, Default)]
struct Scratch {
    /// `[token][element]`, between layers.
    x: Vec<f32>,
    normed: Vec<f32>,
    /// `[token][queries, keys, values]`.
    qkv: Vec<f32>,
    /// `[token][results of heads]`.
    found: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    /// `[token][cosines, sines]`.
    angles: Vec<f32>,
}

impl Llama {
    /// Creates a model with its own thread pool. `collect` reads the weights.
    pub(crate) fn new(
        shape: Shape,
        fingerprint: String,
        threads: usize,
        collect: impl FnOnce(&Shape) -> Weights + Send,
    ) -> Self {
        let threads = threads.clamp(1, THREADS_MAX);
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("terrace-model-{index}"))
            .build()
            .expect("a system that cannot start threads cannot run a model");
        let weights = pool.install(|| collect(&shape));
        Self {
            frequencies: shape.rope.frequencies(shape.head_dim),
            attention: Attention::new(&shape, threads),
            scratch: Scratch::default(),
            shape,
            weights,
            fingerprint,
            pool,
        }
    }

    /// The size of a token's KV.
    #[must_use]
    pub fn kv_shape(&self) -> KvShape {
        KvShape {
            layers: self.shape.layers,
            heads: self.shape.kv_heads,
            head_elements: self.shape.head_dim,
        }
    }

    /// Checks a step.
    fn check(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let unknown = |token: &&u32| **token as usize >= self.shape.vocabulary;
        if let Some(token) = step.tokens.iter().find(unknown) {
            return Err(ModelError(format!(
                "token {token} is not one of the model's {}",
                self.shape.vocabulary
            )));
        }
        let too_long = |span: &&Span| span.end() > self.shape.positions_max;
        if let Some(span) = step.spans.iter().find(too_long) {
            return Err(ModelError(format!(
                "a sequence of {} tokens is longer than the model's {}",
                span.end(),
                self.shape.positions_max
            )));
        }
        if step.spans.iter().any(|span| span.tokens.is_empty()) {
            return Err(ModelError("a span has no tokens".to_owned()));
        }
        if step.spans.iter().any(|span| span.logits > span.tokens.len()) {
            return Err(ModelError("a span wants more logits than it has tokens".to_owned()));
        }
        Ok(())
    }
}

impl Forward for Llama {
    type Memory = CpuMemory;

    fn kv_layout(&self) -> KvLayout {
        self.kv_shape().layout()
    }

    fn vocabulary(&self) -> usize {
        self.shape.vocabulary
    }

    fn positions_max(&self) -> u32 {
        self.shape.positions_max
    }

    fn fingerprint(&self) -> String {
        // Processors that round differently compute different KV from the same weights, and it must
        // not be mixed.
        format!("{}-{}", self.fingerprint, arithmetic())
    }

    /// Takes another `Llama` of the same shape.
    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        let refused = |why: &str| WeightsError::Refused(why.to_owned());
        let other: Box<Llama> = weights.downcast().map_err(|_| refused("it takes a `Llama`"))?;
        if other.shape != self.shape {
            return Err(refused("those are of a model of another shape"));
        }
        *self = *other;
        Ok(())
    }

    fn waits_for_layers(&self) -> bool {
        true
    }

    fn forward(
        &mut self,
        memory: &CpuMemory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        self.check(step)?;
        let mut pages = memory.lend(step).map_err(|lent| ModelError(lent.to_string()))?;
        let kv_shape = self.kv_shape();
        let Self { shape, weights, frequencies, pool, attention, scratch, .. } = self;
        pool.install(|| {
            scratch.begin(shape, weights, frequencies, step);
            attention.prepare(shape, step);
            for (index, layer) in weights.layers.iter().enumerate() {
                scratch.queries_keys_values(shape, layer);
                scratch.write_kv(shape, kv_shape, index, step, &mut pages);
                step.wait_for_layer(index).map_err(|error| ModelError(error.to_string()))?;
                let (qkv, found) = (&scratch.qkv, &mut scratch.found);
                attention.layer(shape, index, step, &pages, qkv, found);
                layer.attention_out.multiply(&scratch.found, &mut scratch.x, Before::Added);
                scratch.feed_forward(shape, layer);
            }
            scratch.logits(shape, weights, step, logits);
            Ok(())
        })
    }
}

impl Scratch {
    /// Looks up the embeddings of all tokens and the angles of their positions.
    fn begin(&mut self, shape: &Shape, weights: &Weights, frequencies: &[f32], step: &Step<'_>) {
        let tokens = step.tokens.len();
        self.x.resize(tokens * shape.dim, 0.0);
        self.normed.resize(tokens * shape.dim, 0.0);
        self.qkv.resize(tokens * shape.qkv(), 0.0);
        self.found.resize(tokens * shape.queries(), 0.0);
        self.angles.resize(tokens * shape.head_dim, 0.0);
        self.x
            .par_chunks_mut(shape.dim)
            .zip(step.tokens)
            .for_each(|(out, token)| weights.embed(*token as usize, out));
        for span in step.spans {
            let angles = &mut self.angles
                [span.tokens.start * shape.head_dim..span.tokens.end * shape.head_dim];
            let positions = span.start..span.end();
            angles
                .par_chunks_mut(shape.head_dim)
                .zip(positions.into_par_iter())
                .for_each(|(angles, position)| rope::angles(frequencies, position, angles));
        }
    }

    /// Computes queries, keys and values of all tokens, and turns them by their positions.
    fn queries_keys_values(&mut self, shape: &Shape, layer: &Layer) {
        let epsilon = shape.norm_epsilon;
        norm(&self.x, &layer.attention_norm, epsilon, &mut self.normed);
        layer.qkv.multiply(&self.normed, &mut self.qkv, Before::Replaced);
        let rows = self.qkv.par_chunks_mut(shape.qkv()).zip(self.angles.par_chunks(shape.head_dim));
        rows.for_each(|(row, angles)| {
            if let Some(bias) = &layer.qkv_bias {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
            let (queries, rest) = row.split_at_mut(shape.queries());
            let keys = &mut rest[..shape.keys()];
            if let Some(norm) = &layer.qk_norm {
                rms_norm_in_place(queries, &norm.query, epsilon);
                rms_norm_in_place(keys, &norm.key, epsilon);
            }
            let heads = queries.chunks_exact_mut(shape.head_dim);
            for head in heads.chain(keys.chunks_exact_mut(shape.head_dim)) {
                rope::turn(head, angles);
            }
        });
    }

    /// Copies the keys and values of all tokens to their pages.
    fn write_kv(
        &self,
        shape: &Shape,
        kv_shape: KvShape,
        layer: usize,
        step: &Step<'_>,
        pages: &mut StepPages<'_>,
    ) {
        let (page_size, head_dim) = (step.table.page_size(), shape.head_dim);
        for span in step.spans {
            let row = step.pages_of(span);
            let mut position = span.start;
            while position < span.end() {
                let (page, within) = (position / page_size, position % page_size);
                let count = (page_size - within).min(span.end() - position);
                let page = pages.write(row[page as usize]);
                let first = span.tokens.start + (position - span.start) as usize;
                for (token, within) in (first..).zip(within as usize..(within + count) as usize) {
                    let from = &self.qkv[token * shape.qkv() + shape.queries()..];
                    let (keys, values) = from[..2 * shape.keys()].split_at(shape.keys());
                    for head in 0..shape.kv_heads {
                        let key_at = kv_shape.keys_at(layer, head, page_size) + within * head_dim;
                        let value_at = key_at + page_size as usize * head_dim;
                        let part = head * head_dim..(head + 1) * head_dim;
                        page[key_at..][..head_dim].copy_from_slice(&keys[part.clone()]);
                        page[value_at..][..head_dim].copy_from_slice(&values[part]);
                    }
                }
                position += count;
            }
        }
    }

    /// The second half of a layer.
    fn feed_forward(&mut self, shape: &Shape, layer: &Layer) {
        let rows_max = ROWS.min(self.x.len() / shape.dim);
        self.gate_up.resize(rows_max * 2 * shape.hidden, 0.0);
        self.gated.resize(rows_max * shape.hidden, 0.0);
        for x in self.x.chunks_mut(ROWS * shape.dim) {
            let rows = x.len() / shape.dim;
            let normed = &mut self.normed[..x.len()];
            let gate_up = &mut self.gate_up[..rows * 2 * shape.hidden];
            let gated = &mut self.gated[..rows * shape.hidden];
            norm(x, &layer.feed_forward_norm, shape.norm_epsilon, normed);
            layer.gate_up.multiply(normed, gate_up, Before::Replaced);
            gate_up
                .par_chunks(2 * shape.hidden)
                .zip(gated.par_chunks_mut(shape.hidden))
                .with_min_len(8)
                .for_each(|(gate_up, gated)| swiglu(gate_up, gated, shape.hidden));
            layer.down.multiply(gated, x, Before::Added);
        }
    }

    /// Gives the logits after the tokens for which spans want them.
    fn logits(
        &mut self,
        shape: &Shape,
        weights: &Weights,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) {
        let mut rows = 0;
        for token in step.spans.iter().flat_map(|span| {
            let end = span.tokens.end;
            end - span.logits..end
        }) {
            let x = &self.x[token * shape.dim..][..shape.dim];
            let normed = &mut self.normed[rows * shape.dim..][..shape.dim];
            rms_norm(x, &weights.final_norm, shape.norm_epsilon, normed);
            rows += 1;
        }
        let normed = &self.normed[..rows * shape.dim];
        for normed in normed.chunks(Logits::ROWS_MAX * shape.dim) {
            let rows = normed.len() / shape.dim;
            logits.add(rows, |out| weights.head.multiply(normed, out, Before::Replaced));
        }
    }
}

fn norm(x: &[f32], weights: &[f32], epsilon: f32, out: &mut [f32]) {
    x.par_chunks(weights.len())
        .zip(out.par_chunks_mut(weights.len()))
        .with_min_len(16)
        .for_each(|(x, out)| rms_norm(x, weights, epsilon, out));
}
