#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod failure;
mod fuzz;
mod layers;
mod process;
mod product;
mod test;
mod tidy;
mod vm;
mod workspace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

/// Exit status: 0 done and verified, 1 a check failed, 2 wrong usage, 3 not available on this host.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "What one runs in the source tree")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Exchange tensors between two processes and check every byte: `posthorse demo`
    #[command(disable_help_flag = true)]
    Demo(Arguments),
    /// Measure transfers beside what the machine can do: `posthorse bench`
    #[command(disable_help_flag = true)]
    Bench(Arguments),
    /// Strain two processes with puts and gets for long: `posthorse soak`
    #[command(disable_help_flag = true)]
    Soak(Arguments),
    /// Show what this host offers to transfers, and what mends its lacks: `posthorse doctor`
    #[command(disable_help_flag = true)]
    Doctor(Arguments),
    /// Run the checks and test suites that any Linux machine can run
    Test {
        /// Also run what needs more: loom models, Miri, examples, benchmarks
        #[arg(long)]
        all: bool,
    },
    /// Hand the decoders of bytes from outside what libFuzzer thinks of: needs cargo-fuzz
    Fuzz {
        /// The only target to run, instead of all of them one after the other
        #[arg(long, value_name = "NAME")]
        target: Option<String>,
        /// How long each target runs, such as 90s, 10m or 1h
        #[arg(long, value_name = "TIME", default_value = "60s", value_parser = fuzz::duration)]
        duration: Duration,
    },
    /// Check that no crate depends on its own floor or a higher one
    CheckLayers {
        /// The Cargo.toml of the workspace to check, instead of the one around the current folder
        #[arg(long, value_name = "PATH")]
        manifest_path: Option<PathBuf>,
    },
    /// Run a command in a throw-away virtual machine with RDMA devices in software
    ///
    /// The command sees this host's file system and environment. Exit status: the command's own; 124 where the time limit has
    /// passed, 125 where the machine failed, 2 for wrong usage, 3 where this host lacks what it needs.
    Vm(vm::Options),
}

/// What is handed to the command as it is, `--help` too.
#[derive(Debug, Args)]
struct Arguments {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(args) => product::run("demo", &args.arguments),
        Command::Bench(args) => product::run("bench", &args.arguments),
        Command::Soak(args) => product::run("soak", &args.arguments),
        Command::Doctor(args) => product::run("doctor", &args.arguments),
        Command::Test { all } => test::run(all),
        Command::Fuzz { target, duration } => fuzz::run(target.as_deref(), duration),
        Command::Vm(options) => vm::run(options),
        Command::CheckLayers { manifest_path } => layers::run(manifest_path.as_deref()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(message) = failure.message() {
                eprintln!("error: {message}");
            }
            failure.exit_code()
        }
    }
}
