//! Devices and their ports.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::{names, text};
use crate::gid::{Gid, GidKind};
use crate::verbs::GidEntry;

/// An RDMA device, as sysfs has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SysfsDevice {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// What it is: `CA` for a channel adapter, and for what speaks RoCE.
    pub node_type: Option<String>,
    /// The version of its firmware.
    pub firmware: Option<String>,
    /// The folder of the hardware below the root, links resolved; a device in software has none.
    pub hardware: Option<PathBuf>,
    /// Its PCI address, such as `0000:3b:00.0`.
    pub pci: Option<String>,
    /// The NUMA node that it is attached to.
    pub numa_node: Option<u16>,
    /// Its ports, by number.
    pub ports: Vec<SysfsPort>,
}

/// A port of a device, as sysfs has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SysfsPort {
    /// Its number, from one.
    pub number: u8,
    /// Its state: `ACTIVE` where it can be used.
    pub state: Option<String>,
    /// The state of the link: `LinkUp` where there is one.
    pub phys_state: Option<String>,
    /// Its speed in bytes per second.
    pub bytes_per_s: Option<u64>,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: Option<String>,
    /// Its addresses; the empty places of the table are left out.
    pub gids: Vec<GidEntry>,
    /// Its partition keys that are set.
    pub pkeys: Vec<u16>,
    /// The network interfaces behind it.
    pub interfaces: Vec<String>,
    /// The smallest MTU of these interfaces, in bytes.
    pub mtu: Option<u32>,
}

impl SysfsPort {
    /// Whether it can carry transfers now.
    pub fn is_active(&self) -> bool {
        self.state.as_deref() == Some("ACTIVE")
    }
}

/// The devices that the sysfs mounted at `root` (`/sys` as a rule) lists, by name; none where the kernel has no RDMA,
/// or a container does not show it.
pub fn devices(root: &Path) -> Vec<SysfsDevice> {
    let class = root.join("class/infiniband");
    names(&class).into_iter().map(|name| device(root, &class.join(&name), name)).collect()
}

fn device(root: &Path, folder: &Path, name: String) -> SysfsDevice {
    let hardware = fs::canonicalize(folder.join("device")).ok().filter(|path| path.is_dir());
    let pci = hardware.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    let pci = pci.filter(|name| is_pci_address(name)).map(str::to_owned);
    let numbers = names(folder.join("ports")).into_iter().filter_map(|name| name.parse().ok());
    let mut ports: Vec<SysfsPort> = numbers.map(|number| port(root, folder, number)).collect();
    ports.sort_by_key(|port| port.number);
    SysfsDevice {
        name,
        node_type: text(folder.join("node_type")).map(after_number),
        firmware: text(folder.join("fw_ver")).filter(|version| !version.is_empty()),
        pci,
        // The kernel says -1 where it does not know.
        numa_node: text(folder.join("device/numa_node")).and_then(|node| node.parse().ok()),
        hardware,
        ports,
    }
}

fn port(root: &Path, device: &Path, number: u8) -> SysfsPort {
    let folder = device.join("ports").join(number.to_string());
    let gids = gids(&folder);
    let mut interfaces: Vec<String> = gids.iter().filter_map(|entry| entry.interface.clone()).collect();
    // An adapter's own interfaces, where the table of addresses names none; `dev_port` counts ports from zero.
    interfaces.extend(names(device.join("device/net")).into_iter().filter(|name| {
        let port = text(device.join("device/net").join(name).join("dev_port"));
        port.and_then(|port| port.parse::<u8>().ok()).and_then(|port| port.checked_add(1)) == Some(number)
    }));
    // Soft-RoCE names the one interface that it runs over.
    interfaces.extend(text(device.join("parent")).filter(|name| is_interface(name)));
    interfaces.sort();
    interfaces.dedup();
    let mtu = |name: &String| text(root.join("class/net").join(name).join("mtu"))?.parse().ok();
    SysfsPort {
        number,
        state: text(folder.join("state")).map(after_number),
        phys_state: text(folder.join("phys_state")).map(after_number),
        bytes_per_s: text(folder.join("rate")).and_then(|rate| parse_rate(&rate)),
        link_layer: text(folder.join("link_layer")),
        pkeys: numbered(&folder.join("pkeys"))
            .filter_map(|(_, key): (u16, _)| u16::from_str_radix(text(key)?.strip_prefix("0x")?, 16).ok())
            .filter(|key| *key != 0)
            .collect(),
        mtu: interfaces.iter().filter_map(mtu).min(),
        gids,
        interfaces,
    }
}

fn gids(port: &Path) -> Vec<GidEntry> {
    let entry = |(index, path): (u8, PathBuf)| {
        let gid: Gid = text(path)?.parse().ok()?;
        let (kind, interface) = gid_attributes(port, index);
        (!gid.is_empty()).then_some(GidEntry { index, gid, kind, interface })
    };
    numbered(&port.join("gids")).filter_map(entry).collect()
}

/// For which protocol an address of a port is, and the interface behind it; `port` is the port's folder.
pub(crate) fn gid_attributes(port: &Path, index: u8) -> (Option<GidKind>, Option<String>) {
    let attribute = |kind: &str| text(port.join("gid_attrs").join(kind).join(index.to_string()));
    let kind = match attribute("types").as_deref() {
        Some("IB/RoCE v1") => Some(GidKind::InfiniBandOrRoceV1),
        Some("RoCE v2") => Some(GidKind::RoceV2),
        _ => None,
    };
    (kind, attribute("ndevs").filter(|name| is_interface(name)))
}

/// The files of a folder whose names are numbers, in the order of these.
fn numbered<N: std::str::FromStr + Ord + Copy>(folder: &Path) -> impl Iterator<Item = (N, PathBuf)> {
    let mut found: Vec<(N, PathBuf)> =
        names(folder).into_iter().filter_map(|name| Some((name.parse().ok()?, folder.join(name)))).collect();
    found.sort_by_key(|(number, _)| *number);
    found.into_iter()
}

/// The word of `4: ACTIVE`.
fn after_number(text: String) -> String {
    text.split_once(": ").map_or_else(|| text.clone(), |(_, word)| word.trim().to_owned())
}

/// The bytes per second of `100 Gb/sec (4X EDR)`.
fn parse_rate(text: &str) -> Option<u64> {
    let (number, _) = text.split_once(" Gb/sec")?;
    let gigabits: f64 = number.trim().parse().ok()?;
    // Far above every link that there is; what is damaged must not become a figure to plan with.
    (gigabits > 0.0 && gigabits < 1e6).then_some((gigabits * 1e9 / 8.0) as u64)
}

/// Whether this is a name of an interface, and no path to elsewhere.
fn is_interface(name: &str) -> bool {
    !name.is_empty()
        && name.len() < 16
        && !name.contains(['/', ' ', '\n', '\t'])
        && name != "."
        && name != ".."
}

/// Whether a name has the form `0000:3b:00.0`.
fn is_pci_address(name: &str) -> bool {
    let mut parts = name.split([':', '.']);
    let mut part = |digits: usize| {
        parts
            .next()
            .is_some_and(|part| part.len() >= digits && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    name.len() <= 16 && part(4) && part(2) && part(2) && part(1) && parts.next().is_none()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(path: &Path, content: impl AsRef<[u8]>) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// An adapter on the PCI bus, as mlx5 shows one.
    fn adapter(root: &Path) -> PathBuf {
        let pci = root.join("devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0");
        write(&pci.join("numa_node"), "1\n");
        write(&pci.join("net/eth2/dev_port"), "0\n");
        write(&root.join("class/net/eth2/mtu"), "9000\n");
        let device = root.join("class/infiniband/mlx5_0");
        fs::create_dir_all(&device).unwrap();
        symlink(&pci, device.join("device")).unwrap();
        write(&device.join("node_type"), "1: CA\n");
        write(&device.join("fw_ver"), "28.39.1002\n");
        let port = device.join("ports/1");
        for (file, content) in [
            ("state", "4: ACTIVE\n"),
            ("phys_state", "5: LinkUp\n"),
            ("rate", "100 Gb/sec (4X EDR)\n"),
            ("link_layer", "Ethernet\n"),
            ("gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001\n"),
            ("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            ("gids/10", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
            ("gid_attrs/types/0", "IB/RoCE v1\n"),
            ("gid_attrs/types/10", "RoCE v2\n"),
            ("gid_attrs/ndevs/10", "eth2\n"),
            ("pkeys/0", "0xffff\n"),
            ("pkeys/1", "0x0000\n"),
        ] {
            write(&port.join(file), content);
        }
        port
    }

    #[test]
    fn an_adapter_is_read_with_all_that_sysfs_says() {
        let root = tempfile::tempdir().unwrap();
        adapter(root.path());
        let devices = devices(root.path());
        let [device] = &devices[..] else { panic!("{devices:?}") };
        assert_eq!((&*device.name, device.node_type.as_deref()), ("mlx5_0", Some("CA")));
        assert_eq!(device.firmware.as_deref(), Some("28.39.1002"));
        assert_eq!((device.pci.as_deref(), device.numa_node), (Some("0000:3b:00.0"), Some(1)));
        let [port] = &device.ports[..] else { panic!("{device:?}") };
        assert!(port.is_active());
        assert_eq!(
            (port.phys_state.as_deref(), port.link_layer.as_deref()),
            (Some("LinkUp"), Some("Ethernet"))
        );
        assert_eq!((port.bytes_per_s, port.mtu), (Some(12_500_000_000), Some(9000)));
        assert_eq!((&port.pkeys[..], &port.interfaces[..]), (&[0xffff][..], &["eth2".to_owned()][..]));
        let kinds: Vec<_> =
            port.gids.iter().map(|gid| (gid.index, gid.kind, gid.interface.as_deref())).collect();
        let v1 = (0, Some(GidKind::InfiniBandOrRoceV1), None);
        assert_eq!(kinds, [v1, (10, Some(GidKind::RoceV2), Some("eth2"))]);
    }

    #[test]
    fn soft_roce_has_an_interface_and_no_hardware() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("class/infiniband/rxe0");
        write(&device.join("parent"), "eth0\n");
        write(&device.join("ports/1/state"), "1: DOWN\n");
        write(&root.path().join("class/net/eth0/mtu"), "1500\n");
        let [device] = &devices(root.path())[..] else { panic!() };
        assert_eq!((&device.hardware, &device.pci, device.numa_node), (&None, &None, None));
        assert_eq!(device.ports[0].interfaces, ["eth0"]);
        assert_eq!(device.ports[0].mtu, Some(1500));
        assert!(!device.ports[0].is_active());
    }

    #[test]
    fn what_is_damaged_is_left_out_and_the_device_listed() {
        let root = tempfile::tempdir().unwrap();
        let port = adapter(root.path());
        for (file, content) in [
            ("state", &b"\xff\xfe"[..]),
            ("rate", b"nan Gb/sec"),
            ("link_layer", &[b'x'; 5000]),
            ("gids/0", b"fe80"),
            ("gids/300", b"fe80:0000:0000:0000:0000:00ff:fe00:0001"),
            ("gid_attrs/ndevs/10", b"../../etc"),
            ("pkeys/0", b"65535"),
        ] {
            write(&port.join(file), content);
        }
        write(&port.join("../zero/state"), "4: ACTIVE");
        write(&root.path().join("class/net/eth2/mtu"), "-1");
        let [device] = &devices(root.path())[..] else { panic!() };
        let [port] = &device.ports[..] else { panic!("{device:?}") };
        assert_eq!((&port.state, port.bytes_per_s, &port.link_layer, port.mtu), (&None, None, &None, None));
        assert_eq!(port.gids.len(), 1);
        assert_eq!((port.gids[0].index, &port.gids[0].interface), (10, &None));
        assert!(port.pkeys.is_empty());
        assert!(devices(&root.path().join("none")).is_empty());
    }

    #[test]
    fn rates_and_addresses_have_one_form() {
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)"), Some(312_500_000));
        for bad in ["", "100", "-1 Gb/sec", "inf Gb/sec", "1e9 Gb/sec", "0 Gb/sec"] {
            assert_eq!(parse_rate(bad), None, "{bad}");
        }
        for good in ["0000:3b:00.0", "10000:e1:00.0"] {
            assert!(is_pci_address(good), "{good}");
        }
        for bad in ["", "virtual", "3b:00.0", "0000:3b:00", "0000:3b:00.0.0", "0000:zz:00.0"] {
            assert!(!is_pci_address(bad), "{bad}");
        }
    }
}
