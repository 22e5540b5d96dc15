//! Who is found, and who is not and why.

use std::collections::BTreeSet;

use posthorse_core::{
    Access, Attributes, Error, ErrorClass, ErrorKind, Opcode, PathId, PathState, Result, SegmentDesc,
};
use serde_json::json;

use super::Subject;
use super::pair::{Pair, Side, assert_usable, names};
use crate::ControlHub;

/// Why a peer cannot be reached: the error, or that of each path.
fn reasons(side: &Side<'_>, peer: &SegmentDesc) -> Vec<Error> {
    let down = |state| match state {
        PathState::Down(why) => why,
        PathState::Up => panic!("a path to a peer that cannot be reached is up"),
    };
    match side.transport.connect(peer, side.deadline()) {
        Err(why) => vec![why],
        Ok(paths) => {
            assert!(!paths.is_empty(), "no path, and no reason");
            paths.into_iter().map(|path| down(path.state)).collect()
        }
    }
}

pub(super) fn it_describes_itself(subject: &Subject) {
    let pair = Pair::new(subject);
    assert!(!pair.left.transport.name().is_empty());
    assert_eq!(pair.left.transport.name(), pair.right.transport.name());
    let capabilities = pair.left.capabilities();
    assert!(capabilities.max_slice >= 4096, "a slice of one page can be taken: {capabilities:?}");
    assert!(capabilities.preferred_slice > 0, "{capabilities:?}");
    assert!(capabilities.preferred_slice <= capabilities.max_slice, "{capabilities:?}");
    let paths = pair.left.transport.connect(&pair.right.describe(), pair.left.deadline()).expect("a peer");
    let ids: BTreeSet<_> = paths.iter().map(|path| path.id).collect();
    assert_eq!(ids.len(), paths.len(), "paths have numbers of their own: {paths:?}");
    for path in paths {
        assert!(!path.local_device.is_empty() && !path.remote_device.is_empty(), "{path:?}");
    }
}

pub(super) fn a_peer_without_it_is_named(subject: &Subject) {
    let pair = Pair::new(subject);
    let mut peer = pair.right.describe();
    peer.name = "elsewhere.test:9".into();
    peer.transports = Attributes::new();
    for why in reasons(&pair.left, &peer) {
        assert!(matches!(why.kind(), ErrorKind::NoPath | ErrorKind::Unsupported), "{why}");
        assert!(why.to_string().contains("elsewhere.test:9"), "the peer is not named: {why}");
    }
    for nonsense in [json!(null), json!(7), json!("x"), json!([[]]), json!({}), json!({"a": {"b": [null]}})] {
        peer.transports.insert(pair.left.transport.name().to_owned(), nonsense);
        reasons(&pair.left, &peer);
    }
    pair.assert_usable();
}

pub(super) fn a_peer_that_stopped_is_named(subject: &Subject) {
    let pair = Pair::new(subject);
    let peer = pair.right.describe();
    pair.right.transport.stop();
    pair.control.hang_up(&pair.right.name);
    for why in reasons(&pair.left, &peer) {
        assert!(matches!(why.class(), ErrorClass::Peer | ErrorClass::Path), "{why}");
        assert!(why.to_string().contains(&peer.name), "the peer is not named: {why}");
    }
}

pub(super) fn fingerprints_must_agree(subject: &Subject) {
    let control = ControlHub::new();
    let (left, right) = names();
    let left = Side::start(subject, &control, &left, Some("layout-a"));
    let right = Side::start(subject, &control, &right, Some("layout-b"));
    for why in reasons(&left, &right.describe()) {
        assert_eq!(why.kind(), ErrorKind::FingerprintMismatch, "{why}");
        assert!(why.to_string().contains("layout-a") && why.to_string().contains("layout-b"), "{why}");
    }
}

pub(super) fn a_peer_comes_back_under_its_name(subject: &Subject) {
    let Pair { left, right, path, control } = Pair::new(subject);
    assert_usable(&left, path, &right);
    let name = right.name.clone();
    drop(right);
    let right = Side::start(subject, &control, &name, None);
    let again = left.connect(&right.describe());
    assert_ne!(again, path, "numbers of paths are never used twice");
    assert_usable(&left, again, &right);
}

pub(super) fn unknown_paths_are_refused(subject: &Subject) {
    let pair = Pair::new(subject);
    let nowhere = PathId(u64::MAX - 5);
    let refused = |result: Result<()>| drop(result.expect_err("there is no such path"));
    let local = pair.left.register(100, Access::None, 1);
    let (_remote, target) = pair.lend(100, Access::Write, 2);
    let slices = pair.number(vec![local.slice(Opcode::Write, 0, 100, &target, 0)]);
    // SAFETY: as in `Side::submit_all`; no slice is taken.
    refused(unsafe { pair.left.transport.submit(nowhere, &slices) }.map(drop));
    refused(pair.left.transport.notify(nowhere, pair.left.tokens(1).start, b"x"));
    pair.left.transport.cancel(nowhere, &mut |_| true);
    pair.left.transport.fence(nowhere);
    pair.left.transport.disconnect(nowhere);
    pair.assert_usable();
}
