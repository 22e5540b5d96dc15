//! What the statuses of work requests mean.

use posthorse_core::{Error, ErrorKind, Fault};

use crate::verbs::Status;

/// The error of a slice that the hardware refused.
pub(super) fn refused(status: Status) -> Error {
    let (kind, fault, text) = match status {
        Status::RemoteAccess => (
            ErrorKind::AccessDenied,
            Fault::Request,
            "the peer's device refused: the memory is not what the key is for",
        ),
        Status::RemoteInvalid => {
            (ErrorKind::AccessDenied, Fault::Request, "the peer's device found the request wrong")
        }
        Status::LocalProtection => (
            ErrorKind::NotRegistered,
            Fault::Local,
            "the device refused: the local memory is not what the key is for",
        ),
        _ => (ErrorKind::InvalidArgument, Fault::Request, "the message is longer than the device takes"),
    };
    Error::new(kind, text).with_fault(fault)
}

/// The error of a path on which work requests end like this.
pub(super) fn path_failed(status: Status, vendor: u32) -> Error {
    let text = match status {
        Status::RetriesExceeded => "nobody acknowledges what is sent".to_owned(),
        Status::ReceiverNotReady => "the peer takes no messages".to_owned(),
        Status::Flushed => "the queue pair was moved to the error state".to_owned(),
        other => format!("a work request ended with {other:?}, vendor's code {vendor:#x}"),
    };
    Error::new(ErrorKind::PathFailed, text)
}
