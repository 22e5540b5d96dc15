//! The vocabulary of Posthorse.
//!
//! Plain types and traits that every other crate speaks: errors, deadlines, memory views, descriptors,
//! requests, and the contract between the engine and its transports. There is no I/O here, no thread and
//! no runtime.

mod deadline;
mod dtype;
mod error;
mod location;
mod memory;

pub use deadline::Deadline;
pub use dtype::DType;
pub use error::{Error, ErrorClass, ErrorKind, Fault, Result};
pub use location::Location;
pub use memory::{Access, DeviceView, HostView, Region, SharedFile, View};
