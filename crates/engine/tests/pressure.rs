//! What an engine does when a transport has no room.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use posthorse_core::{
    Completion, Error, ErrorKind, FarEnd, Level, PathId, Priority, Slice, SliceError, TransferRequest,
    TransportEvents,
};
use posthorse_engine::{Batch, EngineConfig, SubmitOptions, TransferEngine};
use support::hooked::Hooked;
use support::{Pair, World, soon};

const PAGE: u64 = 4096;
const LARGE: u64 = 64 << 10;

fn pair(len: usize, slice_bytes: u64, hook: impl FnOnce(&mut Hooked)) -> (Pair, Arc<Hooked>) {
    let world = World::default();
    let mut hooked = Hooked::new(world.hub.transport(), "memory");
    hook(&mut hooked);
    let hooked = Arc::new(hooked);
    let config = EngineConfig { slice_bytes, ..EngineConfig::default() };
    (Pair::over(world, Arc::clone(&hooked) as _, len, config), hooked)
}

fn submit(pair: &Pair, requests: &[TransferRequest]) -> Batch {
    let mut batch = pair.a.batch();
    batch.submit(requests, SubmitOptions { deadline: soon(), ..SubmitOptions::default() }).unwrap();
    batch
}

/// Ends slices that are not carried out.
fn end(slices: &[Slice], events: &dyn TransportEvents, result: &Result<Level, SliceError>) {
    let of = |slice: &Slice| Completion { token: slice.token, result: result.clone() };
    events.completed(&slices.iter().map(of).collect::<Vec<_>>());
}

#[test]
fn what_waits_of_a_request_that_failed_ends() {
    let (pair, _) = pair(1 << 20, PAGE, |hooked| {
        hooked.submit = Some(Box::new(|call, _, slices, events| match call {
            // Full, so that everything is queued.
            0 => Some(Ok(0)),
            _ => {
                let error = Error::new(ErrorKind::AccessDenied, "the hook");
                end(slices, events, &Err(SliceError { error, far_end: FarEnd::Quiet }));
                Some(Ok(slices.len()))
            }
        }));
    });
    // More slices than are offered in several calls.
    let batch = submit(&pair, &[pair.write(0, 1 << 20)]);
    assert_eq!(batch.wait(soon()).unwrap_err().kind(), ErrorKind::AccessDenied);
    assert_eq!(pair.a.in_flight(), 0);
    pair.source.unregister(soon()).unwrap();
}

#[test]
fn what_is_put_back_while_the_engine_is_shut_down_ends() {
    let engine = Arc::new(Mutex::new(None::<TransferEngine>));
    let held = Arc::clone(&engine);
    let (pair, hooked) = pair(PAGE as usize, PAGE, |hooked| {
        hooked.submit = Some(Box::new(move |_, _, _, _| {
            // As the waker of another batch may, whose slices end meanwhile.
            held.lock().unwrap().take().iter().for_each(TransferEngine::shutdown);
            Some(Ok(0))
        }));
    });
    let batch = submit(&pair, &[pair.write(0, PAGE)]);
    *engine.lock().unwrap() = Some(pair.a.clone());
    hooked.events().writable(PathId(1));
    assert_eq!(batch.wait(soon()).unwrap_err().kind(), ErrorKind::Closed);
}

/// A transport with a lane for slices of a page, which has room, and one for all others, which has none until it is
/// opened. What it took is noted: the length and the offset of each slice.
#[derive(Default)]
struct Lanes {
    open: AtomicBool,
    taken: Mutex<Vec<(u64, u64)>>,
}

impl Lanes {
    /// A pair over such a transport.
    fn pair(len: usize) -> (Pair, Arc<Hooked>, Arc<Self>) {
        let lanes = Arc::new(Self::default());
        let of = Arc::clone(&lanes);
        let (pair, hooked) = pair(len, LARGE, |hooked| {
            hooked.submit = Some(Box::new(move |_, _, slices, events| {
                let open = of.open.load(Ordering::SeqCst);
                let room = slices.iter().take_while(|slice| open || slice.local.len() <= PAGE).count();
                let first = slices.iter().map(|slice| (slice.local.len(), slice.remote_address));
                of.taken.lock().unwrap().extend(first.take(room));
                end(&slices[..room], events, &Ok(Level::Visible));
                Some(Ok(room))
            }));
        });
        (pair, hooked, lanes)
    }

    fn open(&self, hooked: &Hooked) {
        self.open.store(true, Ordering::SeqCst);
        hooked.events().writable(PathId(1));
    }

    /// What was taken, as lengths and offsets in the target.
    fn taken(&self, pair: &Pair) -> Vec<(u64, u64)> {
        let taken = self.taken.lock().unwrap();
        taken.iter().map(|(len, address)| (*len, address - pair.target.address())).collect()
    }
}

#[test]
fn small_slices_do_not_wait_for_room_for_large_ones() {
    let (pair, hooked, lanes) = Lanes::pair(4 << 20);
    let large = submit(&pair, &[pair.write(0, 4 << 20)]);
    submit(&pair, &[pair.write(0, PAGE)]).wait(soon()).unwrap();
    // Also those of one submission with large ones before and after them.
    let mixed = [pair.write(0, 2 * PAGE), pair.write(0, PAGE), pair.write(0, LARGE), pair.write(0, 1)];
    let grouped: Vec<_> = mixed
        .iter()
        .map(|request| TransferRequest { group: u32::from(request.len <= PAGE), ..*request })
        .collect();
    let mixed = submit(&pair, &grouped);
    mixed.wait_group(1, soon()).unwrap();
    assert!(!large.is_done() && !mixed.is_done());
    lanes.open(&hooked);
    large.wait(soon()).unwrap();
    mixed.wait(soon()).unwrap();
}

#[test]
fn what_is_alike_in_length_goes_by_priority_and_then_in_order() {
    let (pair, hooked, lanes) = Lanes::pair(4 << 20);
    let of = |priority, at: u64, len| TransferRequest { priority, ..pair.write(at * LARGE, len) };
    let batches = [
        submit(&pair, &[of(Priority::Low, 0, LARGE), of(Priority::Medium, 1, LARGE)]),
        submit(&pair, &[of(Priority::Medium, 2, LARGE), of(Priority::Medium, 3, LARGE / 2)]),
        submit(&pair, &[of(Priority::Medium, 4, LARGE), of(Priority::High, 5, LARGE)]),
        submit(&pair, &[of(Priority::Low, 6, PAGE)]),
    ];
    batches[3].wait(soon()).unwrap();
    lanes.open(&hooked);
    batches.iter().for_each(|batch| batch.wait(soon()).unwrap());
    let order: Vec<_> = lanes.taken(&pair).into_iter().map(|(_, offset)| offset / LARGE).collect();
    assert_eq!(order, [6, 5, 1, 2, 3, 4, 0]);
}
