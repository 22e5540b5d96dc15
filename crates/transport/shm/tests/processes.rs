//! Two processes: killed, stopped, of another user, in other namespaces.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::{Node, config, from_json, pattern, slice, soon, to_json};
use posthorse_core::{
    Access, Deadline, ErrorKind, GrantDesc, HostView, Opcode, PathId, PathState, Transport,
};
use posthorse_shm::ShmConfig;
use posthorse_testkit::skip;
use serde_json::{Value, json};

const ROLE: &str = "POSTHORSE_SHM_TEST_CHILD";
/// What the child says begins with this; the test harness prints other lines.
const MARK: char = '@';

/// A process that obeys line by line; killed on drop.
struct Peer {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts one, behind `wrapper` if there is one, with this configuration.
    fn start(wrapper: &[&str], options: &Value) -> Self {
        let this = std::env::current_exe().unwrap();
        let mut words: Vec<_> = wrapper.iter().map(Into::into).collect();
        words.push(this.into_os_string());
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .args(["--exact", "child_main", "--nocapture"])
            .env(ROLE, options.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn plain() -> Self {
        Self::start(&[], &json!({}))
    }

    fn tell(&mut self, command: &Value) {
        writeln!(self.input, "{command}").unwrap();
    }

    fn hear(&mut self) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the child has ended");
            // The harness prints the test's name on the same line as the first answer.
            if let Some(at) = line.find(MARK) {
                return serde_json::from_str(&line[at + 1..]).unwrap();
            }
        }
    }

    fn ask(&mut self, command: &Value) -> Value {
        self.tell(command);
        self.hear()
    }

    fn connect(&mut self, node: &Node) -> Value {
        self.connect_to(&to_json(&node.desc))
    }

    fn connect_to(&mut self, desc: &Value) -> Value {
        self.ask(&json!({ "do": "connect", "peer": desc }))
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a plain system call on a child that is not reaped yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
        if signal == libc::SIGSTOP {
            let mut status = 0;
            // Its threads stop one by one; this returns when all have.
            // SAFETY: `status` outlives the call.
            unsafe { libc::waitpid(self.child.id() as libc::pid_t, &raw mut status, libc::WUNTRACED) };
            assert!(libc::WIFSTOPPED(status));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(value: &Value) {
    println!("{MARK}{value}");
}

fn state_of(state: &PathState) -> Value {
    match state {
        PathState::Up => json!("up"),
        PathState::Down(error) => json!({ "kind": error.kind().name(), "text": error.to_string() }),
    }
}

/// Not a test: what the child does.
#[test]
fn child_main() {
    let Some(options) = std::env::var_os(ROLE) else { return };
    let options: Value = serde_json::from_str(options.to_str().unwrap()).unwrap();
    if let Some(uid) = options["uid"].as_u64() {
        // SAFETY: plain system calls on our own credentials.
        let done = unsafe { libc::setgid(uid as u32) == 0 && libc::setuid(uid as u32) == 0 };
        assert!(done, "setuid");
    }
    // SAFETY: as above: this process ends with its parent.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let folder = options["folder"].as_str().map(Into::into);
    let liveness_ms = options["liveness_ms"].as_u64().unwrap_or_else(|| config().liveness_ms);
    // Large pieces, so that it can be stopped in the midst of one.
    let config = ShmConfig { folder, liveness_ms, piece_bytes: 64 << 20, ..config() };
    let node = Arc::new(Node::with("child:1", config, None));
    let mut path = PathId(0);
    let mut leases = Vec::new();
    let mut regions = Vec::new();
    for line in std::io::stdin().lines() {
        let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let grant = || -> GrantDesc { serde_json::from_value(command["grant"].clone()).unwrap() };
        match command["do"].as_str().unwrap() {
            "connect" => {
                let (id, state) = node.try_connect(&from_json(&command["peer"]));
                path = id;
                say(&state_of(&state));
            }
            "write" => {
                let bytes = pattern(grant().len as usize, command["seed"].as_u64().unwrap());
                let result = node.run(path, slice(1, Opcode::Write, HostView::of(&bytes), &grant(), 0));
                say(&result.map_or_else(|error| json!(error.kind().name()), |_| json!("done")));
            }
            "write forever" => {
                let (node, grant) = (Arc::clone(&node), grant());
                std::thread::spawn(move || {
                    let both = [1_u8, 2].map(|value| vec![value; grant.len as usize]);
                    let [one, other] =
                        both.each_ref().map(|bytes| slice(1, Opcode::Write, HostView::of(bytes), &grant, 0));
                    node.run(path, other).unwrap();
                    say(&json!("begun"));
                    while node.run(path, one).is_ok() && node.run(path, other).is_ok() {}
                    say(&json!("ended"));
                });
            }
            "lease" => match node.transport.lease(path, &grant()) {
                Ok(lease) => {
                    say(&json!(lease.view().len()));
                    leases.push(lease);
                }
                Err(error) => say(&json!(error.kind().name())),
            },
            "serve" => {
                let region = node.shared(command["len"].as_u64().unwrap() as usize);
                let grant = node.grant_all(&region, Access::ReadWrite);
                say(&json!({ "peer": to_json(&node.desc), "grant": grant }));
                regions.push(region);
            }
            other => panic!("{other}"),
        }
    }
}

fn node_with_region(len: usize) -> (Node, common::Registered) {
    let node = Node::new("parent:1");
    let region = node.shared(len);
    (node, region)
}

#[test]
fn a_write_of_another_process_arrives() {
    let node = Node::new("parent:1");
    let mut peer = Peer::plain();
    assert_eq!(peer.connect(&node), "up");
    for region in [node.shared(3 << 20), node.private(3 << 20)] {
        let grant = node.grant_all(&region, Access::Write);
        assert_eq!(peer.ask(&json!({ "do": "write", "grant": grant, "seed": 5 })), "done");
        assert!(region.bytes() == pattern(3 << 20, 5));
        node.transport.revoke(grant.token, soon()).unwrap();
        assert_eq!(peer.ask(&json!({ "do": "write", "grant": grant, "seed": 6 })), "AccessDenied");
        assert!(region.bytes() == pattern(3 << 20, 5));
    }
}

#[test]
fn a_writer_that_is_killed_in_a_copy_leaves_the_memory_quiet() {
    let (node, region) = node_with_region(32 << 20);
    let grant = node.grant_all(&region, Access::Write);
    let mut peer = Peer::plain();
    assert_eq!(peer.connect(&node), "up");
    peer.tell(&json!({ "do": "write forever", "grant": grant }));
    assert_eq!(peer.hear(), "begun");
    peer.child.kill().unwrap();
    node.transport.revoke(grant.token, soon()).unwrap();
    region.fill(&vec![0; 32 << 20]);
    assert!(region.bytes().iter().all(|&byte| byte == 0));
    // The next peer is served.
    let grant = node.grant_all(&region, Access::Write);
    let mut next = Peer::plain();
    assert_eq!(next.connect(&node), "up");
    assert_eq!(next.ask(&json!({ "do": "write", "grant": grant, "seed": 1 })), "done");
}

#[test]
fn a_writer_that_is_stopped_in_a_copy_keeps_the_grant_until_it_goes_on_or_dies() {
    let (node, region) = node_with_region(64 << 20);
    for ends_by in [libc::SIGCONT, libc::SIGKILL] {
        let mut peer = Peer::plain();
        assert_eq!(peer.connect(&node), "up");
        let mut held = None;
        // Between two copies it holds nothing: then another try.
        for _ in 0..20 {
            let grant = node.grant_all(&region, Access::Write);
            peer.tell(&json!({ "do": "write forever", "grant": grant }));
            assert_eq!(peer.hear(), "begun");
            // A piece has just been begun.
            region.await_change();
            peer.signal(libc::SIGSTOP);
            let revoked = node.transport.revoke(grant.token, Deadline::after(Duration::from_millis(200)));
            if let Err(error) = revoked {
                assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
                held = Some(grant);
                break;
            }
            peer.signal(libc::SIGCONT);
            assert_eq!(peer.hear(), "ended");
        }
        let grant = held.expect("it was never stopped inside of a copy");
        let error =
            node.transport.revoke(grant.token, Deadline::after(Duration::from_millis(50))).unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::DeadlineExceeded,
            "it can be asked again, and the answer is the same"
        );
        peer.signal(ends_by);
        node.transport.revoke(grant.token, soon()).unwrap();
        region.fill(&[0; 4096]);
        assert!(region.bytes()[..4096].iter().all(|&byte| byte == 0));
    }
}

#[test]
fn an_owner_that_dies_ends_the_path_and_its_slices() {
    let node = Node::with("parent:1", ShmConfig { inline_bytes: 0, ..config() }, None);
    let mut peer = Peer::plain();
    let served = peer.ask(&json!({ "do": "serve", "len": 64 << 20 }));
    let grant: GrantDesc = serde_json::from_value(served["grant"].clone()).unwrap();
    let (path, state) = node.try_connect(&from_json(&served["peer"]));
    assert!(matches!(state, PathState::Up), "{state:?}");
    let lease = node.transport.lease(path, &grant).unwrap();
    let bytes = vec![1_u8; 64 << 20];
    let slices: Vec<_> = (0..100).map(|n| slice(n, Opcode::Write, HostView::of(&bytes), &grant, 0)).collect();
    node.submit(path, &slices).unwrap();
    peer.child.kill().unwrap();
    let (down, error) = node.events.wait(|seen| seen.down.pop());
    assert_eq!((down, error.kind(), error.peer()), (path, ErrorKind::PeerGone, Some("child:1")));
    let done = node.events.wait(|seen| (seen.completions.len() == 100).then(|| seen.completions.clone()));
    let kinds = done.iter().filter_map(|done| done.result.as_ref().err().map(|failed| failed.error.kind()));
    assert!(kinds.clone().all(|kind| kind == ErrorKind::PeerGone));
    assert!(kinds.count() > 0);
    assert_eq!(node.submit(path, &slices[..1]).unwrap_err().kind(), ErrorKind::PathFailed);
    // What was lent can still be read.
    // SAFETY: nobody writes to it any more.
    assert_eq!(unsafe { lease.view().host().unwrap().bytes() }.len(), 64 << 20);
}

#[test]
fn a_lease_ends_with_its_holder() {
    let (node, region) = node_with_region(1 << 20);
    let grant = node.grant_all(&region, Access::Read);
    let mut peer = Peer::plain();
    assert_eq!(peer.connect(&node), "up");
    assert_eq!(peer.ask(&json!({ "do": "lease", "grant": grant })), 1 << 20);
    let error = node.transport.revoke(grant.token, Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    peer.child.kill().unwrap();
    node.transport.revoke(grant.token, soon()).unwrap();
}

#[test]
fn a_lease_blames_no_owner_that_answered_while_this_process_was_stopped() {
    const LIVENESS: Duration = Duration::from_millis(600);
    let mut owner = Peer::plain();
    let served = owner.ask(&json!({ "do": "serve", "len": 4096 }));
    let mut reader = Peer::start(&[], &json!({ "liveness_ms": LIVENESS.as_millis() as u64 }));
    assert_eq!(reader.connect_to(&served["peer"]), "up");
    owner.signal(libc::SIGSTOP);
    reader.tell(&json!({ "do": "lease", "grant": served["grant"] }));
    // Time to ask; if it has not, nothing is tested.
    std::thread::sleep(LIVENESS / 12);
    reader.signal(libc::SIGSTOP);
    owner.signal(libc::SIGCONT);
    std::thread::sleep(LIVENESS * 3);
    reader.signal(libc::SIGCONT);
    assert_eq!(reader.hear(), 4096);
}

#[test]
fn a_silent_owner_is_given_up_on_in_time() {
    let node = Node::with("parent:1", ShmConfig { liveness_ms: 200, ..config() }, None);
    let mut peer = Peer::plain();
    let served = peer.ask(&json!({ "do": "serve", "len": 4096 }));
    let grant: GrantDesc = serde_json::from_value(served["grant"].clone()).unwrap();
    let desc = from_json(&served["peer"]);
    let (path, _) = node.try_connect(&desc);
    peer.signal(libc::SIGSTOP);
    // Not mapped yet, so the owner would have to answer.
    let bytes = [1_u8; 64];
    let write = slice(1, Opcode::Write, HostView::of(&bytes), &grant, 0);
    assert_eq!(node.run(path, write).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(node.transport.lease(path, &grant).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let paths = node.transport.connect(&desc, Deadline::after(Duration::from_millis(100))).unwrap();
    assert!(matches!(&paths[0].state, PathState::Down(error) if error.kind() == ErrorKind::DeadlineExceeded));
    peer.signal(libc::SIGCONT);
    node.run(path, write).unwrap();
    peer.signal(libc::SIGSTOP);
    // Mapped: a stopped owner does not hinder those who copy.
    node.run(path, write).unwrap();
}

#[test]
fn a_killed_process_leaves_nothing_that_the_next_start_does_not_remove() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("posthorse");
    let options = json!({ "folder": folder });
    let mut peer = Peer::start(&[], &options);
    peer.ask(&json!({ "do": "serve", "len": 4096 }));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    peer.child.kill().unwrap();
    peer.child.wait().unwrap();
    let node = Node::with("parent:1", ShmConfig { folder: Some(folder.clone()), ..config() }, None);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "its own");
    drop(node);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn another_user_is_refused() {
    if !is_root() {
        return skip("shm-other-user", "only root can become another user");
    }
    let (node, _region) = node_with_region(4096);
    let mut peer = Peer::start(&[], &json!({ "uid": 65534 }));
    let refused = peer.connect(&node);
    assert_eq!(refused["kind"], "PeerRefused", "{refused}");
    assert!(refused["text"].as_str().unwrap().contains("user 0"), "{refused}");
    // The owner refuses as well, whatever the client thinks of it.
    let served = peer.ask(&json!({ "do": "serve", "len": 4096 }));
    assert_eq!(node.refusal(&from_json(&served["peer"])).kind(), ErrorKind::PeerRefused);
}

/// Whether `unshare` can make these namespaces here.
fn can_unshare(flags: &[&str]) -> bool {
    let run = Command::new("unshare").args(flags).arg("true").stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

#[test]
fn namespaces_keep_processes_apart_with_a_reason_or_not_at_all() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("posthorse");
    let shared_folder = ShmConfig { folder: Some(folder), ..config() };
    for (flags, by_name, by_folder) in [
        (&["--net"][..], false, true),
        (&["--pid", "--fork"], true, true),
        (&["--pid", "--fork", "--mount", "--mount-proc"], true, true),
        (&["--user", "--map-root-user"], true, true),
        (
            &["--user", "--map-root-user", "--net", "--pid", "--fork", "--mount", "--ipc", "--uts"],
            false,
            true,
        ),
    ] {
        if !can_unshare(flags) {
            skip("shm-namespaces", &format!("`unshare {}` is not allowed here", flags.join(" ")));
            return;
        }
        let mut wrapper = vec!["unshare"];
        wrapper.extend(flags);
        for (config, reachable) in [(config(), by_name), (shared_folder.clone(), by_folder)] {
            let node = Node::with("parent:1", config, None);
            let region = node.shared(2 << 20);
            let grant = node.grant_all(&region, Access::Write);
            let mut peer = Peer::start(&wrapper, &json!({}));
            let state = peer.connect(&node);
            if reachable {
                assert_eq!(state, "up", "{flags:?}");
                assert_eq!(
                    peer.ask(&json!({ "do": "write", "grant": grant, "seed": 8 })),
                    "done",
                    "{flags:?}"
                );
                assert!(region.bytes() == pattern(2 << 20, 8));
            } else {
                assert_eq!(state["kind"], "PeerUnreachable", "{flags:?}: {state}");
                assert!(state["text"].as_str().unwrap().contains("network namespace"), "{state}");
            }
        }
    }
}
