//! The machine itself: QEMU's command line, and seeing that QEMU ends when this process does.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

use super::needs::Programs;

/// What a machine is made of.
#[derive(Debug)]
pub(super) struct Machine<'a> {
    pub(super) cpus: u8,
    pub(super) memory: &'a str,
    pub(super) image: &'a Path,
    pub(super) initramfs: &'a Path,
    /// Where the kernel's console is written, and whether it says more than errors.
    pub(super) console: &'a Path,
    pub(super) verbose: bool,
    /// The sockets to which the streams of output go.
    pub(super) outputs: [&'a Path; 2],
    /// The run's folder, which the machine may read.
    pub(super) run: &'a Path,
    /// The folders that it may write.
    pub(super) writable: &'a [PathBuf],
}

impl Machine<'_> {
    /// QEMU's arguments; with `kvm` it runs on the processor itself, else it is emulated.
    fn arguments(&self, kvm: bool) -> Vec<OsString> {
        let (accelerator, cpu) = if kvm { ("kvm", "host") } else { ("tcg,thread=multi", "max") };
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |words: &[&OsStr]| arguments.extend(words.iter().map(|word| (*word).to_owned()));
        for word in ["-nodefaults", "-no-user-config", "-no-reboot"] {
            add(&[word.as_ref()]);
        }
        let cpus = self.cpus.to_string();
        // Under emulation the time stamp counter is as good as any clock, and no other process is to be guarded from.
        let level = if self.verbose { "loglevel=7" } else { "quiet" };
        let append = format!(
            "console=ttyS0 {level} panic=-1 random.trust_cpu=on mitigations=off tsc=reliable no_timer_check"
        );
        for (option, value) in [
            ("-M", "q35"),
            ("-accel", accelerator),
            ("-cpu", cpu),
            ("-smp", cpus.as_str()),
            ("-m", self.memory),
            ("-display", "none"),
            ("-nic", "none"),
            ("-append", append.as_str()),
            ("-device", "virtio-rng-pci"),
            ("-device", "virtio-serial-pci"),
        ] {
            add(&[option.as_ref(), value.as_ref()]);
        }
        add(&["-kernel".as_ref(), self.image.as_ref(), "-initrd".as_ref(), self.initramfs.as_ref()]);
        add(&["-serial".as_ref(), &value("file:", self.console, "")]);
        for (port, socket) in (1..).zip(self.outputs) {
            add(&["-chardev".as_ref(), &value(&format!("socket,id=port{port},path="), socket, "")]);
            let device = format!("virtserialport,chardev=port{port},nr={port}");
            add(&["-device".as_ref(), device.as_ref()]);
        }
        let root = ("root".to_owned(), Path::new("/"), ",readonly=on");
        let run = ("run".to_owned(), self.run, ",readonly=on");
        let writable = self.writable.iter().enumerate();
        let writable = writable.map(|(number, path)| (format!("rw{number}"), path.as_path(), ""));
        for (tag, path, mode) in [root, run].into_iter().chain(writable) {
            let rest = format!(",security_model=none,multidevs=remap{mode}");
            add(&["-fsdev".as_ref(), &value(&format!("local,id={tag},path="), path, &rest)]);
            let device = format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}");
            add(&["-device".as_ref(), device.as_ref()]);
        }
        arguments
    }

    /// Starts QEMU, and returns it with what it complains of.
    pub(super) fn start(&self, programs: &Programs) -> io::Result<(Running, ChildStderr)> {
        // It gets no signals from the terminal, which are this process's to handle, and if this process is killed,
        // the kernel kills it too.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]).args(self.arguments(kvm_works()));
        command.env("PATH", &programs.path).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let complaints = child.stderr.take();
        let running = Running(child);
        let complaints = complaints.ok_or_else(|| io::Error::other("QEMU has no standard error"))?;
        Ok((running, complaints))
    }
}

/// A value of an option with a path in it, in which QEMU wants commas twice.
fn value(before: &str, path: &Path, after: &str) -> OsString {
    let mut value = OsString::from(before);
    let path = path.as_os_str();
    match path.to_str() {
        Some(text) => value.push(text.replace(',', ",,")),
        None => value.push(path),
    }
    value.push(after);
    value
}

/// Whether there is KVM that can run any kernel: some hosts have the device, but no processor for it.
fn kvm_works() -> bool {
    let able = fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| has_virtualisation(&text));
    able && fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
}

fn has_virtualisation(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    flags.flat_map(str::split_whitespace).any(|flag| flag == "vmx" || flag == "svm")
}

/// A QEMU that runs; it is killed when this is dropped.
#[derive(Debug)]
pub(super) struct Running(Child);

impl Running {
    pub(super) fn kill(&mut self) {
        // It fails only where QEMU has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_given_folders_can_be_written() {
        let machine = Machine {
            cpus: 2,
            memory: "1G",
            image: Path::new("/c/vmlinux"),
            initramfs: Path::new("/r/initramfs"),
            console: Path::new("/r/console"),
            verbose: false,
            outputs: [Path::new("/r/out"), Path::new("/r/err")],
            run: Path::new("/r"),
            writable: &[PathBuf::from("/data,1")],
        };
        let arguments = machine.arguments(false);
        let shares: Vec<&str> = arguments
            .iter()
            .filter_map(|word| word.to_str().filter(|text| text.starts_with("local,")))
            .collect();
        assert_eq!(
            shares,
            [
                "local,id=root,path=/,security_model=none,multidevs=remap,readonly=on",
                "local,id=run,path=/r,security_model=none,multidevs=remap,readonly=on",
                "local,id=rw0,path=/data,,1,security_model=none,multidevs=remap",
            ]
        );
        assert!(arguments.contains(&"tcg,thread=multi".into()));
        assert!(machine.arguments(true).contains(&"kvm".into()));
    }

    #[test]
    fn a_processor_says_whether_it_has_virtualisation() {
        assert!(has_virtualisation("model name: x\nflags : fpu vmx sse\n"));
        assert!(has_virtualisation("flags\t\t: fpu svm\n"));
        assert!(!has_virtualisation("flags : fpu svm_lock\nmodel name: vmx\n"));
    }
}
