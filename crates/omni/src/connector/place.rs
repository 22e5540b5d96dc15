//! Moves payloads into and out of the pool: the one copy that a payload from elsewhere costs.

use posthorse_buffer::ManagedBuffer;
use posthorse_core::{Deadline, Error, ErrorKind, Result};
use posthorse_memory::CopyPool;

use super::Inner;
use crate::payload::TensorSet;
use crate::payload::envelope::Envelope;

impl Inner {
    /// A block of the pool. An empty payload takes the smallest, since no block is empty.
    pub(super) fn alloc(&self, len: u64, deadline: Deadline) -> Result<ManagedBuffer> {
        self.pool.alloc(len.max(1), deadline)
    }

    /// A block that holds a copy of `bytes`.
    pub(super) fn place_bytes(&self, bytes: &[u8], deadline: Deadline) -> Result<ManagedBuffer> {
        let mut buffer = self.alloc(bytes.len() as u64, deadline)?;
        copy(&self.copier, bytes, part(&mut buffer, 0, bytes.len() as u64)?)?;
        Ok(buffer)
    }

    /// A block that holds a tensor set as it travels: headers written, tensors copied once.
    pub(super) fn place_tensors(
        &self,
        set: &TensorSet<'_>,
        deadline: Deadline,
    ) -> Result<(ManagedBuffer, Envelope)> {
        let envelope = set.layout()?;
        let mut buffer = self.alloc(envelope.len(), deadline)?;
        envelope.write_headers(part(&mut buffer, 0, envelope.len())?)?;
        for (tensor, place) in set.tensors().iter().zip(envelope.tensors()) {
            copy(&self.copier, tensor.data, part(&mut buffer, place.offset, place.len)?)?;
        }
        Ok((buffer, envelope))
    }
}

/// The bytes of a block from `offset` on.
fn part(buffer: &mut ManagedBuffer, offset: u64, len: u64) -> Result<&mut [u8]> {
    let (start, limit) = (offset as usize, buffer.len());
    let bytes = buffer.bytes_mut()?;
    bytes.get_mut(start..start.saturating_add(len as usize)).ok_or_else(|| {
        Error::new(ErrorKind::OutOfBounds, format!("{len} bytes at {offset} leave a block of {limit} bytes"))
    })
}

/// Copies by the copy engine, which shares large copies between threads.
fn copy(copier: &CopyPool, from: &[u8], to: &mut [u8]) -> Result<()> {
    copier.copy_slice(from, to)
}
