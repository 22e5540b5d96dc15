//! JSON messages, a line each, between two processes of this command.

use std::io::{self, BufRead, BufReader, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest line that is read.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Writes `message` as one line.
pub(crate) fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads one line's message; `None` at the end.
pub(crate) fn receive<T: DeserializeOwned>(from: &mut BufReader<impl Read>) -> io::Result<Option<T>> {
    let mut line = String::new();
    let read = from.take(MAX_LINE_BYTES).read_line(&mut line)?;
    if read == 0 {
        return Ok(None);
    }
    if !line.ends_with('\n') {
        let why =
            if read as u64 == MAX_LINE_BYTES { "a line is too long" } else { "the last line does not end" };
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    serde_json::from_str(&line).map(Some).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_order_and_then_the_end() {
        let mut wire = Vec::new();
        send(&mut wire, &("one", 1)).unwrap();
        send(&mut wire, &("two\n", 2)).unwrap();
        let mut reader = BufReader::new(&wire[..]);
        assert_eq!(receive::<(String, u8)>(&mut reader).unwrap(), Some(("one".into(), 1)));
        assert_eq!(receive::<(String, u8)>(&mut reader).unwrap(), Some(("two\n".into(), 2)));
        assert_eq!(receive::<(String, u8)>(&mut reader).unwrap(), None);
    }

    #[test]
    fn a_torn_or_endless_line_is_refused() {
        assert!(receive::<u8>(&mut BufReader::new(&b"12"[..])).is_err());
        assert!(receive::<u8>(&mut BufReader::new(&b"{\n"[..])).is_err());
        let endless = vec![b'1'; 2 << 20];
        assert!(receive::<u8>(&mut BufReader::new(&endless[..])).is_err());
    }
}
