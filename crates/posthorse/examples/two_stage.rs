//! Two stages of a pipeline, a process each: the first offers a KV cache, the second gets it and checks it.
//!
//! `cargo run -p posthorse --example two_stage` runs both on this machine. On two machines, run `two_stage producer`
//! on one, and on the other `two_stage consumer HOST:PORT` with the address that the producer prints.

use std::process::{Command, ExitCode};
use std::time::Duration;
use std::{env, io};

use posthorse::{
    Connector, ConnectorConfig, DType, Deadline, Edge, Error, ErrorKind, GetOptions, PutOptions,
};
use posthorse::{Result, Role, Source, TensorSet};

const LAYERS: usize = 4;
const SHAPE: [u64; 3] = [512, 4, 128]; // tokens, heads, elements of a head

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => producer(true),
        ["producer"] => producer(false),
        ["consumer", address] => consumer(address),
        _ => {
            eprintln!("usage: two_stage [producer | consumer HOST:PORT]");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = outcome {
        eprintln!("two_stage: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Each stage has a connector, with a pool of memory of its own.
fn connector(role: Role) -> Result<Connector> {
    let config = ConnectorConfig { role, zmq_port: 0, memory_pool_size: 16 << 20, ..Default::default() };
    Connector::builder().config(config).build()
}

/// What layer `layer` holds: any contents that the consumer can work out for itself.
fn keys_of(layer: usize) -> Vec<u8> {
    (0..SHAPE.iter().product::<u64>()).flat_map(|i| (i as u16 ^ layer as u16).to_le_bytes()).collect()
}

fn producer(start_consumer: bool) -> Result<()> {
    let connector = connector(Role::Sender)?;
    let mut cache = TensorSet::new();
    for layer in 0..LAYERS {
        cache.push_shared(&format!("key_cache_{layer}"), DType::BF16, &SHAPE, keys_of(layer).into())?;
    }
    connector.put(&Edge::new(0, 1), "request-1", &cache, PutOptions::default())?;
    let (host, port) = connector.address()?;
    if !start_consumer {
        println!("offered at {host}:{port}; press Enter to end");
        return io::stdin().read_line(&mut String::new()).map(drop).map_err(|e| Error::os("read", &e));
    }
    let consumer = env::current_exe()
        .and_then(|this| Command::new(this).args(["consumer", &format!("{host}:{port}")]).status());
    match consumer.map_err(|error| Error::os("start the consumer", &error))? {
        status if status.success() => Ok(()),
        status => Err(Error::new(ErrorKind::Aborted, format!("the consumer ended with {status}"))),
    }
}

fn consumer(address: &str) -> Result<()> {
    let (host, port) = address
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host, port.parse().ok()?)))
        .ok_or_else(|| Error::invalid_argument("the producer's address", address, "HOST:PORT"))?;
    let options = GetOptions {
        source: Source::At(host, port),
        ..GetOptions::until(Deadline::after(Duration::from_secs(10)))
    };
    let got = connector(Role::Receiver)?.get(&Edge::new(0, 1), "request-1", options)?;
    for layer in 0..LAYERS {
        let tensor = got.tensor(&format!("key_cache_{layer}"))?;
        if tensor.desc().shape != SHAPE || tensor.bytes() != keys_of(layer) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{} is not as it was put", tensor.desc().name),
            ));
        }
    }
    println!("{} tensors, {} bytes, by {}: every byte is right", LAYERS, got.len(), got.transport());
    Ok(())
}
