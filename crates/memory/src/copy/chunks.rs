//! Cutting many pieces into chunks of about equal size, so that threads can take them one by one.

/// Where a chunk starts: in which piece, and how far into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    piece: usize,
    offset: usize,
}

/// A part of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) piece: usize,
    pub(super) offset: usize,
    pub(super) len: usize,
}

/// The chunks of a list of pieces. Every byte of every piece is in exactly one.
#[derive(Debug)]
pub(super) struct Chunks {
    cuts: Vec<Cut>,
}

impl Chunks {
    /// Cuts pieces of the given lengths into chunks of `chunk` bytes; the last is shorter, if need be.
    pub(super) fn new(lens: impl Iterator<Item = usize>, chunk: usize) -> Self {
        let chunk = chunk.max(1);
        let mut cuts = Vec::new();
        // Bytes until the next cut.
        let mut left = 0;
        for (piece, len) in lens.enumerate() {
            let mut offset = 0;
            while len - offset > left {
                offset += left;
                cuts.push(Cut { piece, offset });
                left = chunk;
            }
            left -= len - offset;
        }
        Self { cuts }
    }

    pub(super) fn count(&self) -> usize {
        self.cuts.len()
    }

    /// The parts of chunk `index`, given the lengths of the pieces it was cut from.
    pub(super) fn parts(
        &self,
        index: usize,
        pieces: usize,
        len_of: impl Fn(usize) -> usize,
    ) -> impl Iterator<Item = Part> {
        let end = Cut { piece: pieces, offset: 0 };
        let start = self.cuts.get(index).copied().unwrap_or(end);
        let stop = self.cuts.get(index + 1).copied().unwrap_or(end);
        (start.piece..pieces.min(stop.piece + 1))
            .map(move |piece| {
                let offset = if piece == start.piece { start.offset } else { 0 };
                let end = if piece == stop.piece { stop.offset } else { len_of(piece) };
                Part { piece, offset, len: end - offset }
            })
            .filter(|part| part.len > 0)
    }
}

#[cfg(test)]
mod tests {
    #[cfg(not(miri))]
    use proptest::prelude::*;

    use super::*;

    fn all_parts(lens: &[usize], chunk: usize) -> Vec<Vec<Part>> {
        let chunks = Chunks::new(lens.iter().copied(), chunk);
        (0..chunks.count())
            .map(|index| chunks.parts(index, lens.len(), |piece| lens[piece]).collect())
            .collect()
    }

    #[test]
    fn a_large_piece_is_cut_and_small_ones_are_gathered() {
        let part = |piece, offset, len| Part { piece, offset, len };
        assert_eq!(
            all_parts(&[25, 0, 3, 4], 10),
            [
                vec![part(0, 0, 10)],
                vec![part(0, 10, 10)],
                vec![part(0, 20, 5), part(2, 0, 3), part(3, 0, 2)],
                vec![part(3, 2, 2)],
            ]
        );
        assert!(all_parts(&[], 10).is_empty());
        assert!(all_parts(&[0, 0], 10).is_empty());
    }

    // Nothing here is unsafe, so Miri would only be slow.
    #[cfg(not(miri))]
    proptest! {
        #[test]
        fn every_byte_is_in_exactly_one_chunk(lens in prop::collection::vec(0_usize..50, 0..20), chunk in 1_usize..60) {
            let chunks = all_parts(&lens, chunk);
            let mut expected = (0..lens.len()).flat_map(|piece| (0..lens[piece]).map(move |byte| (piece, byte)));
            for (index, parts) in chunks.iter().enumerate() {
                let size: usize = parts.iter().map(|part| part.len).sum();
                prop_assert!(size == chunk || (index + 1 == chunks.len() && size > 0 && size < chunk));
                for part in parts {
                    for byte in part.offset..part.offset + part.len {
                        prop_assert_eq!(expected.next(), Some((part.piece, byte)));
                    }
                }
            }
            prop_assert_eq!(expected.next(), None);
        }
    }
}
