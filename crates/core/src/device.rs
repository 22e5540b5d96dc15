//! Memory that the host cannot dereference.

use std::fmt;

use crate::deadline::Deadline;
use crate::error::Result;
use crate::memory::View;

/// Something that happens on a device, by which work is ordered: a recorded CUDA event, for instance. The
/// number means something only to the [`DeviceMemory`] that gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceEvent(pub u64);

/// A device's memory: the only way in which bytes of a [`crate::DeviceView`] are moved by the host.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Enqueues a copy behind `after`, and returns the event of its end.
    ///
    /// # Errors
    /// `Unsupported` for a pair of memories it cannot copy between, `Io` when the driver refuses.
    ///
    /// # Safety
    /// Both views have the same length, and stay allocated until the returned event has happened.
    unsafe fn copy(&self, from: View, to: View, after: Option<DeviceEvent>) -> Result<DeviceEvent>;

    /// Whether the event has happened. An event is forgotten when this has said so.
    ///
    /// # Errors
    /// `Io` when the device reports that the work before the event failed.
    fn poll(&self, event: DeviceEvent) -> Result<bool>;

    /// Waits until the event has happened.
    ///
    /// # Errors
    /// `DeadlineExceeded`; `Io` when the device reports that the work before the event failed.
    fn wait(&self, event: DeviceEvent, deadline: Deadline) -> Result<()>;
}
