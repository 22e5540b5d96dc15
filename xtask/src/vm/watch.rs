//! From the start of the machine to its end: whatever comes first of the command's end, the time limit, a signal and
//! the machine's own failure.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::needs::Programs;
use super::qemu::Machine;
use super::stream;

/// How many lines of the kernel's console explain a failure.
const CONSOLE_LINES: usize = 30;

/// How it ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The command ended with this status.
    Ended(u8),
    TimedOut,
    /// This process has been told to end, by this signal.
    Signalled(i32),
    /// The machine itself failed, and said this.
    Broken(String),
}

/// What happens meanwhile.
#[derive(Debug)]
enum Event {
    /// A stream of output has ended: with the command's status, unless it broke off.
    StreamEnded(Option<u8>),
    /// QEMU has ended, and said this.
    Gone(String),
    Signal(i32),
}

/// What is waited for. Signals are caught from its making on.
#[derive(Debug)]
pub(super) struct Watch {
    sender: Sender<Event>,
    events: Receiver<Event>,
}

impl Watch {
    pub(super) fn new() -> io::Result<Self> {
        let (sender, events) = channel();
        let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
        let watch = Self { sender, events };
        watch.spawn(move |sender| {
            for signal in signals.forever() {
                let _ = sender.send(Event::Signal(signal));
            }
        });
        Ok(watch)
    }

    /// Nobody joins these threads: they end with the process at the latest.
    fn spawn(&self, work: impl FnOnce(Sender<Event>) + Send + 'static) {
        let sender = self.sender.clone();
        thread::spawn(move || work(sender));
    }

    /// Runs the machine; its output ends with `mark`.
    pub(super) fn run(
        &self,
        machine: &Machine<'_>,
        programs: &Programs,
        mark: &str,
        limit: Duration,
    ) -> io::Result<Outcome> {
        let deadline = Instant::now() + limit;
        let [out, err] = machine.outputs;
        self.copy(out, mark, io::stdout())?;
        self.copy(err, mark, io::stderr())?;
        let (mut running, mut complaints) = machine.start(programs)?;
        self.spawn(move |sender| {
            let mut said = Vec::new();
            let _ = complaints.read_to_end(&mut said);
            let _ = sender.send(Event::Gone(String::from_utf8_lossy(&said).into_owned()));
        });
        let outcome = self.outcome(deadline, || {
            // A stream to which QEMU never came would wait for ever.
            for socket in machine.outputs {
                drop(UnixStream::connect(socket));
            }
        });
        running.kill();
        if machine.verbose {
            eprint!("{}", console(machine.console, usize::MAX));
        }
        Ok(match outcome {
            Outcome::Broken(said) => {
                Outcome::Broken(format!("{said}{}", console(machine.console, CONSOLE_LINES)))
            }
            outcome => outcome,
        })
    }

    /// Copies what comes to the new `socket`.
    fn copy(&self, socket: &Path, mark: &str, to: impl Write + Send + 'static) -> io::Result<()> {
        let listener = UnixListener::bind(socket)?;
        let mark = mark.to_owned();
        self.spawn(move |sender| {
            let status = listener.accept().ok().and_then(|(from, _)| stream::copy(from, to, mark.as_bytes()));
            let _ = sender.send(Event::StreamEnded(status));
        });
        Ok(())
    }

    /// Waits; `release` is called when QEMU has ended, so that both streams do.
    fn outcome(&self, deadline: Instant, release: impl Fn()) -> Outcome {
        let mut ended = Vec::new();
        let mut said = String::new();
        while ended.len() < 2 {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::StreamEnded(status)) => ended.push(status),
                Ok(Event::Gone(text)) => {
                    said = text;
                    release();
                }
                Ok(Event::Signal(signal)) => return Outcome::Signalled(signal),
                Err(RecvTimeoutError::Timeout) => return Outcome::TimedOut,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        match ended[..] {
            [Some(status), Some(_)] => Outcome::Ended(status),
            _ => Outcome::Broken(said),
        }
    }
}

/// The last lines of the console.
fn console(path: &Path, lines: usize) -> String {
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    let last = &all[all.len().saturating_sub(lines)..];
    last.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(events: Vec<Event>) -> Outcome {
        let (sender, receiver) = channel();
        for event in events {
            sender.send(event).unwrap();
        }
        let watch = Watch { sender, events: receiver };
        let release = || {
            for _ in 0..2 {
                watch.sender.send(Event::StreamEnded(None)).unwrap();
            }
        };
        watch.outcome(Instant::now() + Duration::from_millis(50), release)
    }

    #[test]
    fn the_command_has_ended_when_both_streams_have() {
        let ended = || Event::StreamEnded(Some(7));
        assert_eq!(outcome(vec![ended(), ended(), Event::Signal(SIGINT)]), Outcome::Ended(7));
        assert_eq!(outcome(vec![ended(), Event::Signal(SIGINT)]), Outcome::Signalled(SIGINT));
        assert_eq!(outcome(vec![ended()]), Outcome::TimedOut);
    }

    #[test]
    fn a_machine_that_ends_by_itself_is_broken() {
        assert_eq!(outcome(vec![Event::Gone("no memory".into())]), Outcome::Broken("no memory".into()));
        let half = vec![Event::StreamEnded(Some(0)), Event::StreamEnded(None)];
        assert_eq!(outcome(half), Outcome::Broken(String::new()));
    }

    #[test]
    fn of_the_console_the_end_is_shown() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "one\r\ntwo\r\nthree").unwrap();
        assert_eq!(console(file.path(), 2), "two\nthree\n");
        assert_eq!(console(Path::new("/no/such/file"), 2), "");
    }
}
