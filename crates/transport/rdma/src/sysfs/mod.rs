//! What the kernel says of RDMA devices in sysfs, without libibverbs.
//!
//! The files are described in the kernel's `Documentation/ABI/stable/sysfs-class-infiniband`. A file that is missing or
//! damaged makes its field `None`: the device is listed all the same.

mod device;
mod files;

#[cfg(feature = "rdma")]
pub(crate) use device::gid_attributes;
pub use device::{SysfsDevice, SysfsPort, devices};
