//! Threads for what waits for a peer: handshakes, and the end of connections.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use posthorse_core::AtWork;

/// How many there are at most.
const MOST: usize = 8;

/// How long one stays without work.
const IDLE: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

/// See the module's documentation. Work may also be for later.
#[derive(Clone)]
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    more: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    now: VecDeque<Job>,
    later: Vec<(Instant, Job)>,
    threads: usize,
    idle: usize,
    stopped: bool,
}

impl Workers {
    pub(crate) fn new() -> Self {
        let shared = Shared { state: Mutex::default(), more: Condvar::new(), ended: Condvar::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Has a thread do this. After the stop it is dropped.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        if !state.stopped {
            state.now.push_back(Box::new(job));
            self.see_to_it(&mut state);
        }
    }

    /// Has a thread do this at that time.
    pub(crate) fn run_at(&self, at: Instant, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.state.lock();
        if !state.stopped {
            state.later.push((at, Box::new(job)));
            // Somebody has to look at the clock.
            self.see_to_it(&mut state);
        }
    }

    fn see_to_it(&self, state: &mut State) {
        // As many as there is work for now, and one to look at the clock.
        if state.idle >= state.now.len().max(1) || state.threads == MOST {
            self.shared.more.notify_one();
            return;
        }
        let shared = Arc::clone(&self.shared);
        let name = format!("rdma-work-{}", state.threads);
        match std::thread::Builder::new().name(name).spawn(move || shared.work()) {
            Ok(_) => state.threads += 1,
            // Those that there are do it; and where there are none, whoever asks next tries again.
            Err(error) => tracing::error!(%error, "no thread for transport rdma"),
        }
    }

    /// Drops what was not begun, and waits for the rest.
    pub(crate) fn stop(&self) {
        let mut state = self.shared.state.lock();
        state.stopped = true;
        let dropped = (std::mem::take(&mut state.now), std::mem::take(&mut state.later));
        self.shared.more.notify_all();
        // From within an event it may be one of these threads that waits.
        if !AtWork::is_now() {
            self.shared.ended.wait_while(&mut state, |state| state.threads > 0);
        }
        drop(state);
        drop(dropped);
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        let mut idle_since = Instant::now();
        loop {
            let now = Instant::now();
            let due = state.later.iter().position(|(at, _)| *at <= now);
            let job = match due {
                Some(due) => Some(state.later.swap_remove(due).1),
                None => state.now.pop_front().inspect(|_| idle_since = now),
            };
            if let Some(job) = job {
                drop(state);
                job();
                state = self.state.lock();
                continue;
            }
            let next = state.later.iter().map(|(at, _)| *at).min();
            // One is enough to look at the clock.
            let needed = next.is_some() && state.idle == 0;
            if state.stopped || (!needed && now >= idle_since + IDLE) {
                state.threads -= 1;
                self.ended.notify_all();
                return;
            }
            let until = next.unwrap_or(idle_since + IDLE);
            state.idle += 1;
            self.more.wait_until(&mut state, until);
            state.idle -= 1;
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn work_is_done_now_or_later_and_a_stop_waits_for_what_was_begun() {
        let workers = Workers::new();
        let (tell, told) = mpsc::channel();
        let said = |what: &'static str| {
            let tell = tell.clone();
            move || tell.send(what).unwrap()
        };
        workers.run_at(Instant::now() + Duration::from_millis(20), said("later"));
        workers.run(said("now"));
        assert_eq!([told.recv().unwrap(), told.recv().unwrap()], ["now", "later"]);
        let (go, may_go) = mpsc::channel::<()>();
        let done = said("done");
        workers.run(move || {
            may_go.recv().unwrap();
            done();
        });
        workers.run_at(Instant::now() + Duration::from_secs(3600), said("never"));
        std::thread::scope(|scope| {
            let stop = scope.spawn(|| workers.stop());
            go.send(()).unwrap();
            stop.join().unwrap();
        });
        workers.run(said("too late"));
        drop(tell);
        assert_eq!(told.into_iter().collect::<Vec<_>>(), ["done"]);
    }
}
