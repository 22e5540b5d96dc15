//! Measures the transport between two processes against a bare TCP stream, both in turn in the same run.
//!
//! `cargo run --release -p posthorse-tcp --example tcp_bench [ROUNDS]`
//!
//! The limit of a size is the best of blocking streams with writes of 64 KiB, 256 KiB and 1 MiB (the receiver
//! reads as much at once, and answers one byte when a transfer is complete); for 4 KiB it is a ping-pong that
//! polls for as long as the transport does and then sleeps. The variable `TCP_BENCH_CONFIG` takes a `TcpConfig` as
//! JSON, and a second argument the only block size to measure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, ErrorKind as IoErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use posthorse_core::*;
use posthorse_segment::Registry;
use posthorse_tcp::{TcpConfig, TcpTransport};

const ROLE: &str = "POSTHORSE_TCP_BENCH_PEER";
const LEN: usize = 256 << 20;
const SPIN: Duration = Duration::from_micros(50);

#[derive(Debug)]
struct Memory(HostView);

// SAFETY: the memory is leaked.
unsafe impl Region for Memory {
    fn view(&self) -> View {
        View::Host(self.0)
    }
}

fn memory() -> HostView {
    HostView::of_mut(vec![1_u8; LEN].leak())
}

/// Counts completions; whoever waits polls for a while, as the transport's own threads do, and then sleeps.
#[derive(Debug)]
struct Events {
    done: AtomicU64,
    writable: AtomicU64,
    waiter: Thread,
}

impl Default for Events {
    fn default() -> Self {
        Self { done: AtomicU64::new(0), writable: AtomicU64::new(0), waiter: std::thread::current() }
    }
}

impl Events {
    fn wait(&self, mut happened: impl FnMut(&Self) -> bool) {
        let until = Instant::now() + SPIN;
        while !happened(self) {
            if Instant::now() < until { std::thread::yield_now() } else { std::thread::park() }
        }
    }
}

impl TransportEvents for Events {
    fn completed(&self, completions: &[Completion]) {
        for completion in completions {
            assert!(completion.result.is_ok(), "{completion:?}");
        }
        self.done.fetch_add(completions.len() as u64, Ordering::Release);
        self.waiter.unpark();
    }
    fn writable(&self, _: PathId) {
        self.writable.fetch_add(1, Ordering::Release);
        self.waiter.unpark();
    }
    fn path_changed(&self, _: PathId, state: &PathState) {
        eprintln!("{state:?}");
    }
    fn notified(&self, _: &str, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

impl ControlChannel for Events {
    fn request(&self, peer: &str, _: &str, _: &[u8], _: Deadline) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::PeerUnreachable, peer.to_owned()))
    }
    fn on_request(&self, _: &str, _: RequestHandler) {}
}

fn start(name: &str, registry: &Arc<Registry>, events: &Arc<Events>) -> (TcpTransport, serde_json::Value) {
    let text = std::env::var("TCP_BENCH_CONFIG").unwrap_or_else(|_| "{}".to_owned());
    let config: TcpConfig = serde_json::from_str(&text).unwrap();
    let config = TcpConfig { bind: vec!["127.0.0.1".parse().unwrap()], ..config };
    let transport = TcpTransport::new(config).unwrap();
    let published = transport
        .start(TransportContext {
            name: name.into(),
            incarnation: Incarnation(1),
            hello: Hello::new(Features::NONE, None),
            gate: Arc::clone(registry) as Arc<dyn Gate>,
            events: Arc::clone(events) as Arc<dyn TransportEvents>,
            control: Arc::clone(events) as Arc<dyn ControlChannel>,
        })
        .unwrap();
    (transport, published)
}

/// The other process: serves its memory, and bare streams on a port of their own.
fn peer() {
    let (registry, events) = (Arc::new(Registry::new()), Arc::new(Events::default()));
    let (_transport, published) = start("peer:1", &registry, &events);
    let view = memory();
    let region = registry.register(Arc::new(Memory(view)), Access::ReadWrite).unwrap();
    let token = registry.standing_grant(region.id).unwrap().unwrap().token;
    let bare = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = bare.local_addr().unwrap().port();
    println!("{} {} {} {} {port}", published["port"], view.address(), token.handle, token.secret);
    std::thread::spawn(move || {
        for stream in bare.incoming() {
            std::thread::spawn(move || serve_bare(stream.unwrap()));
        }
    });
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {}
}

/// Per transfer: length and chunk, then so many bytes, answered by one byte. Chunk 0 is a ping-pong that polls.
fn serve_bare(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut buffer = vec![1; LEN];
    let mut header = [0; 16];
    let mut start = 0;
    while stream.read_exact(&mut header).is_ok() {
        let len = u64::from_le_bytes(*header.first_chunk().unwrap()) as usize;
        let chunk = u64::from_le_bytes(*header.last_chunk().unwrap()) as usize;
        if chunk == 0 {
            return echo(&mut stream, len);
        }
        start = if start + 2 * len > LEN { 0 } else { start + len };
        let mut done = 0;
        while done < len {
            let at = start + done;
            let want = chunk.min(len - done);
            done += stream.read(&mut buffer[at..at + want]).unwrap();
        }
        stream.write_all(&[1]).unwrap();
    }
}

fn echo(stream: &mut TcpStream, len: usize) {
    stream.set_nonblocking(true).unwrap();
    let mut buffer = vec![0; len];
    while polled(stream, &mut buffer).is_ok() {
        stream.write_all(&[1]).unwrap();
    }
}

/// Receives a whole buffer: polls for a while, then sleeps until something comes.
fn polled(stream: &mut TcpStream, buffer: &mut [u8]) -> std::io::Result<()> {
    let mut done = 0;
    let mut until = Instant::now() + SPIN;
    while done < buffer.len() {
        match stream.read(&mut buffer[done..]) {
            Ok(0) => return Err(IoErrorKind::UnexpectedEof.into()),
            Ok(got) => done += got,
            Err(error) if error.kind() == IoErrorKind::WouldBlock => {
                if Instant::now() < until {
                    std::thread::yield_now();
                    continue;
                }
                let mut wait = [rustix::event::PollFd::new(stream, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut wait, None).unwrap();
            }
            Err(error) => return Err(error),
        }
        until = Instant::now() + SPIN;
    }
    Ok(())
}

struct Bench {
    child: Child,
    transport: TcpTransport,
    events: Arc<Events>,
    path: PathId,
    local: HostView,
    remote: u64,
    token: GrantToken,
    bare: u16,
    next: usize,
}

impl Bench {
    fn new() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let (registry, events) = (Arc::new(Registry::new()), Arc::new(Events::default()));
        let (transport, _) = start("bench:1", &registry, &events);
        let desc = SegmentDesc {
            name: "peer:1".into(),
            incarnation: None,
            hello: Some(Hello::new(Features::NONE, None)),
            transports: [("tcp".into(), serde_json::json!({"host": "127.0.0.1", "port": numbers[0]}))].into(),
            buffers: Vec::new(),
        };
        let path = transport.connect(&desc, Deadline::after(Duration::from_secs(10))).unwrap()[0].id;
        let token = GrantToken { handle: numbers[2], secret: numbers[3] };
        let (local, remote, bare) = (memory(), numbers[1], numbers[4] as u16);
        Self { child, transport, events, path, local, remote, token, bare, next: 0 }
    }

    /// `count` slices of `len` bytes, at places that go round the whole memory.
    fn slices(&mut self, opcode: Opcode, len: usize, count: usize) -> Vec<Slice> {
        (0..count)
            .map(|_| {
                let offset = self.next;
                self.next = if offset + 2 * len > LEN { 0 } else { offset + len };
                Slice {
                    token: 0,
                    opcode,
                    priority: Priority::Medium,
                    checksum: Checksum::Off,
                    level: Level::Visible,
                    local: View::Host(self.local.slice(offset, len).unwrap()),
                    local_region: RegionId(1),
                    remote_address: self.remote + offset as u64,
                    grant: Some(self.token),
                    remote_key: RemoteKey::NONE,
                    ready: None,
                }
            })
            .collect()
    }

    fn transfer(&self, mut slices: &[Slice]) -> Duration {
        let began = Instant::now();
        let target = self.events.done.load(Ordering::Acquire) + slices.len() as u64;
        while !slices.is_empty() {
            let seen = self.events.writable.load(Ordering::Acquire);
            // SAFETY: the memory is leaked.
            let taken = unsafe { self.transport.submit(self.path, slices) }.unwrap();
            slices = &slices[taken..];
            if !slices.is_empty() {
                self.events.wait(|events| events.writable.load(Ordering::Acquire) != seen);
            }
        }
        self.events.wait(|events| events.done.load(Ordering::Acquire) >= target);
        began.elapsed()
    }

    fn bare(&self, len: usize, chunk: usize, total: usize) -> Vec<Duration> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.bare)).unwrap();
        stream.set_nodelay(true).unwrap();
        let socket = socket2::SockRef::from(&stream);
        if chunk == 256 << 10 {
            socket.set_send_buffer_size(4 << 20).unwrap();
        }
        // SAFETY: leaked, and nobody writes to it while this runs.
        let bytes = unsafe { self.local.bytes() };
        let mut start = 0;
        (0..total)
            .map(|_| {
                start = if start + 2 * len > LEN { 0 } else { start + len };
                let began = Instant::now();
                stream.write_all(&(len as u64).to_le_bytes()).unwrap();
                stream.write_all(&(chunk as u64).to_le_bytes()).unwrap();
                bytes[start..start + len].chunks(chunk).for_each(|chunk| stream.write_all(chunk).unwrap());
                stream.read_exact(&mut [0]).unwrap();
                began.elapsed()
            })
            .collect()
    }

    fn ping_pong(&self, len: usize, total: usize) -> Vec<Duration> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.bare)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(&(len as u64).to_le_bytes()).unwrap();
        stream.write_all(&0_u64.to_le_bytes()).unwrap();
        stream.set_nonblocking(true).unwrap();
        let bytes = vec![1; len];
        (0..total)
            .map(|_| {
                let began = Instant::now();
                stream.write_all(&bytes).unwrap();
                polled(&mut stream, &mut [0]).unwrap();
                began.elapsed()
            })
            .collect()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn main() {
    if std::env::var_os(ROLE).is_some() {
        return peer();
    }
    let rounds: usize = std::env::args().nth(1).map_or(5, |text| text.parse().unwrap());
    let only: Option<usize> = std::env::args().nth(2).map(|text| text.parse().unwrap());
    let mut bench = Bench::new();
    println!(
        "{:>10} {:>7} {:>8} {:>12} {:>12} {:>12} {:>7}",
        "block", "batch", "op", "p50 us", "GB/s", "bare GB/s", "ratio"
    );
    let cases = [
        (4 << 10, 1, 2000),
        (64 << 10, 1, 500),
        (1 << 20, 1, 100),
        (16 << 20, 1, 12),
        (256 << 20, 1, 2),
        (4 << 10, 128, 100),
        (4 << 10, 100_000, 1),
    ];
    for (block, batch, repeats) in cases.into_iter().filter(|case| only.is_none_or(|only| only == case.0)) {
        let total = block * batch;
        let (mut writes, mut reads, mut bare) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            for (opcode, times) in [(Opcode::Write, &mut writes), (Opcode::Read, &mut reads)] {
                for _ in 0..repeats {
                    // A long slice is cut as the engine cuts it.
                    let preferred = bench.transport.capabilities().preferred_slice as usize;
                    let len = block.min(preferred);
                    let slices = bench.slices(opcode, len, total / len);
                    times.push(bench.transfer(&slices));
                }
            }
            if total == 4 << 10 {
                bare.push(median(bench.ping_pong(total, repeats)));
            } else {
                let len = total.min(LEN);
                let best = [64 << 10, 256 << 10, 1 << 20]
                    .into_iter()
                    .map(|chunk| median(bench.bare(len, chunk, repeats)))
                    .min()
                    .unwrap();
                bare.push(best.mul_f64(total as f64 / len as f64));
            }
        }
        let bare = median(bare).as_secs_f64();
        for (op, times) in [("write", writes), ("read", reads)] {
            let time = median(times).as_secs_f64();
            let rate = |time: f64| total as f64 / time / 1e9;
            println!(
                "{block:>10} {batch:>7} {op:>8} {:>12.1} {:>12.3} {:>12.3} {:>7.2}",
                time * 1e6,
                rate(time),
                rate(bare),
                bare / time
            );
        }
    }
}
