//! What was taken is given back.

use posthorse_core::{Access, Opcode};

use super::Subject;
use super::pair::Pair;
use crate::LeakCheck;

pub(super) fn nothing_leaks_from_registering(subject: &Subject) {
    const LEN: usize = 20_000;
    let pair = Pair::new(subject);
    let cycle = || {
        let local = pair.left.register(LEN, Access::Read, 1);
        let (remote, target) = pair.lend(LEN, Access::ReadWrite, 2);
        pair.carry_out(vec![local.slice(Opcode::Write, 0, LEN, &target, 0)]);
        pair.right.revoke(target.token).expect("a grant to revoke");
        pair.right.unregister(remote.id).expect("a region to unregister");
        pair.left.unregister(local.id).expect("a region to unregister");
    };
    // What is opened at first use and kept is no leak.
    (0..10).for_each(|_| cycle());
    let check = LeakCheck::begin();
    (0..200).for_each(|_| cycle());
    check.assert_clean(pair.left.deadline());
    for side in [&pair.left, &pair.right] {
        let stats = side.registry.stats();
        assert_eq!((stats.regions, stats.grants, stats.fencing), (0, 0, 0));
    }
}

pub(super) fn nothing_leaks_from_stopping(subject: &Subject) {
    let life = || Pair::new(subject).assert_usable();
    life();
    let check = LeakCheck::begin();
    (0..5).for_each(|_| life());
    check.assert_clean(subject.deadline());
}
