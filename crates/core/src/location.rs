//! Where memory lies.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Where memory lies, in the location strings of Mooncake Transfer Engine: `cpu:0`, `cuda:1`, `*`.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Location {
    /// Not said: the transports find out where it matters. Written `*`.
    #[default]
    Any,
    /// Host memory on a NUMA node. Written `cpu:N`.
    Cpu(u16),
    /// Memory of a CUDA device. Written `cuda:N`.
    Cuda(u16),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("*"),
            Self::Cpu(node) => write!(f, "cpu:{node}"),
            Self::Cuda(device) => write!(f, "cuda:{device}"),
        }
    }
}

impl FromStr for Location {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "*" || text.is_empty() {
            return Ok(Self::Any);
        }
        let number = |digits: &str| digits.parse::<u16>().ok();
        text.split_once(':')
            .and_then(|(kind, digits)| match kind {
                "cpu" => number(digits).map(Self::Cpu),
                "cuda" => number(digits).map(Self::Cuda),
                _ => None,
            })
            .ok_or_else(|| Error::invalid_argument("location", format_args!("{text:?}"), "*, cpu:N, cuda:N"))
    }
}

impl TryFrom<String> for Location {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Location> for String {
    fn from(location: Location) -> Self {
        location.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_round_trip_as_text() {
        for location in [Location::Any, Location::Cpu(0), Location::Cpu(65535), Location::Cuda(7)] {
            assert_eq!(location.to_string().parse::<Location>().unwrap(), location);
        }
        assert_eq!("".parse::<Location>().unwrap(), Location::Any);
    }

    #[test]
    fn a_bad_location_is_named_with_what_is_accepted() {
        for text in ["cpu", "cpu:", "cpu:-1", "cpu:65536", "gpu:0", "cuda:0x1", " cpu:0"] {
            let error = text.parse::<Location>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("cuda:N"), "{error}");
        }
    }
}
