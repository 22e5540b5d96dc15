//! What the transports report, and what follows from it.

use std::sync::{Arc, Weak};

use posthorse_core::{
    AtWork, Completion, Error, Level, Opcode, PathId, PathState, Result, SliceError, TransportEvents,
    TransportId,
};

use crate::engine::Inner;
use crate::path::{PathEntry, Run};
use crate::retry::{self, Failed, Verdict};
use crate::submission::{Doom, Submission};

/// Takes one transport's events.
#[derive(Debug)]
pub(crate) struct Sink {
    pub(crate) engine: Weak<Inner>,
    pub(crate) transport: TransportId,
}

impl Sink {
    /// The engine, for as long as it is told something.
    fn engine(&self) -> Option<(Arc<Inner>, AtWork)> {
        self.engine.upgrade().map(|engine| (engine, AtWork::begin()))
    }
}

impl TransportEvents for Sink {
    fn completed(&self, completions: &[Completion]) {
        let Some((engine, _at_work)) = self.engine() else { return };
        // Neighbours mostly belong together.
        let mut current: Option<Arc<Submission>> = None;
        let mut along: Option<Arc<PathEntry>> = None;
        for Completion { token, result } in completions {
            let (key, piece) = ((token >> 32) as u32, *token as u32);
            if current.as_ref().is_none_or(|submission| submission.key != key) {
                current = engine.table.get(key);
            }
            match &current {
                Some(submission) => {
                    engine.slice_ended(submission, piece, result.as_ref().copied(), &mut along);
                }
                None => tracing::error!(token, "a transport completed a slice that is not in flight"),
            }
        }
        // A transport reports those of one path together.
        if let Some(path) = along.filter(|path| path.is_rail()) {
            path.measure();
            engine.keep_busy(&path);
        }
    }

    fn writable(&self, path: PathId) {
        let Some((engine, _at_work)) = self.engine() else { return };
        if let Some(path) = engine.paths.find(self.transport, path) {
            engine.pump(&path);
        }
    }

    fn path_changed(&self, path: PathId, state: &PathState) {
        let Some((engine, _at_work)) = self.engine() else { return };
        let Some(path) = engine.paths.find(self.transport, path) else { return };
        match state {
            PathState::Down(reason) => engine.path_down(&path, reason),
            PathState::Up => {
                path.come_up();
                engine.pump(&path);
            }
        }
    }

    fn notified(&self, peer: &str, data: &[u8]) -> Result<()> {
        let Some((engine, _at_work)) = self.engine() else {
            return Err(Error::new(posthorse_core::ErrorKind::Closed, "the engine was shut down"));
        };
        engine.inbox.deliver(peer, data)
    }
}

impl Inner {
    /// A slice in flight has had its completion. `along` is the path of the slice before it, for those to come.
    pub(crate) fn slice_ended(
        self: &Arc<Self>,
        submission: &Arc<Submission>,
        piece: u32,
        result: Result<Level, &SliceError>,
        along: &mut Option<Arc<PathEntry>>,
    ) {
        let Some(ended) = submission.land(piece) else {
            tracing::error!(piece, "a transport completed a slice twice");
            return;
        };
        let cut = submission.work.pieces.get(piece as usize);
        if along.as_ref().is_none_or(|path| path.number != ended.path) {
            *along = self.paths.get(ended.path);
        }
        if let (Some(cut), Some(path)) = (cut, along) {
            path.ended(cut.len, result.is_ok());
        }
        let Err(SliceError { error, far_end }) = result else {
            return self.end_piece(submission, piece, Ok(()));
        };
        let opcode = cut
            .and_then(|cut| submission.work.requests.get(cut.request as usize))
            .map_or(Opcode::Write, |request| request.opcode);
        let failed = Failed {
            opcode,
            far_end: *far_end,
            attempts: ended.attempts,
            max_attempts: self.config.max_attempts,
            doomed: submission.doomed(),
        };
        match retry::decide(error, failed) {
            Verdict::Again => {
                self.relaunch(vec![Run { submission: Arc::clone(submission), pieces: piece..piece + 1 }]);
            }
            Verdict::Fails => self.end_piece(submission, piece, Err(error.clone())),
            Verdict::CalledOff(doom) => self.end_piece(submission, piece, Err(doom.error())),
        }
    }

    /// A path went down: what waited for it takes another.
    pub(crate) fn path_down(self: &Arc<Self>, path: &Arc<PathEntry>, reason: &Error) {
        let stranded = path.take_down(reason);
        self.watch(path);
        if let Some(peer) = self.peers.by_id(path.peer) {
            peer.signal.ring();
        }
        self.relaunch(stranded);
    }

    /// Sends runs again, from a control thread: a transport's callback is no place to call transports.
    pub(crate) fn relaunch(self: &Arc<Self>, runs: Vec<Run>) {
        if runs.is_empty() {
            return;
        }
        let first = {
            let mut again = self.again.lock();
            let first = again.is_empty();
            again.extend(runs);
            first
        };
        if first {
            let engine = Arc::clone(self);
            self.control(move || {
                loop {
                    let runs = std::mem::take(&mut *engine.again.lock());
                    if runs.is_empty() {
                        return;
                    }
                    runs.into_iter().for_each(|run| engine.launch(run));
                }
            });
        }
        // As in `end_if_closed`.
        if self.is_closed() {
            let runs = std::mem::take(&mut *self.again.lock());
            runs.iter().for_each(|run| self.end_run(run, &Doom::Closed.error()));
        }
    }
}
