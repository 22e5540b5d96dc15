//! Two processes: one of them dies, or stops.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use posthorse_core::*;
use posthorse_tcp::TcpConfig;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

use crate::hostile::claiming;
use crate::support::*;

const ROLE: &str = "POSTHORSE_TCP_TEST_PEER";
const SPARE: &str = "POSTHORSE_TCP_TEST_SPARE";
const LEN: usize = 64 << 20;

/// Not a test: what the other process runs. It publishes memory, says where, and serves until its input ends.
#[test]
fn peer_main() {
    let Ok(descriptors) = std::env::var(ROLE) else { return };
    let mut config = local();
    if let Ok(few) = descriptors.parse() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(few), maximum }).unwrap();
        config.liveness_ms = 400;
    }
    let node = Node::with("peer:1", config, Hello::new(Features::NONE, None));
    let _taken = std::env::var(SPARE).map(|spare| all_descriptors_but(spare.parse().unwrap()));
    let memory = Memory::patterned(LEN, 7);
    let (_, token) = node.publish(memory, Access::ReadWrite);
    println!(
        "\nPEER {} {} {} {} {}",
        node.port(),
        memory.address(),
        token.handle,
        token.secret,
        incarnation(&node)
    );
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {}
    std::process::exit(0);
}

fn incarnation(node: &Node) -> u64 {
    node.desc.incarnation.unwrap().0
}

fn all_descriptors_but(spare: usize) -> Vec<File> {
    let mut taken: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    taken.truncate(taken.len() - spare);
    taken
}

struct Peer {
    child: Child,
    /// Closing it ends the peer, so no orphan is left behind.
    _input: ChildStdin,
    desc: SegmentDesc,
    address: u64,
    token: GrantToken,
}

impl Peer {
    fn spawn() -> Self {
        Self::spawn_with("as many descriptors as there are", None)
    }

    /// `descriptors`: how many it may have, if that is a number; `spare`: how many of them the rest of the process leaves.
    fn spawn_with(descriptors: &str, spare: Option<usize>) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peers::peer_main", "--nocapture"])
            .env(ROLE, descriptors)
            .envs(spare.map(|spare| (SPARE, spare.to_string())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.map(Result::unwrap).find(|line| line.starts_with("PEER ")).unwrap();
        let numbers: Vec<u64> = line.split(' ').skip(1).map(|number| number.parse().unwrap()).collect();
        let desc = SegmentDesc {
            name: "peer:1".to_owned(),
            incarnation: Some(Incarnation(numbers[4])),
            hello: Some(Hello::new(Features::NONE, None)),
            transports: [("tcp".to_owned(), serde_json::json!({"host": "127.0.0.1", "port": numbers[0]}))]
                .into(),
            buffers: Vec::new(),
        };
        let token = GrantToken { handle: numbers[2], secret: numbers[3] };
        let _input = child.stdin.take().unwrap();
        Self { child, _input, desc, address: numbers[1], token }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn two_processes_exchange_bytes() {
    let (here, peer) = (Node::new("here:1"), Peer::spawn());
    let path = here.connect(&peer.desc);
    let (back, expected) = (Memory::new(LEN), Memory::patterned(LEN, 7));
    here.transfer(path, read(back.part(0, LEN), peer.address, peer.token)).unwrap();
    assert!(back.bytes() == expected.bytes());
    let source = Memory::patterned(LEN, 8);
    here.transfer(path, write(source.part(0, LEN), peer.address, peer.token)).unwrap();
    here.transfer(path, read(back.part(0, LEN), peer.address, peer.token)).unwrap();
    assert!(back.bytes() == source.bytes());
}

#[test]
fn a_killed_peer_is_gone_at_once_and_its_successor_is_served() {
    let (here, mut peer) = (Node::new("here:1"), Peer::spawn());
    let path = here.connect(&peer.desc);
    let source = Memory::patterned(LEN, 8);
    let writes: Vec<Slice> = (0..8).map(|_| write(source.part(0, LEN), peer.address, peer.token)).collect();
    here.submit_all(path, &writes);
    here.events.completion(writes[0].token).unwrap();
    peer.child.kill().unwrap();
    peer.child.wait().unwrap();
    let began = Instant::now();
    let done = here.events.completions(7);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(3), "{took:?}");
    let kinds: Vec<_> =
        done.values().filter_map(|done| done.result.as_ref().err()).map(|e| e.error.kind()).collect();
    assert!(!kinds.is_empty() && kinds.iter().all(|kind| *kind == ErrorKind::PeerGone), "{kinds:?}");
    assert_eq!(here.events.down().kind(), ErrorKind::PeerGone);
    let next = Peer::spawn();
    let path = here.connect(&next.desc);
    here.transfer(path, write(source.part(0, LEN), next.address, next.token)).unwrap();
}

#[test]
fn a_stopped_peer_is_gone_after_the_liveness_time_and_comes_back() {
    let config = TcpConfig { liveness_ms: 900, ..local() };
    let here = Node::with("here:1", config, Hello::new(Features::NONE, None));
    let peer = Peer::spawn();
    let path = here.connect(&peer.desc);
    let source = Memory::patterned(LEN, 8);
    here.transfer(path, write(source.part(0, 4096), peer.address, peer.token)).unwrap();
    peer.signal(Signal::STOP);
    let slice = write(source.part(0, LEN), peer.address, peer.token);
    let began = Instant::now();
    here.submit_all(path, &[slice]);
    assert_eq!(here.events.error(slice.token), (ErrorKind::PeerGone, FarEnd::Unconfirmed));
    let took = began.elapsed();
    assert!(took < Duration::from_millis(2500), "{took:?}");
    assert!(here.events.down().to_string().contains("silent for"));
    peer.signal(Signal::CONT);
    let path = here.connect(&peer.desc);
    here.transfer(path, write(source.part(0, LEN), peer.address, peer.token)).unwrap();
}

/// The sockets of `count` peers that are silent, and claim to be so for an hour.
fn silent(peer: &Peer, count: u16) -> Vec<TcpStream> {
    let port = peer.desc.transports["tcp"]["port"].as_u64().unwrap() as u16;
    let begin = |lane| {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
        // One that is refused may be closed already.
        let _ = socket.write_all(&claiming(lane, 3_600_000));
        socket
    };
    (0..count).map(begin).collect()
}

fn connects_in_time(peer: &Peer) {
    let node = Node::new("here:1");
    let until = Instant::now() + PATIENCE;
    while let Err(error) = node.transport.connect(&peer.desc, Deadline::after(PATIENCE)) {
        assert!(Instant::now() < until, "{error}");
    }
}

#[test]
fn silent_connections_do_not_take_the_last_descriptor() {
    const DESCRIPTORS: u16 = 128;
    let peer = Peer::spawn_with(&DESCRIPTORS.to_string(), None);
    let mut silent = silent(&peer, 2 * DESCRIPTORS);
    // The last was heard, so all before it were accepted.
    let last = silent.last_mut().unwrap();
    last.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = last.read(&mut [0]);
    let open = std::fs::read_dir(format!("/proc/{}/fd", peer.child.id())).unwrap().count();
    assert!(open < usize::from(DESCRIPTORS) / 8 * 6, "{open} descriptors are taken");
    connects_in_time(&peer);
}

#[test]
fn silent_connections_make_room_when_the_system_has_no_descriptor_left() {
    const SPARE: u16 = 16;
    let peer = Peer::spawn_with("128", Some(SPARE.into()));
    let silent = silent(&peer, 2 * SPARE);
    connects_in_time(&peer);
    drop(silent);
}
