#![doc = include_str!("../README.md")]
// These panic where nobody reads: `outcome::print` and `outcome::note` do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod bench;
mod channel;
mod child;
mod demo;
mod doctor;
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
use crate::units::{SIZE_AND_TIME_HELP, SIZE_HELP};

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
    #[command(after_help = format!("{DEMO_EXAMPLES}\n\n{SIZE_HELP}\nThe book's page Measuring explains the columns."))]
    Demo(demo::DemoArgs),
    /// The demo's second process
    #[command(hide = true)]
    DemoConsumer,
    /// Measure transfers side by side with what the machine can do at best
    #[command(subcommand, after_help = BENCH_EXAMPLES)]
    Bench(bench::Bench),
    /// Strain two processes with puts and gets from many threads, and check every byte
    #[command(after_help = format!("{SOAK_EXAMPLES}\n\n{SIZE_AND_TIME_HELP}"))]
    Soak(soak::SoakArgs),
    /// Show what this host offers to transfers, what its lack costs, and what mends it
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// The soak test's second process
    #[command(hide = true)]
    SoakConsumer,
}

const DOCTOR_EXAMPLES: &str = "Examples:
  posthorse doctor                                 a report, grouped by area
  posthorse doctor --json                          the same as one JSON array
  posthorse doctor --require rdma,huge_pages       for scripts: status 1 unless both are ok

Exit status: 0 nothing is limited that can be mended, or all that is required is ok; 1 otherwise; 2 wrong usage.
The book's page Doctor explains the checks.";

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
        Command::Doctor(args) => doctor::run(args),
        Command::SoakConsumer => soak::run_consumer(),
    }
}

/// A seed that no earlier run had.
fn random() -> Outcome<u64> {
    getrandom::u64().map_err(|error| Failure::Failed(format!("draw a random number: {error}")))
}

fn start_log() -> Outcome {
    let filter = match std::env::var(LOG_VARIABLE) {
        Ok(text) => log_filter(&text)?,
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

fn log_filter(text: &str) -> Outcome<EnvFilter> {
    let refused = |why: &str| {
        let accepted =
            "a level such as warn or debug, or directives such as posthorse_tcp=debug, separated by commas";
        Failure::Usage(format!("{LOG_VARIABLE} is {text:?}: {why}; accepted: {accepted}"))
    };
    // The filter takes these, and then logs what nobody would expect.
    if text.split(',').any(|directive| directive.trim_end().ends_with('=')) {
        return Err(refused("a directive has no level after its ="));
    }
    if text.contains(',') && text.split(',').any(|directive| directive.trim().is_empty()) {
        return Err(refused("a directive is empty"));
    }
    EnvFilter::try_new(text).map_err(|error| refused(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn what_to_log_is_understood_or_refused() {
        for good in ["warn", "", "posthorse_tcp=debug", "info,posthorse_tcp=debug", "[call{a=1}]=debug"] {
            assert!(log_filter(good).is_ok(), "{good}");
        }
        for bad in ["bogus=,,", "bogus=", "warn,", ",", "warn,,info", "a=b=c"] {
            let error = log_filter(bad).unwrap_err();
            let named = format!("POSTHORSE_LOG is {bad:?}: ");
            assert!(matches!(&error, Failure::Usage(why) if why.starts_with(&named)), "{error:?}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
