//! Products of few rows with the model's matrices, by special kernels. They read a matrix once, at
//! memory speed, and give the same bits as [`Products`](super::products::Products).

#![allow(unsafe_code)]

use terrace_model::Shape;

use super::kernels::{FewRowsKernels, Kernel, Map, Parameters, Tiles};
use super::matrix::Matrix;
use crate::driver::{CallError, DeviceAddress, Stream};

/// Largest number of rows for these kernels.
pub(super) const FEW_ROWS_MAX: usize = 64;
/// Blocks that load rows for each other.
const SHARERS: usize = 2;
/// Rows that a block loads: the smallest sufficient number.
const ROWS_EACH: [usize; 3] = [8, 16, FEW_ROWS_MAX / SHARERS];
/// Inputs that are added at once; their number must be a multiple of it.
const INPUTS_AT_ONCE: usize = 128;

/// Tensor maps of all matrices, and of the rows that they are multiplied with.
#[derive(Debug)]
pub(super) struct FewRows {
    layers: Vec<[Product; 4]>,
    to_logits: Product,
    blocks: usize,
}

/// Tensor maps of a matrix and its rows.
#[derive(Debug)]
struct Product {
    kernel: Kernel,
    weights: Map,
    rows: [Map; ROWS_EACH.len()],
    inputs: usize,
    /// Outputs of the kernel, without gates.
    outputs: usize,
    tile: usize,
}

/// Addresses of a matrix and of the rows that it is multiplied with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub(super) weights: DeviceAddress,
    pub(super) rows: DeviceAddress,
}

impl FewRows {
    /// Creates the maps; none if the kernels do not support the shape.
    pub(super) fn new(
        shape: &Shape,
        kernels: &FewRowsKernels,
        multiprocessors: u32,
        places: impl Fn(Matrix, usize) -> Places,
    ) -> Result<Option<Self>, CallError> {
        let tiles = Tiles::new(shape, multiprocessors);
        let is_whole = |inputs: usize| inputs.is_multiple_of(INPUTS_AT_ONCE);
        let outputs_are_pairs = [shape.hidden, shape.vocabulary].iter().all(|it| it % 2 == 0);
        let inputs = [shape.dim, shape.queries(), shape.hidden];
        if !inputs.into_iter().all(is_whole) || !outputs_are_pairs {
            return Ok(None);
        }
        let product = |matrix: Matrix, layer: usize| {
            let (inputs, of_matrix) = matrix.size(shape);
            let (kernel, outputs, tile) = match matrix {
                Matrix::Qkv => (kernels.to_qkv, of_matrix, tiles.qkv),
                Matrix::Out => (kernels.to_out, of_matrix, tiles.out),
                Matrix::GateUp => (kernels.to_gated, of_matrix / 2, tiles.gated),
                Matrix::Down => (kernels.to_down, of_matrix, tiles.down),
                Matrix::Head => (kernels.to_logits, of_matrix, tiles.logits),
            };
            let at = places(matrix, layer);
            let rows = |each| Map::of_matrix(at.rows, FEW_ROWS_MAX, inputs, each);
            let [least, some, most] = ROWS_EACH;
            let rows = [rows(least)?, rows(some)?, rows(most)?];
            let weights = Map::of_matrix(at.weights, of_matrix, inputs, tile)?;
            Ok(Product { kernel, weights, rows, inputs, outputs, tile })
        };
        let layer = |layer| {
            Ok([
                product(Matrix::Qkv, layer)?,
                product(Matrix::Out, layer)?,
                product(Matrix::GateUp, layer)?,
                product(Matrix::Down, layer)?,
            ])
        };
        Ok(Some(Self {
            layers: (0..shape.layers).map(layer).collect::<Result<_, CallError>>()?,
            to_logits: product(Matrix::Head, 0)?,
            blocks: multiprocessors as usize,
        }))
    }

    /// Submits a product to a stream; for [`Matrix::GateUp`], the gated values.
    ///
    /// # Safety
    /// Same as for [`Products::multiply`](super::products::Products::multiply). The rows must be at
    /// the addresses given before, and at most [`FEW_ROWS_MAX`].
    pub(super) unsafe fn multiply(
        &self,
        stream: Stream,
        matrix: Matrix,
        layer: usize,
        rows: usize,
        out: DeviceAddress,
    ) -> Result<(), CallError> {
        let product = match matrix {
            Matrix::Qkv => &self.layers[layer][0],
            Matrix::Out => &self.layers[layer][1],
            Matrix::GateUp => &self.layers[layer][2],
            Matrix::Down => &self.layers[layer][3],
            Matrix::Head => &self.to_logits,
        };
        let enough = ROWS_EACH.iter().position(|each| each * SHARERS >= rows);
        let enough = enough.expect("no more rows than are few");
        let blocks = product.outputs.div_ceil(product.tile).min(self.blocks);
        let parameters = Parameters::default()
            .map(&product.weights)
            .map(&product.rows[enough])
            .wide(out.0)
            .narrow(product.inputs as u32)
            .narrow(product.outputs as u32)
            .narrow(ROWS_EACH[enough] as u32)
            .narrow(rows as u32);
        // SAFETY: guaranteed by the caller.
        unsafe { product.kernel.launch(stream, blocks.next_multiple_of(SHARERS), parameters) }
    }
}
