//! `fuzz`: the decoders of bytes from outside under libFuzzer, by way of cargo-fuzz.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use cargo_metadata::Metadata;

use crate::failure::Failure;
use crate::workspace;

/// The most memory that a decoder may ask for at once, in MiB: far more than any input has bytes.
const MALLOC_LIMIT_MB: u32 = 64;

/// How long one input may take, in seconds.
const TIMEOUT_S: u32 = 20;

/// Runs the command: `target`, or all of them one after the other, each for `duration`.
pub(crate) fn run(target: Option<&str>, duration: Duration) -> Result<(), Failure> {
    let root = workspace::load(None)?;
    let fuzz = workspace::load(Some(root.workspace_root.join("fuzz/Cargo.toml").as_std_path()))?;
    let targets = chosen(&names(&fuzz), target)?;
    if !Command::new("cargo")
        .args(["fuzz", "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
    {
        return Err(Failure::Unavailable(
            "cargo-fuzz is not installed: `cargo install cargo-fuzz --locked` installs it".into(),
        ));
    }
    // A stable compiler refuses the flags of the sanitizers unless it is told that this is meant.
    println!("with RUSTC_BOOTSTRAP=1, for a stable compiler");
    let mut failed = Vec::new();
    for name in targets {
        println!("fuzz  {name} for {} s", duration.as_secs());
        if !fuzzed(&root, &name, duration)? {
            failed.push(name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failure::Check(format!(
        "{}: the input lies in fuzz/artifacts; once the cause is found, it goes into fuzz/corpus",
        failed.join(", ")
    )))
}

/// Runs one target, and says whether it found nothing. What libFuzzer adds to the seeds stays out of the source tree.
fn fuzzed(root: &Metadata, name: &str, duration: Duration) -> Result<bool, Failure> {
    let folder = root.target_directory.join("fuzz");
    let grown = folder.join("corpus").join(name);
    fs::create_dir_all(&grown).map_err(|error| Failure::Check(format!("{grown}: {error}")))?;
    let seeds = root.workspace_root.join("fuzz/corpus").join(name);
    let mut command = Command::new("cargo");
    command.current_dir(&root.workspace_root).env("RUSTC_BOOTSTRAP", "1");
    command.args([
        "fuzz",
        "run",
        "--target-dir",
        folder.as_str(),
        name,
        grown.as_str(),
        seeds.as_str(),
        "--",
    ]);
    command.arg(format!("-max_total_time={}", duration.as_secs()));
    command.arg(format!("-malloc_limit_mb={MALLOC_LIMIT_MB}"));
    command.arg(format!("-timeout={TIMEOUT_S}"));
    command.arg("-print_final_stats=1");
    let status = command.status().map_err(|error| Failure::Check(format!("start cargo fuzz: {error}")))?;
    Ok(status.success())
}

/// The targets of the package `posthorse-fuzz`, by name.
fn names(fuzz: &Metadata) -> Vec<String> {
    let targets = fuzz.packages.iter().flat_map(|package| &package.targets);
    targets.filter(|target| target.is_bin()).map(|target| target.name.clone()).collect()
}

fn chosen(known: &[String], wanted: Option<&str>) -> Result<Vec<String>, Failure> {
    match wanted {
        None => Ok(known.to_vec()),
        Some(name) if known.iter().any(|known| known == name) => Ok(vec![name.to_owned()]),
        Some(name) => Err(Failure::Usage(format!("--target is {name:?}; accepted: {}", known.join(", ")))),
    }
}

/// A time as one writes it: `90s`, `10m`, `1h`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let accepted =
        || format!("{text:?}; accepted: a whole number of seconds, minutes or hours, such as 90s, 10m, 1h");
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(accepted)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        _ => return Err(accepted()),
    };
    let number: u32 = number.parse().ok().filter(|number| *number > 0).ok_or_else(accepted)?;
    Ok(Duration::from_secs(u64::from(number) * seconds))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_time_has_a_unit() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7200)));
        for text in ["", "s", "90", "0s", "-1s", "1.5m", "1d", "1µ"] {
            assert!(duration(text).unwrap_err().contains("accepted"), "{text}");
        }
    }

    #[test]
    fn a_target_that_is_not_there_is_wrong_usage() {
        let known = ["a".to_owned(), "b".to_owned()];
        assert_eq!(chosen(&known, None).unwrap(), known);
        assert_eq!(chosen(&known, Some("b")).unwrap(), ["b"]);
        let failure = chosen(&known, Some("c")).unwrap_err();
        assert_eq!(failure.message(), Some("--target is \"c\"; accepted: a, b"));
    }

    #[test]
    fn every_target_has_its_source_and_its_seeds() {
        let root = workspace::load(None).unwrap().workspace_root;
        let fuzz = workspace::load(Some(root.join("fuzz/Cargo.toml").as_std_path())).unwrap();
        let listed = |folder: &str, end: &str| -> BTreeSet<String> {
            let entries = fs::read_dir(root.join("fuzz").join(folder)).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.map(|name| name.strip_suffix(end).unwrap().to_owned()).collect()
        };
        let known: BTreeSet<String> = names(&fuzz).into_iter().collect();
        assert!(!known.is_empty());
        assert_eq!(listed("fuzz_targets", ".rs"), known);
        assert_eq!(listed("corpus", ""), known);
    }
}
