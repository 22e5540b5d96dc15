//! How requests are cut into slices.

/// A piece of a request: which request, where in it, how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) request: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The lengths of slices.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SliceLength {
    /// Where a request is cut.
    pub(crate) preferred: u64,
    /// What no slice may exceed.
    pub(crate) max: u64,
}

/// Cuts a request of `len` bytes. A short tail goes with the piece before it, since a slice costs more than its bytes.
pub(crate) fn cut(request: u32, len: u64, length: SliceLength, into: &mut Vec<Piece>) {
    let preferred = length.preferred.clamp(1, length.max.max(1));
    let mut offset = 0;
    while offset < len {
        let left = len - offset;
        let with_tail = left.saturating_sub(preferred) <= preferred / 4 && left <= length.max;
        let piece = if with_tail { left } else { preferred };
        into.push(Piece { request, offset, len: piece });
        offset += piece;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lengths(len: u64, preferred: u64, max: u64) -> Vec<u64> {
        let mut pieces = Vec::new();
        cut(7, len, SliceLength { preferred, max }, &mut pieces);
        assert!(pieces.iter().all(|piece| piece.request == 7));
        pieces.iter().map(|piece| piece.len).collect()
    }

    #[test]
    fn requests_are_cut_evenly_and_a_short_tail_is_not_left_alone() {
        assert!(lengths(0, 4, 8).is_empty());
        assert_eq!(lengths(3, 4, 8), [3]);
        assert_eq!(lengths(8, 4, 8), [4, 4]);
        assert_eq!(lengths(9, 4, 8), [4, 5]);
        assert_eq!(lengths(10, 4, 8), [4, 4, 2]);
        assert_eq!(lengths(9, 4, 4), [4, 4, 1], "the limit is kept");
    }

    proptest! {
        #[test]
        fn the_pieces_tile_the_request(len in 0_u64..100_000, preferred in 1_u64..5000, max in 1_u64..6000) {
            let mut pieces = Vec::new();
            cut(0, len, SliceLength { preferred, max }, &mut pieces);
            let mut at = 0;
            for piece in pieces {
                prop_assert_eq!(piece.offset, at);
                prop_assert!(piece.len > 0 && piece.len <= max);
                at += piece.len;
            }
            prop_assert_eq!(at, len);
        }
    }
}
