//! The worker pool that serves pulls: a few threads that hand each consumer's slice of work to the engine.
//!
//! A worker waits neither for the bytes, whose completion answers the consumer, nor for a connection (see `reach`). So
//! a small pull is never behind the bytes of large ones, nor behind consumers that cannot be reached.

use std::fmt;
use std::thread;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use parking_lot::Mutex;
use posthorse_core::{AtWork, Error, ErrorKind, Result};

type Job = Box<dyn FnOnce() + Send>;

/// Jobs that wait for a worker before more are refused.
const QUEUE: usize = 4096;

pub(super) struct Workers {
    jobs: Mutex<Option<Sender<Job>>>,
    threads: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Workers {
    pub(super) fn start(count: usize) -> Result<Self> {
        let (sender, receiver) = bounded::<Job>(QUEUE);
        let mut threads = Vec::with_capacity(count);
        for index in 0..count {
            let jobs: Receiver<Job> = receiver.clone();
            let thread = thread::Builder::new()
                .name(format!("omni-worker-{index}"))
                .spawn(move || {
                    let _at_work = AtWork::begin();
                    jobs.iter().for_each(|job| job());
                })
                .map_err(|error| Error::os("start a thread omni-worker", &error))?;
            threads.push(thread);
        }
        Ok(Self { jobs: Mutex::new(Some(sender)), threads: Mutex::new(threads) })
    }

    /// Has a worker do something.
    pub(super) fn submit(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let Some(jobs) = self.jobs.lock().clone() else {
            return Err(Error::new(ErrorKind::Closed, "the connector is closed"));
        };
        jobs.try_send(Box::new(job)).map_err(|refused| match refused {
            TrySendError::Full(_) => Error::new(
                ErrorKind::QueueFull,
                format!("{QUEUE} pulls wait for a worker, which is the limit"),
            ),
            TrySendError::Disconnected(_) => Error::new(ErrorKind::Closed, "the connector is closed"),
        })
    }

    /// Takes no more jobs. Those queued are done.
    pub(super) fn close(&self) -> Vec<thread::JoinHandle<()>> {
        *self.jobs.lock() = None;
        std::mem::take(&mut *self.threads.lock())
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workers({})", self.threads.lock().len())
    }
}

/// Runs a future on this thread, for `what`.
///
/// # Errors
/// `Busy` on a thread that is at work for a connector or an engine, as in the waker of another future: what the future
/// waits for may be that thread's to do.
pub(super) fn block_on<T>(what: &str, future: impl Future<Output = Result<T>>) -> Result<T> {
    if AtWork::is_now() {
        let text =
            format!("{what} that waits, on a thread of a connector or an engine, which it would hold up");
        return Err(
            Error::new(ErrorKind::Busy, text).with_advice("await it, or do it on a thread of your own")
        );
    }
    pollster::block_on(future)
}
