//! A control channel within one process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use posthorse_core::{ControlChannel, Deadline, Error, ErrorKind, RequestHandler, Result};

/// Connects the control channels of several engines or transports within one process.
#[derive(Debug, Clone, Default)]
pub struct ControlHub {
    ends: Arc<Mutex<HashMap<String, Arc<End>>>>,
}

#[derive(Default)]
struct End {
    handlers: Mutex<HashMap<String, RequestHandler>>,
}

/// One end: what its owner asks goes to the ends of other names.
#[derive(Debug)]
struct Channel {
    name: String,
    hub: ControlHub,
    own: Arc<End>,
}

impl ControlHub {
    /// A hub without ends.
    pub fn new() -> Self {
        Self::default()
    }

    /// The end of the engine called `name`; one of the same name that is still there is replaced.
    pub fn channel(&self, name: &str) -> Arc<dyn ControlChannel> {
        let own = Arc::new(End::default());
        lock(&self.ends).insert(name.to_owned(), Arc::clone(&own));
        Arc::new(Channel { name: name.to_owned(), hub: self.clone(), own })
    }

    /// Takes the end of `name` away: it is unreachable from now on.
    pub fn hang_up(&self, name: &str) {
        lock(&self.ends).remove(name);
    }
}

impl ControlChannel for Channel {
    fn request(&self, peer: &str, topic: &str, body: &[u8], _: Deadline) -> Result<Vec<u8>> {
        let end = lock(&self.hub.ends).get(peer).cloned().ok_or_else(|| {
            Error::new(ErrorKind::PeerUnreachable, "nobody of this name is on the control hub")
                .with_peer(peer)
        })?;
        let handler = lock(&end.handlers).get(topic).cloned().ok_or_else(|| {
            Error::new(ErrorKind::PeerRefused, format!("nobody answers requests about {topic:?}"))
                .with_peer(peer)
        })?;
        handler(&self.name, body)
    }

    fn on_request(&self, topic: &str, handler: RequestHandler) {
        lock(&self.own.handlers).insert(topic.to_owned(), handler);
    }
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(lock(&self.handlers).keys()).finish()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_reaches_its_peer_which_learns_who_asks() {
        let hub = ControlHub::new();
        let (a, b) = (hub.channel("a"), hub.channel("b"));
        b.on_request("greet", Arc::new(|from, body| Ok([from.as_bytes(), body].concat())));
        assert_eq!(a.request("b", "greet", b"!", Deadline::NEVER).unwrap(), b"a!");
        let kind = |peer, topic| a.request(peer, topic, b"", Deadline::NEVER).unwrap_err().kind();
        assert_eq!(kind("b", "part"), ErrorKind::PeerRefused);
        assert_eq!(kind("c", "greet"), ErrorKind::PeerUnreachable);
        hub.hang_up("b");
        assert_eq!(kind("b", "greet"), ErrorKind::PeerUnreachable);
    }
}
