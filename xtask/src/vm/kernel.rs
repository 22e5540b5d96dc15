//! The kernel of the machine: a Debian package, fetched once, unpacked into the cache, and never installed.

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::failure::Failure;
use crate::{process, workspace};

use super::needs::Programs;
use super::{image, modules, options};

/// The packages that are tried, one after the other, where none is asked for.
const PACKAGES: &[&str] = &["linux-image-6.12-amd64", "linux-image-amd64"];
/// The variable that names another.
const PACKAGE_VARIABLE: &str = "POSTHORSE_VM_KERNEL";
/// The variable that says where kernels are kept.
const CACHE_VARIABLE: &str = "POSTHORSE_VM_CACHE";
/// Goes up when what is kept of a kernel changes.
const LAYOUT: u32 = 1;

/// A kernel in the cache.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The kernel itself, uncompressed.
    pub(super) image: PathBuf,
    /// The folder of the modules that the machine loads.
    pub(super) modules: PathBuf,
}

/// The kernel of the package `wanted`, from the cache if it is there.
pub(super) fn get(wanted: Option<&str>, programs: &Programs) -> Result<Kernel, Failure> {
    let named = match (wanted, env::var(PACKAGE_VARIABLE)) {
        (Some(package), _) => Some(package.to_owned()),
        (None, Ok(package)) => {
            let wrong = |why| Failure::Usage(format!("{PACKAGE_VARIABLE} is {package:?}; {why}"));
            Some(options::package(&package).map_err(wrong)?)
        }
        (None, Err(_)) => None,
    };
    let candidates: Vec<&str> = named.as_deref().map_or_else(|| PACKAGES.to_vec(), |name| vec![name]);
    let cache = match env::var_os(CACHE_VARIABLE) {
        Some(folder) => PathBuf::from(folder),
        None => workspace::load(None)?.target_directory.join("vm").into(),
    };
    let failed = |error: io::Error| Failure::Check(format!("the cache {}: {error}", cache.display()));
    // The programs run in other folders.
    let cache = fs::create_dir_all(&cache).and_then(|()| cache.canonicalize()).map_err(failed)?;
    // Of two runs at once one fetches, and the other one waits for it.
    let lock = File::create(cache.join("lock")).map_err(failed)?;
    lock.lock().map_err(failed)?;
    let mut reasons = Vec::new();
    for package in candidates {
        let folder = cache.join(format!("{package}-{LAYOUT}"));
        if !folder.exists() {
            let building = cache.join("building");
            if let Err(reason) = fetch(package, &building, &folder, programs) {
                // What is left of it goes with the next attempt at the latest.
                let _ = fs::remove_dir_all(&building);
                reasons.push(format!("{package}: {reason}"));
                continue;
            }
        }
        return Ok(Kernel { image: folder.join("vmlinux"), modules: folder.join("modules") });
    }
    Err(Failure::Unavailable(format!("there is no kernel for a virtual machine: {}", reasons.join("; "))))
}

/// Makes `folder` with the kernel of `package`, all of it or nothing, by way of the folder `building`.
fn fetch(package: &str, building: &Path, folder: &Path, programs: &Programs) -> Result<(), String> {
    let failed = |error: io::Error| format!("{}: {error}", building.display());
    // What a run that was killed has left goes first.
    if building.exists() {
        fs::remove_dir_all(building).map_err(failed)?;
    }
    let (download, root, kept) = (building.join("download"), building.join("root"), building.join("kept"));
    for made in [&download, &root, &kept] {
        fs::create_dir_all(made).map_err(failed)?;
    }
    let tool = |program: &str| {
        let mut command = Command::new(program);
        command.env("PATH", &programs.path).env("LC_ALL", "C").current_dir(&download);
        command
    };
    let may_help = |why| format!("{why} (`apt-get update` may help)");
    let depends = said(tool("apt-cache").args(["depends", package])).map_err(may_help)?;
    let real = real_package(package, &depends);
    eprintln!("fetching the package {real}, once, for {}", folder.display());
    said(tool("apt-get").args(["--quiet", "download", &real])).map_err(may_help)?;
    let archive = only_entry(&download, "")?;
    said(tool("dpkg-deb").arg("--extract").arg(&archive).arg(&root))?;
    unpack(&only_entry(&root.join("boot"), "vmlinuz-")?, &kept.join("vmlinux"), tool)?;
    let installed = only_entry(&root.join("lib/modules"), "")?;
    let version = installed.file_name().unwrap_or_default();
    said(tool("depmod").arg("--basedir").arg(&root).arg(version))?;
    modules::keep(&installed, &kept.join("modules"), tool)?;
    fs::rename(&kept, folder).map_err(failed)?;
    fs::remove_dir_all(building).map_err(failed)
}

/// Unpacks the kernel within the bzImage at `from`.
fn unpack(from: &Path, to: &Path, tool: impl Fn(&str) -> Command) -> Result<(), String> {
    let name = from.display();
    let failed = |error: io::Error| format!("{name}: {error}");
    let image = fs::read(from).map_err(failed)?;
    let (payload, words) = image::payload(&image).map_err(|why| format!("{name}: {why}"))?;
    let packed = to.with_extension("packed");
    fs::write(&packed, payload).map_err(failed)?;
    let mut command = tool(words[0]);
    command.args(&words[1..]).stdin(File::open(&packed).map_err(failed)?);
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().map_err(failed)?;
    if !output.status.success() || !image::is_kernel(&output.stdout) {
        return Err(format!(
            "{name}: {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    fs::write(to, &output.stdout).map_err(failed)?;
    fs::remove_file(&packed).map_err(failed)
}

/// What a program says; as an error, if it fails.
pub(super) fn said(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let finished = process::run(command).map_err(|error| format!("{name} cannot be started: {error}"))?;
    if finished.success() { Ok(finished.text) } else { Err(format!("{name}: {}", finished.text.trim())) }
}

/// The package with the kernel: `package` itself, or that on which it depends if it is an empty one that only points to
/// the newest.
fn real_package(package: &str, depends: &str) -> String {
    let image = |line: &str| {
        let name = line.trim().strip_prefix("Depends: ")?;
        name.starts_with("linux-image-").then(|| name.to_owned())
    };
    depends.lines().find_map(image).unwrap_or_else(|| package.to_owned())
}

/// The one entry of `folder` whose name begins with `start`.
fn only_entry(folder: &Path, start: &str) -> Result<PathBuf, String> {
    let failed = |error: io::Error| format!("{}: {error}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_encoded_bytes().starts_with(start.as_bytes()) {
            found.push(entry.path());
        }
    }
    match <[PathBuf; 1]>::try_from(found) {
        Ok([path]) => Ok(path),
        Err(found) => Err(format!("{} has {} entries {start}*, not one", folder.display(), found.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_package_leads_to_the_real_one() {
        let empty = "linux-image-amd64\n  Depends: linux-image-6.1.0-9-amd64\n";
        assert_eq!(real_package("linux-image-amd64", empty), "linux-image-6.1.0-9-amd64");
        let real = "linux-image-6.1.0-9-amd64\n  Depends: kmod\n |Depends: initramfs-tools\n";
        assert_eq!(real_package("linux-image-6.1.0-9-amd64", real), "linux-image-6.1.0-9-amd64");
    }

    #[test]
    fn a_compressed_kernel_is_unpacked_and_nothing_else_is_taken_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("vmlinuz"), dir.path().join("vmlinux"));
        // A stand-in for `gzip -d -c`: what comes in goes out.
        let cat = |_: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", "tail -c +3", "sh"]);
            command
        };
        let image = |kernel: &[u8]| {
            let mut image = vec![0; 1024];
            image[0x202..0x206].copy_from_slice(b"HdrS");
            image[0x1f1] = 1;
            image[0x24c..0x250].copy_from_slice(&(kernel.len() as u32 + 6).to_le_bytes());
            [&image, &b"\x1f\x8b"[..], kernel, b"SIZE"].concat()
        };
        fs::write(&from, image(b"\x7fELF and so on")).unwrap();
        unpack(&from, &to, cat).unwrap();
        assert_eq!(fs::read(&to).unwrap(), b"\x7fELF and so on");
        fs::write(&from, image(b"text")).unwrap();
        assert!(unpack(&from, &to, cat).unwrap_err().contains("vmlinuz: gzip -d -c"));
    }

    #[test]
    fn of_several_entries_none_is_chosen() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("vmlinuz-1"), "").unwrap();
        fs::write(dir.path().join("config-1"), "").unwrap();
        assert_eq!(only_entry(dir.path(), "vmlinuz-"), Ok(dir.path().join("vmlinuz-1")));
        assert!(only_entry(dir.path(), "").unwrap_err().ends_with(" has 2 entries *, not one"));
        let absent = only_entry(&dir.path().join("boot"), "").unwrap_err();
        assert!(absent.contains("/boot: No such file"), "{absent}");
    }

    #[test]
    fn what_a_program_complains_of_is_passed_on() {
        let why = said(Command::new("sh").args(["-c", "echo no space >&2; exit 1"])).unwrap_err();
        assert_eq!(why, "sh: no space");
        assert!(said(&mut Command::new("posthorse-no-such-program")).is_err());
    }
}
