//! Messages between processes: a line of JSON each.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest message, in bytes.
const MAX_MESSAGE: usize = 4 << 20;

/// One end of a conversation between two processes.
#[derive(Debug)]
pub struct Channel {
    reader: Mutex<Reader>,
    writer: UnixStream,
}

#[derive(Debug)]
struct Reader {
    stream: BufReader<UnixStream>,
    /// The beginning of a message whose rest has not come.
    line: Vec<u8>,
}

impl Channel {
    pub(super) fn new(stream: UnixStream) -> Result<Self> {
        let writer = stream.try_clone().map_err(|error| Error::os("sharing a peer's socket", &error))?;
        let reader = Mutex::new(Reader { stream: BufReader::new(stream), line: Vec::new() });
        Ok(Self { reader, writer })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// `PeerGone`; `TooLarge` above 4 MiB; `InvalidArgument` for what is not JSON.
    pub fn send(&self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)
            .map_err(|error| Error::invalid_argument("message", error, "what JSON can say"))?;
        if line.len() > MAX_MESSAGE {
            return Err(Error::new(ErrorKind::TooLarge, format!("a message of {} bytes", line.len())));
        }
        line.push(b'\n');
        (&self.writer).write_all(&line).map_err(|error| gone(&error.to_string()))
    }

    /// The next message, waited for.
    ///
    /// # Errors
    /// `DeadlineExceeded`, after which it can be asked again; `PeerGone` when the other side has ended;
    /// `Malformed` when the message is not a `T`.
    pub fn receive<T: DeserializeOwned>(&self, deadline: Deadline) -> Result<T> {
        let mut reader = self.reader();
        let Reader { stream, line } = &mut *reader;
        loop {
            let timeout = match deadline.remaining(Instant::now()) {
                Some(left) if left.is_zero() => return Err(Deadline::exceeded("a peer's message")),
                // A socket knows no timeout of zero, and rounds down to its own unit.
                left => left.map(|left| left.max(Duration::from_millis(1))),
            };
            stream.get_ref().set_read_timeout(timeout).map_err(|error| gone(&error.to_string()))?;
            let room = (MAX_MESSAGE + 1).saturating_sub(line.len()) as u64;
            match stream.by_ref().take(room).read_until(b'\n', line) {
                Ok(_) if line.ends_with(b"\n") => {
                    let message = serde_json::from_slice(line);
                    let text = String::from_utf8_lossy(&line[..line.len().min(200)]).trim_end().to_owned();
                    line.clear();
                    return message
                        .map_err(|error| Error::new(ErrorKind::Malformed, format!("{error} in {text:?}")));
                }
                Ok(_) if line.len() > MAX_MESSAGE => {
                    return Err(Error::new(ErrorKind::Malformed, "a message without an end"));
                }
                Ok(_) => return Err(gone("it has ended")),
                Err(error) if is_pause(&error) => {}
                Err(error) => return Err(gone(&error.to_string())),
            }
        }
    }

    fn reader(&self) -> MutexGuard<'_, Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_pause(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn gone(why: &str) -> Error {
    Error::new(ErrorKind::PeerGone, format!("the peer process cannot be talked to: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Channel, Channel) {
        let (a, b) = UnixStream::pair().unwrap();
        (Channel::new(a).unwrap(), Channel::new(b).unwrap())
    }

    #[test]
    fn a_message_that_comes_in_parts_is_read_when_it_is_whole() {
        let (a, b) = pair();
        (&a.writer).write_all(b"[1,").unwrap();
        let late = b.receive::<Vec<u8>>(Deadline::after(Duration::from_millis(2))).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
        (&a.writer).write_all(b"2]\n\"next\"\n").unwrap();
        assert_eq!(b.receive::<Vec<u8>>(Deadline::NEVER).unwrap(), [1, 2]);
        assert_eq!(b.receive::<u8>(Deadline::NEVER).unwrap_err().kind(), ErrorKind::Malformed);
        drop(a);
        assert_eq!(b.receive::<u8>(Deadline::NEVER).unwrap_err().kind(), ErrorKind::PeerGone);
    }
}
