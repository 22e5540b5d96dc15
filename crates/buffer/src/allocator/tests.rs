//! The allocator against upstream's cases and against a model: a plain list of intervals.

use proptest::prelude::*;

use super::*;

impl OffsetAllocator {
    /// What must hold between any two calls.
    fn check(&self) {
        let (mut at, mut index, mut before) = (0, self.first(), NONE);
        let (mut free, mut free_blocks, mut taken, mut last_free) = (0, 0, 0, false);
        while let Some(node) = self.nodes.get(index as usize) {
            assert_eq!((node.offset, node.prev), (at, before), "blocks follow each other without gaps");
            assert_eq!(node.offset % self.alignment, 0);
            match node.state {
                State::Vacant => panic!("a vacant node is linked"),
                State::Free => {
                    assert!(!last_free, "two free neighbours at {at} were not merged");
                    free += node.span;
                    free_blocks += 1;
                }
                State::Taken { len, .. } => {
                    assert!(len > 0 && len <= node.span && node.span - len < self.alignment);
                    assert_eq!(self.taken.get(&at), Some(&index));
                    taken += 1;
                }
            }
            last_free = node.state == State::Free;
            at += node.span;
            before = index;
            index = node.next;
        }
        assert_eq!(at, self.capacity);
        let stats = self.stats();
        assert_eq!((stats.free, stats.free_blocks, stats.blocks), (free, free_blocks, taken));
        assert_eq!(self.taken.len(), taken);
    }

    fn first(&self) -> u32 {
        let first = |node: &Node| node.prev == NONE && node.state != State::Vacant;
        self.nodes.iter().position(first).unwrap() as u32
    }
}

fn kind(result: Result<()>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn a_freed_block_is_used_again() {
    let mut allocator = OffsetAllocator::new(1 << 20, 64).unwrap();
    let first = allocator.alloc(1000).unwrap();
    let second = allocator.alloc(1000).unwrap();
    assert_eq!(first.offset(), 0);
    assert!(second.offset() > 0);
    allocator.free(first).unwrap();
    assert_eq!(allocator.alloc(1000).unwrap().offset(), 0);
}

#[test]
fn blocks_start_at_multiples_of_the_alignment() {
    let mut allocator = OffsetAllocator::new(4096, 128).unwrap();
    assert_eq!(allocator.alloc(100).unwrap().offset(), 0);
    assert_eq!(allocator.alloc(100).unwrap().offset(), 128);
    assert_eq!(allocator.stats().used, 256);
}

#[test]
fn a_full_pool_says_what_is_left_and_recovers() {
    let mut allocator = OffsetAllocator::new(1024, 64).unwrap();
    let all = allocator.alloc(1024).unwrap();
    let error = allocator.alloc(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolFull);
    assert!(error.message().contains("1 bytes were asked for; 0 are free"), "{error}");
    allocator.free(all).unwrap();
    assert_eq!(allocator.alloc(1024).unwrap().offset(), 0);
    assert_eq!(allocator.stats().failures, 1);
}

#[test]
fn requests_that_can_never_be_met_are_refused() {
    let mut allocator = OffsetAllocator::new(1000, 64).unwrap();
    assert_eq!(allocator.alloc(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let error = allocator.alloc(1001).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.message().contains("1001") && error.message().contains("1000"), "{error}");
    assert_eq!(OffsetAllocator::new(0, 64).unwrap_err().kind(), ErrorKind::InvalidArgument);
    for alignment in [0, 3, 96] {
        let error = OffsetAllocator::new(1024, alignment).unwrap_err();
        assert!(error.message().contains(&format!("alignment is {alignment}")), "{error}");
    }
}

#[test]
fn a_double_free_is_an_error_and_changes_nothing() {
    let mut allocator = OffsetAllocator::new(1024, 64).unwrap();
    let (a, b) = (allocator.alloc(64).unwrap(), allocator.alloc(64).unwrap());
    allocator.free(a).unwrap();
    assert_eq!(kind(allocator.free(a)), ErrorKind::BadFree);
    allocator.free(b).unwrap();
    assert_eq!(kind(allocator.free(a)), ErrorKind::BadFree, "also after it was merged away");
    assert_eq!(kind(allocator.free_raw(0, 64)), ErrorKind::BadFree);
    assert_eq!(allocator.stats().largest_free, 1024);
    allocator.check();
}

#[test]
fn a_free_of_a_block_that_belongs_to_somebody_else_now_is_an_error() {
    let mut allocator = OffsetAllocator::new(1024, 64).unwrap();
    let old = allocator.alloc(64).unwrap();
    allocator.free(old).unwrap();
    let new = allocator.alloc(64).unwrap();
    assert_eq!((old.offset(), old.len()), (new.offset(), new.len()));
    assert_eq!(kind(allocator.free(old)), ErrorKind::BadFree);
    assert_eq!(allocator.find(0), Some(new), "the new owner keeps it");
}

#[test]
fn a_block_of_another_allocator_is_refused() {
    let [mut mine, mut other] = [(); 2].map(|()| OffsetAllocator::new(1024, 64).unwrap());
    let (block, foreign) = (mine.alloc(64).unwrap(), other.alloc(64).unwrap());
    let error = mine.free(foreign).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadFree);
    assert!(error.message().contains("another allocator"), "{error}");
    mine.free(block).unwrap();
}

#[test]
fn a_raw_free_names_what_lies_there() {
    let mut allocator = OffsetAllocator::new(1024, 64).unwrap();
    let a = allocator.alloc(100).unwrap();
    let b = allocator.alloc(100).unwrap();
    for (offset, len, expected) in [
        (0, 64, "overlaps, and is not, the block of 100 bytes at offset 0"),
        (64, 100, "overlaps, and is not, the block of 100 bytes at offset 0"),
        (200, 100, "overlaps, and is not, the block of 100 bytes at offset 128"),
        (256, 64, "is free already"),
        (1024, 1, "no range of this pool of 1024 bytes"),
        (u64::MAX, 2, "no range of this pool"),
        (0, 0, "no range of this pool"),
    ] {
        let error = allocator.free_raw(offset, len).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadFree);
        assert!(error.message().contains(expected), "{error}");
    }
    allocator.free_raw(a.offset(), a.len()).unwrap();
    allocator.free(b).unwrap();
    assert_eq!(allocator.stats().used, 0);
}

#[test]
fn neighbours_merge_in_any_order() {
    let mut allocator = OffsetAllocator::new(192, 64).unwrap();
    for order in [[1, 0, 2], [0, 1, 2], [2, 1, 0], [0, 2, 1]] {
        let blocks = [(); 3].map(|()| allocator.alloc(64).unwrap());
        for at in order {
            allocator.free(blocks[at]).unwrap();
            allocator.check();
        }
        assert_eq!(allocator.stats().largest_free, 192);
    }
}

#[test]
fn two_holes_do_not_serve_what_fits_neither() {
    let mut allocator = OffsetAllocator::new(256, 64).unwrap();
    let blocks = [(); 4].map(|()| allocator.alloc(64).unwrap());
    allocator.free(blocks[0]).unwrap();
    allocator.free(blocks[2]).unwrap();
    let error = allocator.alloc(128).unwrap_err();
    assert!(error.message().contains("128 are free, the largest free block has 64"), "{error}");
    assert!((allocator.stats().fragmentation() - 0.5).abs() < 1e-9);
    allocator.free(blocks[1]).unwrap();
    allocator.free(blocks[3]).unwrap();
    assert_eq!(allocator.alloc(256).unwrap().offset(), 0);
}

#[test]
fn the_tail_of_a_pool_serves_what_fits_it() {
    let mut allocator = OffsetAllocator::new(10_000, 4096).unwrap();
    let all = allocator.alloc(10_000).unwrap();
    allocator.free(all).unwrap();
    let _first = allocator.alloc(8192).unwrap();
    assert_eq!(allocator.largest_free(), 1808);
    assert_eq!(allocator.alloc(1808).unwrap().offset(), 8192);
    allocator.check();
}

#[test]
fn the_largest_pool_works() {
    let mut allocator = OffsetAllocator::new(u64::MAX, 1 << 63).unwrap();
    let all = allocator.alloc(u64::MAX).unwrap();
    allocator.free(all).unwrap();
    let lower = allocator.alloc(1).unwrap();
    let upper = allocator.alloc((1 << 63) - 1).unwrap();
    assert_eq!((lower.offset(), upper.offset()), (0, 1 << 63));
    allocator.check();
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(u64),
    Free(prop::sample::Index),
    FreeAgain(prop::sample::Index),
    FreeForeign(prop::sample::Index),
    FreeRaw(u64, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![0_u64..300, 0_u64..20_000];
    let step = prop_oneof![
        5 => len.prop_map(Step::Alloc),
        4 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => any::<prop::sample::Index>().prop_map(Step::FreeAgain),
        1 => any::<prop::sample::Index>().prop_map(Step::FreeForeign),
        1 => (0_u64..20_000, 0_u64..300).prop_map(|(offset, len)| Step::FreeRaw(offset, len)),
    ];
    proptest::collection::vec(step, 1..200)
}

/// The largest hole between the live blocks of a pool whose offsets are multiples of `alignment`.
fn largest_hole(live: &[Block], capacity: u64, alignment: u64) -> u64 {
    let mut sorted: Vec<_> = live.iter().map(|block| (block.offset(), block.len())).collect();
    sorted.sort_unstable();
    sorted.push((capacity, 0));
    let (mut at, mut largest) = (0_u64, 0_u64);
    for (offset, len) in sorted {
        largest = largest.max(offset.saturating_sub(at));
        at = (offset + len).next_multiple_of(alignment);
    }
    largest
}

proptest! {
    #[test]
    #[cfg_attr(miri, ignore = "no unsafe code runs in it, and it is slow there")]
    fn agrees_with_a_list_of_intervals(capacity in 1_u64..20_000, shift in 0_u32..10, steps in steps()) {
        let alignment = 1 << shift;
        let mut allocator = OffsetAllocator::new(capacity, alignment).unwrap();
        let mut other = OffsetAllocator::new(capacity, alignment).unwrap();
        let (mut live, mut dead): (Vec<Block>, Vec<Block>) = (Vec::new(), Vec::new());
        for step in steps {
            match step {
                Step::Alloc(len) => match allocator.alloc(len) {
                    Ok(block) => {
                        prop_assert_eq!(block.len(), len);
                        prop_assert_eq!(block.offset() % alignment, 0);
                        prop_assert!(block.offset() + len <= capacity);
                        for taken in &live {
                            prop_assert!(
                                block.offset() + len <= taken.offset()
                                    || taken.offset() + taken.len() <= block.offset()
                            );
                        }
                        live.push(block);
                    }
                    Err(error) => {
                        let expected = match len {
                            0 => ErrorKind::InvalidArgument,
                            len if len > capacity => ErrorKind::TooLarge,
                            _ => ErrorKind::PoolFull,
                        };
                        prop_assert_eq!(error.kind(), expected);
                        prop_assert!(len == 0 || len > largest_hole(&live, capacity, alignment));
                    }
                },
                Step::Free(pick) if !live.is_empty() => {
                    let block = live.swap_remove(pick.index(live.len()));
                    allocator.free(block).unwrap();
                    dead.push(block);
                }
                Step::FreeAgain(pick) if !dead.is_empty() => {
                    prop_assert_eq!(kind(allocator.free(dead[pick.index(dead.len())])), ErrorKind::BadFree);
                }
                Step::FreeForeign(pick) if !live.is_empty() => {
                    let block = live[pick.index(live.len())];
                    prop_assert_eq!(kind(other.free(block)), ErrorKind::BadFree);
                    if let Ok(foreign) = other.alloc(block.len()) {
                        prop_assert_eq!(kind(allocator.free(foreign)), ErrorKind::BadFree);
                        other.free(foreign).unwrap();
                    }
                }
                Step::FreeRaw(offset, len) => {
                    let owner = live.iter().position(|block| (block.offset(), block.len()) == (offset, len));
                    match owner {
                        Some(at) => {
                            allocator.free_raw(offset, len).unwrap();
                            dead.push(live.swap_remove(at));
                        }
                        None => prop_assert_eq!(kind(allocator.free_raw(offset, len)), ErrorKind::BadFree),
                    }
                }
                Step::Free(_) | Step::FreeAgain(_) | Step::FreeForeign(_) => {}
            }
            allocator.check();
            prop_assert_eq!(allocator.largest_free(), largest_hole(&live, capacity, alignment));
        }
        for block in live {
            allocator.free(block).unwrap();
        }
        prop_assert_eq!(allocator.largest_free(), capacity, "whole at the end");
        prop_assert_eq!(allocator.stats().used, 0);
    }
}
