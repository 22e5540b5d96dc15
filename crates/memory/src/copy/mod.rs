//! Copies between host memory.
//!
//! A store to a line that is not in the cache first reads the line, so a plain copy of memory that is larger
//! than the caches moves three bytes for each one copied. Non-temporal stores leave the read out. They pay for
//! copies that are large against the caches, and harm small ones, whose reader would have found them in the
//! cache: [`CopyTuning`] says where the line is.

mod chunks;
mod claims;
mod pool;
// Miri knows none of the instructions.
#[cfg_attr(any(miri, not(target_arch = "x86_64")), path = "no_stream.rs")]
mod stream;

use posthorse_core::{Error, HostView, Result};

use chunks::Part;
pub use pool::CopyPool;
use stream::Stream;

/// One copy: from where, to where, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPiece {
    src: HostView,
    dst: HostView,
}

impl CopyPiece {
    /// A copy of all of `src` to all of `dst`.
    ///
    /// # Errors
    /// `InvalidArgument` when the two differ in length or overlap.
    pub fn new(src: HostView, dst: HostView) -> Result<Self> {
        if src.len() != dst.len() {
            let accepted = format!("the length of the source, {} bytes", src.len());
            return Err(Error::invalid_argument("the length of the destination", dst.len(), &accepted));
        }
        if src.address().abs_diff(dst.address()) < src.len() as u64 {
            let accepted = format!("memory that does not overlap with the source, {src:?}");
            return Err(Error::invalid_argument("the destination", format_args!("{dst:?}"), &accepted));
        }
        Ok(Self { src, dst })
    }

    /// Where the bytes come from.
    pub const fn src(&self) -> HostView {
        self.src
    }

    /// Where they go.
    pub const fn dst(&self) -> HostView {
        self.dst
    }

    /// Bytes.
    pub const fn len(&self) -> usize {
        self.src.len()
    }

    /// Whether there is nothing to copy.
    pub const fn is_empty(&self) -> bool {
        self.src.is_empty()
    }
}

/// When a copy changes its way of working. The defaults were measured (see `examples/copy_bench.rs`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyTuning {
    /// Copies of at least this many bytes, all pieces together, go past the caches by non-temporal stores;
    /// `usize::MAX` for never.
    ///
    /// Memory that is not in the cache is copied 1.5 to 1.8 times as fast so, up to where `memcpy` does it too.
    /// What was just written and is read at once is better kept in the cache: streamed, writing, copying and
    /// reading 256 KiB take three times as long, 1 to 4 MiB half as long again, 16 MiB the same.
    pub stream_bytes: usize,
    /// Copies of at least this many bytes are shared with the helper threads of a [`CopyPool`].
    pub share_bytes: usize,
    /// Bytes that a thread of a [`CopyPool`] takes at a time.
    pub chunk_bytes: usize,
}

impl Default for CopyTuning {
    fn default() -> Self {
        Self { stream_bytes: 1 << 20, share_bytes: 1 << 20, chunk_bytes: 256 << 10 }
    }
}

impl CopyTuning {
    /// How to stream a copy of `total` bytes, if it is to be streamed.
    fn stream(&self, total: usize) -> Option<Stream> {
        if total >= self.stream_bytes { Stream::detect() } else { None }
    }
}

/// Copies all of `src` to all of `dst` on this thread. On return the bytes are visible to every thread and
/// process that learns of it by an acquire operation that pairs with a later release of this thread.
///
/// # Errors
/// `InvalidArgument` when the two differ in length or overlap.
///
/// # Safety
/// During the call both ranges are alive, `src` readable and `dst` writable, and this process holds no
/// reference into `dst`, nor a mutable one into `src`, that it uses meanwhile. Other processes may read and
/// write either: then the bytes copied may be any mixture of old and new, and nothing else goes wrong, since
/// the copy neither makes references nor looks at what it copies.
pub unsafe fn copy(src: HostView, dst: HostView) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { copy_part_of(src, dst, src.len()) }
}

/// As [`copy()`], for a part of a copy of `total` bytes, the rest of which is done elsewhere: it goes past the
/// caches if the whole should.
///
/// # Errors
/// As [`copy()`].
///
/// # Safety
/// As [`copy()`].
pub unsafe fn copy_part_of(src: HostView, dst: HostView, total: usize) -> Result<()> {
    let piece = CopyPiece::new(src, dst)?;
    // SAFETY: the caller's promise.
    unsafe { copy_all(&[piece], CopyTuning::default().stream(total)) };
    Ok(())
}

/// Copies every piece on this thread, in no particular order. Visible on return as with [`copy`].
///
/// # Safety
/// As [`copy`], for each piece; and no piece's destination overlaps with another piece.
pub unsafe fn copy_pieces(pieces: &[CopyPiece]) {
    // SAFETY: the caller's promise.
    unsafe { copy_all(pieces, CopyTuning::default().stream(total_len(pieces))) };
}

/// # Safety
/// As [`copy_pieces`].
unsafe fn copy_all(pieces: &[CopyPiece], stream: Option<Stream>) {
    for (piece, CopyPiece { src, .. }) in pieces.iter().enumerate() {
        // SAFETY: the whole piece; the rest is the caller's promise.
        unsafe { copy_part(pieces, Part { piece, offset: 0, len: src.len() }, stream) };
    }
    if let Some(stream) = stream {
        stream.finish();
    }
}

/// Copies one part, by non-temporal stores if `stream` is given; then [`Stream::finish`] has to follow before
/// anybody is told.
///
/// # Safety
/// As [`copy`], for that part, which lies inside its piece.
unsafe fn copy_part(pieces: &[CopyPiece], part: Part, stream: Option<Stream>) {
    let Part { piece, offset, len } = part;
    let CopyPiece { src, dst } = pieces[piece];
    // SAFETY: the caller keeps the part inside the piece.
    let (src, dst) = unsafe { (src.as_ptr().add(offset), dst.as_ptr().add(offset)) };
    match stream {
        Some(stream) if len >= Stream::MIN_LEN => {
            if let Some(next) = pieces.get(piece + 1) {
                stream.announce(next.src.as_ptr());
            }
            // SAFETY: both ranges are alive and do not overlap, by the caller's promise.
            unsafe { stream.copy(src, dst, len) };
        }
        // SAFETY: as above.
        _ => unsafe { src.copy_to_nonoverlapping(dst, len) },
    }
}

fn total_len(pieces: &[CopyPiece]) -> usize {
    // Pieces may overlap in their sources, so the sum is not bounded by the address space.
    pieces.iter().fold(0, |total, piece| total.saturating_add(piece.len()))
}

#[cfg(test)]
mod tests {
    use posthorse_core::ErrorKind;

    use super::*;

    #[test]
    fn pieces_of_different_length_or_that_overlap_are_refused() {
        let mut bytes = [0_u8; 16];
        let all = HostView::of_mut(&mut bytes);
        let part = |offset, len| all.slice(offset, len).unwrap();
        for (src, dst) in
            [(part(0, 4), part(8, 5)), (part(0, 8), part(7, 8)), (part(3, 4), part(0, 4)), (all, all)]
        {
            assert_eq!(CopyPiece::new(src, dst).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(CopyPiece::new(part(0, 8), part(8, 8)).unwrap().len(), 8);
        assert!(CopyPiece::new(part(3, 0), part(3, 0)).unwrap().is_empty(), "nothing overlaps with nothing");
    }

    #[test]
    fn pieces_are_copied_each_to_its_place() {
        let src: Vec<u8> = (0..=255).collect();
        let mut dst = vec![0_u8; 256];
        let to = HostView::of_mut(&mut dst);
        let from = HostView::of(&src);
        let piece = |at: usize, to_at: usize, len: usize| {
            CopyPiece::new(from.slice(at, len).unwrap(), to.slice(to_at, len).unwrap()).unwrap()
        };
        // SAFETY: both vectors are alive and otherwise unused meanwhile.
        unsafe { copy_pieces(&[piece(0, 200, 10), piece(100, 0, 50), piece(7, 60, 0)]) };
        assert_eq!(dst[200..210], src[0..10]);
        assert_eq!(dst[..50], src[100..150]);
        assert!(dst[50..200].iter().chain(&dst[210..]).all(|&byte| byte == 0));
    }
}
