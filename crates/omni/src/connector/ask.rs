//! How a get asks for an offer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind, Result};

use super::Inner;
use super::claim::Claim;
use super::get::Get;
use crate::control::Dialer;
use crate::message::{Offered, Query, QueryExtra, QueryReply, Request, Want};

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
        let mut lack: Option<Error> = None;
        loop {
            let wait_ms = match get.deadline.remaining(Instant::now()) {
                None => u64::MAX,
                // The producer's refusal has to arrive before we stop to listen.
                Some(left) => left.saturating_sub(REPLY_MARGIN).as_millis() as u64,
            };
            let request = self.query_request(get, want, wait_ms)?;
            let begun = Deadline::after(pause);
            let reply = get.asker.request_begun(&get.address, request, get.deadline, begun).await;
            let lacking = match reply {
                Err(error) if error.kind() == ErrorKind::LimitReached => error,
                Err(error) => return Err(error),
                Ok(reply) => match QueryReply::decode(&get.key, &reply)? {
                    QueryReply::Refused(refusal) if refusal.code == ErrorKind::QueueFull.code() => {
                        let pause = async move { tokio::time::sleep(pause).await };
                        let error = refusal.to_error(&get.address);
                        let paused = self.plane.within(get.deadline, no_room(&error), pause).await;
                        paused.map_err(|late| late.with_peer(get.address.as_str()))?;
                        error
                    }
                    // Its time is over, in which it could not wait there.
                    QueryReply::NotFound
                        if wait_ms == 0
                            && let Some(lack) = &lack =>
                    {
                        return Err(Deadline::exceeded(&no_room(lack)).with_peer(get.address.as_str()));
                    }
                    reply => return Ok(reply),
                },
            };
            tracing::debug!(key = get.key, %lacking, "a get asks now and then, since it cannot wait at the producer");
            let reply = self.ask_now(&self.prober, get, want, get.deadline).await?;
            if !is_absent(&reply) {
                return Ok(reply);
            }
            pause = (pause * 2).clamp(ASK_AGAIN_FIRST, ASK_AGAIN_LAST);
            lack = Some(lacking);
        }
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

/// What a get waits for that cannot wait at its producer.
fn no_room(lack: &Error) -> String {
    format!("room to wait at the producer: {}", lack.message())
}
