//! The receive slot: a buffer that a peer may write to.

use posthorse_core::{Error, ErrorKind, GrantToken, Result, View};

use crate::buffer::ManagedBuffer;
use crate::slot::{SlotEvent, SlotGrant, SlotState};

/// A buffer on its way to being filled by a peer.
///
/// While a peer may write to it, its bytes cannot be seen, and its block does not go back to the pool: a slot
/// that is dropped or [withdrawn](ReceiveSlot::withdraw) after it was granted goes into fencing, and its pool
/// keeps it until [`Pool::fenced`](crate::Pool::fenced) is told that the peer can write no more.
///
/// ```compile_fail,E0599
/// # fn look(slot: &posthorse_buffer::ReceiveSlot) {
/// slot.bytes(); // there is no such method
/// # }
/// ```
#[derive(Debug)]
pub struct ReceiveSlot {
    buffer: ManagedBuffer,
    state: SlotState,
}

impl ReceiveSlot {
    pub(crate) const fn new(buffer: ManagedBuffer) -> Self {
        Self { buffer, state: SlotState::Allocated }
    }

    /// Where it stands: allocated, granted or filled.
    pub const fn state(&self) -> SlotState {
        self.state
    }

    /// Where it starts, in bytes from the start of the pool.
    pub const fn offset(&self) -> u64 {
        self.buffer.offset()
    }

    /// Bytes.
    pub const fn len(&self) -> u64 {
        self.buffer.len()
    }

    /// Never: a pool gives out no empty blocks.
    pub const fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The address of its first byte, to be told to the peer.
    pub fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// Its range of memory, for transports.
    pub const fn view(&self) -> View {
        self.buffer.view()
    }

    /// Marks the slot as granted to a peer, under a generation of its own. `token` is what the owner of the
    /// registration made for it, or `None` for a peer whose protocol knows no grants. To be called before the
    /// peer hears of the address.
    ///
    /// # Errors
    /// `Busy` when it is granted already, `InvalidArgument` when it is filled, `Forked` in a child process.
    pub fn grant(&mut self, token: Option<GrantToken>) -> Result<SlotGrant> {
        // Asked of the state machine first, with what the grant is going to look like to it.
        self.state.on(SlotEvent::Grant(SlotGrant { generation: 0, token }))?;
        let grant = self.buffer.grant(token)?;
        self.state = SlotState::Granted(grant);
        Ok(grant)
    }

    /// The peer reported, under `grant`, that all its bytes are visible here.
    ///
    /// # Errors
    /// `AccessDenied` when the report names another generation or token, as a late one does: the slot stays
    /// granted. `Expired` when it is not granted, `Forked` in a child process.
    pub fn fill(&mut self, grant: SlotGrant) -> Result<()> {
        let filled = self.state.on(SlotEvent::Fill(grant))?;
        self.buffer.grant_filled()?;
        self.state = filled;
        Ok(())
    }

    /// The buffer: of a filled slot to be read, of one that was never granted to be used otherwise.
    ///
    /// # Errors
    /// `Busy` when it is granted; the slot goes into fencing then, as when it is dropped.
    pub fn into_buffer(self) -> Result<ManagedBuffer> {
        if self.state != SlotState::Allocated {
            self.state.on(SlotEvent::View)?;
        }
        Ok(self.buffer)
    }

    /// Withdraws the grant and puts the slot into fencing. The generation of the grant that is returned is what
    /// [`Pool::fenced`](crate::Pool::fenced) frees it by.
    ///
    /// # Errors
    /// `InvalidArgument` when it is not granted; it goes back to the pool then.
    pub fn withdraw(self) -> Result<SlotGrant> {
        match self.state.on(SlotEvent::Withdraw)? {
            SlotState::Fencing(grant) => Ok(grant),
            state => Err(Error::new(ErrorKind::Internal, format!("a withdrawn slot is {state:?}"))),
        }
    }
}
