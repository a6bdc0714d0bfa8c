//! The matrices of a model, named by their outputs.

use terrace_model::Shape;

/// The matrices of a layer, and the final one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matrix {
    Qkv,
    Out,
    GateUp,
    Down,
    /// Logits.
    Head,
}

impl Matrix {
    pub(super) const ALL: [Self; 5] = [Self::Qkv, Self::Out, Self::GateUp, Self::Down, Self::Head];

    /// Returns the numbers of inputs and outputs.
    pub(super) fn size(self, shape: &Shape) -> (usize, usize) {
        match self {
            Self::Qkv => (shape.dim, shape.qkv()),
            Self::Out => (shape.queries(), shape.dim),
            Self::GateUp => (shape.dim, 2 * shape.hidden),
            Self::Down => (shape.hidden, shape.dim),
            Self::Head => (shape.dim, shape.vocabulary),
        }
    }
}
