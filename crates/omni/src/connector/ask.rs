//! How a get asks for an offer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind, Result};

use super::Inner;
use super::claim::Claim;
use super::get::Get;
use crate::control::Dialer;
use crate::message::{Offered, Query, QueryExtra, QueryReply, Request, Want};
use Told::{Late, NoRoom, Reply};

/// By how much the producer stops to wait before the consumer does, so that its reason still arrives.
const REPLY_MARGIN: Duration = Duration::from_millis(20);

/// How soon, and how late at the most, a get asks again that cannot wait at its producer.
const ASK_AGAIN_FIRST: Duration = Duration::from_millis(20);
const ASK_AGAIN_LAST: Duration = Duration::from_secs(1);

impl Inner {
    /// Asks for the offer of a get, and for a claim to it.
    pub(super) async fn query(self: &Arc<Self>, get: &Arc<Get>, want: Want) -> Result<(Claim, u64, Offered)> {
        let claim = Claim::new(self, get, want);
        let reply = self.ask(get, want).await;
        let error = match reply.map_err(|error| error.context(format_args!("asking for {:?}", get.key)))? {
            QueryReply::Offer { data_size, offered: Some(offered), .. } => {
                return Ok((claim, data_size, *offered));
            }
            QueryReply::Offer { offered: None, .. } => {
                Error::new(ErrorKind::Unsupported, "the producer is a foreign connector")
                    .with_peer(get.address.as_str())
            }
            QueryReply::NotFound => Error::new(ErrorKind::NotFound, format!("{:?} is not offered", get.key))
                .with_peer(get.address.as_str()),
            QueryReply::Refused(refusal) => refusal.to_error(&get.address),
        };
        // It keeps no place.
        claim.end();
        Err(error)
    }

    /// Asks for an offer, and waits for it at the producer. Where as many gets wait as may, it is asked now and then
    /// instead: who waits for what is not there keeps nobody from what is.
    async fn ask(&self, get: &Get, want: Want) -> Result<QueryReply> {
        if !get.wait_for_offer {
            // The producer still has time to answer.
            return self.ask_now(&self.teller, get, want, self.connect_deadline(get)).await;
        }
        let mut pause = Duration::ZERO;
        let mut lack = None;
        loop {
            let asked = Instant::now();
            match self.ask_to_wait(get, want, Deadline::after(pause)).await {
                Ok(Reply(reply)) => return Ok(reply),
                // The get's time is over: in which it could not wait there, if so.
                Ok(Late(reply)) if lack.is_none() => return Ok(reply),
                Ok(Late(_)) => return Err(late(Deadline::exceeded("the payload"), lack.as_ref(), get)),
                Ok(NoRoom(error)) => {
                    tracing::debug!(key = get.key, %error, "a get asks now and then, since it cannot wait there");
                    // What the producer says goes before what was found here.
                    lack = lack.filter(|_| error.kind() != ErrorKind::QueueFull).or(Some(error));
                }
                Err(error) => return Err(late(error, lack.as_ref(), get)),
            }
            let rest = pause.saturating_sub(asked.elapsed());
            let rest = async move { tokio::time::sleep(rest).await };
            let paused = self.plane.within(get.deadline, "the payload", rest).await;
            paused.map_err(|error| late(error, lack.as_ref(), get))?;
            match self.ask_now(&self.prober, get, want, get.deadline).await {
                Ok(reply) if !is_absent(&reply) => return Ok(reply),
                Ok(_) => {}
                // It serves as many connections as it may, now.
                Err(error) if error.kind() == ErrorKind::LimitReached => {}
                Err(error) => return Err(late(error, lack.as_ref(), get)),
            }
            pause = (pause * 2).clamp(ASK_AGAIN_FIRST, ASK_AGAIN_LAST);
        }
    }

    /// Asks for an offer, to wait for it at the producer, if that can begin in time.
    async fn ask_to_wait(&self, get: &Get, want: Want, begun: Deadline) -> Result<Told> {
        let wait_ms = match get.deadline.remaining(Instant::now()) {
            None => u64::MAX,
            // The producer's refusal has to arrive before we stop to listen.
            Some(left) => left.saturating_sub(REPLY_MARGIN).as_millis() as u64,
        };
        let request = self.query_request(get, want, wait_ms)?;
        let reply = match get.asker.request_begun(&get.address, request, get.deadline, begun).await {
            // As many gets wait here as may, or the producer serves as many connections.
            Err(error) if error.kind() == ErrorKind::LimitReached => return Ok(NoRoom(error)),
            reply => QueryReply::decode(&get.key, &reply?)?,
        };
        Ok(match reply {
            QueryReply::Refused(refusal) if refusal.code == ErrorKind::QueueFull.code() => {
                NoRoom(refusal.to_error(&get.address))
            }
            reply if wait_ms == 0 && is_absent(&reply) => Late(reply),
            reply => Reply(reply),
        })
    }

    /// Asks for an offer that may be there.
    async fn ask_now(
        &self,
        dialer: &Dialer,
        get: &Get,
        want: Want,
        deadline: Deadline,
    ) -> Result<QueryReply> {
        let request = self.query_request(get, want, 0)?;
        let reply = dialer.request(&get.address, request, deadline).await?;
        QueryReply::decode(&get.key, &reply)
    }

    fn query_request(&self, get: &Get, want: Want, wait_ms: u64) -> Result<Vec<u8>> {
        let request = Request::Query(Query {
            request_id: get.key.clone(),
            extra: Some(QueryExtra {
                hello: self.hello(),
                consumer: self.engine.name().to_owned(),
                incarnation: get.pull.incarnation,
                pull: get.pull.pull,
                wait_ms,
                want,
            }),
        });
        request.encode()
    }
}

/// Whether what was asked for is not there now, and may come.
fn is_absent(reply: &QueryReply) -> bool {
    let codes = [ErrorKind::NotFound, ErrorKind::Busy].map(ErrorKind::code);
    match reply {
        QueryReply::NotFound => true,
        QueryReply::Refused(refusal) => codes.contains(&refusal.code),
        QueryReply::Offer { .. } => false,
    }
}

/// What a get is told that asks to wait at a producer.
enum Told {
    Reply(QueryReply),
    /// That nothing is there, when it has no time left to wait.
    Late(QueryReply),
    NoRoom(Error),
}

/// The error of a get whose time is over, in which it could not wait at its producer for this reason.
fn late(error: Error, lack: Option<&Error>, get: &Get) -> Error {
    match lack {
        Some(lack) if error.kind() == ErrorKind::DeadlineExceeded => {
            let what = format!("room to wait at the producer: {}", lack.message());
            Deadline::exceeded(&what).with_peer(get.address.as_str())
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;
    use crate::connector::tests::{Pair, edge};
    use crate::connector::{GetOptions, Source};
    use crate::control::zmtp;

    #[test]
    fn a_producer_that_serves_as_many_connections_as_it_may_is_asked_now_and_then() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = port.local_addr().unwrap();
        let accepted = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&accepted);
        thread::spawn(move || {
            let full = [&zmtp::greeting()[..], &zmtp::error("LimitReached: 1 is served, which is the limit")]
                .concat();
            let mut kept = Vec::new();
            while let Ok((mut stream, _)) = port.accept() {
                counter.fetch_add(1, Ordering::Relaxed);
                let _ = stream.write_all(&full);
                kept.push(stream);
            }
        });
        let pair = Pair::new(|_| {});
        let options = GetOptions {
            source: Source::At("127.0.0.1", address.port()),
            ..GetOptions::until(Deadline::after(Duration::from_millis(500)))
        };
        let error = pair.receiver.get(&edge(), "k", options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
        let reason = "room to wait at the producer: ";
        assert!(error.message().contains(reason) && error.message().contains("1 is served"), "{error}");
        // At once, and after 20, 40, 80 and 160 ms, by both kinds of connections.
        let accepted = accepted.load(Ordering::Relaxed);
        assert!((2..=14).contains(&accepted), "{accepted} connections");
    }
}
