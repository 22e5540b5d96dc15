//! The blob in which vLLM-Omni sends a request's KV cache.
//!
//! A header length as four big-endian bytes, the header as compact JSON, then the tensors' bytes without
//! gaps: all keys, then all values. A layer without a cache has an entry marked absent.

use std::collections::HashSet;
use std::ops::Range;

use posthorse_core::{DType, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::manifest::{MAX_DIMENSIONS, accepted_bytes, bytes_of};

/// The longest header accepted, in bytes.
pub const MAX_HEADER_BYTES: usize = 16 << 20;

/// The header of a KV blob.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvHeader {
    /// The request.
    #[serde(rename = "rid")]
    pub request_id: String,
    /// The blocks it occupied at the producer.
    #[serde(rename = "bids")]
    pub block_ids: Vec<u64>,
    /// What the producer says of the cache: `block_size`, `num_layers`, `dtype`, `seq_len` and more.
    pub meta: Map<String, Value>,
    /// The tensors.
    #[serde(rename = "td")]
    pub tensors: Vec<KvEntry>,
    /// The number of layers.
    #[serde(rename = "nl")]
    pub layers: u64,
}

/// A tensor of a KV blob, or the note that a layer has none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum KvEntry {
    /// A tensor.
    Present {
        /// `key_cache_<layer>` or `value_cache_<layer>`.
        #[serde(rename = "n")]
        name: String,
        /// The layer; older writers leave it to the name.
        #[serde(rename = "i", default, skip_serializing_if = "Option::is_none")]
        layer: Option<u64>,
        /// The type of its elements.
        #[serde(rename = "d")]
        dtype: DType,
        /// Element counts: tokens, heads, head size.
        #[serde(rename = "s")]
        shape: Vec<u64>,
        /// Where it starts behind the header, in bytes.
        #[serde(rename = "o")]
        offset: u64,
        /// Bytes.
        #[serde(rename = "b")]
        len: u64,
    },
    /// A layer without a cache.
    Absent {
        /// `key_cache_<layer>` or `value_cache_<layer>`.
        #[serde(rename = "n")]
        name: String,
        /// Always true.
        #[serde(rename = "x")]
        absent: bool,
    },
}

/// Which half of a layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvPart {
    /// The keys.
    Key,
    /// The values.
    Value,
}

/// A tensor found in a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvTensor {
    /// Keys or values.
    pub part: KvPart,
    /// The layer.
    pub layer: u64,
    /// The type of its elements.
    pub dtype: DType,
    /// Element counts.
    pub shape: Vec<u64>,
    /// Where its bytes lie in the blob.
    pub range: Range<usize>,
}

/// A KV cache to be written as a blob: for each layer its keys and values, or nothing.
#[derive(Debug, Clone, Copy)]
pub struct KvLayer<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// Element counts of both halves.
    pub shape: &'a [u64],
    /// The keys' bytes.
    pub key: &'a [u8],
    /// The values' bytes.
    pub value: &'a [u8],
}

/// Writes a blob.
///
/// # Errors
/// `InvalidArgument`, naming the layer, when its bytes are not as many as dtype and shape say; `TooLarge` when
/// the header is longer than its length field can say.
pub fn encode(
    request_id: &str,
    block_ids: &[u64],
    meta: Map<String, Value>,
    layers: &[Option<KvLayer<'_>>],
) -> Result<Vec<u8>> {
    let mut tensors = Vec::with_capacity(2 * layers.len());
    let mut parts: Vec<&[u8]> = Vec::with_capacity(2 * layers.len());
    let mut offset = 0;
    for part in [KvPart::Key, KvPart::Value] {
        for (index, layer) in (0_u64..).zip(layers) {
            let name = format!("{}{index}", part.prefix());
            let Some(layer) = layer else {
                tensors.push(KvEntry::Absent { name, absent: true });
                continue;
            };
            let data = if part == KvPart::Key { layer.key } else { layer.value };
            let len = data.len() as u64;
            let (dtype, shape) = (layer.dtype, layer.shape.to_vec());
            if bytes_of(dtype, &shape) != Some(len) {
                let accepted = accepted_bytes(dtype, &shape);
                return Err(Error::invalid_argument(&name, format_args!("{len} bytes"), &accepted));
            }
            tensors.push(KvEntry::Present { name, layer: Some(index), dtype, shape, offset, len });
            parts.push(data);
            offset += len;
        }
    }
    let header = KvHeader {
        request_id: request_id.to_owned(),
        block_ids: block_ids.to_vec(),
        meta,
        tensors,
        layers: layers.len() as u64,
    };
    let json = serde_json::to_vec(&header)
        .map_err(|e| Error::new(ErrorKind::Internal, format!("encoding a KV header: {e}")))?;
    let header_len = u32::try_from(json.len())
        .ok()
        .filter(|_| json.len() <= MAX_HEADER_BYTES)
        .ok_or_else(|| Error::new(ErrorKind::TooLarge, format!("a KV header of {} bytes", json.len())))?;
    let mut out = Vec::with_capacity(4 + json.len() + offset as usize);
    out.extend_from_slice(&header_len.to_be_bytes());
    out.extend_from_slice(&json);
    parts.iter().for_each(|part| out.extend_from_slice(part));
    Ok(out)
}

/// Reads a blob: its header, and the tensors with where they lie.
///
/// # Errors
/// `Malformed` with what is wrong: a header longer than the blob, a tensor that leaves the data, an unknown
/// dtype, a length that is not the shape's, a layer out of range, a tensor that stands twice.
pub fn decode(blob: &[u8]) -> Result<(KvHeader, Vec<KvTensor>)> {
    let (header_len, rest) = blob
        .split_first_chunk::<4>()
        .ok_or_else(|| malformed(format_args!("of {} bytes has no header length", blob.len())))?;
    let header_len = u32::from_be_bytes(*header_len) as usize;
    if header_len > MAX_HEADER_BYTES || header_len > rest.len() {
        return Err(malformed(format_args!("of {} bytes announces a header of {header_len}", blob.len())));
    }
    let (json, data) = rest.split_at(header_len);
    let header: KvHeader =
        serde_json::from_slice(json).map_err(|e| malformed(crate::message::printable(&e.to_string())))?;
    let start = 4 + header_len;
    let mut seen = HashSet::new();
    let mut tensors = Vec::new();
    for entry in &header.tensors {
        let KvEntry::Present { name, layer, dtype, shape, offset, len } = entry else { continue };
        let name = crate::message::printable(name);
        let (part, named) =
            KvPart::of_name(&name).ok_or_else(|| malformed(format_args!("has a tensor {name:?}")))?;
        // The explicit index wins over the name's.
        let layer = layer.or(named).filter(|layer| *layer < header.layers).ok_or_else(|| {
            malformed(format_args!("of {} layers has {name:?} with index {layer:?}", header.layers))
        })?;
        if !seen.insert((part == KvPart::Key, layer)) {
            return Err(malformed(format_args!("has {name:?} twice")));
        }
        if shape.len() > MAX_DIMENSIONS || bytes_of(*dtype, shape) != Some(*len) {
            return Err(malformed(format_args!("has {name:?} of {dtype} {shape:?} with {len} bytes")));
        }
        let end = offset.checked_add(*len).filter(|end| *end <= data.len() as u64).ok_or_else(|| {
            malformed(format_args!(
                "with {} bytes of data has {name:?} of {len} bytes at {offset}",
                data.len()
            ))
        })?;
        let range = start + *offset as usize..start + end as usize;
        tensors.push(KvTensor { part, layer, dtype: *dtype, shape: shape.clone(), range });
    }
    Ok((header, tensors))
}

impl KvPart {
    const fn prefix(self) -> &'static str {
        match self {
            Self::Key => "key_cache_",
            Self::Value => "value_cache_",
        }
    }

    fn of_name(name: &str) -> Option<(Self, Option<u64>)> {
        [Self::Key, Self::Value]
            .into_iter()
            .find_map(|part| Some((part, name.strip_prefix(part.prefix())?.parse().ok())))
    }
}

fn malformed(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Malformed, format!("a KV blob {why}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn blob() -> Vec<u8> {
        let layer = KvLayer { dtype: DType::BF16, shape: &[1, 1, 2], key: b"KKKK", value: b"VVVV" };
        let meta = json!({"block_size": 16, "seq_len": 1}).as_object().unwrap().clone();
        encode("r1", &[3, 4], meta, &[Some(layer), None, Some(layer)]).unwrap()
    }

    fn with_header(edit: impl Fn(&mut Value)) -> Vec<u8> {
        let blob = blob();
        let len = u32::from_be_bytes(blob[..4].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&blob[4..4 + len]).unwrap();
        edit(&mut header);
        let json = serde_json::to_vec(&header).unwrap();
        [&(json.len() as u32).to_be_bytes()[..], &json, &blob[4 + len..]].concat()
    }

    #[test]
    fn a_blob_survives() {
        let blob = blob();
        let (header, tensors) = decode(&blob).unwrap();
        assert_eq!((&*header.request_id, &header.block_ids[..], header.layers), ("r1", &[3, 4][..], 3));
        let found: Vec<_> = tensors.iter().map(|t| (t.part, t.layer, &blob[t.range.clone()])).collect();
        assert_eq!(
            found,
            [
                (KvPart::Key, 0, &b"KKKK"[..]),
                (KvPart::Key, 2, b"KKKK"),
                (KvPart::Value, 0, b"VVVV"),
                (KvPart::Value, 2, b"VVVV"),
            ]
        );
        assert_eq!(header.tensors[1], KvEntry::Absent { name: "key_cache_1".to_owned(), absent: true });
    }

    #[test]
    fn numbers_survive_to_their_last_bit() {
        for number in [31.245_270_191_439_438, 1.0 / 3.0, f64::MIN_POSITIVE, -f64::MAX, 5e-324] {
            let meta = json!({"scale": number}).as_object().unwrap().clone();
            let blob = encode("r1", &[], meta.clone(), &[]).unwrap();
            assert_eq!(decode(&blob).unwrap().0.meta, meta);
        }
    }

    #[test]
    fn an_explicit_layer_wins_over_the_name() {
        let blob = with_header(|header| header["td"][0]["i"] = json!(1));
        assert_eq!(decode(&blob).unwrap().1[0].layer, 1);
        let blob = with_header(|header| {
            header["td"][0].as_object_mut().unwrap().remove("i");
        });
        assert_eq!(decode(&blob).unwrap().1[0].layer, 0);
    }

    #[test]
    fn malformed_blobs_are_refused() {
        for (blob, part) in [
            (vec![], "no header length"),
            (vec![0, 0, 0, 9, b'{'], "header of 9"),
            (vec![0xff; 64], "announces"),
            (with_header(|h| h["td"][0]["o"] = json!(13)), "at 13"),
            (with_header(|h| h["td"][0]["o"] = json!(u64::MAX)), "bytes of data has"),
            (with_header(|h| h["td"][0]["b"] = json!(3)), "with 3 bytes"),
            (with_header(|h| h["td"][0]["i"] = json!(3)), "index"),
            (with_header(|h| h["td"][2]["i"] = json!(0)), "twice"),
            (with_header(|h| h["td"][0]["n"] = json!("cache_0")), "cache_0"),
            (with_header(|h| h["td"][0]["d"] = json!("object")), "KvEntry"),
        ] {
            let error = decode(&blob).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_and_damaged_bytes_never_panic(bytes: Vec<u8>, at: prop::sample::Index, byte: u8) {
            let _ = decode(&bytes);
            let mut whole = blob();
            let at = at.index(whole.len());
            whole[at] = byte;
            let _ = decode(&whole);
            let _ = decode(&whole[..at]);
        }
    }
}
