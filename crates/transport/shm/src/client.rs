//! One client of the owner: what it touches, and whether it still can.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::PollFlags;
use rustix::net::{Shutdown, shutdown};

use crate::slots::ClientSlots;
use crate::sys::is_ready;
use crate::table::Key;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Client {
    slots: ClientSlots,
    socket: Arc<OwnedFd>,
    /// Its pidfd.
    process: OwnedFd,
    dead: AtomicBool,
    let_go: AtomicBool,
}

impl Client {
    pub(crate) fn new(slots: ClientSlots, socket: Arc<OwnedFd>, process: OwnedFd) -> Arc<Self> {
        let (dead, let_go) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { slots, socket, process, dead, let_go })
    }

    /// Ends the conversation, whoever wanted it to end. Until the client has heard of it, its threads may announce
    /// grants as before.
    pub(crate) fn let_go(&self) {
        self.let_go.store(true, Ordering::Release);
        // Not for reading, by which it is seen that the client has closed its end.
        let _ = shutdown(&*self.socket, Shutdown::Write);
    }

    pub(crate) fn is_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire)
    }

    /// Whether it touches nothing and never will, and so may be forgotten: it has closed its end, before which it stops
    /// announcing (see [`crate::slots::Slots::close`]), and holds nothing; or its process has ended.
    pub(crate) fn is_over(&self) -> bool {
        // In this order: what was announced before it left is seen after that.
        self.has_died() || (is_ready(&*self.socket, PollFlags::RDHUP) && self.slots.are_clear())
    }

    /// Whether its process has ended: nothing that it announced counts any more. It is asked for at once and not
    /// reported by the rendezvous' thread, as memory is to be had back after the end of that, too.
    pub(crate) fn has_died(&self) -> bool {
        if !self.dead.load(Ordering::Acquire) && is_ready(&self.process, PollFlags::IN) {
            self.dead.store(true, Ordering::Release);
        }
        self.dead.load(Ordering::Acquire)
    }

    /// Whether it is touching memory under this grant.
    pub(crate) fn holds(&self, key: Key) -> bool {
        self.slots.holds(key) && !self.has_died()
    }
}
