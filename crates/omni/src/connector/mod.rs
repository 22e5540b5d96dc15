//! The connector: what one stage offers and another gets.
//!
//! A producer keeps payloads in a pool that is registered once, and a table of what it offers under which key. A
//! consumer asks for a key over the control plane; then the bytes go by the engine. On one host the consumer reads
//! the producer's memory for itself, or reads it in place under a lease; from another host the producer writes
//! into a slot that the consumer granted for this one get.

mod ask;
mod claim;
mod ended;
mod farewell;
mod get;
mod health;
mod lease;
mod opening;
mod place;
mod put;
mod reach;
mod received;
#[expect(unsafe_code, reason = "Rust cannot know who touches registered memory")]
mod register;
mod serve;
mod serving;
mod stored;
mod stream;
mod tensor_buffer;
mod timer;
mod worker;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_buffer::{Pool, PoolConfig, SlotGrant};
use posthorse_core::{Deadline, Ending, Error, ErrorKind, LocalRange, Result};
use posthorse_engine::environment::{CONNECTOR_PREFIX, Environment};
use posthorse_engine::{Grant, RegisteredMemory, TransferEngine};
use posthorse_memory::{CopyPool, MemoryOptions, numa_nodes};

use crate::config::{ConnectorConfig, PART};
use crate::control::{ControlPlane, Dialer, Listener, Responder};
use crate::message::{Query, Renew, Request};
use crate::offer::{Actions, Offers, PullId};

use farewell::Farewells;
pub use get::{GetOptions, Source};
pub use health::Health;
pub use lease::Lease;
use lease::Renewals;
pub use put::{OwnTicket, Payload, PutOptions, Ticket};
pub use received::{Received, Tensor};
use serving::Serving;
use stored::Sources;
pub(crate) use stored::Stored;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use stream::End as StreamEnd;
pub use stream::{FollowOptions, StreamReceiver, StreamSender};
pub use tensor_buffer::TensorBuffer;
use timer::Timer;
use worker::Workers;

/// A stage's end of its edges. Clones are handles of the same connector; the last one closes it.
///
/// In a child of `fork` every call answers `Forked`, also those of buffers, of what was got, and of streams; what is
/// dropped there does nothing. A child that wants a connector of its own has to be started afresh, by spawning it or by
/// `exec`: after a fork of a process with threads, POSIX lets the child do little else.
#[derive(Clone)]
pub struct Connector {
    owner: Arc<Owner>,
}

/// Closes the connector when the last handle goes.
struct Owner {
    inner: Arc<Inner>,
    ending: Ending,
    listener: Mutex<Option<Listener>>,
}

/// Puts a connector together: [`Connector::builder`].
#[derive(Debug, Default)]
pub struct ConnectorBuilder {
    config: ConnectorConfig,
    engine: Option<TransferEngine>,
}

/// The most connections to one producer by which gets ask now and then. Each has a place there, which others may want.
const PROBES: usize = 2;

/// What the connector's parts share.
pub(crate) struct Inner {
    config: ConnectorConfig,
    engine: TransferEngine,
    /// Whether the engine was made for this connector, and ends with it.
    owns_engine: bool,
    pool: Pool,
    memory: Mutex<Option<Arc<RegisteredMemory>>>,
    /// The pool's memory, for requests.
    pool_range: LocalRange,
    copier: CopyPool,
    /// Payload bytes outside of the pool.
    sources: Sources,
    plane: ControlPlane,
    /// For gets that wait for an offer: each takes a connection until it is answered.
    waiting: Dialer,
    /// For gets that ask now and then, since they cannot wait: however many, by few connections.
    prober: Dialer,
    /// For pulls, which are answered when the bytes are there.
    dialer: Dialer,
    /// For what is answered at once, and must wait behind none of these.
    teller: Dialer,
    advertised: Mutex<Option<(String, u16)>>,
    closed: AtomicBool,
    pulls: AtomicU64,
    state: Mutex<State>,
    workers: Workers,
    reaching: reach::Reaching,
    openings: opening::Openings,
    /// Producers by control address: whether they were found to be on this host.
    same_host: Mutex<HashMap<String, bool>>,
    /// Slots that were granted to producers which may still write to them.
    fencing: Mutex<Vec<(Grant, SlotGrant)>>,
    /// The leases this side holds.
    renewals: Mutex<Renewals>,
    /// The streams that are sent.
    streams: stream::Streams,
    /// How many streams are received.
    followed: AtomicUsize,
    farewells: Arc<Farewells>,
    timer: Arc<Timer>,
    timer_thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    counters: health::Counters,
}

/// What the producing side keeps, under one lock that is never held across a call elsewhere.
struct State {
    offers: Offers<Arc<Stored>>,
    /// What follows from changes of the table and is not yet carried out.
    actions: Actions<Arc<Stored>>,
    /// Whether a thread is at it.
    carrying_out: bool,
    /// Gets that wait for their payload, with what they asked.
    parked: HashMap<PullId, (Responder, Query)>,
    /// What is done for the claims in flight.
    serving: HashMap<PullId, Serving>,
}

impl ConnectorBuilder {
    /// Sets the configuration.
    #[must_use]
    pub fn config(mut self, config: ConnectorConfig) -> Self {
        self.config = config;
        self
    }

    /// Uses an engine of the caller's, which goes on when the connector is closed.
    #[must_use]
    pub fn engine(mut self, engine: TransferEngine) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Starts the connector, with the configuration as the [environment](posthorse_engine::environment) overrides it:
    /// allocates and registers its pool, and, unless it only receives, binds its listener.
    ///
    /// # Errors
    /// `InvalidConfig`; `LimitReached` or `OutOfMemory` for the pool; `Io` naming the address when it cannot be bound.
    pub fn build(self) -> Result<Connector> {
        let environment = Environment::of_process();
        let config = self.config.overridden_by(&environment)?;
        for name in environment.unknown(CONNECTOR_PREFIX, &ConnectorConfig::variables()) {
            tracing::warn!("the variable {name} is set, and overrides nothing");
        }
        Self::start(config, self.engine).map_err(|error| environment.named(PART, error))
    }

    fn start(config: ConnectorConfig, engine: Option<TransferEngine>) -> Result<Connector> {
        config.check()?;
        config.check_sender()?;
        let owns_engine = engine.is_none();
        let engine = match engine {
            Some(engine) => {
                config.check_with_engine()?;
                engine
            }
            None => own_engine(&config)?,
        };
        let region = pool_memory(&config)?.shared(true).allocate();
        let region = region.map_err(|error| {
            error.context(format_args!("memory_pool_size is {}", config.memory_pool_size))
        })?;
        let pool = Pool::new(region, &PoolConfig { alignment: 4096, ..PoolConfig::default() })?;
        let memory = register::register(&engine, &pool)?;
        let plane = ControlPlane::start(config.control_limits())?;
        let mut offer_limits = config.offer_limits();
        // Each get that waits has a control connection. The others are for all else: to pull, to end, to renew; and no
        // consumer takes more than half of those from the others.
        offer_limits.max_parked = offer_limits.max_parked.min(plane.places() / 2);
        let most = offer_limits.max_parked.div_ceil(2);
        offer_limits.max_parked_per_consumer = offer_limits.max_parked_per_consumer.min(most);
        let inner = Arc::new(Inner {
            pool_range: memory.at(0),
            memory: Mutex::new(Some(Arc::new(memory))),
            copier: CopyPool::new(CopyPool::default_helpers())?,
            sources: Sources::default(),
            workers: Workers::start(config.workers as usize)?,
            reaching: reach::Reaching::default(),
            openings: opening::Openings::default(),
            engine,
            owns_engine,
            pool,
            // As many as a producer lets wait, if it is configured as this side is.
            waiting: plane.dialer_for(config.max_parked_per_consumer as usize),
            prober: plane.dialer_of(PROBES),
            dialer: plane.dialer(),
            teller: plane.dialer(),
            plane,
            advertised: Mutex::new(None),
            closed: AtomicBool::new(false),
            pulls: AtomicU64::new(1),
            state: Mutex::new(State {
                offers: Offers::new(offer_limits),
                actions: Vec::new(),
                carrying_out: false,
                parked: HashMap::new(),
                serving: HashMap::new(),
            }),
            same_host: Mutex::default(),
            fencing: Mutex::default(),
            renewals: Mutex::default(),
            streams: stream::Streams::default(),
            followed: AtomicUsize::new(0),
            farewells: Arc::default(),
            timer: Arc::default(),
            timer_thread: Mutex::new(None),
            counters: health::Counters::default(),
            config,
        });
        let connector = Connector {
            owner: Arc::new(Owner { inner, ending: Ending::default(), listener: Mutex::new(None) }),
        };
        connector.start()?;
        Ok(connector)
    }
}

fn own_engine(config: &ConnectorConfig) -> Result<TransferEngine> {
    let engine = TransferEngine::builder().config(config.engine_config()?).build();
    let engine = engine.map_err(|error| match error.kind() {
        // It names the transport's key where the connector's is meant.
        ErrorKind::InvalidConfig if !config.device_name.is_empty() => {
            error.context(format_args!("device_name is {:?}", config.device_name))
        }
        // It listens where the connector does.
        _ => config.not_bound(error),
    })?;
    let installed = engine.transports();
    config.check_carrier(&installed.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>())?;
    Ok(engine)
}

fn pool_memory(config: &ConnectorConfig) -> Result<MemoryOptions> {
    let (size, device) = (config.memory_pool_size, config.memory_pool_device.as_str());
    let options = MemoryOptions::new(
        usize::try_from(size)
            .map_err(|_| Error::invalid_config("memory_pool_size", size, "what memory can be"))?,
    );
    match device.split_once(':') {
        None if device == "cpu" => Ok(options),
        Some(("cpu", node)) => {
            let nodes = numa_nodes();
            let known = node.parse().ok().filter(|node| nodes.contains(node));
            known.map(|node| options.node(node)).ok_or_else(|| {
                let nodes: Vec<_> = nodes.iter().map(|node| format!("cpu:{node}")).collect();
                let accepted = format!("cpu, or a NUMA node of this host: {}", nodes.join(", "));
                Error::invalid_config("memory_pool_device", format_args!("{device:?}"), &accepted)
            })
        }
        _ if device == "cuda" || device.starts_with("cuda:") => Err(Error::new(
            ErrorKind::Unsupported,
            format!("memory_pool_device is {device:?}: pools in device memory are not built in"),
        )
        .with_advice("cpu works everywhere")),
        _ => Err(config.no_such_device()),
    }
}

impl Connector {
    /// Begins to put a connector together.
    pub fn builder() -> ConnectorBuilder {
        ConnectorBuilder::default()
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.owner.inner
    }

    fn start(&self) -> Result<()> {
        let inner = self.inner();
        *inner.timer_thread.lock() = Some(timer::start(&inner.timer, Arc::downgrade(inner))?);
        if inner.config.role.sends() {
            let service = Arc::new(serve::Server { inner: Arc::downgrade(inner) });
            let listener = match inner.config.bind_address() {
                Some(address) => {
                    inner.plane.listen(&address, service).map_err(|error| inner.config.not_bound(error))
                }
                None => inner.plane.listen_everywhere(inner.config.zmq_port, service),
            };
            let listener = listener.map_err(|error| inner.config.taken(error))?;
            let port = listener.local_address().port();
            *inner.advertised.lock() = Some((inner.advertised_host(listener.local_address().ip()), port));
            *self.owner.listener.lock() = Some(listener);
        }
        Ok(())
    }

    /// The host and port under which consumers ask this connector.
    ///
    /// # Errors
    /// `Unsupported` for a connector that only receives; `Forked` in a child process.
    pub fn address(&self) -> Result<(String, u16)> {
        self.inner().advertised()
    }

    /// The engine that moves the bytes.
    pub fn engine(&self) -> &TransferEngine {
        &self.inner().engine
    }

    /// Takes back every offer, ends every get and transfer, and gives the memory up. Never hangs: what peers may still
    /// touch is kept alive until they cannot. Idempotent; whoever calls it again meanwhile waits until it is done, but for
    /// the connector's own threads, such as one that runs a waker. Every call after it answers `Closed`. Does nothing in a
    /// child process.
    pub fn close(&self) {
        self.owner.close();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.close();
        if self.inner.is_forked() {
            // The threads are the parent's, and so are the sockets in the event queues that are shared with it.
            std::mem::forget(Arc::clone(&self.inner));
        }
    }
}

impl Owner {
    fn close(&self) {
        if self.inner.is_forked() {
            return;
        }
        let Some(_duty) = self.ending.begin() else { return };
        let inner = &self.inner;
        inner.closed.store(true, Ordering::Release);
        // At one moment: what is not queued by then is refused, and a worker finds what it began called off.
        let (pulls, writes) = inner.with_state(|state, now| {
            state.offers.close(now, &mut state.actions);
            (state.end_pulls(now), state.writes())
        });
        pulls.into_iter().for_each(|rest| inner.carry_out_rest(rest, &get::closed()));
        inner.pool.close();
        let fence = Deadline::after(Duration::from_millis(inner.config.liveness_ms));
        for batch in &writes {
            // What does not end in time ends with the engine, or is held back by it.
            let _ = batch.wait(fence);
        }
        // Producers keep what was got until they hear that the get has ended.
        if !inner.farewells.wait(fence) {
            tracing::warn!("a producer was not told that a get has ended; it finds out by the lease");
        }
        if let Some(listener) = self.listener.lock().take() {
            listener.close();
        }
        inner.reaching.close();
        let workers = inner.workers.close();
        if let Err(error) = inner.plane.close(fence) {
            tracing::warn!(%error, "the control plane ends later");
        }
        inner.timer.stop();
        for thread in workers.into_iter().chain(inner.timer_thread.lock().take()) {
            // One of them may be the thread that drops the last handle.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        // Grants that cannot be ended yet are kept by the engine, which holds their memory.
        let serving: Vec<_> = inner.state.lock().serving.drain().collect();
        drop(serving);
        inner.fencing.lock().clear();
        // A get that grants a part of it just now lets go of it soon, and finds the pool closed.
        let memory = inner.memory.lock().take().and_then(Arc::into_inner);
        if let Some(memory) = memory
            && let Err(error) = memory.unregister(fence)
        {
            tracing::warn!(%error, "the pool is held until nobody touches it any more");
        }
        if inner.owns_engine {
            inner.engine.shutdown();
        }
    }
}

impl Inner {
    /// The pool's memory. No lock is held while it is used, which may wait for a device.
    ///
    /// # Errors
    /// `Closed`.
    fn memory(&self) -> Result<Arc<RegisteredMemory>> {
        self.memory.lock().clone().ok_or_else(get::closed)
    }

    /// Whether this is a forked child: no thread of the connector is there, nor its memory, and locks may be held for
    /// ever.
    fn is_forked(&self) -> bool {
        self.plane.is_forked()
    }

    /// # Errors
    /// `Closed`; `Forked` in a child process.
    fn check_open(&self) -> Result<()> {
        self.plane.check_here()?;
        if self.closed.load(Ordering::Acquire) { Err(get::closed()) } else { Ok(()) }
    }

    /// The host that consumers are told: as configured, else the bound one if it is specific, else the engine's.
    fn advertised_host(&self, bound: std::net::IpAddr) -> String {
        match &self.config.advertise_host {
            Some(host) => host.clone(),
            None if !bound.is_unspecified() => bound.to_string(),
            None => self.engine_address().0,
        }
    }

    /// The host and port of the engine's handshake, where its name is that; else the name and no port.
    fn engine_address(&self) -> (String, u16) {
        let name = self.engine.name();
        match name.rsplit_once(':').map(|(host, port)| (host, port.parse())) {
            Some((host, Ok(port))) => (host.trim_matches(['[', ']']).to_owned(), port),
            _ => (name.to_owned(), 0),
        }
    }

    fn advertised(&self) -> Result<(String, u16)> {
        self.plane.check_here()?;
        self.advertised.lock().clone().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "this connector has role receiver, and listens to nobody")
        })
    }

    /// Tells producers of which leases we hold that we still do, where that is due. Returns when it is again.
    fn renew_leases(&self, now: Instant) -> Option<Instant> {
        let (by_address, next) = {
            let mut renewals = self.renewals.lock();
            (renewals.take_due(now), renewals.next_due())
        };
        for (address, pulls) in by_address {
            let renew = Renew {
                consumer: self.engine.name().to_owned(),
                incarnation: self.engine.incarnation(),
                pulls,
            };
            self.tell(&address, &Request::Renew(renew));
        }
        next
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("engine", &self.inner().engine.name())
            .field("role", &self.inner().config.role)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
