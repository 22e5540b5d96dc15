//! The control plane against libzmq, through pyzmq, in both directions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{Error, ErrorKind};
use posthorse_omni::control::{ControlLimits, ControlPlane, Peer, Responder, Service};
use posthorse_omni::message::{PullReply, Query, QueryReply, Reply, Request};

const SOON: Duration = Duration::from_secs(20);

struct Producer;

impl Service for Producer {
    fn handle(&self, _: &Peer, request: Request, responder: Responder) {
        match request {
            Request::Query(query) if query.request_id == "k@0_1" => responder.reply(&Reply::Offer {
                request_id: query.request_id,
                data_size: 1 << 20,
                is_fast_path: true,
                offered: None,
            }),
            Request::Query(_) => {
                let error = Error::new(ErrorKind::NotFound, "nothing there");
                responder.reply(&Reply::NoOffer((&error).into()));
            }
            Request::Pull(_) => responder.reply(&Reply::Done { bytes: 1 << 20 }),
            _ => responder.refuse(&Error::new(ErrorKind::Unsupported, "not here")),
        }
    }
}

/// Python's interpreter, if it has pyzmq.
fn python(script: &str, arguments: &[&str]) -> Option<Child> {
    let python = std::env::var("POSTHORSE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let has = Command::new(&python).args(["-c", "import zmq"]).stderr(Stdio::null()).status();
    if !has.is_ok_and(|status| status.success()) {
        posthorse_testkit::skip("pyzmq", &format!("{python} cannot import zmq"));
        return None;
    }
    let child = Command::new(python).args(["-c", script]).args(arguments).stdout(Stdio::piped()).spawn();
    Some(child.unwrap())
}

const CONSUMER: &str = r##"
import sys, zmq
context = zmq.Context()
golden = {}
for line in open(sys.argv[2]):
    if not line.startswith("#"):
        name, text = line.split()
        golden[name] = bytes.fromhex(text)

def ask(socket, request):
    socket.send(request)
    return socket.recv()

for kind in (zmq.REQ, zmq.DEALER):
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, 10000)
    socket.setsockopt(zmq.LINGER, 0)
    # The peer must answer libzmq's own heartbeats, too.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 50)
    socket.connect("tcp://" + sys.argv[1])
    if kind == zmq.REQ:
        exchange = lambda request: ask(socket, request)
    else:
        def exchange(request):
            socket.send_multipart([b"", request])
            empty, reply = socket.recv_multipart()
            assert empty == b""
            return reply
    for _ in range(20):
        assert exchange(golden["query"]) == golden["query_reply"]
        assert exchange(golden["pull"]) == golden["trans_done"]
        assert exchange(golden["query"].replace(b"k@0_1", b"l@0_1")) == golden["info_not_found"]
        assert exchange(b"\xc1nonsense") == golden["trans_error"]
        assert exchange(b"posthorse:\xa4ping") != golden["trans_error"]
    big = b"query_info" + b"\x81\xaarequest_id\xda\xff\xff" + b"x" * 65535
    assert exchange(big) == golden["trans_error"]
    socket.close()
context.term()
print("fine", flush=True)
"##;

const PRODUCER: &str = r##"
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.ROUTER)
port = socket.bind_to_random_port("tcp://127.0.0.1")
golden = {}
for line in open(sys.argv[1]):
    if not line.startswith("#"):
        name, text = line.split()
        golden[name] = bytes.fromhex(text)
print(port, flush=True)
import time
while True:
    frames = socket.recv_multipart()
    identity, request = frames[0], frames[-1]
    if request == b"stop":
        break
    if request == golden["query"]:
        reply = golden["query_reply"]
    elif request == golden["pull"]:
        # Longer than the liveness time of the asker: libzmq answers its PINGs meanwhile.
        time.sleep(1)
        reply = golden["trans_done"]
    else:
        reply = golden["trans_error"]
    socket.send_multipart([identity, b"", reply])
socket.close(0)
"##;

fn golden() -> String {
    format!("{}/testdata/messages.txt", env!("CARGO_MANIFEST_DIR"))
}

fn first_line(child: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line.trim().to_owned()
}

#[test]
fn pyzmq_asks_posthorse() {
    let plane = ControlPlane::start(ControlLimits::default()).unwrap();
    let listener = plane.listen("127.0.0.1:0", Arc::new(Producer)).unwrap();
    let address = listener.local_address().to_string();
    let Some(mut child) = python(CONSUMER, &[&address, &golden()]) else { return };
    assert_eq!(first_line(&mut child), "fine");
    assert!(child.wait().unwrap().success());
    plane.close(SOON.into()).unwrap();
}

#[test]
fn posthorse_asks_pyzmq() {
    let Some(mut child) = python(PRODUCER, &[&golden()]) else { return };
    let address = format!("127.0.0.1:{}", first_line(&mut child));
    let limits = ControlLimits { liveness: Duration::from_millis(300), ..ControlLimits::default() };
    let plane = ControlPlane::start(limits).unwrap();
    let dialer = plane.dialer();
    let ask = |bytes: Vec<u8>| dialer.request_blocking(&address, bytes, SOON.into()).unwrap();
    let query = |key: &str| Request::Query(Query { request_id: key.to_owned(), extra: None });
    let reply = ask(query("k@0_1").encode().unwrap());
    assert_eq!(
        QueryReply::decode("k@0_1", &reply).unwrap(),
        QueryReply::Offer { data_size: 1 << 20, is_fast_path: true, offered: None }
    );
    let golden = std::fs::read_to_string(golden()).unwrap();
    let pull = golden.lines().find_map(|line| line.strip_prefix("pull ")).unwrap();
    let pull: Vec<u8> =
        (0..pull.len()).step_by(2).map(|i| u8::from_str_radix(&pull[i..i + 2], 16).unwrap()).collect();
    assert_eq!(PullReply::decode(&ask(pull)).unwrap(), PullReply::Done(None));
    let unknown = ask(Request::Ping.encode().unwrap());
    assert_eq!(PullReply::decode(&unknown).unwrap(), PullReply::Failed);
    // It stops without an answer.
    let error = dialer.request_blocking(&address, b"stop".to_vec(), SOON.into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone);
    child.wait().unwrap();
    plane.close(SOON.into()).unwrap();
}
