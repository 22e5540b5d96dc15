//! What is put and got: raw bytes, tensors by name, or any `serde` value.
//!
//! Tensors travel as the Python connector's object serializer writes them: msgpack maps with a marker key
//! ([`marker`]). A [`TensorSet`] is laid out so that it is such an object, while each tensor's bytes lie
//! aligned in it ([`envelope`]): a foreign consumer deserialises it, a Posthorse consumer views it in place.

pub mod envelope;
pub mod kv;
mod manifest;
pub mod marker;
mod msgpack;
mod tensor_set;

pub(crate) use manifest::find_tensor;
pub use manifest::{MAX_DIMENSIONS, MAX_TENSORS, Manifest, PayloadKind, TensorDesc};
pub use tensor_set::{NamedTensor, TensorData, TensorSet};
