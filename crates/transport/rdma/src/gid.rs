//! The addresses of ports, and which of a port's to use.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use posthorse_core::{Error, ErrorKind, Result};

use crate::verbs::GidEntry;

/// The address of a port: 128 bits, in the form of an IPv6 address (IBTA specification, 4.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

/// For which protocol an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// An InfiniBand subnet, or RoCE version 1: frames that no router passes on. The system does not tell them apart.
    InfiniBandOrRoceV1,
    /// RoCE version 2: UDP over IP.
    RoceV2,
}

/// How far an address reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reach {
    /// The same link alone: fe80::/10, 169.254.0.0/16.
    Link,
    /// As far as somebody routes it.
    Routable,
}

impl Gid {
    /// Whether no bit of it is set: the place in the table is empty.
    pub fn is_empty(self) -> bool {
        self.0 == [0; 16]
    }

    /// How many leading bits two addresses share. Ports of one subnet share most.
    pub fn common_prefix(self, other: Self) -> u32 {
        (u128::from_be_bytes(self.0) ^ u128::from_be_bytes(other.0)).leading_zeros()
    }

    fn reach(self) -> Reach {
        let address = Ipv6Addr::from(self.0);
        let on_link = match address.to_ipv4_mapped() {
            Some(address) => address.is_link_local(),
            None => address.is_unicast_link_local(),
        };
        if on_link { Reach::Link } else { Reach::Routable }
    }

    fn is_ipv4(self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }
}

impl fmt::Display for Gid {
    /// As handshakes have it: sixteen pairs of lower-case hexadecimal digits, with colons between.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let colon = if at == 0 { "" } else { ":" };
            write!(f, "{colon}{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Gid {
    type Err = Error;

    /// # Errors
    /// `Malformed` for what is not sixteen bytes in hexadecimal, with or without colons between: the forms of
    /// handshakes and of sysfs.
    fn from_str(text: &str) -> Result<Self> {
        let malformed = || {
            let shown: String = text.chars().take(64).filter(|c| !c.is_control()).collect();
            let accepted = "32 hexadecimal digits, which colons may group";
            Error::new(ErrorKind::Malformed, format!("the GID is {shown:?}; accepted: {accepted}"))
        };
        let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b':').take(33).collect();
        if digits.len() != 32 || text.len() > 47 {
            return Err(malformed());
        }
        let digits = std::str::from_utf8(&digits).map_err(|_| malformed())?;
        if digits.contains('+') {
            return Err(malformed());
        }
        u128::from_str_radix(digits, 16).map(|bits| Self(bits.to_be_bytes())).map_err(|_| malformed())
    }
}

/// The address to use of a port's: that of the configured index; else the best, where RoCE version 2 is preferred to
/// version 1, what is routed to what reaches one link, what has an interface to what has none, and IPv4 to IPv6.
///
/// # Errors
/// `NotFound` when there is none.
pub(crate) fn choose(entries: &[GidEntry], index: Option<u8>) -> Result<&GidEntry> {
    let found = match index {
        Some(index) => entries.iter().find(|entry| entry.index == index),
        None => entries.iter().max_by_key(|entry| rank(entry)),
    };
    found.ok_or_else(|| {
        let listed: Vec<String> =
            entries.iter().map(|entry| format!("{} ({})", entry.index, entry.gid)).collect();
        let listed = if listed.is_empty() { "none".to_owned() } else { listed.join(", ") };
        let text = match index {
            Some(index) => format!("gid_index is {index}; the port has: {listed}"),
            None => "the port has no GID".to_owned(),
        };
        Error::new(ErrorKind::NotFound, text)
    })
}

/// Of two addresses, that of the higher rank is better; of equal ones, that of the lower index.
fn rank(entry: &GidEntry) -> (bool, Reach, bool, bool, std::cmp::Reverse<u8>) {
    (
        entry.kind == Some(GidKind::RoceV2),
        entry.gid.reach(),
        entry.interface.is_some(),
        entry.gid.is_ipv4(),
        std::cmp::Reverse(entry.index),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(index: u8, address: &str, kind: GidKind, interface: bool) -> GidEntry {
        let address: Ipv6Addr = address.parse().unwrap();
        let interface = interface.then(|| "eth0".to_owned());
        GidEntry { index, gid: Gid(address.octets()), kind: Some(kind), interface }
    }

    #[test]
    fn the_best_address_is_chosen() {
        use GidKind::{InfiniBandOrRoceV1 as V1, RoceV2 as V2};
        let mut entries = vec![
            entry(0, "fe80::1", V1, true),
            entry(1, "fe80::1", V2, true),
            entry(2, "::ffff:10.0.0.1", V1, true),
            entry(3, "::ffff:169.254.0.1", V2, true),
            entry(4, "2001:db8::1", V2, false),
            entry(5, "2001:db8::2", V2, true),
            entry(6, "::ffff:10.0.0.1", V2, true),
            entry(7, "::ffff:10.0.0.2", V2, true),
        ];
        for best in [6, 7, 5, 4, 3, 1, 2, 0] {
            assert_eq!(choose(&entries, Some(2)).is_ok(), entries.iter().any(|entry| entry.index == 2));
            assert_eq!(choose(&entries, None).unwrap().index, best, "{entries:?}");
            entries.retain(|entry| entry.index != best);
        }
        assert_eq!(choose(&entries, None).unwrap_err().kind(), ErrorKind::NotFound);
        let entries = [entry(0, "fe80::1", V1, true), entry(2, "::ffff:10.0.0.1", V2, true)];
        assert_eq!(choose(&entries, Some(0)).unwrap().index, 0, "what is configured is taken");
        let error = choose(&entries[..1], Some(9)).unwrap_err().to_string();
        assert!(error.contains("gid_index is 9") && error.contains("0 (fe:80:"), "{error}");
    }

    #[test]
    fn the_forms_of_handshakes_and_of_sysfs_are_understood() {
        let gid = Gid(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0x0a4d, 2).octets());
        assert_eq!(gid.to_string(), "00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02");
        for text in [&gid.to_string().to_uppercase(), "0000:0000:0000:0000:0000:ffff:0a4d:0002"] {
            assert_eq!(text.parse::<Gid>().unwrap(), gid, "{text}");
        }
        for text in [
            "",
            "zz",
            "::ffff:10.0.0.1",
            &"0".repeat(33),
            &":".repeat(64),
            "+0:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02",
        ] {
            let error = text.parse::<Gid>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{text}");
        }
    }

    #[test]
    fn ports_of_one_subnet_share_the_longest_prefix() {
        let gid = |last: [u16; 2]| Gid(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, last[0], last[1]).octets());
        let ours = gid([0x0a4d, 0x0001]);
        assert!(ours.common_prefix(gid([0x0a4d, 0x0002])) > ours.common_prefix(gid([0x0a4d, 0x0102])));
        assert_eq!(ours.common_prefix(ours), 128);
    }

    proptest! {
        #[test]
        fn addresses_survive_being_written(bytes: [u8; 16]) {
            prop_assert_eq!(Gid(bytes).to_string().parse::<Gid>().unwrap(), Gid(bytes));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,60}") {
            let _ = text.parse::<Gid>();
        }
    }
}
