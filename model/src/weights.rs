//! The weights of a model, in the order of their use.

use rayon::prelude::*;

use crate::matrix::Matrix;
use crate::shape::Shape;

/// All weights.
#[derive(Debug)]
pub(crate) struct Weights {
    /// `[token][element]`; none where the rows of `head` are the embeddings.
    pub(crate) embeddings: Option<Vec<f32>>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Vec<f32>,
    /// From a token's elements to logits.
    pub(crate) head: Matrix,
}

impl Weights {
    /// The embedding of a token.
    pub(crate) fn embed(&self, token: usize, out: &mut [f32]) {
        out.copy_from_slice(match &self.embeddings {
            Some(table) => &table[token * out.len()..][..out.len()],
            None => self.head.output(token),
        });
    }
}

/// The weights of one layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    /// To queries, keys and values, one after the other.
    pub(crate) qkv: Matrix,
    pub(crate) qkv_bias: Option<Vec<f32>>,
    pub(crate) qk_norm: Option<QkNorm>,
    pub(crate) attention_out: Matrix,
    pub(crate) feed_forward_norm: Vec<f32>,
    /// To gates and to the gated values.
    pub(crate) gate_up: Matrix,
    pub(crate) down: Matrix,
}

/// The norms of one head's query and key, which all heads of a layer share.
#[derive(Debug)]
pub(crate) struct QkNorm {
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
}

/// A source of weights. Several threads read rows from it.
pub trait WeightSource: std::fmt::Debug + Send + Sync {
    /// Writes a row of a part: the weights of one output, an embedding, or all of a vector.
    fn row(&self, part: Part, row: usize, out: &mut [f32]);

    /// Returns all rows of a part if they are stored in bf16, little-endian.
    fn as_bf16(&self, part: Part) -> Option<&[u8]> {
        let _ = part;
        None
    }

    /// Returns a name that no other weights of any shape have. It may have to read all of them.
    fn fingerprint(&self, shape: &Shape) -> String;
}

/// A part of a model's weights: as rows of a matrix, or as one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// A row for each token.
    Embeddings,
    /// The weights of the norm behind the last layer.
    FinalNorm,
    /// To logits; absent if the embeddings are used for that.
    Head,
    /// One of a layer.
    OfLayer(usize, LayerPart),
}

/// A part of a layer's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerPart {
    /// The weights of the norm before attention.
    AttentionNorm,
    /// To queries.
    Queries,
    /// To keys.
    Keys,
    /// To values.
    Values,
    /// Biases of queries.
    QueryBias,
    /// Biases of keys.
    KeyBias,
    /// Biases of values.
    ValueBias,
    /// From the results of the heads.
    AttentionOut,
    /// The weights of the norm before the feed-forward part.
    FeedForwardNorm,
    /// To gates.
    Gate,
    /// To the gated values.
    Up,
    /// From the gated values.
    Down,
    /// The weights of the norm of a head's query.
    QueryNorm,
    /// The weights of the norm of a head's key.
    KeyNorm,
}

impl LayerPart {
    /// All parts that a layer of this shape has.
    pub(crate) fn all(shape: &Shape) -> impl Iterator<Item = Self> {
        const BIASES: [LayerPart; 3] =
            [LayerPart::QueryBias, LayerPart::KeyBias, LayerPart::ValueBias];
        const NORMS: [LayerPart; 2] = [LayerPart::QueryNorm, LayerPart::KeyNorm];
        let others = [
            Self::AttentionNorm,
            Self::Queries,
            Self::Keys,
            Self::Values,
            Self::AttentionOut,
            Self::FeedForwardNorm,
            Self::Gate,
            Self::Up,
            Self::Down,
        ];
        let biases = BIASES.into_iter().filter(|_| shape.qkv_bias);
        let norms = NORMS.into_iter().filter(|_| shape.qk_norm);
        others.into_iter().chain(biases).chain(norms)
    }
}

impl Part {
    /// All parts that a model of this shape has.
    pub fn all(shape: &Shape) -> impl Iterator<Item = Self> {
        let head = (!shape.tied).then_some(Self::Head);
        let layers = (0..shape.layers)
            .flat_map(|layer| LayerPart::all(shape).map(move |part| Self::OfLayer(layer, part)));
        [Self::Embeddings, Self::FinalNorm].into_iter().chain(head).chain(layers)
    }

    /// Rows, where the part is a matrix, and columns.
    #[must_use]
    pub fn size(self, shape: &Shape) -> (Option<usize>, usize) {
        let dim = shape.dim;
        match self {
            Self::Embeddings | Self::Head => (Some(shape.vocabulary), dim),
            Self::FinalNorm => (None, dim),
            Self::OfLayer(_, part) => match part {
                LayerPart::AttentionNorm | LayerPart::FeedForwardNorm => (None, dim),
                LayerPart::Queries => (Some(shape.queries()), dim),
                LayerPart::Keys | LayerPart::Values => (Some(shape.keys()), dim),
                LayerPart::QueryBias => (None, shape.queries()),
                LayerPart::KeyBias | LayerPart::ValueBias => (None, shape.keys()),
                LayerPart::QueryNorm | LayerPart::KeyNorm => (None, shape.head_dim),
                LayerPart::AttentionOut => (Some(dim), shape.queries()),
                LayerPart::Gate | LayerPart::Up => (Some(shape.hidden), dim),
                LayerPart::Down => (Some(dim), shape.hidden),
            },
        }
    }
}

/// Reads all weights of a model from a source, in the current thread pool.
pub(crate) fn collect(shape: &Shape, source: &dyn WeightSource) -> Weights {
    let vector = |part: Part| {
        let mut vector = vec![0.0; part.size(shape).1];
        source.row(part, 0, &mut vector);
        vector
    };
    let matrix = |parts: &[Part]| {
        let rows = |part: Part| part.size(shape).0.expect("matrices have rows");
        let outputs = parts.iter().map(|part| rows(*part)).sum();
        Matrix::new(parts[0].size(shape).1, outputs, |output, out| {
            let (mut part, mut row) = (0, output);
            while row >= rows(parts[part]) {
                row -= rows(parts[part]);
                part += 1;
            }
            source.row(parts[part], row, out);
        })
    };
    let layers = (0..shape.layers).map(|index| {
        let of = |part| Part::OfLayer(index, part);
        let biases = [LayerPart::QueryBias, LayerPart::KeyBias, LayerPart::ValueBias];
        Layer {
            attention_norm: vector(of(LayerPart::AttentionNorm)),
            qkv: matrix(&[of(LayerPart::Queries), of(LayerPart::Keys), of(LayerPart::Values)]),
            qkv_bias: shape
                .qkv_bias
                .then(|| biases.into_iter().flat_map(|part| vector(of(part))).collect()),
            qk_norm: shape.qk_norm.then(|| QkNorm {
                query: vector(of(LayerPart::QueryNorm)),
                key: vector(of(LayerPart::KeyNorm)),
            }),
            attention_out: matrix(&[of(LayerPart::AttentionOut)]),
            feed_forward_norm: vector(of(LayerPart::FeedForwardNorm)),
            gate_up: matrix(&[of(LayerPart::Gate), of(LayerPart::Up)]),
            down: matrix(&[of(LayerPart::Down)]),
        }
    });
    let embeddings = (!shape.tied).then(|| {
        let mut table = vec![0.0; shape.vocabulary * shape.dim];
        let rows = table.par_chunks_exact_mut(shape.dim).enumerate();
        rows.for_each(|(token, out)| source.row(Part::Embeddings, token, out));
        table
    });
    Weights {
        embeddings,
        layers: layers.collect(),
        final_norm: vector(Part::FinalNorm),
        head: matrix(&[if shape.tied { Part::Embeddings } else { Part::Head }]),
    }
}
