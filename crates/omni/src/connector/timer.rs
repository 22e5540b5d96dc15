//! The connector's clock: wakes when the next thing is due.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use posthorse_core::{AtWork, Error, Result};

use super::Inner;

/// When to wake next.
#[derive(Debug, Default)]
pub(super) struct Timer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    due: Option<Instant>,
    stopped: bool,
}

impl Timer {
    /// Something is due at `at`.
    pub(super) fn arm(&self, at: Instant) {
        let mut state = self.state.lock();
        if state.due.is_none_or(|due| at < due) {
            state.due = Some(at);
            self.changed.notify_one();
        }
    }

    pub(super) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_one();
    }

    /// Waits until something is due. Says whether to go on.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.stopped {
                return false;
            }
            match state.due {
                None => self.changed.wait(&mut state),
                Some(due) if due <= Instant::now() => {
                    state.due = None;
                    return true;
                }
                Some(due) => {
                    self.changed.wait_until(&mut state, due);
                }
            }
        }
    }
}

/// The shortest time between two looks: many things that are due shortly after one another are done together.
const LEAST: Duration = Duration::from_millis(1);

/// Starts the thread, which ends with the connector.
pub(super) fn start(timer: &Arc<Timer>, inner: Weak<Inner>) -> Result<thread::JoinHandle<()>> {
    let timer = Arc::clone(timer);
    thread::Builder::new()
        .name("omni-timer".to_owned())
        .spawn(move || {
            let _at_work = AtWork::begin();
            while timer.wait() {
                let Some(inner) = inner.upgrade() else { return };
                if let Some(next) = inner.tick() {
                    timer.arm(next.max(Instant::now() + LEAST));
                }
            }
        })
        .map_err(|error| Error::os("start the thread omni-timer", &error))
}
