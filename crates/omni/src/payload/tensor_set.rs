//! Tensors by name.

use posthorse_core::{DType, Error, Result};

use super::envelope::{self, Envelope};
use super::manifest::bytes_of;

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
    pub data: &'a [u8],
}

impl std::fmt::Debug for NamedTensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {} {:?} ({} bytes)", self.name, self.dtype, self.shape, self.data.len())
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
        if bytes_of(dtype, shape) != Some(data.len() as u64) {
            return Err(Error::invalid_argument(
                "the data of a tensor",
                format_args!("{} bytes for {name:?}", data.len()),
                &format!("as many as {dtype} {shape:?} has"),
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
            && placed.iter().zip(&self.tensors).all(|(desc, tensor)| desc.len == tensor.data.len() as u64);
        if !fits {
            return Err(Error::invalid_argument(
                "the payload's memory",
                format_args!("{} bytes", out.len()),
                &format!("the {} bytes of this set's own layout", envelope.len()),
            ));
        }
        envelope.write_headers(out)?;
        for (desc, tensor) in placed.iter().zip(&self.tensors) {
            copy(&mut out[desc.offset as usize..][..desc.len as usize], tensor.data);
        }
        Ok(())
    }
}
