//! `test`: everything that is checked before a change goes in.

mod count;
mod plan;
mod report;
mod skips;

use std::env;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Instant;

use cargo_metadata::Metadata;

use crate::failure::Failure;
use crate::process;
use crate::workspace;

use count::Tally;
use plan::{Count, Step, Work};
use report::{Report, Verdict};
use skips::{Skip, SkipList};

/// The variable that tells tests where to report that they skip themselves.
const SKIP_DIR: &str = "POSTHORSE_SKIP_DIR";

/// The list of what may be skipped in CI.
const SKIP_LIST: &str = ".ci/skips";

/// Runs the command. All steps are run, whether or not an earlier one failed.
pub(crate) fn run(all: bool) -> Result<(), Failure> {
    let metadata = workspace::load(None)?;
    let root = metadata.workspace_root.as_std_path();
    let listed = if in_ci() { Some(read_skip_list(root)?) } else { None };
    let mut report = Report::new(listed);
    for step in plan::steps(&metadata, all) {
        announce(step.name);
        let lines = match step.needs.iter().find_map(|need| need.met().err()) {
            Some(reason) => report.skip(Skip::new(step.name, reason)),
            None => {
                let started = Instant::now();
                let verdict = carry_out(&step, &metadata);
                report.step(step.name, started.elapsed(), verdict)
            }
        };
        print(&lines);
    }
    let (lines, good) = report.finish();
    print(&lines);
    if good { Ok(()) } else { Err(Failure::Reported) }
}

fn in_ci() -> bool {
    env::var("CI").is_ok_and(|value| value == "true")
}

fn read_skip_list(root: &Path) -> Result<SkipList, Failure> {
    let text = match fs::read_to_string(root.join(SKIP_LIST)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read.map_err(|error| Failure::Check(format!("{SKIP_LIST}: {error}")))?,
    };
    SkipList::parse(&text).map_err(|fault| Failure::Check(format!("{SKIP_LIST}:{fault}")))
}

fn carry_out(step: &Step, metadata: &Metadata) -> Verdict {
    match step.work {
        Work::Check(check) => match check(metadata) {
            Ok(faults) if faults.is_empty() => Verdict::one(true, String::new()),
            Ok(faults) => Verdict::one(false, faults.join("\n")),
            Err(error) => Verdict::one(false, error.to_string()),
        },
        Work::Commands(ref commands) => commands
            .iter()
            .fold(Verdict::default(), |sum, command| sum.and(run_command(step, command, metadata))),
    }
}

fn run_command(step: &Step, command: &plan::Invocation, metadata: &Metadata) -> Verdict {
    let Ok(skip_dir) = tempfile::tempdir() else {
        return Verdict::one(false, "no temporary folder can be made".into());
    };
    let mut process = command.process();
    process.current_dir(&metadata.workspace_root).env(SKIP_DIR, skip_dir.path());
    let finished = match process::run(&mut process) {
        Ok(finished) => finished,
        Err(error) => return Verdict::one(false, format!("{command}: {error}")),
    };
    let parse = match step.count {
        Count::Step => return Verdict::one(finished.success(), format!("$ {command}\n{}", finished.text)),
        Count::Nextest => count::nextest,
        Count::Libtest => count::libtest,
    };
    let skips = match skips::collect(skip_dir.path()) {
        Ok(skips) => skips,
        Err(error) => return Verdict::one(false, format!("skips of {}: {error}", step.name)),
    };
    let (tally, ignored) = Tally::of(parse(&finished.text), finished.success());
    Verdict::cases(tally, format!("$ {command}\n{}", finished.text))
        .with_self_skipped(skips)
        .with_ignored(step.name, ignored)
}

/// Says on a terminal what is being waited for; the step's own line then takes its place.
fn announce(name: &str) {
    if io::stdout().is_terminal() {
        print!("...   {name}\r");
        let _ = io::stdout().flush();
    }
}

fn print(text: &str) {
    // A closed standard output (`| head`) is no reason to stop checking: the exit status still tells.
    let _ = writeln!(io::stdout(), "{text}");
}
