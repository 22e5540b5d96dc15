//! Which cells are measured, and for how long.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::row::Cell;
use crate::units::{self, parse_duration, parse_positive_size};

/// How many rounds a cell is measured in; the limit is measured after each.
pub(crate) const ROUNDS: u32 = 5;

/// A direction, as seen from the initiator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Op {
    /// From the target's memory into the initiator's.
    Read,
    /// From the initiator's memory into the target's.
    Write,
}

impl Op {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A transport that comes with Posthorse and goes between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// Shared memory: both processes on one host
    Shm,
    /// TCP
    Tcp,
}

impl Transport {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// The grid of the engine's benches: every combination of these is a cell.
#[derive(Debug, Clone, Args)]
pub(crate) struct Grid {
    /// Transports, each required in its turn; all that reach the target by default
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub(crate) transport: Vec<Transport>,
    /// Operations
    #[arg(long, value_delimiter = ',', default_value = "read,write", value_name = "OPS")]
    pub(crate) op: Vec<Op>,
    /// Bytes of a request
    #[arg(long, value_delimiter = ',', default_value = "4KiB,64KiB,1MiB,16MiB,256MiB", value_name = "SIZES",
          value_parser = parse_positive_size)]
    pub(crate) block: Vec<u64>,
    /// Requests that are submitted and waited for together
    #[arg(long, value_delimiter = ',', default_value = "1,128", value_name = "COUNTS",
          value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) batch: Vec<u64>,
    /// Threads that each have one batch under way
    #[arg(long, value_delimiter = ',', default_value = "1,2", value_name = "COUNTS",
          value_parser = clap::value_parser!(u64).range(1..=64))]
    pub(crate) threads: Vec<u64>,
    /// How long each cell is measured; its limits take as long again
    #[arg(long, default_value = "3s", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) duration: Duration,
    /// Write the results to this file too, as JSON Lines
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl Grid {
    /// The cells of one transport and operation that fit `memory` bytes, and for each other cell why not.
    pub(crate) fn cells(
        &self,
        suite: &'static str,
        transport: Transport,
        op: Op,
        memory: u64,
    ) -> Vec<Result<Cell, String>> {
        let mut cells = Vec::new();
        for &block in &self.block {
            for &batch in &self.batch {
                for &threads in &self.threads {
                    let needed = block.checked_mul(batch).and_then(|bytes| bytes.checked_mul(threads));
                    cells.push(if needed.is_some_and(|needed| needed <= memory) {
                        let (transport, op) = (transport.name().to_owned(), op.name().to_owned());
                        Ok(Cell { suite, transport, op, block, batch, threads })
                    } else {
                        Err(format!(
                            "left out: {} x {batch}, threads {threads}: more than --memory {}",
                            units::size(block),
                            units::size(memory)
                        ))
                    });
                }
            }
        }
        cells
    }
}

/// What each end takes for its memory unless told otherwise: well above the last-level cache, so that blocks are
/// not found there by the time their turn comes again, and well below what the host has to spare.
pub(crate) fn default_memory() -> u64 {
    let available = posthorse_memory::available_memory().unwrap_or(8 << 30);
    memory_for(last_level_cache().unwrap_or(32 << 20), available)
}

fn memory_for(cache: u64, available: u64) -> u64 {
    let wanted = (3 * cache).next_multiple_of(256 << 20).max(512 << 20);
    // Each end takes as much, and the limits twice as much.
    wanted.min((available / 8).next_power_of_two() / 2).max(64 << 20)
}

/// The size of the largest cache, from sysfs.
fn last_level_cache() -> Option<u64> {
    let size = |index: u32| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        let text = std::fs::read_to_string(path).ok()?;
        text.trim().strip_suffix('K')?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    (0..8).filter_map(size).max()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        grid: Grid,
    }

    fn grid(arguments: &[&str]) -> Result<Grid, clap::Error> {
        Cli::try_parse_from([&["x"], arguments].concat()).map(|cli| cli.grid)
    }

    #[test]
    fn the_defaults_are_those_of_the_specification() {
        let grid = grid(&[]).unwrap();
        assert_eq!(grid.op, [Op::Read, Op::Write]);
        assert_eq!(grid.block, [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]);
        assert_eq!((grid.batch, grid.threads), (vec![1, 128], vec![1, 2]));
        assert_eq!((grid.duration, grid.json), (Duration::from_secs(3), None));
        assert!(grid.transport.is_empty());
    }

    #[test]
    fn a_bad_value_is_named_with_its_argument_and_what_is_accepted() {
        for (arguments, parts) in [
            (["--block", "4KiB,0"], ["--block", "'0'", "at least 1"]),
            (["--block", "4Kibi"], ["--block", "4Kibi", "KiB"]),
            (["--duration", "3"], ["--duration", "'3'", "ms"]),
            (["--op", "write,copy"], ["--op", "copy", "read, write"]),
            (["--transport", "rdma"], ["--transport", "rdma", "shm, tcp"]),
            (["--batch", "0"], ["--batch", "'0'", "1..=1000000"]),
        ] {
            let error = grid(&arguments).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn cells_that_do_not_fit_are_named() {
        let grid = grid(&["--block", "1MiB,1GiB", "--batch", "1,64", "--threads", "1"]).unwrap();
        let cells = grid.cells("local", Transport::Shm, Op::Read, 64 << 20);
        let fits: Vec<bool> = cells.iter().map(Result::is_ok).collect();
        assert_eq!(fits, [true, true, false, false]);
        let why = cells[2].as_ref().unwrap_err();
        assert!(why.contains("1 GiB") && why.contains("--memory 64 MiB"), "{why}");
    }

    #[test]
    fn memory_is_above_the_cache_and_below_what_there_is() {
        assert_eq!(memory_for(32 << 20, 64 << 30), 512 << 20);
        assert_eq!(memory_for(300 << 20, 64 << 30), 1 << 30);
        assert!(memory_for(300 << 20, 4 << 30) <= 512 << 20);
        assert_eq!(memory_for(1 << 30, 0), 64 << 20);
    }
}
