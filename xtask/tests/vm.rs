//! `vm` as a command, with real machines: what `cargo xtask test --all` runs as the step `vm`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The machine's own checks.
const CHECKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vm_checks.sh");

/// `vm` with its run folders in `temp`, so that what it leaves behind is seen.
fn vm(temp: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("vm").args(["--timeout", "300", "--mem", "1G"]).args(arguments);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env("TMPDIR", temp);
    command
}

fn run(arguments: &[&str]) -> Output {
    let temp = tempfile::tempdir().unwrap();
    let output = vm(temp.path(), arguments).output().unwrap();
    assert_eq!(left(temp.path()), Vec::<PathBuf>::new());
    assert_eq!(machines(temp.path()), Vec::<String>::new());
    output
}

/// What lies in the folder.
fn left(temp: &Path) -> Vec<PathBuf> {
    fs::read_dir(temp).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The processes that have the folder `temp` in their arguments: the machines that were started with it.
fn machines(temp: &Path) -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let has = |process: &PathBuf| {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(temp.to_str().unwrap())
    };
    processes.filter(has).map(|process| process.file_name().unwrap().to_str().unwrap().to_owned()).collect()
}

/// A machine in which a command waits, which has said so.
fn waiting(temp: &Path) -> Child {
    let command = &["--", "sh", "-c", "echo ready; exec sleep 1000"];
    let mut child = vm(temp, command).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

fn signal(name: &str, child: &Child) {
    let status = Command::new("kill").arg(name).arg(child.id().to_string()).status().unwrap();
    assert!(status.success());
}

#[track_caller]
fn assert_well(output: &Output) {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success() && text.contains("all is well"), "{}: {text}", output.status);
}

#[test]
fn wires_join_the_rails_of_two_hosts() {
    let options = ["--hosts", "2", "--rails", "2", "--hugepages", "8", "--", "sh", CHECKS];
    assert_well(&run(&[&options[..], &["pairs"]].concat()));
}

#[test]
fn a_switch_joins_all_rails() {
    let options = ["--hosts", "2", "--rails", "2", "--mesh", "--hugepages", "8", "--", "sh", CHECKS];
    assert_well(&run(&[&options[..], &["mesh"]].concat()));
}

#[test]
fn long_output_is_complete_whoever_still_holds_the_pipe() {
    let script = "sleep 1000 & seq 1500000; printf unended >&2; exit 7";
    let output = run(&["--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().last(), Some("unended"));
    let expected: String = (1..=1_500_000).map(|number| format!("{number}\n")).collect();
    assert!(expected.len() > 10_000_000);
    assert!(output.stdout == expected.as_bytes(), "{} bytes came", output.stdout.len());
}

#[test]
fn the_command_is_where_it_would_be_and_writes_only_what_it_may() {
    let (kept, lost) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [kept, lost] = [&kept, &lost].map(|dir| dir.path().to_str().unwrap());
    let script = "pwd; cat; echo kept >\"$1/file\"; echo lost >\"$2/file\"; cat \"$2/file\"; kill -9 $$";
    let output = run(&["--rw", kept, "--", "sh", "-c", script, "sh", kept, lost]);
    assert_eq!(output.status.code(), Some(137), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, format!("{}\nlost\n", env!("CARGO_MANIFEST_DIR")));
    assert_eq!(fs::read_to_string(Path::new(kept).join("file")).unwrap(), "kept\n");
    assert!(!Path::new(lost).join("file").exists());
}

#[test]
fn a_command_that_is_not_there_is_status_127() {
    let output = run(&["--", "posthorse-no-such-program"]);
    assert_eq!(output.status.code(), Some(127));
    assert!(String::from_utf8_lossy(&output.stderr).contains("posthorse-no-such-program"));
}

#[test]
fn the_time_limit_ends_all() {
    let output = run(&["--timeout", "3", "--", "sleep", "1000"]);
    assert_eq!(output.status.code(), Some(124));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--timeout is 3 s"));
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    let temp = tempfile::tempdir().unwrap();
    let mut child = waiting(temp.path());
    assert_eq!(machines(temp.path()).len(), 1);
    signal("-INT", &child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(left(temp.path()), Vec::<PathBuf>::new());
    assert_eq!(machines(temp.path()), Vec::<String>::new());
}

#[test]
fn a_killed_run_takes_its_machine_with_it_and_the_next_one_removes_its_folder() {
    let temp = tempfile::tempdir().unwrap();
    let mut child = waiting(temp.path());
    let machines = machines(temp.path());
    signal("-KILL", &child);
    child.wait().unwrap();
    for machine in machines {
        let gone =
            Command::new("timeout").args(["20", "tail", "-f", "/dev/null", "--pid"]).arg(&machine).status();
        assert!(gone.unwrap().success(), "process {machine} goes on");
    }
    assert_eq!(left(temp.path()).len(), 1);
    let next = vm(temp.path(), &["--timeout", "1", "--", "true"]).output().unwrap();
    assert_eq!(next.status.code(), Some(124));
    assert_eq!(left(temp.path()), Vec::<PathBuf>::new());
}
