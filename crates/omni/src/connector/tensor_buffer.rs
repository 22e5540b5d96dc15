//! Named tensors that are made where they are sent from.

use posthorse_buffer::ManagedBuffer;
use posthorse_core::{Deadline, Error, ErrorKind, Result};

use super::{Connector, Stored};
use crate::payload::envelope::{Envelope, TensorSpec};
use crate::payload::{Manifest, TensorDesc, find_tensor};

/// A block of the pool, laid out for named tensors: [`Connector::alloc_tensors`]. Filled and put, it goes out without a
/// copy, and a consumer on the same host can lease it.
#[derive(Debug)]
pub struct TensorBuffer {
    buffer: ManagedBuffer,
    envelope: Envelope,
}

impl TensorBuffer {
    /// The names, types, shapes and places of the tensors, in order.
    pub fn tensors(&self) -> &[TensorDesc] {
        self.envelope.tensors()
    }

    /// The bytes of a tensor, to be written: row-major, little-endian. Until then they are whatever the pool held there
    /// before, such as an earlier payload, and a put sends that to the consumer: fill every tensor whole.
    ///
    /// # Errors
    /// `InvalidArgument`, naming those there are; `Forked` in a child process.
    pub fn tensor_mut(&mut self, name: &str) -> Result<&mut [u8]> {
        let desc = find_tensor(self.envelope.tensors(), name)?;
        let (start, len) = (desc.offset as usize, desc.len as usize);
        self.buffer
            .bytes_mut()?
            .get_mut(start..start.saturating_add(len))
            .ok_or_else(|| Error::new(ErrorKind::OutOfBounds, format!("tensor {name:?} leaves its buffer")))
    }

    pub(super) const fn buffer(&self) -> &ManagedBuffer {
        &self.buffer
    }

    /// As it is offered, in its own block or in the `copy` that was made of it.
    pub(super) fn into_stored(self, copy: Option<ManagedBuffer>) -> Stored {
        let manifest = Manifest::of_tensors(self.envelope.tensors());
        Stored::sized(copy.unwrap_or(self.buffer), self.envelope.len(), manifest, false)
    }
}

impl Connector {
    /// A block of the pool for named tensors, to be filled in place and offered without a copy. What is not filled goes
    /// out as whatever the pool held there before.
    ///
    /// # Errors
    /// `InvalidArgument` for names that are alike, or tensors that are too large or too many; else as
    /// [`Connector::alloc`].
    pub fn alloc_tensors(&self, tensors: &[TensorSpec<'_>], deadline: Deadline) -> Result<TensorBuffer> {
        let envelope = Envelope::layout(tensors)?;
        let mut buffer = self.alloc(envelope.len(), deadline)?;
        envelope.write_headers(buffer.bytes_mut()?)?;
        Ok(TensorBuffer { buffer, envelope })
    }
}
