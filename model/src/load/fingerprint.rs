//! The fingerprint that separates the KV of models.

use xxhash_rust::xxh3::Xxh3;

use super::tensors::Tensors;
use crate::shape::Shape;

/// Changes when the same weights are computed differently.
const VERSION: u32 = 1;

/// A digest of everything that results depend on: sizes, and names, dtypes and bytes of all weights.
pub(super) fn of(shape: &Shape, tensors: &Tensors) -> String {
    let mut digest = Xxh3::new();
    digest.update(format!("{VERSION} {shape:?}").as_bytes());
    for (name, dtype, bytes) in tensors.iter() {
        digest.update(format!("\n{name} {dtype:?} {} ", bytes.len()).as_bytes());
        digest.update(bytes);
    }
    format!("{:032x}", digest.digest128())
}
