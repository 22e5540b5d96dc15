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

/// What is known of a peer: the current connection, if it was made.
struct Peer {
    link: Mutex<Arc<OnceCell<Link>>>,
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
        lock(&self.link).get().is_some_and(Link::is_open)
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
            // Those who need the connection at the same time share the making of it.
            let link =
                cell.get_or_try_init(|| Link::connect(&local.config, &local.greeting, name, address)).await?;
            let patience = request.deadline.remaining(Instant::now()).unwrap_or(std::time::Duration::MAX);
            match link.ask(&request.topic, &request.body, patience).await {
                Err(Ended::Broken(_)) if used && again => again = false,
                Err(Ended::Broken(error) | Ended::Final(error)) => return Err(error),
                Ok(answer) => return Ok(answer),
            }
        }
    }

    /// The current connection, or the place for the next; and whether it had been made before.
    fn current(&self) -> (Arc<OnceCell<Link>>, bool) {
        let mut cell = lock(&self.link);
        if cell.get().is_some_and(|link| !link.is_open()) {
            *cell = Arc::default();
        }
        let used = cell.initialized();
        (Arc::clone(&cell), used)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
