//! Tests that skip themselves, and are counted as skipped.

use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// The folder into which skips are reported; `cargo xtask test` sets it and reads it afterwards.
const SKIP_DIR: &str = "POSTHORSE_SKIP_DIR";

/// Reports that the calling test cannot run here. The test must return at once, and must not report twice.
///
/// `name` says what is missing (letters, digits, `-`, `_` and `.`: it can be listed in `.ci/skips`), `reason`
/// why, in one line. Test runners have no outcome between passed and failed and hide what a passing test
/// prints, so the report goes to a file in the folder that the variable `POSTHORSE_SKIP_DIR` names, and to
/// standard error for those who run a test by hand.
///
/// # Panics
///
/// When the name is not of that form, the reason is empty, or the report cannot be written: a skip that
/// nobody hears of would be counted as a test that passed.
#[expect(clippy::panic, reason = "a test must fail rather than pass for a wrong reason")]
pub fn skip(name: &str, reason: &str) {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.is_empty() || !name.chars().all(is_name) {
        panic!("the name of a skip is `{name}`; accepted: letters, digits, `-`, `_` and `.`");
    }
    let reason = reason.trim().replace(['\n', '\r'], " ");
    if reason.is_empty() {
        panic!("the skip `{name}` needs a reason");
    }
    eprintln!("skip {name}: {reason}");
    if let Some(dir) = env::var_os(SKIP_DIR)
        && let Err(error) = report(Path::new(&dir), &format!("{name}: {reason}\n"))
    {
        panic!("the skip `{name}` cannot be reported in {}: {error}", Path::new(&dir).display());
    }
}

/// Writes `line` into a new file of `dir`.
fn report(dir: &Path, line: &str) -> io::Result<()> {
    // The process id tells most tests apart; those in a namespace of their own may share it.
    for attempt in 0_u32.. {
        match File::create_new(dir.join(format!("{}-{attempt}", std::process::id()))) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created?.write_all(line.as_bytes()),
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn each_report_is_a_file_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        report(dir.path(), "a: x\n").unwrap();
        report(dir.path(), "b: y\n").unwrap();
        let mut lines: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap())
            .collect();
        lines.sort();
        assert_eq!(lines, ["a: x\n", "b: y\n"]);
    }

    #[test]
    #[should_panic(expected = "accepted: letters")]
    fn a_name_with_a_colon_is_refused() {
        skip("a:b", "reason");
    }

    #[test]
    #[should_panic(expected = "needs a reason")]
    fn a_skip_without_a_reason_is_refused() {
        skip("a", " \n");
    }
}
