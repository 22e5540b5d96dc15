//! Peer processes, near and far.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use posthorse_core::{Deadline, ErrorKind};
use posthorse_testkit::peer::{self, Spawn};
use posthorse_testkit::{namespace, skip};

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// Answers each number with the next one, for ever.
fn count(peer: &peer::Child) {
    while let Ok(number) = peer.receive::<u64>(Deadline::NEVER) {
        peer.send(&(number + 1)).unwrap();
    }
}

/// The state of a process, as the kernel writes it.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

#[test]
fn a_peer_gets_its_arguments_and_answers_until_it_is_left() {
    if let Some(peer) = peer::child() {
        let arguments: (String, u64) = peer.arguments().unwrap();
        peer.send(&arguments.1).unwrap();
        return count(peer);
    }
    let name = "a_peer_gets_its_arguments_and_answers_until_it_is_left";
    let peer = peer::spawn(name, &("x", 5)).unwrap();
    assert_eq!(peer.receive::<u64>(soon()).unwrap(), 5);
    for number in 0..100 {
        peer.send(&number).unwrap();
        assert_eq!(peer.receive::<u64>(soon()).unwrap(), number + 1);
    }
    let pid = peer.pid();
    drop(peer);
    assert_eq!(state(pid), None, "it was killed and waited for");
}

#[test]
fn a_stopped_peer_is_silent_and_a_killed_one_is_gone() {
    if let Some(peer) = peer::child() {
        return count(peer);
    }
    let peer = peer::spawn("a_stopped_peer_is_silent_and_a_killed_one_is_gone", &()).unwrap();
    peer.send(&1).unwrap();
    assert_eq!(peer.receive::<u64>(soon()).unwrap(), 2);

    peer.stop();
    // The signal is on its way: the kernel shows when it has arrived.
    while state(peer.pid()) != Some('T') {
        std::thread::yield_now();
    }
    peer.send(&2).unwrap();
    let silent = peer.receive::<u64>(Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert_eq!(silent.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(peer.wait(Deadline::after(Duration::ZERO)).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    peer.cont();
    assert_eq!(peer.receive::<u64>(soon()).unwrap(), 3);

    peer.kill9();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(peer.wait(soon()).unwrap().signal(), Some(9));
    assert_eq!(peer.receive::<u64>(soon()).unwrap_err().kind(), ErrorKind::PeerGone);
    assert_eq!(peer.finish(soon()).unwrap_err().kind(), ErrorKind::Aborted);
}

#[test]
fn the_failure_of_a_peer_is_seen() {
    if let Some(peer) = peer::child() {
        let _: u64 = peer.receive(Deadline::NEVER).unwrap();
        // Not a panic: what it prints would look like a failure of this test.
        std::process::exit(3);
    }
    let peer = peer::spawn("the_failure_of_a_peer_is_seen", &()).unwrap();
    peer.send(&1).unwrap();
    let failed = peer.finish(soon()).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Aborted);
    assert!(failed.to_string().contains('3'), "{failed}");
}

/// The peer's own peer must not outlive it, however it dies.
#[test]
fn no_peer_outlives_whoever_started_it() {
    const NAME: &str = "no_peer_outlives_whoever_started_it";
    if let Some(peer) = peer::child() {
        // Kept until the end: dropped, it would be ended by that.
        let _inner = peer.arguments::<bool>().unwrap().then(|| {
            let inner = peer::spawn(NAME, &false).unwrap();
            inner.send(&1).unwrap();
            let _: u64 = inner.receive(Deadline::NEVER).unwrap();
            peer.send(&inner.pid()).unwrap();
            inner
        });
        return count(peer);
    }
    let outer = peer::spawn(NAME, &true).unwrap();
    let inner: u32 = outer.receive(soon()).unwrap();
    assert!(state(inner).is_some());
    outer.kill9();
    outer.wait(soon()).unwrap();
    // Dead is enough: whoever adopted it may be slow to reap it.
    while !matches!(state(inner), None | Some('Z' | 'X')) {
        std::thread::yield_now();
    }
}

#[test]
fn an_isolated_test_has_its_process_to_itself() {
    let outside = std::process::id();
    peer::isolated("an_isolated_test_has_its_process_to_itself", || {
        let is_child = peer::child().is_some();
        assert!(is_child);
    });
    // Here and there: in the parent nothing ran, or it would have failed.
    assert!(outside > 0);
}

#[test]
fn a_separated_peer_shares_nothing_and_is_reached_by_cable() {
    const NAME: &str = "a_separated_peer_shares_nothing_and_is_reached_by_cable";
    if let Some(peer) = peer::child() {
        let hidden: String = peer.arguments().unwrap();
        namespace::loopback_up().unwrap();
        namespace::hide(Path::new(&hidden)).unwrap();
        let seen = Path::new(&hidden).join("file").exists();
        peer.send(&(std::process::id(), seen)).unwrap();
        // One listens, the other calls.
        match peer.receive::<Option<IpAddr>>(Deadline::NEVER).unwrap() {
            None => {
                let listener = TcpListener::bind("[::]:0").unwrap();
                peer.send(&listener.local_addr().unwrap().port()).unwrap();
                for _ in 0..2 {
                    listener.accept().unwrap();
                }
                peer.send(&"done").unwrap();
            }
            Some(first) => {
                let port: u16 = peer.receive(Deadline::NEVER).unwrap();
                let second: IpAddr = peer.receive(Deadline::NEVER).unwrap();
                for address in [first, second] {
                    TcpStream::connect((address, port)).unwrap();
                }
                peer.send(&"done").unwrap();
            }
        }
        return;
    }
    if let Err(missing) = namespace::link_available() {
        return skip("network-namespaces", &missing.to_string());
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "x").unwrap();
    let start = || Spawn::new(NAME).arguments(&folder.path().to_str().unwrap()).separated().spawn().unwrap();
    let (listener, caller) = (start(), start());
    for peer in [&listener, &caller] {
        let (pid, seen) = peer.receive::<(u32, bool)>(soon()).unwrap();
        assert_eq!(pid, 1, "it is the first of its pid namespace");
        assert!(!seen, "what is hidden is seen");
        assert_ne!(peer.pid(), 1);
    }
    assert!(folder.path().join("file").exists(), "it is hidden there and not here");

    let (there, _) = namespace::link(&listener, &caller).unwrap();
    listener.send(&None::<IpAddr>).unwrap();
    let port: u16 = listener.receive(soon()).unwrap();
    caller.send(&Some(there.v4)).unwrap();
    caller.send(&port).unwrap();
    caller.send(&there.v6).unwrap();
    for peer in [&caller, &listener] {
        assert_eq!(peer.receive::<String>(soon()).unwrap(), "done");
        peer.finish(soon()).unwrap();
    }
}

#[test]
fn a_separated_peer_is_killed_with_what_stands_for_it() {
    const NAME: &str = "a_separated_peer_is_killed_with_what_stands_for_it";
    if let Some(peer) = peer::child() {
        peer.send(&()).unwrap();
        return count(peer);
    }
    if let Err(missing) = namespace::available() {
        return skip("namespaces", &missing.to_string());
    }
    let start = || {
        let peer = Spawn::new(NAME).separated().spawn().unwrap();
        peer.receive::<()>(soon()).unwrap();
        peer
    };
    let peer = start();
    let inner = peer.pid();
    drop(peer);
    while !matches!(state(inner), None | Some('Z' | 'X')) {
        std::thread::yield_now();
    }
    let peer = start();
    peer.kill9();
    assert!(!peer.wait(soon()).unwrap().success());
}
