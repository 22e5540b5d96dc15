//! A rendezvous with an owner whose every answer the test gives, in the order that matters.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use common::{Node, config, slice};
use posthorse_core::{
    Access, ErrorKind, Features, GrantDesc, GrantToken, Hello, HostView, Opcode, PathId, PathState, RegionId,
    SegmentDesc, Transport,
};
use posthorse_shm::ShmConfig;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
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
    let request = json!({ "region": REGION, "write": true });
    // Submits a slice that waits for the region, which is lent from a file of its own.
    let lend = |token| {
        node.submit(path, &[slice(token, Opcode::Write, HostView::of(&source), &grant(), 0)]).unwrap();
        assert_eq!(client.hear()["map"], request);
        let reply = json!({ "request": request, "address": ADDRESS, "len": LEN, "offset": 0 });
        let file = file();
        client.say(&json!({ "region": reply }), &[file.as_fd()]);
        file
    };
    // Returns when the node has heard of it.
    let withdraw = |token| {
        client.say(&json!({ "withdrawn": { "region": REGION } }), &[]);
        node.transport.notify(path, token, b"x").unwrap();
        client.say(&json!({ "notified": { "token": token, "refusal": null } }), &[]);
        node.events.completion(token).result.unwrap();
    };

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
