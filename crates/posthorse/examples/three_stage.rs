//! Three stages of a pipeline that streams, a process each: thinker, talker, vocoder.
//!
//! `cargo run -p posthorse --example three_stage` runs all three. Each stage starts the next and tells it where to ask.
//! A chunk goes out as soon as it is there, so the stages work at the same time; a sender waits when its consumer is
//! behind, and a stage that ends before its stream does is an error at both its neighbours.

use std::env;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use posthorse::{Connector, ConnectorConfig, DType, Deadline, Edge, Error, ErrorKind, FollowOptions};
use posthorse::{Result, Role, Source, StreamReceiver, TensorSet};

const REQUEST: &str = "request-1";
const CHUNKS: u64 = 24;
const HIDDEN: u64 = 2048;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => thinker(),
        ["talker", upstream] => talker(upstream),
        ["vocoder", upstream] => vocoder(upstream),
        _ => {
            eprintln!("usage: three_stage");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = outcome {
        eprintln!("three_stage: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Offers one hidden state after the other.
fn thinker() -> Result<()> {
    let connector = connector(Role::Sender)?;
    let talker = start("talker", &connector)?;
    let mut out = connector.open_stream(&Edge::new(0, 1), REQUEST)?;
    for number in 0..CHUNKS {
        let hidden: Vec<u8> = (0..HIDDEN).flat_map(|i| ((number + i) as f32).to_le_bytes()).collect();
        out.send(&chunk("hidden", DType::F32, &hidden)?, soon())?;
    }
    out.end()?;
    wait("talker", talker)
}

/// Makes codes of each hidden state, and offers them while the next one is on its way.
fn talker(upstream: &str) -> Result<()> {
    let connector = connector(Role::Both)?;
    let vocoder = start("vocoder", &connector)?;
    let mut input = follow(&connector, &Edge::new(0, 1), upstream)?;
    let mut out = connector.open_stream(&Edge::new(1, 2), REQUEST)?;
    while let Some(got) = input.next(soon())? {
        let hidden = got.tensor("hidden")?.elements::<f32>()?;
        let codes: Vec<u8> = hidden.iter().flat_map(|value| (2 * *value as i32).to_le_bytes()).collect();
        out.send(&chunk("codes", DType::I32, &codes)?, soon())?;
    }
    out.end()?;
    wait("vocoder", vocoder)
}

/// Takes the codes as they come, and checks them all.
fn vocoder(upstream: &str) -> Result<()> {
    let connector = connector(Role::Receiver)?;
    let mut input = follow(&connector, &Edge::new(1, 2), upstream)?;
    let mut chunks = 0;
    while let Some(got) = input.next(soon())? {
        let codes = got.tensor("codes")?.elements::<i32>()?;
        let right = (0..HIDDEN).map(|i| 2 * (chunks + i) as i32);
        if !codes.iter().copied().eq(right) {
            return Err(Error::new(ErrorKind::Corrupt, format!("chunk {chunks} is not as it was sent")));
        }
        chunks += 1;
    }
    println!("{chunks} chunks came through three stages: every code is right");
    Ok(())
}

/// A chunk: one tensor.
fn chunk<'a>(name: &str, dtype: DType, bytes: &'a [u8]) -> Result<TensorSet<'a>> {
    let mut set = TensorSet::new();
    set.push(name, dtype, &[HIDDEN], bytes)?;
    Ok(set)
}

fn follow(connector: &Connector, edge: &Edge, upstream: &str) -> Result<StreamReceiver> {
    let (host, port) = upstream
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host, port.parse().ok()?)))
        .ok_or_else(|| Error::invalid_argument("the address upstream", upstream, "HOST:PORT"))?;
    connector.follow_stream(
        edge,
        REQUEST,
        FollowOptions { source: Source::At(host, port), ..Default::default() },
    )
}

/// Long enough for any chunk.
fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(10))
}

fn connector(role: Role) -> Result<Connector> {
    let config = ConnectorConfig { role, zmq_port: 0, memory_pool_size: 16 << 20, ..Default::default() };
    Connector::builder().config(config).build()
}

/// Starts the stage that asks `upstream`.
fn start(stage: &str, upstream: &Connector) -> Result<Child> {
    let (host, port) = upstream.address()?;
    env::current_exe()
        .and_then(|this| Command::new(this).args([stage, &format!("{host}:{port}")]).spawn())
        .map_err(|error| Error::os(&format!("start the {stage}"), &error))
}

/// A stage lives until the one behind it has taken all there is.
fn wait(stage: &str, mut child: Child) -> Result<()> {
    match child.wait().map_err(|error| Error::os(&format!("wait for the {stage}"), &error))? {
        status if status.success() => Ok(()),
        status => Err(Error::new(ErrorKind::Aborted, format!("the {stage} ended with {status}"))),
    }
}
