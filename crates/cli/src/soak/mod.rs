//! `posthorse soak`: puts and gets from many threads for long, every byte checked, the pools whole at the end.

mod consumer;
mod plan;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use posthorse_core::{Checksum, DType, Deadline, Error};
use posthorse_omni::config::Role;
use posthorse_omni::{Connector, ConnectorConfig, Edge, PutOptions, TensorSet};

use self::consumer::{Report, Setup};
use self::plan::{Form, Plan, tensors};
use crate::child::Peer;
use crate::demo::Choice;
use crate::outcome::{Failure, Outcome, note, print};
use crate::units::{self, parse_duration, parse_positive_size};
use crate::{pattern, stage};

pub(crate) use consumer::run as run_consumer;

/// The stages of the one edge.
const FROM: &str = "source";
const TO: &str = "sink";
/// How long a pool may take to become whole after the last transfer: longer than a vanished peer is waited for.
const WHOLE_WITHIN: Duration = Duration::from_secs(15);

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// How long to go on putting
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = parse_duration)]
    duration: Duration,
    /// Threads that put, and as many that get
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=256))]
    threads: u64,
    /// The largest payload; the smallest has one byte
    #[arg(long, default_value = "64MiB", value_name = "SIZE", value_parser = parse_positive_size)]
    max_size: u64,
    /// The pool of each process; at least four of the largest payloads
    #[arg(long, default_value = "512MiB", value_name = "SIZE", value_parser = parse_positive_size)]
    pool: u64,
    /// The transport; one that is named is required, not preferred
    #[arg(long, value_enum, default_value = "auto", value_name = "NAME")]
    transport: Choice,
    /// Kill the consumer every two seconds without warning, and start it anew
    #[arg(long)]
    chaos: bool,
    /// Repeat the sizes and contents of an earlier run
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

/// How often `--chaos` kills.
const KILL_EVERY: Duration = Duration::from_secs(2);

/// The configuration of both connectors.
fn config() -> ConnectorConfig {
    ConnectorConfig { checksum: Checksum::Full, ..ConnectorConfig::default() }
}

/// Runs the command.
pub(crate) fn run(args: &SoakArgs) -> Outcome {
    if args.pool / 4 < args.max_size {
        return Err(Failure::Usage(format!(
            "--pool is {}; accepted: at least four payloads of --max-size {}",
            units::size(args.pool),
            units::size(args.max_size)
        )));
    }
    stage::check_room("--pool", args.pool, 2)?;
    let seed = args.seed.map_or_else(crate::random, Ok)?;
    note(format_args!("seed {seed}"));
    let plan =
        Plan { seed, threads: args.threads, max_bytes: args.max_size, patience: Duration::from_secs(60) };
    let producer = stage::connector(Role::Sender, args.transport.name(), args.pool, config())?;
    let puts = Puts::default();
    let mut watch = Watch::new(args, &plan, &producer)?;
    let outcome = std::thread::scope(|scope| {
        for thread in 0..plan.threads {
            let (plan, producer, puts) = (&plan, &producer, &puts);
            scope.spawn(move || put_all(producer, plan, thread, puts));
        }
        let outcome = watch.until(Instant::now() + args.duration, args.chaos, &puts);
        puts.stop.store(true, Ordering::Release);
        outcome.and_then(|()| watch.finish())
    });
    let total = outcome?;
    let mut problems = puts.problems.lock().unwrap_or_else(PoisonError::into_inner).clone();
    problems.extend(total.problems);
    let put = puts.count.load(Ordering::Relaxed);
    if !args.chaos && total.gets != put {
        problems.push(format!("{put} payloads were put and {} got", total.gets));
    }
    if let Err(why) = until_whole(&producer) {
        problems.push(format!("the producer's pool: {why}"));
    }
    producer.close();
    let mut summary =
        format!("{put} puts, {} gets of {:.1} GB, every byte checked", total.gets, total.bytes as f64 / 1e9);
    if args.chaos {
        summary +=
            &format!("; consumers killed: {}, payloads that went with them: {}", watch.kills, total.lost);
    }
    print(&(summary + "\n"))?;
    if problems.is_empty() { Ok(()) } else { Err(Failure::Failed(problems.join("\nerror: "))) }
}

/// What the putting threads share.
#[derive(Debug, Default)]
struct Puts {
    stop: AtomicBool,
    count: AtomicU64,
    problems: Mutex<Vec<String>>,
}

/// Puts a thread's payloads until it is told to stop, and at last one that says so.
fn put_all(producer: &Connector, plan: &Plan, thread: u64, puts: &Puts) {
    let mut index = 0;
    let outcome = loop {
        if puts.stop.load(Ordering::Acquire) {
            let key = plan.item(thread, index).key;
            break producer.put_value(&Edge::new(FROM, TO), &key, &"the end", options(plan)).map(drop);
        }
        match put(producer, plan, thread, index) {
            Ok(()) => index += 1,
            Err(error) => break Err(error),
        }
        puts.count.fetch_add(1, Ordering::Relaxed);
    };
    if let Err(error) = outcome {
        let problem = format!("put {thread}-{index}: {error}");
        puts.problems.lock().unwrap_or_else(PoisonError::into_inner).push(problem);
    }
}

fn options(plan: &Plan) -> PutOptions {
    PutOptions { deadline: Some(Deadline::after(plan.patience)), ..PutOptions::default() }
}

fn put(producer: &Connector, plan: &Plan, thread: u64, index: u64) -> Result<(), Error> {
    let item = plan.item(thread, index);
    let edge = Edge::new(FROM, TO);
    if matches!(item.form, Form::Buffer | Form::Lease) {
        let mut buffer = producer.alloc(item.bytes, Deadline::after(plan.patience))?;
        pattern::fill(item.seed, buffer.bytes_mut()?);
        return producer.put(&edge, &item.key, buffer, options(plan)).map(drop);
    }
    let mut bytes = vec![0; item.bytes as usize];
    pattern::fill(item.seed, &mut bytes);
    if item.form == Form::Bytes {
        return producer.put(&edge, &item.key, &bytes[..], options(plan)).map(drop);
    }
    let mut set = TensorSet::new();
    let mut rest = &bytes[..];
    for (number, len) in tensors(item.bytes).into_iter().enumerate() {
        let (tensor, after) = rest.split_at(len as usize);
        set.push(&format!("tensor_{number}"), DType::U8, &[len], tensor)?;
        rest = after;
    }
    producer.put(&edge, &item.key, &set, options(plan)).map(drop)
}

/// Waits until every block of a connector's pool is back. (A consumer's own view of it may lag behind the transfer.)
fn until_whole(connector: &Connector) -> Result<(), String> {
    let begin = Instant::now();
    loop {
        let health = connector.health();
        if health.pool.is_whole() && health.withheld == 0 {
            return Ok(());
        }
        if begin.elapsed() > WHOLE_WITHIN {
            return Err(format!(
                "not whole after {WHOLE_WITHIN:?}: {:?}, {} withheld",
                health.pool, health.withheld
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts consumers, hears their reports, and kills them if asked to.
#[derive(Debug)]
struct Watch {
    plan: Plan,
    transport: Choice,
    pool: u64,
    address: (String, u16),
    consumer: Peer,
    latest: Report,
    /// Of the consumers before this one.
    before: Report,
    kills: u64,
}

impl Watch {
    fn new(args: &SoakArgs, plan: &Plan, producer: &Connector) -> Outcome<Self> {
        let latest = Report { next: vec![0; plan.threads as usize], ..Report::default() };
        let mut watch = Self {
            plan: plan.clone(),
            transport: args.transport,
            pool: args.pool,
            address: producer.address()?,
            consumer: Self::spawn()?,
            latest,
            before: Report::default(),
            kills: 0,
        };
        watch.introduce()?;
        Ok(watch)
    }

    fn spawn() -> Outcome<Peer> {
        Peer::spawn("consumer", &["soak-consumer"])
    }

    fn introduce(&mut self) -> Outcome {
        let (host, port) = self.address.clone();
        self.consumer.send(&Setup {
            plan: self.plan.clone(),
            transport: self.transport.name().to_owned(),
            pool_bytes: self.pool,
            host,
            port,
            next: self.latest.next.clone(),
            restarted: self.kills > 0,
        })
    }

    /// Hears reports until `end`, or until something has gone wrong.
    fn until(&mut self, end: Instant, chaos: bool, puts: &Puts) -> Outcome {
        let mut next_kill = Instant::now() + KILL_EVERY;
        while Instant::now() < end && self.latest.problems.is_empty() {
            if !puts.problems.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
                return Ok(());
            }
            self.latest = self.consumer.receive(self.plan.patience)?;
            if chaos && Instant::now() >= next_kill {
                self.restart()?;
                next_kill = Instant::now() + KILL_EVERY;
            }
        }
        Ok(())
    }

    /// Kills the consumer, and starts another where it was.
    fn restart(&mut self) -> Outcome {
        self.consumer.kill()?;
        self.kills += 1;
        self.before.gets += self.latest.gets;
        self.before.bytes += self.latest.bytes;
        self.before.lost += self.latest.lost;
        self.latest = Report { next: std::mem::take(&mut self.latest.next), ..Report::default() };
        self.consumer = Self::spawn()?;
        self.introduce()
    }

    /// Hears the last report, with what went before added to it.
    fn finish(&mut self) -> Outcome<Report> {
        while !self.latest.finished {
            self.latest = self.consumer.receive(2 * self.plan.patience)?;
        }
        let mut total = self.latest.clone();
        total.gets += self.before.gets;
        total.bytes += self.before.bytes;
        total.lost += self.before.lost;
        Ok(total)
    }
}
