//! `check-layers` as a command, on a workspace made for the purpose and on this one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// A workspace of empty crates; each is given with its dependency tables.
fn workspace(crates: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("Cargo.toml"), "[workspace]\nresolver = \"3\"\nmembers = [\"*\"]\n").unwrap();
    for (name, tables) in crates {
        let folder = dir.path().join(name);
        fs::create_dir_all(folder.join("src")).unwrap();
        fs::write(folder.join("src/lib.rs"), "").unwrap();
        let manifest =
            format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n{tables}");
        fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    }
    dir
}

fn check_layers(root: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("check-layers").arg("--manifest-path").arg(root.join("Cargo.toml"));
    command.output().unwrap()
}

fn dependency(table: &str, name: &str) -> String {
    format!("[{table}]\n{name} = {{ path = \"../{name}\" }}\n")
}

#[test]
fn a_planted_upward_edge_fails_and_is_named() {
    let planted = dependency("dependencies", "posthorse-engine");
    let dir = workspace(&[("posthorse-core", &planted), ("posthorse-engine", "")]);
    let output = check_layers(dir.path());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    for part in ["posthorse-core (floor 0)", "posthorse-engine (floor 3)", "posthorse-core/Cargo.toml"] {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
}

#[test]
fn build_renamed_optional_and_target_dependencies_count_too() {
    for planted in [
        dependency("build-dependencies", "posthorse-engine"),
        dependency("target.'cfg(windows)'.dependencies", "posthorse-engine"),
        "[dependencies]\nx = { path = \"../posthorse-engine\", package = \"posthorse-engine\", optional = true }\n"
            .into(),
    ] {
        let dir = workspace(&[("posthorse-core", &planted), ("posthorse-engine", "")]);
        let output = check_layers(dir.path());
        assert_eq!(output.status.code(), Some(1), "{planted}");
    }
}

#[test]
fn downward_and_dev_dependencies_pass() {
    let dir = workspace(&[
        ("posthorse-core", &dependency("dev-dependencies", "posthorse-testkit")),
        ("posthorse-engine", &dependency("dependencies", "posthorse-core")),
        ("posthorse-testkit", ""),
    ]);
    let output = check_layers(dir.path());
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_crate_that_the_table_does_not_know_fails() {
    let dir = workspace(&[("posthorse-novel", "")]);
    let output = check_layers(dir.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("posthorse-novel"));
}

#[test]
fn this_workspace_passes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let output = check_layers(root);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn wrong_usage_is_status_2() {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("no-such-command").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
