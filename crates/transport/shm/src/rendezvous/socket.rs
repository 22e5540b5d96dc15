//! Where a rendezvous takes place: sockets, their addresses, packets with file descriptors.
//!
//! By default the address is an abstract name: nothing lies in any file system, so nothing is left behind
//! whichever way a process ends. Any local user could connect to such a name; the credentials that the kernel
//! gives of both ends refuse other users before anything is shared. A folder of this user's own is the
//! alternative, for processes that share a mount but not the network namespace.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recvmsg,
    sendmsg, socket_with,
};

use super::wire::MAX_PACKET;
use crate::sys::Credentials;

const BACKLOG: i32 = 128;
const ABSTRACT: &str = "@posthorse-";
const SUFFIX: &str = "sock";
/// File descriptors that go with one packet.
const MAX_FDS: usize = 2;
/// The digits of a random name.
const DIGITS: usize = 32;
/// The longest name of a socket, in bytes (unix(7)); it needs no zero at its end.
const MAX_NAME: usize = 108;
/// The longest name of a folder, in bytes, in which a socket's name finds room.
const MAX_FOLDER: usize = MAX_NAME - "/".len() - DIGITS - ".".len() - SUFFIX.len();

/// 128 random bits in hexadecimal.
pub(crate) fn random_name() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::Io, format!("drawing random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A socket that peers can reach under its address.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    address: String,
    file: Option<PathBuf>,
}

impl Listener {
    /// Listens under a random name, in `folder` or in the abstract namespace.
    pub(crate) fn bind(folder: Option<&Path>) -> Result<Self> {
        let socket = new_socket()?;
        let name = random_name()?;
        let Some(folder) = folder else {
            let address = format!("{ABSTRACT}{name}");
            bind(&socket, &parse(&address)?).map_err(|error| refused("binding", &address, error))?;
            listen(&socket, BACKLOG).map_err(|error| refused("listening at", &address, error))?;
            return Ok(Self { socket, address, file: None });
        };
        // Before anything is done in a folder that is not to be used.
        let (file, address) = place(folder, &name)?;
        check_folder(folder)?;
        remove_dead(folder);
        // Under another name until it listens, or another process that starts now would take it for dead.
        let early = folder.join(&name);
        let unix = SocketAddrUnix::new(&early).map_err(|error| refused("naming", &address, error))?;
        bind(&socket, &unix).map_err(|error| refused("binding", &address, error))?;
        let this = Self { socket, address, file: Some(file.clone()) };
        let listening = listen(&this.socket, BACKLOG)
            .map_err(|error| refused("listening at", &this.address, error))
            .and_then(|()| fs::rename(&early, &file).map_err(|error| Error::os("naming a socket", &error)));
        if let Err(error) = listening {
            let _ = fs::remove_file(&early);
            return Err(error);
        }
        Ok(this)
    }

    /// As it is published.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The next client, if one waits.
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = fs::remove_file(file);
        }
    }
}

fn new_socket() -> Result<OwnedFd> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|error| Error::os("making a Unix socket", &error.into()))
}

fn refused(doing: &str, address: &str, error: Errno) -> Error {
    Error::os(&format!("{doing} the rendezvous socket {address:?}"), &error.into())
}

/// Where a socket lies in a folder, and its address.
fn place(folder: &Path, name: &str) -> Result<(PathBuf, String)> {
    let file = folder.join(name).with_extension(SUFFIX);
    let address = file.to_str().filter(|path| path.starts_with('/') && SocketAddrUnix::new(*path).is_ok());
    let address = address.map(str::to_owned).ok_or_else(|| {
        let accepted = format!("an absolute path in UTF-8 of at most {MAX_FOLDER} bytes");
        Error::invalid_config("folder", format_args!("{folder:?}"), &accepted)
    })?;
    Ok((file, address))
}

/// Refuses a folder in which no socket can have a name, whether or not there is one.
pub(crate) fn check_path(folder: &Path) -> Result<()> {
    place(folder, &"0".repeat(DIGITS)).map(drop)
}

/// Makes the folder if need be, and refuses one that another user owns or can enter.
fn check_folder(folder: &Path) -> Result<()> {
    let key = |what: &str| Error::invalid_config("folder", format_args!("{folder:?}"), what);
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::os(&format!("making the rendezvous folder {folder:?}"), &error));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(folder)
        .map_err(|error| Error::os(&format!("looking at the rendezvous folder {folder:?}"), &error))?;
    let us = rustix::process::geteuid().as_raw();
    if !found.is_dir() {
        return Err(key("a folder, not a link or file"));
    }
    if found.uid() != us {
        return Err(key(&format!("a folder that user {us} owns (this one belongs to user {})", found.uid())));
    }
    if found.mode() & 0o077 != 0 {
        return Err(key(&format!("a folder with mode 0700 (this one has {:04o})", found.mode() & 0o7777)));
    }
    Ok(())
}

/// Removes what processes that were killed left in the folder.
fn remove_dead(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_socket = path.extension().is_some_and(|extension| extension == SUFFIX);
        let Ok(address) = SocketAddrUnix::new(&path) else { continue };
        if !is_socket {
            continue;
        }
        let Ok(socket) = new_socket() else { return };
        if connect(&socket, &address) == Err(Errno::CONNREFUSED) {
            let _ = fs::remove_file(&path);
        }
    }
}

/// The address that a peer published.
fn parse(address: &str) -> Result<SocketAddrUnix> {
    let malformed = || {
        Error::new(
            ErrorKind::Malformed,
            format!(
                "the peer's rendezvous socket is {address:?}; accepted: {ABSTRACT}NAME or /FOLDER/NAME.{SUFFIX}"
            ),
        )
    };
    if address.starts_with(ABSTRACT) {
        return SocketAddrUnix::new_abstract_name(&address.as_bytes()[1..]).map_err(|_| malformed());
    }
    if !address.starts_with('/') || Path::new(address).extension().is_none_or(|extension| extension != SUFFIX)
    {
        return Err(malformed());
    }
    SocketAddrUnix::new(address).map_err(|_| malformed())
}

/// Connects to a published address.
///
/// # Errors
/// `PeerUnreachable` with what that may mean, `DeadlineExceeded`, `Malformed`.
pub(crate) fn connect_to(address: &str, deadline: Deadline) -> Result<OwnedFd> {
    let unix = parse(address)?;
    let socket = new_socket()?;
    let mut pause = Duration::from_micros(100);
    loop {
        match connect(&socket, &unix) {
            Ok(()) => return Ok(socket),
            // The peer has not taken those that came before; there is nothing to be woken by.
            Err(Errno::AGAIN) if !deadline.is_past(Instant::now()) => {
                std::thread::sleep(deadline.remaining(Instant::now()).map_or(pause, |left| pause.min(left)));
                pause = (pause * 2).min(Duration::from_millis(10));
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(Deadline::exceeded("the peer to accept a rendezvous")),
            Err(error) => {
                let space = if address.starts_with('@') { "network" } else { "mount" };
                return Err(Error::new(
                    ErrorKind::PeerUnreachable,
                    format!(
                        "the rendezvous socket {address:?} is not reachable: {}; the peer is on another host, in another \
                         {space} namespace, or gone",
                        io::Error::from(error)
                    ),
                )
                .with_advice(
                    "to share memory across containers, let them share the network namespace, or a folder that the \
                     configuration key `folder` names in both",
                ));
            }
        }
    }
}

/// Refuses a peer that runs as another user: memory is shared with oneself alone.
pub(crate) fn check_user(peer: Credentials) -> Result<()> {
    let us = rustix::process::geteuid().as_raw();
    if peer.uid == us {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::PeerRefused,
        format!(
            "the peer runs as user {}, this process as user {us}: memory is shared within one user alone",
            peer.uid
        ),
    )
    .with_advice(
        "run both as the same user (in containers: in the same user namespace), or let them use the network",
    ))
}

/// Sends one packet without waiting.
pub(crate) fn send(socket: impl AsFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(&socket, &[IoSlice::new(packet)], &mut control, flags) {
            Err(Errno::INTR) => {}
            result => return result.map(|_| ()),
        }
    }
}

/// One packet that arrived.
#[derive(Debug)]
pub(crate) struct Packet<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) fds: Vec<OwnedFd>,
}

/// A buffer for one packet.
#[derive(Debug)]
pub(crate) struct PacketBuffer(Vec<u8>);

impl PacketBuffer {
    pub(crate) fn new() -> Self {
        Self(vec![0; MAX_PACKET])
    }

    /// The next packet, if one is there. An empty one is the end of the conversation.
    pub(crate) fn receive(&mut self, socket: impl AsFd) -> Result<Option<Packet<'_>>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = loop {
            match recvmsg(&socket, &mut [IoSliceMut::new(&mut self.0)], &mut control, flags) {
                // The peer has closed its end without having read all of what we sent: it is said once, and what the
                // peer sent before is still there.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(Error::os("receiving from the rendezvous socket", &error.into())),
                Ok(received) => break received,
            }
        };
        // Descriptors first, so that they are closed whatever else is wrong.
        let fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        // The kernel hands over as many as there is room for, unless this process may have no more.
        if received.flags.contains(ReturnFlags::CTRUNC) && fds.len() < MAX_FDS {
            let message = "a rendezvous packet came without its descriptors: this process can open no more";
            return Err(Error::new(ErrorKind::LimitReached, message)
                .with_advice("raise RLIMIT_NOFILE (`ulimit -n`), or close descriptors"));
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!("a rendezvous packet of more than {MAX_PACKET} bytes or {MAX_FDS} descriptors"),
            ));
        }
        Ok(Some(Packet { bytes: &self.0[..received.bytes], fds }))
    }

    /// Waits for a packet. An empty one is the end of the conversation.
    pub(crate) fn receive_by(&mut self, socket: impl AsFd, deadline: Deadline) -> Result<Packet<'_>> {
        loop {
            let timeout = deadline.remaining(Instant::now()).and_then(|left| Timespec::try_from(left).ok());
            let mut wait = [PollFd::new(&socket, PollFlags::IN)];
            match poll(&mut wait, timeout.as_ref()) {
                Ok(0) => return Err(Deadline::exceeded("the peer to answer the rendezvous")),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(Error::os("waiting at the rendezvous socket", &error.into())),
            }
        }
        let woken = || Error::new(ErrorKind::Internal, "the rendezvous socket woke us without a packet");
        self.receive(socket)?.ok_or_else(woken)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    use posthorse_testkit::peer;
    use rustix::io::dup;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    #[test]
    fn a_packet_arrives_whole_with_its_descriptors() {
        let listener = Listener::bind(None).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = connect_to(listener.address(), soon()).unwrap();
        let server = listener.accept().unwrap().unwrap();
        let mut buffer = PacketBuffer::new();
        assert!(buffer.receive(&server).unwrap().is_none());
        send(&client, b"one", &[client.as_fd(), server.as_fd()]).unwrap();
        send(&client, b"two", &[]).unwrap();
        let one = buffer.receive_by(&server, soon()).unwrap();
        assert_eq!((one.bytes, one.fds.len()), (&b"one"[..], 2));
        drop(one);
        assert_eq!(buffer.receive_by(&server, soon()).unwrap().bytes, b"two");
        drop(client);
        assert!(buffer.receive_by(&server, soon()).unwrap().bytes.is_empty());
        assert_eq!(send(&server, b"x", &[]), Err(Errno::PIPE));
    }

    #[test]
    fn what_was_said_before_the_end_is_heard() {
        let listener = Listener::bind(None).unwrap();
        for sends_before in [true, false] {
            let client = connect_to(listener.address(), soon()).unwrap();
            let hello = || send(&client, b"hello", &[]);
            if sends_before {
                hello().unwrap();
            }
            let server = listener.accept().unwrap().unwrap();
            send(&server, b"refused", &[]).unwrap();
            drop(server);
            if !sends_before {
                assert_eq!(hello(), Err(Errno::PIPE));
            }
            let mut buffer = PacketBuffer::new();
            assert_eq!(buffer.receive_by(&client, soon()).unwrap().bytes, b"refused");
            assert!(buffer.receive_by(&client, soon()).unwrap().bytes.is_empty());
        }
    }

    #[test]
    fn an_oversized_packet_is_refused() {
        let listener = Listener::bind(None).unwrap();
        let client = connect_to(listener.address(), soon()).unwrap();
        let server = listener.accept().unwrap().unwrap();
        send(&client, &vec![0; MAX_PACKET + 1], &[]).unwrap();
        let error = PacketBuffer::new().receive_by(&server, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
    }

    #[test]
    fn descriptors_for_which_there_is_no_number_are_a_limit_that_was_reached() {
        let Some(peer) = peer::child() else {
            // The limit is a process's: a process of its own reaches it.
            let name = "rendezvous::socket::tests::descriptors_for_which_there_is_no_number_are_a_limit_that_was_reached";
            let peer = peer::spawn(name, &()).unwrap();
            let said: (u16, String) = peer.receive(soon()).unwrap();
            assert_eq!(said.0, ErrorKind::LimitReached.code(), "{}", said.1);
            assert!(said.1.contains("RLIMIT_NOFILE"), "{}", said.1);
            return;
        };
        let listener = Listener::bind(None).unwrap();
        let client = connect_to(listener.address(), soon()).unwrap();
        let server = listener.accept().unwrap().unwrap();
        send(&client, b"two", &[client.as_fd(), server.as_fd()]).unwrap();
        let before = getrlimit(Resource::Nofile);
        // One number is free, the second descriptor finds none.
        let one = dup(&client).unwrap();
        let most = one.as_raw_fd() as u64 + 1;
        drop(one);
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..before }).unwrap();
        let outcome = PacketBuffer::new().receive(&server).map(drop);
        setrlimit(Resource::Nofile, before).unwrap();
        let error = outcome.unwrap_err();
        peer.send(&(error.code(), error.to_string())).unwrap();
    }

    #[test]
    fn an_address_nobody_listens_at_says_what_that_may_mean() {
        for address in ["@posthorse-none", "/nowhere/none.sock"] {
            let error = connect_to(address, soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerUnreachable);
            assert!(error.to_string().contains("namespace"), "{error}");
        }
        for address in ["", "@other", "relative.sock", "/etc/passwd", &format!("/{}.sock", "x".repeat(200))] {
            assert_eq!(connect_to(address, soon()).unwrap_err().kind(), ErrorKind::Malformed, "{address}");
        }
    }

    #[test]
    fn a_folder_is_private_and_swept() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("posthorse");
        let listener = Listener::bind(Some(&folder)).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        connect_to(listener.address(), soon()).unwrap();
        // What a killed process leaves: a socket file that nobody listens at.
        let dead = folder.join("dead.sock");
        drop(std::os::unix::net::UnixDatagram::bind(&dead).unwrap());
        let other = Listener::bind(Some(&folder)).unwrap();
        let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        connect_to(listener.address(), soon()).unwrap();
        drop((listener, other));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_in_which_no_socket_can_have_a_name_is_not_made() {
        // Under the working directory of this process, which is the crate's folder.
        let here = tempfile::tempdir_in(".").unwrap();
        let relative = Path::new(here.path().file_name().unwrap()).join("folder");
        let long = here.path().join("f".repeat(MAX_NAME));
        let nothing = relative.join("..");
        for folder in [&relative, &long, &nothing, &PathBuf::from("x\ny"), &PathBuf::new()] {
            for error in [Listener::bind(Some(folder)).unwrap_err(), check_path(folder).unwrap_err()] {
                assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
                let said =
                    format!("folder is {folder:?}; accepted: an absolute path in UTF-8 of at most 70 bytes");
                assert_eq!(error.message(), said);
            }
        }
        assert_eq!(fs::read_dir(here.path()).unwrap().count(), 0);
        assert!(!Path::new("x\ny").exists());
        let root = tempfile::tempdir().unwrap();
        let room = MAX_FOLDER - root.path().as_os_str().len() - "/".len();
        let folder = root.path().join("f".repeat(room));
        let listener = Listener::bind(Some(&folder)).unwrap();
        connect_to(listener.address(), soon()).unwrap();
        check_path(&root.path().join("f".repeat(room + 1))).unwrap_err();
    }

    #[test]
    fn a_folder_that_others_can_enter_is_refused() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let error = Listener::bind(Some(root.path())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        assert!(error.to_string().contains("0755"), "{error}");
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(Listener::bind(Some(&file)).unwrap_err().to_string().contains("not a link or file"));
    }

    #[test]
    fn another_user_is_refused_by_number() {
        let us = rustix::process::geteuid().as_raw();
        check_user(Credentials { pid: None, uid: us }).unwrap();
        let error = check_user(Credentials { pid: None, uid: us + 1 }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerRefused);
        assert!(error.to_string().contains(&format!("user {}", us + 1)), "{error}");
    }
}
