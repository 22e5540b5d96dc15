//! Where to listen, what to tell peers, and whom to call.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::sync::mpsc;
use std::time::Instant;

use posthorse_core::{Deadline, Error, ErrorKind, Result};
use socket2::{Domain, Socket, Type};

use crate::config::TcpConfig;
use crate::interfaces::{Interface, interfaces};

/// An address and how many of its leading bits count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        let (address, prefix) = (address.parse::<IpAddr>().ok()?, prefix.parse::<u8>().ok()?);
        let bits = if address.is_ipv4() { 32 } else { 128 };
        (prefix <= bits).then_some(Self { address, prefix })
    }

    fn contains(self, other: IpAddr) -> bool {
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

/// The sockets that listen, and the host and port that peers are told.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) listeners: Vec<TcpListener>,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// Listens as configured. All addresses share one port.
///
/// # Errors
/// `Io` or `LimitReached` naming the address; `InvalidConfig` when no address of this host is to be advertised.
pub(crate) fn listen(config: &TcpConfig) -> Result<Listening> {
    let wanted = if !config.interfaces.is_empty() {
        let all = interfaces().map_err(|error| Error::os("listing the interfaces", &error))?;
        vec![addresses_of(&config.interfaces, &all)?]
    } else if config.bind.is_empty() {
        vec![vec![IpAddr::from(Ipv6Addr::UNSPECIFIED)], vec![IpAddr::from(Ipv4Addr::UNSPECIFIED)]]
    } else {
        vec![config.bind.clone()]
    };
    // The second choice is for hosts without IPv6.
    let mut refusal = None;
    for addresses in wanted {
        match listen_on(&addresses, config) {
            Ok(listeners) => {
                let port = listeners.first().and_then(|l| l.local_addr().ok()).map_or(0, |a| a.port());
                let host = advertised(config, &addresses)?;
                return Ok(Listening { listeners, host, port });
            }
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| Error::invalid_config("bind", "empty", "at least one address")))
}

/// The addresses of the interfaces with these names, those best told to peers first.
fn addresses_of(names: &[String], all: &[Interface]) -> Result<Vec<IpAddr>> {
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

fn listen_on(addresses: &[IpAddr], config: &TcpConfig) -> Result<Vec<TcpListener>> {
    let mut refusal = None;
    for offset in 0..=config.port_range {
        match listen_at(addresses, config.port + offset) {
            Ok(listeners) => return Ok(listeners),
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| Error::invalid_config("bind", "empty", "at least one address")))
}

fn listen_at(addresses: &[IpAddr], mut port: u16) -> Result<Vec<TcpListener>> {
    let mut listeners = Vec::with_capacity(addresses.len());
    for address in addresses {
        let at = SocketAddr::new(*address, port);
        let listener = listen_one(at).map_err(|error| Error::os(&format!("listening on {at}"), &error))?;
        port = listener.local_addr().map_err(|error| Error::os("asking for the port", &error))?.port();
        listeners.push(listener);
    }
    Ok(listeners)
}

fn listen_one(at: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking().cloexec(), None)?;
    if at.is_ipv6() {
        // Only the unspecified address stands for IPv4 too.
        socket.set_only_v6(!at.ip().is_unspecified())?;
    }
    // A port whose former owner has gone is free at once; two live owners are still refused.
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}

/// The host that peers are told.
fn advertised(config: &TcpConfig, bound: &[IpAddr]) -> Result<String> {
    if !config.advertise.is_empty() {
        return Ok(config.advertise.clone());
    }
    let all = interfaces().map_err(|error| Error::os("listing the interfaces", &error))?;
    choose(&config.networks()?, bound, &all, default_source).map(|address| address.to_string()).ok_or_else(
        || {
            let known: Vec<String> = all.iter().map(|i| format!("{} on {}", i.address, i.name)).collect();
            Error::invalid_config(
                "advertise_networks",
                format_args!("{:?}", config.advertise_networks),
                &format!("a network that contains a bound address of this host ({})", known.join(", ")),
            )
        },
    )
}

/// The address to advertise: in the first of `networks` that has one, else the first bound address that is
/// specific, else where packets to the world leave from, else any that is routable, else loopback.
fn choose(
    networks: &[Network],
    bound: &[IpAddr],
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

/// The addresses of a host, in the resolver's order.
///
/// # Errors
/// `PeerUnreachable` when the name means nothing; `DeadlineExceeded` when the resolver does not answer in time.
pub(crate) fn resolve(host: &str, port: u16, deadline: Deadline) -> Result<Vec<SocketAddr>> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    // The system's resolver takes no deadline, so it runs on a thread of its own that nobody waits for longer.
    let (answer, answered) = mpsc::sync_channel(1);
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("tcp-resolve".to_owned())
        .spawn(move || {
            let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            let _ = answer.send(found);
        })
        .map_err(|error| Error::os("starting the resolver's thread", &error))?;
    let found = match deadline.remaining(Instant::now()) {
        Some(left) => answered.recv_timeout(left).ok(),
        None => answered.recv().ok(),
    };
    match found {
        Some(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Some(Ok(_)) => Err(unresolved(host, "it has no address")),
        Some(Err(error)) => Err(unresolved(host, &error.to_string())),
        None => Err(Deadline::exceeded(&format!("the address of host {host}"))),
    }
}

fn unresolved(host: &str, why: &str) -> Error {
    Error::new(ErrorKind::PeerUnreachable, format!("looking up host {host:?}: {why}"))
}

#[cfg(test)]
mod tests {
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
            let chosen = choose(&networks, bound, all, nowhere).map(|address| address.to_string());
            assert_eq!(chosen.as_deref(), expected, "{networks:?} {bound:?}");
        }
        let source = |ipv4: bool| ipv4.then(|| "10.1.2.3".parse().unwrap());
        assert_eq!(choose(&[], &any6, &all, source), source(true));
    }

    #[test]
    fn interfaces_choose_where_to_listen_and_an_unknown_one_is_named() {
        let listening = listen(&TcpConfig { interfaces: vec!["lo".into()], ..TcpConfig::default() }).unwrap();
        assert_eq!(listening.host, "127.0.0.1");
        for listener in &listening.listeners {
            assert!(listener.local_addr().unwrap().ip().is_loopback(), "{listener:?}");
        }
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

    #[test]
    fn an_address_in_use_is_named_and_a_range_goes_on() {
        let config = TcpConfig { bind: vec![Ipv4Addr::LOCALHOST.into()], ..TcpConfig::default() };
        let first = listen(&config).unwrap();
        let same = TcpConfig { port: first.port, ..config };
        let error = listen(&same).unwrap_err().to_string();
        assert!(error.contains(&format!("127.0.0.1:{}", first.port)), "{error}");
        if first.port < 65_000 {
            let next = listen(&TcpConfig { port_range: 500, ..same }).unwrap();
            assert!(next.port > first.port && next.port <= first.port + 500);
        }
    }

    #[test]
    fn literal_addresses_need_no_resolver_and_a_bad_name_is_named() {
        let found = resolve("[::1]", 7, Deadline::NEVER).unwrap();
        assert_eq!(found, ["[::1]:7".parse().unwrap()]);
        let error = resolve("no such host.invalid", 7, Deadline::NEVER).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerUnreachable);
        assert!(error.to_string().contains("no such host"), "{error}");
    }
}
