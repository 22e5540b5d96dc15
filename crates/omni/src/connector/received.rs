//! What a consumer got.

use std::borrow::Cow;

use posthorse_buffer::ManagedBuffer;
use posthorse_core::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;

use super::lease::Lease;
use crate::payload::{Manifest, PayloadKind, TensorDesc, envelope, find_tensor, marker};

/// A payload that has arrived: bytes, tensors or a value, in a block of the consumer's pool.
///
/// The block returns to the pool when this is released or dropped. The views borrow from it: nothing is copied.
#[derive(Debug)]
pub struct Received {
    memory: Memory,
    len: u64,
    manifest: Manifest,
    transport: String,
}

#[derive(Debug)]
enum Memory {
    /// Our own copy.
    Own(ManagedBuffer),
    /// The producer's memory, read in place.
    Leased(Lease),
}

impl Received {
    /// # Errors
    /// As [`Received::listed`].
    pub(super) fn own(
        buffer: ManagedBuffer,
        len: u64,
        manifest: Manifest,
        transport: String,
    ) -> Result<Self> {
        Self { memory: Memory::Own(buffer), len, manifest, transport }.listed()
    }

    /// # Errors
    /// As [`Received::listed`].
    pub(super) fn leased(lease: Lease, len: u64, manifest: Manifest, transport: String) -> Result<Self> {
        Self { memory: Memory::Leased(lease), len, manifest, transport }.listed()
    }

    /// With the list of its tensors, which travels in the bytes where it is long.
    ///
    /// # Errors
    /// `Malformed` when the bytes are not those of a tensor set.
    fn listed(mut self) -> Result<Self> {
        if self.manifest.is_in_bytes() {
            self.manifest.tensors = envelope::read(self.bytes()?)?;
        }
        Ok(self)
    }

    /// Bytes of the payload as it travelled; of a tensor set, with its headers.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the payload is empty; none is.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it was offered as.
    pub const fn kind(&self) -> PayloadKind {
        self.manifest.kind
    }

    /// The transport that carried it.
    pub fn transport(&self) -> &str {
        &self.transport
    }

    /// Whether it is read in the producer's memory, which is held until this is released.
    pub const fn is_leased(&self) -> bool {
        matches!(self.memory, Memory::Leased(_))
    }

    /// The payload's bytes as they travelled. Of tensors and values that is their encoding: use [`Received::tensor`] and
    /// [`Received::value`] for what is in it.
    ///
    /// # Errors
    /// `Unsupported` for a pool that is not host memory; `Forked` in a child process.
    pub fn bytes(&self) -> Result<&[u8]> {
        let bytes = match &self.memory {
            Memory::Own(buffer) => buffer.bytes()?,
            Memory::Leased(lease) => lease.bytes()?,
        };
        bytes.get(..self.len as usize).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("a payload of {} bytes in a block of {}", self.len, bytes.len()),
            )
        })
    }

    /// The payload's bytes, copied where the producer can still write them: what was found to be UTF-8 must be so when it
    /// is taken.
    ///
    /// # Errors
    /// As [`Received::bytes`]; `OutOfMemory`.
    pub(super) fn settled_bytes(&self) -> Result<Cow<'_, [u8]>> {
        let bytes = self.bytes()?;
        if !self.is_leased() {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len()).map_err(|_| {
            let text = format!("no memory for a copy of the {} bytes of a leased payload", bytes.len());
            Error::new(ErrorKind::OutOfMemory, text)
        })?;
        copy.extend_from_slice(bytes);
        Ok(Cow::Owned(copy))
    }

    /// The names, types, shapes and places of the tensors, in the order in which they were put. Empty for other
    /// kinds of payload.
    pub fn tensors(&self) -> &[TensorDesc] {
        &self.manifest.tensors
    }

    /// A view of the tensor of this name.
    ///
    /// # Errors
    /// `TypeMismatch` for other kinds of payload; `InvalidArgument`, naming those there are; `Forked` in a child process.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>> {
        self.expect(PayloadKind::Tensors, "tensors")?;
        let desc = find_tensor(&self.manifest.tensors, name)?;
        self.view(desc)
    }

    fn view<'a>(&'a self, desc: &'a TensorDesc) -> Result<Tensor<'a>> {
        let bytes = self.bytes()?;
        let start = desc.offset as usize;
        let bytes = bytes.get(start..start.saturating_add(desc.len as usize)).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, format!("tensor {:?} leaves its payload", desc.name))
        })?;
        Ok(Tensor { desc, bytes })
    }

    /// The value, if one was put; of tensors, the dictionary of [`marker::Tensor`]s that they are. Of a leased payload a copy is
    /// read.
    ///
    /// # Errors
    /// `TypeMismatch` for other kinds of payload, and when the value is not of the type asked for; `Forked` in a child
    /// process.
    pub fn value<T: DeserializeOwned>(&self) -> Result<T> {
        let wanted = std::any::type_name::<T>();
        if self.kind() == PayloadKind::Tensors {
            return marker::from_slice(&self.settled_bytes()?).map_err(|error| {
                let text = format!("the payload is tensors, and no {wanted}: {}", error.message());
                Error::new(ErrorKind::TypeMismatch, text)
                    .with_advice("view each by tensor(name), of those that tensors() lists")
            });
        }
        self.expect(PayloadKind::Value, "a value")?;
        marker::from_slice(&self.settled_bytes()?).map_err(|error| {
            let text = format!("the payload is no {wanted}: {}", error.message());
            Error::new(ErrorKind::TypeMismatch, text)
        })
    }

    fn expect(&self, kind: PayloadKind, what: &str) -> Result<()> {
        let is = match self.kind() {
            same if same == kind => return Ok(()),
            PayloadKind::Bytes => "raw bytes",
            PayloadKind::Tensors => "tensors",
            PayloadKind::Value => "a value",
            PayloadKind::StreamEnd => "the end of a stream",
        };
        Err(Error::new(ErrorKind::TypeMismatch, format!("the payload is {is}, not {what}")))
    }

    /// Gives the memory back now.
    pub fn release(self) {}
}

/// A tensor in place.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    desc: &'a TensorDesc,
    bytes: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// Its name, type, shape and place.
    pub const fn desc(&self) -> &'a TensorDesc {
        self.desc
    }

    /// Its bytes, in row-major order, little-endian.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Its elements as values of a Rust type of the same size (`u16` may carry a bfloat16).
    ///
    /// # Errors
    /// `TypeMismatch`, naming the sizes, when `T` has not the size of the tensor's element type.
    pub fn elements<T: bytemuck::AnyBitPattern>(&self) -> Result<&'a [T]> {
        let (size, wanted) = (self.desc.dtype.size(), std::any::type_name::<T>());
        let mismatch = |why: &str| {
            Error::new(
                ErrorKind::TypeMismatch,
                format!(
                    "tensor {:?} as {wanted}: its elements are {} of {size} bytes, {why}",
                    self.desc.name, self.desc.dtype
                ),
            )
        };
        if size_of::<T>() != size {
            return Err(mismatch(&format!("{wanted} has {}", size_of::<T>())));
        }
        bytemuck::try_cast_slice(self.bytes).map_err(|error| mismatch(&error.to_string()))
    }
}
