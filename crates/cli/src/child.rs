//! The other end of a transfer: this program once more, as a child that does not outlive its parent.

use std::io::{self, BufReader};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getppid, pidfd_open, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::channel;
use crate::outcome::{Failure, Outcome};

/// Says to a child which process started it.
const PARENT: &str = "POSTHORSE_CLI_PARENT";

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
        thread::spawn(move || {
            let Some(output) = output else { return };
            let mut output = BufReader::new(output);
            loop {
                let message = channel::receive(&mut output);
                let last = !matches!(message, Ok(Some(_)));
                if sender.send(message).is_err() || last {
                    return;
                }
            }
        });
        Ok(Self { name, process, input, answers })
    }

    /// Sends the child a message.
    pub(crate) fn send(&mut self, message: &impl Serialize) -> Outcome {
        let Some(input) = &mut self.input else { return Err(self.gone()) };
        channel::send(input, message).map_err(|_| self.gone())
    }

    /// The child's next message, within `patience`.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self, patience: Duration) -> Outcome<T> {
        match self.answers.recv_timeout(patience) {
            Ok(Ok(Some(value))) => serde_json::from_value(value).map_err(|error| {
                Failure::Failed(format!("the {} said something strange: {error}", self.name))
            }),
            Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                Err(Failure::Failed(format!("the {} said something strange: {error}", self.name)))
            }
            Ok(_) | Err(RecvTimeoutError::Disconnected) => Err(self.gone()),
            Err(RecvTimeoutError::Timeout) => {
                Err(Failure::Failed(format!("the {} has not answered for {patience:?}", self.name)))
            }
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
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(Failure::Failed(format!("the {} ended with {status}", self.name))),
            None => Err(Failure::Failed(format!("the {} has not ended for {patience:?}", self.name))),
        }
    }

    /// Why nothing more comes from the child.
    fn gone(&mut self) -> Failure {
        Failure::Failed(match self.end(Duration::from_secs(2)) {
            Some(status) => format!("the {} ended early: {status}", self.name),
            None => format!("the {} does not listen any more", self.name),
        })
    }

    /// Says to the child that there is nothing more to do, and waits for its end.
    fn end(&mut self, patience: Duration) -> Option<ExitStatus> {
        self.input = None;
        let id = Pid::from_child(&self.process);
        if let (Ok(ended), Ok(patience)) = (pidfd_open(id, PidfdFlags::empty()), patience.try_into()) {
            // Readable when the process has ended, as `pidfd_open(2)` says.
            let _ = poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&patience));
        }
        self.process.try_wait().ok().flatten()
    }
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
