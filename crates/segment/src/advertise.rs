//! Which address of this host peers are told.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

use posthorse_core::{Error, Result};

pub use crate::interfaces::Interface;

/// An address and how many of its leading bits count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    /// Reads `10.0.0.0/8` or `fd00::/8`; `None` for what is neither.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        let (address, prefix) = (address.parse::<IpAddr>().ok()?, prefix.parse::<u8>().ok()?);
        let bits = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= bits).then_some(Self { address, prefix })
    }

    /// Whether an address is of the network.
    pub fn contains(self, other: IpAddr) -> bool {
        match (self.address, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
                a.to_bits() & mask == b.to_bits() & mask
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
                a.to_bits() & mask == b.to_bits() & mask
            }
            _ => false,
        }
    }
}

/// Every address of every interface that is up.
///
/// # Errors
/// Whatever the system says.
pub fn interfaces() -> Result<Vec<Interface>> {
    crate::interfaces::interfaces().map_err(|error| Error::os("listing the interfaces", &error))
}

/// The addresses of the interfaces with these names, those best told to peers first.
///
/// # Errors
/// `InvalidConfig` for the key `interfaces`, naming the interface that has none, and those there are.
pub fn addresses_of(names: &[String], all: &[Interface]) -> Result<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    for name in names {
        // A link-local address means nothing without its interface, of which a peer knows none.
        let fit = all.iter().filter(|i| i.name == *name && !is_link_local(i.address));
        let mut found: Vec<_> = fit.map(|i| i.address).collect();
        if found.is_empty() {
            let mut known: Vec<&str> = all.iter().map(|i| i.name.as_str()).collect();
            known.sort_unstable();
            known.dedup();
            return Err(Error::invalid_config(
                "interfaces",
                format_args!("{name:?}"),
                &format!("an interface that is up and has an address, of {}", known.join(", ")),
            ));
        }
        found.sort_by_key(|address| rank(*address, ""));
        addresses.append(&mut found);
    }
    Ok(addresses)
}

/// The address to tell peers, of those that `bound` stands for and `all` lists: in the first of `networks` that has
/// one; without any, the first bound address that is specific, else where packets to the world leave from, else one
/// that is routable, else loopback.
pub fn choose(bound: &[IpAddr], networks: &[Network], all: &[Interface]) -> Option<IpAddr> {
    choose_by(bound, networks, all, default_source)
}

fn choose_by(
    bound: &[IpAddr],
    networks: &[Network],
    all: &[Interface],
    default_source: impl Fn(bool) -> Option<IpAddr>,
) -> Option<IpAddr> {
    let both = bound.contains(&Ipv6Addr::UNSPECIFIED.into());
    let reachable = |address: IpAddr| {
        bound
            .iter()
            .any(|b| *b == address || (b.is_unspecified() && (b.is_ipv4() == address.is_ipv4() || both)))
    };
    let candidates: Vec<&Interface> = all.iter().filter(|i| reachable(i.address)).collect();
    if !networks.is_empty() {
        let within = |network: &Network| candidates.iter().find(|i| network.contains(i.address));
        return networks.iter().find_map(within).map(|i| i.address);
    }
    if let Some(specific) = bound.iter().find(|address| !address.is_unspecified()) {
        return Some(*specific);
    }
    let known = |address: &IpAddr| candidates.iter().any(|i| i.address == *address);
    [true, false]
        .into_iter()
        .find_map(|ipv4| default_source(ipv4).filter(known).filter(|address| rank(*address, "") == 0))
        .or_else(|| candidates.iter().min_by_key(|i| rank(i.address, &i.name)).map(|i| i.address))
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// How little an address is fit for being told to peers: zero is best.
fn rank(address: IpAddr, interface: &str) -> u8 {
    if address.is_loopback() {
        3
    } else if is_link_local(address) {
        4
    } else if ["docker", "br-", "veth", "virbr", "cni", "flannel"].iter().any(|p| interface.starts_with(p)) {
        2
    } else if address.is_ipv6() {
        1
    } else {
        0
    }
}

/// The address that packets to the world leave from. Nothing is sent: connecting a datagram socket only
/// consults the routing table. The destinations are of the documentation ranges (RFC 5737, RFC 3849).
fn default_source(ipv4: bool) -> Option<IpAddr> {
    let (any, world): (IpAddr, IpAddr) = if ipv4 {
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(198, 51, 100, 1).into())
    } else {
        (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into())
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((world, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use posthorse_core::ErrorKind;

    use super::*;

    fn interface(name: &str, address: &str) -> Interface {
        Interface { name: name.to_owned(), address: address.parse().unwrap() }
    }

    #[test]
    fn a_network_contains_what_shares_its_prefix() {
        for (network, address, inside) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("0.0.0.0/0", "8.8.8.8", true),
            ("192.168.1.7/32", "192.168.1.7", true),
            ("fd00::/8", "fd12::1", true),
            ("::/0", "10.0.0.1", false),
        ] {
            let network = Network::parse(network).unwrap();
            assert_eq!(network.contains(address.parse().unwrap()), inside, "{network:?} {address}");
        }
        for bad in ["10.0.0.0", "10.0.0.0/33", "x/8", "::/129", "10.0.0.0/-1"] {
            assert_eq!(Network::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_advertised_address_is_routable_or_as_configured() {
        let all = [
            interface("lo", "127.0.0.1"),
            interface("docker0", "172.17.0.1"),
            interface("eth0", "fe80::1"),
            interface("eth0", "10.1.2.3"),
            interface("eth0", "fd00::3"),
        ];
        let any6 = [IpAddr::from(Ipv6Addr::UNSPECIFIED)];
        let any4 = [IpAddr::from(Ipv4Addr::UNSPECIFIED)];
        let local = ["127.0.0.1".parse().unwrap()];
        let network = |text: &str| vec![Network::parse(text).unwrap()];
        let nowhere = |_| None;
        for (networks, bound, all, expected) in [
            (vec![], &any6[..], &all[..], Some("10.1.2.3")),
            (vec![], &any4[..], &all[..2], Some("172.17.0.1")),
            (vec![], &any6[..], &all[..1], Some("127.0.0.1")),
            (vec![], &local[..], &all[..], Some("127.0.0.1")),
            (network("fd00::/8"), &any6[..], &all[..], Some("fd00::3")),
            (network("fd00::/8"), &any4[..], &all[..], None),
            (network("172.16.0.0/12"), &any6[..], &all[..], Some("172.17.0.1")),
        ] {
            let chosen = choose_by(bound, &networks, all, nowhere).map(|address| address.to_string());
            assert_eq!(chosen.as_deref(), expected, "{networks:?} {bound:?}");
        }
        let source = |ipv4: bool| ipv4.then(|| "10.1.2.3".parse().unwrap());
        assert_eq!(choose_by(&any6, &[], &all, source), source(true));
    }

    #[test]
    fn interfaces_are_found_by_name_and_an_unknown_one_is_named() {
        let all = [
            interface("lo", "127.0.0.1"),
            interface("eth0", "fe80::1"),
            interface("eth0", "fd00::3"),
            interface("eth0", "10.1.2.3"),
            interface("eth1", "fe80::2"),
        ];
        let addresses = |names: &[&str]| {
            addresses_of(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), &all)
        };
        let expected: [IpAddr; 3] =
            ["10.1.2.3", "fd00::3", "127.0.0.1"].map(|address| address.parse().unwrap());
        assert_eq!(addresses(&["eth0", "lo"]).unwrap(), expected);
        for bad in ["mlx5_0", "eth1"] {
            let error = addresses(&["lo", bad]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            for part in [&format!("interfaces is {bad:?}"), "eth0, eth1, lo"] {
                assert!(error.message().contains(part), "{part} is missing in {error}");
            }
        }
    }
}
