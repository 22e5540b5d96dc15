//! The engine's slow clock: deadlines of submissions nobody waits for, fences that are due, memory held back.
//!
//! It ticks only while there is something to look after.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use posthorse_core::{AtWork, Error, ErrorKind, Result};

use crate::engine::Inner;
use crate::submission::Doom;

const TICK: Duration = Duration::from_millis(20);
/// Ticks without work before the thread parks: waking it costs more than some idle ticks.
const LINGER: u32 = 50;

/// Wakes the ticking thread.
#[derive(Debug, Default)]
pub(crate) struct Ticker {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
enum State {
    /// The thread is parked.
    #[default]
    Parked,
    /// It looks after things, and has seen all there were when it last began to.
    Ticking,
    /// Something came since.
    Armed,
    Stopped,
}

impl Ticker {
    /// Something has to be looked after from now on.
    pub(crate) fn arm(&self) {
        let mut state = self.state.lock();
        match *state {
            State::Parked => {
                *state = State::Armed;
                self.wake.notify_one();
            }
            State::Ticking => *state = State::Armed,
            State::Armed | State::Stopped => {}
        }
    }

    pub(crate) fn stop(&self) {
        *self.state.lock() = State::Stopped;
        self.wake.notify_one();
    }

    /// Waits for the next tick, or while there is nothing to do. Says whether to go on.
    fn next(&self, idle: bool) -> bool {
        let mut state = self.state.lock();
        if idle && *state == State::Ticking {
            *state = State::Parked;
        }
        if *state == State::Parked {
            self.wake.wait_while(&mut state, |state| *state == State::Parked);
        } else {
            let until = Instant::now() + TICK;
            self.wake.wait_while_until(&mut state, |state| *state != State::Stopped, until);
        }
        // What comes while the tick is looking must make for another.
        if *state == State::Armed {
            *state = State::Ticking;
        }
        *state != State::Stopped
    }
}

/// Starts the ticking thread, which ends with the engine.
pub(crate) fn start(engine: &Arc<Inner>) -> Result<thread::JoinHandle<()>> {
    let (ticker, engine) = (Arc::clone(&engine.ticker), Arc::downgrade(engine));
    thread::Builder::new()
        .name("engine-ticker".to_owned())
        .spawn(move || run(&ticker, &engine))
        .map_err(|error| Error::os("start the thread engine-ticker", &error))
}

fn run(ticker: &Ticker, engine: &Weak<Inner>) {
    let _at_work = AtWork::begin();
    let mut doomed_since = HashMap::new();
    let mut idle_ticks = 0;
    while ticker.next(idle_ticks > LINGER) {
        let Some(engine) = engine.upgrade() else { return };
        let busy = engine.tick(Instant::now(), &mut doomed_since);
        idle_ticks = if busy { 0 } else { idle_ticks + 1 };
    }
}

impl Inner {
    /// Looks after everything once. Says whether there is more to look after.
    fn tick(self: &Arc<Self>, now: Instant, doomed_since: &mut HashMap<u32, Instant>) -> bool {
        let live = self.table.live();
        let expired: Vec<_> = live
            .iter()
            .filter(|submission| submission.doomed().is_none() && submission.deadline.is_past(now))
            .map(Arc::clone)
            .collect();
        if !expired.is_empty() {
            self.doom(&expired, Doom::Expired);
        }
        let mut doomed = live.iter().filter(|submission| submission.doomed().is_some()).peekable();
        if doomed.peek().is_some() {
            // Something may have come to wait, or gone out, just when it was being called off.
            self.sweep();
        }
        let keys: HashSet<u32> = live.iter().map(|submission| submission.key).collect();
        doomed_since.retain(|key, _| keys.contains(key));
        for submission in doomed {
            let since = *doomed_since.entry(submission.key).or_insert(now);
            if now.duration_since(since) < self.config.cancel_grace() {
                self.cancel(submission);
                continue;
            }
            // What is still under way cannot be called back one by one: the path is fenced, and what else went
            // along it is sent again.
            for path in submission.paths_in_flight().into_iter().filter_map(|index| self.paths.get(index)) {
                tracing::info!(path = %path.info.remote_device, "fencing a path for transfers that were called off");
                let reason =
                    Error::new(ErrorKind::Flushed, "the path was fenced for transfers that were called off");
                self.path_down(&path, &reason);
                path.transport.fence(path.info.id);
            }
            doomed_since.insert(submission.key, now);
        }
        let watched = live
            .iter()
            .any(|submission| submission.deadline.instant().is_some() || submission.doomed().is_some());
        let later = std::mem::take(&mut *self.later.lock());
        let notices = !later.is_empty();
        self.relaunch(later);
        self.retry_withheld() > 0 || notices || watched
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_comes_while_a_tick_looks_makes_for_another_tick() {
        let ticker = Arc::new(Ticker::default());
        ticker.arm();
        assert!(ticker.next(true), "armed while it was parked");
        // The tick looks, finds nothing, and then:
        ticker.arm();
        let (done, is_done) = mpsc::channel();
        thread::spawn({
            let ticker = Arc::clone(&ticker);
            move || done.send(ticker.next(true))
        });
        assert!(is_done.recv_timeout(Duration::from_secs(5)).unwrap(), "it parks on what was armed");
        ticker.stop();
        assert!(!ticker.next(true));
    }
}
