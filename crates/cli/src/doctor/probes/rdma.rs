//! RDMA devices, and what they need.

use posthorse_rdma::GidKind;
use posthorse_rdma::sysfs::{SysfsDevice, SysfsPort, devices};

use super::{Probe, size};
use crate::doctor::host::Host;
use crate::doctor::report::{Check, State};

const AREA: &str = "RDMA";

pub(super) const PROBES: &[Probe] = &[rdma, gids, mtu, libibverbs, relaxed_ordering, locked_memory];

/// A RoCE packet carries 4096 bytes only where an Ethernet frame holds them and their headers.
const FULL_MTU: u32 = 4200;

pub(super) fn found(host: &Host) -> Vec<SysfsDevice> {
    devices(&host.path("sys"))
}

/// The ports that carry traffic, each with its device's name.
fn active(devices: &[SysfsDevice]) -> Vec<(&str, &SysfsPort)> {
    let ports = devices.iter().flat_map(|device| device.ports.iter().map(|port| (&*device.name, port)));
    ports.filter(|(_, port)| port.is_active()).collect()
}

fn rdma(host: &Host) -> Check {
    let devices = found(host);
    let check = |state, found| Check::new(AREA, "rdma", state, found);
    if devices.is_empty() {
        return check(State::Absent, "no device".to_owned())
            .costs("transfers between hosts go over TCP")
            .mend("for a trial without hardware: rdma link add rxe0 type rxe netdev INTERFACE");
    }
    let shown = devices.iter().map(describe).collect::<Vec<_>>().join("; ");
    match active(&devices).is_empty() {
        true => check(State::Limited, shown)
            .costs("no port carries traffic")
            .mend("ip link set INTERFACE up (for InfiniBand: check cable and subnet manager)"),
        false => check(State::Ok, shown),
    }
}

fn describe(device: &SysfsDevice) -> String {
    let place = device.pci.as_deref().unwrap_or("software");
    let node = device.numa_node.map(|node| format!(", node {node}")).unwrap_or_default();
    let port = |port: &SysfsPort| {
        let word = |word: &Option<String>| word.clone().unwrap_or_else(|| "?".to_owned());
        let speed =
            port.bytes_per_s.map(|bytes| format!(" {} Gb/s", bytes as f64 * 8e-9)).unwrap_or_default();
        format!(" port {} {} {}{speed}", port.number, word(&port.state), word(&port.link_layer))
    };
    let ports: Vec<String> = device.ports.iter().map(port).collect();
    format!("{} ({place}{node}){}", device.name, ports.join(","))
}

fn gids(host: &Host) -> Check {
    let devices = found(host);
    let ports = active(&devices);
    let check = |state, found| Check::new(AREA, "gids", state, found);
    if ports.is_empty() {
        return check(State::Absent, "no active port".to_owned());
    }
    let is_v2 = |port: &SysfsPort| port.gids.iter().any(|gid| gid.kind == Some(GidKind::RoceV2));
    let ethernet = |port: &SysfsPort| port.link_layer.as_deref() == Some("Ethernet");
    let counts = ports.iter().map(|(name, port)| format!("{name} port {}: {}", port.number, port.gids.len()));
    let shown = counts.collect::<Vec<_>>().join(", ");
    let lacks = |port: &SysfsPort| port.gids.is_empty() || ethernet(port) && !is_v2(port);
    match ports.iter().any(|(_, port)| lacks(port)) {
        true => check(State::Limited, shown)
            .costs("a port without an address of RoCE v2 reaches no host behind a router, or none at all")
            .mend("ip address add ADDRESS/PREFIX dev INTERFACE"),
        false => check(State::Ok, shown),
    }
}

fn mtu(host: &Host) -> Check {
    let devices = found(host);
    let check = |state, found| Check::new(AREA, "rdma_mtu", state, found);
    let ports = active(&devices);
    if ports.is_empty() {
        return check(State::Absent, "no active port".to_owned());
    }
    let known: Vec<_> = ports.iter().filter_map(|(name, port)| Some((*name, port, port.mtu?))).collect();
    if known.is_empty() {
        return check(State::Unknown, "no interface says its MTU".to_owned());
    }
    let shown = known.iter().map(|(name, _, mtu)| format!("{name}: {mtu}")).collect::<Vec<_>>().join(", ");
    let small =
        known.iter().find(|(_, port, mtu)| *mtu < FULL_MTU && port.link_layer.as_deref() == Some("Ethernet"));
    match small {
        Some((_, port, _)) => {
            let interface = port.interfaces.first().map_or("INTERFACE", String::as_str);
            check(State::Limited, shown)
                .costs("packets carry 1024 or 2048 bytes instead of 4096")
                .mend(format!("ip link set dev {interface} mtu {FULL_MTU} (switches must carry it)"))
        }
        None => check(State::Ok, shown),
    }
}

fn libibverbs(host: &Host) -> Check {
    const FILE: &str = "libibverbs.so.1";
    let check = |state, found: String| Check::new(AREA, "libibverbs", state, found);
    let set = host.variable("LD_LIBRARY_PATH").unwrap_or_default().split(':').filter(|path| !path.is_empty());
    let usual = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"].into_iter();
    let multiarch = [
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
    ];
    if let Some(folder) =
        set.chain(usual).chain(multiarch).find(|folder| host.has(format!("{folder}/{FILE}")))
    {
        return check(State::Ok, format!("{folder}/{FILE}"));
    }
    let state = if found(host).is_empty() { State::Absent } else { State::Limited };
    check(state, format!("no {FILE} in the usual folders"))
        .costs("RDMA devices cannot be used")
        .mend("apt-get install libibverbs1 ibverbs-providers")
}

/// Whether devices may write in another order than bytes came: a bit of their PCI Express capability (PCI Express Base
/// Specification, 7.5.3.4).
fn relaxed_ordering(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "relaxed_ordering", state, found);
    let devices: Vec<String> = found(host).into_iter().filter_map(|device| device.pci).collect();
    if devices.is_empty() {
        return check(State::Absent, "no RDMA device on the PCI bus".to_owned());
    }
    let on = |pci: &String| relaxed(&host.bytes(format!("sys/bus/pci/devices/{pci}/config"))?);
    let states: Vec<Option<bool>> = devices.iter().map(on).collect();
    if let Some(off) = devices.iter().zip(&states).find(|(_, on)| **on == Some(false)) {
        return check(State::Limited, format!("off for {}", off.0))
            .costs("writes of the device to memory wait for each other")
            .mend(format!("setpci -s {} CAP_EXP+8.w=0010:0010", off.0));
    }
    match states.iter().all(Option::is_some) {
        true => check(State::Ok, "devices may; whether the root complex does, it does not say".to_owned()),
        false => check(State::Unknown, "only root may read the configuration of devices".to_owned()),
    }
}

/// The bit in a device's configuration space, whose first 64 bytes everybody may read, the rest root alone.
fn relaxed(config: &[u8]) -> Option<bool> {
    const PCI_EXPRESS: u8 = 0x10;
    let mut at = usize::from(*config.get(0x34)?);
    // A damaged list may lead in circles; one that is sound has no more places than this.
    for _ in 0..48 {
        let (id, next) = (*config.get(at)?, *config.get(at + 1)?);
        if id == PCI_EXPRESS {
            return Some(config.get(at + 8)? & 0x10 != 0);
        }
        at = usize::from(next);
        if at < 0x40 {
            return None;
        }
    }
    None
}

fn locked_memory(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "locked_memory", state, found);
    // CAP_IPC_LOCK frees from the limit.
    if host.capability(14) == Some(true) && host.is_first_namespace() {
        return check(State::Ok, "no limit (CAP_IPC_LOCK)".to_owned());
    }
    match host.limit("Max locked memory") {
        None => check(State::Unknown, "no /proc/self/limits".to_owned()),
        Some(None) => check(State::Ok, "no limit".to_owned()),
        Some(Some(bytes)) => check(State::Limited, format!("{} at most", size(bytes)))
            .costs("more memory can be neither registered for RDMA nor page-locked")
            .mend("ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; container: --ulimit memlock=-1)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::host::tests::fake;

    const STATE: (&str, &str) = ("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n");
    const ETHERNET: (&str, &str) = ("sys/class/infiniband/rxe0/ports/1/link_layer", "Ethernet\n");
    const GID: (&str, &str) =
        ("sys/class/infiniband/rxe0/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n");
    const V2: (&str, &str) = ("sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1", "RoCE v2\n");
    const PARENT: (&str, &str) = ("sys/class/infiniband/rxe0/parent", "eth0\n");

    fn state(probe: Probe, files: &[(&str, &str)]) -> State {
        probe(&fake(files).host).state
    }

    #[test]
    fn devices_and_addresses() {
        assert_eq!(state(rdma, &[]), State::Absent);
        assert_eq!(state(rdma, &[(STATE.0, "1: DOWN\n")]), State::Limited);
        let check = rdma(&fake(&[STATE, ETHERNET]).host);
        assert_eq!((check.state, &*check.found), (State::Ok, "rxe0 (software) port 1 ACTIVE Ethernet"));
        assert_eq!(state(gids, &[]), State::Absent);
        assert_eq!(state(gids, &[STATE, ETHERNET, GID]), State::Limited);
        assert_eq!(state(gids, &[STATE, ETHERNET, GID, V2]), State::Ok);
    }

    #[test]
    fn packets() {
        let with = |text| state(mtu, &[STATE, ETHERNET, PARENT, ("sys/class/net/eth0/mtu", text)]);
        assert_eq!(state(mtu, &[]), State::Absent);
        assert_eq!((with("x"), with("1500"), with("9000")), (State::Unknown, State::Limited, State::Ok));
        let check = mtu(&fake(&[STATE, ETHERNET, PARENT, ("sys/class/net/eth0/mtu", "1500")]).host);
        assert!(check.mend.unwrap().starts_with("ip link set dev eth0 mtu 4200"));
    }

    #[test]
    fn the_library_is_found_where_the_loader_looks() {
        assert_eq!(state(libibverbs, &[]), State::Absent);
        assert_eq!(state(libibverbs, &[STATE]), State::Limited);
        assert_eq!(state(libibverbs, &[("usr/lib64/libibverbs.so.1", "")]), State::Ok);
        let own = fake(&[("opt/x/libibverbs.so.1", "")]).with("LD_LIBRARY_PATH", "/none:/opt/x");
        assert_eq!(libibverbs(&own.host).found, "/opt/x/libibverbs.so.1");
    }

    #[test]
    fn the_order_of_writes_is_a_bit_of_the_configuration() {
        assert_eq!(state(relaxed_ordering, &[STATE]), State::Absent);
        let mut config = [0; 256];
        assert_eq!((relaxed(&config[..64]), relaxed(&[])), (None, None));
        config[0x34] = 0x40;
        config[0x40..0x42].copy_from_slice(&[0x05, 0x50]);
        config[0x50] = 0x10;
        assert_eq!(relaxed(&config), Some(false));
        assert_eq!(relaxed(&config[..64]), None, "what others than root see");
        config[0x58] = 0x10;
        assert_eq!(relaxed(&config), Some(true));
        config[0x41] = 0x40;
        assert_eq!(relaxed(&config), None, "a circle");
    }

    #[test]
    fn memory_is_locked_up_to_the_limit_or_by_capability() {
        let limits = |text| ("proc/self/limits", text);
        let lines =
            ["Max locked memory  8388608  8388608  bytes", "Max locked memory  unlimited  unlimited  bytes"];
        assert_eq!(state(locked_memory, &[]), State::Unknown);
        assert_eq!(state(locked_memory, &[limits(lines[0])]), State::Limited);
        assert_eq!(state(locked_memory, &[limits(lines[1])]), State::Ok);
        let capable = ("proc/self/status", "CapEff:\t0000000000004000");
        let first = ("proc/self/uid_map", "0 0 4294967295");
        assert_eq!(
            state(locked_memory, &[limits(lines[0]), capable]),
            State::Limited,
            "not in the first namespace"
        );
        assert_eq!(state(locked_memory, &[limits(lines[0]), capable, first]), State::Ok);
    }
}
