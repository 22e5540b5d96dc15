//! What a payload is made of.

use posthorse_core::{DType, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The most tensors that a payload may have.
pub const MAX_TENSORS: usize = 65_536;
/// The most dimensions that a tensor may have.
pub const MAX_DIMENSIONS: usize = 64;
/// The longest list of tensors that travels beside the bytes, in bytes: well within a control message, and so short that it
/// costs a get nothing.
const MAX_LISTED_BYTES: usize = 64 << 10;

/// The kinds of payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PayloadKind {
    /// Bytes without further meaning, or with that of the manifest's one tensor.
    Bytes,
    /// A set of tensors by name, laid out as [`super::envelope`] says.
    Tensors,
    /// A `serde` value as msgpack, tensors in it as [`super::marker`] says.
    Value,
    /// The end of a chunk stream, as msgpack: how it ended.
    StreamEnd,
}

/// What a payload is made of, as it travels beside the bytes.
///
/// A payload of kind `Tensors` describes itself, so that its list may stay empty: where it is long, it does, and the
/// consumer reads it from the bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The kind.
    pub kind: PayloadKind,
    /// The tensors in it, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<TensorDesc>,
}

/// One tensor of a payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorDesc {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Element counts, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Where its bytes start in the payload.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Manifest {
    /// A payload of this kind without tensors to describe.
    pub const fn of(kind: PayloadKind) -> Self {
        Self { kind, tensors: Vec::new() }
    }

    /// A set of these tensors, listed unless the list is long.
    pub(crate) fn of_tensors(tensors: &[TensorDesc]) -> Self {
        // Keys and numbers beside the name and shape, each as long as it can be.
        let listed = |tensor: &TensorDesc| 80 + tensor.name.len() + 9 * tensor.shape.len();
        let is_short = tensors.iter().map(listed).sum::<usize>() <= MAX_LISTED_BYTES;
        Self { kind: PayloadKind::Tensors, tensors: if is_short { tensors.to_vec() } else { Vec::new() } }
    }

    /// Whether the tensors are to be read from the bytes.
    pub(crate) fn is_in_bytes(&self) -> bool {
        self.kind == PayloadKind::Tensors && self.tensors.is_empty()
    }

    /// Checks what a peer says against the payload's size.
    ///
    /// # Errors
    /// `Malformed`, naming the tensor, when one leaves the payload, its length is not that of its shape, or a
    /// name stands twice.
    pub fn check(&self, payload_bytes: u64) -> Result<()> {
        check(&self.tensors, payload_bytes)
    }
}

/// As [`Manifest::check`].
pub(super) fn check(tensors: &[TensorDesc], payload_bytes: u64) -> Result<()> {
    let malformed = |why: String| Err(Error::new(ErrorKind::Malformed, why));
    if tensors.len() > MAX_TENSORS {
        return malformed(format!("a payload of {} tensors; accepted: {MAX_TENSORS}", tensors.len()));
    }
    let mut names = std::collections::HashSet::with_capacity(tensors.len());
    for tensor in tensors {
        let name = crate::message::printable(&tensor.name);
        if !names.insert(&tensor.name) {
            return malformed(format!("tensor {name:?} stands twice in the payload"));
        }
        if tensor.shape.len() > MAX_DIMENSIONS {
            return malformed(format!("tensor {name:?} has {} dimensions", tensor.shape.len()));
        }
        if bytes_of(tensor.dtype, &tensor.shape) != Some(tensor.len) {
            let (dtype, shape, len) = (tensor.dtype, &tensor.shape, tensor.len);
            return malformed(format!("tensor {name:?} of {dtype} {shape:?} has {len} bytes"));
        }
        if tensor.offset.checked_add(tensor.len).is_none_or(|end| end > payload_bytes) {
            let (offset, len) = (tensor.offset, tensor.len);
            return malformed(format!(
                "tensor {name:?} of {len} bytes at {offset} leaves the payload of {payload_bytes} bytes"
            ));
        }
    }
    Ok(())
}

/// Bytes of a tensor, or `None` where that overflows.
pub(super) fn bytes_of(dtype: DType, shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(dtype.size() as u64, |bytes, &count| bytes.checked_mul(count))
}

/// With how many bytes a tensor is accepted, in words.
pub(super) fn accepted_bytes(dtype: DType, shape: &[u64]) -> String {
    match bytes_of(dtype, shape) {
        Some(bytes) => format!("{bytes}, as {dtype} {shape:?} has"),
        None => format!("a shape of less than 2^64 bytes, which {dtype} {shape:?} is not"),
    }
}

/// The tensor of this name.
///
/// # Errors
/// `InvalidArgument`, naming those there are.
pub(crate) fn find_tensor<'a>(tensors: &'a [TensorDesc], name: &str) -> Result<&'a TensorDesc> {
    tensors.iter().find(|desc| desc.name == name).ok_or_else(|| {
        let names: Vec<_> = tensors.iter().take(20).map(|desc| desc.name.as_str()).collect();
        let more = if tensors.len() > names.len() { ", ..." } else { "" };
        let accepted = format!("one of the {} there are: {}{more}", tensors.len(), names.join(", "));
        Error::invalid_argument("the name of a tensor", format_args!("{name:?}"), &accepted)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[u64], offset: u64, len: u64) -> TensorDesc {
        TensorDesc { name: name.to_owned(), dtype: DType::F32, shape: shape.to_vec(), offset, len }
    }

    #[test]
    fn what_a_peer_says_is_checked() {
        let check = |tensors: &[TensorDesc]| {
            Manifest { kind: PayloadKind::Tensors, tensors: tensors.to_vec() }.check(100)
        };
        check(&[tensor("a", &[5, 5], 0, 100), tensor("b", &[], 96, 4), tensor("c", &[0, 9], 100, 0)])
            .unwrap();
        for (tensors, part) in [
            (vec![tensor("a", &[], 0, 4), tensor("a", &[], 4, 4)], "twice"),
            (vec![tensor("a", &[5], 0, 19)], "19 bytes"),
            (vec![tensor("a", &[5], 81, 20)], "leaves the payload"),
            (vec![tensor("a", &[5], u64::MAX, 20)], "leaves the payload"),
            (vec![tensor("a", &[1 << 63, 2], 0, 0)], "0 bytes"),
            (vec![tensor("a", &[1; 65], 0, 4)], "65 dimensions"),
        ] {
            let error = check(&tensors).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
    }
}
