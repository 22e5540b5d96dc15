//! How a connection is made, and made again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind, PathState, Result};

use super::errors::path_failed;
use super::{Cause, Connection, PROBE, Phase};
use crate::handshake::{CONNECT, Extension, HandshakeDesc, decode, encode, nic_path};
use crate::queue::{Flush, SendQueue, read_word};
use crate::shared::Shared;
use crate::verbs::{QueuePairs, QueueSize, Remote, Status, WorkCompletion};

impl Connection {
    /// Makes the connection: queue pairs, a handshake, and a first READ to show that it carries something.
    ///
    /// # Errors
    /// Whatever is in the way; then there are no queue pairs.
    pub(super) fn make(&self, shared: &Shared, deadline: Deadline) -> Result<(Arc<dyn QueuePairs>, Flush)> {
        let config = &shared.config;
        if let Some(down) = self.rail.down(config) {
            return Err(self.named(down));
        }
        let size = QueueSize {
            sends: SendQueue::work_requests(config.queue_depth) as u32,
            receives: 1,
            inline_bytes: config.inline_bytes,
        };
        let named = |error| self.named(error);
        let pairs = self.rail.device.queue_pairs(config.queue_pairs, size, self.number).map_err(named)?;
        let port = self.rail.port(config).map_err(named)?;
        let desc = HandshakeDesc {
            local_nic_path: nic_path(&shared.context.name, self.rail.name()),
            peer_nic_path: nic_path(&self.target.peer, &self.target.device.name),
            local_lid: port.lid,
            local_gid: self.rail.gid().to_string(),
            qp_num: pairs.numbers().to_vec(),
            posthorse: Some(Extension {
                hello: shared.context.hello.clone(),
                incarnation: shared.context.incarnation,
                to: self.target.incarnation,
                connection: self.number,
                mtu: port.mtu.min(config.mtu),
                word: None,
            }),
        };
        let answer = shared.ask(&self.target.peer, CONNECT, &encode(&desc)?, deadline).map_err(named)?;
        let answer: HandshakeDesc = decode(&answer).map_err(named)?;
        let gid = answer.check().map_err(named)?;
        let malformed = |what: &str| {
            named(Error::new(ErrorKind::Malformed, format!("the peer's answer to a handshake {what}")))
        };
        let theirs = answer.posthorse.ok_or_else(|| malformed("is not a Posthorse peer's"))?;
        let word = theirs.word.ok_or_else(|| malformed("names no word to read"))?;
        if answer.qp_num.len() != pairs.numbers().len() {
            return Err(malformed(&format!(
                "has {} queue pairs; expected: {}",
                answer.qp_num.len(),
                pairs.numbers().len()
            )));
        }
        let link = self.rail.link(config, &port, theirs.mtu);
        for (queue, number) in answer.qp_num.iter().enumerate() {
            let remote = Remote { number: *number, gid, lid: answer.local_lid };
            pairs.connect(queue, &link, &remote).map_err(named)?;
        }
        let (local_address, local_key) = self.rail.scratch();
        let flush = Flush { local_address, local_key, remote_address: word.address, remote_key: word.key };
        self.probe(&*pairs, &flush, deadline).map_err(named)?;
        pairs.arm().map_err(named)?;
        Ok((pairs, flush))
    }

    /// Shows that the connection carries something.
    pub(super) fn probe(&self, pairs: &dyn QueuePairs, flush: &Flush, deadline: Deadline) -> Result<()> {
        // SAFETY: the memory is the rail's, which this connection holds.
        unsafe { pairs.post(0, &[read_word(PROBE, flush)]) }.map_err(|error| error.error)?;
        let mut completions = [WorkCompletion::EMPTY];
        let mut pause = Duration::from_micros(20);
        loop {
            if pairs.poll(&mut completions)? > 0 {
                return match completions[0].status {
                    Status::Success => Ok(()),
                    status => Err(path_failed(status, completions[0].vendor_error)
                        .context("the first READ of a new connection")),
                };
            }
            if deadline.is_past(Instant::now()) {
                return Err(Deadline::exceeded("the first READ of a new connection"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        }
    }

    /// Makes a connection for the first time.
    ///
    /// # Errors
    /// Whatever is in the way. It is down then, and tried again when asked for.
    pub(crate) fn open(self: &Arc<Self>, shared: &Arc<Shared>, deadline: Deadline) -> Result<()> {
        let made = self.make(shared, deadline);
        self.made(shared, made).map(drop)
    }

    /// Takes over what was made. Returns whether somebody waits for room.
    pub(super) fn made(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        made: Result<(Arc<dyn QueuePairs>, Flush)>,
    ) -> Result<bool> {
        let mut state = self.state.lock();
        let old = state.pairs.take();
        let outcome = match (made, &state.phase) {
            // Given up meanwhile: nobody needs it.
            (made, Phase::Over(error)) => {
                let error = error.clone();
                drop(state);
                self.retire(old);
                drop(made);
                return Err(error);
            }
            (Ok((pairs, flush)), _) => {
                (state.pairs, state.flush, state.phase) = (Some(pairs), flush, Phase::Ready);
                state.failures = 0;
                state.queues.iter_mut().for_each(SendQueue::rewind);
                Ok(std::mem::take(&mut state.refused))
            }
            (Err(error), _) => {
                state.phase = Phase::Down(error.clone());
                Err(error)
            }
        };
        // SAFETY: whoever submitted the entries keeps their memory until they have ended.
        let failed = unsafe { self.post(&mut state) };
        drop(state);
        self.retire(old);
        if failed {
            self.settle_soon(shared);
        }
        outcome
    }

    /// Has the path tried again after a while, longer each time.
    pub(super) fn try_again_later(self: &Arc<Self>, shared: &Arc<Shared>) {
        let failures = {
            let mut state = self.state.lock();
            state.failures = state.failures.saturating_add(1);
            state.failures
        };
        let (connection, there) = (Arc::downgrade(self), Arc::downgrade(shared));
        // At once, the first time: the peer may have ended its side for a reason of its own.
        let at = Instant::now() + shared.pause(failures);
        shared.workers.run_at(at, move || {
            if let (Some(connection), Some(shared)) = (connection.upgrade(), there.upgrade()) {
                connection.try_again(&shared);
            }
        });
    }

    /// Tries to make a path again that is down.
    pub(crate) fn try_again(self: &Arc<Self>, shared: &Arc<Shared>) {
        {
            let mut state = self.state.lock();
            let Phase::Down(error) = &state.phase else { return };
            if shared.is_stopped() {
                return;
            }
            state.phase = Phase::Trying(error.clone());
        }
        // The port may have another address by now.
        if let Err(error) = self.rail.choose_again(&shared.config) {
            tracing::debug!(device = self.rail.name(), %error, "no address");
        }
        let made = self.make(shared, Deadline::after(shared.config.liveness()));
        match self.made(shared, made) {
            Ok(_) => {
                tracing::info!(peer = &*self.target.peer, device = self.rail.name(), "a path is up again");
                shared.path_changed(self.path(), &PathState::Up);
                // It may have failed since, and whoever says so may have been faster.
                if let Some(error) = self.down() {
                    shared.path_changed(self.path(), &PathState::Down(error));
                }
            }
            Err(error) if error.kind() == ErrorKind::PeerRestarted => {}
            Err(_) => self.try_again_later(shared),
        }
    }

    /// Has a path that is down tried again after a while.
    pub(crate) fn try_again_if_down(self: &Arc<Self>, shared: &Arc<Shared>) {
        let down = matches!(self.state.lock().phase, Phase::Down(_));
        if down {
            self.try_again_later(shared);
        }
    }

    /// Asks whether the peer is there, where nothing else under way shows it.
    pub(crate) fn look(self: &Arc<Self>, shared: &Arc<Shared>) {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Ready) {
            return;
        }
        let Some(pairs) = state.pairs.clone() else { return };
        let Some(alive) = state.queues.first_mut().and_then(SendQueue::alive) else { return };
        // SAFETY: it names no memory.
        if let Err(error) = unsafe { pairs.post(0, &[alive]) } {
            if let Some(queue) = state.queues.first_mut() {
                queue.unpost(1);
            }
            self.fail(&mut state, Cause::Failed(self.named(error.error)));
            drop(state);
            self.settle_soon(shared);
        }
    }
}
