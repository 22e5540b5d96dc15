//! Segment names that say where their handshake listens: `host:port`, `[::1]:port`.

use std::fmt;

use posthorse_core::{Error, Result};

/// What is accepted, in the words of every refusal.
const ACCEPTED: &str = "host:port, or [IPv6 address]:port";

/// The host and port in a segment's name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SegmentAddress {
    /// A host name, an IPv4 address, or an IPv6 address without its brackets.
    pub host: String,
    /// The port of the handshake.
    pub port: u16,
}

impl SegmentAddress {
    /// The address in `name`; where the name has no port it is `default_port`, if there is one.
    ///
    /// # Errors
    /// `InvalidArgument` that says what is accepted.
    pub fn parse(name: &str, default_port: Option<u16>) -> Result<Self> {
        let refused = || Error::invalid_argument("segment name", shown(name), ACCEPTED);
        let (host, port) = split(name).ok_or_else(refused)?;
        let port = match port {
            Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(refused)?,
            None => default_port.ok_or_else(refused)?,
        };
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for SegmentAddress {
    /// The name, with brackets around an IPv6 address.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// The host part of a segment's name, whatever follows it: the whole name where there is nothing to part.
pub(crate) fn host_of(name: &str) -> &str {
    split(name).map_or(name, |(host, _)| host)
}

/// Host and, if there is one, port. `None` for what can be neither.
fn split(name: &str) -> Option<(&str, Option<&str>)> {
    let (host, port) = if let Some(rest) = name.strip_prefix('[') {
        let (host, after) = rest.split_once(']')?;
        host.parse::<std::net::Ipv6Addr>().ok()?;
        match after {
            "" => (host, None),
            _ => (host, Some(after.strip_prefix(':')?)),
        }
    } else {
        match name.split_once(':') {
            // A second colon: an IPv6 address without brackets, whose end nobody can tell from a port.
            Some((_, rest)) if rest.contains(':') => return None,
            Some((host, port)) => (host, Some(port)),
            None => (name, None),
        }
    };
    let fits = !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/');
    fits.then_some((host, port))
}

/// Text from outside as it may be shown: quoted, escaped, and cut where it is long.
pub(crate) fn shown(text: &str) -> String {
    const CHARS: usize = 80;
    let mut cut: String = text.chars().take(CHARS).collect();
    if cut.len() < text.len() {
        cut.push('…');
    }
    format!("{cut:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for (name, host, port) in
            [("10.0.0.1:15001", "10.0.0.1", 15001), ("node-3:1", "node-3", 1), ("[::1]:65535", "::1", 65535)]
        {
            let address = SegmentAddress::parse(name, None).unwrap();
            assert_eq!((address.host.as_str(), address.port), (host, port));
            assert_eq!(address.to_string(), name);
            assert_eq!(host_of(name), host);
        }
        assert_eq!(SegmentAddress::parse("node-3", Some(12001)).unwrap().to_string(), "node-3:12001");
        assert_eq!(SegmentAddress::parse("[fe80::1]", Some(12001)).unwrap().to_string(), "[fe80::1]:12001");
    }

    #[test]
    fn what_is_no_address_is_refused_with_what_is_accepted() {
        for name in [
            "", "node", ":1", "a:0", "a:65536", "a:b", "::1", "::1:80", "[::1", "[::1]80", "[x]:1", "a b:1",
            "a/b:1",
        ] {
            let error = SegmentAddress::parse(name, None).unwrap_err().to_string();
            assert!(error.contains("host:port") && error.contains(&format!("{name:?}")), "{error}");
        }
        assert_eq!(host_of("a long/name"), "a long/name");
    }

    #[test]
    fn long_and_strange_text_is_cut_and_escaped() {
        let text = shown(&"\n\u{1b}x".repeat(1000));
        assert!(text.len() < 1000 && !text.contains('\n') && text.contains('…'));
    }
}
