//! The one error type of every Posthorse crate.
//!
//! An [`Error`] answers five questions: what happened ([`ErrorKind`], with a stable number), what
//! class of trouble it is ([`ErrorClass`]), whose fault it was ([`Fault`]), who or what was involved
//! (peer, device), and what to do about it ([`Error::advice`]).

use std::borrow::Cow;
use std::fmt;
use std::io;

/// What went wrong. The numbers are stable: they cross the wire and the C ABI, and are never reused.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum ErrorKind {
    /// An argument of a call is not acceptable.
    InvalidArgument = 100,
    /// A configuration key or value is not acceptable.
    InvalidConfig = 101,
    /// The memory named by a request was never registered, or is registered no more.
    NotRegistered = 102,
    /// A region overlaps one that is registered already.
    Overlap = 103,
    /// A range leaves the region or grant that should contain it.
    OutOfBounds = 104,
    /// The memory's owner does not allow this peer, token or kind of access.
    AccessDenied = 105,
    /// The object was closed or shut down.
    Closed = 106,
    /// A block was freed twice, or was never allocated here.
    BadFree = 107,
    /// A typed view was asked for whose size, shape or alignment does not fit the bytes.
    TypeMismatch = 108,
    /// The call came from a process forked after set-up.
    Forked = 109,
    /// The object is in use and cannot be changed or given up now.
    Busy = 110,

    /// A pool has no free block that is large enough.
    PoolFull = 200,
    /// A bounded queue is full.
    QueueFull = 201,
    /// A message, batch or payload is larger than what is accepted.
    TooLarge = 202,
    /// A limit of the operating system or of a device was reached; the advice names it.
    LimitReached = 203,
    /// The system has no memory to give.
    OutOfMemory = 204,

    /// The peer vanished, or was silent past the liveness time.
    PeerGone = 300,
    /// No connection to the peer could be made.
    PeerUnreachable = 301,
    /// The peer answered, and refused.
    PeerRefused = 302,
    /// The peer restarted: what was known of it is stale.
    PeerRestarted = 303,

    /// A path failed while the peer may well be alive.
    PathFailed = 400,
    /// No transport has a usable path to the peer.
    NoPath = 401,
    /// This transport, host or peer cannot do what was asked.
    Unsupported = 402,

    /// The deadline passed.
    DeadlineExceeded = 500,
    /// The caller cancelled.
    Cancelled = 501,
    /// The slice was flushed by a fence before it was done.
    Flushed = 502,

    /// There is nothing under this name.
    NotFound = 600,
    /// What was under this name has expired, been consumed or been withdrawn.
    Expired = 601,
    /// The bytes arrived, and are not the bytes that were sent.
    Corrupt = 602,
    /// Bytes from the wire or a file do not follow their format.
    Malformed = 603,
    /// The producer ended the stream or transfer with an error of its own.
    Aborted = 604,

    /// The two sides share no protocol version or required feature.
    VersionMismatch = 700,
    /// The two sides carry different application fingerprints.
    FingerprintMismatch = 701,

    /// The operating system refused an operation.
    Io = 800,
    /// An invariant of Posthorse itself does not hold: a defect, please report it.
    Internal = 900,
}

/// The class of trouble an [`ErrorKind`] belongs to: its hundreds.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The caller's request or configuration cannot be carried out as given.
    Misuse,
    /// Something finite is used up; waiting or a larger limit helps.
    Resource,
    /// The peer as a whole.
    Peer,
    /// One way to the peer.
    Path,
    /// Time ran out or the work was called off.
    Time,
    /// The data asked for or received.
    Data,
    /// The two sides do not speak the same protocol.
    Protocol,
    /// The operating system, or Posthorse itself.
    System,
}

/// Whose fault a failure was, as far as the reporter can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The request itself: repeating it cannot help.
    Request,
    /// A local device or this process.
    Local,
    /// The path between the two sides: another path may work.
    Path,
    /// The peer process: every path to it is affected.
    Peer,
}

macro_rules! kinds {
    ($($kind:ident $class:ident $fault:ident $retry:literal $advice:literal;)*) => {
        impl ErrorKind {
            /// Every kind, in the order of their codes.
            pub const ALL: &'static [Self] = &[$(Self::$kind),*];

            /// The kind's name, as it is written in logs and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$kind => stringify!($kind)),* }
            }

            /// The class this kind belongs to.
            pub const fn class(self) -> ErrorClass {
                match self { $(Self::$kind => ErrorClass::$class),* }
            }

            /// Whose fault it is unless the reporter knows better.
            pub const fn default_fault(self) -> Fault {
                match self { $(Self::$kind => Fault::$fault),* }
            }

            /// Whether the same request may succeed later or over another path.
            pub const fn retryable(self) -> bool {
                match self { $(Self::$kind => $retry),* }
            }

            const fn default_advice(self) -> &'static str {
                match self { $(Self::$kind => $advice),* }
            }
        }
    };
}

kinds! {
    InvalidArgument Misuse Request false "";
    InvalidConfig Misuse Request false "";
    NotRegistered Misuse Request false "register the memory first, and keep it registered until the transfer has ended";
    Overlap Misuse Request false "unregister the older region first, or register the union of the two";
    OutOfBounds Misuse Request false "";
    AccessDenied Misuse Request false "ask the owner of the memory for a grant that covers this range and kind of access";
    Closed Misuse Request false "";
    BadFree Misuse Request false "";
    TypeMismatch Misuse Request false "";
    Forked Misuse Request false "start the process afresh (spawn, or fork and exec), or fork before there is an engine";
    Busy Misuse Request true "wait for what uses it to end";
    PoolFull Resource Local true "release buffers, wait with a later deadline, or make the pool larger";
    QueueFull Resource Local true "wait for work in flight to end";
    TooLarge Resource Request false "";
    LimitReached Resource Local false "";
    OutOfMemory Resource Local true "";
    PeerGone Peer Peer true "look at the peer's process and its log; it may come back under the same name";
    PeerUnreachable Peer Path true "check that the peer is up, and that its advertised address is reachable from here";
    PeerRefused Peer Peer false "";
    PeerRestarted Peer Peer true "ask the peer for its new descriptor and buffer addresses";
    PathFailed Path Path true "";
    NoPath Path Path true "see that both sides have a transport which reaches the other, and that neither requires another; an engine's `explain(peer)` gives each transport's reason";
    Unsupported Path Request false "";
    DeadlineExceeded Time Path true "";
    Cancelled Time Request false "";
    Flushed Time Path true "";
    NotFound Data Request true "";
    Expired Data Request false "";
    Corrupt Data Path true "";
    Malformed Data Peer false "";
    Aborted Data Peer false "";
    VersionMismatch Protocol Peer false "run releases whose protocol ranges overlap";
    FingerprintMismatch Protocol Peer false "both sides must be configured with the same application fingerprint";
    Io System Local true "";
    Internal System Local false "this is a defect in Posthorse: please report it with the log";
}

impl ErrorKind {
    /// The stable number of this kind.
    pub const fn code(self) -> u16 {
        self as u16
    }

    /// The kind with this number, if this release knows it.
    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why something failed: see the module's documentation for what it can be asked.
///
/// An error is one pointer wide and cheap to clone, so that every task of a batch can carry it.
#[derive(Clone)]
pub struct Error {
    repr: Box<Repr>,
}

#[derive(Clone)]
struct Repr {
    kind: ErrorKind,
    fault: Fault,
    message: Cow<'static, str>,
    peer: Option<Box<str>>,
    device: Option<Box<str>>,
    advice: Cow<'static, str>,
    os: Option<i32>,
}

/// A result of a Posthorse call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind`; `message` says which thing, with which value, and what would be accepted.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            repr: Box::new(Repr {
                kind,
                fault: kind.default_fault(),
                message: message.into(),
                peer: None,
                device: None,
                advice: Cow::Borrowed(kind.default_advice()),
                os: None,
            }),
        }
    }

    /// An argument that cannot be accepted: what it is called, what was given, what is accepted.
    pub fn invalid_argument(name: &str, value: impl fmt::Display, accepted: &str) -> Self {
        Self::new(ErrorKind::InvalidArgument, format!("{name} is {value}; accepted: {accepted}"))
    }

    /// A configuration value that cannot be accepted: its key, what was given, what is accepted.
    pub fn invalid_config(key: &str, value: impl fmt::Display, accepted: &str) -> Self {
        Self::new(ErrorKind::InvalidConfig, format!("{key} is {value}; accepted: {accepted}"))
    }

    /// A refusal by the operating system while doing `what`.
    pub fn os(what: &str, error: &io::Error) -> Self {
        let mut this = Self::new(ErrorKind::Io, format!("{what}: {error}"));
        this.repr.os = error.raw_os_error();
        this
    }

    /// A call from a forked child to what belongs to its parent.
    pub fn forked() -> Self {
        Self::new(ErrorKind::Forked, "this belongs to the process that forked the one that calls it")
    }

    /// Names the peer involved.
    #[must_use]
    pub fn with_peer(mut self, peer: impl Into<Box<str>>) -> Self {
        self.repr.peer = Some(peer.into());
        self
    }

    /// Names the device involved, such as `mlx5_0` or `cuda:1`.
    #[must_use]
    pub fn with_device(mut self, device: impl Into<Box<str>>) -> Self {
        self.repr.device = Some(device.into());
        self
    }

    /// Replaces the advice of the kind by a more exact one.
    #[must_use]
    pub fn with_advice(mut self, advice: impl Into<Cow<'static, str>>) -> Self {
        self.repr.advice = advice.into();
        self
    }

    /// Says whose fault it was, where the reporter knows better than the kind does.
    #[must_use]
    pub fn with_fault(mut self, fault: Fault) -> Self {
        self.repr.fault = fault;
        self
    }

    /// Puts what was being done in front of the message.
    #[must_use]
    pub fn context(mut self, doing: impl fmt::Display) -> Self {
        self.repr.message = Cow::Owned(format!("{doing}: {}", self.repr.message));
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.repr.kind
    }

    /// The stable number of [`Error::kind`].
    pub fn code(&self) -> u16 {
        self.repr.kind.code()
    }

    /// The class of trouble.
    pub fn class(&self) -> ErrorClass {
        self.repr.kind.class()
    }

    /// Whose fault it was.
    pub fn fault(&self) -> Fault {
        self.repr.fault
    }

    /// Whether the same request may succeed later or over another path.
    pub fn retryable(&self) -> bool {
        self.repr.kind.retryable()
    }

    /// What happened, without peer, device or advice.
    pub fn message(&self) -> &str {
        &self.repr.message
    }

    /// The peer involved, if one was.
    pub fn peer(&self) -> Option<&str> {
        self.repr.peer.as_deref()
    }

    /// The device involved, if one was.
    pub fn device(&self) -> Option<&str> {
        self.repr.device.as_deref()
    }

    /// What to do about it, if anything general can be said.
    pub fn advice(&self) -> Option<&str> {
        (!self.repr.advice.is_empty()).then_some(&*self.repr.advice)
    }

    /// The operating system's error number behind this error, if it was one.
    pub fn os_error(&self) -> Option<i32> {
        self.repr.os
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Repr { kind, message, peer, device, advice, .. } = &*self.repr;
        write!(f, "{message} [{kind} {}", kind.code())?;
        if let Some(peer) = peer {
            write!(f, ", peer {peer}")?;
        }
        if let Some(device) = device {
            write!(f, ", device {device}")?;
        }
        f.write_str("]")?;
        if !advice.is_empty() {
            write!(f, "; {advice}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({self})")
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_ascending_and_round_trip() {
        let codes: Vec<u16> = ErrorKind::ALL.iter().map(|kind| kind.code()).collect();
        assert!(codes.windows(2).all(|pair| pair[0] < pair[1]), "{codes:?}");
        for kind in ErrorKind::ALL {
            assert_eq!(ErrorKind::from_code(kind.code()), Some(*kind));
        }
        assert_eq!(ErrorKind::from_code(0), None);
    }

    #[test]
    fn an_error_names_everything_it_knows() {
        let error = Error::new(ErrorKind::PeerGone, "no answer for 3 s").with_peer("b:1").with_device("eth0");
        let text = error.to_string();
        for part in ["no answer for 3 s", "PeerGone 300", "peer b:1", "device eth0", "come back"] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        assert_eq!(error.fault(), Fault::Peer);
        assert!(error.retryable());
    }

    #[test]
    fn an_operating_system_error_keeps_its_number() {
        let error = Error::os("open /x", &io::Error::from_raw_os_error(13)).context("mapping the pool");
        assert_eq!(error.os_error(), Some(13));
        assert!(error.to_string().starts_with("mapping the pool: open /x: "));
    }

    #[test]
    fn an_error_is_one_pointer_wide() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }
}
