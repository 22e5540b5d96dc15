//! What this process is to its peers: shared by everything that serves or calls.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use posthorse_core::{Error, ErrorKind, Hello, Incarnation, RequestHandler, Result};
use tokio::sync::Semaphore;

use super::config::HandshakeConfig;
use super::message::{Greeting, NO_CONNECTION};
use crate::descriptors;

/// Who this process is.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its segment's name; with the peer-to-peer directory `host:port` of its handshake.
    pub name: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// What it speaks.
    pub hello: Hello,
}

/// Takes what peers send to the handshake port. Called from threads that may block.
pub trait HandshakeEvents: fmt::Debug + Send + Sync {
    /// A message for the application arrived, of a peer that calls itself `peer`.
    ///
    /// # Errors
    /// Any: the peer is told that the message was refused.
    fn notified(&self, peer: &str, message: &str) -> Result<()>;

    /// A peer asks for an RDMA connection, in Mooncake's JSON; answers in the same. By default: no RDMA here.
    ///
    /// # Errors
    /// Any: the peer's connection is closed.
    fn connection(&self, request: &[u8]) -> Result<Vec<u8>> {
        let _ = request;
        Ok(NO_CONNECTION.to_vec())
    }
}

/// See the module.
pub(crate) struct Local {
    pub(crate) config: HandshakeConfig,
    pub(crate) greeting: Greeting,
    pub(crate) events: Arc<dyn HandshakeEvents>,
    /// One for each handler that may run.
    pub(crate) handler_slots: Arc<Semaphore>,
    /// One for each byte of requests that may wait.
    pub(crate) queue_bytes: Arc<Semaphore>,
    /// One for each peer that may hold a control connection.
    pub(crate) control_slots: Arc<Semaphore>,
    descriptor: RwLock<Option<Arc<[u8]>>>,
    handlers: RwLock<HashMap<String, RequestHandler>>,
}

impl Local {
    pub(crate) fn new(config: HandshakeConfig, identity: Identity, events: Arc<dyn HandshakeEvents>) -> Self {
        let Identity { name, incarnation, hello } = identity;
        Self {
            greeting: Greeting { name, incarnation, hello },
            events,
            handler_slots: Arc::new(Semaphore::new(config.handlers)),
            queue_bytes: Arc::new(Semaphore::new(config.queue_bytes)),
            control_slots: Arc::new(Semaphore::new(descriptors::connections(config.control_connections, 1))),
            descriptor: RwLock::default(),
            handlers: RwLock::default(),
            config,
        }
    }

    pub(crate) fn set_descriptor(&self, json: Option<Arc<[u8]>>) {
        *self.descriptor.write().unwrap_or_else(PoisonError::into_inner) = json;
    }

    pub(crate) fn descriptor(&self) -> Option<Arc<[u8]>> {
        self.descriptor.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_handler(&self, topic: &str, handler: RequestHandler) {
        let mut handlers = self.handlers.write().unwrap_or_else(PoisonError::into_inner);
        handlers.insert(topic.to_owned(), handler);
    }

    pub(crate) fn handler(&self, topic: &str) -> Option<RequestHandler> {
        self.handlers.read().unwrap_or_else(PoisonError::into_inner).get(topic).cloned()
    }

    /// Runs something that may block where it holds up nobody, as soon as fewer than the configured number run.
    pub(crate) async fn handle<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let slot = Arc::clone(&self.handler_slots).acquire_owned().await;
        // The slot goes along: the work runs on when nobody waits for it any more.
        let outcome = tokio::task::spawn_blocking(move || {
            let _slot = slot;
            work()
        })
        .await;
        outcome.unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "the handler of a request panicked")))
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local").field("greeting", &self.greeting).finish_non_exhaustive()
    }
}
