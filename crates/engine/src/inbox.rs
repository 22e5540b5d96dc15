//! The notifications of peers, until somebody fetches them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use posthorse_core::{AtWork, Deadline, Error, ErrorKind, Result};
use posthorse_segment::HandshakeEvents;

use crate::signal::Signal;

/// A message of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// The peer's segment name, as its transport knows it.
    pub peer: String,
    /// The message.
    pub data: Vec<u8>,
}

/// Takes the notifications that foreign engines send to the handshake port. Their name is their own word.
#[derive(Debug)]
pub(crate) struct ForeignInbox(pub(crate) Arc<Inbox>);

impl HandshakeEvents for ForeignInbox {
    fn notified(&self, peer: &str, message: &str) -> Result<()> {
        let _at_work = AtWork::begin();
        self.0.deliver(peer, message.as_bytes())
    }
}

/// A queue that is bounded in messages and in bytes: when it is full, the sender is told.
#[derive(Debug)]
pub(crate) struct Inbox {
    limit: usize,
    max_bytes: usize,
    messages: Mutex<Messages>,
    signal: Signal,
}

#[derive(Debug, Default)]
struct Messages {
    queue: VecDeque<Notification>,
    bytes: usize,
}

impl Inbox {
    pub(crate) fn new(limit: usize, max_bytes: usize) -> Self {
        Self { limit, max_bytes, messages: Mutex::default(), signal: Signal::default() }
    }

    pub(crate) fn deliver(&self, peer: &str, data: &[u8]) -> Result<()> {
        let mut messages = self.messages.lock();
        let (count, bytes) = (messages.queue.len(), messages.bytes);
        // A message that is larger than the limit comes through when it is alone.
        if count >= self.limit || (count > 0 && bytes.saturating_add(data.len()) > self.max_bytes) {
            return Err(Error::new(
                ErrorKind::QueueFull,
                format!(
                    "{count} notifications of {bytes} bytes wait to be fetched; accepted: {} of {} bytes",
                    self.limit, self.max_bytes
                ),
            ));
        }
        messages.bytes += data.len();
        messages.queue.push_back(Notification { peer: peer.to_owned(), data: data.to_vec() });
        drop(messages);
        self.signal.ring();
        Ok(())
    }

    pub(crate) fn drain(&self) -> Vec<Notification> {
        std::mem::take(&mut *self.messages.lock()).queue.into()
    }

    pub(crate) fn next(&self, spin: Duration, deadline: Deadline) -> Result<Notification> {
        loop {
            if let Some(message) = self.messages.lock().pop() {
                return Ok(message);
            }
            if !self.signal.wait(spin, deadline, || !self.messages.lock().queue.is_empty()) {
                return Err(Deadline::exceeded("a notification"));
            }
        }
    }
}

impl Messages {
    fn pop(&mut self) -> Option<Notification> {
        let message = self.queue.pop_front()?;
        self.bytes -= message.data.len();
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_in_order_and_a_full_inbox_refuses() {
        let inbox = Inbox::new(2, 100);
        inbox.deliver("a", b"1").unwrap();
        inbox.deliver("b", b"2").unwrap();
        assert_eq!(inbox.deliver("c", b"3").unwrap_err().kind(), ErrorKind::QueueFull);
        assert_eq!(inbox.next(Duration::ZERO, Deadline::NEVER).unwrap().data, b"1");
        inbox.deliver("c", b"3").unwrap();
        assert_eq!(inbox.drain().iter().map(|message| message.data[0]).collect::<Vec<_>>(), b"23");
        let late = inbox.next(Duration::ZERO, Deadline::after(Duration::from_millis(1))).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    }

    #[test]
    fn the_bytes_of_what_waits_are_bounded() {
        let inbox = Inbox::new(100, 10);
        inbox.deliver("a", &[0; 50]).unwrap();
        assert_eq!(inbox.deliver("a", b"1").unwrap_err().kind(), ErrorKind::QueueFull);
        inbox.next(Duration::ZERO, Deadline::NEVER).unwrap();
        inbox.deliver("a", &[0; 6]).unwrap();
        assert_eq!(inbox.deliver("a", &[0; 5]).unwrap_err().kind(), ErrorKind::QueueFull);
        inbox.deliver("a", &[0; 4]).unwrap();
        assert_eq!(inbox.drain().len(), 2);
        inbox.deliver("a", &[0; 10]).unwrap();
    }
}
