//! How much of unfinished messages a listener holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use posthorse_core::{Error, ErrorKind, Result};

/// Any connection may hold so much, in bytes: what a request takes, but for very long ones.
const FREE: usize = 4096;

/// What all connections of a listener may hold together.
#[derive(Debug)]
pub(super) struct Partial {
    held: AtomicUsize,
    most: usize,
}

/// What one connection holds of that.
#[derive(Debug)]
pub(super) struct Held {
    partial: Arc<Partial>,
    bytes: usize,
}

impl Partial {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { held: AtomicUsize::new(0), most })
    }

    pub(super) fn begin(self: &Arc<Self>) -> Held {
        Held { partial: Arc::clone(self), bytes: 0 }
    }
}

impl Held {
    /// The connection holds so many bytes now.
    ///
    /// # Errors
    /// `LimitReached` when all hold too much together, and this one more than a short message.
    pub(super) fn set(&mut self, bytes: usize) -> Result<()> {
        let before = std::mem::replace(&mut self.bytes, bytes);
        let held = &self.partial.held;
        let now = if bytes >= before {
            held.fetch_add(bytes - before, Ordering::Relaxed) + (bytes - before)
        } else {
            held.fetch_sub(before - bytes, Ordering::Relaxed) - (before - bytes)
        };
        if bytes > FREE && bytes > before && now > self.partial.most {
            let text =
                format!("{now} bytes of unfinished messages are held; accepted: {}", self.partial.most);
            return Err(Error::new(ErrorKind::LimitReached, text));
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.partial.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_share_a_bound_and_short_ones_pass() {
        let partial = Partial::new(10 * FREE);
        let (mut a, mut b) = (partial.begin(), partial.begin());
        a.set(9 * FREE).unwrap();
        b.set(FREE).unwrap();
        let error = b.set(2 * FREE).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitReached);
        assert!(error.message().contains("40960"), "{error}");
        partial.begin().set(FREE).unwrap();
        drop(a);
        b.set(3 * FREE).unwrap();
        b.set(0).unwrap();
        assert_eq!(partial.held.load(Ordering::Relaxed), 0);
    }
}
