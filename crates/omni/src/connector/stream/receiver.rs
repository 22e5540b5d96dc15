//! The receiving end of a stream.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use posthorse_core::{Deadline, Error, ErrorKind, Result};
use tokio::sync::watch;

use super::{End, too_many};
use crate::connector::get::{Blocking, Get, Source};
use crate::connector::lease::renewal;
use crate::connector::received::Received;
use crate::connector::worker::block_on;
use crate::connector::{Connector, Inner};
use crate::control::Dialer;
use crate::key::{self, Edge};
use crate::message::{Answer, Follower, Request, StreamAbort, StreamCredit, StreamSent, from_msgpack};
use crate::payload::PayloadKind;
use crate::stream::{ConsumerAction, Item, StreamConsumer};

/// How a stream is received.
#[derive(Debug, Clone, Copy)]
pub struct FollowOptions<'a> {
    /// Where it is sent.
    pub source: Source<'a>,
    /// Whether to read chunks in the producer's memory, if that is on this host, instead of copying them.
    pub lease: bool,
    /// How many chunks are received ahead of the reader, each in a block of the pool; at least one, and no more than
    /// `stream_window`.
    pub prefetch: u32,
}

impl Default for FollowOptions<'_> {
    /// From the configured producer, as copies, four ahead.
    fn default() -> Self {
        Self { source: Source::Upstream, lease: false, prefetch: 4 }
    }
}

/// The receiving end of an ordered stream of chunks: [`Connector::follow_stream`].
///
/// Dropped before the end, it aborts the stream. A stream has one follower: another gets `Busy`, and does not disturb it.
pub struct StreamReceiver {
    inner: Arc<Inner>,
    incoming: Arc<Incoming>,
    _place: Place,
}

/// What a stream's receiver and the tasks that fetch for it share.
#[derive(Debug)]
struct Incoming {
    edge: Edge,
    request: String,
    name: String,
    address: String,
    follower: Follower,
    /// Of its own: what waits for chunks takes no connection from anybody else.
    dialer: Dialer,
    lease: bool,
    prefetch: usize,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct State {
    machine: StreamConsumer<Received>,
    /// Numbers to be fetched, in order.
    fetches: VecDeque<u64>,
    /// Chunks that the reader has not taken, in order.
    ready: VecDeque<(u64, Received)>,
    /// How the stream ended for the reader, behind what is ready.
    end: Option<Result<()>>,
    /// The first number that the producer may not send.
    credit: u64,
    /// Whether the producer knows the stream.
    opened: bool,
    /// What the producer is to be told at the end.
    abort: Option<Error>,
}

/// What is to be fetched.
enum Next {
    Fetch(u64),
    /// Nothing yet.
    Wait,
    /// Nothing any more.
    Over,
}

impl Incoming {
    /// Changes the state, carries out what follows, and wakes whoever waits.
    fn change(&self, event: impl FnOnce(&mut StreamConsumer<Received>) -> Vec<ConsumerAction<Received>>) {
        let discarded = {
            let mut state = self.state.lock();
            let actions = event(&mut state.machine);
            state.carry_out(actions)
        };
        self.changed.send_replace(());
        // Not under the lock: giving a chunk back tells its producer.
        drop(discarded);
    }

    fn next(&self) -> Next {
        let mut state = self.state.lock();
        if state.machine.is_over() {
            return Next::Over;
        }
        if state.ready.len() >= self.prefetch {
            return Next::Wait;
        }
        state.fetches.pop_front().map_or(Next::Wait, Next::Fetch)
    }

    /// The credit to be given, or what the producer is to be told at the end.
    fn credit(&self) -> Result<u64, Option<Error>> {
        let state = self.state.lock();
        if state.machine.is_over() { Err(state.abort.clone()) } else { Ok(state.credit) }
    }

    fn is_readable(&self) -> bool {
        let state = self.state.lock();
        !state.ready.is_empty() || state.end.is_some()
    }

    /// The next chunk or the end, if either is there.
    fn take(&self) -> Option<Result<Option<Received>>> {
        let taken = {
            let mut state = self.state.lock();
            match state.ready.pop_front() {
                Some(taken) => taken,
                None => return state.end.clone().map(|end| end.map(|()| None)),
            }
        };
        let (number, chunk) = taken;
        self.change(|machine| machine.taken(number + 1));
        Some(Ok(Some(chunk)))
    }

    /// Resolves when `done`, which looks at the state.
    async fn until(&self, done: impl Fn(&Self) -> bool) {
        let mut changed = self.changed.subscribe();
        while !done(self) {
            // Its sender is in `self`.
            let _ = changed.changed().await;
        }
    }

    fn is_over(&self) -> bool {
        self.state.lock().machine.is_over()
    }

    fn waited_for(&self) -> String {
        let Self { name, address, .. } = self;
        let unopened = if self.state.lock().opened { "" } else { ", which has not opened it" };
        format!("the next chunk of stream {name:?} of {address}{unopened}")
    }

    /// What is said to the producer until the end.
    fn request(&self, generation: Option<u64>, limit: u64) -> Request {
        let (stream, follower) = (self.name.clone(), Some(self.follower.clone()));
        Request::StreamCredit(StreamCredit { stream, generation, follower, limit })
    }
}

impl State {
    /// What is not wanted is returned, to be given back without the lock.
    fn carry_out(&mut self, actions: Vec<ConsumerAction<Received>>) -> Vec<Received> {
        let mut discarded = Vec::new();
        for action in actions {
            match action {
                ConsumerAction::Fetch(number) => self.fetches.push_back(number),
                ConsumerAction::Deliver(number, chunk) => self.ready.push_back((number, chunk)),
                ConsumerAction::Ended(_) => self.end = Some(Ok(())),
                ConsumerAction::Failed(error) => self.end = Some(Err(error)),
                ConsumerAction::Credit(limit) => self.credit = limit,
                ConsumerAction::Abort(reason) => self.abort = Some(reason),
                // The one under way ends with the stream.
                ConsumerAction::Cancel(..) => self.fetches.clear(),
                ConsumerAction::Discard(chunk) => discarded.push(chunk),
            }
        }
        discarded
    }
}

/// A place among the streams that are received.
struct Place(Arc<Inner>);

impl Place {
    fn take(inner: &Arc<Inner>) -> Result<Self> {
        let most = inner.config.max_streams as usize;
        let place = Self(Arc::clone(inner));
        if inner.followed.fetch_add(1, Ordering::AcqRel) >= most {
            return Err(too_many("received", most));
        }
        Ok(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.followed.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Connector {
    /// Receives a stream of chunks: from the first one, whether it is open yet or not.
    ///
    /// # Errors
    /// `AccessDenied` for a connector that only sends; `InvalidConfig` when no producer is known; `LimitReached` at
    /// `max_streams`; `InvalidArgument` for a request that cannot be part of a key; `Closed`.
    pub fn follow_stream(
        &self,
        edge: &Edge,
        request: &str,
        options: FollowOptions<'_>,
    ) -> Result<StreamReceiver> {
        let inner = self.inner();
        let address = inner.may_get(options.source)?;
        let name = edge.qualify(request)?;
        edge.qualify(&key::chunk(request, &edge.from, u64::MAX))?;
        let place = Place::take(inner)?;
        let window = inner.config.stream_window;
        let (machine, first) = StreamConsumer::new(window);
        let mut state = State {
            machine,
            fetches: VecDeque::new(),
            ready: VecDeque::new(),
            end: None,
            credit: window.into(),
            opened: false,
            abort: None,
        };
        state.carry_out(first);
        let own = inner.next_pull();
        let follower =
            Follower { consumer: own.consumer.to_string(), incarnation: own.incarnation, number: own.pull };
        let incoming = Arc::new(Incoming {
            follower,
            edge: edge.clone(),
            request: request.to_owned(),
            name,
            address,
            dialer: inner.plane.dialer(),
            lease: options.lease,
            prefetch: options.prefetch.clamp(1, window) as usize,
            state: Mutex::new(state),
            changed: watch::Sender::new(()),
        });
        inner.plane.spawn(fetch(Arc::clone(inner), Arc::clone(&incoming)));
        inner.plane.spawn(keep(inner.liveness(), Arc::clone(&incoming)));
        Ok(StreamReceiver { inner: Arc::clone(inner), incoming, _place: place })
    }
}

impl StreamReceiver {
    /// The next chunk, in order; `None` behind the last, when the producer has ended the stream.
    ///
    /// # Errors
    /// `DeadlineExceeded`, after which it can be asked again. Otherwise the stream is over, and the same reason comes
    /// again: the producer's own, `Aborted` when it dropped the stream, `Busy` when somebody else follows it, `PeerGone`
    /// or `PeerUnreachable`, whatever a chunk could not be got for, `Closed`. `Forked` in a child process. `Busy` within a
    /// waker that a connector or an engine calls, where it would have to wait: the stream goes on.
    pub fn next(&mut self, deadline: Deadline) -> Result<Option<Received>> {
        self.inner.plane.check_here()?;
        match self.incoming.take() {
            Some(next) => next,
            None => block_on("a chunk", self.next_async(deadline)),
        }
    }

    /// As [`StreamReceiver::next`], to be awaited on any executor.
    ///
    /// # Errors
    /// As [`StreamReceiver::next`].
    pub async fn next_async(&mut self, deadline: Deadline) -> Result<Option<Received>> {
        loop {
            self.inner.plane.check_here()?;
            if let Some(next) = self.incoming.take() {
                return next;
            }
            let incoming = Arc::clone(&self.incoming);
            let readable = async move { incoming.until(Incoming::is_readable).await };
            let what = self.incoming.waited_for();
            self.inner.plane.within(deadline, what, readable).await?;
        }
    }

    /// Ends the stream from this side: its producer gets the reason.
    pub fn abort(self, reason: &str) {
        self.stop(Error::new(ErrorKind::Aborted, reason.to_owned()));
    }

    fn stop(&self, reason: Error) {
        if self.inner.is_forked() {
            return;
        }
        self.incoming.change(|machine| machine.abort(reason));
        let unread = std::mem::take(&mut self.incoming.state.lock().ready);
        drop(unread);
    }
}

impl Drop for StreamReceiver {
    fn drop(&mut self) {
        self.stop(Error::new(ErrorKind::Aborted, "the consumer dropped the stream before its end"));
    }
}

impl fmt::Debug for StreamReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamReceiver({:?} of {})", self.incoming.name, self.incoming.address)
    }
}

/// Gets one number after the other, ahead of the reader. One at a time, since chunks that took room out of order could
/// keep it from the one that the reader waits for.
async fn fetch(inner: Arc<Inner>, incoming: Arc<Incoming>) {
    let mut changed = incoming.changed.subscribe();
    loop {
        let number = match incoming.next() {
            Next::Fetch(number) => number,
            Next::Over => return,
            Next::Wait => {
                let _ = changed.changed().await;
                continue;
            }
        };
        // What was got when the stream is over is dropped, which gives it back; what waits at the producer is
        // forgotten there when its connection ends.
        tokio::select! {
            item = get(&inner, &incoming, number) => incoming.change(|machine| machine.arrived(number, item)),
            () = incoming.until(Incoming::is_over) => return,
        }
    }
}

async fn get(inner: &Arc<Inner>, incoming: &Incoming, number: u64) -> Item<Received> {
    let key = match incoming.edge.qualify(&key::chunk(&incoming.request, &incoming.edge.from, number)) {
        Ok(key) => key,
        Err(error) => return Item::Failed(error),
    };
    let get = Get {
        key,
        address: incoming.address.clone(),
        asker: incoming.dialer.clone(),
        dialer: incoming.dialer.clone(),
        pull: inner.next_pull(),
        // The reader's waits have theirs; this one ends with the stream.
        deadline: Deadline::NEVER,
        wait_for_offer: true,
        lease: incoming.lease,
        put: None,
    };
    match inner.finish(inner.get(get, Blocking::Elsewhere).await) {
        Ok(received) if received.kind() == PayloadKind::StreamEnd => match read_end(&received) {
            Ok(End { error: None }) => Item::End,
            Ok(End { error: Some(refusal) }) => Item::Error(refusal.to_error(&incoming.address)),
            Err(error) => Item::Failed(error.with_peer(incoming.address.as_str())),
        },
        Ok(received) => Item::Chunk(received),
        Err(error) => Item::Failed(
            refusal(inner, incoming, &error)
                .await
                .unwrap_or(error)
                .context(format_args!("chunk {number} of stream {:?}", incoming.name)),
        ),
    }
}

/// Why a chunk was served to somebody else: who follows the stream.
async fn refusal(inner: &Inner, incoming: &Incoming, error: &Error) -> Option<Error> {
    let limit = incoming.credit().ok().filter(|_| error.kind() == ErrorKind::Expired)?;
    let told = tell(incoming, incoming.request(None, limit), inner.liveness()).await;
    told.err().filter(|error| error.kind() == ErrorKind::Busy)
}

fn read_end(received: &Received) -> Result<End> {
    const DEPTH: usize = 8;
    from_msgpack(&received.settled_bytes()?, DEPTH)
        .map_err(|why| Error::new(ErrorKind::Malformed, format!("the end of a stream: {why}")))
}

/// Tells the producer how far it may go, again and again, and at the end what it has to know.
async fn keep(liveness: Duration, incoming: Arc<Incoming>) {
    // It may not be open yet; and where its end was received a moment ago, it is not there any more.
    let (mut seen, mut missed) = (false, 0);
    // What the producer has said of the stream: another of its name is none of ours.
    let mut sent: Option<StreamSent> = None;
    loop {
        let generation = sent.map(|sent| sent.generation);
        let limit = match incoming.credit() {
            Ok(limit) => limit,
            Err(None) => return,
            Err(Some(reason)) => {
                let reason = reason.message().to_owned();
                let (stream, follower) = (incoming.name.clone(), Some(incoming.follower.clone()));
                let abort = StreamAbort { stream, generation, follower, reason };
                // A producer that does not hear it finds out by the silence.
                let _ = tell(&incoming, Request::StreamAbort(abort), liveness).await;
                return;
            }
        };
        let gone = match tell(&incoming, incoming.request(generation, limit), liveness).await {
            Ok(said) => {
                (seen, missed) = (true, 0);
                incoming.state.lock().opened = true;
                sent = sent.or(said);
                None
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                missed += u32::from(seen);
                let message = "the producer has given the stream up";
                (missed > 1).then(|| Error::new(ErrorKind::Aborted, message).with_peer(&*incoming.address))
            }
            Err(error) => Some(error),
        };
        if let Some(reason) = gone {
            incoming.change(|machine| machine.producer_gone(reason));
        }
        let news = incoming.until(|incoming| !matches!(incoming.credit(), Ok(same) if same == limit));
        let every = renewal(liveness, sent.map(|sent| sent.liveness_ms));
        let _ = tokio::time::timeout(every, news).await;
    }
}

async fn tell(incoming: &Incoming, request: Request, liveness: Duration) -> Result<Option<StreamSent>> {
    // A producer that is gone is noticed sooner; this is for one that is there and does not answer.
    let deadline = Deadline::after(liveness * 2);
    let reply = incoming.dialer.request(&incoming.address, request.encode()?, deadline).await?;
    match Answer::decode(&reply)? {
        Answer::Stream(sent) => Ok(Some(sent)),
        // The answer to an abort, or that of an older producer.
        Answer::Ok => Ok(None),
        Answer::Refused(refusal) => Err(refusal.to_error(&incoming.address)),
        Answer::Health(_) => Err(Error::new(ErrorKind::Malformed, "the answer to another request")
            .with_peer(incoming.address.as_str())),
    }
}
