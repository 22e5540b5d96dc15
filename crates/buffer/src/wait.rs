//! Waiting for space: a future, and a thread that waits for one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use posthorse_core::{Deadline, Result};

use crate::buffer::ManagedBuffer;
use crate::pool::{Pool, Request};

/// A request for a buffer: see [`Pool::alloc_async`].
#[derive(Debug)]
#[must_use = "a request does nothing until it is polled"]
pub struct Alloc {
    pool: Pool,
    len: u64,
    ticket: Option<u64>,
}

impl Alloc {
    pub(crate) const fn new(pool: Pool, len: u64) -> Self {
        Self { pool, len, ticket: None }
    }
}

impl Future for Alloc {
    type Output = Result<ManagedBuffer>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Cloned out here, since a waker's clone is foreign code that must not run under the pool's lock.
        let waker = cx.waker().clone();
        let served = match self.ticket {
            None => match self.pool.request(self.len, waker)? {
                Request::Served(block) => Some(block),
                Request::Queued(ticket) => {
                    self.ticket = Some(ticket);
                    None
                }
            },
            Some(ticket) => self.pool.look(ticket, waker).inspect_err(|_| self.ticket = None)?,
        };
        let Some(block) = served else { return Poll::Pending };
        self.ticket = None;
        Poll::Ready(self.pool.buffer(block))
    }
}

impl Drop for Alloc {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.pool.leave(ticket);
        }
    }
}

/// Runs a future on this thread until it is ready or `deadline` passes; `None` in that case.
pub(crate) fn block_on<F: Future + Unpin>(
    future: &mut F,
    spin: Duration,
    deadline: Deadline,
) -> Option<F::Output> {
    let parker = Arc::new(Parker::default());
    let waker = Waker::from(Arc::clone(&parker));
    let mut cx = Context::from_waker(&waker);
    let mut in_time = true;
    loop {
        if let Poll::Ready(output) = Pin::new(&mut *future).poll(&mut cx) {
            return Some(output);
        }
        if !in_time {
            return None;
        }
        in_time = parker.park(spin, deadline);
    }
}

/// Parks one thread until it is woken.
#[derive(Debug, Default)]
struct Parker {
    woken: AtomicBool,
    lock: Mutex<()>,
    condition: Condvar,
}

impl Parker {
    /// Waits to be woken, and says whether it was: `false` when the deadline passed first.
    fn park(&self, spin: Duration, deadline: Deadline) -> bool {
        let spin_until = Deadline::after(spin).min(deadline);
        while !spin_until.is_past(Instant::now()) {
            if self.take() {
                return true;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock.lock();
        loop {
            if self.take() {
                return true;
            }
            if deadline.is_past(Instant::now()) {
                return false;
            }
            match deadline.instant() {
                Some(at) => drop(self.condition.wait_until(&mut guard, at)),
                None => self.condition.wait(&mut guard),
            }
        }
    }

    fn take(&self) -> bool {
        self.woken.swap(false, Ordering::Acquire)
    }
}

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        // Taking the lock orders the store before the check of a thread that is about to wait.
        drop(self.lock.lock());
        self.condition.notify_one();
    }
}
