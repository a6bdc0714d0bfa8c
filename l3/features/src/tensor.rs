//! Tensors: their description, and their bytes on loan.

use std::ops::Deref;

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use terrace_l3::Source;

/// Name, element type and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Name, unique among the sample's tensors.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// Describes a tensor.
    #[must_use]
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<u64>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }

    /// Size of the packed elements in bytes; `None` if they do not fill whole bytes, or exceed the
    /// address space.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let bits = elements?.checked_mul(self.dtype.bits() as u64)?;
        if bits.is_multiple_of(8) { usize::try_from(bits / 8).ok() } else { None }
    }
}

/// A tensor whose bytes are a lent page: of the caller's memory for a put, of new memory after a
/// read. Dropping it returns the page.
#[derive(Debug)]
pub struct Tensor {
    /// Description.
    pub spec: TensorSpec,
    /// Its bytes, dense and in the order of `spec.shape`.
    pub data: Source,
}

impl Tensor {
    /// Creates a tensor with the bytes `data`.
    #[must_use]
    pub fn new(spec: TensorSpec, data: Source) -> Self {
        Self { spec, data }
    }
}

impl Deref for Tensor {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_in_bits_and_end_at_bytes() {
        let bytes = |dtype, shape: &[u64]| TensorSpec::new("x", dtype, shape).bytes();
        assert_eq!(bytes(Dtype::Bf16, &[3, 5]), Some(30));
        assert_eq!(bytes(Dtype::F32, &[]), Some(4), "a scalar");
        assert_eq!(bytes(Dtype::F4, &[3, 2]), Some(3));
        assert_eq!(bytes(Dtype::F4, &[3]), None);
        assert_eq!(bytes(Dtype::F6E3M2, &[4]), Some(3));
        assert_eq!(bytes(Dtype::F64, &[0, u64::MAX]), Some(0));
        assert_eq!(bytes(Dtype::U8, &[u64::MAX, 2]), None);
        assert_eq!(Dtype::ALL.len(), 22);
    }

    #[test]
    fn names_of_types_are_those_of_safetensors() {
        let names: Vec<&str> = Dtype::ALL.iter().map(|dtype| dtype.name()).collect();
        assert_eq!(
            names.join(" "),
            "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 \
             F16 BF16 I32 U32 F32 C64 F64 I64 U64"
        );
    }
}
