//! What the demo moves: a KV cache of random numbers, or the tensors of a file.

use std::fs;
use std::path::Path;

use bytes::Bytes;
use posthorse_core::{DType, Error};
use posthorse_omni::TensorSet;
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::outcome::{Failure, Outcome};
use crate::pattern;
use crate::stage::check_room;

/// The KV cache of BAGEL-7B-MoT: layers, KV heads, and elements of a head.
const LAYERS: u64 = 28;
const HEADS: u64 = 4;
const HEAD_ELEMENTS: u64 = 128;
/// Keys and values of one token in every layer, as bfloat16: 57,344 bytes.
pub(crate) const TOKEN_BYTES: u64 = LAYERS * 2 * HEADS * HEAD_ELEMENTS * 2;
/// How often a payload is in memory: here, and twice in the pool of each stage.
const COPIES: u64 = 5;
/// Tokens of the default payload: a prompt of 194,969,600 bytes.
const DEFAULT_TOKENS: u64 = 3400;

/// One tensor of the payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TensorInfo {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    /// Element counts, outermost first.
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: u64,
}

/// Tensors, one after the other.
#[derive(Debug)]
pub(crate) struct Payload {
    pub(crate) tensors: Vec<TensorInfo>,
    storage: Bytes,
    /// Where the first tensor begins in the storage.
    start: usize,
}

impl Payload {
    /// A KV cache of as many whole tokens as `size` bytes hold, the default number without a size. Equal seeds
    /// give equal numbers. Errors call the size `argument`.
    pub(crate) fn kv_cache(argument: &str, size: Option<u64>, seed: u64) -> Outcome<Self> {
        if let Some(size) = size {
            check_room(argument, size, COPIES)?;
        }
        let tokens = size.map_or(DEFAULT_TOKENS, |size| size / TOKEN_BYTES);
        if tokens == 0 {
            let size = size.unwrap_or_default();
            return Err(Failure::Usage(format!(
                "{argument} is {size} bytes; accepted: at least one token of the KV cache, {TOKEN_BYTES} bytes"
            )));
        }
        let tensors: Vec<TensorInfo> = (0..LAYERS)
            .flat_map(|layer| ["key", "value"].map(|what| format!("{what}_cache_{layer}")))
            .map(|name| TensorInfo {
                name,
                dtype: DType::BF16,
                shape: vec![tokens, HEADS, HEAD_ELEMENTS],
                bytes: tokens * HEADS * HEAD_ELEMENTS * 2,
            })
            .collect();
        let bytes = (tokens * TOKEN_BYTES) as usize;
        let mut storage = Vec::new();
        storage
            .try_reserve_exact(bytes)
            .map_err(|error| Failure::Usage(format!("{argument}, {bytes} bytes: {error}")))?;
        storage.resize(bytes, 0);
        pattern::fill(seed, &mut storage);
        Ok(Self { tensors, storage: storage.into(), start: 0 })
    }

    /// The tensors of a safetensors file, in the order of their data.
    pub(crate) fn read(path: &Path) -> Outcome<Self> {
        let argument = format!("--input {}", path.display());
        let refused = |error| Failure::Usage(format!("{argument}: {error}"));
        let strange =
            |why: String| Failure::Usage(format!("{argument}: {why}; accepted: a safetensors file"));
        let found = fs::metadata(path).map_err(refused)?;
        // A pipe would be waited for, and a device read without end.
        if !found.is_file() {
            return Err(strange("it is no regular file".to_owned()));
        }
        check_room(&argument, found.len(), COPIES)?;
        let storage = fs::read(path).map_err(refused)?;
        let (header, metadata) =
            SafeTensors::read_metadata(&storage).map_err(|error| strange(error.to_string()))?;
        let mut entries: Vec<_> = metadata.tensors().into_iter().collect();
        entries.sort_by_key(|(_, info)| info.data_offsets);
        let mut tensors = Vec::with_capacity(entries.len());
        for (tensor, info) in entries {
            // The format's names are those of the enum's variants.
            let dtype = format!("{:?}", info.dtype);
            let dtype = DType::from_safetensors(&dtype).ok_or_else(|| {
                strange(format!("tensor {tensor:?} is of type {dtype}, which is not supported"))
            })?;
            tensors.push(TensorInfo {
                name: tensor,
                dtype,
                shape: info.shape.iter().map(|count| *count as u64).collect(),
                bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
            });
        }
        // Eight bytes of length stand before the header.
        let payload = Self { tensors, storage: storage.into(), start: header + 8 };
        if payload.bytes().is_empty() {
            return Err(strange("it holds no data".to_owned()));
        }
        payload
            .set()
            .and_then(|set| set.layout())
            .map_err(|error| Failure::Usage(format!("{argument}: {error}")))?;
        Ok(payload)
    }

    /// The tensors as they are put by name.
    pub(crate) fn set(&self) -> Result<TensorSet<'_>, Error> {
        let mut set = TensorSet::new();
        for (info, bytes) in self.parts() {
            set.push_shared(&info.name, info.dtype, &info.shape, bytes)?;
        }
        Ok(set)
    }

    /// All bytes, in the order of the tensors.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.storage[self.start..]
    }

    /// Each tensor with its bytes.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&TensorInfo, Bytes)> {
        let mut rest = self.storage.slice(self.start..);
        self.tensors.iter().map(move |info| (info, rest.split_to(info.bytes as usize)))
    }
}

/// The SHA-256 of bytes that come in parts, in hexadecimal.
pub(crate) fn sha256<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_cache_of_a_prompt_of_3400_tokens() {
        let payload = Payload::kv_cache("--size", None, 1).unwrap();
        assert_eq!(payload.bytes().len(), 194_969_600);
        assert_eq!(payload.tensors.len(), 56);
        let names: Vec<_> = payload.tensors.iter().take(3).map(|info| info.name.as_str()).collect();
        assert_eq!(names, ["key_cache_0", "value_cache_0", "key_cache_1"]);
        for (info, bytes) in payload.parts() {
            assert_eq!((info.dtype, info.shape.as_slice()), (DType::BF16, &[3400, 4, 128][..]));
            assert_eq!(bytes.len(), 3400 * 4 * 128 * 2);
        }
    }

    #[test]
    fn a_size_is_rounded_down_to_whole_tokens() {
        for (size, tokens) in [(57_344, 1), (57_344 * 2 - 1, 1), (190 << 20, 3474)] {
            let payload = Payload::kv_cache("--size", Some(size), 1).unwrap();
            assert_eq!(payload.bytes().len() as u64, tokens * 57_344);
            assert_eq!(payload.tensors[0].shape[0], tokens);
        }
        let error = Payload::kv_cache("--size", Some(57_343), 1).unwrap_err();
        let message = error.message();
        assert!(matches!(error, Failure::Usage(_)) && message.contains("57343") && message.contains("57344"));
    }

    #[test]
    fn a_size_that_memory_cannot_hold_is_refused() {
        for size in [100 << 40, u64::MAX] {
            let error = Payload::kv_cache("--size", Some(size), 1).unwrap_err();
            let accepted = format!("--size is {size} bytes; accepted: up to ");
            assert!(matches!(&error, Failure::Usage(why) if why.starts_with(&accepted)), "{error:?}");
        }
    }

    #[test]
    fn numbers_differ_between_runs_and_not_within_one() {
        let digest = |seed| sha256([Payload::kv_cache("--size", Some(TOKEN_BYTES), seed).unwrap().bytes()]);
        assert_eq!(digest(1), digest(1));
        assert_ne!(digest(1), digest(2));
    }

    #[test]
    fn a_file_comes_with_its_names_in_the_order_of_its_data() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let header = r#"{"__metadata__":{"format":"pt"},"z":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"a":{"dtype":"F16","shape":[2,3],"data_offsets":[8,20]}}"#;
        let data: Vec<u8> = (0..20).collect();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(&data);
        fs::write(&path, file).unwrap();
        let payload = Payload::read(&path).unwrap();
        assert_eq!(payload.bytes(), data);
        let parts: Vec<_> =
            payload.parts().map(|(info, bytes)| (info.name.as_str(), info.dtype, bytes)).collect();
        let part = |range| Bytes::copy_from_slice(&data[range]);
        assert_eq!(parts, [("z", DType::I64, part(0..8)), ("a", DType::F16, part(8..data.len()))]);
        assert_eq!(payload.tensors[1].shape, [2, 3]);
    }

    #[test]
    fn what_is_no_safetensors_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture.png");
        assert!(Payload::read(&path).unwrap_err().message().contains("picture.png"));
        fs::write(&path, b"not this").unwrap();
        let error = Payload::read(&path).unwrap_err();
        assert!(matches!(&error, Failure::Usage(why) if why.contains("a safetensors file")), "{error:?}");
    }

    #[test]
    fn a_tensor_that_cannot_be_put_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        for (name, shape, part) in [
            ("deep".to_owned(), vec![1; 100], "100 dimensions"),
            ("n".repeat(70_000), vec![1], "70000 bytes"),
        ] {
            let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":{shape:?},"data_offsets":[0,1]}}}}"#);
            fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), b"x"].concat())
                .unwrap();
            let error = Payload::read(&path).unwrap_err();
            let name = &name[..name.len().min(100)];
            assert!(
                matches!(&error, Failure::Usage(why) if why.contains(name) && why.contains(part)),
                "{error:?}"
            );
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_unread() {
        let error = Payload::read(Path::new("/dev/zero")).unwrap_err();
        assert!(
            matches!(&error, Failure::Usage(why) if why.contains("/dev/zero: it is no regular file")),
            "{error:?}"
        );
    }

    #[test]
    fn digests_are_those_of_the_standard() {
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256([&b"a"[..], b"bc"]), expected);
    }
}
