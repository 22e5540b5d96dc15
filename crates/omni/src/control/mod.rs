//! The control plane: small requests and replies between stages, over ZeroMQ's protocol.
//!
//! A [`Listener`] is what peers see as a ROUTER socket, a [`Dialer`] what they see as REQ sockets; the peer may be
//! libzmq, pyzmq or Posthorse. The protocol is ZMTP 3.1 with the NULL mechanism, spoken by a small codec of our
//! own, because every byte of it comes from the outside: announced lengths are checked before memory is taken,
//! a handshake, a reply and a peer that does not read have their time, and one peer never holds up another.
//!
//! Why not the `zeromq` crate (0.7): it takes memory for whatever length a peer announces, which ends the process; it
//! knows neither the time of a handshake nor heartbeats, and one peer that does not read holds up all. A guard in
//! front of it would have to decode the same frames as the codec here, and needs a socket file that a killed process
//! leaves behind.
//!
//! A peer that is waited for is asked by PING whether it is there, so that one which is stopped or cut off is
//! noticed within the liveness time, and a long wait for one that is well goes on.

mod dialer;
mod limits;
mod link;
mod listener;
mod partial;
mod task;
pub(crate) mod zmtp;

use std::borrow::Cow;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};
use std::{fmt, io, mem};

use posthorse_core::{AtWork, Deadline, Error, ErrorKind, Result};
use posthorse_engine::descriptors;
use posthorse_memory::ForkGuard;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Semaphore, mpsc, watch};

pub use dialer::{Dialer, Exchange};
pub use limits::ControlLimits;
pub use listener::{Listener, Peer, Responder, Service};
use task::Task;

/// Threads for what blocks: in awaited gets, for names that have to be resolved, and for what waits for no turn.
const BLOCKING_THREADS: usize = 96;
/// How many of them gets may have.
pub(crate) const BLOCKING_TURNS: usize = 64;
/// How many of them names may have: some systems take half a minute to say that they do not know one.
const LOOKUPS: usize = 16;
/// How long a thread that blocks stays without work: a century.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// How long connections may take to flush their last replies when the control plane closes.
const FLUSH: Duration = Duration::from_millis(500);

/// The thread `omni-control` and its runtime, on which listeners and dialers run. Clones share it.
///
/// A child of `fork` has neither: there every call answers `Forked`, and what is dropped is left as it is.
#[derive(Clone)]
pub struct ControlPlane {
    inner: Arc<Inner>,
}

struct Inner {
    limits: ControlLimits,
    handle: Handle,
    thread: ThreadId,
    fork: Arc<ForkGuard>,
    /// Of the threads that block.
    turns: Arc<Semaphore>,
    lookups: Arc<Semaphore>,
    stop: watch::Sender<bool>,
    /// Held by every task; the last one to let go ends the flush at closing.
    alive: mpsc::WeakSender<()>,
    ended: std::sync::Mutex<std_mpsc::Receiver<()>>,
}

impl ControlPlane {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Io` or `LimitReached` when the system gives no thread or event queue, `InvalidConfig` for limits out of range.
    pub fn start(limits: ControlLimits) -> Result<Self> {
        limits.check()?;
        let fork = Arc::new(ForkGuard::new()?);
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_keep_alive(FOR_EVER)
            .thread_name("omni-blocking")
            .build()
            .map_err(|e| Error::os("starting the control plane's runtime", &e))?;
        let handle = runtime.handle().clone();
        // Tokio panics where it can have no thread that blocks at all. One is made now, and none ever ends for want of
        // work, so that this cannot happen later.
        catch_unwind(AssertUnwindSafe(|| drop(handle.spawn_blocking(|| {})))).map_err(|_| {
            Error::new(ErrorKind::LimitReached, "the system gives no threads for the control plane")
                .with_advice("raise RLIMIT_NPROC (`ulimit -u`), or the limit of processes of the container")
        })?;
        let (stop, mut stopped) = watch::channel(false);
        let (alive, mut all_gone) = mpsc::channel::<()>(1);
        let weak = alive.downgrade();
        let (ended_tx, ended) = std_mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("omni-control".to_owned())
            .spawn(move || {
                let _at_work = AtWork::begin();
                runtime.block_on(async move {
                    // An error means that every control plane was dropped: the same.
                    let _ = stopped.wait_for(|stop| *stop).await;
                    drop(alive);
                    let _ = tokio::time::timeout(FLUSH, all_gone.recv()).await;
                });
                runtime.shutdown_background();
                let _ = ended_tx.send(());
            })
            .map_err(|e| Error::os("starting the thread omni-control", &e))?;
        let thread = thread.thread().id();
        let ended = std::sync::Mutex::new(ended);
        let turns = Arc::new(Semaphore::new(BLOCKING_TURNS));
        let lookups = Arc::new(Semaphore::new(LOOKUPS));
        let inner = Inner { limits, handle, thread, fork, turns, lookups, stop, alive: weak, ended };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Binds `address` (`host:port`, port 0 for any) and serves it.
    ///
    /// # Errors
    /// `Io` naming the address when it cannot be bound, in use or otherwise; `Closed`.
    pub fn listen(&self, address: &str, service: Arc<dyn Service>) -> Result<Listener> {
        listener::bind(self, address, service)
    }

    /// As [`ControlPlane::listen`], on every address of this host: IPv6 and IPv4 where it has both.
    ///
    /// # Errors
    /// As [`ControlPlane::listen`].
    pub fn listen_everywhere(&self, port: u16, service: Arc<dyn Service>) -> Result<Listener> {
        listener::bind_everywhere(self, port, service)
    }

    /// A dialer with its own cache of connections; clones of it share that.
    pub fn dialer(&self) -> Dialer {
        self.dialer_of(self.inner.limits.max_connections_per_address)
    }

    /// As [`ControlPlane::dialer`], with at most so many connections to one address.
    pub(crate) fn dialer_of(&self, most: usize) -> Dialer {
        Dialer::new(self.clone(), most, usize::MAX)
    }

    /// A dialer for exchanges that last: as many with one address at a time, but with all together for no more than every
    /// eighth descriptor that the process may have, and with one address for half of those.
    pub(crate) fn dialer_for(&self, exchanges: usize) -> Dialer {
        let most = descriptors::connections(usize::MAX, 1);
        Dialer::new(self.clone(), exchanges.min(most.div_ceil(2)), most)
    }

    /// How many connections a listener serves at a time.
    pub(crate) fn places(&self) -> usize {
        descriptors::connections(self.inner.limits.max_connections, 2)
    }

    /// Runs a future on the control plane's thread, which it must not hold up. After a close it is dropped.
    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        if let Ok(mut stay) = self.enter() {
            self.inner.handle.spawn(async move {
                tokio::select! {
                    () = future => {}
                    () = until(&mut stay.stopped) => {}
                }
            });
        }
    }

    /// Waits for a future by this control plane's clock, from whatever executor. Dropping the wait ends it.
    ///
    /// # Errors
    /// `DeadlineExceeded`, naming `what` was waited for; `Closed`.
    pub(crate) async fn within<T: Send + 'static>(
        &self,
        deadline: Deadline,
        what: impl Into<Cow<'static, str>>,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let what = what.into();
        let mut stay = self.enter()?;
        let bounded = async move {
            match deadline.instant() {
                None => Ok(future.await),
                Some(at) => {
                    tokio::time::timeout_at(at.into(), future).await.map_err(|_| Deadline::exceeded(&what))
                }
            }
        };
        let waiting = async move {
            tokio::select! {
                outcome = bounded => outcome,
                () = until(&mut stay.stopped) => Err(closed()),
            }
        };
        Task::new(&self.inner.fork, self.inner.handle.spawn(waiting)).await
    }

    /// Does something that blocks on a thread kept for that, when it is its turn. Begun, it goes on whether it is waited
    /// for or not, and what it results in is dropped then; not begun, it is dropped itself.
    ///
    /// # Errors
    /// `DeadlineExceeded`, naming `what` was waited for; `Closed`; `Forked`.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        deadline: Deadline,
        what: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let (handle, turns) = (self.inner.handle.clone(), Arc::clone(&self.inner.turns));
        let run = async move {
            let turn = turns.acquire_owned().await.map_err(|_| closed())?;
            let work = handle.spawn_blocking(move || {
                let _turn = turn;
                work()
            });
            work.await.map_err(|_| closed())
        };
        self.within(deadline, what, run).await?
    }

    /// As [`ControlPlane::run_blocking`], without waiting for a turn: for what is short, and must not wait for what is
    /// not.
    ///
    /// # Errors
    /// As [`ControlPlane::run_blocking`].
    pub(crate) async fn run_at_once<T: Send + 'static>(
        &self,
        deadline: Deadline,
        what: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let handle = self.inner.handle.clone();
        let run = async move { handle.spawn_blocking(work).await.map_err(|_| closed()) };
        self.within(deadline, what, run).await?
    }

    /// The addresses of a name with a port.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) async fn lookup(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = name.parse() {
            return Ok(vec![address]);
        }
        let turn = Arc::clone(&self.inner.lookups).acquire_owned().await.map_err(io::Error::other)?;
        let name = name.to_owned();
        let looked_up = self.inner.handle.spawn_blocking(move || {
            let _turn = turn;
            name.to_socket_addrs().map(Iterator::collect)
        });
        looked_up.await.map_err(io::Error::other)?
    }

    /// Ends every listener, connection and exchange, and the thread. Replies given before go out, if their peers
    /// read them at once. Idempotent; from the control plane's own thread it does not wait.
    ///
    /// # Errors
    /// `DeadlineExceeded` when the thread has not ended yet; it will by itself. `Forked` in a child process.
    pub fn close(&self, deadline: Deadline) -> Result<()> {
        self.check_here()?;
        self.inner.stop.send_replace(true);
        if self.is_own_thread() {
            return Ok(());
        }
        // A poisoned lock means that another closer panicked while it waited: the receiver is as good as ever.
        let ended = self.inner.ended.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let waited = match deadline.remaining(Instant::now()) {
            None => ended.recv().map_err(|_| std_mpsc::RecvTimeoutError::Disconnected),
            Some(remaining) => ended.recv_timeout(remaining),
        };
        match waited {
            // Disconnected: an earlier close has seen the end.
            Ok(()) | Err(std_mpsc::RecvTimeoutError::Disconnected) => Ok(()),
            Err(std_mpsc::RecvTimeoutError::Timeout) => Err(Deadline::exceeded("the control plane to end")),
        }
    }

    #[cfg(test)]
    pub(crate) fn turns_in_use(&self) -> usize {
        BLOCKING_TURNS - self.inner.turns.available_permits()
    }

    /// Whether the caller is on the control plane's own thread, which must never wait for itself.
    fn is_own_thread(&self) -> bool {
        thread::current().id() == self.inner.thread
    }

    /// Whether this is a forked child, which has none of the threads.
    pub(crate) fn is_forked(&self) -> bool {
        self.inner.fork.is_forked()
    }

    /// # Errors
    /// `Forked` in a child process.
    pub(crate) fn check_here(&self) -> Result<()> {
        self.inner.fork.check()
    }

    /// What every task holds while it runs.
    ///
    /// # Errors
    /// `Closed`; `Forked`.
    fn enter(&self) -> Result<Stay> {
        self.check_here()?;
        let stopped = self.inner.stop.subscribe();
        match self.inner.alive.upgrade() {
            Some(alive) if !*stopped.borrow() => Ok(Stay { _alive: alive, stopped }),
            _ => Err(closed()),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.fork.is_forked() {
            // It tells whoever waits for it, under locks that may be held for ever by a thread that is not there.
            mem::forget(mem::replace(&mut self.stop, watch::Sender::new(true)));
        }
    }
}

impl fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.is_forked() {
            true => "of the parent process",
            false if *self.inner.stop.borrow() => "closed",
            false => "open",
        };
        write!(f, "ControlPlane({state})")
    }
}

/// A task's stay in the control plane.
#[derive(Debug)]
struct Stay {
    _alive: mpsc::Sender<()>,
    stopped: watch::Receiver<bool>,
}

/// Waits until this says stop, or nobody is left who could.
async fn until(stopped: &mut watch::Receiver<bool>) {
    let _ = stopped.wait_for(|stop| *stop).await;
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the control plane is closed")
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Waker};

    use pollster::block_on;

    use super::*;

    #[test]
    fn what_blocks_waits_for_its_turn_until_its_deadline_and_leaves_threads_for_names() {
        let plane = ControlPlane::start(ControlLimits::default()).unwrap();
        let (go, may_go) = std_mpsc::channel::<()>();
        let shared = Arc::new((Mutex::new(may_go), AtomicUsize::new(0)));
        let job = |_| {
            let shared = Arc::clone(&shared);
            Box::pin(plane.run_blocking(Deadline::NEVER, "the test", move || {
                shared.1.fetch_add(1, Ordering::SeqCst);
                let _ = shared.0.lock().unwrap().recv();
            }))
        };
        let mut jobs: Vec<_> = (0..BLOCKING_TURNS).map(job).collect();
        for job in &mut jobs {
            assert!(job.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        while shared.1.load(Ordering::SeqCst) < BLOCKING_TURNS {
            thread::yield_now();
        }
        let held = Arc::new(());
        let work = Arc::clone(&held);
        let soon = Deadline::after(Duration::from_millis(10));
        let late = block_on(plane.run_blocking(soon, "a turn", move || drop(work))).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
        assert_eq!(Arc::strong_count(&held), 1, "it is dropped");
        let names = plane.clone();
        let lookup = plane.within(Deadline::after(Duration::from_secs(20)), "a name", async move {
            names.lookup("localhost:1").await.map(|found| found.len())
        });
        assert!(block_on(pin!(lookup)).unwrap().unwrap() > 0);
        drop(go);
        for job in jobs {
            block_on(job).unwrap();
        }
    }
}
