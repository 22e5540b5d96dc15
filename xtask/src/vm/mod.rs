//! `vm`: runs a command in a throw-away virtual machine with RDMA devices in software (soft-RoCE).
//!
//! The command sees the host's file system, and is in the same folder with the same environment; what it writes is lost
//! but for the folders that `--rw` names.

mod cpio;
mod folder;
mod image;
mod kernel;
mod modules;
mod needs;
mod network;
mod options;
mod qemu;
mod quote;
mod stream;
mod watch;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use crate::failure::Failure;

pub(crate) use options::Options;

use cpio::Archive;
use folder::RunFolder;
use kernel::Kernel;
use needs::Programs;
use network::Network;
use qemu::Machine;
use watch::{Outcome, Watch};

/// The exit statuses beside those of the command, as `timeout` has them.
const TIMED_OUT: u8 = 124;
const BROKEN: u8 = 125;

/// Runs the command.
pub(crate) fn run(options: Options) -> Result<(), Failure> {
    let options = options.checked()?;
    let programs = needs::find()?;
    let kernel = kernel::get(options.kernel.as_deref(), &programs)?;
    let broken = |error: io::Error| Failure::Because(BROKEN, format!("the virtual machine: {error}"));
    // First, so that no signal leaves the folder behind.
    let watch = Watch::new().map_err(broken)?;
    let folder = RunFolder::new(&env::temp_dir()).map_err(broken)?;
    let outcome = boot(&options, &programs, &kernel, &folder, &watch).map_err(broken)?;
    drop(folder);
    match outcome {
        Outcome::Ended(0) => Ok(()),
        Outcome::Ended(status) => Err(Failure::Status(status)),
        Outcome::Signalled(signal) => Err(Failure::Status(128_u8.saturating_add(signal as u8))),
        Outcome::TimedOut => {
            Err(Failure::Because(TIMED_OUT, format!("--timeout is {} s, which have passed", options.timeout)))
        }
        Outcome::Broken(said) => {
            let what = "the virtual machine ended before the command did";
            Err(Failure::Because(BROKEN, format!("{what}\n{}", said.trim_end())))
        }
    }
}

fn boot(
    options: &Options,
    programs: &Programs,
    kernel: &Kernel,
    folder: &RunFolder,
    watch: &Watch,
) -> io::Result<Outcome> {
    // Unlike any name that the command may come across and print.
    let mark = fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned();
    write_run(options, folder, &mark)?;
    let initramfs = folder.file("initramfs");
    fs::write(&initramfs, archive(&kernel.modules, &programs.busybox)?)?;
    let (out, err, console) = (folder.file("out"), folder.file("err"), folder.file("console"));
    let machine = Machine {
        cpus: options.cpus,
        memory: &options.mem,
        image: &kernel.image,
        initramfs: &initramfs,
        console: &console,
        verbose: options.verbose,
        outputs: [&out, &err],
        run: folder.path(),
        writable: &options.rw,
    };
    watch.run(&machine, programs, &mark, Duration::from_secs(options.timeout.into()))
}

/// Writes what `guest.sh` reads.
fn write_run(options: &Options, folder: &RunFolder, mark: &str) -> io::Result<()> {
    fs::write(folder.file("guest.sh"), include_str!("guest.sh"))?;
    fs::write(folder.file("settings"), format!("end={mark}\nhugepages={}\n", options.hugepages))?;
    let lines = options.rw.iter().map(|path| [path.as_os_str().as_bytes(), b"\n"].concat());
    fs::write(folder.file("rw"), lines.collect::<Vec<_>>().concat())?;
    let network = Network { hosts: options.hosts, rails: options.rails, mesh: options.mesh };
    fs::write(folder.file("links"), network.links_batch())?;
    fs::write(folder.file("devices"), network.devices_batch())?;
    for (link, batch) in network.links().into_iter().zip(network.peers_batches()) {
        fs::write(folder.file(&format!("peers.{link}")), batch)?;
    }
    let told = [("", 1), ("_HOSTS", options.hosts), ("_RAILS", options.rails)];
    let told = told.map(|(name, value)| {
        (OsString::from(format!("POSTHORSE_VM{name}")), OsString::from(value.to_string()))
    });
    let command = options.command.iter().map(AsRef::<OsStr>::as_ref);
    let script = quote::script(&env::current_dir()?, env::vars_os().chain(told), command);
    fs::write(folder.file("command"), script)
}

/// What the machine starts with: the modules, and what loads them.
fn archive(modules: &Path, busybox: &Path) -> io::Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "lower", "merged", "modules", "proc", "upper"] {
        archive.folder(folder);
    }
    // The kernel opens it for the first program.
    archive.device("dev/console", (5, 1));
    archive.program("init", include_bytes!("init.sh"));
    archive.program("bin/busybox", &fs::read(busybox)?);
    for entry in fs::read_dir(modules)? {
        let entry = entry?;
        archive.file(&format!("modules/{}", entry.file_name().to_string_lossy()), &fs::read(entry.path())?);
    }
    Ok(archive.finish())
}
