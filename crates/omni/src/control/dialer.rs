//! The dialling side: requests to any address, over connections that are kept for a while.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{io, mem};

use posthorse_core::{Deadline, Error, ErrorKind, Result};
use posthorse_engine::descriptors;
use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::link::{Link, Pulse};
use super::zmtp::SocketType;
use super::{ControlLimits, ControlPlane, Stay, Task, closed, until};
use crate::message::Answer;

/// Addresses with kept connections beyond which those without any in use are forgotten.
const MAX_ADDRESSES: usize = 1024;
/// The most connections to one address that are kept: each has a place at the peer, which others may want.
const MOST_IDLE: usize = 16;
/// How often kept connections are looked at: those of peers that are gone are closed, and those that were not used for long.
const LOOK: Duration = Duration::from_secs(1);

/// Sends requests and waits for their replies. Clones share the kept connections.
///
/// A connection carries one exchange at a time, as REQ sockets do, since the foreign protocol has nothing by which
/// replies could be told apart; exchanges with one address that overlap use a connection each.
#[derive(Clone)]
pub struct Dialer {
    shared: Arc<Shared>,
}

struct Shared {
    plane: ControlPlane,
    /// The most connections to one address.
    most: usize,
    /// The most in use.
    most_in_all: usize,
    /// Leave to have a connection in use, whatever the address.
    in_use: Arc<Semaphore>,
    /// The most that are kept, whatever the address: each takes a descriptor.
    most_idle: usize,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    by_address: HashMap<Arc<str>, Address>,
    /// Whether a task looks at those that are kept.
    looking: bool,
}

struct Address {
    permits: Arc<Semaphore>,
    idle: Vec<(Link, Instant)>,
}

/// An exchange under way: a future of the reply's bytes. Dropping it gives the exchange and its connection up.
#[derive(Debug)]
#[must_use = "dropping an exchange gives it up"]
pub struct Exchange {
    task: Result<Task<Vec<u8>>, Option<Error>>,
}

impl Future for Exchange {
    type Output = Result<Vec<u8>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.task {
            Ok(task) => Pin::new(task).poll(context),
            Err(error) => Poll::Ready(Err(error.take().unwrap_or_else(closed))),
        }
    }
}

impl Dialer {
    /// Of so many connections in use with one address, and with all.
    pub(super) fn new(plane: ControlPlane, most: usize, most_in_all: usize) -> Self {
        let in_use = Arc::new(Semaphore::new(most_in_all.min(Semaphore::MAX_PERMITS)));
        let most_idle = descriptors::connections(usize::MAX, 1).div_ceil(4);
        let shared = Shared { plane, most, most_in_all, in_use, most_idle, known: Mutex::default() };
        Self { shared: Arc::new(shared) }
    }

    /// Sends `request` to `address` (`host:port`) and resolves to the reply's bytes, on whatever executor. It
    /// begins at once, whether it is polled or not. It is sent once more over a new connection when a kept one ends
    /// without a word: each request is such as may be repeated.
    ///
    /// # Errors
    /// Of the exchange, each with the address as its peer: `PeerUnreachable` when no connection can be made, at
    /// once where the system says so; `PeerGone` when the connection ends, or the peer is silent past the
    /// liveness time; `DeadlineExceeded`; `Malformed`, `TooLarge` or `PeerRefused` when what answers is not such
    /// a socket; `Closed`; `Forked`. After any of them the connection is not used again.
    pub fn request(&self, address: &str, request: Vec<u8>, deadline: Deadline) -> Exchange {
        self.request_begun(address, request, deadline, Deadline::NEVER)
    }

    /// As [`Dialer::request`], if it may have a connection by `begun`: as many may be in use as this dialer may have.
    ///
    /// # Errors
    /// As [`Dialer::request`]; `LimitReached` when it has not begun by then, and was not sent.
    pub(crate) fn request_begun(
        &self,
        address: &str,
        request: Vec<u8>,
        deadline: Deadline,
        begun: Deadline,
    ) -> Exchange {
        let task = self.spawn(address, request, deadline, begun, |reply| reply);
        Exchange { task: task.map(|task| Task::new(&self.shared.plane.inner.fork, task)).map_err(Some) }
    }

    /// As [`Dialer::request`], and waits.
    ///
    /// # Errors
    /// As [`Dialer::request`]; `Busy` on the control plane's own thread, which must not wait for itself.
    pub fn request_blocking(&self, address: &str, request: Vec<u8>, deadline: Deadline) -> Result<Vec<u8>> {
        self.shared.plane.check_here()?;
        if self.shared.plane.is_own_thread() {
            return Err(Error::new(ErrorKind::Busy, "a blocking request on the thread omni-control"));
        }
        let (tx, rx) = mpsc::sync_channel(1);
        // The task ends by the deadline; without one, when the peer is gone or the plane is closed.
        self.spawn(address, request, deadline, Deadline::NEVER, move |reply| {
            let _ = tx.send(reply);
            Ok(Vec::new())
        })?;
        rx.recv().unwrap_or_else(|_| Err(closed()))
    }

    /// Sends a request whose answer changes nothing; `then` may look at it.
    pub(crate) fn tell(
        &self,
        address: &str,
        request: Vec<u8>,
        deadline: Deadline,
        then: impl FnOnce(Result<Vec<u8>>) + Send + 'static,
    ) {
        let told = self.spawn(address, request, deadline, Deadline::NEVER, |reply| {
            then(reply);
            Ok(Vec::new())
        });
        if let Err(error) = told {
            tracing::debug!(%error, "a request was not sent");
        }
    }

    fn spawn(
        &self,
        address: &str,
        request: Vec<u8>,
        deadline: Deadline,
        begun: Deadline,
        then: impl FnOnce(Result<Vec<u8>>) -> Result<Vec<u8>> + Send + 'static,
    ) -> Result<JoinHandle<Result<Vec<u8>>>> {
        let plane = &self.shared.plane;
        let stay = plane.enter()?;
        let address: Arc<str> = address.into();
        let shared = Arc::clone(&self.shared);
        Ok(plane.inner.handle.spawn(async move {
            let exchanged = exchange(&shared, &address, &request, deadline, begun, stay).await;
            then(exchanged.map_err(|error| error.with_peer(&*address)))
        }))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.plane.is_forked() {
            // To close a connection here is to take it out of the event queue that is shared with the parent.
            mem::forget(mem::take(self.known.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.shared.plane.is_forked() {
            return f.write_str("Dialer(of the parent process)");
        }
        let known = self.shared.known();
        write!(f, "Dialer({} addresses, {} idle connections)", known.by_address.len(), known.idle())
    }
}

async fn exchange(
    shared: &Arc<Shared>,
    address: &Arc<str>,
    request: &[u8],
    deadline: Deadline,
    begun: Deadline,
    mut stay: Stay,
) -> Result<Vec<u8>> {
    let limits = &shared.plane.inner.limits;
    let connected = AtomicBool::new(false);
    let work = async {
        let _permits = shared.permits_by(address, deadline, begun).await?;
        let mut lost = None;
        if let Some(mut link) = shared.fresh(address) {
            connected.store(true, Ordering::Relaxed);
            let (read, begun) = (link.bytes_read(), Instant::now());
            match ask(&mut link, request, limits).await {
                // The listener may have ended it as one that is idle, before it saw the request: then it shows at once.
                Err(error)
                    if error.kind() == ErrorKind::PeerGone
                        && link.bytes_read() == read
                        && begun.elapsed() < limits.liveness / 3 =>
                {
                    lost = Some(error);
                }
                reply => {
                    let reply = reply?;
                    shared.keep(address, link);
                    return Ok(reply);
                }
            }
        }
        let mut link = shared.connect(address).await.map_err(|error| lost.take().unwrap_or(error))?;
        connected.store(true, Ordering::Relaxed);
        let reply = ask(&mut link, request, limits).await?;
        shared.keep(address, link);
        match lost {
            Some(lost) if is_under_way(&reply) => Err(lost),
            _ => Ok(reply),
        }
    };
    let bounded = async {
        match deadline.instant() {
            None => work.await,
            Some(at) => timeout_at(at.into(), work).await.unwrap_or_else(|_| {
                Err(if connected.load(Ordering::Relaxed) {
                    Deadline::exceeded("the reply to a control request")
                } else {
                    Deadline::exceeded(&format!("a connection to {address}, and none was made"))
                })
            }),
        }
    };
    tokio::select! {
        reply = bounded => reply,
        () = until(&mut stay.stopped) => Err(closed()),
    }
}

/// Whether a request that was sent once more is refused because the first one arrived and is being carried out: its answer
/// is lost with its connection.
fn is_under_way(reply: &[u8]) -> bool {
    let codes = [ErrorKind::Busy, ErrorKind::InvalidArgument].map(ErrorKind::code);
    matches!(Answer::decode(reply), Ok(Answer::Refused(refusal)) if codes.contains(&refusal.code))
}

/// Sends a request and waits for the reply, or until the peer is found to be gone.
async fn ask(link: &mut Link, request: &[u8], limits: &ControlLimits) -> Result<Vec<u8>> {
    link.send(request, limits.send_timeout).await?;
    link.expect();
    let mut due = Instant::now() + limits.liveness / 3;
    loop {
        tokio::select! {
            reply = link.message() => return Ok(reply?.to_vec()),
            () = sleep_until(due) => match link.check(limits.liveness)? {
                Pulse::Quiet(until) => due = until,
                Pulse::Gone => return Err(silent(limits.liveness)),
            },
        }
    }
}

pub(super) fn silent(liveness: Duration) -> Error {
    Error::new(
        ErrorKind::PeerGone,
        format!("the peer was silent for {} ms, and did not answer a ping", liveness.as_millis()),
    )
}

impl Known {
    /// How many connections are kept.
    fn idle(&self) -> usize {
        self.by_address.values().map(|address| address.idle.len()).sum()
    }

    /// Takes out the one that was used least lately of all, if there are more than `most`.
    fn surplus(&mut self, most: usize) -> Option<(Link, Instant)> {
        if self.idle() <= most {
            return None;
        }
        // The oldest of each stand first.
        let kept = self.by_address.values_mut().filter(|address| !address.idle.is_empty());
        kept.min_by_key(|address| address.idle[0].1).map(|address| address.idle.remove(0))
    }
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, Known> {
        // What a panicking holder left is a cache: still good.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Shared::permits`], by the deadline of the exchange and that for its beginning.
    async fn permits_by(
        &self,
        address: &Arc<str>,
        deadline: Deadline,
        begun: Deadline,
    ) -> Result<[OwnedSemaphorePermit; 2]> {
        let by = deadline.min(begun);
        let Some(at) = by.instant() else { return self.permits(address).await };
        timeout_at(at.into(), self.permits(address)).await.unwrap_or_else(|_| {
            let Self { most, most_in_all, .. } = self;
            let all =
                if *most_in_all == usize::MAX { String::new() } else { format!(", or {most_in_all} to all") };
            let limits = format!("{most} requests to it{all} are under way");
            Err(if by == deadline {
                Deadline::exceeded(&format!("a connection to {address}, and none was made: {limits}"))
            } else {
                Error::new(ErrorKind::LimitReached, format!("{limits}, which is the most"))
            })
        })
    }

    /// Leave to use a connection to `address`. What waits for its address takes nothing from the others.
    async fn permits(&self, address: &Arc<str>) -> Result<[OwnedSemaphorePermit; 2]> {
        let permits = {
            let (mut known, most) = (self.known(), self.most);
            if known.by_address.len() >= MAX_ADDRESSES && !known.by_address.contains_key(address) {
                known.by_address.retain(|_, address| address.permits.available_permits() < most);
            }
            let address = known
                .by_address
                .entry(Arc::clone(address))
                .or_insert_with(|| Address { permits: Arc::new(Semaphore::new(most)), idle: Vec::new() });
            Arc::clone(&address.permits)
        };
        let of_address = permits.acquire_owned().await.map_err(|_| closed())?;
        let of_all = Arc::clone(&self.in_use).acquire_owned().await.map_err(|_| closed())?;
        Ok([of_address, of_all])
    }

    /// A kept connection to `address` that is still good.
    fn fresh(&self, address: &Arc<str>) -> Option<Link> {
        loop {
            let kept = self.known().by_address.get_mut(address)?.idle.pop()?;
            if self.is_good(&kept) {
                return Some(kept.0);
            }
        }
    }

    /// Whether a kept connection can be used: its peer is there, and its time is not over.
    fn is_good(&self, (link, since): &(Link, Instant)) -> bool {
        since.elapsed() < self.plane.inner.limits.cache_timeout && link.is_fresh()
    }

    fn keep(self: &Arc<Self>, address: &Arc<str>, link: Link) {
        // Closed when the lock is free.
        let mut _surplus = [const { None }; 2];
        let looks = {
            let mut known = self.known();
            let Some(there) = known.by_address.get_mut(address) else { return };
            if there.idle.len() >= MOST_IDLE {
                _surplus[0] = Some(there.idle.remove(0));
            }
            there.idle.push((link, Instant::now()));
            _surplus[1] = known.surplus(self.most_idle);
            mem::replace(&mut known.looking, true)
        };
        if !looks {
            self.plane.spawn(look(Arc::downgrade(self)));
        }
    }

    /// Closes kept connections whose peer is gone or whose time is over. Says whether any are left.
    fn look(&self) -> bool {
        let mut _closed = Vec::new();
        let mut known = self.known();
        for address in known.by_address.values_mut() {
            _closed.extend(address.idle.extract_if(.., |kept| !self.is_good(kept)));
        }
        known.looking = known.idle() > 0;
        known.looking
    }

    /// Closes all kept connections.
    fn forget(&self) {
        let mut _closed = Vec::new();
        let mut known = self.known();
        known.by_address.values_mut().for_each(|address| _closed.append(&mut address.idle));
    }

    /// Connects; if the system has no descriptor left, in place of the connections that are kept.
    async fn reach(&self, to: SocketAddr) -> io::Result<TcpStream> {
        match TcpStream::connect(to).await {
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::MFILE | Errno::NFILE)) => {
                self.forget();
                TcpStream::connect(to).await
            }
            reached => reached,
        }
    }

    async fn connect(&self, address: &str) -> Result<Link> {
        let limits = &self.plane.inner.limits;
        let end = Instant::now() + limits.connect_timeout;
        let unreachable = |why: &dyn fmt::Display| {
            Error::new(ErrorKind::PeerUnreachable, format!("connecting to {address}: {why}"))
        };
        let in_time = format!("nothing answered within {} ms", limits.connect_timeout.as_millis());
        let connecting = async {
            let found = self.plane.lookup(address).await.map_err(|e| unreachable(&e))?;
            let mut last = unreachable(&"the name has no address");
            for candidate in found {
                match self.reach(candidate).await {
                    Ok(stream) => return Ok(stream),
                    Err(error) => last = unreachable(&error),
                }
            }
            Err(last)
        };
        let stream = timeout_at(end, connecting).await.unwrap_or_else(|_| Err(unreachable(&in_time)))?;
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        Link::open(stream, SocketType::Req, limits.max_message_bytes, left, None).await.map_err(|error| {
            match error.kind() {
                // It took the connection, and is no such socket or is stopped.
                ErrorKind::DeadlineExceeded => unreachable(&error.message()),
                _ => error.context(format_args!("connecting to {address}")),
            }
        })
    }
}

/// Looks at a dialer's kept connections for as long as there are any.
async fn look(shared: Weak<Shared>) {
    loop {
        sleep(LOOK).await;
        match shared.upgrade() {
            Some(shared) if shared.look() => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use pollster::block_on;

    use super::super::{Listener, Peer, Responder, Service};
    use super::*;
    use crate::message::{Reply, Request};

    /// Keeps all requests until it is told to answer them.
    #[derive(Default)]
    struct Later(Mutex<Vec<Responder>>);

    impl Service for Later {
        fn handle(&self, _: &Peer, _: Request, responder: Responder) {
            self.0.lock().unwrap().push(responder);
        }
    }

    impl Later {
        fn listen(plane: &ControlPlane) -> (Arc<Self>, Listener, String) {
            let service = Arc::new(Self::default());
            let listener = plane.listen("127.0.0.1:0", Arc::clone(&service) as Arc<dyn Service>).unwrap();
            let address = listener.local_address().to_string();
            (service, listener, address)
        }

        fn answer(&self, count: usize) {
            let soon = std::time::Instant::now() + SOON;
            while self.0.lock().unwrap().len() < count {
                assert!(std::time::Instant::now() < soon, "{count} requests did not come");
                std::thread::yield_now();
            }
            let answered: Vec<_> = self.0.lock().unwrap().drain(..count).collect();
            answered.into_iter().for_each(|responder| responder.reply(&Reply::Ok));
        }
    }

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn exchanges_with_all_addresses_together_are_bounded() {
        let plane = ControlPlane::start(ControlLimits::default()).unwrap();
        let (there, _there, one) = Later::listen(&plane);
        let (elsewhere, _elsewhere, other) = Later::listen(&plane);
        let dialer = Dialer::new(plane.clone(), 2, 3);
        let ping = |address: &str, deadline| {
            dialer.request(address, Request::Ping.encode().unwrap(), Deadline::after(deadline))
        };
        let three = [ping(&one, SOON), ping(&one, SOON), ping(&other, SOON)];
        while dialer.shared.in_use.available_permits() > 0 {
            std::thread::yield_now();
        }
        let late = block_on(ping(&other, Duration::from_millis(50))).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::DeadlineExceeded, "{late}");
        assert!(late.message().contains("2 requests to it, or 3 to all"), "{late}");
        let (ask, now) = (Request::Ping.encode().unwrap(), std::time::Instant::now());
        let none = block_on(dialer.request_begun(&other, ask, Deadline::after(SOON), Deadline::at(now)))
            .unwrap_err();
        assert_eq!(none.kind(), ErrorKind::LimitReached, "{none}");
        let fourth = ping(&other, SOON);
        there.answer(2);
        elsewhere.answer(1);
        for exchange in three {
            block_on(exchange).unwrap();
        }
        elsewhere.answer(1);
        block_on(fourth).unwrap();
        plane.close(SOON.into()).unwrap();
    }

    #[test]
    fn few_connections_to_one_address_are_kept() {
        let plane = ControlPlane::start(ControlLimits::default()).unwrap();
        let (service, _listener, address) = Later::listen(&plane);
        let dialer = plane.dialer();
        let ping = |_| dialer.request(&address, Request::Ping.encode().unwrap(), SOON.into());
        let many: Vec<_> = (0..2 * MOST_IDLE).map(ping).collect();
        service.answer(2 * MOST_IDLE);
        for exchange in many {
            block_on(exchange).unwrap();
        }
        assert_eq!(format!("{dialer:?}"), format!("Dialer(1 addresses, {MOST_IDLE} idle connections)"));
        plane.close(SOON.into()).unwrap();
    }

    #[test]
    fn connections_to_all_addresses_together_that_are_kept_are_few() {
        let plane = ControlPlane::start(ControlLimits::default()).unwrap();
        let mut dialer = plane.dialer();
        Arc::get_mut(&mut dialer.shared).unwrap().most_idle = 3;
        let idle = |dialer: &Dialer| dialer.shared.known().idle();
        let there: Vec<_> = (0..5).map(|_| Later::listen(&plane)).collect();
        for (service, _, address) in &there {
            let exchange = dialer.request(address, Request::Ping.encode().unwrap(), SOON.into());
            service.answer(1);
            block_on(exchange).unwrap();
        }
        assert_eq!(idle(&dialer), 3);
        // The latest are kept. Nobody is asked any more, and those of peers that are gone are closed all the same.
        drop(there);
        let soon = std::time::Instant::now() + SOON;
        while idle(&dialer) > 0 {
            assert!(std::time::Instant::now() < soon, "they are kept");
            std::thread::yield_now();
        }
        plane.close(SOON.into()).unwrap();
    }
}
