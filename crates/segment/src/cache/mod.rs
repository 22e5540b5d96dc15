//! Peers' descriptors, kept for as long as whoever asks accepts.

mod state;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use posthorse_core::{Deadline, Error, ErrorKind, Result, SegmentDesc};

use self::state::{Decision, State};
pub use self::state::{Freshness, SegmentChanged};
use crate::directory::Directory;

/// Told when a peer's segment turns out to have begun another life. Called without a lock held.
pub type OnChange = Box<dyn Fn(&SegmentChanged) + Send + Sync>;

/// Descriptors of peers, looked up in a [`Directory`] when what is kept is not fresh enough.
///
/// Callers that want one name at one time share one lookup. A failure is shared by those who waited for it, and
/// not kept. What was invalidated is never served again to anybody who asks later. Of more segments than the
/// limit, those used least recently are forgotten, lives included.
pub struct SegmentCache {
    directory: Arc<dyn Directory>,
    on_change: OnChange,
    state: Mutex<State>,
    ended: Condvar,
}

impl SegmentCache {
    /// An empty cache for at most `limit` segments (at least one).
    pub fn new(directory: Arc<dyn Directory>, limit: usize, on_change: OnChange) -> Self {
        let state = Mutex::new(State::new(limit.max(1)));
        Self { directory, on_change, state, ended: Condvar::new() }
    }

    /// The segment's descriptor, as fresh as asked for. Waits on the calling thread.
    ///
    /// # Errors
    /// Those of [`Directory::lookup`]; `LimitReached` when as many segments as the limit are being looked up.
    pub fn get(&self, name: &str, freshness: Freshness, deadline: Deadline) -> Result<Arc<SegmentDesc>> {
        let mut state = self.lock();
        let ask = state.ask(freshness);
        loop {
            match state.decide(name, ask, Instant::now()) {
                Decision::Take(outcome) => return outcome,
                Decision::Lookup(step) => {
                    drop(state);
                    let running = Running { cache: self, name, step };
                    return running.end(self.directory.lookup(name, deadline));
                }
                Decision::Wait => state = self.wait(state, name, deadline)?,
            }
        }
    }

    /// Serves nothing of this segment any more that was looked up before now.
    pub fn invalidate(&self, name: &str) {
        self.lock().invalidate(name);
    }

    /// How many segments are known.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether no segment is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        name: &str,
        deadline: Deadline,
    ) -> Result<MutexGuard<'a, State>> {
        match deadline.remaining(Instant::now()) {
            None => Ok(self.ended.wait(state).unwrap_or_else(PoisonError::into_inner)),
            Some(remaining) if remaining.is_zero() => {
                Err(Deadline::exceeded("another caller's lookup of the segment").with_peer(name))
            }
            Some(remaining) => {
                Ok(self.ended.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner).0)
            }
        }
    }
}

/// A lookup under way. Whatever becomes of it, those who wait for it are told.
struct Running<'a> {
    cache: &'a SegmentCache,
    name: &'a str,
    step: u64,
}

impl Running<'_> {
    fn end(self, outcome: Result<SegmentDesc>) -> Result<Arc<SegmentDesc>> {
        let (outcome, changed) = self.cache.lock().ended(self.name, self.step, outcome);
        self.cache.ended.notify_all();
        if let Some(changed) = changed {
            (self.cache.on_change)(&changed);
        }
        outcome
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // After `end` this finds nothing to do: only a directory that panicked leaves the lookup open.
        let panicked = Error::new(ErrorKind::Internal, "the directory panicked in a lookup");
        let _ = self.cache.lock().ended(self.name, self.step, Err(panicked));
        self.cache.ended.notify_all();
    }
}

impl fmt::Debug for SegmentCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentCache")
            .field("directory", &self.directory)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
