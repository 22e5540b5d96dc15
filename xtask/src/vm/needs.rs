//! The programs that a virtual machine is made with.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// Each program with the Debian package that has it.
const PROGRAMS: &[(&str, &str)] = &[
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("depmod", "kmod"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("ip", "iproute2"),
    ("rdma", "iproute2"),
    ("setpriv", "util-linux"),
];

/// Folders that a user's PATH often lacks.
const ADMINISTRATORS: &[&str] = &["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Where the programs are that go into the machine or are started by their path.
#[derive(Debug)]
pub(super) struct Programs {
    /// Statically linked: nothing else is there when it starts.
    pub(super) busybox: PathBuf,
    /// The search path with which all of them are found.
    pub(super) path: OsString,
}

/// Finds them, or says what to install.
pub(super) fn find() -> Result<Programs, Failure> {
    let own = env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> =
        env::split_paths(&own).chain(ADMINISTRATORS.iter().map(PathBuf::from)).collect();
    let busybox = locate("busybox", &folders).filter(|path| is_static(path));
    let missing = |&(program, _): &(&str, &str)| match program {
        "busybox" => busybox.is_none(),
        program => locate(program, &folders).is_none(),
    };
    let lacking: Vec<&(&str, &str)> = PROGRAMS.iter().filter(|entry| missing(entry)).collect();
    match busybox {
        Some(busybox) if lacking.is_empty() => {
            let path =
                env::join_paths(&folders).map_err(|error| Failure::Unavailable(format!("PATH: {error}")))?;
            Ok(Programs { busybox, path })
        }
        _ => Err(unavailable(&lacking)),
    }
}

fn unavailable(lacking: &[&(&str, &str)]) -> Failure {
    let programs: Vec<&str> = lacking.iter().map(|(program, _)| *program).collect();
    let mut packages: Vec<&str> = lacking.iter().map(|(_, package)| *package).collect();
    packages.dedup();
    Failure::Unavailable(format!(
        "a virtual machine needs {}: on Debian, `apt-get install {}` has it (elsewhere there is no kernel to fetch)",
        programs.join(", "),
        packages.join(" ")
    ))
}

fn locate(program: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    let executable = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    folders.iter().map(|folder| folder.join(program)).find(executable)
}

/// Whether a program asks for no loader.
fn is_static(program: &Path) -> bool {
    let loader = b"/ld-linux";
    fs::read(program).is_ok_and(|bytes| !bytes.windows(loader.len()).any(|part| part == loader))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_package_once() {
        let failure = unavailable(&[&("xz", "xz-utils"), &("ip", "iproute2"), &("rdma", "iproute2")]);
        let message = failure.message().unwrap();
        assert!(message.contains("xz, ip, rdma"), "{message}");
        assert!(message.contains("`apt-get install xz-utils iproute2`"), "{message}");
    }

    #[test]
    fn only_what_can_be_run_is_found_and_only_what_needs_no_loader_is_static() {
        let dir = tempfile::tempdir().unwrap();
        let folders = [dir.path().to_owned()];
        let file = dir.path().join("prog");
        fs::write(&file, "\x7fELF/lib64/ld-linux-x86-64.so.2").unwrap();
        assert_eq!(locate("prog", &folders), None);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(locate("prog", &folders), Some(file.clone()));
        assert!(!is_static(&file));
        fs::write(&file, "\x7fELF").unwrap();
        assert!(is_static(&file));
    }
}
