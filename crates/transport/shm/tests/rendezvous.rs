//! A rendezvous with an owner whose every answer the test gives, in the order that matters.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use common::{Node, config, slice};
use posthorse_core::{
    Access, ErrorKind, Features, GrantDesc, GrantToken, Hello, HostView, Opcode, PathId, PathState, RegionId,
    SegmentDesc, Transport,
};
use posthorse_shm::ShmConfig;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, recvmsg, sendmsg, socket_with,
};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_secs(60);
const REGION: RegionId = RegionId(3);
/// Where the region lies in the owner's address space.
const ADDRESS: u64 = 1 << 40;
const LEN: usize = 4096;

/// Where the test awaits clients.
struct Owner {
    listener: OwnedFd,
    address: PathBuf,
    _folder: tempfile::TempDir,
}

impl Owner {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = folder.path().join("owner.sock");
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let listener = listener.unwrap();
        bind(&listener, &SocketAddrUnix::new(&address).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        Self { listener, address, _folder: folder }
    }

    fn desc(&self) -> SegmentDesc {
        let published = json!({ "socket": self.address, "host_id": null, "nonce": "n" });
        SegmentDesc {
            name: "owner:1".to_owned(),
            incarnation: None,
            hello: None,
            transports: BTreeMap::from([("shm".to_owned(), published)]),
            buffers: Vec::new(),
        }
    }

    /// Connects `node`. `before` is called when it waits for its welcome.
    fn connect(&self, node: &Arc<Node>, before: impl FnOnce()) -> (Conversation, PathId, PathState) {
        let connecting = std::thread::spawn({
            let (node, desc) = (Arc::clone(node), self.desc());
            move || node.try_connect(&desc)
        });
        let client = Conversation(accept(&self.listener).unwrap());
        set_socket_timeout(&client.0, Timeout::Recv, Some(MINUTE)).unwrap();
        assert!(client.hear()["hello"].is_object());
        before();
        let welcome = json!({
            "hello": Hello::new(Features::NONE, None),
            "name": "owner:1",
            "incarnation": 1,
            "grants": 1,
            "probe_address": 0,
            "probe_value": 0,
        });
        let files = [table(), file()];
        client.say(&json!({ "welcome": welcome }), &files.each_ref().map(AsFd::as_fd));
        let (path, state) = connecting.join().unwrap();
        (client, path, state)
    }
}

/// The owner's end.
struct Conversation(OwnedFd);

impl Conversation {
    fn say(&self, message: &Value, files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
        let packet = format!("j{message}");
        let packet = [IoSlice::new(packet.as_bytes())];
        sendmsg(&self.0, &packet, &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    fn lend(&self, file: &OwnedFd) {
        let reply = json!({ "request": request(), "address": ADDRESS, "len": LEN, "offset": 0 });
        self.say(&json!({ "region": reply }), &[file.as_fd()]);
    }

    fn refuse(&self) {
        self.refuse_saying("no");
    }

    fn refuse_saying(&self, message: &str) {
        let refusal = json!({ "code": ErrorKind::AccessDenied.code(), "message": message });
        self.say(&json!({ "region_refused": { "request": request(), "refusal": refusal } }), &[]);
    }

    /// Hears that the region is asked for.
    fn hear_request(&self) {
        assert_eq!(self.hear()["map"], request());
    }

    /// Withdraws the region, and returns when the node has heard of it. The token is a notification's that shows this.
    fn withdraw(&self, node: &Node, path: PathId, token: u64) {
        self.say(&json!({ "withdrawn": { "region": REGION } }), &[]);
        self.await_heard(node, path, token);
    }

    /// Returns when the node has heard all that was said. The token is as above.
    fn await_heard(&self, node: &Node, path: PathId, token: u64) {
        node.transport.notify(path, token, b"x").unwrap();
        self.say(&json!({ "notified": { "token": token, "refusal": null } }), &[]);
        node.events.completion(token).result.unwrap();
    }

    /// Waits for a packet, and says whether there will be any.
    fn hears(&self) -> bool {
        let mut control = RecvAncillaryBuffer::new(&mut []);
        let mut packet = [0; 1024];
        recvmsg(&self.0, &mut [IoSliceMut::new(&mut packet)], &mut control, RecvFlags::empty())
            .is_ok_and(|got| got.bytes > 0)
    }

    /// The next packet that is JSON.
    fn hear(&self) -> Value {
        let mut packet = vec![0; 1 << 17];
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut []);
            let got = recvmsg(&self.0, &mut [IoSliceMut::new(&mut packet)], &mut control, RecvFlags::empty())
                .unwrap();
            if let Some(json) = packet[..got.bytes].strip_prefix(b"j") {
                return serde_json::from_slice(json).unwrap();
            }
        }
    }
}

/// Sealed, zero, and long enough for whatever it is taken for.
fn file() -> OwnedFd {
    let file = memfd_create("posthorse-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 1 << 16).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

/// Of the one grant, for everything.
fn grant() -> GrantDesc {
    GrantDesc {
        region: REGION,
        address: ADDRESS,
        len: LEN as u64,
        access: Access::Write,
        token: GrantToken { handle: 0, secret: 5 },
        attributes: BTreeMap::new(),
    }
}

/// What a writer asks for.
fn request() -> Value {
    json!({ "region": REGION, "write": true })
}

/// A table in which it is live.
fn table() -> OwnedFd {
    let (file, grant) = (file(), grant());
    let (state, write) = (grant.token.handle + 1, 2);
    let entry = [state, grant.token.secret, grant.region.0, grant.address, grant.len, write];
    let bytes: Vec<u8> = entry.into_iter().flat_map(u64::to_ne_bytes).collect();
    rustix::io::pwrite(&file, &bytes, 64).unwrap();
    file
}

fn without_process_vm() -> ShmConfig {
    ShmConfig { process_vm: false, inline_bytes: 0, copy_threads: 1, ..config() }
}

#[test]
fn a_path_that_is_made_while_the_transport_stops_is_down() {
    let owner = Owner::new();
    let node = Arc::new(Node::with("a:1", without_process_vm(), None));
    let (client, path, state) = owner.connect(&node, || node.transport.stop());
    match state {
        PathState::Down(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
        PathState::Up => panic!("it is up"),
    }
    // SAFETY: no memory is handed over.
    let error = unsafe { node.transport.submit(path, &[]) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PathFailed);
    // The owner has been told.
    let mut control = RecvAncillaryBuffer::new(&mut []);
    let end = recvmsg(&client.0, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::empty());
    assert_eq!(end.unwrap().bytes, 0);
}

#[test]
fn a_region_that_is_withdrawn_while_it_is_mapped_is_not_kept() {
    let owner = Owner::new();
    let node = Arc::new(Node::with("a:1", without_process_vm(), None));
    let (client, path, state) = owner.connect(&node, || ());
    assert!(matches!(state, PathState::Up), "{state:?}");
    let source = [1_u8; LEN];
    // Submits a slice that waits for the region, which is lent from a file of its own.
    let lend = |token| {
        node.submit(path, &[slice(token, Opcode::Write, HostView::of(&source), &grant(), 0)]).unwrap();
        client.hear_request();
        let file = file();
        client.lend(&file);
        file
    };
    let withdraw = |token| client.withdraw(&node, path, token);

    // The one copy thread, which would map it, is busy until it is released.
    let (release, busy) = (channel::<()>(), channel());
    node.events.wake(move || {
        busy.0.send(()).unwrap();
        let _ = release.1.recv_timeout(MINUTE);
    });
    let before = lend(1);
    busy.1.recv_timeout(MINUTE).unwrap();
    withdraw(2);
    let withdrawn = lend(3);
    withdraw(4);
    let error = node.events.completion(3).result.unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::NotRegistered, "{error}");
    // Registered again: what is still to be mapped is another file.
    let after = lend(5);
    release.0.send(()).unwrap();
    node.events.completion(1).result.unwrap();
    node.events.completion(5).result.unwrap();
    let written = [before, withdrawn, after].map(|file| {
        let mut bytes = [0; LEN];
        rustix::io::pread(&file, &mut bytes, 0).unwrap();
        bytes == source
    });
    assert_eq!(written, [true, false, true]);
}

/// A node without the region, a path of it, and what writes a slice.
fn waiting(liveness_ms: u64) -> (Arc<Node>, Conversation, PathId, impl Fn(u64)) {
    static SOURCE: [u8; LEN] = [1; LEN];
    let owner = Owner::new();
    let node = Arc::new(Node::with("a:1", ShmConfig { liveness_ms, ..without_process_vm() }, None));
    let (client, path, state) = owner.connect(&node, || ());
    assert!(matches!(state, PathState::Up), "{state:?}");
    let write = {
        let node = Arc::clone(&node);
        move |token| {
            node.submit(path, &[slice(token, Opcode::Write, HostView::of(&SOURCE), &grant(), 0)]).unwrap();
        }
    };
    (node, client, path, write)
}

#[test]
fn a_refusal_is_not_for_those_who_came_after_the_question() {
    let (node, client, path, write) = waiting(60_000);
    write(1);
    client.hear_request();
    write(2);
    client.refuse();
    client.hear_request();
    client.lend(&file());
    for token in [1, 2] {
        node.events.completion(token).result.unwrap();
    }
    client.withdraw(&node, path, 3);
    write(4);
    client.hear_request();
    write(5);
    client.refuse();
    client.hear_request();
    client.refuse();
    for token in [4, 5] {
        let error = node.events.completion(token).result.unwrap_err().error;
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
    }
}

#[test]
fn a_refusal_that_comes_too_late_is_not_for_those_who_came_since() {
    let (node, client, path, write) = waiting(1000);
    write(1);
    client.hear_request();
    let error = node.events.completion(1).result.unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    write(2);
    client.refuse();
    client.hear_request();
    client.lend(&file());
    node.events.completion(2).result.unwrap();
    // Nor is a late answer kept for nobody.
    client.withdraw(&node, path, 3);
    write(4);
    client.hear_request();
    let error = node.events.completion(4).result.unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    client.refuse();
    client.await_heard(&node, path, 5);
    write(6);
    client.hear_request();
    client.lend(&file());
    node.events.completion(6).result.unwrap();
}

#[test]
fn a_file_that_cannot_be_mapped_is_not_the_end_of_a_later_question() {
    let (node, client, path, write) = waiting(60_000);
    let (release, busy) = (channel::<()>(), channel());
    node.events.wake(move || {
        busy.0.send(()).unwrap();
        let _ = release.1.recv_timeout(MINUTE);
    });
    write(1);
    client.hear_request();
    client.lend(&file());
    // The one copy thread is in the waker until it is released.
    busy.1.recv_timeout(MINUTE).unwrap();
    client.withdraw(&node, path, 2);
    write(3);
    client.hear_request();
    client.lend(&memfd_create("posthorse-test", MemfdFlags::CLOEXEC).unwrap());
    client.withdraw(&node, path, 4);
    let error = node.events.completion(3).result.unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::NotRegistered, "{error}");
    write(5);
    client.hear_request();
    release.0.send(()).unwrap();
    node.events.completion(1).result.unwrap();
    // Time for the copy thread to look at what came first; if it has not, nothing is tested.
    std::thread::sleep(Duration::from_millis(50));
    client.lend(&file());
    node.events.completion(5).result.unwrap();
}

#[test]
fn each_of_many_slices_is_refused_by_an_answer_to_what_was_asked_for_it() {
    const SLICES: u64 = 20_000;
    let (node, client, _, write) = waiting(60_000);
    // How many refusals the owner has begun to say; each says its number.
    let said = Arc::new(AtomicU64::new(0));
    let refuses = std::thread::spawn({
        let said = Arc::clone(&said);
        move || {
            while client.hears() {
                client.refuse_saying(&(said.fetch_add(1, Ordering::SeqCst) + 1).to_string());
            }
        }
    });
    let before: Vec<_> = (0..SLICES)
        .map(|token| {
            let before = said.load(Ordering::SeqCst);
            write(token);
            // The next comes about when this one is refused.
            while said.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
            }
            (0..token % 512).for_each(|_| std::hint::spin_loop());
            before
        })
        .collect();
    let done = node.events.wait(|seen| {
        (seen.completions.len() as u64 == SLICES).then(|| std::mem::take(&mut seen.completions))
    });
    for done in done {
        let error = done.result.unwrap_err().error;
        let by: u64 = error.message().rsplit(' ').next().unwrap().parse().unwrap();
        assert!(by > before[done.token as usize], "{error}");
    }
    node.transport.stop();
    refuses.join().unwrap();
}
