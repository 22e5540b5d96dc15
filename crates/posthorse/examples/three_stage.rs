//! Three stages of a pipeline that streams, a process each: thinker, talker, vocoder.
//!
//! `cargo run -p posthorse --example three_stage` runs all three. Each stage starts the next and tells it where to ask.
//! A chunk is offered as soon as it is there, under a key of its own, so the stages work at the same time; a `get`
//! that comes before its `put` waits for it, and a `put` that finds the pool full waits for chunks to be taken.

use std::env;
use std::process::{Child, Command, ExitCode};
use std::time::Duration;

use posthorse::connector::key;
use posthorse::connector::payload::PayloadKind;
use posthorse::{
    Connector, ConnectorConfig, DType, Deadline, Edge, Error, ErrorKind, GetOptions, PutOptions,
};
use posthorse::{Received, Result, Role, Source, TensorSet};

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
    let out = Stream { connector: &connector, edge: Edge::new(0, 1) };
    for chunk in 0..CHUNKS {
        let hidden: Vec<u8> = (0..HIDDEN).flat_map(|i| ((chunk + i) as f32).to_le_bytes()).collect();
        out.send(chunk, "hidden", DType::F32, &hidden)?;
    }
    out.end(CHUNKS)?;
    wait("talker", talker)
}

/// Makes codes of each hidden state, and offers them while the next one is on its way.
fn talker(upstream: &str) -> Result<()> {
    let connector = connector(Role::Both)?;
    let vocoder = start("vocoder", &connector)?;
    let input = Stream { connector: &connector, edge: Edge::new(0, 1) };
    let out = Stream { connector: &connector, edge: Edge::new(1, 2) };
    let mut chunk = 0;
    while let Some(got) = input.next(chunk, upstream)? {
        let hidden = got.tensor("hidden")?.elements::<f32>()?;
        let codes: Vec<u8> = hidden.iter().flat_map(|value| (2 * *value as i32).to_le_bytes()).collect();
        out.send(chunk, "codes", DType::I32, &codes)?;
        chunk += 1;
    }
    out.end(chunk)?;
    wait("vocoder", vocoder)
}

/// Takes the codes as they come, and checks them all.
fn vocoder(upstream: &str) -> Result<()> {
    let connector = connector(Role::Receiver)?;
    let input = Stream { connector: &connector, edge: Edge::new(1, 2) };
    let mut chunk = 0;
    while let Some(got) = input.next(chunk, upstream)? {
        let codes = got.tensor("codes")?.elements::<i32>()?;
        let right = (0..HIDDEN).map(|i| 2 * (chunk + i) as i32);
        if !codes.iter().copied().eq(right) {
            return Err(Error::new(ErrorKind::Corrupt, format!("chunk {chunk} is not as it was sent")));
        }
        chunk += 1;
    }
    println!("{chunk} chunks came through three stages: every code is right");
    Ok(())
}

/// The chunks of one request on one edge, counted from zero.
struct Stream<'a> {
    connector: &'a Connector,
    edge: Edge,
}

impl Stream<'_> {
    fn key(&self, chunk: u64) -> String {
        key::chunk(REQUEST, &self.edge.from, chunk)
    }

    fn send(&self, chunk: u64, name: &str, dtype: DType, bytes: &[u8]) -> Result<()> {
        let mut set = TensorSet::new();
        set.push(name, dtype, &[HIDDEN], bytes)?;
        self.connector.put(&self.edge, &self.key(chunk), &set, PutOptions::default()).map(drop)
    }

    /// A value in place of tensors is the end: it says how many chunks there were.
    fn end(&self, chunks: u64) -> Result<()> {
        self.connector.put_value(&self.edge, &self.key(chunks), &chunks, PutOptions::default()).map(drop)
    }

    /// The next chunk, or `None` after the last.
    fn next(&self, chunk: u64, upstream: &str) -> Result<Option<Received>> {
        let (host, port) = upstream
            .rsplit_once(':')
            .and_then(|(host, port)| Some((host, port.parse().ok()?)))
            .ok_or_else(|| Error::invalid_argument("the address upstream", upstream, "HOST:PORT"))?;
        let options = GetOptions {
            source: Source::At(host, port),
            ..GetOptions::until(Deadline::after(Duration::from_secs(10)))
        };
        let got = self.connector.get(&self.edge, &self.key(chunk), options)?;
        if got.kind() != PayloadKind::Value {
            return Ok(Some(got));
        }
        match got.value::<u64>()? {
            chunks if chunks == chunk => Ok(None),
            chunks => Err(Error::new(ErrorKind::Corrupt, format!("{chunk} of {chunks} chunks have come"))),
        }
    }
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
