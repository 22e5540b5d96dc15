//! What `fuzz/` and the replay of its corpus hand bytes to: decoding never panics, and what decodes survives being
//! encoded again.

#[cfg(test)]
mod tests;

use posthorse_core::ErrorKind;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::connector::StreamEnd;
use crate::control::zmtp::{self, Decoder, Event, SocketType};
use crate::message::{Answer, Dialect, MAX_MESSAGE_BYTES, PullReply, QueryReply, Reply, Request};
use crate::payload::envelope::{self, ALIGNMENT, Envelope, TensorSpec};
use crate::payload::kv;
use crate::payload::marker::{self, Image, NdArray, Tensor};
use crate::payload::{Manifest, TensorDesc};
use crate::pipeline::Pipeline;
use crate::{ConnectorConfig, Edge};

/// The key that the answers in the corpus are for.
const KEY: &str = "k@0_1";

/// A ZMTP connection from its first byte. The byte in front of it says who hears it, and how it is cut: the cuts make
/// no difference.
///
/// # Panics
/// When the decoder is wrong.
pub fn zmtp(bytes: &[u8]) {
    let Some((choice, stream)) = bytes.split_first() else { return };
    let own = if choice & 0x80 == 0 { SocketType::Router } else { SocketType::Req };
    let whole = hear(own, std::iter::once(stream));
    assert_eq!(hear(own, stream.chunks(usize::from(choice & 0x7f) + 1)), whole);
    for event in whole.0 {
        let (again, wanted) = match event {
            Event::Message(payload) => (zmtp::message(&payload), Event::Message(payload)),
            Event::Ping(context) => (zmtp::pong(&context), Event::Alive),
            Event::Ready | Event::Alive => continue,
        };
        let opening = [&zmtp::greeting()[..], &zmtp::ready(SocketType::Req), &again].concat();
        let heard = hear(SocketType::Router, std::iter::once(&*opening));
        assert_eq!(heard, (vec![Event::Ready, wanted], None));
    }
}

/// The events in these pieces of a connection, and why no more came.
fn hear<'a>(own: SocketType, pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Event>, Option<ErrorKind>) {
    let (mut decoder, mut events) = (Decoder::new(own, MAX_MESSAGE_BYTES), Vec::new());
    for piece in pieces {
        decoder.input.extend_from_slice(piece);
        loop {
            match decoder.next() {
                Ok(Some(event)) => events.push(event),
                Ok(None) => break,
                Err(error) => return (events, Some(error.kind())),
            }
        }
    }
    (events, None)
}

/// A request to a producer.
///
/// # Panics
/// When the decoder is wrong.
pub fn request(bytes: &[u8]) {
    let dialect = Request::dialect_of(bytes);
    let Ok(request) = Request::decode(bytes) else { return };
    assert_eq!(request.dialect(), dialect);
    // Written in full, the longest message may be too long.
    let Ok(again) = request.encode() else { return };
    assert_eq!(Request::decode(&again).ok(), Some(request));
}

/// A reply, as the answer to each kind of request.
///
/// # Panics
/// When the decoder is wrong.
pub fn reply(bytes: &[u8]) {
    if let Ok(answer) = QueryReply::decode(KEY, bytes) {
        let again = match answer.clone() {
            QueryReply::Offer { data_size, is_fast_path, offered } => {
                if let Some(offered) = &offered {
                    check_manifest(&offered.manifest, data_size);
                }
                Reply::Offer { request_id: KEY.to_owned(), data_size, is_fast_path, offered }
                    .encode(Dialect::Posthorse)
            }
            QueryReply::NotFound => {
                Reply::NoOffer((&posthorse_core::Error::new(ErrorKind::NotFound, "")).into())
                    .encode(Dialect::Foreign)
            }
            QueryReply::Refused(refusal) => Reply::NoOffer(refusal).encode(Dialect::Posthorse),
        };
        if let Ok(again) = again {
            assert_eq!(QueryReply::decode(KEY, &again).ok(), Some(answer));
        }
    }
    if let Ok(answer) = PullReply::decode(bytes) {
        let again = match answer.clone() {
            PullReply::Done(Some(bytes)) => Reply::Done { bytes }.encode(Dialect::Posthorse),
            PullReply::Done(None) => Reply::Done { bytes: 0 }.encode(Dialect::Foreign),
            PullReply::Failed => Ok(Reply::plain_error().to_vec()),
            PullReply::Refused(refusal) => Reply::Refused(refusal).encode(Dialect::Posthorse),
        };
        if let Ok(again) = again {
            assert_eq!(PullReply::decode(&again).ok(), Some(answer));
        }
    }
    if let Ok(answer) = Answer::decode(bytes) {
        let again = match answer.clone() {
            Answer::Ok => Reply::Ok,
            Answer::Stream(sent) => Reply::Stream(sent),
            Answer::Health(value) => Reply::Health(value),
            Answer::Refused(refusal) => Reply::Refused(refusal),
        };
        if let Ok(again) = again.encode(Dialect::Posthorse) {
            assert_eq!(Answer::decode(&again).ok(), Some(answer));
        }
    }
}

/// The payload of a tensor set.
///
/// # Panics
/// When the reader is wrong.
pub fn envelope(payload: &[u8]) {
    let Ok(found) = envelope::read(payload) else { return };
    let specs: Vec<_> = found
        .iter()
        .map(|tensor| TensorSpec { name: &tensor.name, dtype: tensor.dtype, shape: &tensor.shape })
        .collect();
    // A foreign set may have names that are not to be used here.
    let Ok(layout) = Envelope::layout(&specs) else { return };
    let mut again = vec![0; layout.len() as usize];
    assert!(layout.write_headers(&mut again).is_ok());
    for (old, new) in found.iter().zip(layout.tensors()) {
        assert_eq!(new.offset % ALIGNMENT, 0, "{new:?}");
        again[range(new)].copy_from_slice(&payload[range(old)]);
    }
    assert_eq!(envelope::read(&again).ok().as_deref(), Some(layout.tensors()));
    for (old, new) in found.iter().zip(layout.tensors()) {
        assert_eq!((&old.name, old.dtype, &old.shape), (&new.name, new.dtype, &new.shape));
    }
}

fn range(tensor: &TensorDesc) -> std::ops::Range<usize> {
    tensor.offset as usize..(tensor.offset + tensor.len) as usize
}

/// A value of the product's own: a tensor, an array, an image, or how a stream ended.
///
/// # Panics
/// When the decoder is wrong.
pub fn marker(bytes: &[u8]) {
    survives::<Tensor>(bytes);
    survives::<NdArray>(bytes);
    survives::<Image>(bytes);
    survives::<StreamEnd>(bytes);
}

/// The size of a payload as eight bytes, and what is said to be in it.
///
/// # Panics
/// When the decoder is wrong.
pub fn manifest(bytes: &[u8]) {
    let Some((size, manifest)) = bytes.split_first_chunk() else { return };
    if let Some(manifest) = survives::<Manifest>(manifest) {
        check_manifest(&manifest, u64::from_le_bytes(*size));
    }
}

fn check_manifest(manifest: &Manifest, payload_bytes: u64) {
    if manifest.check(payload_bytes).is_ok() {
        for tensor in &manifest.tensors {
            assert!(
                tensor.offset <= payload_bytes && tensor.len <= payload_bytes - tensor.offset,
                "{tensor:?}"
            );
        }
    }
}

/// A KV blob.
///
/// # Panics
/// When the reader is wrong.
pub fn kv(blob: &[u8]) {
    let Ok((header, tensors)) = kv::decode(blob) else { return };
    for tensor in &tensors {
        assert!(blob.get(tensor.range.clone()).is_some(), "{tensor:?}");
    }
    let json = serde_json::to_vec(&header).unwrap_or_default();
    let data = &blob[4 + u32::from_be_bytes([blob[0], blob[1], blob[2], blob[3]]) as usize..];
    let again = [&(json.len() as u32).to_be_bytes(), &json[..], data].concat();
    let (same, moved) = kv::decode(&again).ok().unzip();
    let moved: Vec<_> = moved.unwrap_or_default();
    assert_eq!(same, Some(header));
    assert_eq!(moved.len(), tensors.len());
    for (old, new) in tensors.iter().zip(&moved) {
        assert_eq!((old.part, old.layer, &old.shape), (new.part, new.layer, &new.shape));
        assert_eq!(blob[old.range.clone()], again[new.range.clone()]);
    }
}

/// A pipeline's file.
///
/// # Panics
/// When the reader is wrong.
pub fn pipeline(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let variable = |name: &str| match name {
        "HOST" => Some("10.0.0.9".to_owned()),
        "PORT" => Some("50200".to_owned()),
        _ => None,
    };
    let Ok(pipeline) = Pipeline::from_yaml_with(text, &variable) else { return };
    for edge in pipeline.edges() {
        let Edge { from, to } = edge;
        let ends = pipeline.edge(edge).map(|(sender, receiver)| [sender, receiver]);
        assert!(ends.is_some_and(|ends| ends.into_iter().all(is_read_again)), "{edge}");
        assert!(pipeline.stage(from).outgoing.iter().any(|(stage, _)| stage == to), "{edge}");
        assert!(pipeline.stage(to).incoming.iter().any(|(stage, _)| stage == from), "{edge}");
    }
}

/// A connector's configuration as YAML.
///
/// # Panics
/// When the reader is wrong.
pub fn config(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let Ok(config) = serde_saphyr::from_str::<ConnectorConfig>(text) else { return };
    assert!(is_read_again(&config), "{config:?}");
}

/// Whether a configuration survives as a tree and as text.
fn is_read_again(config: &ConnectorConfig) -> bool {
    let tree = Map::<String, Value>::from(config.clone());
    let text = serde_json::to_string(config).unwrap_or_default();
    ConnectorConfig::try_from(tree).is_ok_and(|same| same == *config)
        && serde_json::from_str::<ConnectorConfig>(&text).is_ok_and(|same| same == *config)
}

/// Decodes a value that is to survive, and returns it.
fn survives<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
    let value = marker::from_slice::<T>(bytes).ok()?;
    let again = marker::to_vec(&value).unwrap_or_default();
    assert_eq!(marker::from_slice::<T>(&again).ok().as_ref(), Some(&value));
    Some(value)
}
