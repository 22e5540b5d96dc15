//! Two stages in two processes of this host: the producer here, the consumer in a child.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use posthorse_core::{Deadline, Error, ErrorKind};
use posthorse_omni::config::Role;
use posthorse_omni::{Connector, ConnectorConfig, Edge, PutOptions};
use serde::{Deserialize, Serialize};

use super::consumer::{Got, Order, Reply, Setup};
use super::payload::{Payload, sha256};
use crate::child::Peer;
use crate::outcome::{Failure, Outcome, note};
use crate::stage::{self, cpu_seconds};

/// The stages of the demo's one edge.
pub(super) const FROM: &str = "thinker";
pub(super) const TO: &str = "talker";
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(90);
/// What a tensor's name and shape may need beside its bytes in an object.
const HEADER_BYTES: u64 = 4096;

/// How a payload is offered and got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// A buffer of the producer's pool.
    ZeroCopy,
    /// Bytes.
    Copy,
    /// Tensors by name.
    Object,
    /// A buffer of the producer's pool that the consumer reads in place.
    Lease,
}

impl Mode {
    pub(crate) const ALL: [Self; 4] = [Self::ZeroCopy, Self::Copy, Self::Object, Self::Lease];

    /// The modes that a transport has: a lease reads the producer's memory, so there is none between hosts.
    pub(crate) fn over(transport: &str) -> Vec<Self> {
        Self::ALL.into_iter().filter(|mode| *mode != Self::Lease || transport == Choice::Shm.name()).collect()
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero_copy",
            Self::Copy => "copy",
            Self::Object => "object",
            Self::Lease => "lease",
        }
    }
}

/// Which transport carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Choice {
    /// The best there is
    Auto,
    /// Shared memory or nothing
    Shm,
    /// TCP or nothing
    Tcp,
    /// RDMA or nothing
    #[cfg(feature = "rdma")]
    Rdma,
}

impl Choice {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            #[cfg(feature = "rdma")]
            Self::Rdma => "rdma",
        }
    }
}

/// One transfer, as it went.
#[derive(Debug, Clone)]
pub(crate) struct Transfer {
    pub(crate) mode: Mode,
    pub(crate) got: Got,
    pub(crate) put_ms: f64,
    /// The producer's processor time, from the beginning of the put to the end of the get, in seconds.
    pub(crate) put_cpu_seconds: f64,
    /// Whether the consumer has every byte that the producer has, under the right names.
    pub(crate) verified: bool,
}

/// What a put took.
#[derive(Debug, Clone, Copy)]
struct Put {
    ms: f64,
    /// The processor time that this process had used before.
    cpu_before: f64,
}

/// The two stages.
#[derive(Debug)]
pub(crate) struct Pair {
    consumer: Peer,
    producer: Connector,
    edge: Edge,
    sha256: String,
}

impl Pair {
    /// Starts both for payloads like this one.
    pub(crate) fn new(transport: Choice, payload: &Payload) -> Outcome<Self> {
        let bytes = payload.bytes().len() as u64;
        // Two payloads at a time: the next is put while the last is given back.
        let pool_bytes = 2 * (bytes + payload.tensors.len() as u64 * HEADER_BYTES) + (1 << 20);
        let mut consumer = Peer::spawn("consumer", &["demo-consumer"])?;
        let producer =
            stage::connector(Role::Sender, transport.name(), pool_bytes, ConnectorConfig::default())?;
        let (host, port) = producer.address()?;
        let tensors = payload.tensors.clone();
        consumer.send(&Setup { transport: transport.name().to_owned(), pool_bytes, host, port, tensors })?;
        match consumer.receive(PATIENCE)? {
            Reply::Ready => {}
            Reply::Failed { why, .. } => return Err(Failure::Failed(format!("the consumer: {why}"))),
            Reply::Got(_) => return Err(Failure::Failed("the consumer got what nobody ordered".to_owned())),
        }
        Ok(Self { consumer, producer, edge: Edge::new(FROM, TO), sha256: sha256([payload.bytes()]) })
    }

    /// One byte goes ahead, which makes the connections and finds out what carries the rest.
    pub(crate) fn first_contact(&mut self, transport: Choice) -> Outcome<String> {
        self.producer.put(&self.edge, "hello", &b"!"[..], PutOptions::default())?;
        match self.get(Mode::Copy, "hello", true)? {
            Ok(got) => Ok(got.transport),
            Err((kind, why)) if transport != Choice::Auto && is_absence(kind) => {
                Err(Failure::Unavailable(format!("--transport {}: {why}", transport.name())))
            }
            Err((_, why)) => Err(Failure::Failed(why)),
        }
    }

    fn get(
        &mut self,
        mode: Mode,
        key: &str,
        verify: bool,
    ) -> Outcome<Result<Got, (Option<ErrorKind>, String)>> {
        self.consumer.send(&Order { mode, key: key.to_owned(), verify })?;
        match self.consumer.receive(PATIENCE)? {
            Reply::Got(got) => Ok(Ok(got)),
            Reply::Failed { code, why } => Ok(Err((ErrorKind::from_code(code), why))),
            Reply::Ready => Err(Failure::Failed("the consumer said twice that it is ready".to_owned())),
        }
    }

    /// Moves the payload once, under a key of its own. Unless it is to be verified, its bytes are not looked at.
    pub(crate) fn transfer(
        &mut self,
        mode: Mode,
        payload: &Payload,
        key: &str,
        verify: bool,
    ) -> Outcome<Transfer> {
        let put = self.put(mode, payload, key)?;
        let got = self
            .get(mode, key, verify)?
            .map_err(|(_, why)| Failure::Failed(format!("{}, transfer {key}: {why}", mode.name())))?;
        if let Some(complaint) = &got.complaint {
            note(format_args!("{}, transfer {key}: {complaint}", mode.name()));
        }
        let verified = got.complaint.is_none()
            && got.bytes == payload.bytes().len() as u64
            && got.sha256.as_ref() == Some(&self.sha256);
        Ok(Transfer { mode, got, put_ms: put.ms, put_cpu_seconds: cpu_seconds() - put.cpu_before, verified })
    }

    /// Offers the payload: in a pooled buffer it lies already when the time begins to run.
    fn put(&self, mode: Mode, payload: &Payload, key: &str) -> Result<Put, Error> {
        let (producer, edge, options) = (&self.producer, &self.edge, PutOptions::default());
        let filled = match mode {
            Mode::ZeroCopy | Mode::Lease => {
                let mut buffer = producer.alloc(payload.bytes().len() as u64, Deadline::after(PATIENCE))?;
                buffer.copy_from_slice(payload.bytes())?;
                Some(buffer)
            }
            Mode::Copy | Mode::Object => None,
        };
        let (begin, cpu_before) = (Instant::now(), cpu_seconds());
        match (filled, mode) {
            (Some(buffer), _) => producer.put(edge, key, buffer, options)?,
            (None, Mode::Object) => {
                let set = payload.set()?;
                producer.put(edge, key, &set, options)?
            }
            (None, _) => producer.put(edge, key, payload.bytes(), options)?,
        };
        Ok(Put { ms: begin.elapsed().as_secs_f64() * 1000.0, cpu_before })
    }

    /// Ends both.
    pub(crate) fn finish(self) -> Outcome {
        self.consumer.finish(PATIENCE)?;
        self.producer.close();
        Ok(())
    }
}

/// Whether a failure means that the transport cannot be had here, rather than that it failed.
fn is_absence(kind: Option<ErrorKind>) -> bool {
    matches!(kind, Some(ErrorKind::NoPath | ErrorKind::Unsupported | ErrorKind::NotFound))
}
