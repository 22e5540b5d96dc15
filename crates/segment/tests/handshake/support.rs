//! Handshakes to test, and peers that are bytes.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use posthorse_core::{
    Access, Attributes, BufferDesc, Deadline, Error, ErrorKind, Features, Hello, Incarnation, Location,
    Result, SegmentDesc,
};
use posthorse_segment::frame::{Frame, FrameDecoder, FrameType, encode};
use posthorse_segment::{Handshake, HandshakeConfig, HandshakeEvents, HandshakeListener, Identity};
use tokio::runtime::{Handle, Runtime};

pub(crate) const LIMIT: usize = 1 << 20;

/// Long enough never to pass in a test that does not wait for it.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

pub(crate) fn runtime() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    RUNTIME.get_or_init(runtime).handle()
}

#[derive(Debug, Default)]
pub(crate) struct Notices(pub(crate) Mutex<Vec<(String, String)>>);

impl HandshakeEvents for Notices {
    fn notified(&self, peer: &str, message: &str) -> Result<()> {
        if message == "refuse me" {
            return Err(Error::new(ErrorKind::Unsupported, "refused"));
        }
        self.0.lock().unwrap().push((peer.to_owned(), message.to_owned()));
        Ok(())
    }
}

pub(crate) fn on_loopback() -> HandshakeConfig {
    HandshakeConfig { bind: vec!["127.0.0.1".parse().unwrap()], ..HandshakeConfig::default() }
}

pub(crate) fn start_with(config: HandshakeConfig, life: u64, hello: Hello) -> (Arc<Handshake>, Arc<Notices>) {
    let listener = HandshakeListener::bind(config).unwrap();
    let name = format!("127.0.0.1:{}", listener.port());
    let notices = Arc::new(Notices::default());
    let identity = Identity { name, incarnation: Incarnation(life), hello };
    let handshake = listener.start(runtime(), identity, notices.clone()).unwrap();
    (Arc::new(handshake), notices)
}

pub(crate) fn hello() -> Hello {
    Hello::new(Features(3), None)
}

pub(crate) fn start() -> Arc<Handshake> {
    start_with(on_loopback(), 1, hello()).0
}

pub(crate) fn desc(name: &str, life: u64) -> SegmentDesc {
    let buffer = BufferDesc {
        region: None,
        location: Location::Any,
        address: 0x1000,
        len: 4096,
        access: Access::Read,
        token: None,
        attributes: Attributes::new(),
    };
    SegmentDesc {
        name: name.to_owned(),
        incarnation: Some(Incarnation(life)),
        hello: Some(hello()),
        transports: Attributes::new(),
        buffers: vec![buffer],
    }
}

pub(crate) fn dial(handshake: &Handshake) -> TcpStream {
    TcpStream::connect(("127.0.0.1", handshake.port())).unwrap()
}

/// The next frame of a socket, or `None` when it was closed or reset.
pub(crate) fn read_frame(socket: &mut TcpStream) -> Option<Frame> {
    let (mut decoder, mut byte) = (FrameDecoder::new(LIMIT), [0]);
    loop {
        match socket.read(&mut byte) {
            Ok(1) => {}
            _ => return None,
        }
        if let Some(frame) = decoder.decode(&mut &byte[..]).unwrap() {
            return Some(frame);
        }
    }
}

pub(crate) fn ask(handshake: &Handshake, frame_type: FrameType, body: &[u8]) -> Option<Frame> {
    let mut socket = dial(handshake);
    socket.write_all(&encode(frame_type, body, LIMIT).unwrap()).unwrap();
    read_frame(&mut socket)
}

/// A peer that answers each connection by `answer`, and is named by what is returned. It serves until the
/// returned sender is dropped or as many connections as `count` came.
pub(crate) fn peer(count: usize, answer: impl Fn(&mut TcpStream) + Send + 'static) -> (String, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = listener.local_addr().unwrap().to_string();
    let (hold, held) = channel();
    thread::spawn(move || {
        let mut kept = Vec::new();
        for _ in 0..count {
            let (mut socket, _) = listener.accept().unwrap();
            answer(&mut socket);
            kept.push(socket);
        }
        let _ = held.recv();
        kept.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
    });
    (name, hold)
}
