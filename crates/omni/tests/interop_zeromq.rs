//! The control plane against the `zeromq` crate, an implementation that shares nothing with it, in both directions.
//! Unlike the test against pyzmq it runs everywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod interop;

use std::sync::Arc;

use bytes::Bytes;
use interop::{Producer, SOON, assert_offer, golden, query};
use posthorse_omni::control::{ControlLimits, ControlPlane};
use posthorse_omni::message::{PullReply, Query, Request};
use tokio::runtime::{Builder, Runtime};
use zeromq::{DealerSocket, ReqSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// What a producer answers to what, byte for byte.
fn exchanges() -> Vec<(Vec<u8>, Vec<u8>)> {
    let unknown = Request::Query(Query { request_id: "l@0_1".to_owned(), extra: None }).encode().unwrap();
    vec![
        (golden("query"), golden("query_reply")),
        (golden("pull"), golden("trans_done")),
        (unknown, golden("info_not_found")),
        (b"\xc1nonsense".to_vec(), golden("trans_error")),
    ]
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, work).await.expect("an answer in time")
}

#[test]
fn a_req_and_a_dealer_socket_ask_posthorse() {
    let plane = ControlPlane::start(ControlLimits::default()).unwrap();
    let listener = plane.listen("127.0.0.1:0", Arc::new(Producer)).unwrap();
    let address = format!("tcp://{}", listener.local_address());
    runtime().block_on(async {
        let mut req = ReqSocket::new();
        in_time(req.connect(&address)).await.unwrap();
        let mut dealer = DealerSocket::new();
        in_time(dealer.connect(&address)).await.unwrap();
        for _ in 0..20 {
            for (request, reply) in exchanges() {
                in_time(req.send(request.clone().into())).await.unwrap();
                let got = in_time(req.recv()).await.unwrap();
                assert_eq!(got.into_vec(), [Bytes::from(reply.clone())]);

                let mut message = ZmqMessage::from(request);
                message.push_front(Bytes::new());
                in_time(dealer.send(message)).await.unwrap();
                let got = in_time(dealer.recv()).await.unwrap();
                assert_eq!(got.into_vec(), [Bytes::new(), Bytes::from(reply)]);
            }
        }
    });
    plane.close(SOON.into()).unwrap();
}

#[test]
fn posthorse_asks_a_router_socket() {
    let plane = ControlPlane::start(ControlLimits::default()).unwrap();
    let runtime = runtime();
    let mut router = RouterSocket::new();
    let endpoint = runtime.block_on(in_time(router.bind("tcp://127.0.0.1:0"))).unwrap().to_string();
    let address = endpoint.strip_prefix("tcp://").unwrap().to_owned();
    let asking = std::thread::spawn(move || {
        let dialer = plane.dialer();
        for _ in 0..20 {
            for (request, expected) in exchanges() {
                assert_eq!(dialer.request_blocking(&address, request, SOON.into()).unwrap(), expected);
            }
        }
        assert_offer(&dialer.request_blocking(&address, query(), SOON.into()).unwrap());
        // What only Posthorse knows is answered as the reference answers what it does not understand.
        let ping = dialer.request_blocking(&address, Request::Ping.encode().unwrap(), SOON.into()).unwrap();
        assert_eq!(PullReply::decode(&ping).unwrap(), PullReply::Failed);
        let stop = dialer.request_blocking(&address, b"stop".to_vec(), SOON.into()).unwrap();
        assert_eq!(stop, golden("trans_error"));
        plane.close(SOON.into()).unwrap();
    });
    runtime.block_on(async {
        loop {
            let frames = in_time(router.recv()).await.unwrap().into_vec();
            let (identity, request) = (frames[0].clone(), frames.last().unwrap().clone());
            assert_eq!(frames.len(), 3, "identity, the empty delimiter, the request");
            assert!(frames[1].is_empty());
            let known = exchanges().into_iter().find(|(asked, _)| **asked == *request);
            let reply = known.map_or_else(|| golden("trans_error"), |(_, reply)| reply);
            let mut message = ZmqMessage::from(reply);
            message.push_front(Bytes::new());
            message.push_front(identity);
            in_time(router.send(message)).await.unwrap();
            if *request == *b"stop" {
                break;
            }
        }
        // The last reply may still be on its way out.
        while !asking.is_finished() {
            tokio::task::yield_now().await;
        }
    });
    asking.join().unwrap();
}
