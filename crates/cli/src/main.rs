#![doc = include_str!("../README.md")]
// These panic where nobody reads: `outcome::print` and `outcome::note` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod channel;
mod child;
mod demo;
mod outcome;
mod pattern;
mod soak;
mod stage;
mod table;
mod units;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::outcome::{Failure, Outcome, note};

/// What to log, in the syntax of `tracing_subscriber::EnvFilter`.
const LOG_VARIABLE: &str = "POSTHORSE_LOG";

/// Shows, measures and strains tensor transfers on the machines at hand.
#[derive(Debug, Parser)]
#[command(
    name = "posthorse",
    version,
    after_help = "Exit status: 0 done and verified, 1 a failed or unverified transfer or check, 2 wrong usage, 3 not \
                  available on this host.\nPOSTHORSE_LOG=debug logs to standard error what happens inside."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Exchange tensors between two processes, in every way there is, and check every byte
    #[command(after_help = DEMO_EXAMPLES)]
    Demo(demo::DemoArgs),
    /// The demo's second process
    #[command(hide = true)]
    DemoConsumer,
    /// Measure transfers side by side with what the machine can do at best
    #[command(subcommand, after_help = BENCH_EXAMPLES)]
    Bench(bench::Bench),
    /// Strain two processes with puts and gets from many threads, and check every byte
    #[command(after_help = SOAK_EXAMPLES)]
    Soak(soak::SoakArgs),
    /// The soak test's second process
    #[command(hide = true)]
    SoakConsumer,
}

const SOAK_EXAMPLES: &str = "Examples:
  posthorse soak                                   a minute, 16 threads, 1 B to 64 MiB
  posthorse soak --duration 10m --chaos            and the consumer is killed again and again";

const DEMO_EXAMPLES: &str = "Examples:
  posthorse demo                                   a KV cache of 195 MB, by the best transport there is
  posthorse demo --transport tcp --size 16MiB --count 20
  posthorse demo --input model.safetensors --json";

const BENCH_EXAMPLES: &str = "Examples:
  posthorse bench local --json rows.jsonl          every transport, both operations, on this host
  posthorse bench local --transport shm --op write --block 4KiB --batch 64 --duration 1s
  posthorse bench target --listen 0.0.0.0:4789     on one machine, and on another:
  posthorse bench initiator --target 192.0.2.7:4789
  posthorse bench report rows.jsonl -o report.html";

fn main() -> ExitCode {
    let cli = Cli::parse();
    match start_log().and_then(|()| run(&cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            note(format_args!("error: {}", failure.message()));
            failure.exit_code()
        }
    }
}

fn run(command: &Command) -> Outcome {
    child::follow_parent()?;
    match command {
        Command::Demo(args) => demo::run(args),
        Command::DemoConsumer => demo::run_consumer(),
        Command::Bench(bench) => bench::run(bench),
        Command::Soak(args) => soak::run(args),
        Command::SoakConsumer => soak::run_consumer(),
    }
}

/// A seed that no earlier run had.
fn random() -> Outcome<u64> {
    getrandom::u64().map_err(|error| Failure::Failed(format!("draw a random number: {error}")))
}

fn start_log() -> Outcome {
    let filter = match std::env::var(LOG_VARIABLE) {
        Ok(text) => EnvFilter::try_new(&text).map_err(|error| {
            let accepted = "a level such as warn or debug, or directives such as posthorse_tcp=debug";
            Failure::Usage(format!("{LOG_VARIABLE} is {text:?}: {error}; accepted: {accepted}"))
        })?,
        Err(_) => EnvFilter::new("warn"),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // It would say on standard error that standard error takes nothing, and panic there.
        .log_internal_errors(false)
        .init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
