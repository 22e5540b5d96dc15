//! Buffers: the sole owners of their blocks, which go back to the pool with them.
//!
//! The `unsafe` of this crate is here. It rests on one rule: while a [`ManagedBuffer`] can be asked for its
//! bytes, nobody else may touch its block. The pool gives a block to one buffer at a time; a buffer that is
//! lent to a peer is inside a [`ReceiveSlot`], which shows no bytes.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, GrantToken, HostView, Result, View};

use crate::allocator::Block;
use crate::pool::Pool;
use crate::receive::ReceiveSlot;
use crate::slot::SlotGrant;

/// A block of a pool, owned. It returns to the pool when it is dropped or released, at that moment.
///
/// The pool's region lives at least as long. To let a peer write into it, turn it
/// [into a slot](ManagedBuffer::into_slot); to let several readers share it, [freeze](ManagedBuffer::freeze) it.
pub struct ManagedBuffer {
    pool: Pool,
    block: Block,
    view: View,
    on_drop: OnDrop,
}

/// Where the block goes when its buffer is dropped.
#[derive(Debug, Clone, Copy)]
enum OnDrop {
    Free,
    /// Into fencing: a peer may still write.
    Fence(SlotGrant),
    /// To nobody: a raw handle owns it now.
    GiveUp,
}

impl ManagedBuffer {
    /// The buffer of a block that nobody else has.
    pub(crate) const fn new(pool: Pool, block: Block, view: View) -> Self {
        Self { pool, block, view, on_drop: OnDrop::Free }
    }

    /// Bytes.
    pub const fn len(&self) -> u64 {
        self.block.len()
    }

    /// Never: a pool gives out no empty blocks.
    pub const fn is_empty(&self) -> bool {
        self.block.is_empty()
    }

    /// Where it starts, in bytes from the start of the pool.
    pub const fn offset(&self) -> u64 {
        self.block.offset()
    }

    /// The address of its first byte, in the address space of the host or the device.
    pub fn address(&self) -> u64 {
        self.view.address()
    }

    /// Its range of memory, for transports. Looking through it is unsafe, and only allowed while the buffer
    /// lives.
    pub const fn view(&self) -> View {
        self.view
    }

    /// Whether it came from this pool.
    pub fn is_of(&self, pool: &Pool) -> bool {
        self.pool == *pool
    }

    /// The bytes.
    ///
    /// # Errors
    /// `Unsupported` when the pool lies in a device's memory; `Forked` in a child process.
    pub fn bytes(&self) -> Result<&[u8]> {
        let view = self.host()?;
        // SAFETY: the pool holds the region, and this buffer the pool, so the memory is alive, and this process has it,
        // as just checked. The block is this buffer's alone (see the module), and `&self` keeps writers out.
        Ok(unsafe { view.bytes() })
    }

    /// The bytes, to be written.
    ///
    /// # Errors
    /// `Unsupported` when the pool lies in a device's memory; `Forked` in a child process.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        let view = self.host()?;
        // SAFETY: as in `bytes`; `&mut self` keeps everybody else out, and pools take writable regions only.
        Ok(unsafe { view.bytes_mut() })
    }

    /// Fills the buffer with as many bytes.
    ///
    /// # Errors
    /// `InvalidArgument` when their number is not the buffer's; else as [`ManagedBuffer::bytes_mut`].
    pub fn copy_from_slice(&mut self, bytes: &[u8]) -> Result<()> {
        let own = self.bytes_mut()?;
        if own.len() != bytes.len() {
            let accepted = format!("the buffer's {}", own.len());
            return Err(Error::invalid_argument("the number of bytes to copy", bytes.len(), &accepted));
        }
        own.copy_from_slice(bytes);
        Ok(())
    }

    /// Returns the block to the pool, as dropping does.
    pub fn release(self) {
        drop(self);
    }

    /// A read-only buffer that can be shared.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer { buffer: Arc::new(self) }
    }

    /// A slot that a peer can be allowed to write to. Its bytes cannot be seen until it is filled.
    pub const fn into_slot(self) -> ReceiveSlot {
        ReceiveSlot::new(self)
    }

    /// Gives up the automatic return, for interfaces that cannot carry a Rust value: the block stays taken until
    /// [`Pool::reclaim`] makes a buffer of it again. Some handle to the pool has to be kept meanwhile, or the
    /// memory goes away under the block.
    pub fn into_block(mut self) -> Block {
        self.on_drop = OnDrop::GiveUp;
        self.block
    }

    /// From now until [`ManagedBuffer::grant_filled`], the end of this buffer means fencing.
    pub(crate) fn grant(&mut self, token: Option<GrantToken>) -> Result<SlotGrant> {
        let grant = self.pool.next_grant(token)?;
        self.on_drop = OnDrop::Fence(grant);
        Ok(grant)
    }

    pub(crate) fn grant_filled(&mut self) -> Result<()> {
        self.pool.grant_filled()?;
        self.on_drop = OnDrop::Free;
        Ok(())
    }

    fn host(&self) -> Result<HostView> {
        self.pool.check_here()?;
        self.view.host().ok_or_else(|| {
            let location = self.pool.location();
            Error::new(ErrorKind::Unsupported, "the bytes of a buffer in device memory were asked for")
                .with_device(location.to_string())
                .with_advice("copy it to a buffer of a host pool")
        })
    }
}

impl Drop for ManagedBuffer {
    fn drop(&mut self) {
        match self.on_drop {
            OnDrop::Free => self.pool.give_back(self.block),
            OnDrop::Fence(grant) => self.pool.grant_withdrawn(self.block, grant),
            OnDrop::GiveUp => self.pool.give_up(self.block),
        }
    }
}

impl fmt::Debug for ManagedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ManagedBuffer({} bytes at offset {})", self.len(), self.offset())
    }
}

/// A [`ManagedBuffer`] that is only read, shared by its clones. The last one to go returns it to the pool.
#[derive(Debug, Clone)]
pub struct SharedBuffer {
    buffer: Arc<ManagedBuffer>,
}

impl SharedBuffer {
    /// The buffer itself again, when this is its only clone; otherwise the clone back.
    ///
    /// # Errors
    /// Itself, when others share it.
    pub fn thaw(self) -> std::result::Result<ManagedBuffer, Self> {
        Arc::try_unwrap(self.buffer).map_err(|buffer| Self { buffer })
    }
}

impl Deref for SharedBuffer {
    type Target = ManagedBuffer;

    fn deref(&self) -> &ManagedBuffer {
        &self.buffer
    }
}
