//! How an engine is put together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use parking_lot::Mutex;
use posthorse_core::{
    ControlChannel, Ending, Error, ErrorKind, Features, Hello, Incarnation, Result, Transport,
};
use posthorse_memory::{CopyPool, ForkGuard};
use posthorse_segment::{Directory, HandshakeListener, Identity, P2pDirectory, Registry};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::config::EngineConfig;
use crate::engine::{Inner, Owner, TransferEngine};
use crate::environment::{CONNECTOR_PREFIX, Environment, PREFIX};
use crate::inbox::{ForeignInbox, Inbox};
use crate::local::LocalTransport;
use crate::regions::Regions;
use crate::runtime::{ControlRuntime, WAITING};
use crate::ticker::{self, Ticker};
use crate::transports::Transports;

/// Puts an engine together: [`TransferEngine::builder`].
#[derive(Debug, Default)]
pub struct EngineBuilder {
    config: EngineConfig,
    meeting: Option<Meeting>,
    transports: Vec<Arc<dyn Transport>>,
    bare: bool,
}

/// Where this engine and its peers find and ask each other.
#[derive(Debug)]
struct Meeting {
    name: String,
    directory: Arc<dyn Directory>,
    control: Arc<dyn ControlChannel>,
}

impl EngineBuilder {
    /// Sets the configuration.
    #[must_use]
    pub fn config(mut self, config: EngineConfig) -> Self {
        self.config = config;
        self
    }

    /// Uses a name, directory and control channel of the caller's in place of the peer-to-peer handshake, whose
    /// names are `host:port`.
    #[must_use]
    pub fn directory(
        mut self,
        name: impl Into<String>,
        directory: Arc<dyn Directory>,
        control: Arc<dyn ControlChannel>,
    ) -> Self {
        self.meeting = Some(Meeting { name: name.into(), directory, control });
        self
    }

    /// Installs a transport besides those that come with Posthorse.
    #[must_use]
    pub fn transport(mut self, transport: Arc<dyn Transport>) -> Self {
        self.transports.push(transport);
        self
    }

    /// Installs none of the transports that come with Posthorse, except for the engine's own segment.
    #[must_use]
    pub const fn bare(mut self) -> Self {
        self.bare = true;
        self
    }

    /// Starts the engine, with the configuration as the [environment](crate::environment) overrides it.
    ///
    /// # Errors
    /// `InvalidConfig`; whatever keeps a transport or the handshake from starting, such as an address in use.
    pub fn build(mut self) -> Result<TransferEngine> {
        let environment = Environment::of_process();
        self.config = self.config.overridden_by(&environment)?;
        for name in environment.unknown(PREFIX, &EngineConfig::variables()?) {
            // A connector looks at its own.
            if !name.starts_with(CONNECTOR_PREFIX) {
                tracing::warn!("the variable {name} is set, and overrides nothing");
            }
        }
        self.config.validate()?;
        let fork = ForkGuard::new()?;
        let incarnation = Incarnation(random()?);
        let runtime = ControlRuntime::start()?;
        let handle = runtime.handle().ok_or_else(|| Error::new(ErrorKind::Internal, "no control runtime"))?;
        let hello = Hello::new(Features::NONE, self.config.fingerprint.clone());
        let inbox = Arc::new(Inbox::new(self.config.max_notifications, self.config.max_notification_bytes));
        let Meeting { name, directory, control } = match self.meeting {
            Some(meeting) => meeting,
            None => shake_hands(&self.config, &handle, incarnation, &hello, &inbox)?,
        };
        let mut transports = if self.bare { Vec::new() } else { come_with(&self.config)? };
        transports.extend(self.transports.into_iter().map(Coming::there));
        let inner = Arc::new(Inner {
            name: name.into(),
            incarnation,
            hello,
            fork,
            closed: AtomicBool::new(false),
            registry: Arc::new(Registry::new()),
            regions: Regions::default(),
            transports: Transports::new(&self.config)?,
            changes: AtomicU64::new(0),
            publish_due: AtomicBool::new(false),
            directory,
            control_channel: control,
            runtime: handle,
            turns: Arc::new(Semaphore::new(WAITING)),
            peers: crate::peers::Peers::default(),
            paths: crate::path::Paths::default(),
            table: crate::table::Table::default(),
            again: Mutex::default(),
            later: Mutex::default(),
            withheld: Mutex::default(),
            inbox,
            ticker: Arc::new(Ticker::default()),
            config: self.config,
        });
        let owner =
            Owner { inner: Arc::clone(&inner), runtime, ticker: Mutex::default(), ending: Ending::default() };
        // From here on a failure shuts down what was started: the owner is dropped.
        let engine = TransferEngine { owner: Arc::new(owner) };
        *engine.owner.ticker.lock() = Some(ticker::start(&inner)?);
        let copier = Arc::new(CopyPool::new(CopyPool::default_helpers())?);
        inner.install(Arc::new(LocalTransport::new(copier)))?;
        for Coming { name, transport, may_lack } in transports {
            match transport.and_then(|transport| inner.install(transport)) {
                Ok(_) => {}
                Err(error) if may_lack && error.kind() == ErrorKind::Unsupported => {
                    tracing::debug!(transport = name, %error, "not on this host");
                    inner.transports.lack(&name, error);
                }
                Err(error) => return Err(environment.named(&name, error)),
            }
        }
        for name in inner.transports.unknown_in_order() {
            tracing::warn!("transport_order names {name:?}, which is neither built in nor installed");
        }
        if let Some(missing) = inner.transports.missing() {
            // It may be installed later.
            tracing::warn!("{}", missing.message());
        }
        inner.publish()?;
        Ok(engine)
    }
}

/// Takes a handshake port and answers there; the name is its address.
fn shake_hands(
    config: &EngineConfig,
    runtime: &Handle,
    incarnation: Incarnation,
    hello: &Hello,
    inbox: &Arc<Inbox>,
) -> Result<Meeting> {
    let listener = HandshakeListener::bind(config.handshake.clone())?;
    let (host, port) = (config.advertised_host()?, listener.port());
    let name = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let identity = Identity { name: name.clone(), incarnation, hello: hello.clone() };
    let events = Arc::new(ForeignInbox(Arc::clone(inbox)));
    let handshake = Arc::new(listener.start(runtime, identity, events)?);
    let control = Arc::new(handshake.control());
    Ok(Meeting { name, directory: Arc::new(P2pDirectory::new(handshake)), control })
}

/// A transport to be installed.
struct Coming {
    name: String,
    transport: Result<Arc<dyn Transport>>,
    /// Whether the engine goes on without it where the host has nothing for it.
    may_lack: bool,
}

impl Coming {
    fn there(transport: Arc<dyn Transport>) -> Self {
        Self { name: transport.name().to_owned(), transport: Ok(transport), may_lack: false }
    }
}

/// The transports that come with Posthorse, as far as they are built in and not switched off.
fn come_with(config: &EngineConfig) -> Result<Vec<Coming>> {
    #[cfg_attr(not(any(feature = "shm", feature = "tcp", feature = "rdma")), expect(unused_mut))]
    let mut transports: Vec<Coming> = Vec::new();
    #[cfg(feature = "shm")]
    if let Some(shm) = &config.shm {
        transports.push(Coming::there(Arc::new(posthorse_shm::ShmTransport::new(shm.clone())?)));
    }
    #[cfg(feature = "rdma")]
    if let Some(rdma) = &config.rdma {
        let transport = posthorse_rdma::RdmaTransport::new(rdma.clone());
        let transport = transport.map(|transport| Arc::new(transport) as Arc<dyn Transport>);
        transports.push(Coming { name: "rdma".to_owned(), transport, may_lack: true });
    }
    #[cfg(feature = "tcp")]
    if let Some(tcp) = config.tcp() {
        transports.push(Coming::there(Arc::new(posthorse_tcp::TcpTransport::new(tcp)?)));
    }
    let _ = config;
    Ok(transports)
}

fn random() -> Result<u64> {
    getrandom::u64().map_err(|error| Error::new(ErrorKind::Io, format!("draw a random number: {error}")))
}
