//! How one slice is dealt out to the threads that copy it.
//!
//! A thread that goes on where it ended is faster than one that begins elsewhere, as the processor fetches ahead; and
//! threads that share a slice should end at the same time. So a slice has a part for each thread, dealt out from its
//! start in pieces that become smaller; who has nothing left of its own takes from the end of another's.

/// Threads beyond share the parts of others.
const MOST_PARTS: usize = 4;
/// Pieces of a slice that is cut are no smaller, in bytes: what a piece costs besides its copy is about a microsecond.
const LEAST_PIECE: u64 = 128 << 10;
/// Pieces begin at such boundaries.
const ALIGN: u64 = 4096;

/// What of a slice has not been dealt out.
#[derive(Debug, Default)]
pub(crate) struct Parts([Part; MOST_PARTS]);

#[derive(Debug, Clone, Copy, Default)]
struct Part {
    at: u64,
    end: u64,
    /// Whether some thread began with it, and will come for more.
    begun: bool,
}

impl Parts {
    /// All of a slice of `len` bytes, which `threads` may copy.
    pub(crate) fn new(len: u64, threads: u32) -> Self {
        let wanted = u64::from(threads).min(MOST_PARTS as u64).min(len / LEAST_PIECE).max(1);
        let size = len.div_ceil(wanted).next_multiple_of(ALIGN);
        Self(std::array::from_fn(|index| {
            let at = (size * index as u64).min(len);
            Part { at, end: (at + size).min(len), begun: false }
        }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|part| part.left() == 0)
    }

    /// Deals out a piece of at most `most` bytes, to a thread whose last piece of this slice ended at `after`: its
    /// offset and length. Of nothing, no bytes.
    pub(crate) fn take(&mut self, after: Option<u64>, most: u64) -> (u64, u64) {
        let parts = &mut self.0;
        let own = parts.iter().position(|part| part.left() > 0 && part.begun && Some(part.at) == after);
        let next = own.or_else(|| parts.iter().position(|part| part.left() > 0 && !part.begun));
        if let Some(part) = next.map(|index| &mut parts[index]) {
            let piece = (part.at, part.piece(most));
            part.at += piece.1;
            part.begun = true;
            return piece;
        }
        parts.iter_mut().max_by_key(|part| part.left()).map_or((0, 0), |part| {
            let len = part.piece(most);
            part.end -= len;
            (part.end, len)
        })
    }
}

impl Part {
    const fn left(&self) -> u64 {
        self.end - self.at
    }

    /// The length of the next piece.
    fn piece(&self, most: u64) -> u64 {
        let half = (self.left() / 2).next_multiple_of(ALIGN);
        half.clamp(LEAST_PIECE.min(most), most).min(self.left())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;

    #[test]
    fn two_threads_have_a_half_each_and_go_on_where_they_ended() {
        let mut parts = Parts::new(MIB, 2);
        let mut ends = [None, None];
        for expected in [(0, 256), (256, 128), (384, 128)] {
            for (half, end) in [0, 512].into_iter().zip(&mut ends) {
                let (offset, len) = parts.take(*end, MIB);
                assert_eq!((offset / KIB - half, len / KIB), expected);
                *end = Some(offset + len);
            }
        }
        assert!(parts.is_empty());
        assert_eq!(parts.take(None, MIB).1, 0);
    }

    #[test]
    fn a_thread_alone_takes_all() {
        let mut parts = Parts::new(MIB, 2);
        let mut end = None;
        let mut taken = Vec::new();
        while !parts.is_empty() {
            let (offset, len) = parts.take(end, MIB);
            end = Some(offset + len);
            taken.push((offset / KIB, len / KIB));
        }
        assert_eq!(taken, [(0, 256), (256, 128), (384, 128), (512, 256), (768, 128), (896, 128)]);
    }

    #[test]
    fn who_has_nothing_left_takes_from_the_end_of_another() {
        let mut parts = Parts::new(MIB, 2);
        let (first, _) = (parts.take(None, MIB), parts.take(None, MIB));
        assert_eq!(first, (0, 256 * KIB));
        assert_eq!(parts.take(None, MIB), (896 * KIB, 128 * KIB), "the second part's end");
        assert_eq!(parts.take(Some(256 * KIB), MIB), (256 * KIB, 128 * KIB), "the first goes on");
    }

    #[test]
    fn small_slices_are_not_cut_and_pieces_are_never_larger_than_configured() {
        assert_eq!(Parts::new(2 * LEAST_PIECE - 1, 1).take(None, MIB), (0, LEAST_PIECE));
        assert_eq!(Parts::new(LEAST_PIECE, 4).take(None, MIB), (0, LEAST_PIECE));
        assert_eq!(Parts::new(1 << 30, 2).take(None, MIB), (0, MIB));
        assert_eq!(Parts::new(1 << 30, 2).take(None, 64 * KIB), (0, 64 * KIB));
    }

    proptest! {
        #[test]
        fn every_byte_is_dealt_out_once(
            len in 1_u64..64 * MIB,
            threads in 1_u32..9,
            most in 64 * KIB..2 * MIB,
            order in proptest::collection::vec(0_usize..8, 1..40),
        ) {
            let mut parts = Parts::new(len, threads);
            let mut ends = [None; 8];
            let mut taken = Vec::new();
            for thread in order.into_iter().cycle() {
                if parts.is_empty() {
                    break;
                }
                let (offset, len) = parts.take(ends[thread], most);
                prop_assert!(len > 0 && len <= most);
                ends[thread] = Some(offset + len);
                taken.push((offset, len));
            }
            taken.sort_unstable();
            let mut at = 0;
            for (offset, len) in taken {
                prop_assert_eq!(offset, at);
                at += len;
            }
            prop_assert_eq!(at, len);
        }
    }
}
