//! A task of the control plane that somebody waits for.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use posthorse_core::Result;
use posthorse_memory::ForkGuard;
use tokio::task::JoinHandle;

use super::closed;

/// A future of a task's outcome. Dropping it ends the task.
#[derive(Debug)]
pub(super) struct Task<T> {
    fork: Arc<ForkGuard>,
    handle: JoinHandle<Result<T>>,
}

impl<T> Task<T> {
    pub(super) fn new(fork: &Arc<ForkGuard>, handle: JoinHandle<Result<T>>) -> Self {
        Self { fork: Arc::clone(fork), handle }
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // In a forked child nobody is at it.
        self.fork.check()?;
        // The runtime ended under it.
        Poll::Ready(ready!(Pin::new(&mut self.handle).poll(context)).unwrap_or_else(|_| Err(closed())))
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        // It would be told under locks that threads of the parent may have held at the fork.
        if !self.fork.is_forked() {
            self.handle.abort();
        }
    }
}
