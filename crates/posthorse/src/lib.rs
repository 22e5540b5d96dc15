#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! | module | what it holds |
//! |---|---|
//! | the root | what most programs name: the connector, the engine, errors and deadlines |
//! | [`connector`] | all of the connector: payloads, keys, ports, streams, topology, pipeline files |
//! | [`engine`] | all of the transfer engine, and the words of its requests |
//! | [`memory`] | memory to register, and pools that divide it into buffers |
//! | [`directory`] | where engines find each other |
//! | [`transport`] | the transports, and the contract for those who write one |
//! | [`manual`] | the manual: how to use the connector and the engine, what happens on failure, tuning |

#![forbid(unsafe_code)]

pub mod manual;

pub use posthorse_core::{Checksum, DType, Deadline, Error, ErrorClass, ErrorKind, Fault, Result};
pub use posthorse_engine::{EngineConfig, TransferEngine};
pub use posthorse_omni::config::{Role, TransportChoice};
pub use posthorse_omni::{
    Connector, ConnectorConfig, Edge, FollowOptions, GetOptions, Health, Payload, PutOptions, Received,
    Source, StreamReceiver, StreamSender, Tensor, TensorBuffer, TensorSet, TensorSpec, Ticket,
};

/// The connector between stages, whole.
pub mod connector {
    pub use posthorse_omni::*;
}

/// The transfer engine, whole, with the words of its requests.
pub mod engine {
    pub use posthorse_core::{
        Access, BufferDesc, GrantDesc, GrantToken, Incarnation, LocalRange, Opcode, Priority, RegionId,
        RemoteRange, Route, SegmentDesc, SegmentId, TransferRequest, TransferState, TransferStatus,
        TransportId,
    };
    pub use posthorse_engine::*;
}

/// Memory that can be registered, and pools that divide it into buffers.
pub mod memory {
    pub use posthorse_buffer::{
        Alloc, Block, FencingSlot, ManagedBuffer, OffsetAllocator, Pool, PoolConfig, PoolStats, ReceiveSlot,
        SharedBuffer, SlotGrant, SlotState, TensorView,
    };
    pub use posthorse_core::{Access, DeviceView, HostView, Location, Region, SharedFile, View};
    pub use posthorse_memory::*;
}

/// Where engines find each other: the handshake between peers, or a directory of one's own.
pub mod directory {
    pub use posthorse_core::ControlChannel;
    pub use posthorse_segment::{Directory, HandshakeConfig, MemoryDirectory, P2pDirectory};
}

/// The transports, and the contract for those who write one.
pub mod transport {
    pub use posthorse_core::{
        Capabilities, Completion, ControlChannel, FarEnd, Gate, Grant, Level, Path, PathId, PathState,
        RegisteredRegion, RemoteKey, RequestHandler, Slice, SliceError, Transport, TransportContext,
        TransportEvents,
    };
    #[cfg(feature = "rdma")]
    pub use posthorse_rdma::{RdmaConfig, RdmaTransport};
    #[cfg(feature = "shm")]
    pub use posthorse_shm::{HOST_ID_VARIABLE, ShmConfig, ShmTransport};
    #[cfg(feature = "tcp")]
    pub use posthorse_tcp::{TcpConfig, TcpTransport};
}

pub use memory::{MemoryOptions, Pool};
