//! The weights of a linear layer.

use rayon::prelude::*;

use crate::product::{Before, Operand, Output, multiply};

/// Fewer columns than this are not worth a product of their own.
const COLUMNS_MIN: usize = 64;
/// Columns that the library computes side by side; it is best to cut between them.
const COLUMNS_TOGETHER: usize = 16;
/// Pieces for each thread, so that one that is interrupted does not keep the others waiting.
const PIECES: usize = 2;

/// Weights from `inputs` to `outputs`.
#[derive(Debug)]
pub(crate) struct Matrix {
    inputs: usize,
    outputs: usize,
    /// `[output][input]`.
    weights: Vec<f32>,
}

impl Matrix {
    /// A matrix whose weights `fill` writes, output by output, from any thread of the current pool.
    pub(crate) fn new(
        inputs: usize,
        outputs: usize,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Self {
        let mut weights = vec![0.0; outputs * inputs];
        let rows = weights.par_chunks_exact_mut(inputs).enumerate();
        rows.for_each(|(output, row)| fill(output, row));
        Self { inputs, outputs, weights }
    }

    /// Multiplies rows of inputs and writes, or adds to, rows of outputs, in the current pool.
    pub(crate) fn multiply(&self, x: &[f32], out: &mut [f32], before: Before) {
        let rows = x.len() / self.inputs;
        assert_eq!((rows * self.inputs, rows * self.outputs), (x.len(), out.len()), "whole rows");
        let x = Operand::new(x, rows, self.inputs, self.inputs);
        let piece = self.outputs.div_ceil(rayon::current_num_threads() * PIECES);
        let piece = piece.max(COLUMNS_MIN).next_multiple_of(COLUMNS_TOGETHER);
        let out: Vec<Output<'_>> =
            Output::new(out, rows, self.outputs, self.outputs).pieces(piece).collect();
        let weights = self.weights.par_chunks(piece * self.inputs);
        weights.zip(out).with_max_len(1).for_each(|(weights, out)| {
            let outputs = weights.len() / self.inputs;
            let weights = Operand::new(weights, outputs, self.inputs, self.inputs).transposed();
            multiply(x, weights, before, out);
        });
    }

    /// The weights of one output.
    pub(crate) fn output(&self, output: usize) -> &[f32] {
        &self.weights[output * self.inputs..][..self.inputs]
    }
}
