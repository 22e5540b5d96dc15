//! The offset allocator: which ranges of a pool are taken. It touches no memory.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use posthorse_core::{Error, ErrorKind, Result};

use crate::bins::FreeBins;

#[cfg(test)]
mod tests;

/// The alignment of blocks unless another is asked for, in bytes: a cache line.
pub const DEFAULT_ALIGNMENT: u64 = 64;

/// A block that an [`OffsetAllocator`] gave out: the claim ticket by which it is freed.
///
/// A block names its allocator and the one allocation it came from. Freeing it a second time is an error
/// even when the same range has been given to somebody else since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    offset: u64,
    len: u64,
    allocator: u64,
    generation: u64,
    node: u32,
}

impl Block {
    /// Where it starts, in bytes from the start of the pool.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes, as they were asked for.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Never: an allocator refuses empty blocks.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of its allocation: no other block of the same allocator ever has it.
    pub const fn generation(&self) -> u64 {
        self.generation
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the block of {} bytes at offset {} (generation {})",
            self.len, self.offset, self.generation
        )
    }
}

/// What an [`OffsetAllocator`] has given out and what it has left. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AllocatorStats {
    /// The whole.
    pub capacity: u64,
    /// Given out, with what rounding up to the alignment adds. `used + free == capacity`.
    pub used: u64,
    /// Not given out.
    pub free: u64,
    /// The largest free block: the largest request that can be met now.
    pub largest_free: u64,
    /// How many pieces the free space is in.
    pub free_blocks: usize,
    /// Blocks given out.
    pub blocks: usize,
    /// The most that [`AllocatorStats::used`] ever was.
    pub high_water: u64,
    /// Requests that found no block large enough.
    pub failures: u64,
}

impl AllocatorStats {
    /// The share of the free space that the largest request cannot have: 0 when it is in one piece.
    pub fn fragmentation(&self) -> f64 {
        if self.free == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.free as f64 }
    }
}

/// Gives out ranges of `0..capacity` and takes them back.
///
/// Allocating and freeing take O(log n) time in the number of free blocks of similar size, however
/// fragmented the pool. A request is met from the closest class of sizes that holds a block for it (the
/// classes above 32 alignment units are 1/32 apart), and fails only when no single free block is large
/// enough. Each block costs about 100 bytes of the host's memory, and that memory is bounded by the largest
/// number of blocks there were at one time.
///
/// ```
/// # use posthorse_buffer::OffsetAllocator;
/// let mut allocator = OffsetAllocator::new(10_000, 4096)?;
/// let block = allocator.alloc(5000)?;
/// assert_eq!(allocator.alloc(1808)?.offset(), 8192, "the tail is usable though it is no multiple of 4096");
/// allocator.free(block)?;
/// assert!(allocator.free(block).is_err());
/// # Ok::<(), posthorse_core::Error>(())
/// ```
#[derive(Debug)]
pub struct OffsetAllocator {
    id: u64,
    capacity: u64,
    alignment: u64,
    /// Every block, free or taken, and vacant entries for reuse. Indices are the blocks' names.
    nodes: Vec<Node>,
    /// The first vacant node; the others follow by `next`.
    vacant: u32,
    bins: FreeBins,
    /// The taken block that starts at an offset.
    taken: HashMap<u64, u32, BuildHasherDefault<OffsetHasher>>,
    generation: u64,
    used: u64,
    high_water: u64,
    failures: u64,
}

/// A block, linked with its neighbours in the order of their addresses.
#[derive(Debug)]
struct Node {
    offset: u64,
    /// Bytes up to the next block.
    span: u64,
    prev: u32,
    next: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Vacant,
    Free,
    Taken { len: u64, generation: u64 },
}

/// No node.
const NONE: u32 = u32::MAX;

impl OffsetAllocator {
    /// An allocator of `capacity` bytes whose blocks all start at multiples of `alignment`.
    ///
    /// # Errors
    /// `InvalidArgument` when the capacity is zero or the alignment is no power of two.
    pub fn new(capacity: u64, alignment: u64) -> Result<Self> {
        // Names an allocator, so that a block of another one is told apart whatever its numbers.
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);

        if capacity == 0 {
            return Err(Error::invalid_argument("capacity", capacity, "1 byte or more"));
        }
        if !alignment.is_power_of_two() {
            return Err(Error::invalid_argument("alignment", alignment, "a power of two"));
        }
        let mut bins = FreeBins::new(capacity, alignment.trailing_zeros());
        bins.insert(0, 0, capacity);
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            capacity,
            alignment,
            nodes: vec![Node { offset: 0, span: capacity, prev: NONE, next: NONE, state: State::Free }],
            vacant: NONE,
            bins,
            taken: HashMap::default(),
            generation: 0,
            used: 0,
            high_water: 0,
            failures: 0,
        })
    }

    /// Bytes in all.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// What every block's offset is a multiple of, in bytes.
    pub const fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The largest request that can be met now, in bytes.
    pub fn largest_free(&self) -> u64 {
        self.bins.largest()
    }

    /// A block of `len` bytes.
    ///
    /// # Errors
    /// `InvalidArgument` for zero bytes, `TooLarge` for more than the capacity, and `PoolFull` when no free
    /// block is large enough; the message names the request, the free bytes and the largest free block.
    pub fn alloc(&mut self, len: u64) -> Result<Block> {
        self.check_len(len)?;
        if let Some(block) = self.take(len) {
            return Ok(block);
        }
        self.failures += 1;
        Err(self.full(len))
    }

    /// Takes a block back. It is merged with its free neighbours at once.
    ///
    /// # Errors
    /// `BadFree`, with nothing changed, when the block was freed before or belongs to another allocator.
    pub fn free(&mut self, block: Block) -> Result<()> {
        if block.allocator != self.id {
            return Err(bad_free(format!("{block} belongs to another allocator")));
        }
        // An allocator's blocks name nodes that exist: nodes are reused, never dropped.
        match self.nodes[block.node as usize].state {
            State::Taken { generation, .. } if generation == block.generation => {
                self.give_back(block.node);
                Ok(())
            }
            _ => Err(bad_free(format!("{block} was freed before"))),
        }
    }

    /// Takes back the block that starts at `offset` and was asked for with `len` bytes, for callers whose
    /// interface has no room for a [`Block`].
    ///
    /// Unlike [`OffsetAllocator::free`] this cannot tell two allocations of the same range apart.
    ///
    /// # Errors
    /// `BadFree`, with nothing changed, when no such block is given out. The message says what lies there;
    /// finding that out takes O(blocks).
    pub fn free_raw(&mut self, offset: u64, len: u64) -> Result<()> {
        match self.find(offset) {
            Some(block) if block.len == len => self.free(block),
            _ => Err(bad_free(self.explain_raw(offset, len))),
        }
    }

    /// The block given out that starts at `offset`.
    pub fn find(&self, offset: u64) -> Option<Block> {
        let node = *self.taken.get(&offset)?;
        match self.nodes[node as usize].state {
            State::Taken { len, generation } => {
                Some(Block { offset, len, allocator: self.id, generation, node })
            }
            State::Free | State::Vacant => None,
        }
    }

    /// What is given out and what is left.
    pub fn stats(&self) -> AllocatorStats {
        AllocatorStats {
            capacity: self.capacity,
            used: self.used,
            free: self.capacity - self.used,
            largest_free: self.bins.largest(),
            free_blocks: self.bins.len(),
            blocks: self.taken.len(),
            high_water: self.high_water,
            failures: self.failures,
        }
    }

    /// Refuses lengths that no state of this allocator could serve.
    pub(crate) fn check_len(&self, len: u64) -> Result<()> {
        if len == 0 {
            return Err(Error::invalid_argument("len", len, "1 byte or more"));
        }
        if len > self.capacity {
            let message = format!("{len} bytes were asked of a pool of {} bytes", self.capacity);
            return Err(Error::new(ErrorKind::TooLarge, message).with_advice("make the pool larger"));
        }
        Ok(())
    }

    /// The error of a request that no free block can serve now.
    pub(crate) fn full(&self, len: u64) -> Error {
        let (free, largest) = (self.capacity - self.used, self.bins.largest());
        let message =
            format!("{len} bytes were asked for; {free} are free, the largest free block has {largest}");
        Error::new(ErrorKind::PoolFull, message)
    }

    /// The bytes that a block of `len` takes up.
    pub(crate) fn span_of(&self, len: u64) -> u64 {
        len.checked_next_multiple_of(self.alignment).unwrap_or(len)
    }

    /// A block of `len` bytes, which [`OffsetAllocator::check_len`] has accepted, if there is one.
    pub(crate) fn take(&mut self, len: u64) -> Option<Block> {
        let index = self.bins.find(len)?;
        let Node { offset, span, .. } = self.nodes[index as usize];
        self.bins.remove(index, span);
        // The last block of a pool may end off the alignment: there the span is what is left.
        let wanted = self.span_of(len);
        if wanted < span
            && let Some(rest) = self.insert_after(index, offset + wanted, span - wanted)
        {
            self.nodes[index as usize].span = wanted;
            self.bins.insert(rest, offset + wanted, span - wanted);
        }
        self.generation += 1;
        let generation = self.generation;
        let node = &mut self.nodes[index as usize];
        node.state = State::Taken { len, generation };
        self.used += node.span;
        self.high_water = self.high_water.max(self.used);
        self.taken.insert(offset, index);
        Some(Block { offset, len, allocator: self.id, generation, node: index })
    }

    fn give_back(&mut self, index: u32) {
        let Node { offset, span, prev, next, .. } = self.nodes[index as usize];
        self.taken.remove(&offset);
        self.used -= span;
        self.nodes[index as usize].state = State::Free;
        if self.is_free(next) {
            self.bins.remove(next, self.nodes[next as usize].span);
            self.absorb_next(index);
        }
        let mut merged = index;
        if self.is_free(prev) {
            self.bins.remove(prev, self.nodes[prev as usize].span);
            self.absorb_next(prev);
            merged = prev;
        }
        let node = &self.nodes[merged as usize];
        self.bins.insert(merged, node.offset, node.span);
    }

    fn is_free(&self, index: u32) -> bool {
        self.nodes.get(index as usize).is_some_and(|node| node.state == State::Free)
    }

    /// Adds the next block's bytes to this one and vacates its node.
    fn absorb_next(&mut self, index: u32) {
        let gone = self.nodes[index as usize].next;
        let Node { span, next, .. } = self.nodes[gone as usize];
        let node = &mut self.nodes[index as usize];
        node.span += span;
        node.next = next;
        if let Some(after) = self.nodes.get_mut(next as usize) {
            after.prev = index;
        }
        let vacated = &mut self.nodes[gone as usize];
        vacated.state = State::Vacant;
        vacated.next = self.vacant;
        self.vacant = gone;
    }

    /// A new free block right behind `before`, or `None` when all names are in use (4 billion blocks).
    fn insert_after(&mut self, before: u32, offset: u64, span: u64) -> Option<u32> {
        let next = self.nodes[before as usize].next;
        let node = Node { offset, span, prev: before, next, state: State::Free };
        let index = match self.nodes.get_mut(self.vacant as usize) {
            Some(vacant) => {
                let index = self.vacant;
                self.vacant = vacant.next;
                *vacant = node;
                index
            }
            None => {
                let index = u32::try_from(self.nodes.len()).ok().filter(|&index| index != NONE)?;
                self.nodes.push(node);
                index
            }
        };
        self.nodes[before as usize].next = index;
        if let Some(after) = self.nodes.get_mut(next as usize) {
            after.prev = index;
        }
        Some(index)
    }

    fn explain_raw(&self, offset: u64, len: u64) -> String {
        let range = format!("the range of {len} bytes at offset {offset}");
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.capacity && len > 0) else {
            return format!("{range} is no range of this pool of {} bytes", self.capacity);
        };
        let overlapped = |node: &&Node| {
            matches!(node.state, State::Taken { .. }) && node.offset < end && offset < node.offset + node.span
        };
        match self.nodes.iter().filter(overlapped).min_by_key(|node| node.offset) {
            Some(Node { offset, state: State::Taken { len, .. }, .. }) => {
                format!("{range} overlaps, and is not, the block of {len} bytes at offset {offset}")
            }
            _ => format!("{range} is free already"),
        }
    }
}

fn bad_free(message: String) -> Error {
    Error::new(ErrorKind::BadFree, message)
}

/// Hashes offsets, which are the allocator's own and need no protection against collisions by design.
#[derive(Debug, Default)]
struct OffsetHasher(u64);

impl Hasher for OffsetHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        // 2^64 over the golden ratio. Offsets end in zeros, so the upper half has to come down.
        let product = u128::from(value) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}
