//! Waiting on a plain thread for what runs on the runtime.

use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Instant;

use posthorse_core::{Deadline, Error, ErrorKind, Result};
use tokio::runtime::Handle;

/// Runs `work` on the runtime and waits for its outcome; past the deadline it is dropped where it stands.
///
/// # Errors
/// Those of `work`; `DeadlineExceeded` for `what`; `Closed` when the runtime has been shut down.
pub(crate) fn wait<T: Send + 'static>(
    runtime: &Handle,
    deadline: Deadline,
    what: &str,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let (done, outcome) = sync_channel(1);
    let task = runtime.spawn(async move {
        // Only fails when nobody waits any more.
        let _ = done.send(work.await);
    });
    let received = match deadline.remaining(Instant::now()) {
        None => outcome.recv().map_err(|_| RecvTimeoutError::Disconnected),
        Some(remaining) => outcome.recv_timeout(remaining),
    };
    received.unwrap_or_else(|error| match error {
        RecvTimeoutError::Timeout => {
            task.abort();
            Err(Deadline::exceeded(what))
        }
        RecvTimeoutError::Disconnected => {
            Err(Error::new(ErrorKind::Closed, "the control runtime was shut down"))
        }
    })
}
