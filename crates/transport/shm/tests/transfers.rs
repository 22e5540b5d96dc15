//! Two transports in one process: what is moved, what is refused, what ends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{Node, config, pattern, slice, soon};
use posthorse_core::{
    Access, Attributes, Checksum, Deadline, DeviceEvent, DeviceView, ErrorKind, FarEnd, Grant, GrantDesc,
    GrantToken, HostView, Level, Location, Opcode, PathState, Region, RegionId, RegisteredRegion, Slice,
    Transport, View,
};
use posthorse_memory::ForeignMemory;
use posthorse_shm::ShmConfig;

#[test]
fn bytes_arrive_exactly_and_nothing_around_them_changes() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let path = a.connect(&b);
    const ROOM: usize = 10 << 20;
    for region in [b.shared(ROOM), b.private(ROOM)] {
        let grant = b.grant_all(&region, Access::ReadWrite);
        for (n, len) in
            [1, 7, 64, 4095, 4097, 65_536, 1 << 20, (1 << 20) + 1, 9_000_001].into_iter().enumerate()
        {
            let offset = 3 + n;
            let before = region.bytes();
            let source = pattern(len, n as u64);
            for checksum in [Checksum::Off, Checksum::Full] {
                let write = slice(1, Opcode::Write, HostView::of(&source), &grant, offset as u64);
                assert_eq!(a.run(path, Slice { checksum, ..write }).unwrap(), Level::Visible);
            }
            let after = region.bytes();
            assert!(after[offset..offset + len] == source[..], "{len}");
            assert!(after[..offset] == before[..offset] && after[offset + len..] == before[offset + len..]);
            let mut back = vec![0; len + 2];
            let middle = HostView::of_mut(&mut back).slice(1, len).unwrap();
            let read = slice(2, Opcode::Read, middle, &grant, offset as u64);
            a.run(path, Slice { checksum: Checksum::Sampled, ..read }).unwrap();
            assert!(back[1..=len] == source[..] && back[0] == 0 && back[len + 1] == 0);
        }
    }
}

#[test]
fn what_no_grant_allows_is_refused_and_touches_nothing() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let path = a.connect(&b);
    for region in [b.shared(8192), b.private(8192)] {
        let write = b.grant(&region, 1024, 1024, Access::Write, None);
        let read = b.grant(&region, 1024, 1024, Access::Read, None);
        let theirs = b.grant(&region, 0, 8192, Access::ReadWrite, Some("c:1"));
        let ours = b.grant(&region, 0, 8192, Access::ReadWrite, Some("a:1"));
        let revoked = b.grant(&region, 0, 8192, Access::ReadWrite, None);
        b.transport.revoke(revoked.token, soon()).unwrap();
        let mut bytes = vec![9_u8; 2048];
        let local = HostView::of_mut(&mut bytes);
        let part = |len| local.slice(0, len).unwrap();
        let ok = slice(1, Opcode::Write, part(64), &write, 0);
        let device = View::Device(DeviceView { device: Location::Cuda(0), address: 64, len: 64 });
        let wrong_secret = GrantToken { secret: write.token.secret ^ 1, ..write.token };
        let wrong_handle = GrantToken { handle: write.token.handle | 1 << 32, ..write.token };
        use ErrorKind::{AccessDenied, OutOfBounds, Unsupported};
        for (what, expected) in [
            (slice(1, Opcode::Write, part(64), &read, 0), AccessDenied),
            (slice(1, Opcode::Read, part(64), &write, 0), AccessDenied),
            (slice(1, Opcode::Write, part(64), &theirs, 0), AccessDenied),
            (slice(1, Opcode::Write, part(64), &revoked, 0), AccessDenied),
            (Slice { grant: None, ..ok }, AccessDenied),
            (Slice { grant: Some(wrong_secret), ..ok }, AccessDenied),
            (Slice { grant: Some(wrong_handle), ..ok }, AccessDenied),
            (slice(1, Opcode::Write, part(1025), &write, 0), OutOfBounds),
            (slice(1, Opcode::Write, part(64), &write, 961), OutOfBounds),
            (Slice { remote_address: write.address - 1, ..ok }, OutOfBounds),
            (Slice { remote_address: u64::MAX - 8, ..ok }, OutOfBounds),
            (Slice { local: device, ..ok }, Unsupported),
            (Slice { ready: Some(DeviceEvent(1)), ..ok }, Unsupported),
        ] {
            a.submit(path, &[what]).unwrap();
            let failed = a.events.completion(1).result.unwrap_err();
            assert_eq!(failed.error.kind(), expected, "{what:?}: {}", failed.error);
            assert_eq!(failed.far_end, FarEnd::Quiet);
        }
        assert!(region.bytes().iter().all(|&byte| byte == 0));
        a.run(path, ok).unwrap();
        a.run(path, slice(1, Opcode::Write, part(64), &ours, 100)).unwrap();
        assert_eq!(region.bytes().iter().filter(|&&byte| byte == 9).count(), 128);
    }
}

#[test]
fn a_read_only_region_is_not_mapped_writable_until_a_grant_says_so() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let path = a.connect(&b);
    let region = b.shared(4096);
    let read = b.grant_all(&region, Access::Read);
    let mut bytes = [1_u8; 64];
    let local = HostView::of_mut(&mut bytes);
    a.run(path, slice(1, Opcode::Read, local, &read, 0)).unwrap();
    let write = b.grant_all(&region, Access::Write);
    a.run(path, slice(1, Opcode::Write, local, &write, 8)).unwrap();
    a.run(path, slice(1, Opcode::Read, local, &read, 0)).unwrap();
}

#[test]
fn what_is_not_writable_is_not_offered_for_writing() {
    let a = Node::new("a:1");
    let region: Arc<dyn Region> = Arc::new(ForeignMemory::shared(pattern(64, 1).into()));
    let register = |access| {
        let registered = RegisteredRegion { id: RegionId(1000), region: Arc::clone(&region), access };
        a.transport.register(&registered)
    };
    assert_eq!(register(Access::ReadWrite).unwrap_err().kind(), ErrorKind::InvalidArgument);
    register(Access::Read).unwrap();
    let grant = |access| {
        let token = GrantToken { handle: 1, secret: 2 };
        let (region, address) = (RegionId(1000), region.view().address());
        let desc = GrantDesc { region, address, len: 64, access, token, attributes: Attributes::new() };
        a.transport.grant(&Grant { desc: &desc, peer: None })
    };
    assert_eq!(grant(Access::Write).unwrap_err().kind(), ErrorKind::InvalidArgument);
    grant(Access::Read).unwrap();
}

#[test]
fn who_waits_helps_and_every_byte_is_copied_once() {
    const LEN: usize = 64 << 20;
    let a = Node::with("a:1", ShmConfig { copy_threads: 1, spin_us: 0, ..config() }, None);
    let b = Node::new("b:1");
    let path = a.connect(&b);
    let region = b.shared(LEN);
    let grant = b.grant_all(&region, Access::ReadWrite);
    assert!(!a.transport.help(), "nothing waits");
    // The thread may have copied all of it before ours is scheduled: tried until ours is in time.
    let deadline = soon();
    let mut helped = 0;
    for round in 0.. {
        let source = pattern(LEN, round);
        a.submit(path, &[slice(round, Opcode::Write, HostView::of(&source), &grant, 0)]).unwrap();
        while a.transport.help() {
            helped += 1;
        }
        a.events.completion(round).result.unwrap();
        assert!(region.bytes() == source, "round {round}");
        if helped > 0 {
            break;
        }
        assert!(!deadline.is_past(std::time::Instant::now()), "help never found a piece to copy");
    }
    assert!(!a.transport.help(), "nothing is left");
}

#[test]
fn a_full_queue_pushes_back_and_every_slice_ends_once() {
    let a = Node::with(
        "a:1",
        ShmConfig { queue_slices: 8, inline_bytes: 100, copy_threads: 1, ..config() },
        None,
    );
    let b = Node::new("b:1");
    let path = a.connect(&b);
    let region = b.shared(200 * 1000);
    let grant = b.grant_all(&region, Access::Write);
    let source = pattern(200 * 1000, 5);
    let part = |n: usize| HostView::of(&source).slice(n * 1000, 1000).unwrap();
    let slices: Vec<Slice> =
        (0..200).map(|n| slice(n as u64, Opcode::Write, part(n), &grant, n as u64 * 1000)).collect();
    // SAFETY: `source` is alive until the completions below.
    let taken = unsafe { a.transport.submit(path, &slices) }.unwrap();
    assert!(taken < 200, "the queue holds 8 slices");
    a.events.wait(|seen| seen.writable.pop());
    a.submit(path, &slices[taken..]).unwrap();
    let mut tokens = a.events.wait(|seen| (seen.completions.len() == 200).then(|| seen.completions.clone()));
    tokens.sort_by_key(|done| done.token);
    assert!(tokens.iter().enumerate().all(|(n, done)| done.token == n as u64 && done.result.is_ok()));
    assert!(region.bytes() == source);
}

#[test]
fn nothing_changes_after_a_grant_was_revoked_under_traffic() {
    let (a, b) = (Arc::new(Node::new("a:1")), Node::new("b:1"));
    let path = a.connect(&b);
    const LEN: usize = 3 << 20;
    for region in [b.shared(LEN), b.private(LEN)] {
        for inline in [true, false] {
            let grant = b.grant_all(&region, Access::Write);
            let len = if inline { 4096 } else { LEN };
            let started = Arc::new(AtomicBool::new(false));
            let writer = thread::spawn({
                let (a, grant, started) = (Arc::clone(&a), grant.clone(), Arc::clone(&started));
                move || {
                    let source = vec![1_u8; len];
                    let write = slice(1, Opcode::Write, HostView::of(&source), &grant, 0);
                    let mut times = 0;
                    while a.run(path, write).is_ok() {
                        started.store(true, Ordering::Release);
                        times += 1;
                    }
                    times
                }
            });
            while !started.load(Ordering::Acquire) {
                thread::yield_now();
            }
            b.transport.revoke(grant.token, soon()).unwrap();
            let zeros = vec![0_u8; LEN];
            region.fill(&zeros);
            assert!(writer.join().unwrap() > 0);
            assert!(region.bytes() == zeros, "a write came after the revoke");
        }
    }
}

#[test]
fn unregistering_under_traffic_ends_it_and_lets_the_mapping_go() {
    let (a, b) = (Arc::new(Node::new("a:1")), Node::new("b:1"));
    let path = a.connect(&b);
    let region = b.shared(1 << 20);
    let grant = b.grant_all(&region, Access::Write);
    let writer = thread::spawn({
        let (a, grant) = (Arc::clone(&a), grant.clone());
        move || {
            let source = vec![1_u8; 1 << 20];
            loop {
                if let Err(error) = a.run(path, slice(1, Opcode::Write, HostView::of(&source), &grant, 0)) {
                    return error.kind();
                }
            }
        }
    });
    b.transport.unregister(region.id, soon()).unwrap();
    b.transport.unregister(region.id, soon()).unwrap();
    let kind = writer.join().unwrap();
    assert!([ErrorKind::AccessDenied, ErrorKind::NotRegistered].contains(&kind), "{kind}");
    let bytes = [0_u8; 8];
    let error = a.run(path, slice(1, Opcode::Write, HostView::of(&bytes), &grant, 0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
}

#[test]
fn cancel_drops_what_is_not_copied_yet() {
    let a = Node::with("a:1", ShmConfig { inline_bytes: 0, copy_threads: 1, ..config() }, None);
    let b = Node::new("b:1");
    let path = a.connect(&b);
    const LEN: usize = 64 << 20;
    let region = b.shared(LEN);
    let grant = b.grant_all(&region, Access::Write);
    let source = vec![1_u8; LEN];
    let slices: Vec<Slice> =
        (0..20).map(|n| slice(n, Opcode::Write, HostView::of(&source), &grant, 0)).collect();
    a.submit(path, &slices).unwrap();
    a.transport.cancel(path, &mut |token| token != 0);
    for token in 1..20 {
        let result = a.events.completion(token).result;
        assert_eq!(result.unwrap_err().error.kind(), ErrorKind::Cancelled);
    }
    a.events.completion(0).result.unwrap();
}

#[test]
fn a_fenced_path_ends_everything_and_is_down() {
    let a = Node::with("a:1", ShmConfig { inline_bytes: 0, ..config() }, None);
    let b = Node::new("b:1");
    let path = a.connect(&b);
    const LEN: usize = 16 << 20;
    let region = b.shared(LEN);
    let grant = b.grant_all(&region, Access::Write);
    let source = vec![1_u8; LEN];
    let slices: Vec<Slice> =
        (0..50).map(|n| slice(n, Opcode::Write, HostView::of(&source), &grant, 0)).collect();
    a.submit(path, &slices).unwrap();
    a.transport.fence(path);
    assert_eq!(a.events.completed(), 50, "every slice has ended");
    region.fill(&[0; 64]);
    assert_eq!(region.bytes()[..64], [0; 64]);
    a.events.wait(|seen| {
        let ended = |done: &posthorse_core::Completion| {
            done.result.as_ref().err().is_none_or(|failed| failed.error.kind() == ErrorKind::Flushed)
        };
        assert!(seen.completions.iter().all(ended));
        Some(())
    });
    assert_eq!(a.submit(path, &slices[..1]).unwrap_err().kind(), ErrorKind::PathFailed);
    let again = a.connect(&b);
    a.run(again, slice(99, Opcode::Write, HostView::of(&source), &grant, 0)).unwrap();
}

#[test]
fn stopping_ends_every_slice_and_tells_the_peers() {
    let a = Node::with("a:1", ShmConfig { inline_bytes: 0, ..config() }, None);
    let b = Node::new("b:1");
    let (path, back) = (a.connect(&b), b.connect(&a));
    let region = b.shared(16 << 20);
    let grant = b.grant_all(&region, Access::Write);
    let source = vec![1_u8; 16 << 20];
    let slices: Vec<Slice> =
        (0..20).map(|n| slice(n, Opcode::Write, HostView::of(&source), &grant, 0)).collect();
    a.submit(path, &slices).unwrap();
    a.transport.stop();
    assert_eq!(a.events.completed(), 20);
    let (down, error) = b.events.wait(|seen| seen.down.pop());
    assert_eq!((down, error.kind(), error.peer()), (back, ErrorKind::PeerGone, Some("a:1")));
    a.transport.stop();
    assert_eq!(a.transport.connect(&b.desc, soon()).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(b.refusal(&a.desc).kind(), ErrorKind::PeerUnreachable);
}

#[test]
fn each_notification_that_was_taken_while_its_path_was_fenced_has_an_end() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let next = AtomicU64::new(1);
    for round in 0..400 {
        let path = a.connect(&b);
        let first = next.load(Ordering::Relaxed);
        let notify = || {
            let mut taken = Vec::new();
            loop {
                let token = next.fetch_add(1, Ordering::Relaxed);
                match a.transport.notify(path, token, b"x") {
                    Ok(()) => taken.push(token),
                    Err(error) if error.kind() == ErrorKind::QueueFull => {}
                    Err(_) => return taken,
                }
            }
        };
        let taken = thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(notify));
            while next.load(Ordering::Relaxed) < first + 10 + round % 200 {
                thread::yield_now();
            }
            a.transport.fence(path);
            threads.map(|thread| thread.join().unwrap()).concat()
        });
        a.events.wait(|seen| {
            let ended: HashSet<u64> = seen.completions.iter().map(|done| done.token).collect();
            taken.iter().all(|token| ended.contains(token)).then_some(())
        });
        a.events.forget();
    }
}

#[test]
fn notifications_arrive_once_in_order_or_are_refused_with_a_reason() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let path = a.connect(&b);
    for n in 0..500_u64 {
        a.transport.notify(path, n, &n.to_le_bytes()).unwrap();
        if n % 50 == 49 {
            a.events.completion(n).result.unwrap();
        }
    }
    let got = b.events.wait(|seen| (seen.notifications.len() == 500).then(|| seen.notifications.clone()));
    let in_order = |(n, (peer, data)): (usize, &(String, Vec<u8>))| {
        peer == "a:1" && data[..] == (n as u64).to_le_bytes()
    };
    assert!(got.iter().enumerate().all(in_order));
    a.transport.notify(path, 1000, &vec![7; 64 << 10]).unwrap();
    a.events.completion(1000).result.unwrap();
    let error = a.transport.notify(path, 1001, &vec![7; (64 << 10) + 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    b.events.refuse_notifications();
    a.transport.notify(path, 1002, b"x").unwrap();
    let refused = a.events.completion(1002).result.unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::QueueFull);
    assert!(refused.error.to_string().contains("nobody fetches them"));
}

#[test]
fn each_refused_rendezvous_says_why() {
    let a = Node::with("a:1", config(), Some("ours"));
    let b = Node::with("b:1", config(), Some("theirs"));
    let error = a.refusal(&b.desc);
    assert_eq!(error.kind(), ErrorKind::FingerprintMismatch);

    let apart = Node::with("c:1", ShmConfig { host_id: Some("two".into()), ..config() }, None);
    let error = a.refusal(&apart.desc);
    assert_eq!(error.kind(), ErrorKind::PeerRefused);
    assert!(
        error.to_string().contains("\"two\"") && error.to_string().contains("POSTHORSE_HOST_ID"),
        "{error}"
    );

    let mut desc = Node::new("d:1").desc.clone();
    let error = a.refusal(&desc);
    assert_eq!(error.kind(), ErrorKind::PeerUnreachable);
    assert!(error.to_string().contains("namespace"), "{error}");

    let d = Node::new("d:1");
    desc = d.desc.clone();
    desc.transports.get_mut("shm").unwrap()["nonce"] = "00".into();
    assert_eq!(a.refusal(&desc).kind(), ErrorKind::PeerRefused);
    desc = d.desc.clone();
    desc.incarnation = Some(posthorse_core::Incarnation(1));
    assert_eq!(a.refusal(&desc).kind(), ErrorKind::PeerRestarted);
    desc.transports.clear();
    assert_eq!(a.transport.connect(&desc, soon()).unwrap_err().kind(), ErrorKind::Unsupported);
    desc.transports.insert("shm".into(), 3.into());
    assert_eq!(a.transport.connect(&desc, soon()).unwrap_err().kind(), ErrorKind::Malformed);
    a.connect(&d);
}

#[test]
fn memory_without_a_file_says_why_it_cannot_be_reached() {
    let a = Node::with("a:1", ShmConfig { process_vm: false, ..config() }, None);
    let b = Node::new("b:1");
    let path = a.connect(&b);
    let region = b.private(4096);
    let grant = b.grant_all(&region, Access::ReadWrite);
    let bytes = [0_u8; 8];
    let error = a.run(path, slice(1, Opcode::Write, HostView::of(&bytes), &grant, 0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("turned off"), "{error}");
}

#[test]
fn a_lease_is_read_in_place_and_holds_the_grant() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let path = a.connect(&b);
    let region = b.shared(1 << 20);
    region.fill(&pattern(1 << 20, 3));
    let grant = b.grant(&region, 100, 5000, Access::Read, None);
    let lease = a.transport.lease(path, &grant).unwrap();
    assert!(!lease.writable());
    let view = lease.view().host().unwrap();
    // SAFETY: the lease holds the memory, and nobody writes to it now.
    assert!(unsafe { view.bytes() } == &region.bytes()[100..5100]);

    let error = b.transport.revoke(grant.token, Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(
        a.transport.lease(path, &grant).unwrap_err().kind(),
        ErrorKind::AccessDenied,
        "no more of them"
    );
    // Neither does the end of the path take it away.
    a.transport.disconnect(path);
    let error = b.transport.unregister(region.id, Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    // SAFETY: as above.
    assert_eq!(unsafe { view.bytes() }.len(), 5000);
    drop(lease);
    b.transport.revoke(grant.token, soon()).unwrap();
    b.transport.unregister(region.id, soon()).unwrap();
}

#[test]
fn a_lease_needs_a_readable_grant_and_a_file() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let path = a.connect(&b);
    let region = b.shared(4096);
    let write = b.grant_all(&region, Access::Write);
    assert_eq!(a.transport.lease(path, &write).unwrap_err().kind(), ErrorKind::AccessDenied);
    let private = b.private(4096);
    let read = b.grant_all(&private, Access::Read);
    assert_eq!(a.transport.lease(path, &read).unwrap_err().kind(), ErrorKind::Unsupported);
    // Neither refusal holds the grant.
    b.transport.revoke(write.token, soon()).unwrap();
    b.transport.revoke(read.token, soon()).unwrap();
}

#[test]
fn ten_thousand_grants_come_and_go() {
    let b = Node::with("b:1", ShmConfig { max_grants: 20_004, ..config() }, None);
    let a = Node::new("a:1");
    let path = a.connect(&b);
    let region = b.shared(4096);
    let bytes = [7_u8; 8];
    for n in 0..10_000 {
        let grant = b.grant_all(&region, Access::Write);
        if n % 100 == 0 {
            a.run(path, slice(1, Opcode::Write, HostView::of(&bytes), &grant, 0)).unwrap();
        }
        b.transport.revoke(grant.token, soon()).unwrap();
        b.transport.revoke(grant.token, soon()).unwrap();
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn shared_mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:posthorse")).count()
}

/// In a process of its own, since other tests open files meanwhile.
#[test]
fn connections_leave_neither_files_nor_mappings_behind() {
    const ALONE: &str = "POSTHORSE_SHM_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "connections_leave_neither_files_nor_mappings_behind", "--nocapture"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
        return;
    }
    let before = (open_files(), shared_mappings());
    {
        let (a, b) = (Node::new("a:1"), Node::new("b:1"));
        let region = b.shared(1 << 20);
        let grant = b.grant_all(&region, Access::ReadWrite);
        let bytes = [7_u8; 8];
        let mut settled = None;
        for _ in 0..50 {
            let path = a.connect(&b);
            a.run(path, slice(1, Opcode::Write, HostView::of(&bytes), &grant, 0)).unwrap();
            drop(a.transport.lease(path, &grant).unwrap());
            a.transport.disconnect(path);
            // The owner hears of it on its own thread: a grant's end shows that it has.
            settled.get_or_insert_with(|| (open_files(), shared_mappings()));
        }
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while (open_files(), shared_mappings()) > settled.unwrap() {
            assert!(
                std::time::Instant::now() < deadline,
                "{:?} {:?}",
                (open_files(), shared_mappings()),
                settled
            );
            thread::yield_now();
        }
        assert!(matches!(a.try_connect(&b.desc).1, PathState::Up));
    }
    assert_eq!((open_files(), shared_mappings()), before);
}

#[test]
fn many_threads_share_a_path() {
    let (a, b) = (Arc::new(Node::new("a:1")), Node::new("b:1"));
    let path = a.connect(&b);
    const EACH: usize = 300_000;
    let region = b.shared(16 * EACH);
    let grant = b.grant_all(&region, Access::ReadWrite);
    thread::scope(|scope| {
        for thread in 0..16_usize {
            let (a, grant) = (&a, &grant);
            scope.spawn(move || {
                for round in 0..20_usize {
                    let len = 1 + (round * 7919 * (thread + 1)) % EACH;
                    let source = pattern(len, (thread * 100 + round) as u64);
                    let mut back = vec![0; len];
                    let at = (thread * EACH) as u64;
                    let token = (thread * 2) as u64;
                    let write = slice(token, Opcode::Write, HostView::of(&source), grant, at);
                    a.run(path, Slice { checksum: Checksum::Full, ..write }).unwrap();
                    a.run(path, slice(token + 1, Opcode::Read, HostView::of_mut(&mut back), grant, at))
                        .unwrap();
                    assert!(back == source);
                }
            });
        }
    });
}

#[test]
fn a_forked_child_gets_an_error_and_the_parent_is_unharmed() {
    let (a, b) = (Node::new("a:1"), Node::new("b:1"));
    let path = a.connect(&b);
    let region = b.shared(4096);
    let grant = b.grant_all(&region, Access::Write);
    let bytes = [7_u8; 8];
    let write = slice(1, Opcode::Write, HostView::of(&bytes), &grant, 0);
    a.run(path, write).unwrap();
    let child = || {
        // SAFETY: `bytes` is alive.
        let submit = unsafe { a.transport.submit(path, &[write]) };
        let errors = [
            submit.err(),
            a.transport.notify(path, 1, b"x").err(),
            b.transport.revoke(grant.token, Deadline::NEVER).err(),
            a.transport.connect(&b.desc, Deadline::NEVER).err(),
            a.transport.lease(path, &grant).err(),
        ];
        a.transport.fence(path);
        a.transport.disconnect(path);
        errors.iter().all(|error| error.as_ref().is_some_and(|e| e.kind() == ErrorKind::Forked))
    };
    // SAFETY: the transport answers with an error before it takes any lock.
    unsafe { posthorse_testkit::assert_in_forked_child(child) };
    a.run(path, write).unwrap();
}
