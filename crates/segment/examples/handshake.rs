//! Serves a handshake and shows what peers publish: `cargo run -p posthorse-segment --example handshake -- [PEER…]`.
//! Prints its own name first, and serves until standard input ends.

use std::io::{Read as _, stdin};
use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{
    Access, BufferDesc, Deadline, Error, Features, Hello, Incarnation, Location, Result, SegmentDesc,
};
use posthorse_segment::{
    Directory as _, HandshakeConfig, HandshakeEvents, HandshakeListener, Identity, P2pDirectory,
};

#[derive(Debug)]
struct Print;

impl HandshakeEvents for Print {
    fn notified(&self, peer: &str, message: &str) -> Result<()> {
        println!("{peer:?} says {message:?}");
        Ok(())
    }
}

fn main() -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().map_err(|error| Error::os("starting a runtime", &error))?;
    let listener = HandshakeListener::bind(HandshakeConfig::default())?;
    let name = format!("127.0.0.1:{}", listener.port());
    let hello = Hello::new(Features::NONE, None);
    let identity = Identity { name: name.clone(), incarnation: Incarnation(1), hello: hello.clone() };
    let handshake = Arc::new(listener.start(runtime.handle(), identity, Arc::new(Print))?);
    let directory = P2pDirectory::new(Arc::clone(&handshake));

    let tcp = serde_json::json!({"host": "127.0.0.1", "port": handshake.port(), "foreign_version": 2});
    let buffer = BufferDesc {
        region: None,
        location: Location::Any,
        address: 0x7f00_0000_0000,
        len: 4096,
        access: Access::Read,
        token: None,
        attributes: Default::default(),
    };
    let desc = SegmentDesc {
        name: name.clone(),
        incarnation: Some(Incarnation(1)),
        hello: Some(hello),
        transports: [("tcp".to_owned(), tcp)].into(),
        buffers: vec![buffer],
    };
    directory.publish(&desc, Deadline::NEVER)?;
    println!("{name}");
    for peer in std::env::args().skip(1) {
        let deadline = Deadline::after(Duration::from_secs(10));
        println!("{:#?}", directory.lookup(&peer, deadline)?);
        handshake.client().probe(&peer, deadline)?;
        handshake.client().notify(&peer, &name, "hello", deadline)?;
    }
    stdin().read_to_end(&mut Vec::new()).map_err(|error| Error::os("reading standard input", &error))?;
    Ok(())
}
