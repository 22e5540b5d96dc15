#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

pub mod config;
mod connector;
pub mod control;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod key;
pub mod message;
pub mod offer;
pub mod payload;
pub mod pipeline;
pub mod port;
pub mod stream;
pub mod topology;

pub use config::ConnectorConfig;
pub use connector::{
    Connector, ConnectorBuilder, FollowOptions, GetOptions, Health, Lease, OwnTicket, Payload, PutOptions,
    Received, Source, StreamReceiver, StreamSender, Tensor, TensorBuffer, Ticket,
};
pub use key::Edge;
pub use payload::TensorSet;
pub use payload::envelope::TensorSpec;
