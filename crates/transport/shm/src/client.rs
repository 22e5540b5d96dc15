//! One client of the owner: what it touches, and whether it still can.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use posthorse_core::Result;
use rustix::event::PollFlags;
use rustix::net::{Shutdown, shutdown};
use rustix::process::Pid;

use crate::slots::ClientSlots;
use crate::sys::{is_ready, peer_credentials, peer_pidfd};
use crate::table::Key;

/// A process that is at the other end of one conversation or several.
#[derive(Debug)]
pub(crate) struct ClientProcess {
    /// `None` when it cannot be seen from this PID namespace.
    pid: Option<Pid>,
    pidfd: OwnedFd,
    dead: AtomicBool,
}

impl ClientProcess {
    /// The one at the other end of a socket.
    pub(crate) fn of(socket: &OwnedFd) -> Result<Self> {
        let credentials = peer_credentials(socket)?;
        let pidfd = peer_pidfd(socket, credentials)?;
        Ok(Self { pid: credentials.pid, pidfd, dead: AtomicBool::new(false) })
    }

    /// Whether another is the same process. Only a yes is sure.
    pub(crate) fn is(&self, known: &Self) -> bool {
        // A number is of one process until that has ended. The known one has it now; ours had it before, and has it
        // still afterwards: so both have had it at once.
        self.pid.is_some() && self.pid == known.pid && !known.has_died() && !self.has_died()
    }

    fn has_died(&self) -> bool {
        if !self.dead.load(Ordering::Acquire) && is_ready(&self.pidfd, PollFlags::IN) {
            self.dead.store(true, Ordering::Release);
        }
        self.dead.load(Ordering::Acquire)
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Client {
    slots: ClientSlots,
    /// Until it is seen that the client has closed its end.
    socket: Mutex<Option<Arc<OwnedFd>>>,
    process: Arc<ClientProcess>,
    let_go: AtomicBool,
}

impl Client {
    pub(crate) fn new(slots: ClientSlots, socket: Arc<OwnedFd>, process: Arc<ClientProcess>) -> Arc<Self> {
        Arc::new(Self { slots, socket: Mutex::new(Some(socket)), process, let_go: AtomicBool::new(false) })
    }

    pub(crate) const fn process(&self) -> &Arc<ClientProcess> {
        &self.process
    }

    /// Ends the conversation, whoever wanted it to end. Until the client has heard of it, its threads may announce
    /// grants as before.
    pub(crate) fn let_go(&self) {
        self.let_go.store(true, Ordering::Release);
        // Not for reading, by which it is seen that the client has closed its end.
        if let Some(socket) = &*self.socket.lock() {
            let _ = shutdown(socket, Shutdown::Write);
        }
    }

    pub(crate) fn is_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire)
    }

    /// Whether it touches nothing and never will, and so may be forgotten: it has closed its end, before which it stops
    /// announcing (see [`crate::slots::Slots::close`]), and holds nothing; or its process has ended.
    pub(crate) fn is_over(&self) -> bool {
        // In this order: what was announced before it left is seen after that.
        self.has_died() || (self.has_left() && self.slots.are_clear())
    }

    /// Whether it has closed its end. Asked of one that was let go, of which nothing is heard any more.
    fn has_left(&self) -> bool {
        let mut socket = self.socket.lock();
        let left = socket.as_ref().is_none_or(|socket| is_ready(socket, PollFlags::RDHUP));
        if left {
            // It may hold memory for as long as it likes, but no descriptor.
            *socket = None;
        }
        left
    }

    /// Whether its process has ended: nothing that it announced counts any more. It is asked for at once and not
    /// reported by the rendezvous' thread, as memory is to be had back after the end of that, too.
    pub(crate) fn has_died(&self) -> bool {
        self.process.has_died()
    }

    /// Whether it is touching memory under this grant.
    pub(crate) fn holds(&self, key: Key) -> bool {
        self.slots.holds(key) && !self.has_died()
    }
}
