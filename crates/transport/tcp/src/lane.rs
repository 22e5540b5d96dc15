//! A lane: one connection to a peer, made again when it breaks.
//!
//! [`LaneState`] says what there is to do; this is the shell that does it. Whoever has something for a lane to
//! do says so in `wants` and then tries to drive it: the reactor when its socket is ready, or a caller of
//! `submit`, who saves the way over the reactor. The `io` lock is never waited for. Whoever does not get it
//! leaves the rest to its holder, who looks at `wants` again after giving it back; so it is not a lock in the
//! usual sense, but a baton, and holding it across a system call or an event keeps nobody waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};

use parking_lot::Mutex;
use posthorse_core::{Completion, HostView, RegionId, Result, Slice};

use crate::hello::LaneClass;
use crate::lane_io::LaneIo;
use crate::lane_state::{LaneState, Limits};
use crate::path::PathCore;
use crate::reactor::{Command, Handle};

/// What a lane is wanted to do, as bits.
pub(crate) mod want {
    /// The socket may be ready, or has to be made.
    pub(crate) const IO: u8 = 1;
    /// There may be something to send.
    pub(crate) const SEND: u8 = 2;
    /// Time has passed.
    pub(crate) const TICK: u8 = 4;
    /// The path is down.
    pub(crate) const END: u8 = 8;
}

/// Who drives a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    /// A thread whose work this is.
    Reactor,
    /// A thread that has other things to do: it sends a little, and leaves the rest to the reactor. It reports nothing
    /// either: what an event calls may wait for the reactor, which could then not get the baton.
    Caller,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Lane {
    /// Its number in the reactor.
    pub(crate) key: u64,
    /// Its number within the path.
    pub(crate) number: u16,
    pub(crate) class: LaneClass,
    pub(crate) core: Arc<PathCore>,
    pub(crate) reactor: Arc<Handle>,
    state: Mutex<LaneState>,
    io: Mutex<LaneIo>,
    wants: AtomicU8,
    /// Whether the reactor has it in its inbox.
    queued: AtomicBool,
    ended: AtomicBool,
    /// Bytes waiting or in flight, as of the last look.
    load: AtomicU64,
}

impl Lane {
    pub(crate) fn new(
        key: u64,
        number: u16,
        class: LaneClass,
        core: Arc<PathCore>,
        reactor: Arc<Handle>,
    ) -> Self {
        let state = Mutex::new(LaneState::new(Limits::of(&core.config)));
        let io = Mutex::new(LaneIo::new(&core.config));
        Self {
            key,
            number,
            class,
            core,
            reactor,
            state,
            io,
            wants: AtomicU8::new(0),
            queued: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            load: AtomicU64::new(0),
        }
    }

    /// Something short and without I/O or events to do with the state.
    pub(crate) fn with_state<R>(&self, act: impl FnOnce(&mut LaneState) -> R) -> R {
        let mut state = self.state.lock();
        let result = act(&mut state);
        self.load.store(state.load(), Ordering::Relaxed);
        result
    }

    pub(crate) fn load(&self) -> u64 {
        self.load.load(Ordering::Relaxed)
    }

    /// As [`LaneState::push`].
    ///
    /// # Errors
    /// The reason why the lane has ended.
    pub(crate) fn push(&self, slice: &Slice, memory: HostView) -> Result<bool> {
        self.with_state(|state| state.push(slice, memory))
    }

    /// Drops the waiting slices for whose token `which` says so, and reports them.
    pub(crate) fn cancel(&self, which: &mut dyn FnMut(u64) -> bool) {
        // Asked outside of the lock: the caller may do in there what it likes.
        let mut tokens = self.state.lock().waiting_tokens();
        tokens.retain(|token| which(*token));
        let mut done: Vec<Completion> = Vec::new();
        let tokens = tokens.into_iter().collect();
        let writable = self.with_state(|state| {
            state.cancel(&tokens, &mut done);
            state.take_writable()
        });
        if !done.is_empty() {
            self.core.context.events.completed(&done);
        }
        if writable {
            self.core.context.events.writable(self.core.id);
        }
    }

    pub(crate) fn holds(&self, region: RegionId) -> bool {
        self.state.lock().holds(region)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    pub(crate) fn set_ended(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// The path went down: has the reactor end this lane.
    pub(crate) fn end_soon(self: &Arc<Self>) {
        self.wants.fetch_or(want::END, Ordering::SeqCst);
        self.hand_over();
    }

    /// Leaves what is wanted to the reactor.
    fn hand_over(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.reactor.push(Command::Drive(Arc::clone(self)));
        }
    }

    /// The reactor has taken it from its inbox.
    pub(crate) fn taken(&self) {
        self.queued.store(false, Ordering::Release);
    }

    /// Does what `wants` says and what else is wanted, or leaves it to whoever is at it. False when it was left.
    pub(crate) fn drive(self: &Arc<Self>, wants: u8, driver: Driver) -> bool {
        let mine = match driver {
            Driver::Reactor => u8::MAX,
            Driver::Caller => want::SEND,
        };
        self.wants.fetch_or(wants, Ordering::SeqCst);
        // One side says what it wants and then tries for the baton, the other gives it back and then looks at what is
        // wanted: the fences see to it that one of them notices the other.
        fence(Ordering::SeqCst);
        while self.wants.load(Ordering::SeqCst) & mine != 0 {
            let Some(mut io) = self.io.try_lock() else { return false };
            let wants = self.wants.fetch_and(!mine, Ordering::SeqCst) & mine;
            let more = io.run(self, wants, driver);
            drop(io);
            fence(Ordering::SeqCst);
            if more {
                // Not at once: the reactor has other lanes and connections too.
                self.wants.fetch_or(want::SEND, Ordering::SeqCst);
                self.hand_over();
                return true;
            }
            if driver == Driver::Caller {
                break;
            }
        }
        if driver == Driver::Caller && self.wants.load(Ordering::SeqCst) != 0 {
            self.hand_over();
        }
        true
    }
}
