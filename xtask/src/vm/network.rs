//! The wires of the machine: what `ip` and `rdma` are told, as their option `-batch` reads it.
//!
//! All ends of all wires lie in one network namespace, since soft-RoCE listens in the first one alone. The kernel would
//! deliver what one end sends to another by the loopback. So that frames do cross the wires, the table of local
//! addresses is moved down: what comes in by an end is looked up there first, and what leaves for another end is
//! routed by a table of its own.

use std::fmt::Write;

/// The network of all rails: rail r of host h has the address 10.77.r.h.
const NETWORK: &str = "10.77";
/// Room for RoCE's largest packets, of 4096 bytes.
const MTU: u32 = 9000;
/// The first of the ends' routing tables.
const FIRST_TABLE: usize = 100;

/// How many hosts and rails there are, and how they are wired.
#[derive(Debug, Clone, Copy)]
pub(super) struct Network {
    pub(super) hosts: u8,
    pub(super) rails: u8,
    pub(super) mesh: bool,
}

/// One end of a wire, which has one RDMA device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct End {
    host: u8,
    rail: u8,
}

impl End {
    fn link(self) -> String {
        format!("{}{}", if self.host == 1 { 'a' } else { 'b' }, self.rail)
    }

    fn address(self) -> String {
        format!("{NETWORK}.{}.{}", self.rail, self.host)
    }

    /// Chosen rather than random, so that neighbours can be told in advance.
    fn mac(self) -> String {
        format!("02:77:00:00:{:02x}:{:02x}", self.rail, self.host)
    }
}

impl Network {
    fn ends(self) -> Vec<End> {
        (1..=self.hosts).flat_map(|host| (0..self.rails).map(move |rail| End { host, rail })).collect()
    }

    /// The names of the ends, in the order of their devices rxe0, rxe1 and so on.
    pub(super) fn links(self) -> Vec<String> {
        self.ends().into_iter().map(End::link).collect()
    }

    /// Whether frames that `from` sends reach `to`.
    fn reaches(self, from: End, to: End) -> bool {
        from != to && (self.mesh || (from.host != to.host && from.rail == to.rail))
    }

    /// Whether what `from` sends to `to` stays off the loopback: then it arrives over a wire or not at all.
    fn is_apart(self, from: End, to: End) -> bool {
        from != to && (self.mesh || from.host != to.host)
    }

    /// For `ip`: the links, their addresses and rules.
    pub(super) fn links_batch(self) -> String {
        let mut text = String::from("link set lo up\n");
        let mut line = |line: String| {
            let _ = writeln!(text, "{line}");
        };
        if self.mesh {
            line("link add switch type bridge".into());
            line("link set switch up".into());
        }
        let prefix = if self.mesh { 16 } else { 24 };
        for end in self.ends() {
            let link = format!("{} mtu {MTU} address {}", end.link(), end.mac());
            if self.mesh {
                let port = format!("to-{}", end.link());
                line(format!("link add {link} type veth peer name {port} mtu {MTU}"));
                line(format!("link set {port} master switch up"));
            } else if self.hosts == 1 {
                line(format!("link add {link} type dummy"));
            } else if end.host == 1 {
                let peer = End { host: 2, ..end };
                let peer = format!("{} mtu {MTU} address {}", peer.link(), peer.mac());
                line(format!("link add {link} type veth peer name {peer}"));
            }
            line(format!("addr add {}/{prefix} dev {}", end.address(), end.link()));
            line(format!("link set {} up", end.link()));
        }
        if self.ends().iter().all(|&end| self.apart_from(end).is_empty()) {
            return text;
        }
        for (index, end) in self.ends().into_iter().enumerate() {
            line(format!("rule add pref 10 iif {} lookup local", end.link()));
            let table = FIRST_TABLE + index;
            for to in self.apart_from(end) {
                let (from, to) = (end.address(), to.address());
                line(format!("rule add pref 20 from {from} to {to} lookup {table}"));
            }
            // Remains while the link is down, when the routes over it are gone.
            line(format!("route add blackhole default metric 4096 table {table}"));
        }
        line("rule add pref 30 lookup local".into());
        line("rule del pref 0".into());
        text
    }

    fn apart_from(self, end: End) -> Vec<End> {
        self.ends().into_iter().filter(|&to| self.is_apart(end, to)).collect()
    }

    /// For `ip`, an end each: the routes and neighbours, which the kernel forgets when the link goes down.
    ///
    /// That the neighbours are known spares the first connection a second of asking.
    pub(super) fn peers_batches(self) -> Vec<String> {
        let batch = |(index, from): (usize, End)| {
            let mut text = String::new();
            let link = from.link();
            for to in self.ends().into_iter().filter(|&to| self.reaches(from, to)) {
                let (source, address, mac) = (from.address(), to.address(), to.mac());
                let table = FIRST_TABLE + index;
                let _ = writeln!(text, "route replace {address} dev {link} src {source} table {table}");
                let _ = writeln!(text, "neigh replace {address} lladdr {mac} dev {link} nud permanent");
            }
            text
        };
        self.ends().into_iter().enumerate().map(batch).collect()
    }

    /// For `rdma`: one soft-RoCE device on each end.
    pub(super) fn devices_batch(self) -> String {
        let device = |(index, link)| format!("link add rxe{index} type rxe netdev {link}\n");
        self.links().into_iter().enumerate().map(device).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: Network = Network { hosts: 2, rails: 2, mesh: false };

    #[test]
    fn devices_of_host_b_follow_those_of_host_a() {
        assert_eq!(
            PAIRS.devices_batch(),
            "link add rxe0 type rxe netdev a0\nlink add rxe1 type rxe netdev a1\n\
             link add rxe2 type rxe netdev b0\nlink add rxe3 type rxe netdev b1\n"
        );
    }

    #[test]
    fn in_pairs_a_rail_reaches_its_other_end_alone() {
        let batches = PAIRS.peers_batches();
        assert_eq!(
            batches[3],
            "route replace 10.77.1.1 dev b1 src 10.77.1.2 table 103\n\
             neigh replace 10.77.1.1 lladdr 02:77:00:00:01:01 dev b1 nud permanent\n"
        );
        let links = PAIRS.links_batch();
        assert_eq!(links.matches("type veth").count(), 2);
        // The other rail of the other host is no shortcut by the loopback either.
        assert!(links.contains("rule add pref 20 from 10.77.0.1 to 10.77.1.2 lookup 100\n"));
        assert!(!links.contains("from 10.77.0.1 to 10.77.1.1 "));
        assert!(!links.contains("bridge"));
    }

    #[test]
    fn in_a_mesh_every_rail_reaches_every_other() {
        let mesh = Network { mesh: true, ..PAIRS };
        for batch in mesh.peers_batches() {
            assert_eq!(batch.matches("route replace").count(), 3);
            assert_eq!(batch.matches("neigh replace").count(), 3);
        }
        let links = mesh.links_batch();
        assert_eq!(links.matches("master switch up").count(), 4);
        assert!(links.contains("addr add 10.77.1.2/16 dev b1\n"));
        assert!(
            Network { hosts: 1, ..mesh }.links_batch().contains("from 10.77.0.1 to 10.77.1.1 lookup 100")
        );
    }

    #[test]
    fn one_host_without_a_switch_has_rails_that_reach_themselves() {
        let alone = Network { hosts: 1, rails: 2, mesh: false };
        assert_eq!(alone.links(), ["a0", "a1"]);
        assert!(alone.peers_batches().iter().all(String::is_empty));
        let links = alone.links_batch();
        assert!(links.contains("type dummy") && !links.contains("rule"), "{links}");
    }
}
