//! The demo's second process: gets what it is told to, and says what it got.

use std::io::{self, BufReader};
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind};
use posthorse_omni::config::Role;
use posthorse_omni::{Connector, ConnectorConfig, Edge, GetOptions, Received, Source};
use serde::{Deserialize, Serialize};

use super::pair::{FROM, Mode, TO};
use super::payload::{TensorInfo, sha256};
use crate::outcome::{Failure, Outcome};
use crate::stage::cpu_seconds;
use crate::{channel, stage};

/// How long one get may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the producer says first.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    /// `auto`, or the transport that is required.
    pub(crate) transport: String,
    pub(crate) pool_bytes: u64,
    /// The producer's control address.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// What the consumer knows of the payload beforehand, as a stage knows its model.
    pub(crate) tensors: Vec<TensorInfo>,
}

/// What the consumer is to get.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) mode: Mode,
    pub(crate) key: String,
    /// Whether to look at every byte.
    pub(crate) verify: bool,
}

/// What the consumer says: first that it is ready, then once for each order.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    Ready,
    Got(Got),
    Failed { code: u16, why: String },
}

/// What was got.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Got {
    pub(crate) transport: String,
    pub(crate) get_ms: f64,
    /// Bytes of the tensors.
    pub(crate) bytes: u64,
    pub(crate) tensors: u64,
    /// Of the payload in order, if every byte was looked at.
    pub(crate) sha256: Option<String>,
    /// The processor time that this process has used, in seconds.
    pub(crate) cpu_seconds: f64,
    /// What is not as it should be, apart from the bytes.
    pub(crate) complaint: Option<String>,
}

/// Runs the process until the producer hangs up.
pub(crate) fn run() -> Outcome {
    let mut orders = BufReader::new(io::stdin());
    let Some(setup) = channel::receive::<Setup>(&mut orders).map_err(Failure::io("read the setup"))? else {
        return Ok(());
    };
    let connector = match stage::connector(
        Role::Receiver,
        &setup.transport,
        setup.pool_bytes,
        ConnectorConfig::default(),
    ) {
        Ok(connector) => {
            say(&Reply::Ready)?;
            connector
        }
        Err(error) => return say(&failed(&error)),
    };
    while let Some(order) = channel::receive::<Order>(&mut orders).map_err(Failure::io("read an order"))? {
        say(&get(&connector, &setup, &order).unwrap_or_else(|error| failed(&error)))?;
    }
    connector.close();
    Ok(())
}

fn say(reply: &Reply) -> Outcome {
    channel::send(&mut io::stdout(), reply).map_err(Failure::io("answer the producer"))
}

fn failed(error: &Error) -> Reply {
    Reply::Failed { code: error.code(), why: error.to_string() }
}

fn get(connector: &Connector, setup: &Setup, order: &Order) -> Result<Reply, Error> {
    let options = GetOptions {
        deadline: Some(Deadline::after(PATIENCE)),
        source: Source::At(&setup.host, setup.port),
        lease: order.mode == Mode::Lease,
    };
    let begin = Instant::now();
    let received = connector.get(&Edge::new(FROM, TO), &order.key, options)?;
    let get_ms = begin.elapsed().as_secs_f64() * 1000.0;
    let cpu_seconds = cpu_seconds();
    let parts = match order.mode {
        Mode::Object => received
            .tensors()
            .iter()
            .map(|desc| received.tensor(&desc.name).map(|tensor| tensor.bytes()))
            .collect::<Result<_, _>>()?,
        Mode::Copy => vec![received.bytes()?],
        Mode::ZeroCopy | Mode::Lease => split(&setup.tensors, received.bytes()?)?,
    };
    Ok(Reply::Got(Got {
        transport: received.transport().to_owned(),
        get_ms,
        bytes: parts.iter().map(|part| part.len() as u64).sum(),
        tensors: parts.len() as u64,
        sha256: order.verify.then(|| sha256(parts)),
        cpu_seconds,
        complaint: complaint(setup, order.mode, &received),
    }))
}

/// The tensors that the consumer knows to be in these bytes.
fn split<'a>(tensors: &[TensorInfo], bytes: &'a [u8]) -> Result<Vec<&'a [u8]>, Error> {
    let expected: u64 = tensors.iter().map(|info| info.bytes).sum();
    if expected != bytes.len() as u64 {
        let message = format!("{} bytes arrived; the tensors have {expected}", bytes.len());
        return Err(Error::new(ErrorKind::Corrupt, message));
    }
    let mut rest = bytes;
    Ok(tensors
        .iter()
        .map(|info| {
            let (tensor, after) = rest.split_at(info.bytes as usize);
            rest = after;
            tensor
        })
        .collect())
}

/// What is wrong with the form of what arrived.
fn complaint(setup: &Setup, mode: Mode, received: &Received) -> Option<String> {
    match mode {
        Mode::Lease if !received.is_leased() => Some("it is a copy, not a lease".to_owned()),
        Mode::Object => {
            let got = received.tensors().iter().map(|desc| (&desc.name, desc.dtype, &desc.shape));
            let wanted = setup.tensors.iter().map(|info| (&info.name, info.dtype, &info.shape));
            (!got.eq(wanted)).then(|| "names, types or shapes differ from those that were put".to_owned())
        }
        _ => None,
    }
}
