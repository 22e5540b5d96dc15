//! What `vm` is told on the command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::failure::Failure;

/// Rails per host: the third part of their addresses and of their MACs counts them.
const RAILS: std::ops::RangeInclusive<i64> = 1..=16;

/// The command line of `vm`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How many hosts there are: with 2, rail R of host A (aR, rxeR) is wired to rail R of host B (bR, rxeN+R)
    #[arg(long, default_value_t = 1, value_name = "1|2", value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(super) hosts: u8,
    /// RDMA devices per host
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(RAILS))]
    pub(super) rails: u8,
    /// All rails on one switch, so that every one reaches every other
    #[arg(long)]
    pub(super) mesh: bool,
    /// Processors of the machine: more than one boots slower where the host's are busy
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    pub(super) cpus: u8,
    /// Memory of the machine, such as 512M or 4G
    #[arg(long, default_value = "4G", value_name = "SIZE", value_parser = memory)]
    pub(super) mem: String,
    /// Huge pages of 2 MiB to reserve, mounted at /dev/hugepages
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(super) hugepages: u32,
    /// Seconds that all may take, boot included
    #[arg(long, default_value_t = 600, overrides_with = "timeout", value_name = "S", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) timeout: u32,
    /// A folder in which COMMAND may write on the host; what it writes elsewhere is lost
    #[arg(long, value_name = "DIR")]
    pub(super) rw: Vec<PathBuf>,
    /// The Debian package of the kernel, instead of what POSTHORSE_VM_KERNEL says or of the newest that suits
    #[arg(long, value_name = "PACKAGE", value_parser = package)]
    pub(super) kernel: Option<String>,
    /// Show the kernel's console at the end
    #[arg(long)]
    pub(super) verbose: bool,
    /// What to run in the machine
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

impl Options {
    /// What clap does not see: folders that are not there, and a name that `env` would take for a variable.
    pub(super) fn checked(mut self) -> Result<Self, Failure> {
        for folder in &mut self.rw {
            let full = folder.canonicalize().ok().filter(|full| full.is_dir());
            let accepted = || Failure::Usage(format!("--rw is {folder:?}; accepted: a folder that is there"));
            *folder = full.ok_or_else(accepted)?;
        }
        if self.command[0].as_encoded_bytes().contains(&b'=') {
            let name = &self.command[0];
            return Err(Failure::Usage(format!("COMMAND is {name:?}; accepted: a name without a `=`")));
        }
        Ok(self)
    }
}

/// An amount of memory as QEMU reads it.
fn memory(text: &str) -> Result<String, String> {
    let number = text.strip_suffix(['M', 'G']);
    match number.map(str::parse::<u32>) {
        Some(Ok(1..)) => Ok(text.to_owned()),
        _ => Err("accepted: a whole number of M or G, such as 512M or 4G".into()),
    }
}

/// The name of a Debian package: never an option of apt-get, nor a path.
pub(super) fn package(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.".contains(c);
    if text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err("accepted: the name of a Debian package, such as linux-image-amd64".into())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(words: &[&str]) -> Option<Options> {
        Line::try_parse_from([&["vm"], words].concat()).ok().map(|line| line.options)
    }

    #[test]
    fn options_stand_before_the_command_and_its_own_are_left_alone() {
        let options =
            parse(&["--hosts", "2", "--rails", "3", "--", "prog", "--rails", "x", "--", "y"]).unwrap();
        assert_eq!((options.hosts, options.rails, options.mesh), (2, 3, false));
        assert_eq!(options.command, ["prog", "--rails", "x", "--", "y"]);
    }

    #[test]
    fn what_makes_no_machine_is_wrong_usage() {
        for words in [
            &["--hosts", "3", "--", "true"][..],
            &["--rails", "0", "--", "true"],
            &["--rails", "17", "--", "true"],
            &["--mem", "4", "--", "true"],
            &["--mem", "0G", "--", "true"],
            &["--timeout", "0", "--", "true"],
            &["--kernel", "-y", "--", "true"],
            &["--kernel", "a/b", "--", "true"],
            &["--no-such-option", "--", "true"],
            &["--"],
            &[],
        ] {
            assert!(parse(words).is_none(), "{words:?}");
        }
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let options = parse(&["--rw", "/no/such/folder", "--", "true"]).unwrap();
        let failure = options.checked().unwrap_err();
        assert_eq!(failure.message(), Some("--rw is \"/no/such/folder\"; accepted: a folder that is there"));
        assert!(parse(&["--rw", "/", "--", "true"]).unwrap().checked().is_ok());
        assert!(parse(&["--", "a=b"]).unwrap().checked().is_err());
    }
}
