//! `bench omni`: the connector's modes between two processes of this host.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::grid::{ROUNDS, Transport};
use super::limits::{Areas, MemoryLimit, StreamLimit};
use super::meter::{Latencies, Meter, Round};
use super::row::{Cell, Row, RowFile, progress, render};
use super::target::{Announcement, Connection};
use super::{SPIN, grid};
use crate::child::Peer;
use crate::demo::{Choice, Mode, Pair, Payload};
use crate::outcome::{Failure, Outcome, note, print};
use crate::units::{parse_duration, parse_positive_size};

/// The arguments of `bench omni`.
#[derive(Debug, Args)]
pub(crate) struct OmniArgs {
    /// Transports, each required in its turn; all that this host has by default
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    transport: Vec<Transport>,
    /// Bytes of a payload, rounded down to whole tokens of 57344 bytes
    #[arg(long, value_delimiter = ',', default_value = "1MiB,16MiB,190MiB", value_name = "SIZES",
          value_parser = parse_positive_size)]
    block: Vec<u64>,
    /// How long each cell is measured; its limits take as long again
    #[arg(long, default_value = "3s", value_name = "TIME", value_parser = parse_duration)]
    duration: Duration,
    /// Write the results to this file too, as JSON Lines
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &OmniArgs) -> Outcome {
    let payloads: Vec<Payload> = args
        .block
        .iter()
        .map(|&block| Payload::kv_cache("--block", Some(block), crate::random()?))
        .collect::<Outcome<_>>()?;
    let mut file = RowFile::create(args.json.as_deref())?;
    let named = !args.transport.is_empty();
    let transports = if named { &args.transport[..] } else { &[Transport::Shm, Transport::Tcp] };
    let mut rows = Vec::new();
    for &transport in transports {
        for payload in &payloads {
            match bench(transport, payload, args.duration, &mut file) {
                Ok(measured) => rows.extend(measured),
                Err(Failure::Unavailable(why)) if !named => {
                    note(format_args!("left out: {why}"));
                    break;
                }
                Err(failure) => return Err(failure),
            }
        }
    }
    if rows.is_empty() {
        return Err(Failure::Unavailable("no transport connects two processes here".to_owned()));
    }
    print(&render(&rows))
}

/// Every mode of one payload over one transport.
fn bench(
    transport: Transport,
    payload: &Payload,
    duration: Duration,
    file: &mut RowFile,
) -> Outcome<Vec<Row>> {
    let choice = match transport {
        Transport::Shm => Choice::Shm,
        Transport::Tcp => Choice::Tcp,
    };
    let mut pair = Pair::new(choice, payload)?;
    pair.first_contact(choice)?;
    let mut limit = Limit::new(transport, payload.bytes().len())?;
    let mut rows = Vec::new();
    for mode in Mode::over(transport.name()) {
        let row = measure(&mut pair, mode, payload, transport, duration, &mut limit)?;
        note(progress(&row));
        file.write(&row)?;
        rows.push(row);
    }
    pair.finish()?;
    Ok(rows)
}

fn measure(
    pair: &mut Pair,
    mode: Mode,
    payload: &Payload,
    transport: Transport,
    duration: Duration,
    limit: &mut Limit,
) -> Outcome<Row> {
    let first = pair.transfer(mode, payload, "first", true)?;
    if !first.verified {
        return Err(Failure::Failed(format!("{}: what arrived is not what was put", mode.name())));
    }
    let mut meter = Meter::new();
    let (mut cpu, mut bytes) = (0.0, 0);
    let mut consumer_cpu = pair.transfer(mode, payload, "second", false)?.got.cpu_seconds;
    for index in 0..ROUNDS {
        let mut round = Round { bytes: 0, elapsed: Duration::ZERO, latencies: Latencies::new() };
        while round.bytes == 0 || round.elapsed < duration / ROUNDS {
            let key = format!("{}-{index}-{}", mode.name(), round.bytes);
            let transfer = pair.transfer(mode, payload, &key, false)?;
            cpu += transfer.put_cpu_seconds + transfer.got.cpu_seconds - consumer_cpu;
            consumer_cpu = transfer.got.cpu_seconds;
            let elapsed = Duration::from_secs_f64((transfer.put_ms + transfer.got.get_ms) / 1000.0);
            round.bytes += transfer.got.bytes;
            round.elapsed += elapsed;
            round.latencies.record(elapsed);
        }
        bytes += round.bytes;
        meter.add(&round);
        limit.round(duration / ROUNDS)?;
    }
    let cell = Cell {
        suite: "omni",
        transport: transport.name().to_owned(),
        op: mode.name().to_owned(),
        block: payload.bytes().len() as u64,
        batch: 1,
        threads: 1,
    };
    Ok(Row::new(&cell, &meter, cpu / (bytes.max(1) as f64 / 1e9), &limit.best()))
}

/// The limit of one size, measured anew in each mode's rounds.
#[derive(Debug)]
enum Limit {
    Memory { areas: Areas, limit: MemoryLimit },
    Stream { _target: Peer, limit: StreamLimit },
}

impl Limit {
    fn new(transport: Transport, bytes: usize) -> Outcome<Self> {
        match transport {
            Transport::Shm => {
                let areas = Areas::new((grid::default_memory() as usize).max(bytes));
                Ok(Self::Memory { areas, limit: MemoryLimit::new(bytes, 1) })
            }
            Transport::Tcp => {
                // Its memory is not used, only the far end of its bare loops.
                let arguments =
                    ["bench", "target", "--listen", "127.0.0.1:0", "--announce", "--memory", "1MiB"];
                let mut target = Peer::spawn("target", &arguments)?;
                let Announcement { listening } = target.receive(Duration::from_secs(60))?;
                let stream = Connection::open(listening)?.bare()?;
                let limit = StreamLimit::new(stream, false, bytes as u64, SPIN)
                    .map_err(Failure::io("measure a bare TCP stream"))?;
                Ok(Self::Stream { _target: target, limit })
            }
        }
    }

    fn round(&mut self, duration: Duration) -> Outcome {
        match self {
            Self::Memory { areas, limit } => limit.round(areas, duration),
            Self::Stream { limit, .. } => {
                limit.round(duration).map_err(Failure::io("measure a bare TCP stream"))?;
            }
        }
        Ok(())
    }

    fn best(&self) -> super::limits::Limit {
        match self {
            Self::Memory { limit, .. } => limit.best(),
            Self::Stream { limit, .. } => limit.best(),
        }
    }
}
