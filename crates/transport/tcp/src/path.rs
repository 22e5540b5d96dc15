//! A path to one peer: what its lanes share, and whether it is up.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use posthorse_core::{Deadline, Error, Incarnation, PathId, PathState, Result, Slice, TransportContext};

use crate::config::TcpConfig;
use crate::hello::LaneClass;
use crate::lane::Lane;

/// What the lanes of a path share.
#[derive(Debug)]
pub(crate) struct PathCore {
    pub(crate) id: PathId,
    /// The peer's segment name.
    pub(crate) peer: String,
    /// The peer's addresses, in the order in which they are tried.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Which life of the peer its memory belongs to.
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) session: [u64; 2],
    pub(crate) config: Arc<TcpConfig>,
    pub(crate) context: TransportContext,
    pub(crate) lanes: OnceLock<Vec<Weak<Lane>>>,
    status: Mutex<Status>,
    changed: Condvar,
}

#[derive(Debug)]
struct Status {
    state: State,
    /// Whether the lanes are to confirm that the far end is quiet before they end.
    confirm: bool,
}

#[derive(Debug)]
enum State {
    /// So many lanes are still being opened.
    Opening(usize),
    Up,
    Down(Error),
}

impl PathCore {
    #[expect(clippy::too_many_arguments, reason = "one for each thing that the lanes share")]
    pub(crate) fn new(
        id: PathId,
        peer: String,
        addresses: Vec<SocketAddr>,
        incarnation: Option<Incarnation>,
        session: [u64; 2],
        config: Arc<TcpConfig>,
        context: TransportContext,
        lanes: usize,
    ) -> Self {
        let status = Mutex::new(Status { state: State::Opening(lanes), confirm: false });
        let lanes = OnceLock::new();
        Self {
            id,
            peer,
            addresses,
            incarnation,
            session,
            config,
            context,
            lanes,
            status,
            changed: Condvar::new(),
        }
    }

    /// One more lane is open.
    pub(crate) fn lane_opened(&self) {
        let mut status = self.status.lock();
        if let State::Opening(left) = &mut status.state {
            *left -= 1;
            if *left == 0 {
                status.state = State::Up;
                self.changed.notify_all();
            }
        }
    }

    /// Takes the path down, unless it is: its lanes end, after confirming that the far end is quiet if they are
    /// to and can.
    pub(crate) fn take_down(&self, error: &Error, confirm: bool) {
        let was_up = {
            let mut status = self.status.lock();
            let down = State::Down(error.clone());
            match std::mem::replace(&mut status.state, down) {
                // The first reason is the true one; but whoever does not wait for a confirmation any more ends that.
                State::Down(first) => {
                    status.state = State::Down(first);
                    if confirm || !status.confirm {
                        return;
                    }
                    status.confirm = false;
                    false
                }
                before => {
                    status.confirm = confirm;
                    matches!(before, State::Up)
                }
            }
        };
        self.changed.notify_all();
        if was_up {
            self.context.events.path_changed(self.id, &PathState::Down(error.clone()));
        }
        for lane in self.lanes.get().into_iter().flatten().filter_map(Weak::upgrade) {
            lane.end_soon();
        }
    }

    /// Why the path is down, and whether its lanes are to confirm that the far end is quiet.
    pub(crate) fn ending(&self) -> Option<(Error, bool)> {
        let status = self.status.lock();
        if let State::Down(error) = &status.state { Some((error.clone(), status.confirm)) } else { None }
    }

    /// Waits until every lane is open.
    ///
    /// # Errors
    /// The reason why the path went down instead, or `DeadlineExceeded`.
    pub(crate) fn wait_until_open(&self, deadline: Deadline) -> Result<()> {
        let mut status = self.status.lock();
        loop {
            match &status.state {
                State::Up => return Ok(()),
                State::Down(error) => return Err(error.clone()),
                State::Opening(_) => {}
            }
            match deadline.instant() {
                None => self.changed.wait(&mut status),
                Some(at) if at <= Instant::now() => {
                    return Err(Deadline::exceeded("the lanes to be opened").with_peer(&*self.peer));
                }
                Some(at) => {
                    self.changed.wait_until(&mut status, at);
                }
            }
        }
    }
}

/// A path as the transport knows it.
#[derive(Debug)]
pub(crate) struct TcpPath {
    pub(crate) core: Arc<PathCore>,
    /// Express lanes first.
    pub(crate) lanes: Vec<Arc<Lane>>,
}

impl TcpPath {
    /// The lane for a slice of `len` bytes: of its class, the one that has the least to do.
    pub(crate) fn lane_for(&self, slice: &Slice, len: u64) -> Option<&Arc<Lane>> {
        let small = self.core.config.small_bytes;
        let urgent = slice.priority == posthorse_core::Priority::High && len <= small.saturating_mul(16);
        let class = if len <= small || urgent { LaneClass::Express } else { LaneClass::Bulk };
        self.lanes.iter().filter(|lane| lane.class == class).min_by_key(|lane| lane.load())
    }

    /// The lane of the notifications.
    pub(crate) fn notify_lane(&self) -> Option<&Arc<Lane>> {
        self.lanes.first()
    }
}
