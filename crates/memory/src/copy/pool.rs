//! Large copies, shared among threads.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use posthorse_core::{Error, HostView, Result};

use super::chunks::Chunks;
use super::claims::Claims;
use super::stream::Stream;
use super::{CopyPiece, CopyTuning, copy_all, copy_part, total_len};
use crate::fork::ForkGuard;

/// Copies that wait for helpers at once; the callers of further ones do without help.
const MAX_JOBS: usize = 64;

/// A few threads that help with large copies.
///
/// Whoever calls does the copy itself, chunk by chunk, and the helpers take chunks of it as they wake up: a
/// call never waits for a helper to come, only for the chunks that one has taken. Helpers sleep while there is
/// nothing large to copy. Any number of threads may call at once.
///
/// In a child of `fork` there are no helpers: copies work, on the calling thread alone.
pub struct CopyPool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    tuning: CopyTuning,
    fork: ForkGuard,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Arc<Job>>,
    closed: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing that holds the lock can panic half-way through a change.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn remove(&mut self, job: &Arc<Job>) {
        self.jobs.retain(|other| !Arc::ptr_eq(other, job));
    }
}

/// A copy that is shared. The pieces belong to the caller, who does not return before every claimed chunk is
/// done; so they may be looked at under a claim, and only then.
struct Job {
    pieces: *const [CopyPiece],
    chunks: Chunks,
    claims: Claims,
    stream: Option<Stream>,
}

// SAFETY: `pieces` is only dereferenced under a claim, while the caller, who borrows the slice, waits; the
// pieces themselves are plain addresses, and `Sync`.
unsafe impl Send for Job {}
// SAFETY: as above.
unsafe impl Sync for Job {}

impl Job {
    /// Copies chunks until none is left.
    fn run(&self) {
        while let Some(index) = self.claims.claim() {
            // SAFETY: under a claim (see `Job`).
            let pieces = unsafe { &*self.pieces };
            for part in self.chunks.parts(index, pieces.len(), |piece| pieces[piece].len()) {
                // SAFETY: the caller of the pool promised that the pieces can be copied until its call
                // returns, which waits for this claim; the part lies inside its piece, and in no other chunk.
                unsafe { copy_part(pieces, part, self.stream) };
            }
            if let Some(stream) = self.stream {
                stream.finish();
            }
            self.claims.finish();
        }
    }
}

impl CopyPool {
    /// Starts `helpers` threads, named `copy-0` and so on; with none, copies run on the calling thread alone.
    ///
    /// # Errors
    /// `Io` or `LimitReached` when the system refuses a thread or a page of memory.
    pub fn new(helpers: usize) -> Result<Self> {
        let mut pool = Self {
            shared: Arc::default(),
            helpers: Vec::with_capacity(helpers),
            tuning: CopyTuning::default(),
            fork: ForkGuard::new()?,
        };
        for index in 0..helpers {
            let shared = pool.shared.clone();
            let helper = thread::Builder::new()
                .name(format!("copy-{index}"))
                .spawn(move || help(&shared))
                .map_err(|error| Error::os(&format!("starting the thread copy-{index}"), &error))?;
            pool.helpers.push(helper);
        }
        Ok(pool)
    }

    /// A sensible number of helpers for this process: half of its processors, at most 3, since a few threads
    /// use up the memory's bandwidth.
    pub fn default_helpers() -> usize {
        thread::available_parallelism().map_or(1, usize::from).div_euclid(2).min(3)
    }

    /// The same pool with other limits.
    #[must_use]
    pub fn with_tuning(mut self, tuning: CopyTuning) -> Self {
        self.tuning = tuning;
        self
    }

    /// Copies all of `src` to all of `dst`.
    ///
    /// # Errors
    /// `InvalidArgument` when the two differ in length.
    pub fn copy_slice(&self, src: &[u8], dst: &mut [u8]) -> Result<()> {
        // SAFETY: both are borrowed for the call, one of them exclusively, so they are alive and apart.
        unsafe { self.copy(HostView::of(src), HostView::of_mut(dst)) }
    }

    /// Copies all of `src` to all of `dst`. Visible on return as with [`copy`](super::copy()).
    ///
    /// # Errors
    /// `InvalidArgument` when the two differ in length or overlap.
    ///
    /// # Safety
    /// As [`copy`](super::copy()).
    pub unsafe fn copy(&self, src: HostView, dst: HostView) -> Result<()> {
        let piece = CopyPiece::new(src, dst)?;
        // SAFETY: the caller's promise.
        unsafe { self.copy_pieces(&[piece]) };
        Ok(())
    }

    /// Copies every piece, in no particular order. Visible on return as with [`copy`](super::copy()).
    ///
    /// # Safety
    /// As [`copy_pieces`](super::copy_pieces).
    pub unsafe fn copy_pieces(&self, pieces: &[CopyPiece]) {
        let total = total_len(pieces);
        let stream = self.tuning.stream(total);
        if self.helpers.is_empty() || total < self.tuning.share_bytes || self.fork.is_forked() {
            // SAFETY: the caller's promise.
            return unsafe { copy_all(pieces, stream) };
        }
        let chunks = Chunks::new(pieces.iter().map(CopyPiece::len), self.tuning.chunk_bytes);
        let claims = Claims::new(chunks.count());
        let job = Arc::new(Job { pieces, chunks, claims, stream });
        self.offer(&job);
        job.run();
        self.shared.queue().remove(&job);
        job.claims.wait();
    }

    /// Lets the helpers see the job, unless too many wait already.
    fn offer(&self, job: &Arc<Job>) {
        let mut queue = self.shared.queue();
        if queue.jobs.len() < MAX_JOBS {
            queue.jobs.push_back(job.clone());
            drop(queue);
            self.shared.wake.notify_all();
        }
    }
}

/// What a helper does until the pool is dropped.
fn help(shared: &Shared) {
    let mut queue = shared.queue();
    while !queue.closed {
        let Some(job) = queue.jobs.front().cloned() else {
            queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(queue);
        job.run();
        queue = shared.queue();
        // Nothing is left of it to claim.
        queue.remove(&job);
    }
}

impl Drop for CopyPool {
    fn drop(&mut self) {
        if self.fork.is_forked() {
            // The threads did not come along through fork: there is nobody to join.
            mem::forget(mem::take(&mut self.helpers));
            return;
        }
        self.shared.queue().closed = true;
        self.shared.wake.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper does not panic; if one did, the copies were done without it.
            let _ = helper.join();
        }
    }
}

impl fmt::Debug for CopyPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyPool")
            .field("helpers", &self.helpers.len())
            .field("tuning", &self.tuning)
            .finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Miri takes a second for what a processor does in microseconds.
    const SHRINK: usize = if cfg!(miri) { 40 } else { 1 };

    fn small() -> CopyTuning {
        CopyTuning { stream_bytes: 64 << 10, share_bytes: 8192 / SHRINK, chunk_bytes: 5000 / SHRINK }
    }

    #[test]
    fn shared_copies_are_exact_from_many_threads_at_once() {
        for helpers in [0, 1, 3] {
            let pool = CopyPool::new(helpers).unwrap().with_tuning(small());
            thread::scope(|scope| {
                for seed in 0..4_usize {
                    let pool = &pool;
                    scope.spawn(move || {
                        for round in 0..if cfg!(miri) { 3 } else { 20 } {
                            let len = 1 + (seed * 7919 + round * 20011) % 200_000 / SHRINK;
                            let src: Vec<u8> = (0..len).map(|i| (i * 31 + seed + round) as u8).collect();
                            let mut dst = vec![0_u8; len];
                            // SAFETY: both vectors are alive and not used otherwise meanwhile.
                            unsafe { pool.copy(HostView::of(&src), HostView::of_mut(&mut dst)) }.unwrap();
                            assert!(src == dst, "{len} bytes with {helpers} helpers");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn shared_pieces_are_exact() {
        let pool = CopyPool::new(2).unwrap().with_tuning(small());
        let src: Vec<u8> = (0..60_000 / SHRINK).map(|i| (i * 13 / 7) as u8).collect();
        let mut dst = vec![0_u8; src.len()];
        let (from, to) = (HostView::of(&src), HostView::of_mut(&mut dst));
        let mut pieces = Vec::new();
        let (mut at, mut len) = (0, 1);
        while at + len <= src.len() {
            pieces.push(CopyPiece::new(from.slice(at, len).unwrap(), to.slice(at, len).unwrap()).unwrap());
            at += len;
            len = len * 3 % (4001 / SHRINK);
        }
        // SAFETY: both vectors are alive and not used otherwise meanwhile.
        unsafe { pool.copy_pieces(&pieces) };
        assert!(dst[..at] == src[..at] && dst[at..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_pool_without_work_is_dropped_at_once() {
        drop(CopyPool::new(3).unwrap());
    }
}
