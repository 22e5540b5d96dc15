#![doc = include_str!("../README.md")]

mod batch;
mod builder;
mod config;
mod connect;
mod dispatch;
mod engine;
mod events;
mod explain;
mod fork;
mod inbox;
mod lease;
mod local;
mod memory;
mod path;
mod peer;
mod peers;
mod plan;
mod retry;
mod select;
mod signal;
mod slicing;
mod submission;
mod table;
mod ticker;

pub use batch::{Batch, BatchStatus, Done, SubmitOptions, TaskId};
pub use builder::EngineBuilder;
pub use config::EngineConfig;
pub use engine::TransferEngine;
pub use explain::{Explanation, PathReport, TransportReport};
pub use inbox::Notification;
pub use lease::LeasedMemory;
pub use memory::{Grant, RegisteredMemory};
pub use peer::Segment;
pub use plan::Plan;
