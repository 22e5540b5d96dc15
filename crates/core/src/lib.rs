#![doc = include_str!("../README.md")]

mod deadline;
mod device;
mod dtype;
mod ending;
mod error;
mod gate;
mod hello;
mod id;
mod location;
mod memory;
mod segment;
pub mod spin;
mod transfer;
mod transport;
mod wake;

pub use deadline::Deadline;
pub use device::{DeviceEvent, DeviceMemory};
pub use dtype::DType;
pub use ending::{AtWork, Ending, EndingDuty};
pub use error::{Error, ErrorClass, ErrorKind, Fault, Result};
pub use gate::{Admission, Claim, Gate, Inside, Pin, Usage};
pub use hello::{Agreement, Features, Hello, VERSIONS, Versions};
pub use id::{GrantToken, Incarnation, PathId, RegionId, SegmentId};
pub use location::Location;
pub use memory::{Access, DeviceView, HostView, Region, SharedFile, View};
pub use segment::{Attributes, BufferDesc, GrantDesc, SegmentDesc};
pub use transfer::{
    Checksum, Level, LocalRange, Opcode, Priority, RemoteRange, Route, TransferRequest, TransferState,
    TransferStatus, TransportId,
};
pub use transport::{
    Capabilities, Completion, ControlChannel, FarEnd, Grant, Grants, Path, PathState, RegisteredRegion,
    RemoteKey, RequestHandler, Slice, SliceError, Transport, TransportContext, TransportEvents,
};
pub use wake::wake_all;
