//! Where to listen, what to tell peers, and whom to call.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Instant;

use posthorse_core::{Deadline, Error, ErrorKind, Result};
use posthorse_segment::advertise;
pub(crate) use posthorse_segment::advertise::Network;
use socket2::{Domain, Socket, Type};

use crate::config::TcpConfig;

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
        vec![advertise::addresses_of(&config.interfaces, &advertise::interfaces()?)?]
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
    let all = advertise::interfaces()?;
    advertise::choose(bound, &config.networks()?, &all).map(|address| address.to_string()).ok_or_else(|| {
        let known: Vec<String> = all.iter().map(|i| format!("{} on {}", i.address, i.name)).collect();
        Error::invalid_config(
            "advertise_networks",
            format_args!("{:?}", config.advertise_networks),
            &format!("a network that contains a bound address of this host ({})", known.join(", ")),
        )
    })
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

    #[test]
    fn interfaces_choose_where_to_listen() {
        let listening = listen(&TcpConfig { interfaces: vec!["lo".into()], ..TcpConfig::default() }).unwrap();
        assert_eq!(listening.host, "127.0.0.1");
        for listener in &listening.listeners {
            assert!(listener.local_addr().unwrap().ip().is_loopback(), "{listener:?}");
        }
    }

    #[test]
    fn networks_choose_what_is_advertised_or_are_refused_with_what_there_is() {
        let base = TcpConfig { bind: vec![Ipv4Addr::LOCALHOST.into()], ..TcpConfig::default() };
        let within = TcpConfig { advertise_networks: vec!["127.0.0.0/8".into()], ..base.clone() };
        assert_eq!(listen(&within).unwrap().host, "127.0.0.1");
        let without = TcpConfig { advertise_networks: vec!["192.0.2.0/24".into()], ..base };
        let error = listen(&without).unwrap_err().to_string();
        assert!(error.contains("192.0.2.0/24") && error.contains("127.0.0.1 on lo"), "{error}");
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
