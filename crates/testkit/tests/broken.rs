//! The suite finds what is broken: a transport with one defect fails the case that is about it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthorse_core::{
    Admission, Capabilities, Claim, Completion, Deadline, Error, ErrorKind, FarEnd, Gate, HostView, Level,
    Path, PathId, PathState, Region, RegionId, RegisteredRegion, Result, SegmentDesc, Slice, SliceError,
    Transport, TransportContext, TransportEvents, Usage, View,
};
use posthorse_testkit::conformance::{self, Subject};
use posthorse_testkit::{MemoryHub, MemoryTransport};
use serde_json::Value;

/// What is wrong with a transport.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Defect {
    None,
    /// The last byte of long slices is not moved.
    ShortByOne,
    /// One byte too many is moved.
    LongByOne,
    /// Some slices are completed twice.
    CompletesTwice,
    /// Every slice is said to have got no further than this side.
    SaysSent,
    /// The path never says that it is writable.
    NeverWritable,
    /// The owner is not asked who may write.
    AsksNobody,
    /// What the owner has once admitted is not asked again.
    RemembersAdmissions,
    /// Fencing does nothing.
    DoesNotFence,
    /// Cancelling names all slices.
    CancelsAll,
    /// Notifications are delivered twice.
    NotifiesTwice,
    /// Refused notifications are said to be delivered.
    HidesRefusal,
    /// Whatever succeeded is said to have failed, and the far end to be quiet.
    DeniesSuccess,
    /// Stopping does nothing.
    DoesNotStop,
    /// Fingerprints are not compared.
    AcceptsAll,
    /// Registering opens a file and keeps it.
    Leaks,
}

#[derive(Debug)]
struct Broken {
    inner: Arc<MemoryTransport>,
    defect: Defect,
}

impl Transport for Broken {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn start(&self, mut context: TransportContext) -> Result<Value> {
        if self.defect == Defect::AcceptsAll {
            context.hello.fingerprint = None;
        }
        context.events = Arc::new(BrokenEvents { inner: context.events, defect: self.defect });
        context.gate =
            Arc::new(BrokenGate { inner: context.gate, defect: self.defect, admitted: Mutex::default() });
        self.inner.start(context)
    }

    fn stop(&self) {
        if self.defect != Defect::DoesNotStop {
            self.inner.stop();
        }
    }

    fn register(&self, region: &RegisteredRegion) -> Result<Value> {
        if self.defect == Defect::Leaks {
            std::mem::forget(std::fs::File::open("/proc/self/status").unwrap());
        }
        self.inner.register(region)
    }

    fn unregister(&self, region: RegionId, deadline: Deadline) -> Result<()> {
        self.inner.unregister(region, deadline)
    }

    fn connect(&self, peer: &SegmentDesc, deadline: Deadline) -> Result<Vec<Path>> {
        self.inner.connect(peer, deadline)
    }

    fn disconnect(&self, path: PathId) {
        self.inner.disconnect(path);
    }

    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        let changed: Vec<_> = slices.iter().map(|slice| self.change(*slice)).collect();
        // SAFETY: the caller's promise, for parts of its slices, or for one byte behind them: the suite's regions
        // are longer than what is moved wherever this defect is used.
        unsafe { self.inner.submit(path, &changed) }
    }

    fn help(&self) -> bool {
        self.inner.help()
    }

    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()> {
        self.inner.notify(path, token, data)
    }

    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        if self.defect == Defect::CancelsAll {
            self.inner.cancel(path, &mut |_| true);
        } else {
            self.inner.cancel(path, which);
        }
    }

    fn fence(&self, path: PathId) {
        if self.defect != Defect::DoesNotFence {
            self.inner.fence(path);
        }
    }
}

impl Broken {
    fn change(&self, slice: Slice) -> Slice {
        let Some(view) = slice.local.host() else { return slice };
        let len = match self.defect {
            Defect::ShortByOne if view.len() > 1 => view.len() - 1,
            Defect::LongByOne if view.len() > 5000 => view.len() + 1,
            _ => view.len(),
        };
        let local = View::Host(HostView::new(std::ptr::NonNull::new(view.as_ptr()).unwrap(), len));
        Slice { local, ..slice }
    }
}

#[derive(Debug)]
struct BrokenEvents {
    inner: Arc<dyn TransportEvents>,
    defect: Defect,
}

impl TransportEvents for BrokenEvents {
    fn completed(&self, completions: &[Completion]) {
        let mut completions = completions.to_vec();
        for completion in &mut completions {
            match (self.defect, &completion.result) {
                (Defect::SaysSent, Ok(_)) => completion.result = Ok(Level::Sent),
                (Defect::HidesRefusal, Err(_)) => completion.result = Ok(Level::Visible),
                (Defect::DeniesSuccess, Ok(_)) => {
                    let error = Error::new(ErrorKind::Flushed, "fenced");
                    completion.result = Err(SliceError { error, far_end: FarEnd::Quiet });
                }
                _ => {}
            }
        }
        self.inner.completed(&completions);
        if self.defect == Defect::CompletesTwice {
            self.inner.completed(&completions);
        }
    }

    fn writable(&self, path: PathId) {
        if self.defect != Defect::NeverWritable {
            self.inner.writable(path);
        }
    }

    fn path_changed(&self, path: PathId, state: &PathState) {
        self.inner.path_changed(path, state);
    }

    fn notified(&self, peer: &str, data: &[u8]) -> Result<()> {
        if self.defect == Defect::NotifiesTwice {
            self.inner.notified(peer, data)?;
        }
        self.inner.notified(peer, data)
    }
}

#[derive(Debug)]
struct BrokenGate {
    inner: Arc<dyn Gate>,
    defect: Defect,
    admitted: Mutex<HashMap<u64, View>>,
}

impl Gate for BrokenGate {
    fn admit(&self, claim: &Claim<'_>) -> Result<Admission> {
        let admission = self.inner.admit(claim);
        match (self.defect, admission) {
            (Defect::RemembersAdmissions, Ok(admission)) => {
                self.admitted.lock().unwrap().insert(claim.address, admission.view());
                admit_for_ever(admission.view(), claim)
            }
            (Defect::RemembersAdmissions, Err(error)) => {
                let view = *self.admitted.lock().unwrap().get(&claim.address).ok_or(error)?;
                admit_for_ever(view, claim)
            }
            (Defect::AsksNobody, Err(error)) => {
                let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
                let inside = |line: &str| {
                    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
                    let number = |text| u64::from_str_radix(text, 16).unwrap();
                    number(start) <= claim.address
                        && claim.address.checked_add(claim.len).is_some_and(|to| to <= number(end))
                };
                if !mapped.lines().any(inside) {
                    return Err(error);
                }
                let base =
                    std::ptr::NonNull::new(std::ptr::with_exposed_provenance_mut(claim.address as usize));
                admit_for_ever(View::Host(HostView::new(base.unwrap(), claim.len as usize)), claim)
            }
            (_, admission) => admission,
        }
    }
}

/// Memory of somebody else, who keeps it alive for the length of a test.
#[derive(Debug)]
struct Borrowed(View);

// SAFETY: the suite holds its regions until its transports have been stopped.
unsafe impl Region for Borrowed {
    fn view(&self) -> View {
        self.0
    }
}

/// By a usage of its own, which nobody closes.
fn admit_for_ever(view: View, claim: &Claim<'_>) -> Result<Admission> {
    Admission::new(Arc::new(Usage::new(Arc::new(Borrowed(view)))), 0, view.len(), claim.access)
}

fn passes(defect: Defect, name: &str) -> bool {
    let hub = MemoryHub::new();
    let subject = Subject::new(move || Arc::new(Broken { inner: hub.transport(), defect }));
    let subject = subject.patience(Duration::from_millis(if defect == Defect::None { 30_000 } else { 1000 }));
    let case = conformance::CASES.iter().find(|case| case.name == name).unwrap();
    catch_unwind(AssertUnwindSafe(|| (case.run)(&subject))).is_ok()
}

macro_rules! found {
    ($($defect:ident by $case:ident as $test:ident;)*) => {
        $(#[test]
        fn $test() {
            let case = stringify!($case);
            assert!(passes(Defect::None, case), "the case fails without the defect");
            assert!(!passes(Defect::$defect, case), "the defect was not found");
        })*
    };
}

found! {
    ShortByOne by every_size_is_moved_both_ways as a_byte_that_is_left_out;
    LongByOne by every_size_is_moved_both_ways as a_byte_too_many;
    CompletesTwice by every_level_is_reached as a_second_completion;
    SaysSent by every_level_is_reached as a_level_that_was_not_reached;
    NeverWritable by more_than_the_queue_holds_is_moved as a_queue_that_stays_full;
    AsksNobody by what_no_grant_covers_is_refused as an_owner_that_is_not_asked;
    RemembersAdmissions by a_revoked_grant_is_written_no_more as a_write_after_the_grant;
    RemembersAdmissions by a_revoked_grant_is_read_no_more as a_read_after_the_grant;
    RemembersAdmissions by an_unregistered_region_is_touched_no_more as a_write_after_the_region;
    DoesNotFence by fencing_ends_everything as a_fence_that_does_nothing;
    CancelsAll by cancelling_spares_the_rest as a_cancel_of_too_much;
    NotifiesTwice by notifications_arrive_once_and_in_order as a_notification_that_comes_twice;
    HidesRefusal by a_notification_that_nobody_takes_is_refused as a_refusal_that_is_hidden;
    DeniesSuccess by a_notification_that_was_delivered_is_not_sent_again as a_delivery_that_is_denied;
    DoesNotStop by stopping_ends_everything as a_stop_that_does_nothing;
    DoesNotStop by a_peer_that_stopped_is_named as a_stopped_peer_that_answers;
    AcceptsAll by fingerprints_must_agree as a_fingerprint_that_nobody_reads;
}

#[test]
fn a_leak_is_found() {
    posthorse_testkit::peer::isolated("a_leak_is_found", || {
        assert!(passes(Defect::None, "nothing_leaks_from_registering"));
        assert!(!passes(Defect::Leaks, "nothing_leaks_from_registering"));
    });
}
