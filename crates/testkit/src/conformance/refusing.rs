//! The owner of memory decides who touches it.

use posthorse_core::{Access, ErrorKind, FarEnd, Fault, GrantToken, Grants, Opcode, Slice, SliceError};

use super::Subject;
use super::pair::{Memory, Pair, Target};
use crate::pattern;

const LEN: usize = 64 << 10;
/// The granted part.
const START: u64 = 16 << 10;
const END: u64 = 48 << 10;

const DENIED: &[ErrorKind] = &[ErrorKind::AccessDenied];
const OUTSIDE: &[ErrorKind] = &[ErrorKind::OutOfBounds];
/// A token may be looked for before its range is, or after.
const NOWHERE: &[ErrorKind] = &[ErrorKind::NotRegistered, ErrorKind::OutOfBounds];
/// A device that refuses a key does not say why.
const KEY_DENIED: &[ErrorKind] = &[ErrorKind::AccessDenied, ErrorKind::NotRegistered, ErrorKind::OutOfBounds];

/// A slice that must be refused: what is wrong with it, and the kinds of error that say so.
type Trespass = (&'static str, Slice, &'static [ErrorKind]);

fn trespasses(pair: &Pair<'_>, local: &Memory, remote: &Memory) -> Vec<Trespass> {
    let grant = |access, peer: Option<&str>| {
        let grant = pair.right.grant(remote, START..END, access, peer);
        pair.target(&grant, remote)
    };
    let open = grant(Access::ReadWrite, None);
    let (readable, writable) = (grant(Access::Read, None), grant(Access::Write, None));
    let size = END - START;
    let grants = pair.right.capabilities().grants;
    let (outside, nowhere) =
        if grants == Grants::Keyed { (KEY_DENIED, KEY_DENIED) } else { (OUTSIDE, NOWHERE) };
    let mut trespasses = Vec::new();
    for opcode in [Opcode::Write, Opcode::Read] {
        let mut add = |what, target: &Target, at: u64, len: usize, kinds| {
            trespasses.push((what, local.slice(opcode, 0, len, target, at), kinds));
        };
        add("one byte past the end", &open, size - 99, 100, outside);
        add("one byte before the start", &open, u64::MAX, 100, outside);
        add("far away", &open, 1 << 40, 100, nowhere);
        add("around the end of the address space", &open, u64::MAX - 10 - open.address, 100, nowhere);
        if grants == Grants::Checked {
            let GrantToken { handle, secret } = open.token;
            let forged = |token| Target { token, ..open };
            add("another secret", &forged(GrantToken { handle, secret: secret ^ 1 }), 0, 100, DENIED);
            add(
                "another generation",
                &forged(GrantToken { handle: handle ^ (1 << 32), secret }),
                0,
                100,
                DENIED,
            );
            add("a handle that never was", &forged(GrantToken { handle: u64::MAX, secret }), 0, 100, DENIED);
            add(
                "a grant to another peer",
                &grant(Access::ReadWrite, Some("somebody.else:1")),
                0,
                100,
                DENIED,
            );
        }
        if grants == Grants::Fenced {
            continue;
        }
        match opcode {
            Opcode::Read => add("reading what may be written", &writable, 0, 100, DENIED),
            Opcode::Write => add("writing what may be read", &readable, 0, 100, DENIED),
        }
        let revoked = grant(Access::ReadWrite, None);
        pair.right.revoke(revoked.token).expect("a grant to revoke");
        add("a revoked grant", &revoked, 0, 100, DENIED);
    }
    trespasses
}

fn assert_refused(what: &str, slice: &Slice, error: &SliceError, kinds: &[ErrorKind]) {
    let SliceError { error, far_end } = error;
    let what = format!("{what} ({:?}): {error}", slice.opcode);
    assert!(kinds.contains(&error.kind()), "{what}; expected: {kinds:?}");
    assert_eq!(error.fault(), Fault::Request, "{what}");
    assert_eq!(*far_end, FarEnd::Quiet, "{what}");
}

pub(super) fn what_no_grant_covers_is_refused(subject: &Subject) {
    let pair = Pair::new(subject);
    let local = pair.left.register(LEN, Access::None, 1);
    let remote = pair.right.register(LEN, Access::None, 2);
    for (what, slice, kinds) in trespasses(&pair, &local, &remote) {
        let slices = pair.number(vec![slice]);
        let end = pair.left.carry_out(pair.path, &slices).remove(0);
        let error = end.result.expect_err(what);
        assert_refused(what, &slices[0], &error, kinds);
        assert_eq!(pattern::check(2, &remote.bytes()), None, "{what}: the owner's memory was written");
        assert_eq!(pattern::check(1, &local.bytes()), None, "{what}: something was read");
    }
    pair.assert_usable();
}

pub(super) fn a_refusal_among_others_harms_nobody(subject: &Subject) {
    const SIZE: usize = 500;
    let pair = Pair::new(subject);
    let local = pair.left.register(LEN, Access::None, 3);
    let remote = pair.right.register(LEN, Access::None, 4);
    let trespasses = trespasses(&pair, &local, &remote);
    let (lent, target) = pair.lend(trespasses.len() * SIZE, Access::Write, 5);
    // Good and bad by turns, in one batch.
    let mut slices = Vec::new();
    for (turn, (_, bad, _)) in trespasses.iter().enumerate() {
        slices.push(local.slice(Opcode::Write, turn * SIZE, SIZE, &target, (turn * SIZE) as u64));
        slices.push(*bad);
    }
    // Bad reads would land in the source of good writes, if they were not refused.
    let slices = pair.number(slices);
    let ends = pair.left.carry_out(pair.path, &slices);
    for (turn, (what, bad, kinds)) in trespasses.iter().enumerate() {
        ends[2 * turn].result.as_ref().expect("a good slice among bad ones");
        assert_refused(what, bad, ends[2 * turn + 1].result.as_ref().expect_err(what), kinds);
    }
    assert_eq!(pattern::check(3, &lent.bytes()), None);
    assert_eq!(pattern::check(4, &remote.bytes()), None);
}
