//! What is offered: a payload in a block of the pool, or in pieces that lie where the caller has them.
//!
//! Bytes that the caller shares ([`Bytes`]: immutable, and alive as long as anybody holds them) need not be copied
//! into the pool: they are registered where they lie, and written to consumers from there. Consumers cannot read
//! such a payload for themselves, since the memory is not theirs to map.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use posthorse_buffer::{ManagedBuffer, SharedBuffer};
use posthorse_core::{Access, Deadline, LocalRange, Result};
use posthorse_engine::{RegisteredMemory, TransferEngine};
use posthorse_memory::ForeignMemory;

use super::stream;
use crate::payload::Manifest;

/// Shared bytes that are fewer are copied: to register them costs more.
pub(super) const LEAST_SHARED: usize = 64 << 10;

/// A payload on offer.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(super) home: Home,
    /// Bytes of the payload, which may be fewer than its block has.
    pub(super) len: u64,
    pub(super) manifest: Manifest,
    /// Whether foreign consumers take it as raw bytes.
    pub(super) is_fast_path: bool,
    /// The end of a stream: when it is gone, so is the stream.
    pub(super) entry: Option<stream::Entry>,
}

/// Where a payload lies.
#[derive(Debug)]
pub(super) enum Home {
    /// At the start of a block of the pool.
    Block(SharedBuffer),
    /// In pieces, in the order of the payload; those in the pool are in the block, one after the other.
    Pieces { block: Option<SharedBuffer>, pieces: Vec<Piece> },
}

/// A piece of a payload.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) len: u64,
    pub(super) place: Place,
}

/// Where a piece lies.
#[derive(Debug)]
pub(super) enum Place {
    /// At an offset of the block.
    Block(u64),
    Source(Arc<Source>),
}

impl Stored {
    pub(super) fn new(buffer: ManagedBuffer, manifest: Manifest, is_fast_path: bool) -> Self {
        let len = buffer.len();
        Self::sized(buffer, len, manifest, is_fast_path)
    }

    /// The payload may be shorter than its block.
    pub(super) fn sized(buffer: ManagedBuffer, len: u64, manifest: Manifest, is_fast_path: bool) -> Self {
        Self { len, home: Home::Block(buffer.freeze()), manifest, is_fast_path, entry: None }
    }

    pub(super) fn in_pieces(
        block: Option<ManagedBuffer>,
        pieces: Vec<Piece>,
        manifest: Manifest,
        is_fast_path: bool,
    ) -> Self {
        let len = pieces.iter().map(|piece| piece.len).sum();
        let home = Home::Pieces { block: block.map(ManagedBuffer::freeze), pieces };
        Self { len, home, manifest, is_fast_path, entry: None }
    }

    /// The local memory of the payload, piece by piece. `pool` is the pool's memory.
    pub(super) fn ranges(&self, pool: LocalRange) -> Vec<(LocalRange, u64)> {
        let in_pool = |offset| pool.advanced(offset);
        match &self.home {
            Home::Block(block) => vec![(in_pool(block.offset()), self.len)],
            Home::Pieces { block, pieces } => {
                let block = block.as_ref().map_or(0, |block| block.offset());
                let range = |place: &Place| match place {
                    Place::Block(offset) => in_pool(block + offset),
                    Place::Source(source) => source.range,
                };
                pieces.iter().map(|piece| (range(&piece.place), piece.len)).collect()
            }
        }
    }
}

/// Shared bytes that are registered where they lie.
#[derive(Debug)]
pub(super) struct Source {
    /// Taken when it is dropped.
    memory: Option<RegisteredMemory>,
    range: LocalRange,
    /// Which the memory keeps.
    len: usize,
}

impl Drop for Source {
    fn drop(&mut self) {
        // At once, where nothing touches it any more, so that the same bytes can be offered again.
        if let Some(memory) = self.memory.take()
            && let Err(error) = memory.unregister(Deadline::after(Duration::ZERO))
        {
            tracing::debug!(%error, "shared bytes are given up later");
        }
    }
}

/// The shared bytes that are registered now, by address.
#[derive(Debug, Default)]
pub(super) struct Sources {
    by_address: Mutex<BTreeMap<usize, Weak<Source>>>,
}

impl Sources {
    /// Registers shared bytes, unless these are registered already.
    ///
    /// # Errors
    /// As [`TransferEngine::register`]; above all `Overlap`, with what is registered otherwise.
    pub(super) fn share(&self, engine: &TransferEngine, bytes: &Bytes) -> Result<Arc<Source>> {
        let address = bytes.as_ptr().addr();
        let known = self.by_address.lock().get(&address).and_then(Weak::upgrade);
        if let Some(source) = known.filter(|source| source.len == bytes.len()) {
            return Ok(source);
        }
        // Two threads may come here with the same bytes: one of them is told of the overlap, and copies.
        let memory = engine.register(Arc::new(ForeignMemory::shared(bytes.clone())), Access::None)?;
        let range = memory.at(0);
        let source = Arc::new(Source { memory: Some(memory), range, len: bytes.len() });
        let mut by_address = self.by_address.lock();
        if by_address.len() >= 1024 {
            by_address.retain(|_, source| source.strong_count() > 0);
        }
        by_address.insert(address, Arc::downgrade(&source));
        Ok(source)
    }
}
