//! Notifications along a connection: over the control channel, one after the other.

use std::sync::Arc;

use posthorse_core::{Completion, Deadline, ErrorKind, FarEnd, Level, Result, SliceError};

use super::Connection;
use crate::handshake::NOTIFY;
use crate::notices;
use crate::shared::Shared;

impl Connection {
    /// Sends a notification behind those that wait.
    pub(crate) fn notify(self: &Arc<Self>, shared: &Arc<Shared>, token: u64, data: &[u8]) -> Result<()> {
        if let Some(error) = self.down() {
            return Err(error);
        }
        if self.notices.push(token, data)? {
            let (connection, there) = (Arc::clone(self), Arc::downgrade(shared));
            shared.workers.run(move || {
                while let Some(shared) = there.upgrade()
                    && let Some(notice) = connection.notices.next()
                {
                    let end = connection.deliver(&shared, &notice);
                    shared.report(&[end]);
                }
            });
        }
        Ok(())
    }

    pub(super) fn deliver(&self, shared: &Shared, notice: &notices::Notice) -> Completion {
        let outcome = match self.down() {
            Some(error) => Err(SliceError { error, far_end: FarEnd::Quiet }),
            None => {
                let body = notices::encode(shared.context.incarnation, self.number, notice);
                let deadline = Deadline::after(shared.config.liveness());
                shared.ask(&self.target.peer, NOTIFY, &body, deadline).map_err(|error| {
                    // What the peer decided it has decided; otherwise it may have it.
                    let decided = matches!(error.kind(), ErrorKind::QueueFull | ErrorKind::PeerUnreachable);
                    let far_end = if decided { FarEnd::Quiet } else { FarEnd::Unconfirmed };
                    SliceError { error: self.named(error), far_end }
                })
            }
        };
        Completion { token: notice.token, result: outcome.map(|_| Level::Visible) }
    }
}
