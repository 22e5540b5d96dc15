//! Notifications that wait on a path for their turn: one after the other, over the control channel.

use std::collections::VecDeque;

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Incarnation, Result};

/// How many may wait.
const MOST: usize = 64;

/// Bytes before the data: the sender's life, its connection, and the notification's number there.
const HEAD: usize = 24;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Notice>,
    /// Whether a thread sees to them.
    attended: bool,
    last: u64,
}

/// One that waits.
#[derive(Debug)]
pub(crate) struct Notice {
    pub(crate) token: u64,
    /// Its number on this path, from 1.
    pub(crate) number: u64,
    pub(crate) data: Vec<u8>,
}

impl Notices {
    /// Adds one. Says whether a thread is to be found for them.
    ///
    /// # Errors
    /// `QueueFull`.
    pub(crate) fn push(&self, token: u64, data: &[u8]) -> Result<bool> {
        let mut state = self.state.lock();
        if state.waiting.len() >= MOST {
            let text = format!("{MOST} notifications wait on this path");
            return Err(Error::new(ErrorKind::QueueFull, text));
        }
        state.last += 1;
        let number = state.last;
        state.waiting.push_back(Notice { token, number, data: data.to_vec() });
        Ok(!std::mem::replace(&mut state.attended, true))
    }

    /// The next, for the thread that sees to them. After `None` it does so no more.
    pub(crate) fn next(&self) -> Option<Notice> {
        let mut state = self.state.lock();
        let next = state.waiting.pop_front();
        state.attended = next.is_some();
        next
    }

    /// Takes all that wait.
    pub(crate) fn take_all(&self) -> Vec<Notice> {
        self.state.lock().waiting.drain(..).collect()
    }
}

/// A notification as it travels.
pub(crate) fn encode(from: Incarnation, connection: u64, notice: &Notice) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + notice.data.len());
    for word in [from.0, connection, notice.number] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(&notice.data);
    bytes
}

/// What a notification says: whose it is, on which connection, its number there, and the data.
///
/// # Errors
/// `Malformed`.
pub(crate) fn decode(bytes: &[u8]) -> Result<(Incarnation, u64, u64, &[u8])> {
    let malformed = || {
        let text = format!("a notification of {} bytes; it has {HEAD} at least", bytes.len());
        Error::new(ErrorKind::Malformed, text)
    };
    let (head, data) = bytes.split_first_chunk::<HEAD>().ok_or_else(malformed)?;
    let (words, _) = head.as_chunks::<8>();
    let [from, connection, number] = words else { return Err(malformed()) };
    let word = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes);
    Ok((Incarnation(word(from)), word(connection), word(number), data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_turn_and_one_thread_sees_to_them() {
        let notices = Notices::default();
        assert!(notices.push(1, b"a").unwrap());
        assert!(!notices.push(2, b"b").unwrap(), "somebody sees to them already");
        let next = || notices.next().map(|notice| (notice.token, notice.number));
        assert_eq!((next(), next(), next()), (Some((1, 1)), Some((2, 2)), None));
        assert!(notices.push(3, b"c").unwrap(), "nobody does any more");
        for token in 0..MOST as u64 - 1 {
            notices.push(token, b"").unwrap();
        }
        assert_eq!(notices.push(0, b"").unwrap_err().kind(), ErrorKind::QueueFull);
        assert_eq!(notices.take_all().len(), MOST);
    }

    #[test]
    fn a_notification_survives_the_wire() {
        let notice = Notice { token: 9, number: 3, data: b"data".to_vec() };
        let bytes = encode(Incarnation(1), 2, &notice);
        assert_eq!(decode(&bytes).unwrap(), (Incarnation(1), 2, 3, b"data".as_slice()));
        assert_eq!(decode(&bytes[..HEAD - 1]).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
