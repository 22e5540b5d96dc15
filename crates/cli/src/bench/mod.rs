//! `posthorse bench`: what transfers reach, side by side with what the machine can.

mod end;
mod grid;
mod initiator;
mod limits;
mod local;
mod meter;
mod omni;
mod report;
mod row;
mod target;

use std::time::Duration;

use clap::Subcommand;

use crate::outcome::Outcome;
use crate::units::{LISTS_HELP, SIZE_HELP};

/// How long the bare loops spin before they block: as long as the TCP transport does.
const SPIN: Duration = Duration::from_micros(50);

/// The benches.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Offer memory to `bench initiator` on any machine
    #[command(after_help = SIZE_HELP)]
    Target(target::TargetArgs),
    /// Measure transfers to and from the memory of a `bench target`
    #[command(after_help = LISTS_HELP)]
    Initiator(initiator::InitiatorArgs),
    /// Measure both ends on this host
    #[command(after_help = LISTS_HELP)]
    Local(local::LocalArgs),
    /// Measure the connector's modes between two processes of this host
    #[command(after_help = LISTS_HELP)]
    Omni(omni::OmniArgs),
    /// Make one page of plots and tables from what `--json` wrote
    Report(report::ReportArgs),
}

/// Runs one of them.
pub(crate) fn run(bench: &Bench) -> Outcome {
    match bench {
        Bench::Target(args) => target::run(args),
        Bench::Initiator(args) => initiator::run(args),
        Bench::Local(args) => local::run(args),
        Bench::Omni(args) => omni::run(args),
        Bench::Report(args) => report::run(args),
    }
}
