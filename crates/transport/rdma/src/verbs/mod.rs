//! The seam between this transport and whatever carries out its verbs.
//!
//! The words are those of the InfiniBand specification and of libibverbs: protection domains, memory regions, queue
//! pairs, completion queues. What is here is as much of them as one-sided transfers need, in a shape that a real device
//! and a software one can both have. All state machines of this crate stand on these traits alone.

mod types;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use posthorse_core::Result;

pub use types::{
    Access, GidEntry, Limits, Link, Memory, Operation, Port, PortState, PostError, QueueSize, Remote, Status,
    Wakeup, WorkCompletion, WorkRequest,
};

/// The devices of a host.
pub trait Verbs: fmt::Debug + Send + Sync {
    /// The names of all devices, in the order of the system.
    ///
    /// # Errors
    /// `Unsupported` where there is nothing that could have devices: no library, no kernel support.
    fn devices(&self) -> Result<Vec<String>>;

    /// Opens a device, and makes one protection domain there.
    ///
    /// # Errors
    /// `NotFound` when there is no such device; `Io` when it cannot be opened.
    fn open(&self, name: &str) -> Result<Arc<dyn Device>>;
}

/// An open device with one protection domain. What is made of it keeps it open.
pub trait Device: fmt::Debug + Send + Sync {
    /// Its name, such as `mlx5_0`.
    fn name(&self) -> &str;

    /// What it can take.
    fn limits(&self) -> Limits;

    /// How a port of it is now. Ports are numbered from 1.
    ///
    /// # Errors
    /// `NotFound` when there is no such port; `Io` when the device does not answer.
    fn port(&self, port: u8) -> Result<Port>;

    /// The addresses of a port, empty ones left out.
    ///
    /// # Errors
    /// As [`Device::port`].
    fn gids(&self, port: u8) -> Result<Vec<GidEntry>>;

    /// Registers memory. It is known to the device until what is returned is dropped; when that has happened, the device
    /// touches it no more.
    ///
    /// # Errors
    /// `LimitReached`, with the limit in the advice, when the system or the device has no more to give; `Unsupported` for
    /// memory that it cannot reach.
    ///
    /// # Safety
    /// The memory stays allocated until what is returned is dropped.
    unsafe fn register(&self, memory: Memory<'_>, access: Access) -> Result<Arc<dyn MemoryRegion>>;

    /// Makes queue pairs (reliable connected, RC) with one completion queue of their own. Its completions are announced by
    /// [`Device::wait`] under `key`, when asked for.
    ///
    /// # Errors
    /// `LimitReached` when the device has no more to give.
    fn queue_pairs(&self, count: usize, size: QueueSize, key: u64) -> Result<Arc<dyn QueuePairs>>;

    /// Sleeps until something happens at the device. One thread a device does this. What was announced before queue pairs were
    /// dropped may still come: with a key that is not in use any more.
    ///
    /// # Errors
    /// `Io` when the device is beyond use.
    fn wait(&self, timeout: Option<Duration>) -> Result<Wakeup>;

    /// Wakes whoever sleeps in [`Device::wait`], or will next.
    fn wake(&self);
}

/// Memory that a device knows. Dropping it deregisters.
pub trait MemoryRegion: fmt::Debug + Send + Sync {
    /// The key for work requests of this side.
    fn local_key(&self) -> u32;

    /// The key for work requests of peers.
    fn remote_key(&self) -> u32;
}

/// Some queue pairs, and the completion queue that they share. Dropping them destroys both: when that has happened, no
/// peer reaches this side's memory by them, and no work request of theirs touches it.
pub trait QueuePairs: fmt::Debug + Send + Sync {
    /// Their numbers (24 bits each).
    fn numbers(&self) -> &[u32];

    /// How many bytes a WRITE may carry in its work request.
    fn max_inline(&self) -> u32;

    /// Connects one of them to a peer's: through RESET, INIT and RTR to RTS. It may be in any state before. What was posted before
    /// and has not completed may then never do so: [`QueuePairs::fail`] and the completions that it causes come first.
    ///
    /// # Errors
    /// `PathFailed` when the peer's address does not resolve; `Io` for other refusals of the device.
    fn connect(&self, queue: usize, link: &Link, remote: &Remote) -> Result<()>;

    /// Moves all of them to the error state: what was posted completes as flushed, and what a peer sends is refused.
    ///
    /// # Errors
    /// `Io` when the device does not.
    fn fail(&self) -> Result<()>;

    /// Posts work requests, in order, as one chain.
    ///
    /// # Errors
    /// With the number of those that were posted. There is room for [`QueueSize::sends`] that have not completed, unsignalled ones
    /// included; a device may take more, and then there may be no room for their completions.
    ///
    /// # Safety
    /// The memory that each names by [`WorkRequest::local_key`] stays allocated until it has completed, and is not used
    /// meanwhile in a way that Rust forbids beside this read or write.
    unsafe fn post(&self, queue: usize, requests: &[WorkRequest]) -> Result<(), PostError>;

    /// Posts empty receive requests, each of which takes one immediate value of the peer.
    ///
    /// # Errors
    /// With the number of those that were posted. There is room for [`QueueSize::receives`].
    fn post_receives(&self, queue: usize, ids: &[u64]) -> Result<(), PostError>;

    /// Takes completions from the queue, and says how many.
    ///
    /// # Errors
    /// `Io` when the queue is beyond use.
    fn poll(&self, into: &mut [WorkCompletion]) -> Result<usize>;

    /// Asks to be told of the next completion. What has completed before is found by one more [`QueuePairs::poll`].
    ///
    /// # Errors
    /// `Io` when the queue is beyond use.
    fn arm(&self) -> Result<()>;
}
