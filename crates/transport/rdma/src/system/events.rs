//! What happens at a device, and sleeping until it does.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use posthorse_core::{Error, Result};
use rdma_sys::{ibv_async_event, ibv_event_type};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ioctl_fionbio, read, write};

use super::handles::{Channel, Context, outcome};
use crate::verbs::Wakeup;

/// What a completion queue and its device say of each other. The queue has its address as its context (`cq_context`),
/// so it is there until the queue is destroyed, which waits for every event of the queue to be acknowledged.
#[derive(Debug)]
pub(super) struct Announced {
    /// Under what its completions are announced.
    pub(super) key: u64,
    /// Whether the device has said that the queue lost completions.
    pub(super) overrun: AtomicBool,
}

/// What wakes [`Events::wait`] beside the device.
#[derive(Debug)]
pub(super) struct Events {
    woken: OwnedFd,
}

impl Events {
    /// Makes all sources answer at once when they have nothing.
    pub(super) fn new(channel: &Channel) -> Result<Self> {
        let refused = |error: Errno| channel.context.refused("preparing its events", &error.into());
        ioctl_fionbio(channel.events(), true).map_err(refused)?;
        ioctl_fionbio(channel.context.events(), true).map_err(refused)?;
        let woken = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(refused)?;
        Ok(Self { woken })
    }

    pub(super) fn wake(&self) {
        // It fails only when it has been woken some 2^64 times since somebody slept.
        let _ = write(&self.woken, &1_u64.to_ne_bytes());
    }

    pub(super) fn wait(&self, channel: &Channel, timeout: Option<Duration>) -> Result<Wakeup> {
        let context = &*channel.context;
        context.check_fork()?;
        // A time too far away to be told is no limit.
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let [device, woken, completions] =
                sleep([context.events(), self.woken.as_fd(), channel.events()], left)
                    .map_err(|error| context.refused("waiting for its events", &error))?;
            // What is rare comes first: completions may never cease.
            if device && let Some(wakeup) = device_event(context)? {
                return Ok(wakeup);
            }
            if woken && read(&self.woken, &mut [0_u8; 8]).is_ok() {
                return Ok(Wakeup::Woken);
            }
            if completions && let Some(key) = completion_event(channel)? {
                return Ok(Wakeup::Completions(key));
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Wakeup::TimedOut);
            }
        }
    }
}

/// Sleeps until one of the descriptors has something, time runs out or a signal comes; says which have.
fn sleep<const N: usize>(files: [BorrowedFd<'_>; N], left: Option<Duration>) -> io::Result<[bool; N]> {
    let mut polled = files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
    // What the kernel cannot count is no limit.
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(&mut polled, left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(polled.map(|file| !file.revents().is_empty())),
        Err(error) => Err(error.into()),
    }
}

/// Whether a source had nothing after all.
fn is_empty(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Takes one announcement of completions: the queue's key.
fn completion_event(channel: &Channel) -> Result<Option<u64>> {
    let library = channel.context.library;
    let (mut queue, mut announced) = (null_mut(), null_mut::<c_void>());
    // SAFETY: the channel is there, and both places outlive the call.
    match outcome(unsafe { (library.get_cq_event)(channel.as_ptr(), &raw mut queue, &raw mut announced) }) {
        Ok(()) => {
            // SAFETY: the queue's context, which is there until the queue is destroyed; that waits for the
            // acknowledgement.
            let key = unsafe { (*announced.cast::<Announced>()).key };
            // SAFETY: the queue of the one event that was taken.
            unsafe { (library.ack_cq_events)(queue, 1) };
            Ok(Some(key))
        }
        Err(error) if is_empty(&error) => Ok(None),
        Err(error) => Err(channel.context.refused("reading of completions", &error)),
    }
}

/// Takes one asynchronous event, and says what it is if anybody is to know.
fn device_event(context: &Context) -> Result<Option<Wakeup>> {
    let mut event = MaybeUninit::<ibv_async_event>::zeroed();
    // SAFETY: the device is open, and the event outlives the call.
    match outcome(unsafe { (context.library.get_async_event)(context.as_ptr(), event.as_mut_ptr()) }) {
        Ok(()) => {}
        Err(error) if is_empty(&error) => return Ok(None),
        Err(error) => return Err(beyond_use(context, &error)),
    }
    // SAFETY: what the event names is there until the event is acknowledged.
    let wakeup = unsafe { meaning(event.as_ptr()) };
    // SAFETY: it was taken above, and is acknowledged once.
    unsafe { (context.library.ack_async_event)(event.as_mut_ptr()) };
    Ok(wakeup)
}

/// # Safety
/// The event was taken and not acknowledged.
unsafe fn meaning(event: *const ibv_async_event) -> Option<Wakeup> {
    use ibv_event_type as kind;
    // Read as the number that it is: a release of the library may know more than the enumeration does.
    // SAFETY: the field is there; it has the size of a number.
    let number = unsafe { (&raw const (*event).event_type).cast::<u32>().read() };
    let is = |kind: ibv_event_type| number == kind as u32;
    if is(kind::IBV_EVENT_DEVICE_FATAL) {
        return Some(Wakeup::DeviceFailed);
    }
    let of_port = [
        kind::IBV_EVENT_PORT_ACTIVE,
        kind::IBV_EVENT_PORT_ERR,
        kind::IBV_EVENT_LID_CHANGE,
        kind::IBV_EVENT_PKEY_CHANGE,
        kind::IBV_EVENT_GID_CHANGE,
    ];
    if of_port.into_iter().any(is) {
        // SAFETY: events of these kinds have the number of a port.
        let port = unsafe { (*event).element.port_num };
        return u8::try_from(port).ok().map(Wakeup::PortChanged);
    }
    if is(kind::IBV_EVENT_CQ_ERR) {
        // SAFETY: an event of this kind names a queue, and the queue's context is as `Announced` says.
        let announced = unsafe { &*(*(*event).element.cq).cq_context.cast::<Announced>() };
        announced.overrun.store(true, Ordering::Release);
        return Some(Wakeup::Completions(announced.key));
    }
    // Of a queue pair in error the completions tell.
    None
}

fn beyond_use(context: &Context, error: &io::Error) -> Error {
    context.refused("reading its events", error).with_advice("the device was reset or removed: open it again")
}
