//! Whatever ends a slice, it ends once, and what it touched is quiet.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use posthorse_core::{
    Access, Completion, ErrorClass, ErrorKind, FarEnd, Level, Opcode, PathId, Slice, SliceError,
};

use super::Subject;
use super::pair::{Memory, Pair, Side, Target, assert_usable};
use crate::pattern;

const SIZE: usize = 128 << 10;
const COUNT: usize = 48;
const LEN: usize = COUNT * SIZE;
const ROUNDS: u64 = 2;

/// Memory at both ends, and slices that fill one end from the other.
struct Traffic {
    local: Memory,
    remote: Memory,
    slices: Vec<Slice>,
}

impl Traffic {
    fn new(pair: &Pair<'_>, opcode: Opcode) -> Self {
        Self::over(pair.path, pair, opcode)
    }

    fn over(path: PathId, pair: &Pair<'_>, opcode: Opcode) -> Self {
        let local = pair.left.register(LEN, Access::None, 1);
        let (remote, target) = pair.lend_over(path, LEN, Access::ReadWrite, 2);
        let slices = slices(pair, opcode, &local, &target);
        Self { local, remote, slices }
    }

    /// Begins it, and drops the slices for which there was no room.
    fn begin(&mut self, pair: &Pair<'_>, path: PathId) {
        // SAFETY: as in `Side::submit_all`; the memory is held as long as the slices are.
        let taken =
            unsafe { pair.left.transport.submit(path, &self.slices) }.expect("a path that takes slices");
        assert!(taken > 0, "a path without traffic has room");
        self.slices.truncate(taken);
    }

    /// Where the bytes arrive, and what is written there when all of them have.
    fn destination(&self, opcode: Opcode) -> (&Memory, u64) {
        if opcode == Opcode::Write { (&self.remote, 1) } else { (&self.local, 2) }
    }

    /// The slices that succeeded have arrived.
    fn assert_arrived(&self, opcode: Opcode, ends: &[Completion]) {
        let (memory, seed) = self.destination(opcode);
        let (bytes, expected) = (memory.bytes(), pattern::bytes(seed, LEN));
        for (at, _) in ends.iter().enumerate().filter(|(_, end)| end.result.is_ok()) {
            let range = at * SIZE..(at + 1) * SIZE;
            assert!(bytes[range.clone()] == expected[range], "slice {at} was reported and has not arrived");
        }
    }
}

fn slices(pair: &Pair<'_>, opcode: Opcode, local: &Memory, target: &Target) -> Vec<Slice> {
    let slice = |at: usize| local.slice(opcode, at * SIZE, SIZE, target, (at * SIZE) as u64);
    pair.number((0..COUNT).map(slice).collect())
}

/// The ends that are failures.
fn failures(ends: &[Completion]) -> impl Iterator<Item = &SliceError> {
    ends.iter().filter_map(|end| end.result.as_ref().err())
}

fn assert_failures(ends: &[Completion], kinds: &[ErrorKind]) {
    for why in failures(ends) {
        assert!(kinds.contains(&why.error.kind()), "{why:?}; expected: {kinds:?}");
    }
}

fn is_quiet(ends: &[Completion]) -> bool {
    failures(ends).all(|why| why.far_end == FarEnd::Quiet)
}

/// Begins traffic and cancels slices of it. How many are left to cancel by then is the scheduler's choice, so that is
/// done over until some were, or often enough.
fn cancel_in_traffic(pair: &Pair<'_>, opcode: Opcode, which: fn(u64) -> bool) {
    for _ in 0..ROUNDS * 8 {
        let mut traffic = Traffic::new(pair, opcode);
        traffic.begin(pair, pair.path);
        pair.left.transport.cancel(pair.path, &mut |token| which(token));
        let ends = pair.left.ends_of(&traffic.slices);
        assert_failures(&ends, &[ErrorKind::Cancelled]);
        assert!(is_quiet(&ends), "what was not posted touches nothing: {ends:?}");
        for end in ends.iter().filter(|end| !which(end.token)) {
            end.result.as_ref().expect("a slice that was not named");
        }
        traffic.assert_arrived(opcode, &ends);
        if failures(&ends).next().is_some() {
            let then = traffic.destination(opcode).0.bytes();
            pair.assert_usable();
            assert!(traffic.destination(opcode).0.bytes() == then, "a cancelled slice went on");
            break;
        }
    }
    // Nothing is left to name.
    pair.left.transport.cancel(pair.path, &mut |token| panic!("{token} has ended"));
}

pub(super) fn cancelling_ends_what_it_names(subject: &Subject) {
    let pair = Pair::new(subject);
    for opcode in [Opcode::Write, Opcode::Read] {
        cancel_in_traffic(&pair, opcode, |_| true);
    }
}

pub(super) fn cancelling_spares_the_rest(subject: &Subject) {
    let pair = Pair::new(subject);
    for opcode in [Opcode::Write, Opcode::Read] {
        cancel_in_traffic(&pair, opcode, |token| token % 2 == 1);
    }
}

/// Ends traffic by `end`, over and over, and shows that it has ended and that another path can be had.
fn assert_ends(pair: &Pair<'_>, end: impl Fn(PathId)) {
    let mut seen = vec![pair.path];
    let mut path = pair.path;
    for round in 0..ROUNDS {
        for opcode in [Opcode::Write, Opcode::Read] {
            let mut traffic = Traffic::over(path, pair, opcode);
            traffic.begin(pair, path);
            end(path);
            let ends = pair.left.ends_of(&traffic.slices);
            assert_failures(&ends, &[ErrorKind::Flushed, ErrorKind::PathFailed]);
            traffic.assert_arrived(opcode, &ends);
            // The near end is quiet, and is used for something else at once.
            let seed = 10 + round;
            traffic.local.fill(seed);
            let then = traffic.remote.bytes();
            // SAFETY: as in `Side::submit_all`; no slice is taken.
            let refused = unsafe { pair.left.transport.submit(path, &traffic.slices[..1]) };
            refused.expect_err("a path that was fenced is down");

            path = pair.left.connect(&pair.right.describe());
            assert!(!seen.contains(&path), "path {path} was used before");
            seen.push(path);
            assert_usable(&pair.left, path, &pair.right);
            assert_eq!(pattern::check(seed, &traffic.local.bytes()), None, "the near end was not quiet");
            if is_quiet(&ends) {
                assert!(traffic.remote.bytes() == then, "the far end was said to be quiet");
            }
        }
    }
}

pub(super) fn fencing_ends_everything(subject: &Subject) {
    let pair = Pair::new(subject);
    assert_ends(&pair, |path| pair.left.transport.fence(path));
    // Once more does nothing.
    pair.left.transport.fence(pair.path);
}

pub(super) fn disconnecting_ends_everything(subject: &Subject) {
    let pair = Pair::new(subject);
    assert_ends(&pair, |path| pair.left.transport.disconnect(path));
    pair.left.transport.disconnect(pair.path);
}

/// Stops a side's transport on another thread, so that one which hangs fails the test rather than hang it.
fn stop(side: &Side<'_>) {
    let (tell, told) = mpsc::channel();
    let transport = Arc::clone(&side.transport);
    thread::spawn(move || {
        transport.stop();
        // Nobody listens any more when it took too long.
        let _ = tell.send(());
    });
    let patience = side.deadline().remaining(Instant::now()).unwrap_or_default();
    told.recv_timeout(patience).expect("a transport that stops");
}

pub(super) fn stopping_ends_everything(subject: &Subject) {
    for opcode in [Opcode::Write, Opcode::Read] {
        let pair = Pair::new(subject);
        let mut traffic = Traffic::new(&pair, opcode);
        traffic.begin(&pair, pair.path);
        stop(&pair.left);
        let ended = |slice: &Slice| pair.left.events.completion(slice.token);
        let ends: Vec<_> =
            traffic.slices.iter().map(|slice| ended(slice).expect("an end before the stop's")).collect();
        assert_failures(&ends, &[ErrorKind::Flushed, ErrorKind::Closed, ErrorKind::PathFailed]);
        traffic.assert_arrived(opcode, &ends);
        traffic.local.fill(10);
        stop(&pair.left);
        // SAFETY: as in `Side::submit_all`; no slice is taken.
        let refused = unsafe { pair.left.transport.submit(pair.path, &traffic.slices[..1]) };
        refused.expect_err("a transport that was stopped takes no slices");
        pair.left.transport.connect(&pair.right.describe(), pair.left.deadline()).expect_err("nor connects");
        stop(&pair.right);
        assert_eq!(pattern::check(10, &traffic.local.bytes()), None, "the near end was not quiet");
    }
}

pub(super) fn a_peer_that_stops_ends_everything(subject: &Subject) {
    for opcode in [Opcode::Write, Opcode::Read] {
        let pair = Pair::new(subject);
        let mut traffic = Traffic::new(&pair, opcode);
        traffic.begin(&pair, pair.path);
        stop(&pair.right);
        // Its memory is its own again.
        let then = traffic.remote.bytes();
        let ends = pair.left.ends_of(&traffic.slices);
        for why in failures(&ends) {
            assert!(
                matches!(why.error.class(), ErrorClass::Peer | ErrorClass::Path | ErrorClass::Time),
                "{why:?}"
            );
        }
        if opcode == Opcode::Read {
            traffic.assert_arrived(opcode, &ends);
        }
        let later = pair.number(vec![Slice { level: Level::Sent, ..traffic.slices[0] }]);
        // SAFETY: as in `Side::submit_all`; the memory is held until the slice has ended.
        let later_taken = unsafe { pair.left.transport.submit(pair.path, &later) };
        if later_taken.is_ok_and(|taken| taken == 1) {
            pair.left.ends_of(&later)[0].result.as_ref().expect_err("nobody is there");
        }
        assert!(traffic.remote.bytes() == then, "memory of a transport that had stopped was written");
    }
}
