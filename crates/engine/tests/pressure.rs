//! What an engine does when a transport has no room.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::sync::{Arc, Mutex};

use posthorse_core::{
    Completion, Error, ErrorKind, FarEnd, Level, PathId, Slice, SliceError, TransferRequest, TransportEvents,
};
use posthorse_engine::{Batch, EngineConfig, SubmitOptions, TransferEngine};
use support::hooked::Hooked;
use support::{Pair, World, soon};

const PAGE: u64 = 4096;

fn pair(len: usize, hook: impl FnOnce(&mut Hooked)) -> (Pair, Arc<Hooked>) {
    let world = World::default();
    let mut hooked = Hooked::new(world.hub.transport(), "memory");
    hook(&mut hooked);
    let hooked = Arc::new(hooked);
    let config = EngineConfig { slice_bytes: PAGE, ..EngineConfig::default() };
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
    let (pair, _) = pair(1 << 20, |hooked| {
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
    let (pair, hooked) = pair(PAGE as usize, |hooked| {
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
