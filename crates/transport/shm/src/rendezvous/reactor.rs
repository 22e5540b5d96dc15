//! One thread that waits for everything a rendezvous can hear: sockets, and processes that end.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Result};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::Timespec;
use rustix::io::Errno;

use super::socket::PacketBuffer;
use crate::events::note_own_thread;

/// Something to be waited for.
pub(crate) trait Source: fmt::Debug + Send + Sync {
    /// What to wait at.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Called on the reactor's thread when there is something. Never waits.
    fn ready(self: Arc<Self>, buffer: &mut PacketBuffer);

    /// Called on the reactor's thread every now and then.
    fn tick(self: Arc<Self>) {}
}

/// The number of a source; none is used twice.
pub(crate) type SourceId = u64;

const WAKE: SourceId = 0;
const EVENTS: usize = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Reactor {
    epoll: OwnedFd,
    wake: OwnedFd,
    next: AtomicU64,
    sources: Mutex<HashMap<SourceId, Arc<dyn Source>>>,
    stopping: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reactor {
    /// Starts the thread.
    pub(crate) fn start(tick: Duration) -> Result<Arc<Self>> {
        let refused = |error: Errno| Error::os("making an epoll descriptor", &error.into());
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(refused)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(refused)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(refused)?;
        let this = Arc::new(Self {
            epoll,
            wake,
            next: AtomicU64::new(WAKE + 1),
            sources: Mutex::default(),
            stopping: AtomicBool::new(false),
            thread: Mutex::default(),
        });
        let body = {
            let this = Arc::clone(&this);
            move || this.run(tick)
        };
        let thread = thread::Builder::new()
            .name("shm-rendezvous".into())
            .spawn(body)
            .map_err(|error| Error::os("starting the thread shm-rendezvous", &error))?;
        *this.thread.lock() = Some(thread);
        Ok(this)
    }

    /// A number for a source that is to be added.
    pub(crate) fn number(&self) -> SourceId {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for input at a source, from now until it is removed.
    ///
    /// # Errors
    /// `Closed` once the thread is to end.
    pub(crate) fn add(&self, id: SourceId, source: Arc<dyn Source>) -> Result<()> {
        self.sources.lock().insert(id, Arc::clone(&source));
        let added = epoll::add(&self.epoll, source.fd(), EventData::new_u64(id), EventFlags::IN)
            .map_err(|error| Error::os("adding to an epoll descriptor", &error.into()));
        // After it is listed, so that `stop` either forgets it or is seen.
        let added = if self.stopping.load(Ordering::SeqCst) {
            Err(Error::new(ErrorKind::Closed, "the shared-memory rendezvous has ended"))
        } else {
            added
        };
        let removed = !self.sources.lock().contains_key(&id);
        if added.is_err() || removed {
            // Whoever removed it may have been here before us.
            self.remove(id);
            let _ = epoll::delete(&self.epoll, source.fd());
        }
        added
    }

    /// Waits for room to write instead of input, or the other way round.
    pub(crate) fn await_room(&self, id: SourceId, fd: BorrowedFd<'_>, room: bool) {
        let interest = if room { EventFlags::OUT } else { EventFlags::IN };
        // Fails only for a source that was removed.
        let _ = epoll::modify(&self.epoll, fd, EventData::new_u64(id), interest);
    }

    /// Waits at it no longer. It may be called once more if it is being called now.
    pub(crate) fn remove(&self, id: SourceId) {
        let removed = self.sources.lock().remove(&id);
        if let Some(source) = &removed {
            let _ = epoll::delete(&self.epoll, source.fd());
        }
    }

    /// Ends the thread, and forgets every source.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
        let sources = std::mem::take(&mut *self.sources.lock());
        drop(sources);
    }

    fn run(&self, tick: Duration) {
        note_own_thread();
        let mut buffer = PacketBuffer::new();
        let mut events = Vec::with_capacity(EVENTS);
        let timeout = Timespec::try_from(tick).ok();
        let mut ticked = std::time::Instant::now();
        while !self.stopping.load(Ordering::Acquire) {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(error = %io::Error::from(error), "the shared-memory rendezvous cannot wait");
                    return;
                }
            }
            for event in &events {
                self.call(*event, &mut buffer);
            }
            if ticked.elapsed() >= tick {
                ticked = std::time::Instant::now();
                let sources: Vec<_> = self.sources.lock().values().cloned().collect();
                sources.into_iter().for_each(Source::tick);
            }
        }
    }

    fn call(&self, event: Event, buffer: &mut PacketBuffer) {
        let id = event.data.u64();
        if id == WAKE {
            return;
        }
        // Not under the lock: sources add and remove others.
        let source = self.sources.lock().get(&id).cloned();
        if let Some(source) = source {
            source.ready(buffer);
        }
    }
}

/// Calls a function once when a process has ended (`pidfd_open(2)`).
pub(crate) struct ProcessWatch<F> {
    pidfd: OwnedFd,
    ended: F,
}

impl<F: Fn() + Send + Sync> ProcessWatch<F> {
    pub(crate) const fn new(pidfd: OwnedFd, ended: F) -> Self {
        Self { pidfd, ended }
    }
}

impl<F: Fn() + Send + Sync> Source for ProcessWatch<F> {
    fn fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn ready(self: Arc<Self>, _: &mut PacketBuffer) {
        (self.ended)();
    }
}

impl<F> fmt::Debug for ProcessWatch<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessWatch").field("pidfd", &self.pidfd).finish_non_exhaustive()
    }
}
