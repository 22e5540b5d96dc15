//! Notifications arrive once, in order, or are refused.

use posthorse_core::{Access, ErrorKind, FarEnd, Opcode};

use super::Subject;
use super::pair::Pair;
use crate::pattern;

/// Longer than any sensible limit.
const TOO_LONG: usize = 64 << 20;

/// Sends a notification, waiting for room.
fn notify(pair: &Pair<'_>, data: &[u8]) -> u64 {
    let token = pair.left.tokens(1).start;
    loop {
        let before = pair.left.events.completed_count();
        match pair.left.transport.notify(pair.path, token, data) {
            Ok(()) => return token,
            Err(full) if full.kind() == ErrorKind::QueueFull => {
                let wait = pair.left.events.wait_completed(before + 1, pair.left.deadline());
                wait.expect("a full queue that moves on");
            }
            Err(error) => panic!("a notification of {} bytes: {error}", data.len()),
        }
    }
}

fn supported(pair: &Pair<'_>) -> bool {
    if pair.left.capabilities().notify {
        return true;
    }
    let refused = pair.left.transport.notify(pair.path, 1, b"x").expect_err("it does not deliver any");
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    false
}

pub(super) fn notifications_arrive_once_and_in_order(subject: &Subject) {
    const COUNT: usize = 400;
    let pair = Pair::new(subject);
    if !supported(&pair) {
        return;
    }
    let message = |number: usize| pattern::bytes(number as u64, number * 37 % 4097);
    let tokens: Vec<_> = (0..COUNT).map(|number| notify(&pair, &message(number))).collect();
    for token in tokens {
        let end = pair.left.events.wait_for(token, pair.left.deadline()).expect("an end of each");
        end.result.unwrap_or_else(|why| panic!("{why:?}"));
    }
    pair.right.events.wait_notified(COUNT, pair.right.deadline()).expect("each to arrive");
    let arrived = pair.right.events.notified_so_far();
    assert_eq!(arrived.len(), COUNT, "some arrived twice");
    for (number, (from, data)) in arrived.into_iter().enumerate() {
        assert_eq!(from, pair.left.name);
        assert!(data == message(number), "notification {number} is another's, or torn");
    }
}

pub(super) fn a_notification_finds_what_was_visible_before_it(subject: &Subject) {
    const LEN: usize = 100_000;
    let pair = Pair::new(subject);
    if !supported(&pair) {
        return;
    }
    let local = pair.left.register(LEN, Access::None, 0);
    let (remote, target) = pair.lend(LEN, Access::Write, 0);
    for round in 1..=20 {
        local.fill(round);
        pair.carry_out(vec![local.slice(Opcode::Write, 0, LEN, &target, 0)]);
        notify(&pair, b"ready");
        pair.right.events.wait_notified(round as usize, pair.right.deadline()).expect("it to arrive");
        assert_eq!(pattern::check(round, &remote.bytes()), None);
    }
}

pub(super) fn a_notification_that_is_too_long_is_refused(subject: &Subject) {
    let pair = Pair::new(subject);
    if !supported(&pair) {
        return;
    }
    let token = pair.left.tokens(1).start;
    let refused = pair.left.transport.notify(pair.path, token, &vec![0; TOO_LONG]).expect_err("a limit");
    assert_eq!(refused.kind(), ErrorKind::TooLarge, "{refused}");
    assert!(refused.to_string().contains(&TOO_LONG.to_string()), "the length is not named: {refused}");
    notify(&pair, b"short");
    let arrived = pair.right.events.wait_notified(1, pair.right.deadline()).expect("it to arrive");
    assert_eq!(arrived[0].1, b"short");
    pair.assert_usable();
}

pub(super) fn a_notification_that_nobody_takes_is_refused(subject: &Subject) {
    let pair = Pair::new(subject);
    if !supported(&pair) {
        return;
    }
    let full = posthorse_core::Error::new(ErrorKind::QueueFull, "nobody fetches them");
    pair.right.events.refuse_notifications(Some(full));
    let token = notify(&pair, b"lost");
    let end = pair.left.events.wait_for(token, pair.left.deadline()).expect("an end");
    assert_eq!(end.result.expect_err("it was refused").error.kind(), ErrorKind::QueueFull);
    pair.right.events.refuse_notifications(None);
    notify(&pair, b"found");
    pair.right.events.wait_notified(1, pair.right.deadline()).expect("it to arrive");
    assert_eq!(pair.right.events.notified_so_far(), [(pair.left.name.clone(), b"found".to_vec())]);
}

/// The engine sends a notification again when the far end is said to be quiet.
pub(super) fn a_notification_that_was_delivered_is_not_sent_again(subject: &Subject) {
    let pair = Pair::new(subject);
    if !supported(&pair) {
        return;
    }
    let local = pair.left.register(8, Access::None, 1);
    let (_remote, target) = pair.lend(8, Access::Read, 2);
    let open = pair.right.events.hold_notification();
    let token = notify(&pair, b"once");
    pair.right.events.wait_notified(1, pair.right.deadline()).expect("it to arrive");
    // Where its answer would wait behind the notification's, its end shows that no answer will be heard any more.
    let behind = pair.number(vec![local.slice(Opcode::Read, 0, 8, &target, 0)]);
    pair.left.submit_all(pair.path, &behind).expect("a path that takes slices");
    pair.left.transport.fence(pair.path);
    pair.left.ends_of(&behind);
    drop(open);
    let end = pair.left.events.wait_for(token, pair.left.deadline()).expect("an end");
    if let Err(why) = end.result {
        assert_eq!(why.far_end, FarEnd::Unconfirmed, "{}", why.error);
    }
}
