//! `posthorse demo`: two processes exchange tensors in every way there is, and check every byte.

mod consumer;
mod pair;
mod payload;
mod record;

use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use self::record::{Record, render};
use crate::outcome::{Failure, Outcome, note, print};
use crate::units::parse_size;

pub(crate) use consumer::run as run_consumer;
pub(crate) use pair::{Choice, Mode, Pair};
pub(crate) use payload::Payload;

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Move the tensors of this file instead of a KV cache of random numbers
    #[arg(long, value_name = "FILE.safetensors", conflicts_with = "size")]
    input: Option<PathBuf>,
    /// The transport; one that is named is required, not preferred
    #[arg(long, value_enum, default_value = "auto", value_name = "NAME")]
    transport: Choice,
    /// Bytes of the KV cache, rounded down to whole tokens of 57344 bytes; by default 3400 tokens
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Transfers in each mode
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// Write one JSON line for each transfer, and nothing else, to standard output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(args: &DemoArgs) -> Outcome {
    let payload = match &args.input {
        Some(path) => Payload::read(path)?,
        None => Payload::kv_cache("--size", args.size, crate::random()?)?,
    };
    let mut pair = Pair::new(args.transport, &payload)?;
    let transport = pair.first_contact(args.transport)?;
    let modes = Mode::over(&transport);
    if !modes.contains(&Mode::Lease) {
        let lease = Mode::Lease.name();
        note(format_args!(
            "left out: {lease}, which reads the producer's memory in place; {transport} cannot"
        ));
    }
    let bar = ProgressBar::new(modes.len() as u64 * u64::from(args.count));
    if let Ok(style) = ProgressStyle::with_template("{msg:10} [{bar:40}] {pos}/{len}") {
        bar.set_style(style);
    }
    let mut records = Vec::new();
    for mode in modes {
        bar.set_message(mode.name());
        for index in 0..args.count {
            let record =
                Record::of(&pair.transfer(mode, &payload, &format!("{}-{index}", mode.name()), true)?);
            if args.json {
                let line =
                    serde_json::to_string(&record).map_err(|error| Failure::Failed(error.to_string()))?;
                print(&format!("{line}\n"))?;
            }
            records.push(record);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    pair.finish()?;
    if !args.json {
        print(&render(&records))?;
    }
    match records.iter().filter(|record| !record.verified).count() {
        0 => Ok(()),
        wrong => Err(Failure::Failed(format!("{wrong} of {} transfers are not verified", records.len()))),
    }
}
