//! The weights of a model in device memory.

#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::result;
use half::bf16;
use terrace_model::{LayerPart, Part, Shape, WeightSource};

use super::kernels::{Kernels, Parameters};
use crate::context::call;
use crate::driver::{DeviceAddress, Driver, Stream};
use crate::error::CudaError;
use crate::fence::{CudaFence, EventPool};
use crate::memory::Allocation;
use crate::pinned::PinnedBytes;

/// Bytes in flight at once, in each of two buffers.
const PIECE_BYTES: usize = 32 << 20;

/// All weights, in bf16.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) embeddings: Allocation,
    pub(super) layers: Vec<Layer>,
    pub(super) final_norm: Allocation,
    /// None if the embeddings are also the output matrix.
    head: Option<Allocation>,
}

/// The weights of one layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Allocation,
    pub(super) qkv: Allocation,
    pub(super) qkv_bias: Option<Allocation>,
    pub(super) attention_out: Allocation,
    pub(super) feed_forward_norm: Allocation,
    pub(super) gate_up: Allocation,
    pub(super) down: Allocation,
}

impl Weights {
    /// Returns the address of the output matrix.
    pub(super) fn head(&self) -> DeviceAddress {
        self.head.as_ref().unwrap_or(&self.embeddings).at()
    }

    /// Allocates memory for all parts and calls `fill` for each.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        shape: &Shape,
        mut fill: impl FnMut(Part, DeviceAddress) -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let elements = |part: Part| {
            let (rows, columns) = part.size(shape);
            rows.unwrap_or(1) * columns
        };
        // Parts that are used together are adjacent.
        let mut get = |parts: &[Part]| {
            let all: usize = parts.iter().map(|part| elements(*part)).sum();
            let allocation = Allocation::new(driver, all * 2)?;
            let mut at = allocation.at();
            for part in parts {
                fill(*part, at)?;
                at = at.offset(elements(*part) * 2);
            }
            Ok::<_, CudaError>(allocation)
        };
        let mut layers = Vec::with_capacity(shape.layers);
        for layer in 0..shape.layers {
            use LayerPart::{
                AttentionNorm, AttentionOut, Down, FeedForwardNorm, Gate, KeyBias, Keys, Queries,
                QueryBias, Up, ValueBias, Values,
            };
            let mut get = |parts: &[LayerPart]| {
                let parts: Vec<_> = parts.iter().map(|part| Part::OfLayer(layer, *part)).collect();
                get(&parts)
            };
            layers.push(Layer {
                attention_norm: get(&[AttentionNorm])?,
                qkv: get(&[Queries, Keys, Values])?,
                qkv_bias: match shape.qkv_bias {
                    true => Some(get(&[QueryBias, KeyBias, ValueBias])?),
                    false => None,
                },
                attention_out: get(&[AttentionOut])?,
                feed_forward_norm: get(&[FeedForwardNorm])?,
                gate_up: get(&[Gate, Up])?,
                down: get(&[Down])?,
            });
        }
        Ok(Self {
            embeddings: get(&[Part::Embeddings])?,
            layers,
            final_norm: get(&[Part::FinalNorm])?,
            head: if shape.tied { None } else { Some(get(&[Part::Head])?) },
        })
    }
}

/// Returns the bytes of a model's weights in bf16.
pub(super) fn bytes(shape: &Shape) -> usize {
    let part = |part: Part| part.size(shape).0.unwrap_or(1) * part.size(shape).1 * 2;
    Part::all(shape).map(part).sum()
}

/// Uploads weights to the device through pinned memory.
pub(super) struct Upload<'a> {
    shape: &'a Shape,
    source: &'a dyn WeightSource,
    stream: Stream,
    events: EventPool,
    /// Two buffers in turn: one is in flight while the other is filled.
    pieces: [(PinnedBytes, Option<CudaFence>); 2],
    turn: usize,
    brought: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Upload<'a> {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        shape: &'a Shape,
        source: &'a dyn WeightSource,
        stream: Stream,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, CudaError> {
        let piece = || Ok::<_, CudaError>((PinnedBytes::new(driver, PIECE_BYTES)?, None));
        let (pieces, events) = ([piece()?, piece()?], EventPool::new(driver));
        Ok(Self { shape, source, stream, events, pieces, turn: 0, brought: 0, progress })
    }

    /// Uploads a part.
    pub(super) fn bring(&mut self, part: Part, mut to: DeviceAddress) -> Result<(), CudaError> {
        let source = self.source;
        if let Some(bytes) = source.as_bf16(part) {
            for bytes in bytes.chunks(PIECE_BYTES) {
                self.send(to, |piece| {
                    piece[..bytes.len()].copy_from_slice(bytes);
                    bytes.len()
                })?;
                to = to.offset(bytes.len());
            }
            return Ok(());
        }
        let (rows, columns) = part.size(self.shape);
        let (rows, mut next) = (rows.unwrap_or(1), 0);
        let mut row = vec![0.0; columns];
        while next < rows {
            let count = (PIECE_BYTES / (columns * 2)).clamp(1, rows - next);
            self.send(to, |piece| {
                for (place, number) in (next..next + count).enumerate() {
                    source.row(part, number, &mut row);
                    let piece = piece[place * columns * 2..].as_chunks_mut().0;
                    for (bytes, number) in piece.iter_mut().zip(&row) {
                        *bytes = bf16::from_f32(*number).to_le_bytes();
                    }
                }
                count * columns * 2
            })?;
            next += count;
            to = to.offset(count * columns * 2);
        }
        Ok(())
    }

    fn send(
        &mut self,
        to: DeviceAddress,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<(), CudaError> {
        let (piece, sent) = &mut self.pieces[self.turn];
        if let Some(sent) = sent.take() {
            sent.wait()?;
        }
        let bytes = fill(piece.bytes_mut());
        // SAFETY: the device memory has the same size, and the piece is not touched before it has
        // arrived.
        let copied =
            unsafe { result::memcpy_htod_async(to.0, &piece.bytes()[..bytes], self.stream.raw()) };
        call("cuMemcpyHtoDAsync", copied)?;
        *sent = Some(self.events.record(self.stream)?);
        self.turn = 1 - self.turn;
        self.brought += bytes as u64;
        (self.progress)(self.brought, self::bytes(self.shape) as u64);
        Ok(())
    }

    /// Waits until all parts have arrived.
    pub(super) fn end(&mut self) -> Result<(), CudaError> {
        for (_, sent) in &mut self.pieces {
            if let Some(sent) = sent.take() {
                sent.wait()?;
            }
        }
        Ok(())
    }
}

/// Fills a part with pseudo-random numbers of a scale that keeps activations finite.
pub(super) fn fill(
    kernels: &Kernels,
    shape: &Shape,
    stream: Stream,
    part: Part,
    to: DeviceAddress,
) -> Result<(), CudaError> {
    const BLOCKS: usize = 1024;
    let (rows, columns) = part.size(shape);
    let (count, inputs) = ((rows.unwrap_or(1) * columns) as u64, (columns as f32).sqrt());
    let deep = (2.0 * shape.layers as f32).sqrt();
    let scale = match part {
        Part::Embeddings => 1.0,
        Part::Head => 4.0 / inputs,
        Part::FinalNorm
        | Part::OfLayer(
            _,
            LayerPart::AttentionNorm
            | LayerPart::FeedForwardNorm
            | LayerPart::QueryNorm
            | LayerPart::KeyNorm,
        ) => {
            let parameters = Parameters::default().wide(to.0).wide(count).float(1.0);
            // SAFETY: the part has that size.
            return Ok(unsafe { kernels.fill_with.launch(stream, BLOCKS, parameters) }?);
        }
        Part::OfLayer(_, LayerPart::Queries | LayerPart::Keys) => 1.5 / inputs,
        Part::OfLayer(_, LayerPart::AttentionOut) => 4.0 / inputs / deep,
        Part::OfLayer(_, LayerPart::Down) => 2.0 / inputs / deep,
        Part::OfLayer(
            _,
            LayerPart::Values
            | LayerPart::Gate
            | LayerPart::Up
            | LayerPart::QueryBias
            | LayerPart::KeyBias
            | LayerPart::ValueBias,
        ) => 1.0 / inputs,
    };
    let which = Part::all(shape).position(|other| other == part).unwrap_or(0) as u64;
    let parameters = Parameters::default().wide(to.0).wide(count).wide(which << 40).float(scale);
    // SAFETY: the part has that size.
    Ok(unsafe { kernels.fill.launch(stream, BLOCKS, parameters) }?)
}
