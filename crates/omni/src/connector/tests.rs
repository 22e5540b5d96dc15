//! What only shows from within: that nothing is left of what was called off, in whatever order things come.

use std::future::Future;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use posthorse_core::{Access, Checksum, GrantDesc, GrantToken, Incarnation, RegionId};

use super::*;
use crate::config::Role;
use crate::control::ControlLimits;
use crate::key::Edge;
use crate::message::{
    Answer, Cancel, Close, Outcome, Pull, PullExtra, PullReply, QueryExtra, QueryReply, StreamAbort,
    StreamCredit, StreamSent, Want,
};
use crate::offer::OfferStats;

pub(super) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

pub(super) fn edge() -> Edge {
    Edge::new(0, 1)
}

fn config(role: Role) -> ConnectorConfig {
    ConnectorConfig {
        role,
        host: "127.0.0.1".to_owned(),
        advertise_host: Some("127.0.0.1".to_owned()),
        zmq_port: 0,
        memory_pool_size: 16 << 20,
        ..ConnectorConfig::default()
    }
}

/// Waits for what comes about in the background.
pub(super) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(15);
    while !is_so() {
        assert!(Instant::now() < until, "{what} did not come about");
        thread::park_timeout(Duration::from_millis(1));
    }
}

pub(super) struct Pair {
    pub(super) sender: Connector,
    pub(super) receiver: Connector,
    address: String,
}

impl Pair {
    pub(super) fn new(change: impl Fn(&mut ConnectorConfig)) -> Self {
        Self::with_engines(change, None, None)
    }

    pub(super) fn with_engines(
        change: impl Fn(&mut ConnectorConfig),
        of_sender: Option<TransferEngine>,
        of_receiver: Option<TransferEngine>,
    ) -> Self {
        let build = |config, engine: Option<TransferEngine>| {
            let builder = Connector::builder().config(config);
            engine.into_iter().fold(builder, ConnectorBuilder::engine).build().unwrap()
        };
        let mut config_of_sender = config(Role::Sender);
        change(&mut config_of_sender);
        let sender = build(config_of_sender, of_sender);
        let (host, port) = sender.address().unwrap();
        let mut config_of_receiver = config(Role::Receiver);
        change(&mut config_of_receiver);
        (config_of_receiver.sender_host, config_of_receiver.sender_zmq_port) = (Some(host), Some(port));
        let receiver = build(config_of_receiver, of_receiver);
        Self { sender, receiver, address: format!("127.0.0.1:{port}") }
    }

    /// The producer answers a request of the consumer's.
    fn ask(&self, request: &Request) -> Vec<u8> {
        let request = request.encode().unwrap();
        self.receiver.inner().dialer.request_blocking(&self.address, request, soon()).unwrap()
    }

    pub(super) fn tell(&self, request: &Request) -> Answer {
        Answer::decode(&self.ask(request)).unwrap()
    }

    pub(super) fn put(&self, key: &str, payload: &[u8]) {
        self.sender.put(&edge(), key, payload, PutOptions::default()).unwrap();
    }

    pub(super) fn get(&self, key: &str) -> Result<Received> {
        self.receiver.get(&edge(), key, GetOptions::until(soon()))
    }

    fn query(&self, key: &str, pull: &PullId) -> Request {
        Request::Query(Query {
            request_id: edge().qualify(key).unwrap(),
            extra: Some(QueryExtra {
                hello: self.receiver.inner().hello(),
                consumer: pull.consumer.to_string(),
                incarnation: pull.incarnation,
                pull: pull.pull,
                wait_ms: 20_000,
                want: Want::Read,
            }),
        })
    }

    fn close(&self, PullId { consumer, incarnation, pull }: &PullId, outcome: Outcome) {
        let (consumer, incarnation, pull) = (consumer.to_string(), *incarnation, *pull);
        let answer = self.tell(&Request::Close(Close { consumer, incarnation, pull, outcome }));
        assert_eq!(answer, Answer::Ok);
    }

    /// Nobody has a claim, and nothing is done for one.
    pub(super) fn assert_idle(&self) {
        eventually("the end of all claims", || {
            let state = self.sender.inner().state.lock();
            state.offers.stats().claims == 0
        });
        let state = self.sender.inner().state.lock();
        assert!(state.serving.is_empty(), "without a claim: {:?}", state.serving);
    }

    fn assert_whole(&self) {
        for connector in [&self.sender, &self.receiver] {
            eventually("a whole pool", || {
                let health = connector.health();
                health.pool.is_whole() && health.withheld == 0
            });
        }
    }
}

#[test]
fn a_read_that_ends_while_its_grant_is_made_leaves_no_grant() {
    let pair = Pair::new(|_| {});
    let inner = pair.sender.inner();
    let pull = pair.receiver.inner().next_pull();
    let query = pair.query("k", &pull).encode().unwrap();
    let asked = pair.receiver.inner().dialer.request(&pair.address, query, soon());
    eventually("the wait", || inner.health().offers.parked == 1);
    thread::scope(|scope| {
        // No grant is made before this is let go.
        let memory = inner.memory.lock();
        let put = scope.spawn(|| pair.put("k", b"x"));
        eventually("the making of a grant", || inner.state.lock().parked.is_empty());
        pair.close(&pull, Outcome::Failed);
        drop(memory);
        put.join().unwrap();
    });
    pair.assert_idle();
    let reply = pollster::block_on(asked).unwrap();
    let key = edge().qualify("k").unwrap();
    assert!(matches!(QueryReply::decode(&key, &reply).unwrap(), QueryReply::Refused(_)));
    assert_eq!(pair.get("k").unwrap().bytes().unwrap(), b"x", "the offer stays");
    pair.assert_idle();
    pair.assert_whole();
}

#[test]
fn a_claim_does_not_end_while_its_grant_is_being_revoked() {
    let pair = Pair::new(|config| config.liveness_ms = 60_000);
    let inner = pair.sender.inner();
    pair.put("k", b"x");
    let pull = pair.receiver.inner().next_pull();
    pair.ask(&pair.query("k", &pull));
    // As the clock does it.
    let lent = {
        let mut state = inner.state.lock();
        let rest = state.end(&pull, Outcome::Failed, Instant::now());
        assert!(matches!(rest, serving::Rest::Revoke(_)));
        state.take_lent(&pull).unwrap()
    };
    // Meanwhile the consumer says that it has it all.
    pair.close(&pull, Outcome::Done);
    assert_eq!(inner.health().offers, OfferStats { offers: 1, claims: 1, ..OfferStats::default() });
    let (_, left) = inner.with_state(|state, now| state.revoked(&pull, Some(lent), now));
    assert!(left.is_none());
    inner.tick();
    pair.assert_idle();
    assert_eq!(inner.health().offers, OfferStats::default(), "it was served");
    pair.assert_whole();
}

#[test]
fn a_get_that_asks_twice_has_one_grant() {
    let pair = Pair::new(|_| {});
    pair.put("k", b"x");
    let (pull, key) = (pair.receiver.inner().next_pull(), edge().qualify("k").unwrap());
    let grants = [(); 2].map(|()| {
        let reply = QueryReply::decode(&key, &pair.ask(&pair.query("k", &pull))).unwrap();
        let QueryReply::Offer { offered: Some(offered), .. } = reply else { panic!("no offer: {reply:?}") };
        offered.grant.unwrap()
    });
    assert_eq!(grants[0], grants[1]);
    pair.close(&pull, Outcome::Done);
    pair.assert_idle();
    pair.assert_whole();
}

fn pull_for(consumer: &str, number: u64, hello: posthorse_core::Hello) -> Pull {
    let grant = GrantDesc {
        region: RegionId(1),
        address: 4096,
        len: 4096,
        access: Access::Write,
        token: GrantToken { handle: 1, secret: 1 },
        attributes: Default::default(),
    };
    Pull {
        remote_hostname: "127.0.0.1".to_owned(),
        remote_port: 1,
        request_id: edge().qualify("k").unwrap(),
        dst_addrs: vec![grant.address],
        lengths: vec![grant.len],
        extra: Some(PullExtra {
            hello,
            consumer: consumer.to_owned(),
            incarnation: Incarnation(1),
            pull: number,
            generation: None,
            grant,
            deadline_ms: None,
            checksum: Checksum::default(),
            transport: None,
        }),
    }
}

/// Pulls of consumers whose address takes connections, and never answers.
#[test]
fn close_waits_for_no_pull_that_is_queued() {
    let pair = Pair::new(|config| (config.liveness_ms, config.workers) = (30_000, 2));
    let (inner, silent) = (pair.sender.inner(), TcpListener::bind("127.0.0.1:0").unwrap());
    let options = PutOptions { consumers: std::num::NonZeroU32::new(200), ..PutOptions::default() };
    pair.sender.put(&edge(), "k", &b"x"[..], options).unwrap();
    let consumer = silent.local_addr().unwrap().to_string();
    let dialers = [(); 3].map(|()| pair.receiver.inner().plane.dialer());
    let mut asked: Vec<_> = (0..180)
        .map(|number| {
            let pull = Request::Pull(pull_for(&consumer, number, inner.hello())).encode().unwrap();
            dialers[number as usize % 3].request(&pair.address, pull, soon())
        })
        .collect();
    eventually("the queue", || inner.health().offers.claims >= 170);
    // One that is called off is told so at once, wherever it stands in the queue.
    let (incarnation, pull) = (Incarnation(1), 100);
    let cancel = Request::Cancel(Cancel { consumer, incarnation, pull });
    let refusal = |reply: Vec<u8>| match PullReply::decode(&reply).unwrap() {
        PullReply::Refused(refusal) => refusal.code,
        reply => panic!("it was not refused: {reply:?}"),
    };
    let mut one = Box::pin(asked.swap_remove(100));
    let called_off = loop {
        // Again, if it had not come yet.
        pair.tell(&cancel);
        if let Poll::Ready(reply) = one.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            break reply.unwrap();
        }
    };
    assert_eq!(refusal(called_off), ErrorKind::Cancelled as u16);
    let start = Instant::now();
    pair.sender.close();
    let took = start.elapsed();
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    let told = asked.into_iter().filter_map(|asked| pollster::block_on(asked).ok()).map(refusal).count();
    assert!(told > 100, "{told} were told why");
}

#[test]
fn a_get_waits_for_no_consumer_that_cannot_be_reached() {
    let pair = Pair::new(|config| {
        (config.liveness_ms, config.workers) = (30_000, 1);
        config.transport = "require:tcp".parse().unwrap();
    });
    let (inner, silent) = (pair.sender.inner(), TcpListener::bind("127.0.0.1:0").unwrap());
    let options = PutOptions { consumers: std::num::NonZeroU32::new(100), ..PutOptions::default() };
    pair.sender.put(&edge(), "k", &b"x"[..], options).unwrap();
    pair.put("other", &[7; 100_000]);
    let consumer = silent.local_addr().unwrap().to_string();
    let asked: Vec<_> = (0..16)
        .map(|life| {
            let mut pull = pull_for(&consumer, 1, inner.hello());
            pull.extra.as_mut().unwrap().incarnation = Incarnation(life);
            let pull = Request::Pull(pull).encode().unwrap();
            pair.receiver.inner().plane.dialer().request(&pair.address, pull, soon())
        })
        .collect();
    eventually("the pulls", || inner.health().offers.claims == 16);
    assert_eq!(pair.get("other").unwrap().bytes().unwrap(), [7; 100_000]);
    for mut asked in asked {
        let answered = std::pin::Pin::new(&mut asked).poll(&mut Context::from_waker(Waker::noop()));
        assert!(answered.is_pending(), "{answered:?}");
    }
    let start = Instant::now();
    pair.sender.close();
    assert!(start.elapsed() < Duration::from_secs(10), "close waits for them: {:?}", start.elapsed());
}

#[test]
fn a_consumer_that_was_not_reached_is_told_the_reason_by_whose_words_it_is() {
    let pair = Pair::new(|config| config.liveness_ms = 300);
    let (inner, silent) = (pair.sender.inner(), TcpListener::bind("127.0.0.1:0").unwrap());
    let options = PutOptions { consumers: std::num::NonZeroU32::new(100), ..PutOptions::default() };
    pair.sender.put(&edge(), "k", &b"x"[..], options).unwrap();
    let consumer = silent.local_addr().unwrap().to_string();
    let ask = |number| {
        let pull = Request::Pull(pull_for(&consumer, number, inner.hello()));
        match PullReply::decode(&pair.ask(&pull)).unwrap() {
            PullReply::Refused(refusal) => refusal.to_error(&pair.address).to_string(),
            reply => panic!("it was not refused: {reply:?}"),
        }
    };
    let first = ask(1);
    assert!(first.contains("PeerUnreachable"), "{first}");
    assert!(first.contains(&format!("the producer, writing to this consumer ({consumer})")), "{first}");
    // At once, unless this thread was held up for as long as the memory lasts.
    let asked = Instant::now();
    let second = ask(2);
    assert!(second.contains("ms ago") || asked.elapsed() > Duration::from_millis(300), "{second}");
    pair.assert_idle();
}

#[test]
fn a_get_that_fails_since_its_producer_closes_says_so() {
    let pair = Pair::new(|_| {});
    let (sender, receiver) = (pair.sender.inner(), pair.receiver.inner());
    let refused = || Error::new(ErrorKind::AccessDenied, "the token fits no live grant");
    let get = receiver.begin_get(&edge(), "k", GetOptions::until(soon()), true).unwrap();
    let outcome = || pollster::block_on(receiver.ended_by_producer(&get, refused()));
    assert_eq!(outcome().kind(), ErrorKind::AccessDenied, "the producer is well");
    assert_eq!(sender.told(serving::called_off()).kind(), ErrorKind::Cancelled);
    sender.closed.store(true, Ordering::Release);
    for _ in 0..2 {
        let error = outcome();
        assert_eq!(error.kind(), ErrorKind::PeerGone);
        assert!(error.message().contains("the producer was closed") && error.retryable(), "{error}");
        assert!(error.message().contains("fits no live grant"), "{error}");
        let pull = receiver.next_pull();
        assert_eq!(sender.not_written(&pull, serving::called_off()).kind(), ErrorKind::Closed);
        assert_eq!(sender.told(serving::called_off()).kind(), ErrorKind::Closed);
        pair.sender.close();
    }
}

#[test]
fn what_is_said_of_an_older_stream_does_not_concern_the_next_of_its_name() {
    let pair = Pair::new(|_| {});
    let stream = edge().qualify("r").unwrap();
    let credit = |generation, limit| {
        let stream = stream.clone();
        pair.tell(&Request::StreamCredit(StreamCredit { stream, generation, follower: None, limit }))
    };
    let abort = |generation| {
        let (stream, reason) = (stream.clone(), "enough".to_owned());
        pair.tell(&Request::StreamAbort(StreamAbort { stream, generation, follower: None, reason }))
    };
    let generation = |answer| match answer {
        Answer::Stream(StreamSent { generation, .. }) => Some(generation),
        answer => panic!("no stream: {answer:?}"),
    };
    let is_unknown =
        |answer| matches!(answer, Answer::Refused(why) if why.code == ErrorKind::NotFound as u16);
    let mut older = pair.sender.open_stream(&edge(), "r").unwrap();
    let first = generation(credit(None, 1));
    assert_eq!(abort(first), Answer::Ok);
    assert_eq!(older.send(&b"x"[..], soon()).unwrap_err().kind(), ErrorKind::Aborted);
    let mut newer = pair.sender.open_stream(&edge(), "r").unwrap();
    assert!(is_unknown(credit(first, 1)) && is_unknown(abort(first)));
    newer.send(&b"x"[..], soon()).unwrap();
    let second = generation(credit(None, 1));
    assert_ne!(first, second);
    assert_eq!(generation(credit(second, 2)), second);
    // An older consumer names none.
    assert_eq!(abort(None), Answer::Ok);
    assert_eq!(newer.send(&b"x"[..], soon()).unwrap_err().kind(), ErrorKind::Aborted);
    drop((older, newer));
    pair.assert_whole();
}

#[test]
fn a_consumer_speaks_as_often_as_its_producer_demands() {
    let pair = Pair::new(|config| {
        config.liveness_ms = if config.role == Role::Sender { 300 } else { 60_000 };
    });
    pair.put("k", &vec![1; 8 << 20]);
    let full = pair.receiver.alloc(12 << 20, soon()).unwrap();
    let mut followed = pair.receiver.follow_stream(&edge(), "r", FollowOptions::default()).unwrap();
    let mut stream = pair.sender.open_stream(&edge(), "r").unwrap();
    stream.send(&b"x"[..], soon()).unwrap();
    drop(followed.next(soon()).unwrap().unwrap());
    thread::scope(|scope| {
        let getter = scope.spawn(|| pair.get("k").unwrap().len());
        eventually("the wait for room", || pair.receiver.health().pool.waiting == 1);
        let until = Instant::now() + Duration::from_millis(1200);
        while Instant::now() < until {
            assert_eq!(pair.sender.health().offers.claims, 1, "its place was given away");
            thread::park_timeout(Duration::from_millis(20));
        }
        drop(full);
        assert_eq!(getter.join().unwrap(), 8 << 20);
    });
    stream.send(&b"x"[..], soon()).unwrap();
    drop(followed.next(soon()).unwrap().unwrap());
    drop((stream, followed));
    pair.assert_whole();
}

/// Puts, gets that have hardly any time, and what takes offers back, all at once.
#[test]
fn whatever_order_things_come_in_nothing_is_left() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::new(|config| config.transport = format!("require:{transport}").parse().unwrap());
        let came = AtomicUsize::new(0);
        thread::scope(|scope| {
            for thread in 0..4_u32 {
                let (pair, came) = (&pair, &came);
                scope.spawn(move || {
                    for round in 0..150_u32 {
                        let key = format!("{}", round % 3);
                        let options =
                            PutOptions { consumers: std::num::NonZeroU32::new(2), ..PutOptions::default() };
                        match (thread + round) % 5 {
                            0 | 1 => drop(pair.sender.put(&edge(), &key, &[7; 4096][..], options)),
                            2 => drop(pair.sender.cleanup(&edge(), &key)),
                            _ => {}
                        }
                        let time = Duration::from_micros(200 * u64::from((round + 7 * thread) % 20));
                        let options =
                            GetOptions { lease: round % 2 == 0, ..GetOptions::until(Deadline::after(time)) };
                        if let Ok(got) = pair.receiver.get(&edge(), &key, options) {
                            assert!(got.bytes().unwrap().iter().all(|byte| *byte == 7));
                            came.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert!(came.into_inner() > 0, "no get had time enough over {transport}");
        for key in ["0", "1", "2"] {
            let _ = pair.sender.cleanup(&edge(), key);
        }
        pair.assert_idle();
        pair.assert_whole();
    }
}

/// Gets something when it is woken, and says what became of that.
struct Getter {
    connector: Connector,
    outcomes: mpsc::Sender<[ErrorKind; 3]>,
}

impl Wake for Getter {
    fn wake(self: Arc<Self>) {
        let (edge, soon) = (edge(), GetOptions::until(soon()));
        let got = self.connector.get(&edge, "other", soon).unwrap_err();
        let tried = self.connector.try_get(&edge, "other", soon).unwrap_err();
        let mut stream = self.connector.follow_stream(&edge, "r", FollowOptions::default()).unwrap();
        let next = stream.next(Deadline::after(Duration::from_secs(20))).unwrap_err();
        let _ = self.outcomes.send([got, tried, next].map(|error| error.kind()));
    }
}

#[test]
fn a_waker_that_waits_is_refused_and_holds_up_nobody() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::new(|config| config.transport = format!("require:{transport}").parse().unwrap());
        let (outcomes, told) = mpsc::channel();
        let waker = Waker::from(Arc::new(Getter { connector: pair.receiver.clone(), outcomes }));
        let edge = edge();
        let mut get = Box::pin(pair.receiver.get_async(&edge, "k", GetOptions::until(soon())));
        assert!(get.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        eventually("the wait", || pair.sender.health().offers.parked == 1);
        pair.put("k", b"x");
        let kinds = told.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(kinds, [ErrorKind::Busy; 3]);
        assert_eq!(pollster::block_on(get).unwrap().bytes().unwrap(), b"x");
        drop(waker);
        pair.assert_idle();
    }
}

#[test]
fn gets_that_wait_leave_half_of_the_control_connections_to_others() {
    const PLACES: u32 = 32;
    let pair = Pair::new(|config| {
        config.max_connections = PLACES;
        config.transport = "require:tcp".parse().unwrap();
        // More than the producer takes of one consumer, which it is to find out.
        config.max_parked_per_consumer = PLACES / 2;
    });
    let (inner, edge) = (pair.sender.inner(), edge());
    let mut context = Context::from_waker(Waker::noop());
    let keys: Vec<String> = (0..2 * PLACES).map(|number| format!("k{number}")).collect();
    let mut waiting: Vec<_> = keys
        .iter()
        .map(|key| Box::pin(pair.receiver.get_async(&edge, key, GetOptions::until(soon()))))
        .collect();
    for get in &mut waiting {
        assert!(get.as_mut().poll(&mut context).is_pending());
    }
    let most = PLACES as usize / 4;
    eventually("the waits", || inner.health().offers.parked == most);
    let late = GetOptions::until(Deadline::after(Duration::from_millis(500)));
    let error = pair.receiver.get(&edge, "late", late).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert!(error.message().contains("room to wait at the producer: "), "{error}");
    // Another consumer gets through, and this one's leases, its pull and its end.
    let other = ControlPlane::start(ControlLimits::default()).unwrap();
    let ping = other.dialer().request_blocking(&pair.address, Request::Ping.encode().unwrap(), soon());
    assert_eq!(Answer::decode(&ping.unwrap()).unwrap(), Answer::Ok);
    let receiver = pair.receiver.inner();
    let (consumer, incarnation) = (receiver.engine.name().to_owned(), receiver.engine.incarnation());
    assert_eq!(pair.tell(&Request::Renew(Renew { consumer, incarnation, pulls: Vec::new() })), Answer::Ok);
    pair.put("now", b"x");
    assert_eq!(pair.get("now").unwrap().bytes().unwrap(), b"x", "what is there is got at once");
    let mut stream = pair.sender.open_stream(&edge, "r").unwrap();
    let mut followed = pair.receiver.follow_stream(&edge, "r", FollowOptions::default()).unwrap();
    stream.send(&b"x"[..], soon()).unwrap();
    assert_eq!(followed.next(soon()).unwrap().unwrap().bytes().unwrap(), b"x");
    drop((stream, followed));
    assert_eq!(inner.health().offers.parked, most, "no more wait");
    // Whether they wait at the producer or not, all are served: those that are put last, too.
    for (key, get) in keys.iter().zip(waiting).rev() {
        pair.put(key, key.as_bytes());
        assert_eq!(pollster::block_on(get).unwrap().bytes().unwrap(), key.as_bytes());
    }
    eventually("the end of the offers", || inner.health().offers.offers == 0);
    other.close(soon()).unwrap();
}
