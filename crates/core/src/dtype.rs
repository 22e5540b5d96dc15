//! The element types of tensors.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident $name:literal $size:literal $safetensors:literal;)*) => {
        /// The type of a tensor's elements, by the names PyTorch uses (`bfloat16`, `int64`).
        #[non_exhaustive]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub enum DType { $($(#[$doc])* $variant),* }

        impl DType {
            /// Every element type.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name, as PyTorch writes it without its `torch.` prefix.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Bytes per element.
            pub const fn size(self) -> usize {
                match self { $(Self::$variant => $size),* }
            }

            /// The name in a safetensors header, where that format has the type.
            pub const fn safetensors_name(self) -> Option<&'static str> {
                let name = match self { $(Self::$variant => $safetensors),* };
                if name.is_empty() { None } else { Some(name) }
            }
        }
    };
}

dtypes! {
    /// A byte that is 0 or 1.
    Bool "bool" 1 "BOOL";
    /// Unsigned, 8 bits: raw bytes.
    U8 "uint8" 1 "U8";
    /// Signed, 8 bits.
    I8 "int8" 1 "I8";
    /// Unsigned, 16 bits.
    U16 "uint16" 2 "U16";
    /// Signed, 16 bits.
    I16 "int16" 2 "I16";
    /// Unsigned, 32 bits.
    U32 "uint32" 4 "U32";
    /// Signed, 32 bits.
    I32 "int32" 4 "I32";
    /// Unsigned, 64 bits.
    U64 "uint64" 8 "U64";
    /// Signed, 64 bits.
    I64 "int64" 8 "I64";
    /// IEEE 754 half precision.
    F16 "float16" 2 "F16";
    /// The upper half of a single-precision number.
    BF16 "bfloat16" 2 "BF16";
    /// IEEE 754 single precision.
    F32 "float32" 4 "F32";
    /// IEEE 754 double precision.
    F64 "float64" 8 "F64";
    /// 8 bits: 4 of exponent, 3 of mantissa, no infinities (OCP FP8).
    F8E4M3 "float8_e4m3fn" 1 "F8_E4M3";
    /// 8 bits: 5 of exponent, 2 of mantissa (OCP FP8).
    F8E5M2 "float8_e5m2" 1 "F8_E5M2";
    /// 8 bits of exponent alone: the scale of an MX block.
    F8E8M0 "float8_e8m0fnu" 1 "F8_E8M0";
    /// Two single-precision numbers.
    C64 "complex64" 8 "C64";
    /// Two double-precision numbers.
    C128 "complex128" 16 "";
}

impl DType {
    /// The type with this name in a safetensors header.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.safetensors_name() == Some(name))
    }

    /// Bytes of a tensor of `shape` (element counts, outermost first), or `None` where that overflows.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        shape.iter().try_fold(self.size(), |bytes, &count| bytes.checked_mul(count))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == text).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|dtype| dtype.name()).collect();
            Error::invalid_argument("dtype", format_args!("{text:?}"), &names.join(", "))
        })
    }
}

impl TryFrom<String> for DType {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<DType> for String {
    fn from(dtype: DType) -> Self {
        dtype.name().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_are_unique() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), *dtype);
            if let Some(name) = dtype.safetensors_name() {
                assert_eq!(DType::from_safetensors(name), Some(*dtype));
            }
        }
        let error = "float42".parse::<DType>().unwrap_err().to_string();
        assert!(error.contains("float42") && error.contains("bfloat16"), "{error}");
    }

    #[test]
    fn sizes_of_shapes() {
        assert_eq!(DType::BF16.bytes_of(&[3400, 4, 128]), Some(3400 * 4 * 128 * 2));
        assert_eq!(DType::F32.bytes_of(&[]), Some(4), "a scalar has one element");
        assert_eq!(DType::F32.bytes_of(&[0, usize::MAX]), Some(0));
        assert_eq!(DType::F32.bytes_of(&[usize::MAX, 2]), None);
    }
}
