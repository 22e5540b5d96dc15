//! `demo`, `bench`, `soak` and `doctor`: builds the command `posthorse` in release mode, and runs it.

use std::ffi::OsString;
use std::io::BufReader;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use cargo_metadata::Message;

use crate::failure::Failure;

/// The package and the program it builds.
const PACKAGE: &str = "posthorse-cli";
const PROGRAM: &str = "posthorse";

/// Among a command's arguments, this has it run in a machine with RDMA devices.
const IN_MACHINE: &str = "--vm";

/// Runs `posthorse` with `command` and `arguments`; it has this process's input and output, and its status is passed
/// on.
///
/// With `--vm` among the arguments it is built with the feature `rdma`, and runs in a machine of `vm`.
pub(crate) fn run(command: &str, arguments: &[OsString]) -> Result<(), Failure> {
    let mut arguments = arguments.to_vec();
    let machine = arguments.iter().position(|argument| argument == IN_MACHINE);
    let mut process = match machine {
        Some(at) => {
            arguments.remove(at);
            let program = build(&["--features", "rdma"])?;
            let own = std::env::current_exe()
                .map_err(|error| Failure::Check(format!("find this program: {error}")))?;
            let mut process = Command::new(own);
            process.args(["vm", "--rails", "2", "--cpus", "2", "--timeout", "3600", "--"]).arg(program);
            process
        }
        None => Command::new(build(&[])?),
    };
    let status = process
        .arg(command)
        .args(arguments)
        .status()
        .map_err(|error| Failure::Check(format!("start {}: {error}", process.get_program().display())))?;
    passed_on(status)
}

fn passed_on(status: ExitStatus) -> Result<(), Failure> {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => Err(Failure::Status(u8::try_from(code).unwrap_or(1))),
        // As a shell says it.
        (None, signal) => Err(Failure::Status(128_u8.saturating_add(signal.unwrap_or(0) as u8))),
    }
}

/// Builds the program, and says where it is.
fn build(more: &[&str]) -> Result<PathBuf, Failure> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--release", "--package", PACKAGE, "--bin", PROGRAM]);
    cargo.args(more).arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let unavailable = |error| Failure::Unavailable(format!("cargo cannot be started: {error}"));
    let mut build = cargo.spawn().map_err(unavailable)?;
    let mut program = None;
    if let Some(output) = build.stdout.take() {
        for message in Message::parse_stream(BufReader::new(output)).map_while(Result::ok) {
            if let Message::CompilerArtifact(artifact) = message
                && artifact.target.name == PROGRAM
            {
                program = artifact.executable.map(|path| path.into_std_path_buf()).or(program);
            }
        }
    }
    let status = build.wait().map_err(|error| Failure::Check(format!("wait for cargo: {error}")))?;
    match program {
        Some(program) if status.success() => Ok(program),
        _ => Err(Failure::Check(format!("{PACKAGE} does not build"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_the_command_is_passed_on() {
        let status = |wait| passed_on(ExitStatus::from_raw(wait));
        assert_eq!(status(0), Ok(()));
        assert_eq!(status(3 << 8), Err(Failure::Status(3)));
        assert_eq!(status(9), Err(Failure::Status(137)));
    }
}
