//! What the tests against foreign implementations share: a producer, and what it answers byte for byte.

use std::time::Duration;

use posthorse_core::{Error, ErrorKind};
use posthorse_omni::control::{Peer, Responder, Service};
use posthorse_omni::message::{Query, QueryReply, Reply, Request};

pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The one key that is offered.
const KEY: &str = "k@0_1";

const BYTES: u64 = 1 << 20;

/// A producer as a foreign consumer knows it.
pub(crate) struct Producer;

impl Service for Producer {
    fn handle(&self, _: &Peer, request: Request, responder: Responder) {
        match request {
            Request::Query(query) if query.request_id == KEY => responder.reply(&Reply::Offer {
                request_id: query.request_id,
                data_size: BYTES,
                is_fast_path: true,
                offered: None,
            }),
            Request::Query(_) => {
                let error = Error::new(ErrorKind::NotFound, "nothing there");
                responder.reply(&Reply::NoOffer((&error).into()));
            }
            Request::Pull(_) => responder.reply(&Reply::Done { bytes: BYTES }),
            _ => responder.refuse(&Error::new(ErrorKind::Unsupported, "not here")),
        }
    }
}

/// A query for the key that is offered.
pub(crate) fn query() -> Vec<u8> {
    Request::Query(Query { request_id: KEY.to_owned(), extra: None }).encode().unwrap()
}

/// That this is the answer to [`query`].
pub(crate) fn assert_offer(reply: &[u8]) {
    let expected = QueryReply::Offer { data_size: BYTES, is_fast_path: true, offered: None };
    assert_eq!(QueryReply::decode(KEY, reply).unwrap(), expected);
}

/// A message as it was recorded.
pub(crate) fn golden(name: &str) -> Vec<u8> {
    let text = include_str!("../../testdata/messages.txt");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap();
    (0..line.len()).step_by(2).map(|i| u8::from_str_radix(&line[i..i + 2], 16).unwrap()).collect()
}
