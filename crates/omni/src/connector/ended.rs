//! Why a get failed whose producer was closed in the middle.
//!
//! What a closing producer takes back shows in many ways: a grant that fits no more, memory or a socket that is not
//! there, a path that broke. None of them says what happened, so the producer is asked.

use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind, Result};

use super::Inner;
use super::get::Get;
use crate::message::{Answer, Request};

/// Whether this may be how the end of a producer shows.
fn may_be_an_end(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::NotRegistered
            | ErrorKind::OutOfBounds
            | ErrorKind::AccessDenied
            | ErrorKind::PeerUnreachable
            | ErrorKind::PeerRefused
            | ErrorKind::PathFailed
            | ErrorKind::NoPath
            | ErrorKind::Flushed
            | ErrorKind::DeadlineExceeded
            | ErrorKind::NotFound
            | ErrorKind::Io
    )
}

impl Inner {
    /// The error that a get ends with: `PeerGone` where its producer was closed or is gone, else as it is.
    pub(super) async fn ended_by_producer(&self, get: &Get, error: Error) -> Error {
        // Where the get's own time is over, that is the reason.
        let is_over = get.deadline.remaining(Instant::now()).is_some_and(|left| left.is_zero());
        if is_over || !may_be_an_end(error.kind()) || self.check_open().is_err() {
            return error;
        }
        match self.is_there(get).await {
            Err(why) if matches!(why.kind(), ErrorKind::PeerGone | ErrorKind::PeerUnreachable) => {
                let message = format!("{}; the get showed it by: {}", why.message(), error.message());
                Error::new(ErrorKind::PeerGone, message).with_peer(get.address.as_str())
            }
            _ => error,
        }
    }

    /// Asks the producer of a get whether it is there.
    async fn is_there(&self, get: &Get) -> Result<()> {
        // One that is silent is found to be so after the liveness time.
        let deadline = get.deadline.min(Deadline::after(Duration::from_millis(self.config.liveness_ms) * 2));
        let reply = self.teller.request(&get.address, Request::Ping.encode()?, deadline).await;
        let reply = reply.map_err(|error| match error.kind() {
            // Nobody listens any more.
            ErrorKind::PeerUnreachable => error.context("the producer was closed, or is gone"),
            _ => error,
        })?;
        match Answer::decode(&reply)? {
            Answer::Refused(refusal) => Err(refusal.to_error(&get.address)),
            _ => Ok(()),
        }
    }
}
