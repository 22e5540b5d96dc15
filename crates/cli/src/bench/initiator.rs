//! The initiator's side of the engine's benches: what `bench initiator` and `bench local` measure.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use clap::Args;
use posthorse_core::{
    Access, Deadline, Error, ErrorKind, Opcode, Priority, RemoteRange, Route, TransferRequest,
};
use posthorse_engine::{Segment, SubmitOptions};

use super::SPIN;
use super::end::End;
use super::grid::{Grid, Op, ROUNDS, Transport};
use super::limits::{Areas, Limit, MemoryLimit, StreamLimit};
use super::meter::{Latencies, Meter, Round, Span};
use super::row::{Cell, Row, RowFile, progress, render};
use super::target::{Answer, Ask, Connection, strange};
use crate::outcome::{Failure, Outcome, note, print};
use crate::pattern;
use crate::stage::cpu_seconds;
use crate::units::parse_address;

/// How long a transfer of any size may take before the bench gives it up.
const PATIENCE: Duration = Duration::from_secs(60);

/// The arguments of `bench initiator`.
#[derive(Debug, Args)]
pub(crate) struct InitiatorArgs {
    /// The address that `posthorse bench target` listens on
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub(crate) target: SocketAddr,
    #[command(flatten)]
    pub(crate) grid: Grid,
}

/// Runs `bench initiator`.
pub(crate) fn run(args: &InitiatorArgs) -> Outcome {
    measure("initiator", args.target, &args.grid)
}

/// Measures every cell of the grid against the target at `address`, and prints the rows as a table.
pub(crate) fn measure(suite: &'static str, address: SocketAddr, grid: &Grid) -> Outcome {
    let mut initiator = Initiator::new(address)?;
    let transports = initiator.transports(&grid.transport)?;
    // Emptied only now that there is something to measure.
    let mut file = RowFile::create(grid.json.as_deref())?;
    let mut cells = Vec::new();
    for transport in transports {
        for &op in &grid.op {
            let fits = grid.cells(suite, transport, op, initiator.memory);
            cells.extend(fits.into_iter().map(|cell| (transport, op, cell)));
        }
    }
    let measured = cells.iter().filter(|(.., cell)| cell.is_ok()).count() as u32;
    // Once for the product and once for the limit.
    if measured > 0 {
        note(format_args!("{measured} measurements, about {:.0?} in all", 2 * grid.duration * measured));
    }
    let mut rows = Vec::new();
    // What does not fit does so whatever the transport and operation.
    let mut left_out = HashSet::new();
    for (transport, op, cell) in cells {
        match cell {
            Ok(cell) => {
                let row = initiator.measure(transport, op, &cell, grid.duration)?;
                note(progress(&row));
                file.write(&row)?;
                rows.push(row);
            }
            Err(why) => {
                if left_out.insert(why.clone()) {
                    note(why);
                }
            }
        }
    }
    if rows.is_empty() {
        return Err(Failure::Usage("no cell fits the target's memory: give it a larger --memory".to_owned()));
    }
    print(&render(&rows))
}

struct Initiator {
    target: Connection,
    segment: Segment,
    /// The target's memory.
    address: u64,
    /// Bytes of the memory that both ends have.
    memory: u64,
    areas: Option<Areas>,
    end: End,
}

impl Initiator {
    fn new(address: SocketAddr) -> Outcome<Self> {
        let mut target = Connection::open(address)?;
        let (segment, memory_address, bytes) = match target.ask(&Ask::Hello)? {
            Answer::Hello { segment, address, bytes, .. } => (segment, address, bytes),
            other => return Err(strange(&other)),
        };
        // The target may have more than this host can spare.
        let own = posthorse_memory::available_memory().map_or(bytes, |available| bytes.min(available / 4));
        let end = End::new(target.own_address()?.ip(), own, Access::None)?;
        let segment = end.engine.open(&segment, Deadline::after(PATIENCE))?;
        Ok(Self { target, segment, address: memory_address, memory: own, areas: None, end })
    }

    /// Those of the wanted transports that reach the target; without any wanted, all that do.
    fn transports(&mut self, wanted: &[Transport]) -> Outcome<Vec<Transport>> {
        let named = !wanted.is_empty();
        let candidates = if named { wanted } else { &[Transport::Shm, Transport::Tcp] };
        let mut found: Vec<Transport> = Vec::new();
        let mut reasons = Vec::new();
        for &transport in candidates {
            match self.reach(transport) {
                Ok(()) if found.contains(&transport) => {}
                Ok(()) => found.push(transport),
                Err(error) => {
                    let reason = format!("{} does not reach the target: {error}", transport.name());
                    if named {
                        return Err(Failure::Unavailable(reason));
                    }
                    note(format_args!("left out: {reason}"));
                    reasons.push(reason);
                }
            }
        }
        if found.is_empty() { Err(Failure::Unavailable(reasons.join("; "))) } else { Ok(found) }
    }

    /// Moves one byte over a transport.
    fn reach(&self, transport: Transport) -> Result<(), Error> {
        let route = Route::Require(self.end.engine.transport_id(transport.name())?);
        self.shape(Op::Write, route, 1, 1).run(0)
    }

    fn shape(&self, op: Op, route: Route, block: u64, batch: u64) -> Shape<'_> {
        let opcode = match op {
            Op::Read => Opcode::Read,
            Op::Write => Opcode::Write,
        };
        Shape { end: &self.end, segment: &self.segment, address: self.address, opcode, route, block, batch }
    }

    fn measure(&mut self, transport: Transport, op: Op, cell: &Cell, duration: Duration) -> Outcome<Row> {
        let route = Route::Require(self.end.engine.transport_id(transport.name())?);
        self.verify(op, route, cell)?;
        let mut limit = self.limit(transport, op, cell)?;
        let mut meter = Meter::new();
        let (mut cpu, mut bytes) = (0.0, 0);
        let part = self.memory / cell.threads / (cell.block * cell.batch) * (cell.block * cell.batch);
        let mut cursors = vec![0; cell.threads as usize];
        for _ in 0..ROUNDS {
            let before = cpu_seconds() + self.target.cpu_seconds()?;
            let shape = self.shape(op, route, cell.block, cell.batch);
            let round = run_threads(&shape, part, &mut cursors, duration / ROUNDS)?;
            cpu += cpu_seconds() + self.target.cpu_seconds()? - before;
            bytes += round.bytes;
            meter.add(&round);
            self.measure_limit(&mut limit, duration / ROUNDS)?;
        }
        let best: Limit = match &limit {
            CellLimit::Memory(limit) => limit.best(),
            CellLimit::Stream(limit) => limit.best(),
        };
        Ok(Row::new(cell, &meter, cpu / (bytes.max(1) as f64 / 1e9), &best))
    }

    /// Makes one batch, and checks that every byte of it is where it should be.
    fn verify(&mut self, op: Op, route: Route, cell: &Cell) -> Outcome {
        let (len, seed) = (cell.block * cell.batch, crate::random()?);
        let fill = |seed| Ask::Fill { seed, offset: 0, len };
        // The destination holds something else before.
        match op {
            Op::Write => {
                pattern::fill(seed, self.end.bytes(0, len)?);
                self.target.ask(&fill(!seed))?;
            }
            Op::Read => {
                pattern::fill(!seed, self.end.bytes(0, len)?);
                self.target.ask(&fill(seed))?;
            }
        }
        self.shape(op, route, cell.block, cell.batch).run(0)?;
        let difference = match op {
            Op::Read => pattern::difference(seed, self.end.bytes(0, len)?).map(|at| at as u64),
            Op::Write => match self.target.ask(&Ask::Check { seed, offset: 0, len })? {
                Answer::Checked { difference } => difference,
                other => return Err(strange(&other)),
            },
        };
        match difference {
            None => Ok(()),
            Some(at) => Err(Failure::Failed(format!(
                "{} {} of {} x {} bytes: byte {at} is wrong at its destination",
                cell.transport, cell.op, cell.batch, cell.block
            ))),
        }
    }

    fn limit(&mut self, transport: Transport, op: Op, cell: &Cell) -> Outcome<CellLimit> {
        match transport {
            Transport::Shm => {
                let memory = self.memory as usize;
                self.areas.get_or_insert_with(|| Areas::new(memory));
                Ok(CellLimit::Memory(MemoryLimit::new(cell.block as usize, cell.batch as usize)))
            }
            Transport::Tcp => {
                let limit =
                    StreamLimit::new(self.target.bare()?, op == Op::Read, cell.block * cell.batch, SPIN);
                limit.map(CellLimit::Stream).map_err(Failure::io("measure a bare TCP stream"))
            }
        }
    }

    fn measure_limit(&mut self, limit: &mut CellLimit, duration: Duration) -> Outcome {
        match limit {
            CellLimit::Memory(limit) => {
                if let Some(areas) = &mut self.areas {
                    limit.round(areas, duration);
                }
                Ok(())
            }
            CellLimit::Stream(limit) => {
                limit.round(duration).map_err(Failure::io("measure a bare TCP stream"))
            }
        }
    }
}

#[derive(Debug)]
enum CellLimit {
    Memory(MemoryLimit),
    Stream(StreamLimit),
}

/// A batch that can be made at any offset, the same at both ends.
#[derive(Clone, Copy)]
struct Shape<'a> {
    end: &'a End,
    segment: &'a Segment,
    address: u64,
    opcode: Opcode,
    route: Route,
    block: u64,
    batch: u64,
}

impl Shape<'_> {
    fn request(&self, offset: u64) -> TransferRequest {
        TransferRequest {
            opcode: self.opcode,
            local: self.end.memory.at(offset),
            remote: RemoteRange { segment: self.segment.id(), address: self.address + offset, token: None },
            len: self.block,
            priority: Priority::Medium,
            route: self.route,
            group: 0,
        }
    }

    /// Makes one batch of adjacent blocks from `offset` on.
    fn run(&self, offset: u64) -> Result<(), Error> {
        let requests: Vec<_> =
            (0..self.batch).map(|index| self.request(offset + index * self.block)).collect();
        self.submit(&requests)
    }

    fn submit(&self, requests: &[TransferRequest]) -> Result<(), Error> {
        let mut batch = self.end.engine.batch();
        let options = SubmitOptions { deadline: Deadline::after(PATIENCE), ..SubmitOptions::default() };
        batch.submit(requests, options)?;
        batch.wait(Deadline::NEVER)
    }

    /// Makes batches for `duration`, going round the `part` bytes from `start` on.
    fn run_for(&self, start: u64, part: u64, cursor: &mut u64, duration: Duration) -> Result<Span, Error> {
        let mut requests: Vec<_> = (0..self.batch).map(|_| self.request(start)).collect();
        let mut latencies = Latencies::new();
        let mut bytes = 0;
        let begin = Instant::now();
        let mut now = begin;
        while bytes == 0 || now.duration_since(begin) < duration {
            for request in &mut requests {
                request.local = self.end.memory.at(start + *cursor);
                request.remote.address = self.address + start + *cursor;
                *cursor += self.block;
                bytes += self.block;
            }
            if *cursor + self.block * self.batch > part {
                *cursor = 0;
            }
            self.submit(&requests)?;
            let after = Instant::now();
            latencies.record(after.duration_since(now));
            now = after;
        }
        Ok(Span { begin, end: now, bytes, latencies })
    }
}

/// A round of as many threads as there are cursors, each with its own part of the memory.
fn run_threads(shape: &Shape<'_>, part: u64, cursors: &mut [u64], duration: Duration) -> Outcome<Round> {
    let barrier = Barrier::new(cursors.len());
    let spans: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(cursors)
            .map(|(index, cursor)| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    shape.run_for(index * part, part, cursor, duration)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let ended = |_| Error::new(ErrorKind::Internal, "a thread of the bench has panicked");
    let spans = spans.into_iter().map(|span| span.map_err(ended)?).collect::<Result<Vec<_>, Error>>()?;
    Ok(Round::of(spans))
}
