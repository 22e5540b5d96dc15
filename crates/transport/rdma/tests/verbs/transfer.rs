//! What succeeds.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::ErrorKind;
use posthorse_rdma::verbs::{
    Operation, PortState, Remote, Status, Verbs as _, Wakeup, WorkCompletion, WorkRequest,
};
use posthorse_rdma::{GidKind, SystemVerbs};

use crate::pair::{PATIENCE, SIZE, ends, in_vm, pair};

#[test]
fn a_device_tells_its_limits_its_port_and_its_addresses() {
    if !in_vm() {
        return;
    }
    let (a, _) = ends(0, 64);
    let limits = a.device.limits();
    assert!(
        limits.region_bytes >= 1 << 30 && limits.regions >= 1000 && limits.queue_pairs >= 1000,
        "{limits:?}"
    );
    assert!(limits.work_requests >= 1000 && limits.completions >= 1000 && limits.reads >= 16, "{limits:?}");
    let port = a.device.port(1).unwrap();
    assert_eq!((port.state, port.ethernet, port.lid), (PortState::Active, true, 0), "{port:?}");
    assert!([1024, 2048, 4096].contains(&port.mtu) && port.message_bytes >= 1 << 20, "{port:?}");
    assert!(port.bandwidth > 0, "{port:?}");
    assert_eq!(a.gid.kind, Some(GidKind::RoceV2));
    assert_eq!(a.gid.interface.as_deref(), Some("a0"));
    assert_eq!(a.device.port(2).unwrap_err().kind(), ErrorKind::NotFound);
    let error = SystemVerbs::new().unwrap().open("no_such_device").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains(a.device.name()), "{error}");
}

#[test]
fn bytes_are_written_and_read_back() {
    if !in_vm() {
        return;
    }
    let (mut a, b) = pair(0, 1 << 20);
    a.memory.fill(|at| (at * 7 % 251) as u8);
    let sent = a.memory.copy();
    assert_eq!(a.run(a.request(Operation::Write, &b.memory)), Status::Success);
    assert!(b.memory.copy() == sent, "what was written is not what is there");
    a.memory.fill(|_| 0);
    assert_eq!(a.run(a.request(Operation::Read, &b.memory)), Status::Success);
    assert!(a.memory.copy() == sent, "what was read is not what is there");
}

#[test]
fn both_ends_write_on_both_queue_pairs() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 4096);
    a.queues.connect(1, &a.link(), &b.remote(1)).unwrap();
    b.queues.connect(1, &b.link(), &a.remote(1)).unwrap();
    assert_ne!(a.queues.numbers()[0], a.queues.numbers()[1]);
    for (from, to) in [(&a, &b), (&b, &a)] {
        for queue in [0, 1] {
            let request = WorkRequest { id: queue as u64, ..from.request(Operation::Write, &to.memory) };
            // SAFETY: nobody looks at the memory until the completion.
            unsafe { from.queues.post(queue, &[request]) }.unwrap();
        }
        let ids: HashSet<u64> = [from.completion(), from.completion()].map(|done| done.id).into();
        assert_eq!(ids, HashSet::from([0, 1]));
    }
}

#[test]
fn an_immediate_value_comes_with_a_receive_in_order() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 64);
    b.queues.post_receives(0, &[41, 42]).unwrap();
    for value in [0xdead_beef, 1] {
        let request = a.request(Operation::WriteWithImmediate(value), &b.memory);
        assert_eq!(a.run(request), Status::Success);
    }
    for (id, value) in [(41, 0xdead_beef), (42, 1)] {
        let done = b.completion();
        assert_eq!((done.id, done.status, done.immediate), (id, Status::Success, Some(value)));
    }
}

#[test]
fn a_write_of_nothing_reaches_the_peer() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 64);
    let nothing = WorkRequest { len: 0, local_key: 0, ..a.request(Operation::Write, &b.memory) };
    assert_eq!(a.run(nothing), Status::Success);
    assert_eq!(a.run(WorkRequest { local_address: 0, ..nothing }), Status::Success);
}

#[test]
fn inline_bytes_are_taken_at_once_and_need_no_key() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 64);
    assert!(a.queues.max_inline() >= SIZE.inline_bytes);
    let mut bytes = [7_u8; 64];
    let request = WorkRequest {
        local_address: (&raw const bytes).expose_provenance() as u64,
        local_key: 0,
        inline: true,
        ..a.request(Operation::Write, &b.memory)
    };
    // SAFETY: the bytes are taken before the call returns.
    unsafe { a.queues.post(0, &[request]) }.unwrap();
    bytes.fill(9);
    assert_eq!(a.completion().status, Status::Success);
    assert_eq!(b.memory.copy(), [7; 64]);
    assert_eq!(bytes, [9; 64]);
    // What is longer is refused, and what comes before it is posted.
    let long = WorkRequest { len: a.queues.max_inline() + 1, ..request };
    // SAFETY: as above; the second is not posted.
    let error = unsafe { a.queues.post(0, &[request, long, request]) }.unwrap_err();
    assert_eq!((error.posted, error.error.kind()), (1, ErrorKind::InvalidArgument), "{error:?}");
    assert_eq!(a.completion().status, Status::Success);
    assert_eq!(b.memory.copy(), bytes);
}

#[test]
fn of_a_chain_the_signalled_request_alone_completes() {
    if !in_vm() {
        return;
    }
    const LEN: u64 = 512;
    let (mut a, b) = pair(0, 64 * LEN as usize);
    a.memory.fill(|at| (at / LEN as usize) as u8 + 1);
    let whole = a.request(Operation::Write, &b.memory);
    let chain: Vec<_> = (0..64)
        .map(|at| WorkRequest {
            id: at,
            local_address: whole.local_address + at * LEN,
            remote_address: whole.remote_address + at * LEN,
            len: LEN as u32,
            signalled: at == 63,
            ..whole
        })
        .collect();
    // SAFETY: nobody looks at the memory until the completion.
    unsafe { a.queues.post(0, &chain) }.unwrap();
    let done = a.completion();
    assert_eq!((done.id, done.status), (63, Status::Success));
    assert!(b.memory.copy() == a.memory.copy(), "not all of the chain has arrived");
    assert_eq!(a.queues.poll(&mut [WorkCompletion::EMPTY; 8]).unwrap(), 0);
}

#[test]
fn more_completions_than_fit_one_call_are_all_taken() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 64);
    let chain: Vec<_> =
        (0..100).map(|id| WorkRequest { id, ..a.request(Operation::Write, &b.memory) }).collect();
    // SAFETY: nobody looks at the memory until the completions.
    unsafe { a.queues.post(0, &chain) }.unwrap();
    let end = Instant::now() + PATIENCE;
    let mut ids = Vec::new();
    while ids.len() < chain.len() {
        assert!(Instant::now() < end, "{ids:?}");
        let mut into = [WorkCompletion::EMPTY; 100];
        let count = a.queues.poll(&mut into).unwrap();
        ids.extend(into[..count].iter().map(|done| done.id));
    }
    assert_eq!(ids, (0..100).collect::<Vec<_>>());
}

#[test]
fn a_sleep_ends_by_time_and_by_a_wake() {
    if !in_vm() {
        return;
    }
    let (a, _) = ends(0, 64);
    let begin = Instant::now();
    assert_eq!(a.device.wait(Some(Duration::from_millis(50))).unwrap(), Wakeup::TimedOut);
    assert!(begin.elapsed() >= Duration::from_millis(50));
    assert_eq!(a.device.wait(Some(Duration::ZERO)).unwrap(), Wakeup::TimedOut);
    a.device.wake();
    a.device.wake();
    assert_eq!(a.device.wait(None).unwrap(), Wakeup::Woken);
    assert_eq!(a.device.wait(Some(Duration::ZERO)).unwrap(), Wakeup::TimedOut);
    let device = Arc::clone(&a.device);
    let sleeper = std::thread::spawn(move || device.wait(None));
    a.device.wake();
    assert_eq!(sleeper.join().unwrap().unwrap(), Wakeup::Woken);
}

#[test]
fn queue_pairs_may_be_dropped_while_another_thread_takes_their_events() {
    if !in_vm() {
        return;
    }
    let (a, b) = ends(0, 64);
    let waiting = Arc::clone(&a.device);
    let waiter = std::thread::spawn(move || {
        let mut announced = HashSet::new();
        loop {
            match waiting.wait(Some(PATIENCE)).unwrap() {
                Wakeup::Completions(key) => drop(announced.insert(key)),
                Wakeup::Woken => return announced,
                other => assert!(matches!(other, Wakeup::PortChanged(_)), "{other:?}"),
            }
        }
    });
    for key in 0..100 {
        let queues = a.device.queue_pairs(1, SIZE, key).unwrap();
        queues.connect(0, &a.link(), &b.remote(0)).unwrap();
        b.queues.connect(0, &b.link(), &Remote { number: queues.numbers()[0], ..a.remote(0) }).unwrap();
        queues.arm().unwrap();
        // SAFETY: nobody looks at the memory.
        unsafe { queues.post(0, &[a.request(Operation::Write, &b.memory)]) }.unwrap();
        // Now and then the event is on its way when they are dropped.
        if key % 2 == 0 {
            let end = Instant::now() + PATIENCE;
            while queues.poll(&mut [WorkCompletion::EMPTY]).unwrap() == 0 {
                assert!(Instant::now() < end);
            }
        }
    }
    a.device.wake();
    let announced = waiter.join().unwrap();
    assert!(!announced.is_empty() && announced.iter().all(|key| *key < 100), "{announced:?}");
}

#[test]
fn a_forked_child_may_drop_everything_and_the_parent_goes_on() {
    if !in_vm() {
        return;
    }
    let (mut a, b) = pair(0, 4096);
    a.memory.fill(|at| at as u8);
    let mut both = Some((a, b));
    // SAFETY: the child takes no lock of another thread's: all that it calls refuses or does nothing at once.
    unsafe {
        posthorse_testkit::assert_in_forked_child(|| {
            let Some((a, b)) = both.take() else { return false };
            let refused = a.queues.poll(&mut []).is_err_and(|error| error.kind() == ErrorKind::Forked)
                && a.device.wait(None).is_err_and(|error| error.kind() == ErrorKind::Forked)
                && a.queues.fail().is_err_and(|error| error.kind() == ErrorKind::Forked);
            drop((a, b));
            refused
        });
    }
    let (mut a, b) = both.unwrap();
    // Pages that the device knows must still be this process's own.
    a.memory.fill(|at| !(at as u8));
    assert_eq!(a.run(a.request(Operation::Write, &b.memory)), Status::Success);
    assert!(b.memory.copy() == a.memory.copy(), "the device reads other pages than this process writes");
}
