//! The control runtime, which can be stopped from anywhere.

use std::io;
use std::panic::catch_unwind;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Result};
use tokio::runtime::{Handle, Runtime};

/// The threads that block, of which [`WAITING`] wait for peers.
const BLOCKING: usize = 80;
/// How many connections are made at once.
pub(crate) const WAITING: usize = 64;
/// How long a thread that blocks stays without work: a century.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The threads on which an engine waits for peers.
///
/// A Tokio runtime that is dropped in an asynchronous context panics, and engines are dropped there too.
#[derive(Debug)]
pub(crate) struct ControlRuntime(Mutex<Option<Runtime>>);

impl ControlRuntime {
    /// # Errors
    /// `LimitReached` when the system gives no threads, `Io` when it gives no event queue.
    pub(crate) fn start() -> Result<Self> {
        // Tokio panics where it can have no thread at all. One that blocks is made now, and none ever ends for want of
        // work, so that this cannot happen later.
        let started = catch_unwind(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .max_blocking_threads(BLOCKING)
                .thread_keep_alive(FOR_EVER)
                .thread_name("engine-control")
                .enable_all()
                .build()?;
            drop(runtime.spawn_blocking(|| {}));
            Ok(runtime)
        });
        let started = started.map_err(|_| {
            Error::new(ErrorKind::LimitReached, "the system gives no threads for the control runtime")
                .with_advice("raise RLIMIT_NPROC (`ulimit -u`), or the limit of processes of the container")
        })?;
        let runtime = started.map_err(|error: io::Error| Error::os("start the control runtime", &error))?;
        Ok(Self(Mutex::new(Some(runtime))))
    }

    /// For spawning; `None` after the stop.
    pub(crate) fn handle(&self) -> Option<Handle> {
        self.0.lock().as_ref().map(|runtime| runtime.handle().clone())
    }

    /// Stops it, and waits up to `timeout` for what its threads are doing; not where this is one of them.
    pub(crate) fn stop(&self, timeout: Duration) {
        let Some(runtime) = self.0.lock().take() else { return };
        let own = Handle::try_current().is_ok_and(|current| current.id() == runtime.handle().id());
        if own {
            return runtime.shutdown_background();
        }
        // Waiting is allowed on a thread of its own, whatever runs here. Where none can be had, nobody waits.
        let runtime = Mutex::new(Some(runtime));
        let wait = || {
            if let Some(runtime) = runtime.lock().take() {
                runtime.shutdown_timeout(timeout);
            }
        };
        thread::scope(|scope| {
            let _ = thread::Builder::new().name("engine-stop".to_owned()).spawn_scoped(scope, wait);
        });
        if let Some(runtime) = runtime.into_inner() {
            runtime.shutdown_background();
        }
    }

    /// Leaves it as it is, for ever: in a forked child its threads are not there.
    pub(crate) fn forget(&self) {
        std::mem::forget(self.0.lock().take());
    }
}

impl Drop for ControlRuntime {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_can_be_stopped_and_dropped_within_any_runtime_and_its_own() {
        let outer = ControlRuntime::start().unwrap();
        let handle = outer.handle().unwrap();
        handle.block_on(async {
            let inner = ControlRuntime::start().unwrap();
            inner.stop(Duration::from_secs(5));
            drop(ControlRuntime::start().unwrap());
        });
        let own = std::sync::Arc::new(outer);
        let task = handle.spawn_blocking({
            let own = std::sync::Arc::clone(&own);
            move || own.stop(Duration::from_secs(5))
        });
        drop(task);
        while own.handle().is_some() {
            thread::yield_now();
        }
    }
}
