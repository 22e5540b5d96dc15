//! Checksums of pieces: CRC-64/NVME of all bytes, or of the length and some samples.

use crc_fast::{CrcAlgorithm, Digest};
use posthorse_core::{Checksum, HostView};

use crate::sys;

const SAMPLE: usize = 64;
const SAMPLES: usize = 16;

/// The checksum of `view`.
///
/// # Safety
/// `view` is allocated during the call, and nothing that Rust knows of writes to it.
pub(crate) unsafe fn of(view: HostView, mode: Checksum) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    match mode {
        Checksum::Off => return 0,
        // SAFETY: the caller's promise.
        Checksum::Full => unsafe { feed(&mut digest, view) },
        Checksum::Sampled => {
            digest.update(&(view.len() as u64).to_le_bytes());
            if view.len() <= SAMPLE * SAMPLES {
                // SAFETY: the caller's promise.
                unsafe { feed(&mut digest, view) };
            } else {
                let stride = (view.len() - SAMPLE) / (SAMPLES - 1);
                // The last sample ends with the last byte, whatever the stride left over.
                let starts = (0..SAMPLES - 1).map(|n| n * stride).chain([view.len() - SAMPLE]);
                for part in starts.filter_map(|start| view.slice(start, SAMPLE).ok()) {
                    // SAFETY: the caller's promise, for a part of it.
                    unsafe { feed(&mut digest, part) };
                }
            }
        }
    }
    digest.finalize()
}

/// # Safety
/// As for [`of`].
unsafe fn feed(digest: &mut Digest, view: HostView) {
    let mut copy = [0_u8; 8192];
    let mut at = 0;
    while at < view.len() {
        let len = copy.len().min(view.len() - at);
        let Ok(part) = view.slice(at, len) else { return };
        // SAFETY: the caller's promise, for a part of it.
        unsafe { sys::copy_out(part, &mut copy[..len]) };
        digest.update(&copy[..len]);
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8], mode: Checksum) -> u64 {
        // SAFETY: the slice is alive.
        unsafe { of(HostView::of(bytes), mode) }
    }

    #[test]
    fn the_full_checksum_is_the_crc_of_all_bytes() {
        // The check value of CRC-64/NVME.
        assert_eq!(sum(b"123456789", Checksum::Full), 0xae8b_1486_0a79_9888);
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
        let before = sum(&bytes, Checksum::Full);
        for at in [0, 8191, 8192, 50_000, 99_999] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_ne!(sum(&changed, Checksum::Full), before, "at {at}");
        }
    }

    #[test]
    fn samples_show_a_shift_a_tear_and_another_length() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n * 7 / 3) as u8).collect();
        let before = sum(&bytes, Checksum::Sampled);
        assert_ne!(sum(&bytes[1..], Checksum::Sampled), before);
        let mut torn = bytes.clone();
        torn[90_000..].fill(0);
        assert_ne!(sum(&torn, Checksum::Sampled), before);
        assert_ne!(sum(&[], Checksum::Sampled), sum(&[0], Checksum::Sampled));
        assert_eq!(sum(&bytes, Checksum::Off), 0);
    }
}
