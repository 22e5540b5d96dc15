//! One connection to a Posthorse peer, on which any number of requests are under way.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use posthorse_core::{Error, ErrorKind, Result};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::client::connect;
use super::config::HandshakeConfig;
use super::message::{Control, Greeting};
use super::serve_control::write_all;
use super::stream::{FrameReader, write};
use crate::address::SegmentAddress;
use crate::frame::{FrameType, encode};

/// Requests that may wait until the socket takes them.
const REQUESTS: usize = 64;

/// Why a request has no answer.
#[derive(Debug, Clone)]
pub(crate) enum Ended {
    /// The connection broke; over another one there may be an answer.
    Broken(Error),
    /// Another connection would not help.
    Final(Error),
}

type Answer = oneshot::Sender<Result<Vec<u8>, Ended>>;

/// The requests that are owed an answer, or how the connection ended.
type Waiting = Mutex<Result<HashMap<u64, Answer>, Ended>>;

/// Closed when it is dropped.
#[derive(Debug)]
pub(crate) struct Link {
    peer: Box<str>,
    limit: usize,
    next: AtomicU64,
    outgoing: mpsc::Sender<Vec<u8>>,
    waiting: Arc<Waiting>,
    task: AbortHandle,
}

impl Link {
    pub(crate) async fn connect(
        config: &HandshakeConfig,
        ours: &Greeting,
        peer: &str,
        address: &SegmentAddress,
    ) -> Result<Self> {
        let (read, mut socket) = connect(config, address).await?.into_split();
        let (limit, patience) = (config.frame_bytes, config.io_timeout());
        let greeting = encode(FrameType::Control, &Control::Greeting(ours.clone()).encode()?, limit)?;
        write(&mut socket, &greeting, patience).await?;
        let mut reader = FrameReader::new(read, limit);
        let answer = timeout(patience, reader.next()).await.map_err(|_| {
            Error::new(
                ErrorKind::PeerGone,
                format!("the peer took a connection, and was silent for {patience:?}"),
            )
        })?;
        let Some(answer) = answer? else {
            return Err(Error::new(
                ErrorKind::PeerGone,
                "the peer closed the connection instead of answering a greeting: it is ending, had no room, or does not \
                 speak Posthorse's control protocol",
            ));
        };
        if answer.frame_type != FrameType::Control {
            return Err(Error::new(
                ErrorKind::PeerRefused,
                "the peer does not speak Posthorse's control protocol",
            ));
        }
        match Control::decode(&answer.body)? {
            Control::Greeting(theirs) => ours.hello.agree(&theirs.hello)?,
            Control::Reply { result: Err(refusal), .. } => return Err(refusal.into_error(peer)),
            _ => {
                return Err(Error::new(
                    ErrorKind::Malformed,
                    "the peer answered a greeting with something else",
                ));
            }
        };

        let (outgoing, queue) = mpsc::channel(REQUESTS);
        let waiting = Arc::new(Mutex::new(Ok(HashMap::new())));
        let receiving = Receiving {
            reader,
            waiting: Arc::clone(&waiting),
            // Weak, so that dropping the link ends the queue.
            outgoing: outgoing.downgrade(),
            peer: peer.into(),
            liveness: config.liveness(),
            // Before the peer does, so that requests seldom meet a connection that is just being closed.
            idle: config.idle_timeout() / 2,
            ping: encode(FrameType::Control, &Control::Ping.encode()?, limit)?,
        };
        let ended = Arc::clone(&waiting);
        let task = tokio::spawn(async move {
            let end = tokio::select! {
                end = receiving.run() => end,
                end = write_all(&mut socket, queue, patience) => Ended::Broken(match end {
                    Err(error) => error,
                    Ok(()) => Error::new(ErrorKind::Closed, "the control channel was closed"),
                }),
            };
            let owed = std::mem::replace(&mut *lock(&ended), Err(end.clone()));
            for answer in owed.into_iter().flatten() {
                // Only fails when nobody waits any more.
                let _ = answer.1.send(Err(end.clone()));
            }
        })
        .abort_handle();
        Ok(Self { peer: peer.into(), limit, next: AtomicU64::new(1), outgoing, waiting, task })
    }

    pub(crate) fn is_open(&self) -> bool {
        lock(&self.waiting).is_ok()
    }

    pub(crate) async fn ask(&self, topic: &str, body: &[u8], patience: Duration) -> Result<Vec<u8>, Ended> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let request = Control::Request { id, patience, topic: topic.to_owned(), body: body.to_vec() };
        let frame = request
            .encode()
            .and_then(|body| encode(FrameType::Control, &body, self.limit))
            .map_err(Ended::Final)?;
        let (answer, answered) = oneshot::channel();
        match &mut *lock(&self.waiting) {
            Ok(waiting) => waiting.insert(id, answer),
            Err(end) => return Err(end.clone()),
        };
        let _forget = Forget { id, waiting: &self.waiting };
        // When the queue has ended, so has the connection, and says why to everybody who waits.
        let _ = self.outgoing.send(frame).await;
        answered.await.unwrap_or_else(|_| {
            let error =
                Error::new(ErrorKind::Closed, "the control channel was closed").with_peer(&*self.peer);
            Err(Ended::Final(error))
        })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Forgets a request when nobody waits for its answer any more.
struct Forget<'a> {
    id: u64,
    waiting: &'a Waiting,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        if let Ok(waiting) = &mut *lock(self.waiting) {
            waiting.remove(&self.id);
        }
    }
}

/// How long the peer has owed something and not been heard of.
#[derive(Debug, Clone, Copy)]
struct Silence {
    since: Instant,
    /// How often it was asked since whether it is there.
    asked: u32,
}

impl Silence {
    const fn since(since: Instant) -> Self {
        Self { since, asked: 0 }
    }

    /// The peer is to be asked whether it is there, unless it has been silent for too long: for how long.
    fn ask(&mut self, now: Instant, liveness: Duration) -> Option<Duration> {
        let silent = now.saturating_duration_since(self.since);
        // Counted in questions too: after our own process was stopped, the clock alone would accuse the peer.
        if silent >= liveness && self.asked > 1 {
            return Some(silent);
        }
        self.asked += 1;
        None
    }
}

/// The half of a link that reads, and watches whether the peer is there.
struct Receiving {
    reader: FrameReader,
    waiting: Arc<Waiting>,
    outgoing: mpsc::WeakSender<Vec<u8>>,
    peer: Box<str>,
    liveness: Duration,
    idle: Duration,
    ping: Vec<u8>,
}

impl Receiving {
    async fn run(mut self) -> Ended {
        let error = |kind, why: String| Error::new(kind, why).with_peer(&*self.peer);
        let mut silence = Silence::since(Instant::now());
        // Since when nothing has been asked.
        let mut unused = Instant::now();
        loop {
            match timeout(self.liveness / 3, self.reader.next()).await {
                Ok(Ok(Some(frame))) if frame.frame_type == FrameType::Control => {
                    unused = Instant::now();
                    silence = Silence::since(unused);
                    match Control::decode(&frame.body) {
                        Ok(Control::Reply { id, result }) => self.answer(id, result),
                        Ok(Control::Pong) => {}
                        Ok(_) => {
                            let why = "a server sent what only clients send".to_owned();
                            return Ended::Final(error(ErrorKind::Malformed, why));
                        }
                        Err(malformed) => return Ended::Final(malformed.with_peer(&*self.peer)),
                    }
                }
                Ok(Ok(Some(_))) => {
                    let why = "a foreign frame on a control connection".to_owned();
                    return Ended::Final(error(ErrorKind::Malformed, why));
                }
                Ok(Ok(None)) => {
                    return Ended::Broken(error(
                        ErrorKind::PeerGone,
                        "the peer closed the connection".to_owned(),
                    ));
                }
                Ok(Err(broken)) if broken.kind() == ErrorKind::PeerGone => {
                    return Ended::Broken(broken.with_peer(&*self.peer));
                }
                Ok(Err(malformed)) => return Ended::Final(malformed.with_peer(&*self.peer)),
                Err(_) => {
                    let now = Instant::now();
                    let owed = lock(&self.waiting).as_ref().is_ok_and(|waiting| !waiting.is_empty());
                    if !owed {
                        silence = Silence::since(now);
                        if now.duration_since(unused) >= self.idle {
                            return Ended::Broken(error(
                                ErrorKind::Closed,
                                "nobody used the connection".to_owned(),
                            ));
                        }
                        continue;
                    }
                    unused = now;
                    if let Some(silent) = silence.ask(now, self.liveness) {
                        let why = format!("the peer has owed an answer and been silent for {silent:.1?}");
                        return Ended::Final(error(ErrorKind::PeerGone, why));
                    }
                    if let Some(outgoing) = self.outgoing.upgrade() {
                        // A full queue is something that the peer has to answer, too.
                        let _ = outgoing.try_send(self.ping.clone());
                    }
                }
            }
        }
    }

    fn answer(&self, id: u64, result: Result<Vec<u8>, super::message::Refusal>) {
        let answer = match &mut *lock(&self.waiting) {
            Ok(waiting) => waiting.remove(&id),
            Err(_) => None,
        };
        // An answer that nobody waits for came too late.
        if let Some(answer) = answer {
            let result = result.map_err(|refusal| Ended::Final(refusal.into_error(&self.peer)));
            let _ = answer.send(result);
        }
    }
}

fn lock(waiting: &Waiting) -> std::sync::MutexGuard<'_, Result<HashMap<u64, Answer>, Ended>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_gone_only_when_it_was_asked_and_did_not_answer() {
        let (start, liveness) = (Instant::now(), Duration::from_secs(3));
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut silence = Silence::since(start);
        let answers: Vec<_> = (1..=3).map(|second| silence.ask(at(second), liveness)).collect();
        assert_eq!(answers, [None, None, Some(liveness)]);
        // This process was stopped for a minute.
        let mut silence = Silence::since(start);
        let answers: Vec<_> = (60..=62).map(|second| silence.ask(at(second), liveness)).collect();
        assert_eq!(answers, [None, None, Some(Duration::from_secs(62))]);
    }
}
