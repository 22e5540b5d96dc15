//! What fails, and how that is said.

use std::net::Ipv4Addr;
use std::process::Command;
use std::time::{Duration, Instant};

use posthorse_core::ErrorKind;
use posthorse_rdma::Gid;
use posthorse_rdma::verbs::{
    Access, Device, Link, Memory, Operation, PortState, QueueSize, Remote, Status, Wakeup, WorkRequest,
};

use crate::pair::{ALL, PATIENCE, Region, SIZE, Side, connect, ends, in_vm, pair};

#[test]
fn memory_that_the_key_is_not_for_is_refused_by_the_peer() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 4096);
    let gone = Region::new(&*b.device, 4096);
    let good = a.request(Operation::Write, &b.memory);
    let of_gone = a.request(Operation::Write, &gone);
    drop(gone);
    let wrong = [
        WorkRequest { remote_key: good.remote_key ^ 0x10, ..good },
        WorkRequest { remote_address: good.remote_address + 1, ..good },
        WorkRequest { remote_address: good.remote_address - 1, operation: Operation::Read, ..good },
        of_gone,
    ];
    for request in wrong {
        assert_eq!(a.run(request), Status::RemoteAccess, "{request:?}");
        // What fails leaves both queue pairs in the error state: nothing goes on until they are connected anew.
        assert_eq!(a.run(good), Status::Flushed);
        connect(&a, &b);
        assert_eq!(a.run(good), Status::Success);
    }
}

#[test]
fn memory_of_which_peers_may_only_read_cannot_be_written() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 4096);
    static BYTES: [u8; 4096] = [5; 4096];
    let memory = Memory::Host { address: BYTES.as_ptr().expose_provenance() as u64, len: 4096 };
    let access = Access { remote_read: true, ..Access::default() };
    // SAFETY: a static is there for ever.
    let region = unsafe { b.device.register(memory, access) }.unwrap();
    let read = WorkRequest {
        remote_address: memory.address(),
        remote_key: region.remote_key(),
        ..a.request(Operation::Read, &b.memory)
    };
    assert_eq!(a.run(read), Status::Success);
    assert!(a.memory.copy() == BYTES);
    assert_eq!(a.run(WorkRequest { operation: Operation::Write, ..read }), Status::RemoteAccess);
}

#[test]
fn local_memory_that_the_key_is_not_for_is_refused() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 4096);
    let good = a.request(Operation::Write, &b.memory);
    let status = a.run(WorkRequest { local_key: good.local_key ^ 0x10, ..good });
    // Soft-RoCE flushes what it cannot send, and does not say why.
    assert!([Status::LocalProtection, Status::Flushed].contains(&status), "{status:?}");
}

#[test]
fn what_is_posted_is_flushed_when_the_queue_pairs_are_failed() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 4096);
    a.queues.post_receives(0, &[1, 2, 3]).unwrap();
    a.queues.fail().unwrap();
    // Queue pair 1 was never connected: there is nothing to flush.
    for id in [1, 2, 3] {
        let done = a.completion();
        assert_eq!((done.id, done.status, done.immediate), (id, Status::Flushed, None));
    }
    let unsignalled = WorkRequest { signalled: false, ..a.request(Operation::Write, &b.memory) };
    assert_eq!(a.run(unsignalled), Status::Flushed);
    // The peer finds nobody there.
    assert_eq!(b.run(b.request(Operation::Write, &a.memory)), Status::RetriesExceeded);
}

#[test]
fn a_peer_whose_queue_pairs_are_gone_is_given_up() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(0, 4096);
    let Side { queues, memory, device: _device, .. } = b;
    drop(queues);
    let begin = Instant::now();
    assert_eq!(a.run(a.request(Operation::Write, &memory)), Status::RetriesExceeded);
    // Seven times 67 ms at the least, were nothing in between.
    assert!(begin.elapsed() > Duration::from_millis(200), "{:?}", begin.elapsed());
}

#[test]
fn a_queue_that_is_full_says_how_many_were_posted() {
    if !in_vm() {
        return;
    }
    let (a, b) = ends(0, 64);
    // The peer is not connected: nothing completes.
    a.queues.connect(0, &a.link(), &b.remote(0)).unwrap();
    let request = WorkRequest { signalled: false, ..a.request(Operation::Write, &b.memory) };
    let many = vec![request; 5000];
    // SAFETY: the memory is there until the queue pairs are gone.
    let error = unsafe { a.queues.post(0, &many) }.unwrap_err();
    assert_eq!(error.error.kind(), ErrorKind::QueueFull, "{error:?}");
    assert!(error.posted >= SIZE.sends as usize && error.posted < many.len(), "{error:?}");
    let receives: Vec<u64> = (0..5000).collect();
    let error = a.queues.post_receives(0, &receives).unwrap_err();
    assert_eq!(error.error.kind(), ErrorKind::QueueFull, "{error:?}");
    assert!(error.posted >= SIZE.receives as usize && error.posted < receives.len(), "{error:?}");
    // As many as were said to be posted are there.
    a.queues.fail().unwrap();
    let end = Instant::now() + PATIENCE;
    let mut last = 0;
    while last + 1 < error.posted as u64 {
        assert!(Instant::now() < end);
        let done = a.completion();
        assert_eq!(done.status, Status::Flushed);
        last = if done.id == request.id { last } else { done.id };
    }
}

#[test]
fn an_address_where_nobody_is_fails_the_path_and_is_named() {
    if !in_vm() {
        return;
    }
    let (a, b) = ends(0, 64);
    let gid = Gid(Ipv4Addr::new(10, 77, 0, 99).to_ipv6_mapped().octets());
    let error = a.queues.connect(0, &a.link(), &Remote { gid, ..b.remote(0) }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PathFailed, "{error}");
    for part in [gid.to_string(), "RTR".to_owned(), "1024".to_owned(), b.queues.numbers()[0].to_string()] {
        assert!(error.message().contains(&part), "{part} is missing in {error}");
    }
    assert_eq!(error.device(), Some(a.device.name()));
    // It is as good as new for another.
    connect(&a, &b);
    assert_eq!(a.run(a.request(Operation::Write, &b.memory)), Status::Success);
}

#[test]
fn links_that_no_device_should_get_are_refused() {
    if !in_vm() {
        return;
    }
    let (a, b) = ends(0, 64);
    let good = a.link();
    for (link, name) in [
        (Link { retries: 7, ..good }, "retries is 7"),
        (Link { receiver_retries: 8, ..good }, "receiver_retries is 8"),
        (Link { timeout: 32, ..good }, "timeout is 32"),
        (Link { service_level: 16, ..good }, "service_level is 16"),
        (Link { mtu: 1500, ..good }, "mtu is 1500"),
    ] {
        let error = a.queues.connect(0, &link, &b.remote(0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().starts_with(name), "{error}");
    }
    let error = a.queues.connect(2, &good, &b.remote(0)).unwrap_err();
    assert!(error.message().contains("queue is 2"), "{error}");
    assert!(a.queues.connect(0, &Link { gid_index: 200, ..good }, &b.remote(0)).is_err());
}

#[test]
fn memory_that_cannot_be_registered_is_refused_with_the_reason() {
    if !in_vm() {
        return;
    }
    let (a, _) = ends(0, 64);
    let refused = |device: &dyn Device, memory, access| {
        // SAFETY: the memory is never registered.
        unsafe { device.register(memory, access) }.unwrap_err()
    };
    let empty = Memory::Host { address: a.memory.address(), len: 0 };
    assert_eq!(refused(&*a.device, empty, ALL).kind(), ErrorKind::InvalidArgument);
    let unmapped = Memory::Host { address: 4096, len: 4096 };
    let error = refused(&*a.device, unmapped, ALL);
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.message().contains("4096 bytes") && error.message().contains("0x1000"), "{error}");
    assert!(error.advice().unwrap().contains("nvidia_peermem"), "{error}");
    let half = Access { remote_write: true, ..Access::default() };
    let there = Memory::Host { address: a.memory.address(), len: 64 };
    assert!(refused(&*a.device, there, half).message().contains("local_write"));
    // Soft-RoCE knows no dma-buf; that of another kind is not one.
    let file = std::fs::File::open("/dev/null").unwrap();
    let foreign =
        Memory::DmaBuf { file: std::os::fd::AsFd::as_fd(&file), offset: 0, address: 4096, len: 4096 };
    let error = refused(&*a.device, foreign, ALL);
    assert!(error.message().contains("dma-buf"), "{error}");
}

#[test]
fn memory_beyond_the_limit_of_locked_memory_is_refused_with_the_limit() {
    if !in_vm() {
        return;
    }
    const LIMITED: &str = "POSTHORSE_TEST_LIMITED";
    if std::env::var_os(LIMITED).is_some() {
        let (a, _) = ends(0, 64);
        let bytes = vec![0_u8; 1 << 20];
        let memory = Memory::Host { address: bytes.as_ptr().expose_provenance() as u64, len: 1 << 20 };
        // SAFETY: the memory is never registered.
        let error = unsafe { a.device.register(memory, ALL) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitReached, "{error}");
        for part in ["RLIMIT_MEMLOCK is 65536 bytes", "ulimit -l unlimited", "CAP_IPC_LOCK"] {
            assert!(error.advice().unwrap().contains(part), "{part} is missing in {error}");
        }
        return;
    }
    // Root locks what it likes, unless it may not have the capability for that.
    let name = "failure::memory_beyond_the_limit_of_locked_memory_is_refused_with_the_limit";
    let output = Command::new("prlimit")
        .args(["--memlock=65536", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(LIMITED, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

#[test]
fn queues_that_the_device_has_no_room_for_are_refused_with_the_limit() {
    if !in_vm() {
        return;
    }
    let (a, _) = ends(0, 64);
    let limits = a.device.limits();
    let kind = |count, size| a.device.queue_pairs(count, size, 1).unwrap_err().kind();
    assert_eq!(kind(0, SIZE), ErrorKind::InvalidArgument);
    assert_eq!(kind(1, QueueSize { sends: limits.work_requests + 1, ..SIZE }), ErrorKind::LimitReached);
    assert_eq!(kind(1, QueueSize { receives: limits.work_requests + 1, ..SIZE }), ErrorKind::LimitReached);
    let error = a.device.queue_pairs(1_000_000, SIZE, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitReached);
    assert!(error.message().contains(&limits.completions.to_string()), "{error}");
}

#[test]
fn a_link_that_is_cut_is_told_and_after_it_is_mended_there_are_transfers_again() {
    if !in_vm() {
        return;
    }
    let (a, b) = pair(1, 4096);
    let good = a.request(Operation::Write, &b.memory);
    assert_eq!(a.run(good), Status::Success);
    // What happened to the port before.
    while a.device.wait(Some(Duration::ZERO)).unwrap() != Wakeup::TimedOut {}

    ip(&["link", "set", "a1", "down"]);
    assert_eq!(a.device.wait(Some(PATIENCE)).unwrap(), Wakeup::PortChanged(1));
    assert_eq!(a.device.port(1).unwrap().state, PortState::Down);
    assert_ne!(a.run(good), Status::Success);

    ip(&["link", "set", "a1", "up"]);
    let end = Instant::now() + PATIENCE;
    while a.device.port(1).unwrap().state == PortState::Down {
        assert_ne!(a.device.wait(Some(end - Instant::now())).unwrap(), Wakeup::TimedOut);
    }
    // The address may come back a moment after the port.
    let mut outcome = a.queues.connect(0, &a.link(), &b.remote(0));
    while outcome.is_err() {
        assert!(Instant::now() < end, "{outcome:?}");
        outcome = a.queues.connect(0, &a.link(), &b.remote(0));
    }
    b.queues.connect(0, &b.link(), &a.remote(0)).unwrap();
    assert_eq!(a.run(good), Status::Success);

    // An address that comes is a change of the port too.
    while a.device.wait(Some(Duration::ZERO)).unwrap() != Wakeup::TimedOut {}
    let added = Ipv4Addr::new(10, 77, 1, 200);
    let is_added = |device: &dyn Device| {
        let gids = device.gids(1).unwrap();
        gids.iter().any(|entry| entry.gid.0 == added.to_ipv6_mapped().octets())
    };
    assert!(!is_added(&*a.device));
    ip(&["address", "add", "10.77.1.200/32", "dev", "a1"]);
    while !is_added(&*a.device) {
        assert_eq!(a.device.wait(Some(end - Instant::now())).unwrap(), Wakeup::PortChanged(1));
    }
    ip(&["address", "del", "10.77.1.200/32", "dev", "a1"]);
    while is_added(&*a.device) {
        assert_eq!(a.device.wait(Some(end - Instant::now())).unwrap(), Wakeup::PortChanged(1));
    }
}

fn ip(words: &[&str]) {
    let output = Command::new("ip").args(words).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
