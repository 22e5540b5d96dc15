//! Tensors by name.

use bytes::Bytes;
use posthorse_core::{DType, Error, Result};

use super::envelope::{self, Envelope};
use super::manifest::{accepted_bytes, bytes_of};

/// An ordered set of named tensors that lie somewhere in memory.
#[derive(Debug, Clone, Default)]
pub struct TensorSet<'a> {
    tensors: Vec<NamedTensor<'a>>,
}

/// A tensor with its name: contiguous, row-major, little-endian.
#[derive(Clone)]
pub struct NamedTensor<'a> {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Element counts, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub data: TensorData<'a>,
}

/// A tensor's bytes.
#[derive(Clone)]
pub enum TensorData<'a> {
    /// Lent for the time of a put, which copies them.
    Lent(&'a [u8]),
    /// Shared: sent from where they lie.
    Shared(Bytes),
}

impl std::fmt::Debug for TensorData<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if matches!(self, Self::Lent(_)) { "lent" } else { "shared" };
        write!(f, "{} bytes, {kind}", self.bytes().len())
    }
}

impl TensorData<'_> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Lent(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for NamedTensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {} {:?} ({:?})", self.name, self.dtype, self.shape, self.data)
    }
}

impl<'a> TensorSet<'a> {
    /// An empty set.
    pub const fn new() -> Self {
        Self { tensors: Vec::new() }
    }

    /// Adds a tensor at the end.
    ///
    /// # Errors
    /// `InvalidArgument` when the bytes are not as many as dtype and shape say. Names are checked by
    /// [`TensorSet::layout`], together.
    pub fn push(&mut self, name: &str, dtype: DType, shape: &[u64], data: &'a [u8]) -> Result<()> {
        self.add(name, dtype, shape, TensorData::Lent(data))
    }

    /// As [`TensorSet::push`], for bytes that stay where they are: a put does not copy them, but sends them from there
    /// (`Bytes::from_owner` takes whatever holds them). They are kept until the payload is no longer offered.
    ///
    /// # Errors
    /// As [`TensorSet::push`].
    pub fn push_shared(&mut self, name: &str, dtype: DType, shape: &[u64], data: Bytes) -> Result<()> {
        self.add(name, dtype, shape, TensorData::Shared(data))
    }

    fn add(&mut self, name: &str, dtype: DType, shape: &[u64], data: TensorData<'a>) -> Result<()> {
        let len = data.bytes().len();
        if bytes_of(dtype, shape) != Some(len as u64) {
            return Err(Error::invalid_argument(
                "the data of a tensor",
                format_args!("{len} bytes for {name:?}"),
                &accepted_bytes(dtype, shape),
            ));
        }
        self.tensors.push(NamedTensor { name: name.to_owned(), dtype, shape: shape.to_vec(), data });
        Ok(())
    }

    /// The tensors in order.
    pub fn tensors(&self) -> &[NamedTensor<'a>] {
        &self.tensors
    }

    /// Where everything lies in the payload.
    ///
    /// # Errors
    /// As [`Envelope::layout`].
    pub fn layout(&self) -> Result<Envelope> {
        let specs: Vec<_> = self
            .tensors
            .iter()
            .map(|t| envelope::TensorSpec { name: &t.name, dtype: t.dtype, shape: &t.shape })
            .collect();
        Envelope::layout(&specs)
    }

    /// Writes the payload whose layout this set gave: the headers, and one copy of each tensor by `copy`.
    ///
    /// # Errors
    /// `InvalidArgument` when `envelope` is of another set, or `out` is not exactly as large as it says.
    pub fn write(&self, envelope: &Envelope, out: &mut [u8], copy: impl Fn(&mut [u8], &[u8])) -> Result<()> {
        let placed = envelope.tensors();
        let fits = out.len() as u64 == envelope.len()
            && placed.len() == self.tensors.len()
            && placed
                .iter()
                .zip(&self.tensors)
                .all(|(desc, tensor)| desc.len == tensor.data.bytes().len() as u64);
        if !fits {
            return Err(Error::invalid_argument(
                "the payload's memory",
                format_args!("{} bytes", out.len()),
                &format!("the {} bytes of this set's own layout", envelope.len()),
            ));
        }
        envelope.write_headers(out)?;
        for (desc, tensor) in placed.iter().zip(&self.tensors) {
            copy(&mut out[desc.offset as usize..][..desc.len as usize], tensor.data.bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::ErrorKind;

    use super::*;

    #[test]
    fn data_of_another_length_is_refused_with_the_one_that_fits() {
        let mut set = TensorSet::new();
        for (shape, accepted) in [
            (&[4][..], "accepted: 16, as float32 [4] has"),
            (
                &[u64::MAX, 2],
                "accepted: a shape of less than 2^64 bytes, which float32 [18446744073709551615, 2] is not",
            ),
        ] {
            let error = set.push("kv", DType::F32, shape, &[0; 4]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().starts_with("the data of a tensor is 4 bytes for \"kv\"; "), "{error}");
            assert!(error.message().ends_with(accepted), "{error}");
        }
    }
}
