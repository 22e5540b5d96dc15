//! Copies by non-temporal stores (`MOVNTDQ` and its wider forms; Intel SDM volume 1, 10.4.6.2).

use std::arch::x86_64::{
    __cpuid, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
    _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};
use std::ptr::copy_nonoverlapping;
use std::sync::OnceLock;

const LINE: usize = 64;
const PAGE: usize = 4096;
/// Pages copied side by side.
const PAGES: usize = 8;
/// Bytes of one page before it is the next one's turn: whole lines, so that each line is written at once.
const BLOCK: usize = 2 * LINE;

/// Copies by the widest non-temporal stores that this processor has.
///
/// On Intel's server processors several pages are copied side by side, since a single stream leaves memory channels
/// idle there: the hardware prefetchers stop at page boundaries. AMD's follow a single stream, and lose up to a third
/// by many. Software prefetch within a piece was tried: `PREFETCHT0` changes nothing, and `PREFETCHNTA` halves the
/// rate on Intel's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream {
    width: Width,
    side_by_side: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    Avx512,
    Avx2,
    Sse2,
}

impl Stream {
    /// Shorter pieces are not worth a partial line at each end.
    pub(crate) const MIN_LEN: usize = 1024;

    /// Always there, on these processors.
    pub(crate) fn detect() -> Option<Self> {
        // Asked once: in a virtual machine each CPUID is a trap.
        static DETECTED: OnceLock<Stream> = OnceLock::new();
        Some(*DETECTED.get_or_init(|| Self { width: Width::detect(), side_by_side: is_intel() }))
    }

    /// Copies `len` bytes. Only after [`Stream::finish`] are they visible in order with other stores.
    ///
    /// # Safety
    /// `len` bytes at `src` can be read and at `dst` written, and the two do not overlap.
    pub(crate) unsafe fn copy(self, src: *const u8, dst: *mut u8, len: usize) {
        let pages = if self.side_by_side { PAGES } else { 1 };
        match self.width {
            // SAFETY: `detect` found the feature; the rest is the caller's promise.
            Width::Avx512 => unsafe { copy_avx512(src, dst, len, pages) },
            // SAFETY: as above.
            Width::Avx2 => unsafe { copy_avx2(src, dst, len, pages) },
            // SAFETY: every x86-64 processor has SSE2; the rest is the caller's promise.
            Width::Sse2 => unsafe { copy_sse2(src, dst, len, pages) },
        }
    }

    /// Says that a copy from `src` comes next, so that its first lines are under way until the hardware's
    /// prefetchers have noticed it: worth a sixth for scattered pieces of 4 KiB.
    pub(crate) fn announce(self, src: *const u8) {
        for line in 0..2 {
            // SAFETY: a prefetch is a hint: it does not fault, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(line * 64).cast()) };
        }
    }

    /// Orders the non-temporal stores of this thread before its later ones.
    pub(crate) fn finish(self) {
        // SAFETY: every x86-64 processor has it, and it touches no memory.
        unsafe {
            _mm_sfence();
        }
    }
}

impl Width {
    fn detect() -> Self {
        if is_x86_feature_detected!("avx512f") {
            return Self::Avx512;
        }
        if is_x86_feature_detected!("avx2") { Self::Avx2 } else { Self::Sse2 }
    }
}

/// Whether the processor says that Intel made it (Intel SDM volume 2, CPUID leaf 0).
fn is_intel() -> bool {
    let leaf = __cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

macro_rules! stream_copy {
    ($name:ident, $feature:literal, $load:ident, $store:ident, $width:literal) => {
        /// # Safety
        /// As `Stream::copy`, on a processor with the feature.
        #[target_feature(enable = $feature)]
        unsafe fn $name(mut src: *const u8, mut dst: *mut u8, mut len: usize, pages: usize) {
            /// # Safety
            /// `BLOCK` bytes at `src` can be read and at `dst` written; `dst` is aligned to a line.
            #[target_feature(enable = $feature)]
            #[inline]
            unsafe fn block(src: *const u8, dst: *mut u8) {
                for at in (0..BLOCK).step_by($width) {
                    // SAFETY: inside the block; the store is aligned, since the width divides a line.
                    unsafe { $store(dst.add(at).cast(), $load(src.add(at).cast())) };
                }
            }

            let head = len.min(dst.addr().wrapping_neg() % LINE);
            // SAFETY: `head` is at most `len`.
            unsafe {
                copy_nonoverlapping(src, dst, head);
                (src, dst) = (src.add(head), dst.add(head));
            }
            len -= head;
            while pages > 1 && len >= pages * PAGE {
                for at in (0..PAGE).step_by(BLOCK) {
                    for page in 0..pages {
                        let at = page * PAGE + at;
                        // SAFETY: inside the pages that are left; `dst` was aligned above.
                        unsafe { block(src.add(at), dst.add(at)) };
                    }
                }
                // SAFETY: that many bytes are left.
                (src, dst) = unsafe { (src.add(pages * PAGE), dst.add(pages * PAGE)) };
                len -= pages * PAGE;
            }
            while len >= BLOCK {
                // SAFETY: a block is left; `dst` is still aligned.
                unsafe {
                    block(src, dst);
                    (src, dst) = (src.add(BLOCK), dst.add(BLOCK));
                }
                len -= BLOCK;
            }
            // SAFETY: `len` bytes are left.
            unsafe { copy_nonoverlapping(src, dst, len) };
        }
    };
}

stream_copy!(copy_avx512, "avx512f", _mm512_loadu_si512, _mm512_stream_si512, 64);
stream_copy!(copy_avx2, "avx2", _mm256_loadu_si256, _mm256_stream_si256, 32);
stream_copy!(copy_sse2, "sse2", _mm_loadu_si128, _mm_stream_si128, 16);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ways() -> Vec<Stream> {
        let best = Width::detect();
        let widths = [Width::Sse2, Width::Avx2, Width::Avx512];
        let there = widths
            .into_iter()
            .filter(|width| best == Width::Avx512 || *width == best || *width == Width::Sse2);
        there.flat_map(|width| [false, true].map(|side_by_side| Stream { width, side_by_side })).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn every_way_copies_exactly_the_range(
            src_at in 0_usize..130,
            dst_at in 0_usize..130,
            len in prop_oneof![0_usize..600, 32_000_usize..34_000, 65_000_usize..100_000],
        ) {
            let src: Vec<u8> = (0..src_at + len).map(|i| (i * 7 + i / 251) as u8).collect();
            for stream in ways() {
                let mut dst = vec![0xEE_u8; dst_at + len + 70];
                // SAFETY: both ranges lie inside their vectors.
                unsafe { stream.copy(src.as_ptr().add(src_at), dst.as_mut_ptr().add(dst_at), len) };
                stream.finish();
                prop_assert!(dst[dst_at..dst_at + len] == src[src_at..]);
                prop_assert!(dst[..dst_at].iter().chain(&dst[dst_at + len..]).all(|&byte| byte == 0xEE));
            }
        }
    }
}
