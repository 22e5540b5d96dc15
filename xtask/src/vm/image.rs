//! The kernel proper within a bzImage (Documentation/arch/x86/boot.rst of Linux).
//!
//! QEMU can start the uncompressed kernel as it is. Under emulation, to have the machine unpack it costs several
//! seconds at every boot.

/// A bzImage's signature, and where it stands.
const SIGNATURE: (usize, &[u8]) = (0x202, b"HdrS");
/// How many sectors of 512 bytes come before the kernel, less one.
const SETUP_SECTORS: usize = 0x1f1;
/// Where the compressed kernel begins, counted from the end of those sectors, and its length.
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// The length of the unpacked kernel stands in so many bytes at the end of the compressed one.
const LENGTH_BYTES: usize = 4;

/// A program and its arguments.
type Words = &'static [&'static str];

/// How each format begins, and what unpacks it from standard input to standard output.
const UNPACKERS: &[(&[u8], Words)] = &[
    (b"\x28\xb5\x2f\xfd", &["zstd", "-q", "-d", "-c"]),
    (b"\xfd7zXZ\0", &["xz", "-d", "-c", "--single-stream"]),
    (b"\x1f\x8b", &["gzip", "-d", "-c"]),
];

/// The compressed kernel within `image`, and the command that unpacks it.
pub(super) fn payload(image: &[u8]) -> Result<(&[u8], Words), String> {
    if image.get(SIGNATURE.0..SIGNATURE.0 + SIGNATURE.1.len()) != Some(SIGNATURE.1) {
        return Err("it is no bzImage".into());
    }
    let number = |at: usize| -> Option<usize> {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let part = || -> Option<&[u8]> {
        let setup = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * 512;
        let start = setup.checked_add(number(PAYLOAD_OFFSET)?)?;
        let length = number(PAYLOAD_LENGTH)?.checked_sub(LENGTH_BYTES)?;
        image.get(start..start.checked_add(length)?)
    };
    let payload = part().ok_or("its payload lies outside of it")?;
    let unpacker = UNPACKERS.iter().find(|(start, _)| payload.starts_with(start));
    let (_, command) = unpacker.ok_or("its payload is of none of the formats zstd, xz and gzip")?;
    Ok((payload, command))
}

/// Whether `kernel` is what should have come out.
pub(super) fn is_kernel(kernel: &[u8]) -> bool {
    kernel.starts_with(b"\x7fELF")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(payload: &[u8], length: usize) -> Vec<u8> {
        let mut image = vec![0; 3 * 512 + 8];
        image[SETUP_SECTORS] = 2;
        image[SIGNATURE.0..][..4].copy_from_slice(SIGNATURE.1);
        image[PAYLOAD_OFFSET..][..4].copy_from_slice(&8_u32.to_le_bytes());
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&(length as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image.extend_from_slice(b"what follows");
        image
    }

    #[test]
    fn the_payload_is_found_without_its_length_and_what_follows() {
        for (start, program) in
            [(&b"\x28\xb5\x2f\xfd"[..], "zstd"), (b"\xfd7zXZ\0", "xz"), (b"\x1f\x8b", "gzip")]
        {
            let packed = [start, b"kernel"].concat();
            let image = image(&[&packed[..], b"SIZE"].concat(), packed.len() + 4);
            let (found, command) = payload(&image).unwrap();
            assert_eq!((found, command[0]), (&packed[..], program));
        }
    }

    #[test]
    fn an_image_that_lies_is_refused() {
        let good = [&b"\x1f\x8b"[..], b"SIZE"].concat();
        assert!(payload(&image(&good, good.len())).is_ok());
        for bad in [vec![], image(&good, 1000), image(&good, 3), image(b"plain text", 10)] {
            assert!(payload(&bad).is_err());
        }
        let mut unsigned = image(&good, good.len());
        unsigned[SIGNATURE.0] = 0;
        assert_eq!(payload(&unsigned), Err("it is no bzImage".into()));
    }
}
