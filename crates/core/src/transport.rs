//! The contract between the engine and whatever moves the bytes.
//!
//! The engine decides, a transport obeys. The page "The Transport contract" of the book says it in words
//! and carries it through TCP, RDMA verbs and CUDA streams; these are the types.

use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use crate::deadline::Deadline;
use crate::device::DeviceEvent;
use crate::error::{Error, ErrorKind, Result};
use crate::gate::Gate;
use crate::hello::Hello;
use crate::id::{GrantToken, Incarnation, PathId, RegionId};
use crate::memory::{Access, Region, View};
use crate::segment::{GrantDesc, SegmentDesc};
use crate::transfer::{Checksum, Level, Opcode, Priority};

/// One way of moving bytes. See the module's documentation.
pub trait Transport: fmt::Debug + Send + Sync {
    /// The name under which it is installed, published and hinted at, such as `tcp`.
    fn name(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Begins to serve, and returns what the segment descriptor publishes for it.
    ///
    /// # Errors
    /// Whatever keeps it from serving: an address in use, a device that is missing.
    fn start(&self, context: TransportContext) -> Result<Value>;

    /// Ends every path and stops serving. Every slice has had its completion when this returns, save what is being
    /// reported when this is called from within an event. Idempotent.
    fn stop(&self);

    /// Prepares a region for transfers, and returns what its buffer descriptor publishes.
    ///
    /// # Errors
    /// `LimitReached` or `OutOfMemory`; `Unsupported` for a kind of memory it cannot move.
    fn register(&self, region: &RegisteredRegion) -> Result<Value>;

    /// Gives a region up. No path of this transport touches it any more when this returns.
    ///
    /// # Errors
    /// `DeadlineExceeded` when that cannot be shown yet; it can be asked again.
    fn unregister(&self, region: RegionId, deadline: Deadline) -> Result<()>;

    /// Prepares a grant, and returns what goes to the peer with it. By default the token is all.
    ///
    /// # Errors
    /// `LimitReached` when no more grants can be prepared.
    fn grant(&self, grant: &Grant<'_>) -> Result<Value> {
        let _ = grant;
        Ok(Value::Null)
    }

    /// Ends a grant. Its holder cannot touch the range through this transport any more when this returns.
    ///
    /// # Errors
    /// `DeadlineExceeded` when that cannot be shown yet: the memory stays withheld, and it can be asked again.
    fn revoke(&self, token: GrantToken, deadline: Deadline) -> Result<()> {
        let _ = (token, deadline);
        Ok(())
    }

    /// Makes the paths to a peer. Paths that cannot be had are returned too, down, with the reason.
    ///
    /// # Errors
    /// When nothing can be said of any path: the peer does not have this transport, is not reachable, refuses.
    fn connect(&self, peer: &SegmentDesc, deadline: Deadline) -> Result<Vec<Path>>;

    /// Fences a path, then gives it up.
    fn disconnect(&self, path: PathId);

    /// Turns what this transport published with a peer's grant or buffer into a key for slices of `path`.
    ///
    /// # Errors
    /// `Malformed` when the attributes are not of this transport's form.
    fn import(&self, path: PathId, attributes: &Value) -> Result<RemoteKey> {
        let _ = (path, attributes);
        Ok(RemoteKey::NONE)
    }

    /// Gives a view of a peer's memory to be read in place, where the path allows that. The owner cannot end the
    /// grant until the returned region is dropped, or this process is gone.
    ///
    /// # Errors
    /// `Unsupported` for a transport or region that cannot be mapped, `AccessDenied` for a grant that has ended.
    fn lease(&self, path: PathId, grant: &GrantDesc) -> Result<Arc<dyn Region>> {
        let _ = (path, grant);
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("transport {} cannot lend memory in place", self.name()),
        ))
    }

    /// Takes as many slices as there is room for, in order, and returns how many. Never waits for the wire, and
    /// allocates nothing per slice. May report completions before it returns. When fewer are taken than
    /// offered, [`TransportEvents::writable`] follows.
    ///
    /// # Errors
    /// When the path is down or unknown; then no slice was taken.
    ///
    /// # Safety
    /// The local memory of every slice taken stays allocated until the slice's completion, and is not used
    /// meanwhile in a way that Rust forbids beside this read or write.
    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize>;

    /// Carries out a small part of what waits in this transport, if there is any and it helps: called over and over by
    /// threads that wait for completions and have nothing else to do. May report completions. Says whether it did
    /// something.
    fn help(&self) -> bool {
        false
    }

    /// Delivers a message to the peer once, in the order of this path's notifications. Completed under `token`.
    ///
    /// # Errors
    /// When the path is down, `QueueFull`, `TooLarge`, or `Unsupported`.
    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()>;

    /// Drops the slices for whose token `which` says so, as far as they are not yet posted; each reports
    /// `Cancelled`.
    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool);

    /// Ends every slice of a path: each reports `Flushed`, or whatever it came to, when it is quiet. The path
    /// is down until it is connected again.
    fn fence(&self, path: PathId);
}

/// What a transport may use of the process it serves.
#[derive(Clone, Debug)]
pub struct TransportContext {
    /// The segment name of this process.
    pub name: Arc<str>,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// What every connection begins with.
    pub hello: Hello,
    /// Admits peers to local memory.
    pub gate: Arc<dyn Gate>,
    /// Takes completions and other events.
    pub events: Arc<dyn TransportEvents>,
    /// Small messages to peers.
    pub control: Arc<dyn ControlChannel>,
}

/// Where a transport reports. Called from its threads or from within a call to it; never waits.
pub trait TransportEvents: fmt::Debug + Send + Sync {
    /// Slices and notifications have ended: exactly one completion each.
    fn completed(&self, completions: &[Completion]);

    /// A path that took fewer slices than were offered has room again.
    fn writable(&self, path: PathId);

    /// A path came up or went down.
    fn path_changed(&self, path: PathId, state: &PathState);

    /// A peer's notification arrived.
    ///
    /// # Errors
    /// `QueueFull` when nobody fetches them: the transport refuses it with this reason, so nothing is lost
    /// silently.
    fn notified(&self, peer: &str, data: &[u8]) -> Result<()>;
}

/// Small requests to peers, answered by them: queue-pair handshakes, rendezvous.
pub trait ControlChannel: fmt::Debug + Send + Sync {
    /// Asks `peer` (a segment name) about `topic`, and waits for the answer.
    ///
    /// # Errors
    /// `PeerUnreachable`, `PeerGone`, `DeadlineExceeded`, or the error that the peer's handler returned.
    fn request(&self, peer: &str, topic: &str, body: &[u8], deadline: Deadline) -> Result<Vec<u8>>;

    /// Answers requests about `topic` from now on. A later handler of the same topic replaces the earlier.
    fn on_request(&self, topic: &str, handler: RequestHandler);
}

/// Answers a request: who asks (as far as the channel knows), and the body.
pub type RequestHandler = Arc<dyn Fn(&str, &[u8]) -> Result<Vec<u8>> + Send + Sync>;

/// What a transport can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether it reaches peers on this host only.
    pub same_host_only: bool,
    /// Whether it moves device memory without staging.
    pub device_memory: bool,
    /// How it keeps peers inside their grants.
    pub grants: Grants,
    /// Whether it delivers notifications.
    pub notify: bool,
    /// Whether it compares checksums at the far end.
    pub checksum: bool,
    /// The furthest level it reports.
    pub level: Level,
    /// The longest slice it takes, in bytes.
    pub max_slice: u64,
    /// The slice length from which a longer one gains nothing, in bytes.
    pub preferred_slice: u64,
}

/// How a transport keeps peers inside their grants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Grants {
    /// It does not: only fencing a peer's paths ends what it may touch.
    Fenced,
    /// By a key of its own for each grant, which stands for its range, its kind of access and its end. Whoever has the key
    /// has the grant: neither the token nor the peer is looked at.
    Keyed,
    /// Each access is checked: token, peer, range and kind.
    Checked,
}

/// A region as transports register it.
#[derive(Debug, Clone)]
pub struct RegisteredRegion {
    /// Its number.
    pub id: RegionId,
    /// The memory and its owner.
    pub region: Arc<dyn Region>,
    /// What peers that hold the descriptor may do with all of it.
    pub access: Access,
}

/// A grant as transports prepare it: a peer may touch a range of a region.
#[derive(Debug, Clone, Copy)]
pub struct Grant<'a> {
    /// The terms, as they will travel; attributes are still empty.
    pub desc: &'a GrantDesc,
    /// The only peer that may use it, or `None` for whoever holds the token.
    pub peer: Option<&'a str>,
}

/// One way to one peer.
#[derive(Debug, Clone)]
pub struct Path {
    /// Its number within the transport.
    pub id: PathId,
    /// The local device: an interface, an HCA, `shm`.
    pub local_device: String,
    /// The peer's device or address.
    pub remote_device: String,
    /// The local device's NUMA node, if it has one.
    pub numa_node: Option<u16>,
    /// What it should carry, in bytes per second; zero when unknown.
    pub bandwidth: u64,
    /// Whether it can be used now.
    pub state: PathState,
}

/// Whether a path can be used.
#[derive(Debug, Clone)]
pub enum PathState {
    /// Yes.
    Up,
    /// No, and why.
    Down(Error),
}

/// A key to a peer's memory that a transport made of published attributes, meaningful to it alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteKey(pub u64);

impl RemoteKey {
    /// No key: the token is all that is needed.
    pub const NONE: Self = Self(0);
}

/// The piece of a request that one path carries.
#[derive(Debug, Clone, Copy)]
pub struct Slice {
    /// Comes back in the completion.
    pub token: u64,
    /// The direction.
    pub opcode: Opcode,
    /// How urgent it is.
    pub priority: Priority,
    /// How much is compared at the far end.
    pub checksum: Checksum,
    /// How far it has to come before it is completed.
    pub level: Level,
    /// The local memory; its length is the slice's. Never empty.
    pub local: View,
    /// The region the local memory lies in.
    pub local_region: RegionId,
    /// The first byte's address in the peer's address space.
    pub remote_address: u64,
    /// The proof that it may be touched; `None` towards peers whose protocol knows no grants.
    pub grant: Option<GrantToken>,
    /// The key of [`Transport::import`].
    pub remote_key: RemoteKey,
    /// What must have happened before the local memory is touched.
    pub ready: Option<DeviceEvent>,
}

/// The end of a slice or notification.
#[derive(Debug, Clone)]
pub struct Completion {
    /// The slice's or notification's token.
    pub token: u64,
    /// The level reached, or why not.
    pub result: Result<Level, SliceError>,
}

/// Why a slice failed, and what is known of the far end. The near end is quiet.
#[derive(Debug, Clone)]
pub struct SliceError {
    /// The reason.
    pub error: Error,
    /// Whether the far end may still be touched.
    pub far_end: FarEnd,
}

/// Whether a failed slice may still touch the peer's memory, or a failed notification be delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FarEnd {
    /// It will not: it never left, was refused, or the path was fenced. A notification was not delivered either.
    Quiet,
    /// It may, until the owner of the memory revokes the grant. A notification may have been delivered.
    Unconfirmed,
}
