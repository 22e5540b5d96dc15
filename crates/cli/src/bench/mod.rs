//! `posthorse bench`: what transfers reach, side by side with what the machine can.

mod end;
mod grid;
mod initiator;
mod limits;
mod local;
mod meter;
mod report;
mod row;
mod target;

use clap::Subcommand;

use crate::outcome::Outcome;

/// The benches.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Offer memory to `bench initiator` on any machine
    Target(target::TargetArgs),
    /// Measure transfers to and from the memory of a `bench target`
    Initiator(initiator::InitiatorArgs),
    /// Measure both ends on this host
    Local(local::LocalArgs),
    /// Make one page of plots and tables from what `--json` wrote
    Report(report::ReportArgs),
}

/// Runs one of them.
pub(crate) fn run(bench: &Bench) -> Outcome {
    match bench {
        Bench::Target(args) => target::run(args),
        Bench::Initiator(args) => initiator::run(args),
        Bench::Local(args) => local::run(args),
        Bench::Report(args) => report::run(args),
    }
}
