//! A bare loop of non-temporal stores: what one core can copy past its caches, and nothing else.

/// Copies with non-temporal stores where this processor has them; says whether it did.
///
/// The two have the same length.
pub(super) fn copy(source: &[u8], target: &mut [u8]) -> bool {
    debug_assert_eq!(source.len(), target.len());
    #[cfg(target_arch = "x86_64")]
    {
        let head = target.as_ptr().align_offset(64).min(target.len());
        let body = (target.len() - head) / 64 * 64;
        let wide = std::arch::is_x86_feature_detected!("avx512f");
        if !wide && !std::arch::is_x86_feature_detected!("avx2") {
            return false;
        }
        let (source_head, source_rest) = source.split_at(head);
        let (target_head, target_rest) = target.split_at_mut(head);
        let (source_body, source_tail) = source_rest.split_at(body);
        let (target_body, target_tail) = target_rest.split_at_mut(body);
        target_head.copy_from_slice(source_head);
        // SAFETY: the feature was found, both have `body` bytes, and the target starts at a multiple of 64.
        unsafe {
            if wide {
                x86::stream_512(source_body.as_ptr(), target_body.as_mut_ptr(), body);
            } else {
                x86::stream_256(source_body.as_ptr(), target_body.as_mut_ptr(), body);
            }
        }
        target_tail.copy_from_slice(source_tail);
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, __m512i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256, _mm512_loadu_si512,
        _mm512_stream_si512,
    };

    /// # Safety
    /// The processor has AVX-512F. `len` bytes at `source` can be read and at `target` written, the two do not
    /// overlap, and `target` and `len` are multiples of 64.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn stream_512(source: *const u8, target: *mut u8, len: usize) {
        for at in (0..len).step_by(64) {
            // SAFETY: `at + 64` is at most `len`, and `target + at` a multiple of 64.
            unsafe {
                let line = _mm512_loadu_si512(source.add(at).cast::<__m512i>());
                _mm512_stream_si512(target.add(at).cast::<__m512i>(), line);
            }
        }
        _mm_sfence();
    }

    /// # Safety
    /// As for [`stream_512`], with AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream_256(source: *const u8, target: *mut u8, len: usize) {
        for at in (0..len).step_by(64) {
            // SAFETY: `at + 64` is at most `len`, and `target + at` a multiple of 64.
            unsafe {
                let low = _mm256_loadu_si256(source.add(at).cast::<__m256i>());
                let high = _mm256_loadu_si256(source.add(at + 32).cast::<__m256i>());
                _mm256_stream_si256(target.add(at).cast::<__m256i>(), low);
                _mm256_stream_si256(target.add(at + 32).cast::<__m256i>(), high);
            }
        }
        _mm_sfence();
    }
}

/// Asks for huge pages behind `bytes`, which are not written yet. That they are refused changes speed alone.
pub(super) fn prefer_huge_pages(bytes: &mut [u8]) {
    const PAGE: usize = 4096;
    let head = bytes.as_ptr().align_offset(PAGE).min(bytes.len());
    let body = &mut bytes[head..];
    let len = body.len() / PAGE * PAGE;
    // SAFETY: the range lies in memory that is borrowed here alone, and the advice does not change its contents.
    let _ = unsafe { rustix::mm::madvise(body.as_mut_ptr().cast(), len, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_whatever_the_alignment() {
        let source: Vec<u8> = (0..1000_u32).map(|index| (index * 7 % 251) as u8).collect();
        for start in [0, 1, 63, 64, 100] {
            for len in [0, 1, 63, 64, 65, 128, 500] {
                let mut target = vec![0; 1000];
                if !copy(&source[start..start + len], &mut target[start + 3..start + 3 + len]) {
                    return;
                }
                assert_eq!(target[start + 3..start + 3 + len], source[start..start + len], "{start} {len}");
                assert!(target[..start + 3].iter().chain(&target[start + 3 + len..]).all(|byte| *byte == 0));
            }
        }
    }
}
