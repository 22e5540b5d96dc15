//! `posthorse doctor`: what this host offers to transfers, what it lacks, and what mends that.
//!
//! All is read from files of the kernel: no library of a device is loaded, and nothing is changed.

mod host;
mod probes;
mod report;

use clap::Args;

use self::host::Host;
use crate::outcome::{Failure, Outcome, print};

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON array of the checks instead of a table
    #[arg(long)]
    json: bool,
    /// Fail when one of these checks is not ok, instead of when something is limited that can be mended
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    require: Vec<String>,
}

pub(crate) fn run(args: &DoctorArgs) -> Outcome {
    let checks = probes::all(&Host::this());
    let verdict = report::verdict(&checks, &args.require);
    // Of a wrong name nothing but the error is worth reading.
    if !matches!(verdict, Err(Failure::Usage(_))) {
        let text = if args.json {
            let json = serde_json::to_string_pretty(&checks);
            json.map_err(|error| Failure::Failed(format!("write the checks as JSON: {error}")))? + "\n"
        } else {
            report::table(&checks)
        };
        print(&text)?;
    }
    verdict
}
