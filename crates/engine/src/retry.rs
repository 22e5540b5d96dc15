//! What becomes of a slice that failed: a pure decision.

use posthorse_core::{Error, ErrorKind, FarEnd, Opcode};

use crate::submission::Doom;

/// How often a slice is sent, whatever flushes it. What counts the attempts counts to 63.
const MOST_ATTEMPTS: u32 = 60;

/// What is known of a failed slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failed {
    pub(crate) opcode: Opcode,
    pub(crate) far_end: FarEnd,
    /// How often it was sent.
    pub(crate) attempts: u32,
    pub(crate) max_attempts: u32,
    pub(crate) doomed: Option<Doom>,
}

/// What to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Copy)]
pub(crate) enum Verdict {
    /// Send it again, over whatever path is best now.
    Again,
    /// Its own error stands.
    Fails,
    /// It was called off: that is the reason, not what the path made of it.
    CalledOff(Doom),
}

/// Decides. A WRITE that may still land at the far end is never sent again: the abandoned one could overwrite what
/// came after the new one was reported done.
pub(crate) fn decide(error: &Error, failed: Failed) -> Verdict {
    if let Some(doom) = failed.doomed {
        return Verdict::CalledOff(doom);
    }
    let quiet = failed.opcode == Opcode::Read || failed.far_end == FarEnd::Quiet;
    // A fence is the engine's own doing, for another transfer's sake: it does not count as an attempt, within reason.
    let most = if error.kind() == ErrorKind::Flushed { MOST_ATTEMPTS } else { failed.max_attempts };
    if error.retryable() && quiet && failed.attempts < most { Verdict::Again } else { Verdict::Fails }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_verdicts() {
        use FarEnd::{Quiet, Unconfirmed};
        use Opcode::{Read, Write};
        use Verdict::{Again, CalledOff, Fails};
        for (kind, opcode, far_end, attempts, doomed, verdict) in [
            (ErrorKind::PathFailed, Write, Quiet, 1, None, Again),
            (ErrorKind::PathFailed, Write, Unconfirmed, 1, None, Fails),
            (ErrorKind::PathFailed, Read, Unconfirmed, 1, None, Again),
            (ErrorKind::PathFailed, Write, Quiet, 3, None, Fails),
            (ErrorKind::AccessDenied, Write, Quiet, 1, None, Fails),
            (ErrorKind::Flushed, Write, Quiet, 1, Some(Doom::Expired), CalledOff(Doom::Expired)),
            (ErrorKind::Flushed, Write, Quiet, 3, None, Again),
            (ErrorKind::Flushed, Write, Quiet, 60, None, Fails),
        ] {
            let failed = Failed { opcode, far_end, attempts, max_attempts: 3, doomed };
            assert_eq!(decide(&Error::new(kind, "x"), failed), verdict, "{kind} {failed:?}");
        }
    }
}
