//! Frames on a socket.

use std::io;
use std::time::Duration;

use posthorse_core::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;

use crate::frame::{Frame, FrameDecoder};

/// What is read or written at once, in bytes.
const PIECE: usize = 16 << 10;

/// The frames that arrive on a socket.
#[derive(Debug)]
pub(crate) struct FrameReader {
    socket: OwnedReadHalf,
    decoder: FrameDecoder,
    buffer: Box<[u8; PIECE]>,
    /// What of the buffer is still to be decoded.
    from: usize,
    to: usize,
}

impl FrameReader {
    pub(crate) fn new(socket: OwnedReadHalf, limit: usize) -> Self {
        Self { socket, decoder: FrameDecoder::new(limit), buffer: Box::new([0; PIECE]), from: 0, to: 0 }
    }

    /// The next frame, or `None` when the peer has closed. Nothing is lost when the future is dropped.
    ///
    /// # Errors
    /// `Malformed`; `PeerGone` when the connection breaks or ends within a frame.
    pub(crate) async fn next(&mut self) -> Result<Option<Frame>> {
        loop {
            let mut input = &self.buffer[self.from..self.to];
            let frame = self.decoder.decode(&mut input)?;
            self.from = self.to - input.len();
            if frame.is_some() {
                return Ok(frame);
            }
            let read = self.socket.read(&mut self.buffer[..]).await;
            (self.from, self.to) = (0, read.map_err(|error| broken(&error))?);
            if self.to == 0 {
                return match self.decoder.is_within_frame() {
                    false => Ok(None),
                    true => Err(Error::new(ErrorKind::PeerGone, "the connection was closed within a frame")),
                };
            }
        }
    }

    /// Reads and drops what arrives until the peer closes.
    pub(crate) async fn drain(&mut self) {
        while matches!(self.socket.read(&mut self.buffer[..]).await, Ok(1..)) {}
    }
}

/// Writes the bytes of a frame. Each piece has to leave within `patience`.
///
/// # Errors
/// `PeerGone` when the connection breaks or the peer takes nothing any more.
pub(crate) async fn write(socket: &mut OwnedWriteHalf, frame: &[u8], patience: Duration) -> Result<()> {
    for piece in frame.chunks(PIECE) {
        match timeout(patience, socket.write_all(piece)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(broken(&error)),
            Err(_) => {
                let why = format!("the peer has taken no more bytes for {patience:?}");
                return Err(Error::new(ErrorKind::PeerGone, why));
            }
        }
    }
    Ok(())
}

fn broken(error: &io::Error) -> Error {
    Error::new(ErrorKind::PeerGone, format!("the connection broke: {error}"))
}
