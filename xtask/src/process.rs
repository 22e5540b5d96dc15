//! Running other programs.

use std::io::{self, Read, Seek, SeekFrom};
use std::process::{Command, Stdio};

/// How much of a program's output is kept, counted from its end.
const KEPT_BYTES: u64 = 4 << 20;

/// What a program said and how it ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The exit status, or `None` if a signal ended it.
    pub(crate) status: Option<i32>,
    /// Standard output and standard error as they came, at most the last 4 MiB.
    pub(crate) text: String,
}

impl Finished {
    pub(crate) fn success(&self) -> bool {
        self.status == Some(0)
    }
}

/// Runs `command` to its end and keeps its output.
///
/// The output goes through an unnamed file rather than a pipe: a process that the command leaves behind
/// may hold it open, and this still returns.
pub(crate) fn run(command: &mut Command) -> io::Result<Finished> {
    let mut file = tempfile::tempfile()?;
    let status = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?).status()?;
    let length = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(length.saturating_sub(KEPT_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(KEPT_BYTES).read_to_end(&mut bytes)?;
    Ok(Finished { status: status.code(), text: String::from_utf8_lossy(&bytes).into_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_outputs_are_kept_in_order_with_the_status() {
        let finished = run(Command::new("sh").args(["-c", "echo one; echo two >&2; echo; exit 5"])).unwrap();
        assert_eq!(finished.text, "one\ntwo\n\n");
        assert_eq!(finished.status, Some(5));
        assert!(!finished.success());
    }

    #[test]
    fn of_a_long_output_the_end_is_kept() {
        let finished =
            run(Command::new("sh").args(["-c", "head -c 5000000 /dev/zero; echo the end"])).unwrap();
        assert_eq!(finished.text.len() as u64, KEPT_BYTES);
        assert_eq!(&finished.text[finished.text.len() - 8..], "the end\n");
        assert!(finished.success());
    }
}
