//! `bench target`: memory that initiators read and write, and the far end of the bare loops.
//!
//! Initiators ask by JSON, a line each, over one TCP connection; a second connection serves the bare loops.

use std::io::{self, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use clap::Args;
use posthorse_core::Access;
use serde::{Deserialize, Serialize};

use super::end::End;
use super::grid::default_memory;
use super::limits;
use crate::outcome::{Failure, Outcome, note, print};
use crate::stage::{check_room, cpu_seconds};
use crate::units::{self, parse_address, parse_positive_size};
use crate::{channel, pattern};

/// How many connections are served at a time.
const MAX_CONNECTIONS: usize = 16;

/// The arguments of `bench target`.
#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// The address to listen on, such as 0.0.0.0:4789; port 0 lets the system choose
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    pub(crate) listen: SocketAddr,
    /// Memory to offer; by default a few times the last-level cache
    #[arg(long, value_name = "SIZE", value_parser = parse_positive_size)]
    pub(crate) memory: Option<u64>,
    /// Say where it listens in JSON, for the process that started it
    #[arg(long, hide = true)]
    pub(crate) announce: bool,
}

/// What an initiator asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Ask {
    /// Who are you?
    Hello,
    /// Write the pattern of `seed` to your memory.
    Fill { seed: u64, offset: u64, len: u64 },
    /// Is the pattern of `seed` in your memory?
    Check { seed: u64, offset: u64, len: u64 },
    /// How much processor time have you used?
    Cpu,
    /// Serve bare loops on this connection from now on.
    Bare,
}

/// What the target answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// This release, the engine's segment, and its memory.
    Hello { version: String, segment: String, address: u64, bytes: u64 },
    /// It is done.
    Done,
    /// Where the first wrong byte is, if one is.
    Checked { difference: Option<u64> },
    /// Seconds.
    Cpu { seconds: f64 },
    /// It could not be done.
    Failed { why: String },
}

/// Said once by a target that was started by this program.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Announcement {
    pub(crate) listening: SocketAddr,
}

/// Runs the command until it is ended.
pub(crate) fn run(args: &TargetArgs) -> Outcome {
    if let Some(memory) = args.memory {
        check_room("--memory", memory, 1)?;
    }
    let listener = TcpListener::bind(args.listen)
        .map_err(|error| Failure::Failed(format!("--listen {}: {error}", args.listen)))?;
    let address = listener.local_addr().map_err(Failure::io("ask for the own address"))?;
    let memory = args.memory.unwrap_or_else(default_memory);
    let end = Arc::new(Mutex::new(End::new(address.ip(), memory, Access::ReadWrite)?));
    if args.announce {
        channel::send(&mut io::stdout(), &Announcement { listening: address })
            .map_err(Failure::io("say where the target listens"))?;
    } else {
        print(&format!("{} of memory, listening on {address}; end with Ctrl-C\n", units::size(memory)))?;
    }
    let connections = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, from) = listener.accept().map_err(Failure::io("accept a connection"))?;
        if connections.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
            connections.fetch_sub(1, Ordering::Relaxed);
            note(format_args!("refused {from}: {MAX_CONNECTIONS} connections are served already"));
            continue;
        }
        let end = Arc::clone(&end);
        let place = Arc::clone(&connections);
        let serve = move || {
            if let Err(error) = serve(stream, &end) {
                note(format_args!("{from}: {error}"));
            }
            place.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(error) = thread::Builder::new().spawn(serve) {
            connections.fetch_sub(1, Ordering::Relaxed);
            note(format_args!("refused {from}: no thread can be had for it: {error}"));
        }
    }
}

fn serve(mut stream: TcpStream, end: &Mutex<End>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut requests = BufReader::new(stream.try_clone()?);
    while let Some(ask) = channel::receive::<Ask>(&mut requests)? {
        if ask == Ask::Bare {
            channel::send(&mut stream, &Answer::Done)?;
            // The client waits for the answer before it goes on, so nothing is left in the reader.
            return limits::serve(stream);
        }
        let answer = answer(&ask, &mut end.lock().unwrap_or_else(PoisonError::into_inner));
        channel::send(&mut stream, &answer)?;
    }
    Ok(())
}

fn answer(ask: &Ask, end: &mut End) -> Answer {
    let outcome = match *ask {
        Ask::Hello => Ok(Answer::Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            segment: end.engine.name().to_owned(),
            address: end.memory.address(),
            bytes: end.memory.len(),
        }),
        Ask::Fill { seed, offset, len } => end.bytes(offset, len).map(|bytes| {
            pattern::fill(seed, bytes);
            Answer::Done
        }),
        Ask::Check { seed, offset, len } => end.bytes(offset, len).map(|bytes| Answer::Checked {
            difference: pattern::difference(seed, bytes).map(|at| at as u64),
        }),
        Ask::Cpu => Ok(Answer::Cpu { seconds: cpu_seconds() }),
        Ask::Bare => Ok(Answer::Done),
    };
    outcome.unwrap_or_else(|error| Answer::Failed { why: error.to_string() })
}

/// An initiator's connection to a target.
#[derive(Debug)]
pub(crate) struct Connection {
    address: SocketAddr,
    stream: TcpStream,
    answers: BufReader<TcpStream>,
}

impl Connection {
    /// Connects within some seconds.
    pub(crate) fn open(address: SocketAddr) -> Outcome<Self> {
        let failed = || Failure::io(format!("connect to the target at {address}"));
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).map_err(failed())?;
        stream.set_nodelay(true).map_err(failed())?;
        // Filling a memory of many GB takes its time.
        stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(failed())?;
        let answers = BufReader::new(stream.try_clone().map_err(failed())?);
        Ok(Self { address, stream, answers })
    }

    /// The address of this host that leads to the target.
    pub(crate) fn own_address(&self) -> Outcome<SocketAddr> {
        self.stream.local_addr().map_err(Failure::io("ask for the own address"))
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&mut self, ask: &Ask) -> Outcome<Answer> {
        let address = self.address;
        let failed = || Failure::io(format!("ask the target at {address}"));
        channel::send(&mut self.stream, ask).map_err(failed())?;
        match channel::receive(&mut self.answers).map_err(failed())? {
            Some(Answer::Failed { why }) => Err(Failure::Failed(format!("the target at {address}: {why}"))),
            Some(answer) => Ok(answer),
            None => Err(Failure::Failed(format!("the target at {address} hung up"))),
        }
    }

    /// The target's processor time, in seconds.
    pub(crate) fn cpu_seconds(&mut self) -> Outcome<f64> {
        match self.ask(&Ask::Cpu)? {
            Answer::Cpu { seconds } => Ok(seconds),
            other => Err(strange(&other)),
        }
    }

    /// A further connection, on which the target serves bare loops.
    pub(crate) fn bare(&self) -> Outcome<TcpStream> {
        let mut other = Self::open(self.address)?;
        match other.ask(&Ask::Bare)? {
            Answer::Done => Ok(other.stream),
            answer => Err(strange(&answer)),
        }
    }
}

/// The failure of an answer that does not fit what was asked.
pub(crate) fn strange(answer: &Answer) -> Failure {
    Failure::Failed(format!("the target answers {answer:?}, which was not asked"))
}
