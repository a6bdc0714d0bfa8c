//! Weights of a linear layer, in the order in which they are multiplied.

#![allow(unsafe_code)]

use rayon::prelude::*;

use crate::simd::{Before, LANES, Lanes, SharedRows, Simd, multiply_panel};

/// Weights from `inputs` to `outputs`, in panels of [`LANES`] outputs.
#[derive(Debug)]
pub(crate) struct Matrix {
    inputs: usize,
    outputs: usize,
    /// `[output / LANES][input]`; the last panel is filled up with zeros.
    panels: Vec<Lanes>,
}

impl Matrix {
    /// A matrix whose weights `fill` writes, output by output, from any thread of the current pool.
    pub(crate) fn new(
        inputs: usize,
        outputs: usize,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> Self {
        let mut panels = vec![Lanes::ZERO; outputs.div_ceil(LANES) * inputs];
        panels.par_chunks_mut(inputs).enumerate().for_each_init(
            || vec![0.0; inputs],
            |row, (index, panel)| {
                for output in index * LANES..outputs.min((index + 1) * LANES) {
                    fill(output, row);
                    for (lanes, weight) in panel.iter_mut().zip(row.iter()) {
                        lanes.0[output % LANES] = *weight;
                    }
                }
            },
        );
        Self { inputs, outputs, panels }
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Multiplies rows of inputs and writes, or adds to, rows of outputs, in the current pool.
    pub(crate) fn multiply(&self, simd: Simd, x: &[f32], out: &mut [f32], before: Before) {
        let out = SharedRows::new(out, self.outputs);
        assert_eq!(x.len(), out.rows() * self.inputs, "rows of inputs and of outputs");
        let panels = self.outputs.div_ceil(LANES);
        // Enough pieces that threads that are interrupted do not keep the others waiting.
        let piece = panels.div_ceil(rayon::current_num_threads() * 4);
        let pieces = self.panels.par_chunks(piece * self.inputs).enumerate();
        pieces.for_each(|(index, panels)| {
            for (panel, weights) in panels.chunks_exact(self.inputs).enumerate() {
                let column = (index * piece + panel) * LANES;
                let columns = LANES.min(self.outputs - column);
                // SAFETY: each panel has its own columns, and each is multiplied by one thread.
                unsafe {
                    multiply_panel(simd, x, self.inputs, weights, out, column, columns, before);
                }
            }
        });
    }

    /// The weights of one output.
    pub(crate) fn copy_output(&self, output: usize, to: &mut [f32]) {
        let panel = &self.panels[output / LANES * self.inputs..][..self.inputs];
        for (to, lanes) in to.iter_mut().zip(panel) {
            *to = lanes.0[output % LANES];
        }
    }
}
