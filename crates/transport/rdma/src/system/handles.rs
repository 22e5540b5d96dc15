//! What libibverbs gives out, given back in the right order: each holds what it was made of.

use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, Result};
use posthorse_memory::ForkGuard;
use rdma_sys::{ibv_comp_channel, ibv_context, ibv_device, ibv_pd};

use super::library::Library;

/// What a function of libibverbs that returns a number means by it: zero, an error's number, or -1 with `errno`.
pub(super) fn outcome(returned: c_int) -> io::Result<()> {
    match returned {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        number => Err(io::Error::from_raw_os_error(number.abs())),
    }
}

/// The list of the system's devices.
#[derive(Debug)]
pub(super) struct DeviceList {
    library: &'static Library,
    /// Null where there are none.
    first: *mut *mut ibv_device,
    len: usize,
}

impl DeviceList {
    pub(super) fn new(library: &'static Library) -> Self {
        let mut len = 0;
        // SAFETY: the number outlives the call.
        let first = unsafe { (library.get_device_list)(&raw mut len) };
        // A kernel without RDMA gives no list and an error, which one depends on the release: there are no devices.
        let len = if first.is_null() { 0 } else { usize::try_from(len).unwrap_or(0) };
        Self { library, first, len }
    }

    /// The devices with their names.
    pub(super) fn entries(&self) -> impl Iterator<Item = (String, *mut ibv_device)> + '_ {
        (0..self.len).map(|at| {
            // SAFETY: the list has `len` devices, each of which has a name.
            let (device, name) = unsafe {
                let device = *self.first.add(at);
                (device, CStr::from_ptr((self.library.get_device_name)(device)))
            };
            (name.to_string_lossy().into_owned(), device)
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if !self.first.is_null() {
            // SAFETY: it came from `get_device_list`; what was opened of it stays open.
            unsafe { (self.library.free_device_list)(self.first) };
        }
    }
}

/// An open device.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) library: &'static Library,
    pub(super) name: String,
    context: NonNull<ibv_context>,
    fork: ForkGuard,
}

// SAFETY: libibverbs may be called from any thread, and from several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device of this name.
    ///
    /// # Errors
    /// `NotFound`, with the names that there are; `Io`.
    pub(super) fn open(library: &'static Library, name: &str) -> Result<Arc<Self>> {
        let fork = ForkGuard::new()?;
        let list = DeviceList::new(library);
        let Some((_, device)) = list.entries().find(|(found, _)| found == name) else {
            let names: Vec<String> = list.entries().map(|(name, _)| name).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            let text = format!("there is no RDMA device `{name}`; this host has: {names}");
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        // SAFETY: the device is of the list, which is still there.
        let context = NonNull::new(unsafe { (library.open_device)(device) }).ok_or_else(|| {
            Error::os("opening the RDMA device", &io::Error::last_os_error()).with_device(name).with_advice(
                "a container needs the files below /dev/infiniband, such as by `--device=/dev/infiniband`",
            )
        })?;
        Ok(Arc::new(Self { library, name: name.to_owned(), context, fork }))
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// Whether this is a forked child of the process that opened the device: what is the parent's must be left alone.
    pub(super) fn is_forked(&self) -> bool {
        self.fork.is_forked()
    }

    /// # Errors
    /// `Forked` in a forked child.
    pub(super) fn check_fork(&self) -> Result<()> {
        self.fork.check()
    }

    /// The kernel's folder for the device.
    pub(super) fn folder(&self) -> PathBuf {
        // SAFETY: the device is there while it is open, and its path ends with a zero.
        let path = unsafe { CStr::from_ptr((*(*self.as_ptr()).device).ibdev_path.as_ptr()) };
        Path::new(&*path.to_string_lossy()).to_owned()
    }

    /// Where asynchronous events are read.
    pub(super) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the device is.
        unsafe { BorrowedFd::borrow_raw((*self.as_ptr()).async_fd) }
    }

    /// A refusal while doing `what`.
    pub(super) fn refused(&self, what: &str, error: &io::Error) -> Error {
        Error::os(what, error).with_device(&*self.name)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_forked() {
            // SAFETY: opened by `open`; what was made of it has given up its `Arc`. Nothing mends a refusal.
            unsafe { (self.library.close_device)(self.as_ptr()) };
        }
    }
}

/// A protection domain: what was not made in one does not work with what was.
#[derive(Debug)]
pub(super) struct Domain {
    pub(super) context: Arc<Context>,
    domain: NonNull<ibv_pd>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the device is open.
        let domain = unsafe { (context.library.alloc_pd)(context.as_ptr()) };
        let domain = NonNull::new(domain)
            .ok_or_else(|| context.refused("making a protection domain", &io::Error::last_os_error()))?;
        Ok(Arc::new(Self { context: Arc::clone(context), domain }))
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_pd {
        self.domain.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if !self.context.is_forked() {
            // SAFETY: made by `new`; what was made in it has given up its `Arc`.
            unsafe { (self.context.library.dealloc_pd)(self.as_ptr()) };
        }
    }
}

/// Where completion queues announce that they have something.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) context: Arc<Context>,
    channel: NonNull<ibv_comp_channel>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: the device is open.
        let channel = unsafe { (context.library.create_comp_channel)(context.as_ptr()) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| context.refused("making a completion channel", &io::Error::last_os_error()))?;
        Ok(Arc::new(Self { context: Arc::clone(context), channel }))
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_comp_channel {
        self.channel.as_ptr()
    }

    /// Where announcements are read.
    pub(super) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel is there.
        unsafe { BorrowedFd::borrow_raw((*self.as_ptr()).fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if !self.context.is_forked() {
            // SAFETY: made by `new`; the queues that announce there have given up their `Arc`.
            unsafe { (self.context.library.destroy_comp_channel)(self.as_ptr()) };
        }
    }
}
