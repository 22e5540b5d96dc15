//! The soak test's second process: gets everything, looks at every byte, and reports.

use std::io::{self, BufReader};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use posthorse_core::{Deadline, Error, ErrorKind};
use posthorse_omni::config::Role;
use posthorse_omni::payload::PayloadKind;
use posthorse_omni::{Connector, Edge, GetOptions, Received, Source};
use serde::{Deserialize, Serialize};

use super::plan::{Form, Item, Plan, tensors};
use super::{FROM, TO, config, until_whole};
use crate::outcome::{Failure, Outcome};
use crate::{channel, pattern, stage};

/// How often the consumer reports.
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// The most problems that a report holds.
const MAX_PROBLEMS: usize = 20;

/// What the producer says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) plan: Plan,
    pub(super) transport: String,
    pub(super) pool_bytes: u64,
    pub(super) host: String,
    pub(super) port: u16,
    /// The next payload of each thread, as far as is known.
    pub(super) next: Vec<u64>,
    /// Whether an earlier consumer was killed, which may have got more than it could report.
    pub(super) restarted: bool,
}

/// What the consumer says again and again, and last when it is finished.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Report {
    /// The next payload of each thread.
    pub(super) next: Vec<u64>,
    pub(super) gets: u64,
    pub(super) bytes: u64,
    /// Payloads that a killed consumer had got already.
    pub(super) lost: u64,
    pub(super) problems: Vec<String>,
    pub(super) finished: bool,
}

/// What the threads count.
struct Tally {
    next: Vec<AtomicU64>,
    gets: AtomicU64,
    bytes: AtomicU64,
    lost: AtomicU64,
    problems: Mutex<Vec<String>>,
}

impl Tally {
    fn complain(&self, problem: String) {
        let mut problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        if problems.len() < MAX_PROBLEMS {
            problems.push(problem);
        }
    }

    fn report(&self, finished: bool) -> Report {
        Report {
            next: self.next.iter().map(|next| next.load(Ordering::Acquire)).collect(),
            gets: self.gets.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            problems: self.problems.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            finished,
        }
    }
}

/// Runs the process until every thread has got its last payload.
pub(crate) fn run() -> Outcome {
    let setup =
        channel::receive::<Setup>(&mut BufReader::new(io::stdin())).map_err(Failure::io("read the setup"))?;
    let Some(setup) = setup else { return Ok(()) };
    let connector = stage::connector(Role::Receiver, &setup.transport, setup.pool_bytes, config())?;
    let tally = Tally {
        next: setup.next.iter().map(|&next| AtomicU64::new(next)).collect(),
        gets: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        lost: AtomicU64::new(0),
        problems: Mutex::default(),
    };
    let say = |report: &Report| {
        channel::send(&mut io::stdout(), report).map_err(Failure::io("report to the producer"))
    };
    std::thread::scope(|scope| {
        let (ended, end) = mpsc::channel::<()>();
        for thread in 0..setup.plan.threads {
            let (ended, setup, connector, tally) = (ended.clone(), &setup, &connector, &tally);
            scope.spawn(move || {
                get_all(connector, setup, thread, tally);
                drop(ended);
            });
        }
        drop(ended);
        while end.recv_timeout(REPORT_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            say(&tally.report(false))?;
        }
        Ok::<(), Failure>(())
    })?;
    if let Err(why) = until_whole(&connector) {
        tally.complain(format!("the consumer's pool: {why}"));
    }
    connector.close();
    say(&tally.report(true))
}

/// Gets a thread's payloads in order, up to the one that says it is the last.
fn get_all(connector: &Connector, setup: &Setup, thread: u64, tally: &Tally) {
    let Some(next) = tally.next.get(thread as usize) else { return };
    // What a killed consumer had got, but not reported, is gone: of the first that is still there all are.
    let mut may_be_lost = setup.restarted;
    loop {
        let item = setup.plan.item(thread, next.load(Ordering::Relaxed));
        match get(connector, setup, &item) {
            Ok(received) if received.kind() == PayloadKind::Value => return,
            Ok(received) => {
                may_be_lost = false;
                if let Err(why) = check(&item, &received) {
                    tally.complain(format!("{} ({:?}, {} bytes): {why}", item.key, item.form, item.bytes));
                }
                tally.gets.fetch_add(1, Ordering::Relaxed);
                tally.bytes.fetch_add(item.bytes, Ordering::Relaxed);
            }
            Err(error) if may_be_lost && error.kind() == ErrorKind::Expired => {
                tally.lost.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                tally.complain(format!("{} ({:?}, {} bytes): {error}", item.key, item.form, item.bytes));
                return;
            }
        }
        next.fetch_add(1, Ordering::Release);
    }
}

fn get(connector: &Connector, setup: &Setup, item: &Item) -> Result<Received, Error> {
    let options = GetOptions {
        deadline: Some(Deadline::after(setup.plan.patience)),
        source: Source::At(&setup.host, setup.port),
        lease: item.form == Form::Lease,
    };
    connector.get(&Edge::new(FROM, TO), &item.key, options)
}

/// Looks at every byte.
fn check(item: &Item, received: &Received) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let joined;
    let bytes = if item.form == Form::Tensors {
        let lengths: Vec<u64> = received.tensors().iter().map(|desc| desc.len).collect();
        if lengths != tensors(item.bytes) {
            return Err(format!("tensors of {lengths:?} bytes"));
        }
        let parts =
            received.tensors().iter().map(|desc| Ok(received.tensor(&desc.name).map_err(text)?.bytes()));
        joined = parts.collect::<Result<Vec<_>, String>>()?.concat();
        &joined[..]
    } else {
        received.bytes().map_err(text)?
    };
    if bytes.len() as u64 != item.bytes {
        return Err(format!("{} bytes arrived", bytes.len()));
    }
    pattern::difference(item.seed, bytes).map_or(Ok(()), |at| Err(format!("byte {at} is wrong")))
}
