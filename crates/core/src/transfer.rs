//! What is asked for, and how far it has come.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::id::{GrantToken, RegionId, SegmentId};

/// The direction of a transfer, as seen by whoever asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Opcode {
    /// From the peer's memory into ours.
    Read,
    /// From our memory into the peer's.
    Write,
}

/// How urgent a request is. Of one priority, what is alike in length goes in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Ahead of everything else.
    High,
    /// The usual.
    #[default]
    Medium,
    /// When nothing else is waiting.
    Low,
}

/// How much of the bytes is compared at the far end before a transfer is called done, from nothing to everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksum {
    /// Nothing.
    #[default]
    Off,
    /// The first and last bytes and some between: a misplaced or torn transfer shows, a flipped bit may not.
    Sampled,
    /// Every byte.
    Full,
}

/// How far a slice has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Level {
    /// The local buffer may be reused.
    Sent,
    /// The bytes are in the peer's memory.
    Placed,
    /// A reader at the far end sees them.
    Visible,
}

/// Where local registered memory begins that a transfer reads or writes.
///
/// Whoever has one may have any transfer go there. Registering memory gives them out, so memory that safe code may
/// hold references into at the same time is not registered safely: see [`Region`](crate::Region).
///
/// ```compile_fail
/// # use posthorse_core::{LocalRange, RegionId};
/// let anywhere = LocalRange { region: RegionId(1), offset: 0 }; // Not without `unsafe`.
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRange {
    region: RegionId,
    offset: u64,
}

impl LocalRange {
    /// `offset` bytes into a region that is registered under this number.
    ///
    /// # Safety
    /// As long as transfers go there, no Rust reference into those bytes is used in a way that Rust forbids beside
    /// what they do: none at all beside a READ, and only shared ones beside a WRITE.
    pub const unsafe fn new(region: RegionId, offset: u64) -> Self {
        Self { region, offset }
    }

    /// The region.
    pub const fn region(self) -> RegionId {
        self.region
    }

    /// Bytes from its start.
    pub const fn offset(self) -> u64 {
        self.offset
    }

    /// `bytes` further into the region. Past its end there is nothing that a request would be admitted to.
    #[must_use]
    pub const fn advanced(self, bytes: u64) -> Self {
        Self { region: self.region, offset: self.offset.saturating_add(bytes) }
    }
}

/// A range of a peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRange {
    /// The peer.
    pub segment: SegmentId,
    /// The first byte's address in the peer's address space.
    pub address: u64,
    /// The grant it lies in; `None` uses what the peer's descriptor publishes there.
    pub token: Option<GrantToken>,
}

/// Which transport should carry a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Route {
    /// The best path there is.
    #[default]
    Auto,
    /// This transport if it has a path, else the best there is.
    Prefer(TransportId),
    /// This transport or none.
    Require(TransportId),
}

/// An installed transport, as its engine numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransportId(pub u8);

/// One transfer of one contiguous range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferRequest {
    /// The direction.
    pub opcode: Opcode,
    /// The local end.
    pub local: LocalRange,
    /// The remote end.
    pub remote: RemoteRange,
    /// Bytes; zero completes at once.
    pub len: u64,
    /// How urgent it is.
    pub priority: Priority,
    /// Which transport should carry it.
    pub route: Route,
    /// Which group of its batch it completes with. Groups are small numbers from zero, such as a model's layers.
    pub group: u32,
}

/// The state of a transfer. The last four are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferState {
    /// Accepted, nothing of it has gone out.
    Waiting,
    /// Under way.
    Pending,
    /// Done: visible at its destination.
    Completed,
    /// Its deadline passed.
    Timeout,
    /// It failed.
    Failed,
    /// The caller called it off.
    Canceled,
}

impl TransferState {
    /// Whether it has ended: neither buffer is touched by it any more.
    pub const fn is_final(self) -> bool {
        !matches!(self, Self::Waiting | Self::Pending)
    }

    /// The final state that an error stands for.
    pub fn of_error(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::DeadlineExceeded => Self::Timeout,
            ErrorKind::Cancelled => Self::Canceled,
            _ => Self::Failed,
        }
    }
}

impl fmt::Display for TransferState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Waiting => "waiting",
            Self::Pending => "pending",
            Self::Completed => "completed",
            Self::Timeout => "timeout",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
        })
    }
}

/// How far a transfer or a batch has come, and why it ended.
#[derive(Debug, Clone)]
pub struct TransferStatus {
    /// The state.
    pub state: TransferState,
    /// Bytes whose slices completed.
    pub bytes: u64,
    /// The reason, in the states timeout, failed and canceled.
    pub error: Option<Error>,
}
