//! Tensors, arrays and images inside `serde` values, as the Python connector's object serializer writes them.
//!
//! Each is a msgpack map whose first key marks what it is. They are ordinary values to every msgpack
//! decoder; a map whose marker is missing or false is not one of them.

use posthorse_core::{DType, Error, ErrorKind, Result};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::manifest::bytes_of;

/// How deep a value may nest.
const MAX_DEPTH: usize = 64;

macro_rules! marker {
    ($(#[$doc:meta])* $name:ident $wire:ident $marker:literal { $($(#[$fdoc:meta])* $field:ident: $type:ty),* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name {
            $($(#[$fdoc])* pub $field: $type,)*
            /// The elements: contiguous, row-major, little-endian.
            pub data: Vec<u8>,
        }

        #[derive(Serialize, Deserialize)]
        struct $wire<D> {
            #[serde(rename = $marker)]
            marked: bool,
            $($field: $type,)*
            data: D,
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let data = serde_bytes::Bytes::new(&self.data);
                $wire { marked: true, $($field: self.$field.clone(),)* data }.serialize(serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let wire = $wire::<serde_bytes::ByteBuf>::deserialize(deserializer)?;
                if !wire.marked {
                    return Err(D::Error::custom(concat!($marker, " is false")));
                }
                let this = Self { $($field: wire.$field,)* data: wire.data.into_vec() };
                this.check().map_err(|e| D::Error::custom(e.message()))?;
                Ok(this)
            }
        }
    };
}

marker! {
    /// A tensor as PyTorch names its type.
    Tensor TensorWire "__tensor__" {
        /// The type of its elements.
        dtype: DType,
        /// Element counts, outermost first; empty for a scalar.
        shape: Vec<u64>
    }
}

marker! {
    /// A NumPy array.
    NdArray NdArrayWire "__ndarray__" {
        /// The type of its elements as NumPy's `dtype.str`, such as `<f4`.
        dtype: String,
        /// Element counts, outermost first; empty for a scalar.
        shape: Vec<u64>
    }
}

marker! {
    /// An image as PIL holds it: bytes, rows first.
    Image ImageWire "__pil_image__" {
        /// PIL's mode, such as `RGB`.
        mode: String,
        /// Height, width and, where there is more than one, the number of channels.
        shape: Vec<u64>
    }
}

impl Tensor {
    /// A tensor of these bytes.
    ///
    /// # Errors
    /// `InvalidArgument` when they are not as many as dtype and shape say.
    pub fn new(dtype: DType, shape: Vec<u64>, data: Vec<u8>) -> Result<Self> {
        let this = Self { dtype, shape, data };
        this.check()?;
        Ok(this)
    }

    fn check(&self) -> Result<()> {
        check_len(bytes_of(self.dtype, &self.shape), &self.shape, self.data.len())
    }
}

impl NdArray {
    /// The element type, where PyTorch has it too. Big-endian types and those of structures have none.
    pub fn element_type(&self) -> Option<DType> {
        let (order, code) = self.dtype.split_at_checked(1)?;
        if !matches!(order, "<" | "|" | "=") {
            return None;
        }
        Some(match code {
            "b1" => DType::Bool,
            "u1" => DType::U8,
            "i1" => DType::I8,
            "u2" => DType::U16,
            "i2" => DType::I16,
            "u4" => DType::U32,
            "i4" => DType::I32,
            "u8" => DType::U64,
            "i8" => DType::I64,
            "f2" => DType::F16,
            "f4" => DType::F32,
            "f8" => DType::F64,
            "c8" => DType::C64,
            "c16" => DType::C128,
            _ => return None,
        })
    }

    fn check(&self) -> Result<()> {
        match self.element_type() {
            Some(dtype) => check_len(bytes_of(dtype, &self.shape), &self.shape, self.data.len()),
            None => Ok(()),
        }
    }
}

impl Image {
    fn check(&self) -> Result<()> {
        check_len(bytes_of(DType::U8, &self.shape), &self.shape, self.data.len())
    }
}

fn check_len(wanted: Option<u64>, shape: &[u64], len: usize) -> Result<()> {
    if wanted == Some(len as u64) {
        return Ok(());
    }
    let wanted = wanted.map_or_else(|| "a size below 2^64".to_owned(), |wanted| format!("{wanted} bytes"));
    Err(Error::invalid_argument("the data", format_args!("{len} bytes for shape {shape:?}"), &wanted))
}

/// A value as msgpack: structures as maps of their fields, byte strings (`serde_bytes`) as such.
///
/// # Errors
/// `InvalidArgument` for a value that cannot be serialised.
pub fn to_vec(value: &impl Serialize) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(value)
        .map_err(|e| Error::new(ErrorKind::InvalidArgument, format!("the value cannot be serialised: {e}")))
}

/// The value in these bytes. It takes no more memory than a small multiple of them.
///
/// # Errors
/// `Malformed` with what is wrong, also for bytes behind its end or deep nesting.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    crate::message::from_msgpack(bytes, MAX_DEPTH)
        .map_err(|why| Error::new(ErrorKind::Malformed, format!("a value: {why}")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Step {
        t: Tensor,
        meta: BTreeMap<String, (u32, bool)>,
        later: Option<Box<Self>>,
    }

    fn tensor() -> Tensor {
        Tensor::new(DType::I16, vec![3], vec![0, 0, 1, 0, 2, 0]).unwrap()
    }

    #[test]
    fn the_sample_of_the_reference_in_both_directions() {
        let sample = b"\x81\xa1t\x84\xaa__tensor__\xc3\xa5dtype\xa5int16\xa5shape\x91\x03\xa4data\xc4\x06\0\0\x01\0\x02\0";
        let value = BTreeMap::from([("t".to_owned(), tensor())]);
        assert_eq!(to_vec(&value).unwrap(), sample);
        assert_eq!(from_slice::<BTreeMap<String, Tensor>>(sample).unwrap(), value);
    }

    #[test]
    fn values_with_tensors_inside_survive() {
        let inner = Step { t: tensor(), meta: BTreeMap::new(), later: None };
        let value = Step {
            t: Tensor::new(DType::F32, vec![], vec![0; 4]).unwrap(),
            meta: BTreeMap::from([("a".to_owned(), (7, true))]),
            later: Some(Box::new(inner)),
        };
        assert_eq!(from_slice::<Step>(&to_vec(&value).unwrap()).unwrap(), value);
    }

    #[test]
    fn arrays_and_images() {
        let array = NdArray { dtype: "<f4".to_owned(), shape: vec![1, 2], data: vec![0; 8] };
        let bytes = to_vec(&array).unwrap();
        assert_eq!(bytes[..13], *b"\x84\xab__ndarray__");
        assert_eq!(from_slice::<NdArray>(&bytes).unwrap(), array);
        assert_eq!(array.element_type(), Some(DType::F32));
        assert_eq!(NdArray { dtype: ">f4".to_owned(), ..array }.element_type(), None);
        let image = Image { mode: "RGB".to_owned(), shape: vec![2, 1, 3], data: vec![9; 6] };
        assert_eq!(from_slice::<Image>(&to_vec(&image).unwrap()).unwrap(), image);
    }

    #[test]
    fn a_map_without_its_marker_or_of_the_wrong_length_is_not_a_tensor() {
        let right = to_vec(&tensor()).unwrap();
        let mut unmarked = right.clone();
        unmarked[12] = 0xc2;
        assert!(from_slice::<Tensor>(&unmarked).unwrap_err().message().contains("__tensor__"));
        let mut longer = right.clone();
        longer[32] = 4;
        let error = from_slice::<Tensor>(&longer).unwrap_err();
        assert!(error.message().contains("6 bytes"), "{error}");
        assert!(Tensor::new(DType::F64, vec![2], vec![0; 15]).is_err());
    }

    #[test]
    fn deep_values_and_trailing_bytes_are_refused() {
        #[derive(Debug, Deserialize)]
        struct Deep {
            #[expect(dead_code, reason = "only its depth matters")]
            next: Option<Box<Self>>,
        }
        let mut deep = b"\x81\xa4next".repeat(1000);
        deep.push(0xc0);
        assert!(from_slice::<Deep>(&deep).is_err());
        assert!(from_slice::<u8>(&[1, 1]).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = from_slice::<Step>(&bytes);
            let _ = from_slice::<NdArray>(&bytes);
            let _ = from_slice::<Image>(&bytes);
        }
    }
}
