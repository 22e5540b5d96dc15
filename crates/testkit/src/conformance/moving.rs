//! Bytes arrive, all of them, and nowhere else.

use std::thread;

use posthorse_core::{Access, Checksum, Level, Opcode};

use super::Subject;
use super::pair::{Pair, assert_usable};
use crate::pattern;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Around the sizes at which transports change their ways: words, pages, buffers, chunks.
const SIZES: [usize; 20] = [
    1,
    2,
    7,
    8,
    9,
    63,
    64,
    65,
    1000,
    4095,
    4096,
    4097,
    65_535,
    65_537,
    262_143,
    262_145,
    MIB - 1,
    MIB + 3,
    4 * MIB + 1,
    16 * MIB,
];

pub(super) fn every_size_is_moved_both_ways(subject: &Subject) {
    let pair = Pair::new(subject);
    let longest = pair.left.capabilities().max_slice;
    // Room before and behind, which must stay as it was.
    const MARGIN: usize = 5000;
    let len = 16 * MIB + 2 * MARGIN;
    let local = pair.left.register(len, Access::None, 0);
    let (remote, target) = pair.lend(len, Access::ReadWrite, 0);
    for (round, size) in SIZES.into_iter().filter(|size| *size as u64 <= longest).enumerate() {
        // Odd and even, near and far from each other's alignment.
        let (here, there) = (MARGIN + round * 3, MARGIN + 1 + round * 7 % 64);
        let seed = 100 + 2 * round as u64;
        let around = |offset: usize, size: usize| offset - MARGIN..(offset + size + MARGIN - 200).min(len);
        for (opcode, seed) in [(Opcode::Write, seed), (Opcode::Read, seed + 1)] {
            let (from, to) = match opcode {
                Opcode::Write => ((&local, here), (&remote, there)),
                Opcode::Read => ((&remote, there), (&local, here)),
            };
            let range = around(to.1, size);
            let mut expected = to.0.read(range.start, range.len());
            from.0.write(from.1, &pattern::bytes(seed, size));
            pair.carry_out(vec![local.slice(opcode, here, size, &target, there as u64)]);
            expected[MARGIN..MARGIN + size].copy_from_slice(&pattern::bytes(seed, size));
            let got = to.0.read(range.start, range.len());
            let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            assert_eq!(
                wrong.map(|at| at as i64 - MARGIN as i64),
                None,
                "first wrong byte: {opcode:?} of {size}"
            );
        }
    }
}

pub(super) fn every_level_is_reached(subject: &Subject) {
    let pair = Pair::new(subject);
    let furthest = pair.left.capabilities().level;
    assert!(furthest >= Level::Placed, "with its own kind a transport reports where the bytes are");
    let local = pair.left.register(KIB, Access::None, 5);
    let (_remote, target) = pair.lend(KIB, Access::ReadWrite, 6);
    for level in [Level::Sent, Level::Placed, Level::Visible].into_iter().filter(|level| *level <= furthest) {
        for opcode in [Opcode::Write, Opcode::Read] {
            let mut slices = pair.number(vec![local.slice(opcode, 0, KIB, &target, 0)]);
            slices[0].level = level;
            let reached =
                pair.left.carry_out(pair.path, &slices).remove(0).result.expect("a slice that succeeds");
            assert!(reached >= level, "{opcode:?}: {reached:?} was reached, {level:?} asked for");
        }
    }
}

pub(super) fn more_than_the_queue_holds_is_moved(subject: &Subject) {
    const COUNT: usize = 30_000;
    const SIZE: usize = 300;
    let pair = Pair::new(subject);
    let local = pair.left.register(COUNT * SIZE, Access::None, 7);
    let (remote, target) = pair.lend(COUNT * SIZE, Access::ReadWrite, 8);
    let slices = |opcode| {
        let slice = |at: usize| local.slice(opcode, at * SIZE, SIZE, &target, (at * SIZE) as u64);
        (0..COUNT).map(slice).collect()
    };
    pair.carry_out(slices(Opcode::Write));
    assert_eq!(pattern::check(7, &remote.bytes()), None);
    remote.fill(9);
    pair.carry_out(slices(Opcode::Read));
    assert_eq!(pattern::check(9, &local.bytes()), None);
}

pub(super) fn checksums_of_good_data_agree(subject: &Subject) {
    let pair = Pair::new(subject);
    if !pair.left.capabilities().checksum {
        return;
    }
    let local = pair.left.register(3 * MIB, Access::None, 10);
    let (remote, target) = pair.lend(3 * MIB, Access::ReadWrite, 11);
    for checksum in [Checksum::Sampled, Checksum::Full] {
        for size in [1, 3, 64, 4096, 100_001, 3 * MIB] {
            for opcode in [Opcode::Write, Opcode::Read] {
                let mut slice = local.slice(opcode, 0, size, &target, 0);
                slice.checksum = checksum;
                remote.write(0, &[0]);
                pair.carry_out(vec![slice]);
                assert_eq!(local.read(0, size), remote.read(0, size), "{checksum:?} {opcode:?} of {size}");
            }
        }
    }
}

pub(super) fn many_threads_share_a_path(subject: &Subject) {
    const THREADS: usize = 8;
    const COUNT: usize = 500;
    const SIZE: usize = 1000;
    const SHARE: usize = COUNT * SIZE;
    let pair = Pair::new(subject);
    let local = pair.left.register(THREADS * SHARE, Access::None, 12);
    let (remote, target) = pair.lend(THREADS * SHARE, Access::Write, 13);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pair, local, target) = (&pair, &local, &target);
            scope.spawn(move || {
                for first in (0..COUNT).step_by(50) {
                    let at = |index: usize| thread * SHARE + index * SIZE;
                    let slice = |index| local.slice(Opcode::Write, at(index), SIZE, target, at(index) as u64);
                    pair.carry_out((first..first + 50).map(slice).collect());
                }
            });
        }
    });
    assert_eq!(pattern::check(12, &remote.bytes()), None);
}

pub(super) fn both_sides_move_at_once(subject: &Subject) {
    const LEN: usize = 4 * MIB;
    let pair = Pair::new(subject);
    let back = pair.right.connect(&pair.left.describe());
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..5 {
                assert_usable(&pair.right, back, &pair.left);
            }
        });
        let local = pair.left.register(LEN, Access::None, 14);
        let (remote, target) = pair.lend(LEN, Access::ReadWrite, 15);
        for round in 0..5 {
            local.fill(16 + round);
            pair.carry_out(vec![local.slice(Opcode::Write, 0, LEN, &target, 0)]);
            assert_eq!(pattern::check(16 + round, &remote.bytes()), None);
        }
    });
}
