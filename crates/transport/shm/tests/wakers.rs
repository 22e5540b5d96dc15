//! What a waker may do: one that is called from within an event may end the very thing that reports it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use common::{Node, Registered, config, slice};
use posthorse_core::{Access, Deadline, ErrorKind, GrantDesc, HostView, Opcode, PathId, Slice, Transport};
use posthorse_shm::ShmConfig;

const LEN: usize = 4096;

/// What is called from within an event.
type Ending = Box<dyn FnOnce() + Send>;

/// Two nodes and a path between them.
struct Pair {
    a: Arc<Node>,
    b: Arc<Node>,
    path: PathId,
    grant: GrantDesc,
    _region: Registered,
    source: Arc<Vec<u8>>,
}

impl Pair {
    fn new(config: ShmConfig) -> Self {
        let (a, b) = (Arc::new(Node::with("a:1", config, None)), Arc::new(Node::new("b:1")));
        let region = b.shared(LEN);
        let grant = b.grant_all(&region, Access::Write);
        let path = a.connect(&b);
        let pair = Self { a, b, path, grant, _region: region, source: Arc::new(vec![1; LEN]) };
        // From here on the region is mapped: slices may be copied where they are submitted.
        pair.a.run(path, pair.slice(0)).unwrap();
        pair
    }

    /// All copies are left to one copy thread, and to those who help.
    fn queued() -> Self {
        Self::new(ShmConfig { inline_bytes: 0, copy_threads: 1, ..config() })
    }

    fn slice(&self, token: u64) -> Slice {
        slice(token, Opcode::Write, HostView::of(&self.source), &self.grant, 0)
    }

    /// Every way to end the path, and its name.
    fn endings(&self) -> [(&'static str, Ending); 3] {
        let [a, b, c] = [0; 3].map(|_| Arc::clone(&self.a));
        let path = self.path;
        [
            ("stop", Box::new(move || a.transport.stop())),
            ("disconnect", Box::new(move || b.transport.disconnect(path))),
            ("fence", Box::new(move || c.transport.fence(path))),
        ]
    }
}

/// For each way to end the path: has `act` report a completion, and the path ended from within.
fn each_ending(make: fn() -> Pair, act: fn(&Pair)) {
    for which in 0..3 {
        let pair = make();
        let (name, ending) = pair.endings().into_iter().nth(which).unwrap();
        let (tell, ended) = channel();
        pair.a.events.wake(move || {
            ending();
            let _ = tell.send(());
        });
        act(&pair);
        let waited = ended.recv_timeout(Duration::from_secs(60));
        assert!(waited.is_ok(), "{name} waits for itself");
        pair.a.events.completion(1).result.unwrap();
        let error = pair.a.submit(pair.path, &[pair.slice(9)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PathFailed, "{name}");
    }
}

/// On another thread, so that a test whose thread hangs ends all the same.
fn apart(work: impl FnOnce() + Send + 'static) {
    std::thread::spawn(work);
}

#[test]
fn a_waker_on_a_copy_thread_may_end_what_calls_it() {
    each_ending(Pair::queued, |pair| pair.a.submit(pair.path, &[pair.slice(1)]).unwrap());
}

#[test]
fn a_waker_on_a_submitting_thread_may_end_what_calls_it() {
    each_ending(
        || Pair::new(config()),
        |pair| {
            let (a, path, slice) = (Arc::clone(&pair.a), pair.path, pair.slice(1));
            apart(move || a.submit(path, &[slice]).unwrap());
        },
    );
}

#[test]
fn a_waker_on_a_helping_thread_may_end_what_calls_it() {
    let helped = || {
        let pair = Pair::queued();
        // The one copy thread is busy with a waker until there is help.
        let (release, busy) = (channel::<()>(), channel());
        pair.a.events.wake(move || {
            busy.0.send(()).unwrap();
            let _ = release.1.recv_timeout(Duration::from_secs(60));
        });
        pair.a.submit(pair.path, &[pair.slice(7)]).unwrap();
        busy.1.recv_timeout(Duration::from_secs(60)).unwrap();
        (pair, release.0)
    };
    for which in 0..3 {
        let (pair, release) = helped();
        let (name, ending) = pair.endings().into_iter().nth(which).unwrap();
        let (tell, ended): (_, Receiver<&str>) = channel();
        pair.a.events.wake(move || {
            release.send(()).unwrap();
            ending();
            tell.send(name).unwrap();
        });
        pair.a.submit(pair.path, &[pair.slice(1)]).unwrap();
        let a = Arc::clone(&pair.a);
        apart(move || assert!(a.transport.help(), "nobody else can have copied it"));
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(name), "it waits for itself");
        pair.a.events.completion(1).result.unwrap();
        pair.a.events.completion(7).result.unwrap();
    }
}

#[test]
fn a_waker_that_takes_its_time_does_not_hold_up_other_slices() {
    let pair = Pair::new(ShmConfig { inline_bytes: 0, copy_threads: 2, spin_us: 0, ..config() });
    let (release, busy) = (channel::<()>(), channel());
    pair.a.events.wake(move || {
        busy.0.send(()).unwrap();
        let _ = release.1.recv();
    });
    pair.a.submit(pair.path, &[pair.slice(1)]).unwrap();
    busy.1.recv_timeout(Duration::from_secs(60)).unwrap();
    // One copy thread is held up, and nobody helps.
    pair.a.submit(pair.path, &[pair.slice(2)]).unwrap();
    pair.a.events.completion(2).result.unwrap();
    drop(release.0);
    pair.a.events.completion(1).result.unwrap();
}

#[test]
fn a_lease_from_within_an_event_is_of_what_is_mapped_or_refused_at_once() {
    let pair = Pair::queued();
    let there = pair.b.grant_all(&pair._region, Access::Read);
    let other = pair.b.shared(LEN);
    let other = pair.b.grant_all(&other, Access::Read);
    // On the thread that hears the peer, and on the one that maps what arrives.
    let acts: [fn(&Pair); 2] = [
        |pair| pair.a.transport.notify(pair.path, 1, b"x").unwrap(),
        |pair| pair.a.submit(pair.path, &[pair.slice(1)]).unwrap(),
    ];
    for act in acts {
        let (a, path, grants) = (Arc::clone(&pair.a), pair.path, [there.clone(), other.clone()]);
        let (tell, told) = channel();
        pair.a.events.wake(move || {
            let lease = |grant| a.transport.lease(path, grant).map(drop).map_err(|error| error.kind());
            tell.send(grants.each_ref().map(lease)).unwrap();
        });
        act(&pair);
        let leases = told.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(leases, [Ok(()), Err(ErrorKind::Busy)]);
        pair.a.events.completion(1).result.unwrap();
    }
    drop(pair.a.transport.lease(pair.path, &other).unwrap());
}

#[test]
fn wakers_that_end_each_others_paths_do_not_wait_for_each_other() {
    let pair = Pair::new(ShmConfig { inline_bytes: 0, copy_threads: 2, ..config() });
    let paths = [pair.path, pair.a.connect(&pair.b)];
    let both = Arc::new(Barrier::new(2));
    let (begin, begun) = channel();
    let (tell, ended) = channel();
    for (path, other) in [(paths[0], paths[1]), (paths[1], paths[0])] {
        let (a, both, begin, tell) = (Arc::clone(&pair.a), Arc::clone(&both), begin.clone(), tell.clone());
        pair.a.events.wake(move || {
            begin.send(()).unwrap();
            both.wait();
            a.transport.disconnect(other);
            tell.send(()).unwrap();
        });
        pair.a.submit(path, &[pair.slice(1)]).unwrap();
        // One thread at a time, or it would take both.
        begun.recv_timeout(Duration::from_secs(60)).unwrap();
    }
    for _ in paths {
        ended.recv_timeout(Duration::from_secs(60)).expect("they wait for each other");
    }
}

#[test]
fn whoever_is_not_in_an_event_waits_until_all_is_reported() {
    // Where they are submitted as well as on a copy thread.
    for inline_bytes in [0, LEN] {
        let pair = Pair::new(ShmConfig { inline_bytes, copy_threads: 1, ..config() });
        let (a, path, probe) = (Arc::clone(&pair.a), pair.path, pair.slice(9));
        let (busy, reported) = (channel(), Arc::new(AtomicBool::new(false)));
        pair.a.events.wake({
            let reported = Arc::clone(&reported);
            move || {
                busy.0.send(()).unwrap();
                // Nothing is taken once the path is being ended.
                let empty = &[probe][..0];
                // SAFETY: no memory is handed over.
                while unsafe { a.transport.submit(path, empty) }.is_ok() {
                    std::thread::yield_now();
                }
                reported.store(true, Ordering::SeqCst);
            }
        });
        let (a, write) = (Arc::clone(&pair.a), pair.slice(1));
        apart(move || a.submit(path, &[write]).unwrap());
        busy.1.recv_timeout(Duration::from_secs(60)).unwrap();
        pair.a.transport.disconnect(path);
        assert!(reported.load(Ordering::SeqCst), "inline_bytes {inline_bytes}");
    }
}

#[test]
fn whoever_stops_what_another_is_stopping_returns_when_it_is_stopped() {
    let pair = Pair::queued();
    let (release, busy) = (channel::<()>(), channel());
    let is_over = Arc::new(AtomicBool::new(false));
    pair.a.events.wake({
        let (a, is_over) = (Arc::clone(&pair.a), Arc::clone(&is_over));
        move || {
            busy.0.send(()).unwrap();
            let _ = release.1.recv_timeout(Duration::from_secs(60));
            // From within an event nobody waits, whoever stops it.
            a.transport.stop();
            is_over.store(true, Ordering::SeqCst);
        }
    });
    pair.a.submit(pair.path, &[pair.slice(1)]).unwrap();
    busy.1.recv_timeout(Duration::from_secs(60)).unwrap();
    let stop = || {
        let (a, is_over) = (Arc::clone(&pair.a), Arc::clone(&is_over));
        std::thread::spawn(move || {
            a.transport.stop();
            is_over.load(Ordering::SeqCst)
        })
    };
    let first = stop();
    // It has begun when nothing is taken any more.
    // SAFETY: no memory is handed over.
    while unsafe { pair.a.transport.submit(pair.path, &[]) }.is_ok() {
        std::thread::yield_now();
    }
    let second = stop();
    // Time for a second that does not wait.
    std::thread::sleep(Duration::from_millis(50));
    release.0.send(()).unwrap();
    assert!(first.join().unwrap() && second.join().unwrap());
    // Each life has an end of its own.
    for _ in 0..2 {
        pair.a.start_again().unwrap();
        assert_eq!(pair.a.start_again().unwrap_err().kind(), ErrorKind::Busy);
        pair.a.transport.stop();
    }
}

#[test]
fn no_grant_is_held_while_completions_are_reported() {
    let pair = Pair::new(config());
    let (b, token) = (Arc::clone(&pair.b), pair.grant.token);
    let (tell, revoked) = channel();
    pair.a.events.wake(move || {
        tell.send(b.transport.revoke(token, Deadline::after(Duration::from_secs(10)))).unwrap();
    });
    // More than are reported at once: the first are, while others are still to be copied.
    let small = HostView::of(&pair.source).slice(0, 8).unwrap();
    let slices: Vec<_> = (1..200).map(|n| slice(n, Opcode::Write, small, &pair.grant, 0)).collect();
    pair.a.submit(pair.path, &slices).unwrap();
    revoked.recv_timeout(Duration::from_secs(60)).unwrap().unwrap();
    pair.a.events.completion(1).result.unwrap();
    let refused = pair.a.events.completion(199).result.unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::AccessDenied);
}
