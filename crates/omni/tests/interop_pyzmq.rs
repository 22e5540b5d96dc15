//! The control plane against libzmq, through pyzmq, in both directions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod interop;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use interop::{Producer, SOON, assert_offer, golden, query};
use posthorse_core::ErrorKind;
use posthorse_omni::control::{ControlLimits, ControlPlane};
use posthorse_omni::message::{PullReply, Request};

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

/// Where the recorded messages lie.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/messages.txt");

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
    let Some(mut child) = python(CONSUMER, &[&address, GOLDEN]) else { return };
    assert_eq!(first_line(&mut child), "fine");
    assert!(child.wait().unwrap().success());
    plane.close(SOON.into()).unwrap();
}

#[test]
fn posthorse_asks_pyzmq() {
    let Some(mut child) = python(PRODUCER, &[GOLDEN]) else { return };
    let address = format!("127.0.0.1:{}", first_line(&mut child));
    let limits = ControlLimits { liveness: Duration::from_millis(300), ..ControlLimits::default() };
    let plane = ControlPlane::start(limits).unwrap();
    let dialer = plane.dialer();
    let ask = |bytes: Vec<u8>| dialer.request_blocking(&address, bytes, SOON.into()).unwrap();
    assert_offer(&ask(query()));
    assert_eq!(PullReply::decode(&ask(golden("pull"))).unwrap(), PullReply::Done(None));
    let unknown = ask(Request::Ping.encode().unwrap());
    assert_eq!(PullReply::decode(&unknown).unwrap(), PullReply::Failed);
    // It stops without an answer.
    let error = dialer.request_blocking(&address, b"stop".to_vec(), SOON.into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone);
    child.wait().unwrap();
    plane.close(SOON.into()).unwrap();
}
