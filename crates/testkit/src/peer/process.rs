//! Starting a peer, being one, and ending one.

use std::env;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::channel::Channel;
use super::sys;
use crate::namespace;

/// Carries the number of the socket to the child.
const SOCKET: &str = "POSTHORSE_TESTKIT_PEER_SOCKET";
/// Carries the arguments to the child.
const ARGUMENTS: &str = "POSTHORSE_TESTKIT_PEER_ARGUMENTS";

/// How a peer is started.
#[derive(Debug)]
pub struct Spawn {
    test: String,
    arguments: String,
    separated: bool,
    environment: Vec<(String, String)>,
}

impl Spawn {
    /// The test of this name (as `--exact` takes it: `module::name`) as a peer.
    pub fn new(test: &str) -> Self {
        Self { test: test.to_owned(), arguments: "null".into(), separated: false, environment: Vec::new() }
    }

    /// What the peer finds in [`Child::arguments`].
    ///
    /// # Panics
    /// When they cannot be said in JSON.
    #[must_use]
    pub fn arguments(mut self, arguments: &impl Serialize) -> Self {
        self.arguments = serde_json::to_string(arguments).expect("arguments that can be said in JSON");
        self
    }

    /// An environment variable of the peer.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// In mount, pid, user and network namespaces of its own: as far apart as two containers.
    /// See [`namespace::available`].
    #[must_use]
    pub const fn separated(mut self) -> Self {
        self.separated = true;
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// `Io` when the system refuses.
    pub fn spawn(self) -> Result<Peer> {
        let failed = |error: io::Error| Error::os(&format!("starting the peer {}", self.test), &error);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let mut command = if self.separated { namespace::command() } else { Command::new(own_path()?) };
        if self.separated {
            command.arg(own_path()?);
        }
        command.args(["--exact", &self.test, "--nocapture", "--test-threads", "1"]);
        command.env(SOCKET, theirs.as_raw_fd().to_string()).env(ARGUMENTS, &self.arguments);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        // What the runner of tests says of the peer would only confuse.
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        sys::prepare(&mut command, OwnedFd::from(theirs));
        let child = command.spawn().map_err(failed)?;
        // The child's end is closed here with the command, so that its end shows.
        drop(command);
        let pid = Pid::from_child(&child);
        Ok(Peer { channel: Channel::new(ours)?, process: Mutex::new(child), pid, separated: self.separated })
    }
}

/// Starts the test of this name as a peer, with arguments.
///
/// The peer is killed when the value is dropped, or when the thread that called this ends, however it ends.
///
/// # Errors
/// `Io` when the system refuses.
pub fn spawn(test: &str, arguments: &impl Serialize) -> Result<Peer> {
    Spawn::new(test).arguments(arguments).spawn()
}

/// A peer process. Its messages are sent and received by the [`Channel`] that it derefs to.
#[derive(Debug)]
pub struct Peer {
    channel: Channel,
    process: Mutex<std::process::Child>,
    pid: Pid,
    separated: bool,
}

impl Peer {
    /// Its process id, in the namespace of the caller. That of a separated peer is known once it has sent something.
    pub fn pid(&self) -> u32 {
        self.target().as_raw_nonzero().get().unsigned_abs()
    }

    /// Ends it as `kill -9` does.
    pub fn kill9(&self) {
        self.signal(Signal::KILL);
    }

    /// Stops it: it is silent, not dead.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on after [`Peer::stop`].
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// `DeadlineExceeded`; `Io` when the system refuses.
    pub fn wait(&self, deadline: Deadline) -> Result<ExitStatus> {
        let failed = |error: io::Error| Error::os("waiting for a peer", &error);
        loop {
            if let Some(status) = self.process().try_wait().map_err(failed)? {
                return Ok(status);
            }
            // Not reaped, so the number is still its own.
            let pidfd = pidfd_open(self.pid, PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
            let timeout = deadline.remaining(Instant::now()).map(timespec);
            match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], timeout.as_ref()) {
                Ok(0) => return Err(Deadline::exceeded("a peer to end")),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
    }

    /// Waits for its end, and expects that its test passed.
    ///
    /// # Errors
    /// As [`Peer::wait`]; `Aborted` when it failed.
    pub fn finish(&self, deadline: Deadline) -> Result<()> {
        let status = self.wait(deadline)?;
        if status.success() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Aborted, format!("the peer failed: {status}")))
    }

    fn signal(&self, signal: Signal) {
        // Held, so that nobody reaps it meanwhile and the number becomes another's.
        let mut process = self.process();
        if matches!(process.try_wait(), Ok(None)) {
            // It may end at this moment, which is as good.
            let _ = kill_process(self.target(), signal);
        }
    }

    /// The process that runs the test: behind `unshare`, which waits for it, where namespaces are used.
    fn target(&self) -> Pid {
        if !self.separated {
            return self.pid;
        }
        namespace::only_child(self.pid).unwrap_or(self.pid)
    }

    fn process(&self) -> MutexGuard<'_, std::process::Child> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for Peer {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut process = self.process();
        // Killing what has ended does nothing, and it is waited for in either case.
        let _ = process.kill();
        let _ = process.wait();
    }
}

/// This process as a peer: what its starter gave it, and the way back.
#[derive(Debug)]
pub struct Child {
    channel: Channel,
    arguments: String,
}

impl Child {
    /// What [`Spawn::arguments`] was given.
    ///
    /// # Errors
    /// `Malformed` when it is not a `T`.
    pub fn arguments<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(&self.arguments)
            .map_err(|error| Error::new(ErrorKind::Malformed, format!("{error} in {:?}", self.arguments)))
    }
}

impl Deref for Child {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

/// This process as a peer, if it was started as one.
pub fn child() -> Option<&'static Child> {
    static CHILD: OnceLock<Option<Child>> = OnceLock::new();
    let child = CHILD.get_or_init(|| {
        let number = env::var(SOCKET).ok()?.parse().ok()?;
        let arguments = env::var(ARGUMENTS).ok()?;
        Some(Child { channel: Channel::new(sys::inherited(number)?).ok()?, arguments })
    });
    child.as_ref()
}

/// Runs `test`, which is (part of) the test of this name, in a process of its own: for what counts the descriptors
/// or threads of a process, since others' tests may run beside it in this one.
///
/// # Panics
/// When it fails there, or has not ended after five minutes.
pub fn isolated(name: &str, test: impl FnOnce()) {
    if child().is_some() {
        return test();
    }
    let outcome = spawn(name, &()).and_then(|peer| peer.finish(Deadline::after(Duration::from_secs(300))));
    if let Err(error) = outcome {
        panic!("{name} in a process of its own: {error}");
    }
}

fn own_path() -> Result<std::path::PathBuf> {
    env::current_exe().map_err(|error| Error::os("finding the running program", &error))
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
