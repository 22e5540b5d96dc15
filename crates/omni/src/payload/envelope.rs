//! A set of tensors as one msgpack object in which each tensor lies aligned.
//!
//! The object is what the Python connector's serializer would write for a dictionary of tensors:
//! `{name: {"__tensor__": true, "dtype": .., "shape": [..], "data": bin}}`. A tensor's bytes would start
//! wherever the headers before them happen to end; but msgpack can say a string's length in one, two, three
//! or five bytes, and every decoder accepts each. Of the six strings in front of a tensor's bytes, five have
//! a known, short length, so that any filler of 0 to 20 bytes can be had but 19: enough to reach the next
//! multiple of 16 always.

use posthorse_core::{DType, Error, ErrorKind, Result};

use super::manifest::{MAX_DIMENSIONS, MAX_TENSORS, TensorDesc, bytes_of, check};
use super::msgpack::{Reader, STR_HEADERS, write_array, write_bin32, write_map, write_str, write_uint};
use crate::message::printable;

/// The alignment of each tensor's bytes in the payload, in bytes.
pub const ALIGNMENT: u64 = 16;

/// Names that would make the object as a whole be taken for something else.
const RESERVED: [&str; 3] = ["__tensor__", "__ndarray__", "__pil_image__"];

/// What a layout has to know of a tensor.
#[derive(Debug, Clone, Copy)]
pub struct TensorSpec<'a> {
    /// Its name.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: DType,
    /// Element counts, outermost first; empty for a scalar.
    pub shape: &'a [u64],
}

/// A payload of tensors before any byte of it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The headers, each in front of the tensor of the same index; the last has none behind it if there are
    /// no tensors.
    headers: Vec<Header>,
    tensors: Vec<TensorDesc>,
    len: u64,
}

/// Bytes of the payload that are not a tensor's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Where they start.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl Envelope {
    /// Lays tensors out in this order.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the tensor, for a name that stands twice or is reserved, a shape with too many
    /// dimensions or one that overflows; `TooLarge` for a tensor of 4 GiB or more, which the object format
    /// cannot hold.
    pub fn layout(specs: &[TensorSpec<'_>]) -> Result<Self> {
        if specs.len() > MAX_TENSORS {
            let accepted = format!("at most {MAX_TENSORS}");
            return Err(Error::invalid_argument("the number of tensors", specs.len(), &accepted));
        }
        let mut names = std::collections::HashSet::with_capacity(specs.len());
        let mut headers = Vec::with_capacity(specs.len().max(1));
        let mut tensors = Vec::with_capacity(specs.len());
        let mut at = 0;
        let mut first = Vec::new();
        write_map(&mut first, specs.len());
        if specs.is_empty() {
            at = first.len() as u64;
            headers.push(Header { offset: 0, bytes: std::mem::take(&mut first) });
        }
        for spec in specs {
            let is_new = names.insert(spec.name);
            if RESERVED.contains(&spec.name) || !is_new {
                let again = if is_new { "" } else { " for the second time" };
                return Err(Error::invalid_argument(
                    "the name of a tensor",
                    format_args!("{:?}{again}", spec.name),
                    &format!("names that differ, other than {}", RESERVED.join(", ")),
                ));
            }
            let len = spec.checked_len()?;
            let bytes = spec.header(std::mem::take(&mut first), at, len);
            let offset = at + bytes.len() as u64;
            headers.push(Header { offset: at, bytes });
            tensors.push(TensorDesc {
                name: spec.name.to_owned(),
                dtype: spec.dtype,
                shape: spec.shape.to_vec(),
                offset,
                len: len.into(),
            });
            at = offset + u64::from(len);
        }
        Ok(Self { headers, tensors, len: at })
    }

    /// Bytes of the whole payload.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Never: even a payload without tensors has a byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes that are not the tensors', in order.
    pub fn headers(&self) -> &[Header] {
        &self.headers
    }

    /// The tensors and where they lie, in order.
    pub fn tensors(&self) -> &[TensorDesc] {
        &self.tensors
    }

    /// Writes everything but the tensors' bytes.
    ///
    /// # Errors
    /// `InvalidArgument` when `out` is shorter than the payload.
    pub fn write_headers(&self, out: &mut [u8]) -> Result<()> {
        if (out.len() as u64) < self.len {
            let given = format!("{} bytes", out.len());
            return Err(Error::invalid_argument(
                "the payload's memory",
                given,
                &format!("{} bytes", self.len),
            ));
        }
        for Header { offset, bytes } in &self.headers {
            out[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }
}

impl TensorSpec<'_> {
    fn checked_len(&self) -> Result<u32> {
        let Self { name, dtype, shape } = self;
        if name.len() > u16::MAX.into() || shape.len() > MAX_DIMENSIONS {
            return Err(Error::invalid_argument(
                &format!("tensor {:?}", printable(name)),
                format_args!("one with a name of {} bytes and {} dimensions", name.len(), shape.len()),
                &format!("at most {} bytes and {MAX_DIMENSIONS} dimensions", u16::MAX),
            ));
        }
        let len = bytes_of(*dtype, shape).ok_or_else(|| {
            Error::invalid_argument(
                "the shape of a tensor",
                format_args!("{shape:?} of {name:?}"),
                "a size below 2^64",
            )
        })?;
        u32::try_from(len).map_err(|_| {
            Error::new(
                ErrorKind::TooLarge,
                format!("tensor {name:?} has {len} bytes; accepted in a set: below 4294967296"),
            )
            .with_advice("put it as bytes or as a pooled buffer, or split it")
        })
    }

    /// What stands in front of the tensor's bytes, which then lie aligned: `start` (the object's own header,
    /// in front of the first) and the tensor's, from payload offset `at` on.
    fn header(&self, start: Vec<u8>, at: u64, len: u32) -> Vec<u8> {
        let write = |filler: &mut dyn FnMut() -> usize| {
            let mut out = start.clone();
            write_str(&mut out, self.name, 1);
            write_map(&mut out, 4);
            write_str(&mut out, "__tensor__", filler());
            out.push(0xc3);
            write_str(&mut out, "dtype", filler());
            write_str(&mut out, self.dtype.name(), filler());
            write_str(&mut out, "shape", filler());
            write_array(&mut out, self.shape.len());
            self.shape.iter().for_each(|&count| write_uint(&mut out, count));
            write_str(&mut out, "data", filler());
            write_bin32(&mut out, len);
            out
        };
        let shortest = write(&mut || 1);
        let end = at + shortest.len() as u64;
        let mut missing = (end.next_multiple_of(ALIGNMENT) - end) as usize;
        write(&mut || {
            // The longest header whose surplus over one byte is still missing.
            let header = STR_HEADERS.into_iter().rev().find(|header| header - 1 <= missing).unwrap_or(1);
            missing -= header - 1;
            header
        })
    }
}

/// Finds the tensors in the payload of a tensor set, Posthorse's or a foreign one, aligned or not.
///
/// # Errors
/// `Malformed` with the place and what is wrong, also when the object is not a dictionary of tensors.
pub fn read(payload: &[u8]) -> Result<Vec<TensorDesc>> {
    let mut reader = Reader::new(payload);
    let count = reader.map()?;
    let mut tensors = Vec::new();
    for _ in 0..count {
        if tensors.len() == MAX_TENSORS {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!("a payload of more than {MAX_TENSORS} tensors"),
            ));
        }
        let name = reader.str()?;
        tensors.push(read_tensor(&mut reader, name)?);
    }
    if !reader.is_at_end() {
        let rest = payload.len() - reader.position();
        return Err(Error::new(ErrorKind::Malformed, format!("{rest} bytes follow the last tensor")));
    }
    check(&tensors, payload.len() as u64)?;
    Ok(tensors)
}

fn read_tensor(reader: &mut Reader<'_>, name: String) -> Result<TensorDesc> {
    let (mut marked, mut dtype, mut shape, mut data) = (false, None, None, None);
    for _ in 0..reader.map()? {
        match &*reader.str()? {
            "__tensor__" => marked = reader.bool()?,
            "dtype" => dtype = Some(reader.str()?.parse::<DType>()?),
            "shape" => {
                let dimensions = reader.array()?;
                if dimensions > MAX_DIMENSIONS {
                    return Err(Error::new(
                        ErrorKind::Malformed,
                        format!("a shape of {dimensions} dimensions"),
                    ));
                }
                shape = Some((0..dimensions).map(|_| reader.uint()).collect::<Result<Vec<u64>>>()?);
            }
            "data" => {
                let len = reader.bin()?.len();
                data = Some(((reader.position() - len) as u64, len as u64));
            }
            other => {
                let key = printable(other);
                return Err(Error::new(ErrorKind::Malformed, format!("a tensor with the key {key:?}")));
            }
        }
    }
    let (true, Some(dtype), Some(shape), Some((offset, len))) = (marked, dtype, shape, data) else {
        let name = printable(&name);
        return Err(Error::new(ErrorKind::Malformed, format!("{name:?} is not a tensor")));
    };
    Ok(TensorDesc { name, dtype, shape, offset, len })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::TensorSet;
    use super::*;

    fn encode(set: &TensorSet<'_>) -> (Envelope, Vec<u8>) {
        let envelope = set.layout().unwrap();
        let mut out = vec![0; envelope.len() as usize];
        set.write(&envelope, &mut out, |to, from| to.copy_from_slice(from)).unwrap();
        (envelope, out)
    }

    /// The same object, read by a decoder that shares nothing with this module.
    fn straight(bytes: &[u8]) -> Vec<(String, String, Vec<u64>, Vec<u8>)> {
        let mut rest = bytes;
        let value = rmpv::decode::read_value(&mut rest).unwrap();
        assert!(rest.is_empty());
        let text = |value: &rmpv::Value| value.as_str().unwrap().to_owned();
        let entries = value.as_map().unwrap();
        entries
            .iter()
            .map(|(name, tensor)| {
                let keys: Vec<String> = tensor.as_map().unwrap().iter().map(|(key, _)| text(key)).collect();
                assert_eq!(keys, ["__tensor__", "dtype", "shape", "data"]);
                assert_eq!(tensor["__tensor__"].as_bool(), Some(true));
                let shape = tensor["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
                (text(name), text(&tensor["dtype"]), shape, tensor["data"].as_slice().unwrap().to_vec())
            })
            .collect()
    }

    #[test]
    fn an_empty_set_is_an_empty_map() {
        let (envelope, bytes) = encode(&TensorSet::new());
        assert_eq!(bytes, [0x80]);
        assert!(envelope.tensors().is_empty());
        assert!(read(&bytes).unwrap().is_empty());
    }

    #[test]
    fn the_sample_of_the_reference_is_read() {
        // {"t": int16 [0, 1, 2]}
        let bytes = b"\x81\xa1t\x84\xaa__tensor__\xc3\xa5dtype\xa5int16\xa5shape\x91\x03\xa4data\xc4\x06\0\0\x01\0\x02\0";
        let tensors = read(bytes).unwrap();
        assert_eq!(tensors.len(), 1);
        assert_eq!((tensors[0].dtype, &tensors[0].shape[..], tensors[0].len), (DType::I16, &[3][..], 6));
        assert_eq!(tensors[0].offset as usize + 6, bytes.len());
    }

    #[test]
    fn every_filler_can_be_had() {
        // Names of growing length shift the headers through every residue.
        let data = [7_u8; 5];
        for len in 0..600 {
            let mut set = TensorSet::new();
            set.push(&"n".repeat(len), DType::U8, &[5], &data).unwrap();
            let (envelope, bytes) = encode(&set);
            assert_eq!(envelope.tensors()[0].offset % ALIGNMENT, 0, "a name of {len} bytes");
            assert_eq!(straight(&bytes)[0].3, data);
        }
    }

    #[test]
    fn what_cannot_be_laid_out_is_named() {
        let spec = |name, shape| TensorSpec { name, dtype: DType::F32, shape };
        for (specs, part) in [
            (vec![spec("a", &[]), spec("a", &[])], "\"a\""),
            (vec![spec("__tensor__", &[])], "__tensor__"),
            (vec![spec("a", &[1 << 62])], "2^64"),
            (vec![spec("a", &[1; 65])], "65 dimensions"),
        ] {
            let error = Envelope::layout(&specs).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
        let error = Envelope::layout(&[spec("kv", &[1 << 30])]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        assert!(error.message().contains("kv") && error.message().contains("4294967296"), "{error}");
        Envelope::layout(&[spec("a", &[(1 << 30) - 1]), spec("b", &[(1 << 30) - 1])]).unwrap();
    }

    #[test]
    fn objects_that_are_not_tensor_sets_are_refused() {
        for bytes in [
            &b""[..],
            b"\x90",
            b"\x81\xa1t\xc0",
            b"\x81\xa1t\x80",
            b"\x80\x80",
            b"\x81\xa1t\x84\xaa__tensor__\xc3\xa5dtype\xa5int16\xa5shape\x91\x03\xa4data\xc4\x05\0\0\0\0\0",
            b"\x81\xa1t\x84\xaa__tensor__\xc2\xa5dtype\xa5int16\xa5shape\x91\x03\xa4data\xc4\x06\0\0\0\0\0\0",
            b"\xdf\xff\xff\xff\xff",
            b"\x81\xa1t\x81\xa5shape\xdd\xff\xff\xff\xff",
            b"\x81\xa1t\x81\xa4data\xc6\xff\xff\xff\xff\0",
        ] {
            assert!(read(bytes).is_err(), "{bytes:02x?}");
        }
    }

    proptest! {
        #[test]
        fn a_foreign_decoder_and_the_reader_find_the_same_aligned_tensors(
            specs in prop::collection::btree_map("[a-z._0-9]{0,80}", (0..DType::ALL.len(), prop::collection::vec(0_u64..300, 0..4)), 0..20)
        ) {
            let specs: Vec<_> = specs
                .into_iter()
                .map(|(name, (dtype, mut shape))| {
                    // Large products make the test slow and show nothing more.
                    if shape.len() > 1 { shape.iter_mut().for_each(|n| *n %= 6); }
                    (name, DType::ALL[dtype], shape)
                })
                .collect();
            let memory: Vec<u8> = (0..1 << 14).map(|i| (i * 31 % 251) as u8).collect();
            let mut set = TensorSet::new();
            for (i, (name, dtype, shape)) in specs.iter().enumerate() {
                let len = bytes_of(*dtype, shape).unwrap() as usize;
                set.push(name, *dtype, shape, &memory[i..i + len]).unwrap();
            }
            let (envelope, bytes) = encode(&set);
            prop_assert_eq!(&read(&bytes).unwrap(), envelope.tensors());
            for (desc, foreign) in envelope.tensors().iter().zip(straight(&bytes)) {
                prop_assert_eq!(desc.offset % ALIGNMENT, 0);
                let data = &bytes[desc.offset as usize..][..desc.len as usize];
                prop_assert_eq!((&desc.name, desc.dtype.name(), &desc.shape, data), (&foreign.0, &*foreign.1, &foreign.2, &*foreign.3));
            }
            prop_assert_eq!(straight(&bytes).len(), set.tensors().len());
        }

        #[test]
        fn arbitrary_and_damaged_bytes_never_panic(bytes: Vec<u8>, at: prop::sample::Index, byte: u8) {
            let _ = read(&bytes);
            let mut set = TensorSet::new();
            set.push("a", DType::U8, &[2, 2], &[1, 2, 3, 4]).unwrap();
            set.push("b", DType::F32, &[], &[1, 2, 3, 4]).unwrap();
            let (_, mut whole) = encode(&set);
            let at = at.index(whole.len());
            whole[at] = byte;
            let _ = read(&whole);
            let _ = read(&whole[..at]);
        }
    }
}
