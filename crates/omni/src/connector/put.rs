//! What a producer offers.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use posthorse_buffer::ManagedBuffer;
use posthorse_core::{Deadline, Error, ErrorKind, Incarnation, Result};
use serde::{Deserialize, Serialize};

use super::{Connector, Inner, Stored, TensorBuffer};
use crate::key::Edge;
use crate::offer::{Action, Terms};
use crate::payload::{Manifest, PayloadKind, TensorSet, marker};

/// What can be offered.
#[derive(Debug)]
pub enum Payload<'a> {
    /// A buffer of the connector's own pool: no copy. Buffers of other pools are copied.
    Buffer(ManagedBuffer),
    /// Named tensors in a buffer of the connector's own pool: no copy. Those of other pools are copied.
    TensorBuffer(TensorBuffer),
    /// Bytes: one copy.
    Bytes(&'a [u8]),
    /// Bytes that stay where they are and are sent from there: no copy. Few of them, and such as cannot be
    /// registered, are copied.
    Shared(Bytes),
    /// Named tensors, laid out so that the consumer views them in place, and nothing is serialised but their names and
    /// shapes: one copy of those that were lent to the set, none of those that are shared with it.
    Tensors(&'a TensorSet<'a>),
}

impl From<ManagedBuffer> for Payload<'_> {
    fn from(buffer: ManagedBuffer) -> Self {
        Self::Buffer(buffer)
    }
}

impl From<TensorBuffer> for Payload<'_> {
    fn from(buffer: TensorBuffer) -> Self {
        Self::TensorBuffer(buffer)
    }
}

impl<'a> From<&'a [u8]> for Payload<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Bytes> for Payload<'_> {
    fn from(bytes: Bytes) -> Self {
        Self::Shared(bytes)
    }
}

impl<'a> From<&'a TensorSet<'a>> for Payload<'a> {
    fn from(set: &'a TensorSet<'a>) -> Self {
        Self::Tensors(set)
    }
}

/// How something is offered.
#[derive(Debug, Clone, Copy, Default)]
pub struct PutOptions {
    /// How many consumers it is served to before it is given up; `None` takes the configured number.
    pub consumers: Option<NonZeroU32>,
    /// How long it is offered; `None` takes the configured time.
    pub ttl: Option<Duration>,
    /// Until when to wait for room in the pool; `None` takes the configured time.
    pub deadline: Option<Deadline>,
}

/// What a consumer may be told of an offer by other means, to save it a query: the metadata of vLLM-Omni's
/// connectors, with Posthorse's own fields beside theirs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The producer's control host.
    pub source_host: String,
    /// The producer's control port.
    pub source_port: u16,
    /// Bytes of the payload.
    pub data_size: u64,
    /// Whether the payload is raw bytes rather than a serialised object.
    pub is_fast_path: bool,
    /// What only Posthorse consumers use.
    #[serde(default, rename = "ph", skip_serializing_if = "Option::is_none")]
    pub own: Option<OwnTicket>,
}

/// Posthorse's part of a [`Ticket`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnTicket {
    /// Which put of the key it is.
    pub generation: u64,
    /// The producer's segment.
    pub segment: String,
    /// Which life of the producer.
    pub incarnation: Incarnation,
}

impl Connector {
    /// A block of the pool, to be filled and offered without a copy. Until it is filled it holds whatever the pool held
    /// there before, such as an earlier payload, and a put sends all of it: fill the whole block.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, which cannot be offered; `TooLarge` for more than the pool holds;
    /// `DeadlineExceeded` when no room comes; `Closed`.
    pub fn alloc(&self, len: u64, deadline: Deadline) -> Result<ManagedBuffer> {
        self.inner().check_open()?;
        if len == 0 {
            return Err(Error::invalid_argument("the length of a buffer", "0 bytes", "at least one byte"));
        }
        self.inner().alloc(len, deadline)
    }

    /// Offers a payload under a key of an edge. It does not wait for a consumer, only for room in the pool.
    ///
    /// # Errors
    /// `InvalidArgument` for a key or payload that cannot be offered; `AccessDenied` for a connector that only
    /// receives; `DeadlineExceeded` or `PoolFull` when no room comes in time; `QueueFull` when too much is offered;
    /// `Closed`.
    pub fn put<'a>(
        &self,
        edge: &Edge,
        key: &str,
        payload: impl Into<Payload<'a>>,
        options: PutOptions,
    ) -> Result<Ticket> {
        let inner = self.inner();
        let deadline = inner.may_put(options)?;
        let stored = inner.place(payload.into(), deadline)?;
        inner.offer(&edge.qualify(key)?, Arc::new(stored), options, || Ok(()))
    }

    /// Offers any value that serde can serialise, as msgpack. Tensors inside are
    /// [`marker::Tensor`](crate::payload::marker::Tensor)s.
    ///
    /// # Errors
    /// As [`Connector::put`]; `InvalidArgument` for a value that cannot be serialised.
    pub fn put_value(
        &self,
        edge: &Edge,
        key: &str,
        value: &impl Serialize,
        options: PutOptions,
    ) -> Result<Ticket> {
        let inner = self.inner();
        let deadline = inner.may_put(options)?;
        let bytes = marker::to_vec(value)?;
        let stored =
            Stored::new(inner.place_bytes(&bytes, deadline)?, Manifest::of(PayloadKind::Value), false);
        inner.offer(&edge.qualify(key)?, Arc::new(stored), options, || Ok(()))
    }

    /// Lets an offer be served to `more` consumers than declared.
    ///
    /// # Errors
    /// `NotFound` or `Expired` when it is offered no more; `Closed`.
    pub fn retain(&self, edge: &Edge, key: &str, more: u32) -> Result<u32> {
        self.inner().check_open()?;
        let key = edge.qualify(key)?;
        self.inner().with_offers(|offers, now, out| offers.retain(&key, more, now, out))
    }

    /// Takes an offer back: consumers that have begun may finish, nobody else is served. Says whether there was one.
    ///
    /// # Errors
    /// `InvalidArgument` for a key that cannot be one; `Closed`.
    pub fn cleanup(&self, edge: &Edge, key: &str) -> Result<bool> {
        self.inner().check_open()?;
        let key = edge.qualify(key)?;
        Ok(self.inner().with_offers(|offers, now, out| offers.cleanup(&key, now, out)))
    }
}

impl Inner {
    /// Whether a buffer lies in the pool that consumers can reach.
    fn owns(&self, buffer: &ManagedBuffer) -> bool {
        buffer.is_of(&self.pool)
    }

    /// A payload in the pool, as it is offered.
    pub(super) fn place(&self, payload: Payload<'_>, deadline: Deadline) -> Result<Stored> {
        let bytes = |buffer| Stored::new(buffer, Manifest::of(PayloadKind::Bytes), true);
        Ok(match payload {
            Payload::Buffer(buffer) if self.owns(&buffer) => bytes(buffer),
            Payload::Buffer(buffer) => bytes(self.place_bytes(buffer.bytes()?, deadline)?),
            Payload::TensorBuffer(tensors) if self.owns(tensors.buffer()) => tensors.into_stored(None),
            Payload::TensorBuffer(tensors) => {
                let copy = self.place_bytes(tensors.buffer().bytes()?, deadline)?;
                tensors.into_stored(Some(copy))
            }
            Payload::Bytes([]) => return Err(no_bytes()),
            Payload::Shared(payload) if payload.is_empty() => return Err(no_bytes()),
            Payload::Bytes(payload) => bytes(self.place_bytes(payload, deadline)?),
            Payload::Shared(payload) => match self.share(&payload) {
                Some(piece) => Stored::in_pieces(None, vec![piece], Manifest::of(PayloadKind::Bytes), true),
                None => bytes(self.place_bytes(&payload, deadline)?),
            },
            Payload::Tensors(set) => self.place_tensors(set, deadline)?,
        })
    }

    pub(super) fn may_put(&self, options: PutOptions) -> Result<Deadline> {
        self.check_open()?;
        if !self.config.role.sends() {
            return Err(Error::new(
                ErrorKind::AccessDenied,
                "this connector has role receiver; put needs sender or both",
            )
            .with_advice("build the connector with another role"));
        }
        Ok(options
            .deadline
            .unwrap_or_else(|| Deadline::after(Duration::from_millis(self.config.put_wait_ms))))
    }

    /// Offers a payload under a qualified key, unless `may`, which is asked at the same moment, says why not.
    pub(super) fn offer(
        &self,
        key: &str,
        stored: Arc<Stored>,
        options: PutOptions,
        may: impl FnOnce() -> Result<()>,
    ) -> Result<Ticket> {
        let (len, is_fast_path) = (stored.len, stored.is_fast_path);
        let ttl = options.ttl.or_else(|| self.config.ttl());
        let configured = NonZeroU32::new(self.config.consumers).unwrap_or(NonZeroU32::MIN);
        let terms = Terms { consumers: options.consumers.unwrap_or(configured), ttl };
        let generation = self.with_offers(|offers, now, out| match may() {
            Ok(()) => offers.put(key, stored, terms, now, out),
            Err(error) => {
                out.push(Action::Release(stored));
                Err(error)
            }
        })?;
        self.counters.put(len);
        let (source_host, source_port) = self.advertised()?;
        Ok(Ticket {
            source_host,
            source_port,
            data_size: len,
            is_fast_path,
            own: Some(OwnTicket {
                generation,
                segment: self.engine.name().to_owned(),
                incarnation: self.engine.incarnation(),
            }),
        })
    }
}

fn no_bytes() -> Error {
    Error::invalid_argument("payload", "0 bytes", "at least one byte")
}
