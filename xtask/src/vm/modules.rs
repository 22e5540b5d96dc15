//! The modules of the kernel that the machine loads, in their order.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

/// What the machine needs, each after what it needs itself but does not name. Those that are built in are left out.
const WANTED: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "virtio_rng",
    "9pnet_virtio",
    "9p",
    "overlay",
    "dummy",
    "veth",
    "bridge",
    "sch_netem",
    "sch_tbf",
    "crc32c_generic",
    "crc32_generic",
    "libcrc32c",
    "rdma_rxe",
    "rdma_ucm",
];

/// The module without which there is no machine to be had.
const ESSENTIAL: &str = "rdma_rxe";

/// Copies the wanted modules of the kernel whose modules `installed` has, uncompressed, into the new folder `kept`, with
/// their names and options, as they are to be loaded, in the file `order`.
pub(super) fn keep(installed: &Path, kept: &Path, tool: impl Fn(&str) -> Command) -> Result<(), String> {
    let list = installed.join("modules.dep");
    let list = fs::read_to_string(&list).map_err(|error| format!("{}: {error}", list.display()))?;
    let files = in_order(WANTED, &list);
    if !files.iter().any(|file| module_name(file) == ESSENTIAL) {
        return Err(format!("it has no module {ESSENTIAL}"));
    }
    fs::create_dir(kept).map_err(|error| format!("{}: {error}", kept.display()))?;
    let mut order = String::new();
    for file in files {
        let from = installed.join(file);
        let failed = |error| format!("{}: {error}", from.display());
        let name = format!("{}.ko", module_name(file));
        let to = kept.join(&name);
        if file.ends_with(".xz") {
            let output = File::create(&to).map_err(failed)?;
            let mut xz = tool("xz");
            xz.args(["-d", "-c"]).arg(&from).stdin(Stdio::null()).stdout(output);
            if !xz.status().map_err(failed)?.success() {
                return Err(format!("{}: xz cannot unpack it", from.display()));
            }
        } else {
            fs::copy(&from, &to).map_err(failed)?;
        }
        order.push_str(&name);
        // One device would come with this module.
        order.push_str(if name == "dummy.ko" { " numdummies=0\n" } else { "\n" });
    }
    let path = kept.join("order");
    fs::write(&path, order).map_err(|error| format!("{}: {error}", path.display()))
}

/// The files of the modules `wanted` and of all that they depend on, each once and after what it depends on, by what
/// depmod has written.
fn in_order<'a>(wanted: &[&str], dependencies: &'a str) -> Vec<&'a str> {
    let lines = dependencies.lines().filter_map(|line| line.split_once(':'));
    let known: HashMap<String, (&str, &str)> =
        lines.map(|(file, needs)| (module_name(file), (file, needs))).collect();
    let mut order = Vec::new();
    for (file, needs) in wanted.iter().filter_map(|name| known.get(*name)) {
        // All of them stand there; the last one is the first to be loaded.
        for file in needs.split_whitespace().rev().chain([*file]) {
            if !order.contains(&file) {
                order.push(file);
            }
        }
    }
    order
}

/// The name of the module in `file`, with `_` for `-`: both stand for the same.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "kernel/net/virtio-console.ko.xz:\n\
        kernel/rxe/rdma_rxe.ko.xz: kernel/ib/ib_uverbs.ko.xz kernel/ib/ib_core.ko\n\
        kernel/ib/ib_uverbs.ko.xz: kernel/ib/ib_core.ko\n\
        kernel/ib/ib_core.ko:\n";

    #[test]
    fn a_module_comes_once_and_after_what_it_depends_on() {
        let order = in_order(&["virtio_console", "rdma_rxe", "built_in", "ib_uverbs"], DEPENDENCIES);
        assert_eq!(
            order,
            [
                "kernel/net/virtio-console.ko.xz",
                "kernel/ib/ib_core.ko",
                "kernel/ib/ib_uverbs.ko.xz",
                "kernel/rxe/rdma_rxe.ko.xz"
            ]
        );
    }

    #[test]
    fn modules_are_kept_with_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let (installed, kept) = (dir.path().join("installed"), dir.path().join("kept"));
        fs::create_dir_all(installed.join("kernel")).unwrap();
        let lines = "kernel/rdma_rxe.ko: kernel/dummy.ko\nkernel/dummy.ko:\n";
        fs::write(installed.join("modules.dep"), lines).unwrap();
        fs::write(installed.join("kernel/rdma_rxe.ko"), "rxe").unwrap();
        fs::write(installed.join("kernel/dummy.ko"), "dummy").unwrap();
        keep(&installed, &kept, |program| Command::new(program)).unwrap();
        assert_eq!(fs::read_to_string(kept.join("order")).unwrap(), "dummy.ko numdummies=0\nrdma_rxe.ko\n");
        assert_eq!(fs::read_to_string(kept.join("rdma_rxe.ko")).unwrap(), "rxe");
    }

    #[test]
    fn a_kernel_without_soft_roce_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("modules.dep"), "kernel/veth.ko:\n").unwrap();
        let why = keep(dir.path(), &dir.path().join("kept"), |program| Command::new(program)).unwrap_err();
        assert_eq!(why, "it has no module rdma_rxe");
    }
}
