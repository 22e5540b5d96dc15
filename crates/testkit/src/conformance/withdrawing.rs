//! When the owner ends a permission, it has ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use posthorse_core::{Access, Deadline, ErrorKind, FarEnd, Grants, Opcode};

use super::Subject;
use super::pair::{Memory, Pair, Target};
use crate::pattern;

/// Long enough that one is under way whenever the owner looks.
const SIZE: usize = 1 << 20;
const BATCH: usize = 4;
const LEN: usize = BATCH * SIZE;
const ROUNDS: usize = 6;

/// Moves batch after batch between `local` (two batches long) and the target, while `withdraw` ends that permission
/// in the midst of it, then `look`s. Returns after several batches more, each of which was refused.
fn withdraw_in_traffic(
    pair: &Pair<'_>,
    opcode: Opcode,
    (local, target): (&Memory, &Target),
    kinds: &[ErrorKind],
    withdraw: impl FnOnce(),
) {
    let withdrawn = AtomicBool::new(false);
    let before = pair.left.events.completed_count();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut last = None;
            let mut refused = 0;
            for turn in 0.. {
                let half = turn % 2 * LEN;
                let slice =
                    |at: usize| local.slice(opcode, half + at * SIZE, SIZE, target, (at * SIZE) as u64);
                let batch = pair.number((0..BATCH).map(slice).collect());
                let late = withdrawn.load(Ordering::SeqCst);
                pair.left.submit_all(pair.path, &batch).expect("a path that takes slices");
                if let Some((late, batch)) = last.replace((late, batch)) {
                    for end in pair.left.ends_of(&batch) {
                        assert!(
                            !late || end.result.is_err(),
                            "a slice succeeded after the permission had ended"
                        );
                        if let Err(why) = end.result {
                            assert!(kinds.contains(&why.error.kind()), "{why:?}; expected: {kinds:?}");
                            assert_eq!(why.far_end, FarEnd::Quiet, "{why:?}");
                        }
                    }
                    refused += usize::from(late);
                }
                if refused == 3 {
                    break;
                }
            }
            // The last batch is still under way.
            if let Some((_, batch)) = last {
                pair.left.ends_of(&batch);
            }
        });
        pair.left.events.wait_completed(before + 3 * BATCH, pair.left.deadline()).expect("traffic");
        withdraw();
        withdrawn.store(true, Ordering::SeqCst);
    });
}

/// Writes the owner's own bytes where a slice that is under way would write last, then looks at everything: a late
/// write shows even if it is only just late.
fn reuse(memory: &Memory) -> Vec<u8> {
    for end in (SIZE..=LEN).step_by(SIZE) {
        memory.write(end - 64, &[0xcc; 64]);
    }
    memory.bytes()
}

pub(super) fn a_revoked_grant_is_written_no_more(subject: &Subject) {
    let pair = Pair::new(subject);
    if pair.right.capabilities().grants == Grants::Fenced {
        return;
    }
    // Both halves differ everywhere: a batch that arrives late shows, whichever it is.
    let local = pair.left.register(2 * LEN, Access::None, 1);
    for _ in 0..ROUNDS {
        let (remote, target) = pair.lend(LEN, Access::Write, 2);
        let mut then = Vec::new();
        withdraw_in_traffic(&pair, Opcode::Write, (&local, &target), &[ErrorKind::AccessDenied], || {
            pair.right.revoke(target.token).expect("a grant to revoke");
            then = reuse(&remote);
        });
        assert!(remote.bytes() == then, "the memory changed after its grant had been revoked");
    }
    pair.assert_usable();
}

pub(super) fn a_revoked_grant_is_read_no_more(subject: &Subject) {
    const BEFORE: u8 = 0xaa;
    const LATER: u8 = 0xbb;
    let pair = Pair::new(subject);
    if pair.right.capabilities().grants == Grants::Fenced {
        return;
    }
    let local = pair.left.register(2 * LEN, Access::None, 1);
    local.write(0, &[0x11; 2 * LEN]);
    for _ in 0..ROUNDS {
        let (remote, target) = pair.lend(LEN, Access::Read, 2);
        remote.write(0, &[BEFORE; LEN]);
        withdraw_in_traffic(&pair, Opcode::Read, (&local, &target), &[ErrorKind::AccessDenied], || {
            pair.right.revoke(target.token).expect("a grant to revoke");
            // First what a slice that is under way would read last.
            for end in (SIZE..=LEN).step_by(SIZE) {
                remote.write(end - 64, &[LATER; 64]);
            }
            remote.write(0, &[LATER; LEN]);
        });
        let bytes = local.bytes();
        assert!(bytes.contains(&BEFORE), "nothing was read at all");
        assert!(!bytes.contains(&LATER), "what the owner wrote after it had revoked the grant was read");
    }
    pair.assert_usable();
}

pub(super) fn an_unregistered_region_is_touched_no_more(subject: &Subject) {
    let pair = Pair::new(subject);
    let kinds = &[ErrorKind::AccessDenied, ErrorKind::NotRegistered];
    let local = pair.left.register(2 * LEN, Access::None, 1);
    for _ in 0..ROUNDS {
        let (remote, target) = pair.lend(LEN, Access::Write, 2);
        let mut then = Vec::new();
        withdraw_in_traffic(&pair, Opcode::Write, (&local, &target), kinds, || {
            pair.right.unregister(remote.id).expect("a region to unregister");
            then = reuse(&remote);
        });
        assert!(remote.bytes() == then, "the memory changed after it had been unregistered");
    }
    pair.assert_usable();
}

pub(super) fn a_lease_holds_its_grant(subject: &Subject) {
    let pair = Pair::new(subject);
    let memory = pair.right.register(LEN, Access::None, 3);
    let grant = pair.right.grant(&memory, 0..LEN as u64, Access::Read, Some(&pair.left.name));
    let lease = match pair.left.transport.lease(pair.path, &grant) {
        Err(error) if error.kind() == ErrorKind::Unsupported => return,
        lease => lease.expect("a lease of a range that may be read"),
    };
    assert_eq!(pattern::check(3, &crate::memory::read(&*lease, 0, LEN)), None);
    // The owner cannot have it back while it is looked at.
    let soon = Deadline::after(Duration::from_millis(20));
    let revoked = pair.right.transport.revoke(grant.token, soon);
    let revoked = revoked.and_then(|()| pair.right.registry.revoke(grant.token, soon));
    assert_eq!(revoked.expect_err("a lease is held").kind(), ErrorKind::DeadlineExceeded);
    let denied = pair.left.transport.lease(pair.path, &grant).expect_err("a grant that has ended");
    assert_eq!(denied.kind(), ErrorKind::AccessDenied);
    drop(lease);
    pair.right.revoke(grant.token).expect("nobody looks any more");
}
