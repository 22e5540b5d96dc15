//! The examples run, in every way they can be started.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// The built example: beside the folder of this test's own program.
fn example(name: &str) -> Command {
    let deps = std::env::current_exe().unwrap();
    let path: PathBuf = deps.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(path.exists(), "cargo builds examples with the tests; {} is missing", path.display());
    Command::new(path)
}

fn succeeded(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{out}{err}", output.status);
    out.into_owned()
}

#[test]
fn two_stages_in_two_processes() {
    let out = succeeded(&example("two_stage").output().unwrap());
    assert!(out.contains("4 tensors") && out.contains("every byte is right"), "{out}");
}

#[test]
fn two_stages_started_one_by_one() {
    let mut producer =
        example("two_stage").arg("producer").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(producer.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.strip_prefix("offered at ").and_then(|rest| rest.split(';').next()).unwrap();
    let out = succeeded(&example("two_stage").args(["consumer", address]).output().unwrap());
    assert!(out.contains("every byte is right"), "{out}");
    drop(producer.stdin.take());
    assert!(producer.wait().unwrap().success());

    // Nobody is there any more: the consumer says so, and fails.
    let late = example("two_stage").args(["consumer", address]).output().unwrap();
    let err = String::from_utf8_lossy(&late.stderr);
    assert_eq!(late.status.code(), Some(1), "{err}");
    assert!(err.contains(address) && err.contains("PeerUnreachable"), "{err}");
}

#[test]
fn wrong_usage_is_told_from_failure() {
    assert_eq!(example("two_stage").arg("both").output().unwrap().status.code(), Some(2));
    let bad = example("two_stage").args(["consumer", "nowhere"]).output().unwrap();
    assert_eq!(bad.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&bad.stderr).contains("HOST:PORT"));
    assert_eq!(example("three_stage").arg("singer").output().unwrap().status.code(), Some(2));
}

#[test]
fn three_stages_stream() {
    let out = succeeded(&example("three_stage").output().unwrap());
    assert!(out.contains("24 chunks") && out.contains("every code is right"), "{out}");
}
