//! What a consumer gets.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use posthorse_buffer::{ManagedBuffer, ReceiveSlot};
use posthorse_core::{
    Deadline, Error, ErrorKind, GrantDesc, Incarnation, Opcode, Priority, RemoteRange, Result, Route,
    TransferRequest,
};
use posthorse_engine::{LeasedMemory, Precedence, Segment, SubmitOptions};

use super::claim::{Claim, Granted};
use super::farewell::closing;
use super::lease::{self, Lease};
use super::put::Ticket;
use super::reach::not_reached;
use super::received::Received;
use super::worker::block_on;
use super::{Connector, Inner};
use crate::control::Dialer;
use crate::key::Edge;
use crate::message::{Offered, Outcome, Pull, PullExtra, PullReply, Request, Want};
use crate::offer::PullId;

/// Where a payload is to be had.
#[derive(Debug, Clone, Copy, Default)]
pub enum Source<'a> {
    /// At the configured producer.
    #[default]
    Upstream,
    /// At the producer with this control address.
    At(&'a str, u16),
    /// Where its ticket says; a later put of the same key is not taken for it.
    Ticket(&'a Ticket),
}

/// How a payload is to be got.
#[derive(Debug, Clone, Copy, Default)]
pub struct GetOptions<'a> {
    /// Until when to wait: for the payload to be offered, for room in the pool, for the bytes. `None` waits as long as
    /// `get_wait_ms` says.
    pub deadline: Option<Deadline>,
    /// Where it is to be had.
    pub source: Source<'a>,
    /// Whether to read it in the producer's memory, if that is on this host, instead of copying it.
    pub lease: bool,
}

impl GetOptions<'_> {
    /// From the configured producer, as a copy.
    pub const fn until(deadline: Deadline) -> Self {
        Self { deadline: Some(deadline), source: Source::Upstream, lease: false }
    }
}

/// Where a get does what blocks.
#[derive(Debug, Clone, Copy)]
pub(super) enum Blocking {
    Here,
    Elsewhere,
}

/// One get under way.
#[derive(Debug, Clone)]
pub(super) struct Get {
    pub(super) key: String,
    /// The producer's control address.
    pub(super) address: String,
    /// By which it is asked for the offer, where that may take as long as the get waits.
    pub(super) asker: Dialer,
    /// By which it is asked to write.
    pub(super) dialer: Dialer,
    pub(super) pull: PullId,
    pub(super) deadline: Deadline,
    pub(super) wait_for_offer: bool,
    pub(super) lease: bool,
    /// Which put it must be, if that is known.
    pub(super) put: Option<PutId>,
}

/// Which put of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PutId {
    incarnation: Incarnation,
    generation: u64,
}

impl Get {
    /// # Errors
    /// `Expired` when another put than the one that is meant is offered.
    fn check_put(&self, offered: &Offered) -> Result<()> {
        let found = PutId { incarnation: offered.incarnation, generation: offered.generation };
        match self.put {
            Some(wanted) if wanted != found => {
                let what = if wanted.incarnation == found.incarnation {
                    "was replaced by a later put"
                } else {
                    "is over: its producer has restarted, and offers another under the key"
                };
                let message = format!("the put of {:?} that the ticket is of {what}", self.key);
                Err(Error::new(ErrorKind::Expired, message).with_peer(self.address.as_str()))
            }
            _ => Ok(()),
        }
    }
}

impl Connector {
    /// Gets a payload: waits until it is offered and has arrived.
    ///
    /// # Errors
    /// `DeadlineExceeded`, saying what was waited for; `Expired` when it was served to others, timed out or was taken
    /// back; `PeerUnreachable` or `PeerGone`; `PoolFull`; `Corrupt`; `Closed`; whatever else the producer or the
    /// transfer failed of. After a failure the payload may still be offered, and a second get succeed.
    pub fn get(&self, edge: &Edge, key: &str, options: GetOptions<'_>) -> Result<Received> {
        let get = self.inner().begin_get(edge, key, options, true)?;
        self.inner().finish(block_on("a get", self.inner().get(get, Blocking::Here)))
    }

    /// Gets a payload if it is offered now. `None` when there is nothing under the key (yet).
    ///
    /// # Errors
    /// As [`Connector::get`].
    pub fn try_get(&self, edge: &Edge, key: &str, options: GetOptions<'_>) -> Result<Option<Received>> {
        let get = self.inner().begin_get(edge, key, options, false)?;
        match block_on("a get", self.inner().get(get, Blocking::Here)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            outcome => self.inner().finish(outcome).map(Some),
        }
    }

    /// As [`Connector::get`], to be awaited on any executor. Its waker is called on a thread of the connector or its
    /// engine, such as that of the control port, and must not block there: the other gets and offers would wait for it.
    ///
    /// # Errors
    /// As [`Connector::get`].
    pub async fn get_async(&self, edge: &Edge, key: &str, options: GetOptions<'_>) -> Result<Received> {
        let get = self.inner().begin_get(edge, key, options, true)?;
        self.inner().finish(self.inner().get(get, Blocking::Elsewhere).await)
    }
}

impl Inner {
    pub(super) fn finish(&self, outcome: Result<Received>) -> Result<Received> {
        self.counters.got(&outcome, Received::len);
        outcome
    }

    pub(super) fn begin_get(
        self: &Arc<Self>,
        edge: &Edge,
        key: &str,
        options: GetOptions<'_>,
        wait_for_offer: bool,
    ) -> Result<Get> {
        Ok(Get {
            address: self.may_get(options.source)?,
            key: edge.qualify(key)?,
            asker: self.waiting.clone(),
            dialer: self.dialer.clone(),
            pull: self.next_pull(),
            deadline: options.deadline.unwrap_or_else(|| Deadline::after(self.config.get_wait())),
            wait_for_offer,
            lease: options.lease,
            put: match options.source {
                Source::Ticket(ticket) => ticket
                    .own
                    .as_ref()
                    .map(|own| PutId { incarnation: own.incarnation, generation: own.generation }),
                Source::Upstream | Source::At(..) => None,
            },
        })
    }

    /// The producer's control address, if this side may get anything.
    pub(super) fn may_get(&self, source: Source<'_>) -> Result<String> {
        self.check_open()?;
        if !self.config.role.receives() {
            return Err(Error::new(
                ErrorKind::AccessDenied,
                "this connector has role sender; get needs receiver or both",
            )
            .with_advice("build the connector with another role"));
        }
        match source {
            Source::At(host, port) => Ok(control_address(host, port)),
            Source::Ticket(ticket) => Ok(control_address(&ticket.source_host, ticket.source_port)),
            Source::Upstream => self.config.sender_address().ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidConfig,
                    "no producer is configured; set sender_host and sender_zmq_port, or name a source",
                )
            }),
        }
    }

    /// Asks until it is known how the payload comes, then has it come; on threads kept for what blocks, if the
    /// caller must not. Where this fails or is dropped, the payload stays for another get.
    pub(super) async fn get(self: &Arc<Self>, get: Get, blocking: Blocking) -> Result<Received> {
        // A producer that was found on another host need not prepare a read.
        let known = self.same_host.lock().get(&get.address).copied();
        let mut want = if known == Some(false) { Want::Write } else { Want::Read };
        let mut get = Arc::new(get);
        loop {
            let (claim, size, offered) = self.query(&get, want).await?;
            let fetched = match self.fetch(claim, size, offered, blocking).await {
                Ok(fetched) => fetched,
                Err(error) => return Err(self.ended_by_producer(&get, error).await),
            };
            match fetched {
                Some(received) => return Ok(received),
                None => {
                    want = Want::Write;
                    get = Arc::new(Get { pull: self.next_pull(), ..Get::clone(&get) });
                }
            }
        }
    }

    /// Has a payload come that the producer keeps for this get. `None` when it has to be asked again, to write it.
    async fn fetch(
        self: &Arc<Self>,
        mut claim: Claim,
        size: u64,
        offered: Offered,
        blocking: Blocking,
    ) -> Result<Option<Received>> {
        let get = Arc::clone(&claim.get);
        // What cannot be read the producer writes, for the same claim.
        if offered.grant.is_none() {
            claim.want = Want::Write;
        }
        // Room, a connection and the bytes may take longer than the producer keeps a place for a silent consumer.
        let every = lease::renewal(Duration::from_millis(self.config.liveness_ms), offered.liveness_ms);
        claim.renew(every);
        get.check_put(&offered)?;
        offered.manifest.check(size)?;
        let segment = self.open_producer(&get, &offered, blocking).await?;
        let route = self
            .route_with(offered.transport.as_deref(), Precedence::Ours)
            .map_err(|error| error.with_peer(get.address.as_str()))?;
        let transport = self.engine.best_transport(&segment, route);
        let same_host = transport.as_ref().is_some_and(|(_, capabilities)| capabilities.same_host_only);
        let transport = transport.map_or_else(String::new, |(name, _)| name);
        self.remember(&get.address, same_host);
        if let (true, Want::Read, true, Some(grant)) = (get.lease, claim.want, same_host, &offered.grant) {
            let (inner, segment, grant) = (Arc::clone(self), segment.clone(), grant.clone());
            let lease = move || inner.lease(&segment, route, &grant).map(|memory| (memory, claim));
            let (memory, kept) =
                self.blocking(blocking, get.deadline, "the producer's memory", lease).await??;
            if let Some(memory) = memory {
                let lease = Lease::new(memory, kept);
                return Received::leased(lease, size, offered.manifest, transport).map(Some);
            }
            claim = kept;
        }
        let (buffer, claim) = match (claim.want, same_host, &offered.grant) {
            (Want::Read, true, Some(grant)) => {
                let slot = self.room(size, get.deadline, blocking).await?.into_slot();
                let request = TransferRequest {
                    opcode: Opcode::Read,
                    local: self.pool_range.advanced(slot.offset()),
                    remote: RemoteRange {
                        segment: segment.id(),
                        address: grant.address,
                        token: Some(grant.token),
                    },
                    len: size,
                    priority: Priority::Medium,
                    route,
                    group: 0,
                };
                let checksum = self.config.checksum.max(offered.checksum);
                let options = SubmitOptions { deadline: get.deadline, checksum };
                let (inner, held) = (Arc::clone(self), self.engine.hold(&segment, grant));
                // A get that is dropped meanwhile ends when the producer's memory is read no more.
                let read = move || {
                    let read = inner.read(slot, request, options).map(|buffer| (buffer, claim));
                    drop(held);
                    read
                };
                self.blocking(blocking, get.deadline, "the payload's bytes", read).await??
            }
            (Want::Read, ..) => {
                // Heard before the next query, which would find the place taken.
                let close = closing(&get.pull, Outcome::Failed).encode()?;
                self.teller.request(&get.address, close, self.connect_deadline(&get)).await?;
                claim.end();
                return Ok(None);
            }
            (Want::Write, ..) => return self.pull(claim, size, offered, transport, blocking).await.map(Some),
        };
        claim.done();
        Received::own(buffer, size, offered.manifest, transport).map(Some)
    }

    /// Does what blocks here, if the caller may, else on a thread kept for that.
    async fn blocking<T: Send + 'static>(
        &self,
        blocking: Blocking,
        deadline: Deadline,
        what: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        match blocking {
            Blocking::Here => Ok(work()),
            Blocking::Elsewhere => self.plane.run_blocking(deadline, what, work).await,
        }
    }

    /// The producer's segment, connected.
    async fn open_producer(
        self: &Arc<Self>,
        get: &Get,
        offered: &Offered,
        blocking: Blocking,
    ) -> Result<Segment> {
        if let Some(segment) = self.engine.opened(&offered.segment, offered.incarnation) {
            return Ok(segment);
        }
        let (name, incarnation) = (&offered.segment, offered.incarnation);
        match blocking {
            Blocking::Here => {
                let (started, by) = (Instant::now(), self.connect_deadline(get));
                let opened = self.engine.open_life(name, incarnation, by);
                opened.map_err(|error| if by == get.deadline { error } else { not_reached(error, started) })
            }
            Blocking::Elsewhere => self.open_elsewhere(name, incarnation, get.deadline).await,
        }
    }

    /// The producer's memory, to be read in place. `None` where the transport has no such thing, and it is copied.
    fn lease(&self, segment: &Segment, route: Route, grant: &GrantDesc) -> Result<Option<LeasedMemory>> {
        match self.engine.lease(segment, route, grant) {
            Ok(memory) => Ok(Some(memory)),
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What a peer is told of the transport, if there is anything to tell.
    pub(super) fn transport_preference(&self) -> Option<String> {
        Some(self.engine.transport_preference()).filter(|preference| preference != "auto")
    }

    /// The route that both ends allow, by `precedence` where both prefer one. An end that says nothing takes what there
    /// is.
    ///
    /// # Errors
    /// As [`TransferEngine::route_with`](posthorse_engine::TransferEngine::route_with).
    pub(super) fn route_with(&self, theirs: Option<&str>, precedence: Precedence) -> Result<Route> {
        theirs.map_or(Ok(Route::Auto), |theirs| self.engine.route_with(theirs, precedence))
    }

    pub(super) fn next_pull(&self) -> PullId {
        PullId {
            consumer: self.engine.name().into(),
            incarnation: self.engine.incarnation(),
            pull: self.pulls.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn remember(&self, address: &str, same_host: bool) {
        const MOST: usize = 4096;
        let mut known = self.same_host.lock();
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(address.to_owned(), same_host);
    }

    /// A connection may take its usual time even where the get has none left to wait for an offer.
    pub(super) fn connect_deadline(&self, get: &Get) -> Deadline {
        get.deadline.min(Deadline::after(Duration::from_millis(self.config.liveness_ms)))
    }

    /// Reads the producer's memory into a block of our own.
    fn read(
        &self,
        slot: ReceiveSlot,
        request: TransferRequest,
        options: SubmitOptions,
    ) -> Result<ManagedBuffer> {
        let mut batch = self.engine.batch();
        batch.submit(&[request], options)?;
        // The slot is not touched after this, whatever the outcome: the engine fences before it reports.
        batch.wait(Deadline::NEVER)?;
        slot.into_buffer()
    }

    /// Grants a slot to the producer and has it written.
    async fn pull(
        self: &Arc<Self>,
        claim: Claim,
        size: u64,
        offered: Offered,
        transport: String,
        blocking: Blocking,
    ) -> Result<Received> {
        let get = Arc::clone(&claim.get);
        let room = self.room(size, get.deadline, blocking).await?;
        let granted = Granted::new(self, room, &offered.segment)?;
        let request = self.pull_request(&get, size, &offered, &granted)?;
        let reply = get.dialer.request(&get.address, request, get.deadline).await;
        let reply = reply.map_err(|error| error.context(format_args!("getting {:?}", get.key)));
        let outcome = reply.and_then(|reply| match PullReply::decode(&reply)? {
            PullReply::Done(Some(bytes)) if bytes == size => Ok(()),
            PullReply::Done(Some(bytes)) => Err(Error::new(
                ErrorKind::Corrupt,
                format!("the producer wrote {bytes} bytes of a payload of {size}"),
            )),
            PullReply::Done(None) => {
                Err(Error::new(ErrorKind::Malformed, "the producer does not say how much it wrote"))
            }
            PullReply::Failed => Err(Error::new(ErrorKind::PeerRefused, "the producer's transfer failed")),
            PullReply::Refused(refusal) => Err(refusal.to_error(&get.address)),
        });
        // A producer that is still at it stops when it is told.
        let claim = outcome.is_ok().then_some(claim);
        // Whoever was to write cannot any more when this is done: only then is the slot ours again.
        let what = "the end of the producer's grant";
        let ended = match (blocking, &outcome) {
            // All bytes are there: neither other gets nor the deadline make them move once more.
            (Blocking::Elsewhere, Ok(())) => match granted.end_now() {
                Ok(buffer) => Ok(Ok(buffer)),
                Err(granted) => {
                    let fence = Deadline::after(Duration::from_millis(self.config.liveness_ms));
                    self.plane.run_at_once(fence, what, move || granted.end()).await
                }
            },
            _ => self.blocking(blocking, get.deadline, what, move || granted.end()).await,
        };
        outcome?;
        let buffer = ended??;
        if let Some(claim) = claim {
            claim.done();
        }
        Received::own(buffer, size, offered.manifest, transport)
    }

    /// The request that asks the producer to write into a slot.
    fn pull_request(&self, get: &Get, size: u64, offered: &Offered, granted: &Granted) -> Result<Vec<u8>> {
        let (slot, grant) = granted.parts()?;
        let left = get.deadline.remaining(Instant::now());
        let (host, port) = self.engine_address();
        let request = Request::Pull(Pull {
            remote_hostname: host,
            remote_port: port,
            request_id: get.key.clone(),
            dst_addrs: vec![slot.address()],
            lengths: vec![size],
            extra: Some(PullExtra {
                hello: self.hello(),
                consumer: self.engine.name().to_owned(),
                incarnation: get.pull.incarnation,
                pull: get.pull.pull,
                generation: Some(offered.generation),
                grant: grant.desc().clone(),
                deadline_ms: left.map(|left| left.as_millis() as u64),
                checksum: self.config.checksum,
                transport: self.transport_preference(),
            }),
        });
        request.encode()
    }
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the connector is closed")
}

/// `host:port`, with brackets around IPv6 addresses.
fn control_address(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::sync::{Mutex, mpsc};
    use std::task::{Context, Waker};

    use posthorse_core::Transport;
    use posthorse_engine::TransferEngine;
    use posthorse_segment::MemoryDirectory;
    use posthorse_testkit::{ControlHub, Fault, FaultTransport, MemoryHub, Plan};

    use pollster::block_on;

    use super::*;
    use crate::connector::tests::{Pair, edge, eventually, soon};
    use crate::control::BLOCKING_TURNS;

    /// A get whose payload was written, and that has not said so.
    fn written(pair: &Pair, key: &str) -> Arc<Get> {
        let inner = pair.receiver.inner();
        let get = Arc::new(inner.begin_get(&edge(), key, GetOptions::until(soon()), true).unwrap());
        let (claim, size, offered) = block_on(inner.query(&get, Want::Write)).unwrap();
        // It is the test that tells of its end.
        claim.end();
        let room = inner.alloc(size, soon()).unwrap();
        let granted = Granted::new(inner, room, &offered.segment).unwrap();
        let request = inner.pull_request(&get, size, &offered, &granted).unwrap();
        let reply = get.dialer.request_blocking(&get.address, request, soon()).unwrap();
        assert_eq!(PullReply::decode(&reply).unwrap(), PullReply::Done(Some(size)));
        granted.end().unwrap();
        get
    }

    #[test]
    fn a_payload_that_has_arrived_waits_for_no_get_that_blocks() {
        let pair = Pair::new(|config| config.transport = "require:tcp".parse().unwrap());
        // After this there is a path to the producer.
        pair.put("first", b"x");
        pair.get("first").unwrap();
        pair.put("k", b"y");
        let plane = &pair.receiver.inner().plane;
        let (go, may_go) = mpsc::channel::<()>();
        let may_go = Arc::new(Mutex::new(may_go));
        let mut begun = Vec::new();
        let mut gets: Vec<_> = (0..BLOCKING_TURNS)
            .map(|_| {
                let (may_go, (begins, has_begun)) = (Arc::clone(&may_go), mpsc::channel());
                begun.push(has_begun);
                Box::pin(plane.run_blocking(Deadline::NEVER, "the test", move || {
                    begins.send(()).unwrap();
                    let _ = may_go.lock().unwrap().recv();
                }))
            })
            .collect();
        for get in &mut gets {
            assert!(get.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        begun.iter().for_each(|has_begun| has_begun.recv().unwrap());
        let edge = edge();
        let got = block_on(pair.receiver.get_async(&edge, "k", GetOptions::until(soon())));
        drop(go);
        assert_eq!(got.unwrap().bytes().unwrap(), b"y");
        gets.into_iter().for_each(|get| block_on(get).unwrap());
    }

    #[test]
    fn a_producer_keeps_what_is_read_until_a_get_that_was_dropped_reads_no_more() {
        let (hub, control, directory) =
            (MemoryHub::default(), ControlHub::default(), Arc::new(MemoryDirectory::default()));
        let engine = |name: &str, transport: Arc<dyn Transport>| {
            let directory = Arc::clone(&directory) as _;
            let builder = TransferEngine::builder().directory(name, directory, control.channel(name));
            builder.transport(transport).bare().build().unwrap()
        };
        // Whatever the consumer reads ends when the test says so.
        let slices = (0..1000).map(|slice| (slice, Fault::Delay(1))).collect();
        let held = FaultTransport::new(hub.transport(), Plan { slices, ..Plan::none() });
        let of_sender = engine("sender", hub.transport());
        let of_receiver = engine("receiver", Arc::clone(&held) as _);
        let pair = Pair::with_engines(|_| {}, Some(of_sender), Some(of_receiver.clone()));
        pair.put("k", b"x");
        let edge = edge();
        let mut get = Box::pin(pair.receiver.get_async(&edge, "k", GetOptions::until(soon())));
        eventually("the begin of the read", || {
            assert!(get.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            of_receiver.in_flight() == 1
        });
        drop(get);
        // Whatever the producer was told by that, it has heard.
        assert!(pair.receiver.inner().farewells.wait(soon()));
        assert_eq!(pair.sender.health().offers.claims, 1, "it would let go of what is being read");
        held.step();
        eventually("the end of the claim", || pair.sender.health().offers.claims == 0);
        let again = std::thread::scope(|scope| {
            let again = scope.spawn(|| pair.get("k").map(|got| got.bytes().unwrap().to_vec()));
            eventually("the end of the second read", || {
                held.step();
                again.is_finished()
            });
            again.join().unwrap()
        });
        assert_eq!(again.unwrap(), b"x");
        pair.assert_idle();
        assert_eq!(held.violations(), Vec::<String>::new());
    }

    #[test]
    fn a_payload_that_was_written_for_a_get_that_gave_up_is_still_offered() {
        let pair = Pair::new(|_| {});
        pair.put("k", b"x");
        // Its deadline passed before it heard that.
        pair.receiver.inner().give_up(&written(&pair, "k"), Want::Write);
        assert_eq!(pair.get("k").unwrap().bytes().unwrap(), b"x");
        eventually("the end of the offer", || pair.sender.health().offers.offers == 0);
        pair.assert_idle();
    }

    #[test]
    fn a_payload_that_was_written_for_a_get_that_is_never_heard_of_is_offered_again() {
        let pair = Pair::new(|config| config.liveness_ms = 300);
        pair.put("k", b"x");
        written(&pair, "k");
        assert_eq!(pair.get("k").unwrap().bytes().unwrap(), b"x");
        eventually("the end of the offer", || pair.sender.health().offers.offers == 0);
        pair.assert_idle();
    }

    #[test]
    fn a_payload_that_was_written_is_kept_for_a_get_that_goes_on() {
        let pair = Pair::new(|config| config.liveness_ms = 3000);
        pair.put("k", b"x");
        let (get, inner) = (written(&pair, "k"), pair.receiver.inner());
        let renewal = lease::Renewal::new(inner, &get.address, &get.pull, Duration::from_millis(200));
        let until = Instant::now() + Duration::from_millis(4500);
        while Instant::now() < until {
            assert_eq!(pair.sender.health().offers.claims, 1, "its place was given away");
            std::thread::park_timeout(Duration::from_millis(20));
        }
        inner.close(&get.address, &get.pull, Outcome::Done);
        drop(renewal);
        eventually("the end of the offer", || pair.sender.health().offers.offers == 0);
        pair.assert_idle();
    }

    #[test]
    fn a_payload_that_was_written_is_given_up_when_its_producer_closes() {
        let pair = Pair::new(|config| config.liveness_ms = 60_000);
        pair.put("k", b"x");
        written(&pair, "k");
        pair.sender.close();
        pair.assert_idle();
        assert_eq!(pair.sender.health().offers.offers, 0);
    }
}
