//! One connection between two sockets.

use std::net::Shutdown;
use std::time::Duration;

use bytes::Bytes;
use posthorse_core::{Error, ErrorKind, Result};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::partial::Held;
use super::zmtp::{self, Decoder, Event, SocketType};

/// A connection whose handshake is complete.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    decoder: Decoder,
    heard: Instant,
    /// Bytes read so far.
    read: u64,
    pinged: bool,
    /// When the message began that is unfinished, where that is bounded.
    begun: Option<Instant>,
    /// What it may hold of an unfinished message, and for how long, where that is bounded.
    bounds: Option<(Held, Duration)>,
}

/// What [`Link::check`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pulse {
    /// Nothing is due before this moment.
    Quiet(Instant),
    /// Nothing was heard for the liveness time, although the peer was asked.
    Gone,
}

impl Link {
    /// Greets the peer and waits until it is ready.
    ///
    /// # Errors
    /// `Malformed`, `TooLarge` or `PeerRefused` when it does not speak ZMTP as it should; `PeerGone` when it
    /// closes; `DeadlineExceeded` when it is silent.
    pub(super) async fn open(
        stream: TcpStream,
        own: SocketType,
        max_message: usize,
        within: Duration,
        bounds: Option<(Held, Duration)>,
    ) -> Result<Self> {
        let _ = stream.set_nodelay(true);
        let mut link = Self {
            stream,
            decoder: Decoder::new(own, max_message),
            heard: Instant::now(),
            read: 0,
            pinged: false,
            begun: None,
            bounds,
        };
        let handshake = async {
            let opening = [&zmtp::greeting()[..], &zmtp::ready(own)].concat();
            link.stream.write_all(&opening).await.map_err(|e| gone(&e))?;
            link.event().await
        };
        match timeout(within, handshake).await {
            Ok(Ok(_ready)) => Ok(link),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(
                ErrorKind::DeadlineExceeded,
                format!("the ZMTP handshake was not complete within {} ms", within.as_millis()),
            )),
        }
    }

    /// The next message. Pings are answered meanwhile. Nothing is lost when the wait is dropped.
    pub(super) async fn message(&mut self) -> Result<Bytes> {
        loop {
            match self.event().await? {
                Event::Message(payload) => return Ok(payload),
                // A socket buffer holds thousands of these: one that is full is a peer that floods.
                Event::Ping(context) => self.write_now(&zmtp::pong(&context))?,
                Event::Ready | Event::Alive => {}
            }
        }
    }

    /// Sends a message, waiting for the peer to read at most `within`.
    pub(super) async fn send(&mut self, payload: &[u8], within: Duration) -> Result<()> {
        let bytes = zmtp::message(payload);
        match timeout(within, self.stream.write_all(&bytes)).await {
            Ok(sent) => sent.map_err(|e| gone(&e)),
            Err(_) => Err(Error::new(
                ErrorKind::PeerGone,
                format!("the peer read nothing for {} ms", within.as_millis()),
            )),
        }
    }

    /// Whether nothing has arrived on an idle connection, its end included.
    pub(super) fn is_fresh(&self) -> bool {
        let would_block = |e: std::io::Error| e.kind() == std::io::ErrorKind::WouldBlock;
        self.decoder.input.is_empty() && self.stream.try_read(&mut [0]).is_err_and(would_block)
    }

    /// When something was heard of the peer last.
    pub(super) const fn heard(&self) -> Instant {
        self.heard
    }

    /// How many bytes the peer has sent so far.
    pub(super) const fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Begins a wait for the peer: its silence counts from now.
    pub(super) fn expect(&mut self) {
        self.heard = Instant::now();
        self.pinged = false;
    }

    /// Whether the peer knows how to say that it is there.
    pub(super) const fn can_be_asked(&self) -> bool {
        self.decoder.knows_ping()
    }

    /// Asks a silent peer whether it is there, and finds out when it is not. Peers older than ZMTP 3.1 cannot be
    /// asked; only TCP tells of their end.
    pub(super) fn check(&mut self, liveness: Duration) -> Result<Pulse> {
        let now = Instant::now();
        if !self.can_be_asked() {
            return Ok(Pulse::Quiet(now + liveness));
        }
        let (ask, end) = (self.heard + liveness / 3, self.heard + liveness);
        if now >= end && self.pinged {
            return Ok(Pulse::Gone);
        }
        if now >= ask && !self.pinged {
            self.pinged = true;
            self.write_now(&zmtp::ping())?;
            // However late this check comes, the peer has two thirds of the time to answer.
            self.heard = now.checked_sub(liveness / 3).unwrap_or(now).max(self.heard);
            return Ok(Pulse::Quiet(self.heard + liveness));
        }
        Ok(Pulse::Quiet(if self.pinged { end } else { ask }))
    }

    async fn event(&mut self) -> Result<Event> {
        loop {
            let event = self.decoder.next()?;
            let held = self.decoder.input.len();
            if let Some((bound, _)) = &mut self.bounds {
                bound.set(held)?;
            }
            if held == 0 || event.is_some() {
                self.begun = None;
            }
            if let Some(event) = event {
                return Ok(event);
            }
            match self.read().await? {
                0 => return Err(Error::new(ErrorKind::PeerGone, "the peer closed the connection")),
                len => {
                    self.read += len as u64;
                    self.expect();
                }
            }
        }
    }

    /// Reads some bytes: the rest of what has begun in its time, if that is bounded.
    async fn read(&mut self) -> Result<usize> {
        let has_begun = !self.decoder.input.is_empty();
        let read = self.stream.read_buf(&mut self.decoder.input);
        let read = match &self.bounds {
            Some((_, patience)) if has_begun => {
                let begun = *self.begun.get_or_insert_with(Instant::now);
                timeout_at(begun + *patience, read).await.map_err(|_| {
                    let text = format!("a message was not complete within {} ms", patience.as_millis());
                    Error::new(ErrorKind::DeadlineExceeded, text)
                })?
            }
            _ => read.await,
        };
        read.map_err(|error| gone(&error))
    }

    /// Sends a few bytes without waiting.
    fn write_now(&self, bytes: &[u8]) -> Result<()> {
        match self.stream.try_write(bytes) {
            Ok(len) if len == bytes.len() => Ok(()),
            Ok(_) => Err(Error::new(ErrorKind::PeerGone, "the peer does not read")),
            Err(error) => Err(gone(&error)),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // A child process may hold the socket too: closing alone would leave the peer waiting.
        let _ = SockRef::from(&self.stream).shutdown(Shutdown::Both);
    }
}

fn gone(error: &std::io::Error) -> Error {
    Error::new(ErrorKind::PeerGone, format!("the connection failed: {error}"))
}
