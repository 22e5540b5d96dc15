//! The rules as tables, each probe of the reference by name, and a model under random calls.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

struct Bench {
    offers: Offers<u32>,
    start: Instant,
    now: Instant,
    out: Vec<Action<u32>>,
}

fn limits() -> OfferLimits {
    OfferLimits {
        max_offers: 6,
        max_parked: 4,
        max_parked_per_consumer: 3,
        max_endings: 4,
        reservation: Duration::from_secs(3),
        lease: Duration::from_secs(5),
    }
}

fn pull(consumer: &str, pull: u64) -> PullId {
    PullId { consumer: consumer.into(), incarnation: Incarnation(1), pull }
}

fn terms(consumers: u32, ttl_s: Option<u64>) -> Terms {
    Terms { consumers: NonZeroU32::new(consumers).unwrap(), ttl: ttl_s.map(Duration::from_secs) }
}

impl Bench {
    fn new() -> Self {
        let now = Instant::now();
        Self { offers: Offers::new(limits()), start: now, now, out: Vec::new() }
    }

    fn at(&mut self, seconds: u64) {
        self.now = self.start + Duration::from_secs(seconds);
        self.offers.tick(self.now, &mut self.out);
    }

    fn put(&mut self, key: &str, payload: u32, terms: Terms) -> u64 {
        self.offers.put(key, payload, terms, self.now, &mut self.out).unwrap()
    }

    fn claim(&mut self, key: &str, id: PullId, wait_s: u64) -> Result<Claimed<u32>> {
        let wait = (wait_s > 0).then(|| self.now + Duration::from_secs(wait_s));
        self.offers.claim(key, id, Want::Write, wait, self.now)
    }

    fn begin(&mut self, key: &str, id: &PullId) -> Result<u32> {
        self.offers.begin(key, id, None, self.now).map(|found| found.payload)
    }

    fn end(&mut self, id: &PullId, outcome: Outcome) {
        self.offers.end(id, outcome, self.now, &mut self.out).unwrap();
    }

    /// What has happened since the last look, in few words.
    fn seen(&mut self) -> Vec<String> {
        let words = |action| match action {
            Action::Release(payload) => format!("release {payload}"),
            Action::Found(id, found) => format!("found {} {}", id.pull, found.payload),
            Action::Refuse(id, error) => format!("refuse {} {}", id.pull, error.kind()),
            Action::Overdue(id) => format!("overdue {}", id.pull),
        };
        self.out.drain(..).map(words).collect()
    }
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn probe_two_receivers_pull_one_key_at_the_same_time() {
    let mut bench = Bench::new();
    let (a, b) = (pull("a", 1), pull("b", 2));
    bench.put("k", 10, Terms::default());
    assert_eq!(bench.begin("k", &a).unwrap(), 10);
    let error = bench.offers.begin("k", &b, None, bench.now).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "told why not: {error}");
    bench.end(&a, Outcome::Done);
    assert_eq!(bench.seen(), ["release 10"], "once, after the last reader");
    // Declared for two, both are served, and the block is freed behind the slower.
    bench.put("k", 11, terms(2, None));
    assert_eq!((bench.begin("k", &a).unwrap(), bench.begin("k", &b).unwrap()), (11, 11));
    bench.end(&a, Outcome::Done);
    assert!(bench.seen().is_empty());
    bench.end(&b, Outcome::Done);
    assert_eq!(bench.seen(), ["release 11"]);
}

#[test]
fn probe_third_get_after_success() {
    let mut bench = Bench::new();
    bench.put("k", 10, Terms::default());
    bench.begin("k", &pull("a", 1)).unwrap();
    bench.end(&pull("a", 1), Outcome::Done);
    for wait in [0, 30] {
        let error = bench.claim("k", pull("a", 3), wait).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Expired);
        assert!(error.message().contains("served"), "{error}");
    }
    assert_eq!(kind(bench.offers.find("k")), ErrorKind::Expired);
    assert_eq!(kind(bench.offers.find("other")), ErrorKind::NotFound);
}

#[test]
fn probe_put_of_a_key_that_is_in_flight() {
    let mut bench = Bench::new();
    let a = pull("a", 1);
    let first = bench.put("k", 10, Terms::default());
    bench.begin("k", &a).unwrap();
    let second = bench.put("k", 11, Terms::default());
    assert!(second > first);
    assert!(bench.seen().is_empty(), "the old block is still read");
    assert_eq!(kind(bench.claim("k", pull("b", 2), 0)), ErrorKind::Busy);
    assert_eq!(bench.claim("k", pull("b", 2), 9).unwrap(), Claimed::Parked);
    bench.put("k", 12, Terms::default());
    assert_eq!(bench.seen(), ["release 11"], "only the newest waits");
    bench.end(&a, Outcome::Failed);
    assert_eq!(bench.seen(), ["release 10", "found 2 12"]);
    assert_eq!(bench.offers.stats(), OfferStats { offers: 1, superseding: 0, claims: 1, parked: 0 });
}

#[test]
fn probe_receiver_gives_up() {
    // The producer is told, stops the write, and only then is the source free and the offer open again.
    let mut bench = Bench::new();
    let a = pull("a", 1);
    bench.put("k", 10, Terms::default());
    bench.begin("k", &a).unwrap();
    assert_eq!(bench.offers.cancel(&a, bench.now, &mut bench.out), Cancelled::InFlight);
    assert_eq!(kind(bench.claim("k", pull("b", 2), 0)), ErrorKind::Busy);
    bench.end(&a, Outcome::Failed);
    assert!(matches!(bench.claim("k", pull("b", 2), 0), Ok(Claimed::Found(_))));
    assert_eq!(bench.offers.cancel(&pull("b", 2), bench.now, &mut bench.out), Cancelled::Forgotten);
    assert_eq!(bench.offers.cancel(&pull("b", 2), bench.now, &mut bench.out), Cancelled::Unknown);
    assert!(bench.seen().is_empty());
}

#[test]
fn a_get_before_its_put_waits_and_is_served_in_order() {
    let mut bench = Bench::new();
    for number in 1..=3 {
        assert_eq!(bench.claim("k", pull("a", number), 10 * number).unwrap(), Claimed::Parked);
    }
    bench.put("k", 10, terms(2, None));
    assert_eq!(bench.seen(), ["found 1 10", "found 2 10"]);
    bench.begin("k", &pull("a", 1)).unwrap();
    bench.end(&pull("a", 1), Outcome::Failed);
    assert_eq!(bench.seen(), ["found 3 10"], "a failed pull gives its place back");
    bench.begin("k", &pull("a", 2)).unwrap();
    bench.begin("k", &pull("a", 3)).unwrap();
    bench.end(&pull("a", 2), Outcome::Done);
    bench.end(&pull("a", 3), Outcome::Done);
    assert_eq!(bench.seen(), ["release 10"]);
}

#[test]
fn a_wait_ends_with_its_reason() {
    let mut bench = Bench::new();
    bench.claim("k", pull("a", 1), 10).unwrap();
    bench.at(9);
    assert!(bench.seen().is_empty());
    bench.at(10);
    assert_eq!(bench.seen(), ["refuse 1 NotFound"]);
    // Whoever waits for a place learns at once that there will be none.
    bench.put("k", 10, Terms::default());
    bench.begin("k", &pull("a", 2)).unwrap();
    bench.claim("k", pull("b", 3), 100).unwrap();
    bench.end(&pull("a", 2), Outcome::Done);
    assert_eq!(bench.seen(), ["release 10", "refuse 3 Expired"]);
}

#[test]
fn waiting_is_bounded_in_all_and_for_each_consumer() {
    let mut bench = Bench::new();
    for number in 1..=3 {
        bench.claim("k", pull("a", number), 10).unwrap();
    }
    assert_eq!(kind(bench.claim("k", pull("a", 4), 10)), ErrorKind::QueueFull);
    bench.claim("k", pull("b", 5), 10).unwrap();
    assert_eq!(kind(bench.claim("k", pull("c", 6), 10)), ErrorKind::QueueFull);
    let cancelled = bench.offers.cancel(&pull("a", 1), bench.now, &mut bench.out);
    assert_eq!(cancelled, Cancelled::Forgotten);
    bench.claim("k", pull("c", 6), 10).unwrap();
    assert_eq!(bench.offers.stats().parked, 4);
    assert!(bench.seen().is_empty(), "nobody waits to be told");
}

#[test]
fn offers_are_bounded_and_a_refused_payload_comes_back() {
    let mut bench = Bench::new();
    for payload in 0..6 {
        bench.put(&format!("k{payload}"), payload, Terms::default());
    }
    let refused = bench.offers.put("more", 99, Terms::default(), bench.now, &mut bench.out);
    assert_eq!(kind(refused), ErrorKind::QueueFull);
    assert_eq!(bench.seen(), ["release 99"]);
    bench.put("k0", 7, Terms::default());
    assert_eq!(bench.seen(), ["release 0"], "taking another's place is no growth");
}

#[test]
fn an_offer_expires_but_not_while_it_is_pulled() {
    let mut bench = Bench::new();
    let a = pull("a", 1);
    bench.put("k", 10, terms(2, Some(60)));
    bench.at(59);
    bench.begin("k", &a).unwrap();
    bench.at(60);
    assert!(bench.seen().is_empty());
    let error = bench.claim("k", pull("b", 2), 10).unwrap_err();
    assert!(error.kind() == ErrorKind::Expired && error.message().contains("time to live"), "{error}");
    bench.at(100);
    bench.end(&a, Outcome::Done);
    assert_eq!(bench.seen(), ["release 10"]);
    assert_eq!(bench.offers.next_due(), None);
}

#[test]
fn a_reservation_lapses_and_its_place_goes_to_the_next() {
    let mut bench = Bench::new();
    bench.put("k", 10, Terms::default());
    assert!(matches!(bench.claim("k", pull("a", 1), 0), Ok(Claimed::Found(_))));
    assert!(matches!(bench.claim("k", pull("a", 1), 0), Ok(Claimed::Found(_))), "asking again");
    bench.claim("k", pull("b", 2), 10).unwrap();
    bench.at(3);
    assert_eq!(bench.seen(), ["found 2 10"]);
    // The late one is not lost: it is told, or served if there is a place.
    assert_eq!(kind(bench.begin("k", &pull("a", 1))), ErrorKind::Busy);
}

#[test]
fn a_read_is_pinned_until_it_is_ended_however_overdue() {
    let mut bench = Bench::new();
    let a = pull("a", 1);
    bench.put("k", 10, Terms::default());
    let claimed = bench.offers.claim("k", a.clone(), Want::Read, None, bench.now);
    assert!(matches!(claimed, Ok(Claimed::Found(_))));
    bench.at(4);
    assert!(bench.offers.renew(&a, bench.now));
    bench.at(8);
    assert!(bench.seen().is_empty());
    bench.at(9);
    assert_eq!(bench.seen(), ["overdue 1"]);
    assert!(bench.offers.cleanup("k", bench.now, &mut bench.out));
    bench.at(1000);
    assert!(bench.seen().is_empty(), "said once, and pinned");
    bench.end(&a, Outcome::Failed);
    assert_eq!(bench.seen(), ["release 10"]);
    assert!(!bench.offers.renew(&a, bench.now));
}

#[test]
fn what_is_written_is_overdue_when_its_consumer_falls_silent() {
    let mut bench = Bench::new();
    let a = pull("a", 1);
    bench.put("k", 10, Terms::default());
    bench.begin("k", &a).unwrap();
    bench.at(1000);
    assert!(bench.seen().is_empty(), "a write takes its time");
    bench.offers.written(&a, bench.now);
    bench.at(1004);
    assert!(bench.offers.renew(&a, bench.now));
    bench.at(1008);
    assert!(bench.seen().is_empty());
    bench.claim("k", pull("b", 2), 10).unwrap();
    bench.at(1009);
    assert_eq!(bench.seen(), ["overdue 1"]);
    bench.end(&a, Outcome::Failed);
    assert_eq!(bench.seen(), ["found 2 10"]);
}

#[test]
fn retain_and_release_change_the_number_of_consumers() {
    let mut bench = Bench::new();
    bench.put("k", 10, Terms::default());
    assert_eq!(bench.offers.retain("k", 2, bench.now, &mut bench.out).unwrap(), 3);
    bench.begin("k", &pull("a", 1)).unwrap();
    bench.end(&pull("a", 1), Outcome::Done);
    assert_eq!(bench.offers.find("k").unwrap().consumers_left, 2);
    bench.begin("k", &pull("a", 2)).unwrap();
    assert_eq!(bench.offers.release("k", 2, bench.now, &mut bench.out).unwrap(), 0);
    assert!(bench.seen().is_empty());
    bench.end(&pull("a", 2), Outcome::Done);
    assert_eq!(bench.seen(), ["release 10"]);
    assert_eq!(kind(bench.offers.retain("k", 1, bench.now, &mut bench.out)), ErrorKind::Expired);
}

#[test]
fn a_generation_that_has_ended_is_not_confused_with_the_next() {
    let mut bench = Bench::new();
    let first = bench.put("k", 10, Terms::default());
    bench.put("k", 11, Terms::default());
    let late = bench.offers.begin("k", &pull("a", 1), Some(first), bench.now);
    assert_eq!(kind(late), ErrorKind::Expired);
    assert_eq!(bench.offers.stats().claims, 0);
}

#[test]
fn closing_refuses_and_releases_all_but_what_is_in_flight() {
    let mut bench = Bench::new();
    let a = pull("a", 1);
    bench.put("k", 10, Terms::default());
    bench.put("l", 11, Terms::default());
    bench.begin("k", &a).unwrap();
    bench.put("k", 12, Terms::default());
    bench.claim("l", pull("a", 2), 0).unwrap();
    bench.claim("m", pull("b", 3), 10).unwrap();
    bench.claim("l", pull("b", 4), 10).unwrap();
    bench.offers.close(bench.now, &mut bench.out);
    assert_eq!(bench.seen(), ["refuse 4 Closed", "refuse 3 Closed", "release 12", "release 11"]);
    bench.offers.close(bench.now, &mut bench.out);
    assert!(bench.seen().is_empty());
    assert_eq!(kind(bench.claim("m", pull("b", 3), 10)), ErrorKind::Closed);
    bench.end(&a, Outcome::Done);
    assert_eq!(bench.seen(), ["release 10"]);
    assert_eq!(bench.offers.stats(), OfferStats::default());
}

#[test]
fn a_number_in_use_is_refused_for_another_key() {
    let mut bench = Bench::new();
    bench.put("k", 10, Terms::default());
    bench.claim("k", pull("a", 1), 0).unwrap();
    assert_eq!(kind(bench.claim("l", pull("a", 1), 5)), ErrorKind::InvalidArgument);
    assert_eq!(kind(bench.begin("l", &pull("a", 1))), ErrorKind::InvalidArgument);
    bench.claim("l", pull("a", 2), 5).unwrap();
    assert_eq!(kind(bench.claim("l", pull("a", 2), 5)), ErrorKind::InvalidArgument);
    bench.put("m", 11, Terms::default());
    assert_eq!(kind(bench.begin("m", &pull("a", 2))), ErrorKind::InvalidArgument, "it waits for another");
}

#[derive(Debug, Clone)]
enum Op {
    Put(u8, u32, Option<u64>),
    Claim(u8, u8, u8, bool, u64),
    Begin(u8, u8, u8),
    End(u8, u8, bool),
    Renew(u8, u8),
    Cancel(u8, u8),
    Written(u8, u8),
    Retain(u8, u32),
    Release(u8, u32),
    Cleanup(u8),
    Pass(u64),
    Close,
}

fn op() -> impl Strategy<Value = Op> {
    let (key, consumer, number) = (0_u8..3, 0_u8..3, 0_u8..6);
    prop_oneof![
        6 => (key.clone(), 1_u32..4, prop::option::of(1_u64..20)).prop_map(|(k, n, t)| Op::Put(k, n, t)),
        8 => (key.clone(), consumer.clone(), number.clone(), any::<bool>(), 0_u64..10)
            .prop_map(|(k, c, n, r, w)| Op::Claim(k, c, n, r, w)),
        6 => (key.clone(), consumer.clone(), number.clone()).prop_map(|(k, c, n)| Op::Begin(k, c, n)),
        8 => (consumer.clone(), number.clone(), any::<bool>()).prop_map(|(c, n, d)| Op::End(c, n, d)),
        1 => (consumer.clone(), number.clone()).prop_map(|(c, n)| Op::Renew(c, n)),
        2 => (consumer.clone(), number.clone()).prop_map(|(c, n)| Op::Cancel(c, n)),
        2 => (consumer, number).prop_map(|(c, n)| Op::Written(c, n)),
        1 => (key.clone(), 0_u32..3).prop_map(|(k, n)| Op::Retain(k, n)),
        1 => (key.clone(), 0_u32..3).prop_map(|(k, n)| Op::Release(k, n)),
        1 => key.prop_map(Op::Cleanup),
        3 => (0_u64..6).prop_map(Op::Pass),
        1 => Just(Op::Close),
    ]
}

/// What must hold, kept beside the table by other means.
#[derive(Default)]
struct Model {
    /// Payloads that were put and not released.
    held: HashSet<u32>,
    /// Claims in flight, and the payload that each touches.
    flying: HashMap<PullId, u32>,
    /// Gets that wait for their one answer.
    waiting: HashSet<PullId>,
    overdue: HashSet<PullId>,
}

impl Model {
    fn observe(&mut self, out: &mut Vec<Action<u32>>, reads: &HashSet<PullId>) {
        for action in out.drain(..) {
            match action {
                Action::Release(payload) => {
                    assert!(self.held.remove(&payload), "{payload} was released twice");
                    assert!(!self.flying.values().any(|flying| *flying == payload), "{payload} is in flight");
                }
                Action::Found(id, found) => {
                    assert!(self.waiting.remove(&id), "{id:?} did not wait");
                    assert!(self.held.contains(&found.payload));
                    if reads.contains(&id) {
                        self.flying.insert(id, found.payload);
                    }
                }
                Action::Refuse(id, _) => assert!(self.waiting.remove(&id), "{id:?} did not wait"),
                Action::Overdue(id) => {
                    assert!(self.flying.contains_key(&id));
                    self.overdue.insert(id);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn whatever_is_called_nothing_in_flight_is_released_and_everything_is_once(
        ops in prop::collection::vec(op(), 1..120)
    ) {
        let id = |consumer: u8, number: u8| pull(["a", "b", "c"][usize::from(consumer)], number.into());
        let name = |key: u8| ["k", "l", "m"][usize::from(key)];
        let mut offers = Offers::new(limits());
        let (mut now, mut out, mut model) = (Instant::now(), Vec::new(), Model::default());
        let mut payload = 0;
        let mut reads = HashSet::new();
        for op in ops {
            match op {
                Op::Put(key, consumers, ttl) => {
                    payload += 1;
                    model.held.insert(payload);
                    let _ = offers.put(name(key), payload, terms(consumers, ttl), now, &mut out);
                }
                Op::Claim(key, consumer, number, read, wait) => {
                    let id = id(consumer, number);
                    let known = offers.claims.contains_key(&id);
                    let want = if read { Want::Read } else { Want::Write };
                    let wait = (wait > 0).then(|| now + Duration::from_secs(wait));
                    match offers.claim(name(key), id.clone(), want, wait, now) {
                        Ok(Claimed::Found(found)) => {
                            prop_assert!(model.held.contains(&found.payload));
                            prop_assert!(found.consumers_left > 0 || known);
                            // A reservation that is asked for again stays one.
                            if offers.claims[&id].in_flight && !known {
                                model.flying.insert(id, found.payload);
                            }
                        }
                        Ok(Claimed::Parked) => {
                            if read { reads.insert(id.clone()); } else { reads.remove(&id); }
                            prop_assert!(model.waiting.insert(id));
                        }
                        Err(_) => {}
                    }
                }
                Op::Begin(key, consumer, number) => {
                    let id = id(consumer, number);
                    if let Ok(found) = offers.begin(name(key), &id, None, now) {
                        prop_assert!(model.held.contains(&found.payload));
                        prop_assert!(model.flying.insert(id, found.payload).is_none());
                    }
                }
                Op::End(consumer, number, done) => {
                    let id = id(consumer, number);
                    // The connector ends what is in flight; a stray end must do no harm either.
                    model.flying.remove(&id);
                    model.overdue.remove(&id);
                    let outcome = if done { Outcome::Done } else { Outcome::Failed };
                    let _ = offers.end(&id, outcome, now, &mut out);
                }
                Op::Renew(consumer, number) => { offers.renew(&id(consumer, number), now); }
                Op::Cancel(consumer, number) => {
                    let id = id(consumer, number);
                    let cancelled = offers.cancel(&id, now, &mut out);
                    prop_assert_eq!(cancelled == Cancelled::InFlight, model.flying.contains_key(&id));
                    if cancelled == Cancelled::Forgotten { model.waiting.remove(&id); }
                }
                // The connector says it of writes only; of a read it is a renewal.
                Op::Written(consumer, number) => {
                    let id = id(consumer, number);
                    if offers.is_in_flight(&id) { offers.written(&id, now); }
                }
                Op::Retain(key, n) => { let _ = offers.retain(name(key), n, now, &mut out); }
                Op::Release(key, n) => { let _ = offers.release(name(key), n, now, &mut out); }
                Op::Cleanup(key) => { offers.cleanup(name(key), now, &mut out); }
                Op::Pass(seconds) => {
                    now += Duration::from_secs(seconds);
                    offers.tick(now, &mut out);
                    prop_assert!(offers.next_due().is_none_or(|due| due > now));
                }
                Op::Close => offers.close(now, &mut out),
            }
            model.observe(&mut out, &reads);
            let stats = offers.stats();
            prop_assert_eq!(stats.parked, model.waiting.len());
            prop_assert_eq!(stats.offers + stats.superseding, model.held.len());
            prop_assert!(stats.offers + stats.superseding <= limits().max_offers);
            prop_assert!(stats.parked <= limits().max_parked);
        }
        offers.close(now, &mut out);
        model.observe(&mut out, &reads);
        for id in model.flying.drain().map(|(id, _)| id).collect::<Vec<_>>() {
            offers.end(&id, Outcome::Failed, now, &mut out).unwrap();
        }
        model.observe(&mut out, &reads);
        prop_assert!(model.held.is_empty() && model.waiting.is_empty());
        prop_assert_eq!(offers.stats(), OfferStats::default());
        prop_assert_eq!(offers.timers.len(), 0, "no timer is left behind");
    }
}
