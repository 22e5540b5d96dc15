//! What a bare TCP stream between two processes can reach, and a bare ping-pong.
//!
//! The client asks with a head of 24 bytes, little-endian: direction (0 write, 1 read), how long to spin before
//! blocking (microseconds), bytes, bytes per call. Then that many bytes go in that direction; a write is answered
//! by one byte. A stream is one exchange of many bytes, a ping-pong many exchanges of few.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Limit;
use crate::bench::meter::{Latencies, Meter, Round};
use crate::units;

/// The sizes of the calls that stream.
const CALL_BYTES: &[usize] = &[64 << 10, 256 << 10, 1 << 20];
/// The most bytes of one call that a head may ask for.
const MAX_CALL_BYTES: u64 = 16 << 20;
/// The sockets' buffers.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;
/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(30);
/// A stream's bytes, as long as its rate is not known.
const FIRST_BYTES: u64 = 8 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    read: bool,
    spin: Duration,
    bytes: u64,
    call: u64,
}

impl Head {
    const LEN: usize = 24;

    fn to_wire(self) -> [u8; Self::LEN] {
        let mut wire = [0; Self::LEN];
        wire[0] = self.read.into();
        let spin = u32::try_from(self.spin.as_micros()).unwrap_or(u32::MAX);
        wire[4..8].copy_from_slice(&spin.to_le_bytes());
        wire[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        wire[16..].copy_from_slice(&self.call.to_le_bytes());
        wire
    }

    fn from_wire(wire: [u8; Self::LEN]) -> io::Result<Self> {
        let (words, _) = wire.as_chunks::<8>();
        let [first, bytes, call] = [0, 1, 2].map(|index| u64::from_le_bytes(words[index]));
        let head = Self { read: first & 1 == 1, spin: Duration::from_micros(first >> 32), bytes, call };
        if first & 0xff > 1 || call == 0 || call > MAX_CALL_BYTES || head.spin > Duration::from_secs(1) {
            return Err(io::Error::new(ErrorKind::InvalidData, "a strange head"));
        }
        Ok(head)
    }
}

/// The far end: answers heads until the client hangs up.
pub(crate) fn serve(stream: TcpStream) -> io::Result<()> {
    let mut line = Line::new(stream)?;
    loop {
        let mut head = [0; Head::LEN];
        match line.read_exactly(&mut head) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let head = Head::from_wire(head)?;
        line.spin = head.spin;
        if head.read {
            line.write_bytes(head.bytes, head.call)?;
        } else {
            line.read_bytes(head.bytes, head.call)?;
            line.write_exactly(&[1])?;
        }
    }
}

/// The limit of one shape of batch over one connection.
#[derive(Debug)]
pub(crate) struct StreamLimit {
    line: Line,
    read: bool,
    batch_bytes: u64,
    streams: Vec<(usize, u64, Meter)>,
    ping_pong: Meter,
}

impl StreamLimit {
    /// For batches of `batch_bytes`, read or written, over a connection that the far end [serves](serve). Both
    /// ends spin for `spin` before they block.
    pub(crate) fn new(stream: TcpStream, read: bool, batch_bytes: u64, spin: Duration) -> io::Result<Self> {
        let mut line = Line::new(stream)?;
        line.spin = spin;
        let streams = CALL_BYTES.iter().map(|&call| (call, FIRST_BYTES, Meter::new())).collect();
        Ok(Self { line, read, batch_bytes, streams, ping_pong: Meter::new() })
    }

    /// Measures each candidate for about its part of `duration`.
    pub(crate) fn round(&mut self, duration: Duration) -> io::Result<()> {
        let part = duration / (self.streams.len() as u32 + 1);
        for (call, bytes, meter) in &mut self.streams {
            let elapsed = self.line.exchange(self.read, *bytes, *call as u64)?;
            meter.add(&Round { bytes: *bytes, elapsed, latencies: Latencies::new() });
            // As many bytes next time as take as long as they should.
            let scale = part.as_secs_f64() / elapsed.as_secs_f64().max(1e-6);
            *bytes = (*bytes as f64 * scale.clamp(0.25, 4.0)) as u64;
            *bytes = (*bytes).clamp(1 << 20, 16 << 30);
        }
        let call = self.batch_bytes.clamp(1, CALL_BYTES[1] as u64);
        let mut round = Round { bytes: 0, elapsed: Duration::ZERO, latencies: Latencies::new() };
        while round.bytes == 0 || round.elapsed < part {
            let elapsed = self.line.exchange(self.read, self.batch_bytes, call)?;
            round.latencies.record(elapsed);
            round.bytes += self.batch_bytes.max(1);
            round.elapsed += elapsed;
        }
        self.ping_pong.add(&round);
        Ok(())
    }

    /// The best stream, with the latency of the ping-pong.
    pub(crate) fn best(&self) -> Limit {
        let streams = self
            .streams
            .iter()
            .map(|(call, _, meter)| (format!("TCP stream, calls of {}", units::size(*call as u64)), meter));
        Limit { p50_us: self.ping_pong.quantile_us(0.5), ..Limit::best(streams) }
    }
}

/// A connection whose reads spin before they block.
#[derive(Debug)]
struct Line {
    stream: TcpStream,
    spin: Duration,
    buffer: Vec<u8>,
}

impl Line {
    fn new(stream: TcpStream) -> io::Result<Self> {
        let socket = socket2::SockRef::from(&stream);
        // Refused sizes are cut to what the system allows.
        let _ = socket.set_send_buffer_size(SOCKET_BUFFER_BYTES);
        let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        if stream.local_addr()?.ip() == stream.peer_addr()?.ip() {
            // Within a host this is the fastest; a system's default may pace what is sent.
            let _ = rustix::net::sockopt::set_tcp_congestion(&stream, "reno");
        }
        Ok(Self { stream, spin: Duration::ZERO, buffer: Vec::new() })
    }

    /// One exchange as the client, and how long it took.
    fn exchange(&mut self, read: bool, bytes: u64, call: u64) -> io::Result<Duration> {
        let begin = Instant::now();
        self.write_exactly(&Head { read, spin: self.spin, bytes, call }.to_wire())?;
        if read {
            self.read_bytes(bytes, call)?;
        } else {
            self.write_bytes(bytes, call)?;
            self.read_exactly(&mut [0])?;
        }
        Ok(begin.elapsed())
    }

    fn write_bytes(&mut self, mut left: u64, call: u64) -> io::Result<()> {
        self.with_buffer(call, |line, buffer| {
            while left > 0 {
                let now = left.min(call) as usize;
                line.write_exactly(&buffer[..now])?;
                left -= now as u64;
            }
            Ok(())
        })
    }

    fn read_bytes(&mut self, mut left: u64, call: u64) -> io::Result<()> {
        self.with_buffer(call, |line, buffer| {
            while left > 0 {
                let now = left.min(call) as usize;
                left -= line.read_some(&mut buffer[..now])? as u64;
            }
            Ok(())
        })
    }

    /// Lends the buffer, which is used for nothing but bytes that mean nothing.
    fn with_buffer(
        &mut self,
        len: u64,
        work: impl FnOnce(&mut Self, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        if (buffer.len() as u64) < len {
            buffer.resize(len as usize, 0x5a);
        }
        let outcome = work(self, &mut buffer);
        self.buffer = buffer;
        outcome
    }

    fn write_exactly(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.block(PollFlags::OUT, PATIENCE)?
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read_exactly(&mut self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let read = self.read_some(bytes)?;
            bytes = &mut bytes[read..];
        }
        Ok(())
    }

    fn read_some(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut spinning_since = None;
        loop {
            match self.stream.read(bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => return Ok(read),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let since = *spinning_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.spin {
                        // A far end that measures something else meanwhile is quiet for long.
                        self.block(PollFlags::IN, Duration::MAX)?;
                    } else {
                        std::hint::spin_loop();
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn block(&self, events: PollFlags, patience: Duration) -> io::Result<()> {
        let timeout: Option<Timespec> = patience.try_into().ok();
        match poll(&mut [PollFd::new(&self.stream, events)], timeout.as_ref())? {
            0 => Err(ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn both_directions_are_measured() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            for _ in 0..2 {
                serve(listener.accept().unwrap().0).unwrap();
            }
        });
        for read in [false, true] {
            let mut limit = StreamLimit::new(
                TcpStream::connect(address).unwrap(),
                read,
                100_000,
                Duration::from_micros(20),
            )
            .unwrap();
            limit.round(Duration::from_millis(4)).unwrap();
            limit.round(Duration::from_millis(4)).unwrap();
            let best = limit.best();
            assert!(best.gb_per_s > 0.0 && best.p50_us > 0.0 && best.name.contains("calls of"), "{best:?}");
        }
        server.join().unwrap();
    }

    #[test]
    fn heads_survive_the_wire_and_strange_ones_are_refused() {
        for read in [false, true] {
            let head = Head { read, spin: Duration::from_micros(70), bytes: u64::MAX, call: 1 << 20 };
            assert_eq!(Head::from_wire(head.to_wire()).unwrap(), head);
        }
        for call in [0, MAX_CALL_BYTES + 1] {
            let head = Head { read: true, spin: Duration::ZERO, bytes: 1, call };
            assert!(Head::from_wire(head.to_wire()).is_err());
        }
        assert!(Head::from_wire([9; Head::LEN]).is_err());
    }
}
