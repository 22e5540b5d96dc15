//! Who may touch local memory for a peer, and when that has ended.
//!
//! A transport's serving side asks a [`Gate`] for an [`Admission`] before it touches memory that belongs
//! to this process on behalf of a peer, and [enters](Admission::enter) it around each touch. Closing the
//! [`Usage`] behind it refuses further touches and waits for those under way.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::id::GrantToken;
use crate::memory::{Access, Region, View};

/// What a peer claims it may do.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The peer, as the transport knows it.
    pub peer: &'a str,
    /// The token it showed; `None` from peers whose protocol knows no grants.
    pub token: Option<GrantToken>,
    /// The first byte's address in this process's address space, or the device's.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// What it wants to do.
    pub access: Access,
}

/// The owner of this process's registered memory, asked for each access by a peer.
pub trait Gate: fmt::Debug + Send + Sync {
    /// Admits an access, or says why not.
    ///
    /// # Errors
    /// `NotRegistered` when no region lies there, `OutOfBounds` when the range leaves the region or grant,
    /// `AccessDenied` when the token is wrong, revoked, another peer's or does not allow this access.
    fn admit(&self, claim: &Claim<'_>) -> Result<Admission>;
}

/// An access that was admitted: the memory, for as long as its owner leaves it open.
#[derive(Debug, Clone)]
pub struct Admission {
    view: View,
    access: Access,
    usage: Arc<Usage>,
}

impl Admission {
    /// Admits to `len` bytes at `offset` of the region of `usage`, for this kind of access. Whatever
    /// gate gives it, it is to memory that is there: who touches that need not trust the gate.
    ///
    /// # Errors
    /// `OutOfBounds` when they leave the region; `AccessDenied` for writes to one that is not writable.
    pub fn new(usage: Arc<Usage>, offset: u64, len: u64, access: Access) -> Result<Self> {
        let region = usage.region();
        if access.allows(Access::Write) && !region.writable() {
            return Err(Error::new(ErrorKind::AccessDenied, "the region is not writable"));
        }
        let view = region.view().slice(offset, len)?;
        Ok(Self { view, access, usage })
    }

    /// The memory, to be touched only while inside, and only as [`Admission::access`] says.
    pub const fn view(&self) -> View {
        self.view
    }

    /// What was admitted.
    pub const fn access(&self) -> Access {
        self.access
    }

    /// Whether the owner has closed the memory. Whoever finds it so drops the admission, which keeps the region alive.
    pub fn is_closed(&self) -> bool {
        self.usage.is_closed()
    }

    /// Begins one touch of the memory, or says that the owner has closed it.
    ///
    /// Nothing is waited for while inside: the owner waits for it to end.
    pub fn enter(&self) -> Option<Inside<'_>> {
        self.usage.enter()
    }
}

/// How many are touching a piece of memory, and whether more may begin.
///
/// One word: the lowest bit says closed, the others count. It keeps the region alive.
pub struct Usage {
    state: AtomicU64,
    region: Arc<dyn Region>,
}

const CLOSED: u64 = 1;
const ONE: u64 = 2;

impl Usage {
    /// An open usage of `region`, with nobody inside.
    pub fn new(region: Arc<dyn Region>) -> Self {
        Self { state: AtomicU64::new(0), region }
    }

    /// The region.
    pub fn region(&self) -> &Arc<dyn Region> {
        &self.region
    }

    /// Begins a touch, unless closed.
    pub fn enter(&self) -> Option<Inside<'_>> {
        // Acquire pairs with the owner's release of the memory's content; a refused entry is undone, and
        // until it is, a closer counts it: it waits a moment longer, never too short.
        let before = self.state.fetch_add(ONE, Ordering::Acquire);
        let inside = Inside { usage: self };
        if before & CLOSED == 0 { Some(inside) } else { None }
    }

    /// As [`Usage::enter`], for a touch that outlives the caller's borrow: a transfer in flight.
    pub fn pin(self: &Arc<Self>) -> Option<Pin> {
        let inside = self.enter()?;
        // The count passes from the borrowed guard to the owned one.
        std::mem::forget(inside);
        Some(Pin { usage: Arc::clone(self) })
    }

    /// Refuses further touches. Those under way go on.
    pub fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether [`Usage::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Whether it is closed and nobody is inside any more.
    pub fn is_quiet(&self) -> bool {
        // Acquire: what those inside wrote happened before what follows a yes.
        self.state.load(Ordering::Acquire) == CLOSED
    }

    /// Closes, then waits for those inside to leave.
    ///
    /// # Errors
    /// `DeadlineExceeded` when somebody is still inside; it stays closed, and can be asked again.
    pub fn close_and_wait(&self, deadline: Deadline) -> Result<()> {
        self.close();
        let mut pause = Duration::from_micros(1);
        for round in 0_u32.. {
            if self.is_quiet() {
                break;
            }
            if deadline.is_past(Instant::now()) {
                return Err(Deadline::exceeded("an access by a peer to leave the memory"));
            }
            // A touch is one non-blocking call or one copy of a piece: short, unless its thread is
            // scheduled away, which is what the growing pause is for.
            if round < 64 {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.load(Ordering::Relaxed);
        write!(f, "Usage({} inside{})", state / ONE, if state & CLOSED == 0 { "" } else { ", closed" })
    }
}

/// A touch under way; dropping it ends the touch.
#[derive(Debug)]
#[must_use = "the touch ends when this is dropped"]
pub struct Inside<'a> {
    usage: &'a Usage,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        // Release: what was written while inside is seen by whoever finds the usage quiet.
        self.usage.state.fetch_sub(ONE, Ordering::Release);
    }
}

/// A touch under way that holds its usage; dropping it ends the touch.
#[derive(Debug)]
#[must_use = "the touch ends when this is dropped"]
pub struct Pin {
    usage: Arc<Usage>,
}

impl Pin {
    /// The region that is held.
    pub fn region(&self) -> &Arc<dyn Region> {
        self.usage.region()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        drop(Inside { usage: &self.usage });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::memory::HostView;

    #[derive(Debug)]
    struct Nothing;

    // SAFETY: an empty view can be looked through at any time.
    unsafe impl Region for Nothing {
        fn view(&self) -> View {
            View::Host(HostView::empty())
        }
    }

    fn usage() -> Arc<Usage> {
        Arc::new(Usage::new(Arc::new(Nothing)))
    }

    #[test]
    fn there_is_no_admission_to_what_the_region_does_not_have() {
        #[derive(Debug)]
        struct ReadOnly([u8; 8]);

        // SAFETY: the bytes are never written to, and stay where they are in the `Arc`.
        unsafe impl Region for ReadOnly {
            fn view(&self) -> View {
                View::Host(HostView::of(&self.0))
            }

            fn writable(&self) -> bool {
                false
            }
        }

        let usage = Arc::new(Usage::new(Arc::new(ReadOnly([0; 8]))));
        let admit = |offset, len, access| Admission::new(Arc::clone(&usage), offset, len, access);
        let admission = admit(2, 6, Access::Read).unwrap();
        assert_eq!(admission.view().address(), usage.region().view().address() + 2);
        assert_eq!((admission.view().len(), admission.access()), (6, Access::Read));
        for (offset, len) in [(3, 6), (9, 0), (u64::MAX, 2)] {
            assert_eq!(admit(offset, len, Access::Read).unwrap_err().kind(), ErrorKind::OutOfBounds);
        }
        for access in [Access::Write, Access::ReadWrite] {
            assert_eq!(admit(0, 8, access).unwrap_err().kind(), ErrorKind::AccessDenied);
        }
    }

    #[test]
    fn a_closed_usage_admits_nobody_and_is_quiet_when_the_last_leaves() {
        let usage = usage();
        let first = usage.enter().unwrap();
        let second = usage.enter().unwrap();
        usage.close();
        assert!(usage.enter().is_none());
        drop(first);
        assert!(!usage.is_quiet());
        let timeout = usage.close_and_wait(Deadline::after(Duration::ZERO)).unwrap_err();
        assert_eq!(timeout.kind(), ErrorKind::DeadlineExceeded);
        drop(second);
        assert!(usage.is_quiet());
        usage.close_and_wait(Deadline::NEVER).unwrap();
    }

    #[test]
    fn a_pin_counts_like_a_touch() {
        let usage = usage();
        let pin = usage.pin().unwrap();
        usage.close();
        assert!(usage.pin().is_none());
        assert!(!usage.is_quiet());
        drop(pin);
        assert!(usage.is_quiet());
    }

    #[test]
    fn closing_waits_for_a_thread_that_is_inside() {
        let usage = usage();
        let (inside_tx, inside_rx) = mpsc::channel();
        let (leave_tx, leave_rx) = mpsc::channel::<()>();
        let other = thread::spawn({
            let usage = Arc::clone(&usage);
            move || {
                let inside = usage.enter().unwrap();
                inside_tx.send(()).unwrap();
                leave_rx.recv().unwrap();
                drop(inside);
            }
        });
        inside_rx.recv().unwrap();
        usage.close();
        assert!(!usage.is_quiet());
        leave_tx.send(()).unwrap();
        usage.close_and_wait(Deadline::NEVER).unwrap();
        other.join().unwrap();
    }

    #[test]
    fn racing_entries_never_leave_anybody_inside_a_quiet_usage() {
        for _ in 0..200 {
            let usage = usage();
            let touched = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let (usage, touched) = (Arc::clone(&usage), Arc::clone(&touched));
                    thread::spawn(move || {
                        while let Some(_inside) = usage.enter() {
                            touched.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            usage.close_and_wait(Deadline::NEVER).unwrap();
            let after = touched.load(Ordering::Relaxed);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(touched.load(Ordering::Relaxed), after, "a touch began after the usage was quiet");
        }
    }
}
