//! `bench local`: both ends on this host, the target as a child process.

use std::time::Duration;

use clap::Args;

use super::grid::{Grid, default_memory};
use super::initiator;
use super::target::Announcement;
use crate::child::Peer;
use crate::outcome::Outcome;
use crate::stage::check_room;
use crate::units::parse_positive_size;

/// The arguments of `bench local`.
#[derive(Debug, Args)]
pub(crate) struct LocalArgs {
    #[command(flatten)]
    pub(crate) grid: Grid,
    /// Memory of each end; by default a few times the last-level cache. The limits take twice as much again
    #[arg(long, value_name = "SIZE", value_parser = parse_positive_size)]
    pub(crate) memory: Option<u64>,
}

/// Runs the command.
pub(crate) fn run(args: &LocalArgs) -> Outcome {
    if let Some(memory) = args.memory {
        check_room("--memory", memory, 2)?;
    }
    let memory = args.memory.unwrap_or_else(default_memory).to_string();
    let arguments = ["bench", "target", "--listen", "127.0.0.1:0", "--announce", "--memory", &memory];
    let mut target = Peer::spawn("target", &arguments)?;
    let Announcement { listening } = target.receive(Duration::from_secs(60))?;
    initiator::measure("local", listening, &args.grid)
}
