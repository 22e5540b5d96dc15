//! One end of the engine's benches: an engine, and memory that the other end may reach.

use std::net::IpAddr;

use posthorse_buffer::{ManagedBuffer, Pool, PoolConfig};
use posthorse_core::{Access, Error};
use posthorse_engine::{RegisteredMemory, TransferEngine};
use posthorse_memory::MemoryOptions;

use crate::outcome::note;
use crate::stage;

/// An engine with one region, all of which is one buffer.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) buffer: ManagedBuffer,
    pub(crate) memory: RegisteredMemory,
    pub(crate) engine: TransferEngine,
}

impl End {
    /// An engine that listens at `address` (all of this host's when unspecified), and memory of `bytes`.
    pub(crate) fn new(address: IpAddr, bytes: u64, access: Access) -> Result<Self, Error> {
        let engine = TransferEngine::builder().config(stage::engine_config(address)).build()?;
        let size = usize::try_from(bytes)
            .map_err(|_| Error::invalid_argument("memory", bytes, "what this host can address"))?;
        let memory = MemoryOptions::new(size).shared(true).allocate()?;
        for notice in memory.notices() {
            note(format_args!("note: {notice}"));
        }
        let pool = Pool::new(memory, &PoolConfig::default())?;
        // SAFETY: the bytes are looked at by `End::bytes` alone, which is not called while something is under way.
        let memory = engine.register(unsafe { pool.region() }, access)?;
        let buffer = pool.try_alloc(bytes)?;
        Ok(Self { buffer, memory, engine })
    }

    /// The `len` bytes at `offset` of the memory. Nothing may be under way there.
    pub(crate) fn bytes(&mut self, offset: u64, len: u64) -> Result<&mut [u8], Error> {
        let (all, outside) = (self.buffer.len(), format!("a range of {len} bytes at {offset}"));
        let range =
            offset.checked_add(len).filter(|end| *end <= all).map(|end| offset as usize..end as usize);
        let bytes = self.buffer.bytes_mut()?;
        range
            .and_then(|range| bytes.get_mut(range))
            .ok_or_else(|| Error::invalid_argument("range", outside, &format!("ranges within {all} bytes")))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn ranges_outside_of_the_memory_are_refused() {
        let mut end = End::new(Ipv4Addr::LOCALHOST.into(), 1 << 20, Access::None).unwrap();
        assert_eq!(end.bytes(1 << 19, 1 << 19).unwrap().len(), 1 << 19);
        for (offset, len) in [(0, (1 << 20) + 1), (1 << 20, 1), (u64::MAX, 2)] {
            assert!(end.bytes(offset, len).unwrap_err().to_string().contains(&len.to_string()));
        }
    }
}
