//! Requests to Posthorse peers, over connections that are kept.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use posthorse_core::{ControlChannel, Deadline, Error, ErrorKind, RequestHandler, Result};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, Semaphore};

use super::blocking::wait;
use super::link::{Ended, Link};
use super::local::Local;
use crate::address::SegmentAddress;

/// The [`ControlChannel`] over the handshake port: one connection to each peer, made when it is first needed and
/// again after it broke, closed when nobody uses it.
///
/// A request whose connection broke before the answer, after it had served earlier requests, is sent once more:
/// a handler may see a request twice. [`P2pControl::request`] waits on the calling thread, which must not be one
/// that drives the runtime. Handlers run on the runtime's blocking threads; they are told the name that the peer
/// gives itself.
pub struct P2pControl {
    runtime: Handle,
    local: Arc<Local>,
    peers: Mutex<HashMap<Box<str>, Arc<Peer>>>,
}

/// A connection, once it is made, or why it could not be: for all who wait for it.
type Made = OnceCell<Result<Link>>;

/// What is known of a peer: the current connection, if it was made.
struct Peer {
    link: Mutex<Arc<Made>>,
    /// One for each request that may be under way.
    slots: Semaphore,
}

impl P2pControl {
    pub(crate) fn new(runtime: Handle, local: Arc<Local>) -> Self {
        Self { runtime, local, peers: Mutex::default() }
    }

    fn peer(&self, name: &str) -> Result<Arc<Peer>> {
        let mut peers = lock(&self.peers);
        if let Some(peer) = peers.get(name) {
            return Ok(Arc::clone(peer));
        }
        let limit = self.local.config.control_connections;
        if peers.len() >= limit {
            peers.retain(|_, peer| Arc::strong_count(peer) > 1 || peer.is_linked());
        }
        if peers.len() >= limit {
            let why = format!("there are control connections to {limit} peers already");
            return Err(Error::new(ErrorKind::LimitReached, why).with_advice("raise control_connections"));
        }
        let slots = Semaphore::new(self.local.config.requests_per_peer);
        let peer = Arc::new(Peer { link: Mutex::default(), slots });
        peers.insert(name.into(), Arc::clone(&peer));
        Ok(peer)
    }
}

impl ControlChannel for P2pControl {
    fn request(&self, peer: &str, topic: &str, body: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let address = SegmentAddress::parse(peer, self.local.config.default_port)?;
        let (local, known) = (Arc::clone(&self.local), self.peer(peer)?);
        let name: Arc<str> = peer.into();
        let request = Request { topic: topic.to_owned(), body: body.to_vec(), deadline };
        let asked = async move { known.ask(&local, &name, &address, request).await };
        wait(&self.runtime, deadline, &format!("the answer about {topic}"), asked)
            .map_err(|error| if error.peer().is_some() { error } else { error.with_peer(peer) })
    }

    fn on_request(&self, topic: &str, handler: RequestHandler) {
        self.local.set_handler(topic, handler);
    }
}

impl fmt::Debug for P2pControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peers = lock(&self.peers).len();
        f.debug_struct("P2pControl")
            .field("local", &self.local)
            .field("peers", &peers)
            .finish_non_exhaustive()
    }
}

struct Request {
    topic: String,
    body: Vec<u8>,
    deadline: Deadline,
}

impl Peer {
    fn is_linked(&self) -> bool {
        lock(&self.link).get().is_some_and(is_open)
    }

    async fn ask(
        &self,
        local: &Local,
        name: &str,
        address: &SegmentAddress,
        request: Request,
    ) -> Result<Vec<u8>> {
        let Ok(_slot) = self.slots.try_acquire() else {
            let limit = local.config.requests_per_peer;
            return Err(Error::new(
                ErrorKind::QueueFull,
                format!("{limit} requests to this peer are under way"),
            ));
        };
        let mut again = true;
        loop {
            let (cell, used) = self.current();
            // Those who need the connection at the same time share the making of it, and its failure: each would
            // otherwise try for as long, one after the other.
            let made =
                cell.get_or_init(|| Link::connect(&local.config, &local.greeting, name, address)).await;
            let link = made.as_ref().map_err(Error::clone)?;
            let patience = request.deadline.remaining(Instant::now()).unwrap_or(std::time::Duration::MAX);
            match link.ask(&request.topic, &request.body, patience).await {
                Err(Ended::Broken(_)) if used && again => again = false,
                Err(Ended::Broken(error) | Ended::Final(error)) => return Err(error),
                Ok(answer) => return Ok(answer),
            }
        }
    }

    /// The current connection, or the place for the next; and whether it had been made before.
    fn current(&self) -> (Arc<Made>, bool) {
        let mut cell = lock(&self.link);
        if cell.get().is_some_and(|made| !is_open(made)) {
            *cell = Arc::default();
        }
        let used = cell.initialized();
        (Arc::clone(&cell), used)
    }
}

fn is_open(made: &Result<Link>) -> bool {
    made.as_ref().is_ok_and(Link::is_open)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use posthorse_core::{Features, Hello, Incarnation};

    use super::super::config::HandshakeConfig;
    use super::super::local::{HandshakeEvents, Identity};
    use super::*;

    #[derive(Debug)]
    struct Nobody;

    impl HandshakeEvents for Nobody {
        fn notified(&self, _: &str, _: &str) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn requests_at_the_same_time_share_the_failure_to_connect() {
        // It takes connections and says nothing.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        silent.set_nonblocking(true).unwrap();
        let name = silent.local_addr().unwrap().to_string();
        let address = SegmentAddress::parse(&name, None).unwrap();
        let hello = Hello::new(Features::NONE, None);
        let identity = Identity { name: "a:1".to_owned(), incarnation: Incarnation(1), hello };
        let config = HandshakeConfig { io_timeout_ms: 50, ..HandshakeConfig::default() };
        let local = Local::new(config, identity, Arc::new(Nobody));
        let peer = Peer { link: Mutex::default(), slots: Semaphore::new(3) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let ask = || {
            let request = Request { topic: String::new(), body: Vec::new(), deadline: Deadline::NEVER };
            peer.ask(&local, &name, &address, request)
        };
        let (first, second, third) = runtime.block_on(async { tokio::join!(ask(), ask(), ask()) });
        for answer in [first, second, third] {
            assert_eq!(answer.unwrap_err().kind(), ErrorKind::PeerGone);
        }
        silent.accept().unwrap();
        silent.accept().expect_err("one attempt for all");
        runtime.block_on(ask()).unwrap_err();
        silent.accept().expect("another one for those who come later");
    }
}
