//! The free blocks, sorted by size: bins of similar sizes, and in each bin a heap with the largest on top.
//!
//! The bins are those of two-level segregated fit (Masmano et al., "TLSF: a new dynamic memory allocator
//! for real-time systems", ECRTS 2004): up to 32 units each size has a bin of its own, above that each
//! power of two is cut into 32 bins, and two levels of bitmaps lead to the next bin that is not empty.
//! A plain list per bin would either miss a block that fits in the request's own bin or have to walk the
//! whole bin for it. A heap answers that in one look, and tells the largest free block exactly.

const SUB_BITS: u32 = 5;
const SUBS: usize = 1 << SUB_BITS;

/// The bin of a size in allocation units. Monotonic: a larger size never has a lower bin.
fn bin_of(units: u64) -> usize {
    if units < SUBS as u64 {
        return units as usize;
    }
    let exponent = units.ilog2();
    let sub = (units >> (exponent - SUB_BITS)) as usize & (SUBS - 1);
    (exponent - SUB_BITS + 1) as usize * SUBS + sub
}

/// A free block as a heap keeps it.
#[derive(Debug, Clone, Copy)]
struct Entry {
    bytes: u64,
    offset: u64,
    node: u32,
}

impl Entry {
    /// Larger blocks first; among equals the lower address, which keeps the far end of the pool whole.
    fn goes_before(&self, other: &Self) -> bool {
        (self.bytes, other.offset) > (other.bytes, self.offset)
    }
}

/// The free blocks of one allocator, each known by the index of its node.
#[derive(Debug)]
pub(crate) struct FreeBins {
    unit_shift: u32,
    heaps: Vec<Vec<Entry>>,
    /// Bit `b % 32` of row `b / 32` is set when bin `b` is not empty.
    rows: Vec<u32>,
    /// Bit `r` is set when row `r` is not zero.
    row_map: u64,
    /// Where in its heap each free node lies.
    positions: Vec<u32>,
    len: usize,
}

impl FreeBins {
    /// Bins for blocks of up to `capacity` bytes, told apart in units of `1 << unit_shift` bytes.
    pub(crate) fn new(capacity: u64, unit_shift: u32) -> Self {
        let mut this = Self {
            unit_shift,
            heaps: Vec::new(),
            rows: Vec::new(),
            row_map: 0,
            positions: Vec::new(),
            len: 0,
        };
        let bins = this.bin_of_bytes(capacity) + 1;
        this.heaps.resize_with(bins, Vec::new);
        this.rows.resize(bins.div_ceil(SUBS), 0);
        this
    }

    /// Free blocks.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the largest free block.
    pub(crate) fn largest(&self) -> u64 {
        let Some(row) = self.row_map.checked_ilog2() else { return 0 };
        let Some(sub) = self.rows[row as usize].checked_ilog2() else { return 0 };
        self.heaps[row as usize * SUBS + sub as usize].first().map_or(0, |top| top.bytes)
    }

    /// A block of at least `bytes`: the best bin that has one, and in it the largest.
    pub(crate) fn find(&self, bytes: u64) -> Option<u32> {
        let own = self.bin_of_bytes(bytes);
        let fits = self.heaps.get(own)?.first().filter(|top| top.bytes >= bytes);
        // Every block in a bin above the request's own is larger than the request.
        fits.or_else(|| self.heaps[self.next_occupied(own + 1)?].first()).map(|top| top.node)
    }

    /// Takes in the free block of `node`.
    pub(crate) fn insert(&mut self, node: u32, offset: u64, bytes: u64) {
        let bin = self.bin_of_bytes(bytes);
        if self.positions.len() <= node as usize {
            self.positions.resize(node as usize + 1, 0);
        }
        let heap = &mut self.heaps[bin];
        heap.push(Entry { bytes, offset, node });
        let last = heap.len() - 1;
        sift_up(heap, &mut self.positions, last);
        self.rows[bin / SUBS] |= 1 << (bin % SUBS);
        self.row_map |= 1 << (bin / SUBS);
        self.len += 1;
    }

    /// Forgets the free block of `node`, which has `bytes`.
    pub(crate) fn remove(&mut self, node: u32, bytes: u64) {
        let bin = self.bin_of_bytes(bytes);
        let at = self.positions[node as usize] as usize;
        let heap = &mut self.heaps[bin];
        heap.swap_remove(at);
        if at < heap.len() {
            sift_down(heap, &mut self.positions, at);
            sift_up(heap, &mut self.positions, at);
        }
        if heap.is_empty() {
            self.rows[bin / SUBS] &= !(1 << (bin % SUBS));
            if self.rows[bin / SUBS] == 0 {
                self.row_map &= !(1 << (bin / SUBS));
            }
        }
        // Fragments wander from bin to bin over time; none may keep the room of its fullest hour.
        if heap.capacity() > 64 && heap.len() < heap.capacity() / 4 {
            heap.shrink_to(heap.capacity() / 2);
        }
        self.len -= 1;
    }

    fn bin_of_bytes(&self, bytes: u64) -> usize {
        bin_of(bytes.div_ceil(1 << self.unit_shift))
    }

    fn next_occupied(&self, from: usize) -> Option<usize> {
        let row = from / SUBS;
        let here = self.rows.get(row)? & (u32::MAX << (from % SUBS));
        if here != 0 {
            return Some(row * SUBS + here.trailing_zeros() as usize);
        }
        let above = self.row_map & (u64::MAX << (row + 1));
        let row = above.trailing_zeros() as usize;
        Some(row * SUBS + self.rows.get(row)?.trailing_zeros() as usize)
    }
}

fn sift_up(heap: &mut [Entry], positions: &mut [u32], mut at: usize) {
    let entry = heap[at];
    while at > 0 {
        let parent = (at - 1) / 2;
        if !entry.goes_before(&heap[parent]) {
            break;
        }
        heap[at] = heap[parent];
        positions[heap[at].node as usize] = at as u32;
        at = parent;
    }
    heap[at] = entry;
    positions[entry.node as usize] = at as u32;
}

fn sift_down(heap: &mut [Entry], positions: &mut [u32], mut at: usize) {
    let entry = heap[at];
    loop {
        let mut child = 2 * at + 1;
        if child + 1 < heap.len() && heap[child + 1].goes_before(&heap[child]) {
            child += 1;
        }
        if child >= heap.len() || !heap[child].goes_before(&entry) {
            break;
        }
        heap[at] = heap[child];
        positions[heap[at].node as usize] = at as u32;
        at = child;
    }
    heap[at] = entry;
    positions[entry.node as usize] = at as u32;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "no unsafe code runs in it, and it is slow there")]
    fn bins_rise_with_size_without_gaps() {
        let mut last = 0;
        for units in 1..100_000 {
            let bin = bin_of(units);
            assert!(bin == last || bin == last + 1, "{units} units: bin {bin} after {last}");
            last = bin;
        }
        assert_eq!(bin_of(u64::MAX), 60 * SUBS - 1);
    }

    /// Each heap has its larger blocks on top, and each block is where its position says.
    fn check(bins: &FreeBins) {
        for heap in &bins.heaps {
            for (at, entry) in heap.iter().enumerate() {
                assert_eq!(bins.positions[entry.node as usize] as usize, at);
                assert!(at == 0 || !entry.goes_before(&heap[(at - 1) / 2]));
            }
        }
    }

    proptest! {
        /// Against a plain list: what is found fits, is found whenever something fits, and the largest is exact.
        #[test]
        #[cfg_attr(miri, ignore = "no unsafe code runs in it, and it is slow there")]
        fn finds_exactly_what_is_there(
            // From many bins with few blocks each to one bin with all of them.
            unit_shift in 0_u32..13,
            steps in proptest::collection::vec((0_u8..3, 1_u64..5000, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut bins = FreeBins::new(5000, unit_shift);
            let mut list: Vec<(u32, u64)> = Vec::new();
            for (node, (what, bytes, pick)) in steps.into_iter().enumerate() {
                if what > 0 || list.is_empty() {
                    bins.insert(node as u32, node as u64 * 8, bytes);
                    list.push((node as u32, bytes));
                } else {
                    let (node, bytes) = list.swap_remove(pick.index(list.len()));
                    bins.remove(node, bytes);
                }
                check(&bins);
                prop_assert_eq!(bins.len(), list.len());
                prop_assert_eq!(bins.largest(), list.iter().map(|entry| entry.1).max().unwrap_or(0));
                let found = bins.find(bytes).map(|node| list.iter().find(|entry| entry.0 == node).unwrap().1);
                prop_assert_eq!(found.is_some(), list.iter().any(|entry| entry.1 >= bytes));
                prop_assert!(found.is_none_or(|found| found >= bytes));
            }
        }
    }
}
