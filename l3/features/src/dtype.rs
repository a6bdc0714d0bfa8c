//! Element types of tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $bits:literal;)*) => {
        /// Element type of a tensor: all types of safetensors files, under their names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
        }

        impl Dtype {
            /// All types.
            pub const ALL: &[Dtype] = &[$(Dtype::$name,)*];

            /// Size of an element in bits: some are smaller than a byte.
            #[must_use]
            pub fn bits(self) -> usize {
                match self {
                    $(Dtype::$name => $bits,)*
                }
            }

            /// Name of the type in safetensors files.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Dtype::$name => $text,)*
                }
            }
        }
    };
}

dtypes! {
    /// Boolean, one byte each.
    Bool = "BOOL", 8;
    /// Four bits of floating point.
    F4 = "F4", 4;
    /// Six bits: two of exponent, three of mantissa.
    F6E2M3 = "F6_E2M3", 6;
    /// Six bits: three of exponent, two of mantissa.
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned bytes.
    U8 = "U8", 8;
    /// Signed bytes.
    I8 = "I8", 8;
    /// Eight bits: five of exponent, two of mantissa.
    F8E5M2 = "F8_E5M2", 8;
    /// Eight bits: four of exponent, three of mantissa.
    F8E4M3 = "F8_E4M3", 8;
    /// Eight bits of exponent alone, for scales.
    F8E8M0 = "F8_E8M0", 8;
    /// Like `F8E4M3`, without infinities and negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// Like `F8E5M2`, without infinities and negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed, 16 bits.
    I16 = "I16", 16;
    /// Unsigned, 16 bits.
    U16 = "U16", 16;
    /// Half precision.
    F16 = "F16", 16;
    /// Half the bits of single precision, with its exponent.
    Bf16 = "BF16", 16;
    /// Signed, 32 bits.
    I32 = "I32", 32;
    /// Unsigned, 32 bits.
    U32 = "U32", 32;
    /// Single precision.
    F32 = "F32", 32;
    /// Complex, two of single precision.
    C64 = "C64", 64;
    /// Double precision.
    F64 = "F64", 64;
    /// Signed, 64 bits.
    I64 = "I64", 64;
    /// Unsigned, 64 bits.
    U64 = "U64", 64;
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
