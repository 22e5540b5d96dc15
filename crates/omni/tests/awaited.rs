//! Gets that are awaited: what waits in them holds no thread, ends at its deadline, and is given up when it is dropped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(unreachable_pub)]
mod common;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use common::{Pair, assert_whole, edge, eventually, soon};
use posthorse_core::{Deadline, ErrorKind, Result};
use posthorse_omni::{FollowOptions, GetOptions, Received, Source};

type Get<'a> = Pin<Box<dyn Future<Output = Result<Received>> + 'a>>;

/// All room in the receiver's pool.
fn all(pair: &Pair) -> posthorse_buffer::ManagedBuffer {
    pair.receiver.alloc(pair.receiver.health().pool.space.largest_free, soon()).unwrap()
}

/// Polls until it is so.
fn poll_until(what: &str, gets: &mut [Get<'_>], mut is_so: impl FnMut() -> bool) {
    let mut context = Context::from_waker(Waker::noop());
    eventually(what, || {
        gets.iter_mut().for_each(|get| assert!(get.as_mut().poll(&mut context).is_pending()));
        is_so()
    });
}

#[test]
fn a_get_that_is_dropped_while_it_waits_for_room_leaves_the_payload() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        pair.put("k", b"x");
        let room = all(&pair);
        let edge = edge();
        let get: Get<'_> = Box::pin(pair.receiver.get_async(&edge, "k", GetOptions::until(soon())));
        let mut gets = [get];
        poll_until("the wait", &mut gets, || pair.receiver.health().pool.waiting == 1);
        drop(gets);
        eventually("the end of its wait", || pair.receiver.health().pool.waiting == 0);
        eventually("the end of its claim", || pair.sender.health().offers.claims == 0);
        drop(room);
        assert_eq!(pair.get("k").unwrap().bytes().unwrap(), b"x", "{transport}");
        pair.assert_whole();
    }
}

#[test]
fn gets_that_wait_for_room_hold_up_nobody_else() {
    const MANY: usize = 100;
    let pair = Pair::by("shm");
    let edge = edge();
    let keys: Vec<String> = (0..=MANY).map(|number| format!("k{number}")).collect();
    keys.iter().for_each(|key| pair.put(key, b"x"));
    let room = all(&pair);
    let get = |key: &String| -> Get<'_> {
        let key = key.clone();
        let (receiver, edge) = (&pair.receiver, &edge);
        Box::pin(async move { receiver.get_async(edge, &key, GetOptions::until(soon())).await })
    };
    let mut gets: Vec<Get<'_>> = keys[..MANY].iter().map(get).collect();
    poll_until("the waits", &mut gets, || pair.receiver.health().pool.waiting == MANY);
    // Room is waited for until the deadline and no longer.
    let late = GetOptions::until(Deadline::after(Duration::from_millis(100)));
    let late = pollster::block_on(pair.receiver.get_async(&edge, &keys[MANY], late)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    assert!(late.to_string().contains("free"), "it does not say how much is free: {late}");
    // What needs no room comes, from a producer whose name has to be resolved.
    let (_, port) = pair.sender.address().unwrap();
    let lease =
        GetOptions { lease: true, source: Source::At("localhost", port), ..GetOptions::until(soon()) };
    let leased = pollster::block_on(pair.receiver.get_async(&edge, &keys[MANY], lease)).unwrap();
    assert!(leased.is_leased());
    assert_eq!(pair.receiver.health().pool.waiting, MANY);
    drop((gets, leased, room));
    eventually("the end of their claims", || pair.sender.health().offers.claims == 0);
    assert_eq!(pair.sender.health().offers.offers, MANY, "all but what was leased");
    assert_whole(&pair.receiver);
}

#[test]
fn a_stream_that_is_dropped_while_it_waits_for_room_waits_no_more() {
    let pair = Pair::by("shm");
    let room = all(&pair);
    let mut sending = pair.sender.open_stream(&edge(), "s").unwrap();
    sending.send(&b"chunk"[..], soon()).unwrap();
    let receiving = pair.receiver.follow_stream(&edge(), "s", FollowOptions::default()).unwrap();
    eventually("the wait", || pair.receiver.health().pool.waiting == 1);
    drop(receiving);
    eventually("the end of its wait", || pair.receiver.health().pool.waiting == 0);
    drop((room, sending));
    pair.assert_whole();
}
