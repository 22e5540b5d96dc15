//! What goes through the seam.

use std::os::fd::BorrowedFd;

use posthorse_core::Error;

use crate::gid::{Gid, GidKind};

/// What a device can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The longest memory region, in bytes.
    pub region_bytes: u64,
    /// How many memory regions there can be.
    pub regions: u32,
    /// How many queue pairs there can be.
    pub queue_pairs: u32,
    /// How many work requests a queue takes.
    pub work_requests: u32,
    /// How many completions a completion queue holds.
    pub completions: u32,
    /// How many READs a queue pair may have outstanding, at either end.
    pub reads: u8,
}

/// How a port is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Whether it carries traffic.
    pub state: PortState,
    /// The longest packet that it carries now, in bytes of payload: 256 to 4096.
    pub mtu: u32,
    /// Its local identifier in an InfiniBand subnet; zero on Ethernet.
    pub lid: u16,
    /// Whether its link layer is Ethernet (RoCE): then addresses are GIDs alone.
    pub ethernet: bool,
    /// What it carries at best, in bytes per second; zero when unknown.
    pub bandwidth: u64,
    /// The longest message, in bytes.
    pub message_bytes: u32,
}

/// Whether a port carries traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// It does.
    Active,
    /// It does not.
    Down,
}

/// One address of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place in the port's table.
    pub index: u8,
    /// The address.
    pub gid: Gid,
    /// For which protocol it is; `None` when the system does not say.
    pub kind: Option<GidKind>,
    /// The network interface behind it, for RoCE.
    pub interface: Option<String>,
}

/// Memory to register.
#[derive(Debug, Clone, Copy)]
pub enum Memory<'a> {
    /// Host memory of this process.
    Host {
        /// The first byte's address.
        address: u64,
        /// Bytes.
        len: u64,
    },
    /// A device's memory, exported as a dma-buf.
    DmaBuf {
        /// The file descriptor of the export.
        file: BorrowedFd<'a>,
        /// Where in the export the memory begins.
        offset: u64,
        /// The address by which work requests name the first byte.
        address: u64,
        /// Bytes.
        len: u64,
    },
}

impl Memory<'_> {
    /// The address by which work requests name the first byte.
    pub const fn address(&self) -> u64 {
        match self {
            Self::Host { address, .. } | Self::DmaBuf { address, .. } => *address,
        }
    }

    /// Bytes.
    pub const fn len(&self) -> u64 {
        match self {
            Self::Host { len, .. } | Self::DmaBuf { len, .. } => *len,
        }
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Who may do what with a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// This side's READs, and peers' WRITEs, may write there. Without it the memory may be read-only.
    pub local_write: bool,
    /// Peers may read.
    pub remote_read: bool,
    /// Peers may write. Needs `local_write`.
    pub remote_write: bool,
    /// The device may write in another order than the bytes came, where device and kernel know how
    /// (`IBV_ACCESS_RELAXED_ORDERING`). Where they do not, this is ignored.
    pub relaxed_ordering: bool,
}

/// How many work requests there is room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSize {
    /// Sends of one queue pair.
    pub sends: u32,
    /// Receives of one queue pair.
    pub receives: u32,
    /// Bytes that a WRITE may carry in its work request, at least.
    pub inline_bytes: u32,
}

/// This side's end of a connection, and how it is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The port.
    pub port: u8,
    /// The place of its own address in the port's table.
    pub gid_index: u8,
    /// The place of the partition key in the port's table.
    pub pkey_index: u16,
    /// The longest packet, in bytes of payload: 256, 512, 1024, 2048 or 4096.
    pub mtu: u32,
    /// How many READs may be outstanding, at either end.
    pub reads: u8,
    /// The service level (0 to 15): on lossless Ethernet the priority.
    pub service_level: u8,
    /// The traffic class in the packets' global route header: the IP header's DSCP and ECN bits.
    pub traffic_class: u8,
    /// How many routers a packet may pass.
    pub hop_limit: u8,
    /// How long an acknowledgement may take: 4.096 µs × 2 to this power.
    pub timeout: u8,
    /// How often a packet is sent again that nobody acknowledged: 0 to 6. Seven would be for ever on some devices.
    pub retries: u8,
    /// How often a packet is sent again for which the peer had no receive posted: 0 to 7, where 7 is for ever.
    pub receiver_retries: u8,
}

/// A peer's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Its number.
    pub number: u32,
    /// The address of its port.
    pub gid: Gid,
    /// The local identifier of its port in an InfiniBand subnet; zero on Ethernet.
    pub lid: u16,
}

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Local bytes go to the peer's memory.
    Write,
    /// As `Write`; then the peer gets this value in a completion of a receive.
    WriteWithImmediate(u32),
    /// The peer's bytes come into local memory.
    Read,
}

/// One thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkRequest {
    /// Comes back in the completion.
    pub id: u64,
    /// What to do.
    pub operation: Operation,
    /// The first local byte's address.
    pub local_address: u64,
    /// Bytes. None at all are a message too: it shows that the peer's queue pair is there.
    pub len: u32,
    /// The key of the local memory. Not looked at when inline or empty.
    pub local_key: u32,
    /// The first byte's address in the peer's memory.
    pub remote_address: u64,
    /// The key of that memory.
    pub remote_key: u32,
    /// Whether its success makes a completion. Failure always does.
    pub signalled: bool,
    /// Whether the bytes are taken at once: the local memory may be used again when `post` returns.
    pub inline: bool,
}

/// The end of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The request's id.
    pub id: u64,
    /// How it ended.
    pub status: Status,
    /// The peer's immediate value, when it was a receive.
    pub immediate: Option<u32>,
    /// What the device's maker says of a failure.
    pub vendor_error: u32,
}

impl WorkCompletion {
    /// For the places of an array that [`QueuePairs::poll`](super::QueuePairs::poll) fills.
    pub const EMPTY: Self = Self { id: 0, status: Status::Success, immediate: None, vendor_error: 0 };
}

/// How a work request ended: `ibv_wc_status`. After any but `Success` the queue pair is in the error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// It is done.
    Success,
    /// The local memory is shorter than it says, or longer than a message may be.
    LocalLength,
    /// The queue pair was not fit for it.
    LocalQueuePair,
    /// The local memory is not what its key is for.
    LocalProtection,
    /// The queue pair was in the error state, or came to it meanwhile.
    Flushed,
    /// The peer's device found the request wrong.
    RemoteInvalid,
    /// The peer's device found the memory not to be what the key is for.
    RemoteAccess,
    /// The peer's device could not carry it out.
    RemoteOperation,
    /// Nobody acknowledged it, however often it was sent.
    RetriesExceeded,
    /// The peer had no receive posted, however often it was sent.
    ReceiverNotReady,
    /// Something else, by its number in `ibv_wc_status`.
    Other(u32),
}

/// What ended a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wakeup {
    /// A completion queue that was armed has something; its key.
    Completions(u64),
    /// A port came up or went down, or changed its addresses.
    PortChanged(u8),
    /// The device is beyond use.
    DeviceFailed,
    /// [`Device::wake`](super::Device::wake) was called.
    Woken,
    /// Time ran out.
    TimedOut,
}

/// Why not all of some work requests were posted.
#[derive(Debug, Clone)]
pub struct PostError {
    /// How many were.
    pub posted: usize,
    /// Why the next was not.
    pub error: Error,
}
