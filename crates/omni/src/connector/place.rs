//! Moves payloads into and out of the pool: the one copy that a payload from elsewhere costs.

use std::future::{Future, poll_fn};
use std::iter;
use std::pin::Pin;
use std::task::Poll;

use bytes::Bytes;
use posthorse_buffer::ManagedBuffer;
use posthorse_core::{Deadline, Error, ErrorKind, Result};
use posthorse_memory::CopyPool;

use super::Inner;
use super::get::Blocking;
use super::stored::{LEAST_SHARED, Piece, Place, Stored};
use crate::payload::{Manifest, NamedTensor, TensorData, TensorSet};

impl Inner {
    /// A block of the pool. An empty payload takes the smallest, since no block is empty.
    pub(super) fn alloc(&self, len: u64, deadline: Deadline) -> Result<ManagedBuffer> {
        self.pool.alloc(len.max(1), deadline).map_err(|error| no_room(error, len))
    }

    /// As [`Inner::alloc`], for a get that is awaited: no thread waits with it where it must not block.
    pub(super) async fn room(
        &self,
        len: u64,
        deadline: Deadline,
        blocking: Blocking,
    ) -> Result<ManagedBuffer> {
        if matches!(blocking, Blocking::Elsewhere) {
            let mut alloc = self.pool.alloc_async(len.max(1));
            // Mostly there is room at once.
            let served = match poll_fn(|context| Poll::Ready(Pin::new(&mut alloc).poll(context))).await {
                Poll::Ready(served) => Ok(served),
                Poll::Pending => self.plane.within(deadline, "room in the pool", alloc).await,
            };
            match served {
                // Asked once more below, which says how much is free.
                Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
                served => return served?.map_err(|error| no_room(error, len)),
            }
        }
        self.alloc(len, deadline)
    }

    /// A block that holds a copy of `bytes`.
    pub(super) fn place_bytes(&self, bytes: &[u8], deadline: Deadline) -> Result<ManagedBuffer> {
        let mut buffer = self.alloc(bytes.len() as u64, deadline)?;
        copy(&self.copier, bytes, part(&mut buffer, 0, bytes.len() as u64)?)?;
        Ok(buffer)
    }

    /// A tensor set as it travels: headers written, tensors copied once, but those that are shared.
    pub(super) fn place_tensors(&self, set: &TensorSet<'_>, deadline: Deadline) -> Result<Stored> {
        let envelope = set.layout()?;
        let manifest = Manifest::of_tensors(envelope.tensors());
        let shared: Vec<Option<Piece>> =
            set.tensors().iter().map(|tensor| self.share_tensor(tensor)).collect();
        let elsewhere: u64 = shared.iter().flatten().map(|piece| piece.len).sum();
        let block_len = envelope.len() - elsewhere;
        let mut block = self.alloc(block_len, deadline)?;
        // Headers and copied tensors lie in the block as in the payload, only without what is shared between them.
        let mut at = 0;
        let mut pieces: Vec<Piece> = Vec::new();
        let headers = envelope.headers().iter().map(|header| header.bytes.as_slice());
        let tensors = set.tensors().iter().zip(shared).map(Some).chain(iter::repeat_with(|| None));
        for (header, tensor) in headers.zip(tensors) {
            let copied = match &tensor {
                Some((tensor, None)) => tensor.data.bytes(),
                _ => &[],
            };
            let run = header.len() + copied.len();
            part(&mut block, at, header.len() as u64)?.copy_from_slice(header);
            copy(&self.copier, copied, part(&mut block, at + header.len() as u64, copied.len() as u64)?)?;
            match pieces.last_mut() {
                Some(Piece { len, place: Place::Block(_) }) => *len += run as u64,
                _ => pieces.push(Piece { len: run as u64, place: Place::Block(at) }),
            }
            at += run as u64;
            pieces.extend(tensor.and_then(|(_, shared)| shared));
        }
        Ok(if elsewhere == 0 {
            Stored::sized(block, envelope.len(), manifest, false)
        } else {
            Stored::in_pieces(Some(block), pieces, manifest, false)
        })
    }

    fn share_tensor(&self, tensor: &NamedTensor<'_>) -> Option<Piece> {
        match &tensor.data {
            TensorData::Shared(bytes) => self.share(bytes),
            TensorData::Lent(_) => None,
        }
    }

    /// Shared bytes, to be sent from where they lie. `None` when they had better be copied.
    pub(super) fn share(&self, bytes: &Bytes) -> Option<Piece> {
        if bytes.len() < LEAST_SHARED {
            return None;
        }
        let source = self.sources.share(&self.engine, bytes).inspect_err(|error| {
            tracing::debug!(%error, "shared bytes are copied");
        });
        source.ok().map(|source| Piece { len: bytes.len() as u64, place: Place::Source(source) })
    }
}

fn no_room(error: Error, len: u64) -> Error {
    error.context(format_args!("room for {len} bytes in this connector's pool (memory_pool_size)"))
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
