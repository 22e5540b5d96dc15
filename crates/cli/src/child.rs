//! The other end of a transfer: this program once more, as a child that does not outlive its parent.

use std::fmt;
use std::io::{self, BufReader};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getppid, pidfd_open, set_parent_process_death_signal,
    waitid,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::channel;
use crate::outcome::{Failure, Outcome};

/// Says to a child which process started it.
const PARENT: &str = "POSTHORSE_CLI_PARENT";

/// How often a silent child is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// For how many looks in a row a child may be stopped: for longer than connectors bear a silent peer.
const MOST_STOPPED: u32 = 10;

/// Why nothing was heard of a child.
#[derive(Debug)]
enum Silence {
    /// It may be at work.
    Patience(Duration),
    /// It cannot be: somebody has stopped it.
    Stopped,
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Patience(patience) => write!(f, "for {patience:?}"),
            Self::Stopped => {
                write!(f, "and is stopped, as by SIGSTOP, for {:?}", LOOK * MOST_STOPPED)
            }
        }
    }
}

/// A running child. Dropping it kills it, and waits until it is gone.
#[derive(Debug)]
pub(crate) struct Peer {
    name: &'static str,
    process: Child,
    input: Option<ChildStdin>,
    answers: Receiver<io::Result<Option<Value>>>,
}

impl Peer {
    /// Starts this program with `arguments`; `name` is what errors call it.
    pub(crate) fn spawn(name: &'static str, arguments: &[&str]) -> Outcome<Self> {
        let failed = || Failure::io(format_args!("start the {name}").to_string());
        let program = std::env::current_exe().map_err(failed())?;
        let mut process = Command::new(program)
            .args(arguments)
            .env(PARENT, std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed())?;
        let input = process.stdin.take();
        let output = process.stdout.take();
        // The thread ends with the child's output.
        let (sender, answers) = mpsc::sync_channel(16);
        let read = move || {
            let Some(output) = output else { return };
            let mut output = BufReader::new(output);
            loop {
                let message = channel::receive(&mut output);
                let last = !matches!(message, Ok(Some(_)));
                if sender.send(message).is_err() || last {
                    return;
                }
            }
        };
        if let Err(error) = thread::Builder::new().spawn(read) {
            let _ = process.kill();
            let _ = process.wait();
            return Err(failed()(error));
        }
        Ok(Self { name, process, input, answers })
    }

    /// Sends the child a message.
    pub(crate) fn send(&mut self, message: &impl Serialize) -> Outcome {
        let Some(input) = &mut self.input else { return Err(self.gone()) };
        channel::send(input, message).map_err(|_| self.gone())
    }

    /// The child's next message, within `patience`.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, patience: Duration) -> Outcome<T> {
        let answers = &self.answers;
        let answer = patiently(&self.process, patience, |time| match answers.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => None,
            other => Some(other.ok()),
        });
        match answer {
            Ok(Some(Ok(Some(value)))) => serde_json::from_value(value).map_err(|error| {
                Failure::Failed(format!("the {} said something strange: {error}", self.name))
            }),
            Ok(Some(Err(error))) if error.kind() == io::ErrorKind::InvalidData => {
                Err(Failure::Failed(format!("the {} said something strange: {error}", self.name)))
            }
            Ok(_) => Err(self.gone()),
            Err(silence) => Err(Failure::Failed(format!("the {} has not answered {silence}", self.name))),
        }
    }

    /// Kills the child without warning, as a crash would.
    pub(crate) fn kill(&mut self) -> Outcome {
        self.input = None;
        self.process.kill().map_err(Failure::io(format_args!("kill the {}", self.name)))?;
        self.process.wait().map(drop).map_err(Failure::io(format_args!("wait for the {}", self.name)))
    }

    /// Lets the child end by itself, within `patience`.
    pub(crate) fn finish(mut self, patience: Duration) -> Outcome {
        match self.end(patience) {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(Failure::Failed(format!("the {} ended with {status}", self.name))),
            Ok(None) => Err(Failure::Failed(format!("the end of the {} was not seen", self.name))),
            Err(silence) => Err(Failure::Failed(format!("the {} has not ended {silence}", self.name))),
        }
    }

    /// Why nothing more comes from the child.
    fn gone(&mut self) -> Failure {
        Failure::Failed(match self.end(Duration::from_secs(2)) {
            Ok(Some(status)) => format!("the {} ended early: {status}", self.name),
            _ => format!("the {} does not listen any more", self.name),
        })
    }

    /// Says to the child that there is nothing more to do, and waits for its end.
    fn end(&mut self, patience: Duration) -> Result<Option<ExitStatus>, Silence> {
        self.input = None;
        let id = Pid::from_child(&self.process);
        if let Ok(ended) = pidfd_open(id, PidfdFlags::empty()) {
            // Readable when the process has ended, as `pidfd_open(2)` says.
            patiently(&self.process, patience, |time| {
                let time = time.try_into().ok()?;
                poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&time))
                    .is_ok_and(|ready| ready > 0)
                    .then_some(())
            })?;
        } else {
            // Not every sandbox has that call.
            patiently(&self.process, patience, |time| {
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
                let has_ended = || waitid(WaitId::Pid(id), options).is_ok_and(|status| status.is_some());
                (has_ended() || {
                    thread::sleep(time);
                    has_ended()
                })
                .then_some(())
            })?;
        }
        Ok(self.process.try_wait().ok().flatten())
    }
}

/// What `look`, which waits for as long as it is told, finds within `patience`, unless the child is stopped meanwhile.
/// It is told so by looks in a row rather than by the clock, as this process may have been stopped with it.
fn patiently<T>(
    process: &Child,
    patience: Duration,
    mut look: impl FnMut(Duration) -> Option<T>,
) -> Result<T, Silence> {
    let (mut left, mut stopped) = (patience, 0);
    loop {
        let time = left.min(LOOK);
        if let Some(found) = look(time) {
            return Ok(found);
        }
        left -= time;
        stopped = if is_stopped(process) { stopped + 1 } else { 0 };
        if stopped > MOST_STOPPED {
            return Err(Silence::Stopped);
        }
        if left.is_zero() {
            return Err(Silence::Patience(patience));
        }
    }
}

/// Whether the child is stopped now, and has not been continued. Its end is left to be waited for.
fn is_stopped(process: &Child) -> bool {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let seen = waitid(WaitId::Pid(Pid::from_child(process)), options);
    seen.is_ok_and(|status| status.is_some_and(|status| status.stopped()))
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Of a child that was waited for, both know and do nothing.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In a child: makes sure that it ends with the process that started it, however that ends.
///
/// In a process that is nobody's child this does nothing.
pub(crate) fn follow_parent() -> Outcome {
    let Some(parent) = std::env::var(PARENT).ok().and_then(|text| text.parse::<i32>().ok()) else {
        return Ok(());
    };
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::Failed(format!("ask to be ended with the parent process: {error}")))?;
    // The parent may have ended before the request was made.
    match getppid() {
        Some(now) if now.as_raw_nonzero().get() == parent => Ok(()),
        _ => Err(Failure::Failed("the parent process has ended".to_owned())),
    }
}
