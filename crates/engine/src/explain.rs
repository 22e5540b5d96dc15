//! Which path a peer's requests take, and why not another.

use std::fmt;

use posthorse_core::Incarnation;

/// How a peer is reached, transport by transport, best first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The peer's segment name.
    pub peer: String,
    /// Which life of it; `None` for foreign engines.
    pub incarnation: Option<Incarnation>,
    /// Why nothing reaches it any more, if so.
    pub ended: Option<String>,
    /// The transport that requests without a route take now.
    pub chosen: Option<String>,
    /// Every transport installed here.
    pub transports: Vec<TransportReport>,
}

/// How one transport reaches the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportReport {
    /// The transport.
    pub name: String,
    /// In short: `up`, `down`, `absent`, `untried`, `connecting`.
    pub state: &'static str,
    /// Why it is not up, if it is not.
    pub reason: Option<String>,
    /// Its paths.
    pub paths: Vec<PathReport>,
}

/// One path to the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathReport {
    /// The local device.
    pub local: String,
    /// The peer's device or address.
    pub remote: String,
    /// Bytes under way on it now.
    pub under_way: u64,
    /// Why it is down, if it is.
    pub reason: Option<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.peer)?;
        if let Some(incarnation) = self.incarnation {
            write!(f, " (life {:016x})", incarnation.0)?;
        }
        match (&self.ended, &self.chosen) {
            (Some(reason), _) => writeln!(f, ": gone: {reason}")?,
            (None, Some(chosen)) => writeln!(f, ": by {chosen}")?,
            (None, None) => writeln!(f, ": no path")?,
        }
        for transport in &self.transports {
            write!(f, "  {:<8} {}", transport.name, transport.state)?;
            match &transport.reason {
                Some(reason) => writeln!(f, ": {reason}")?,
                None => writeln!(f)?,
            }
            for path in &transport.paths {
                write!(f, "    {} -> {}, {} bytes under way", path.local, path.remote, path.under_way)?;
                match &path.reason {
                    Some(reason) => writeln!(f, ", down: {reason}")?,
                    None => writeln!(f)?,
                }
            }
        }
        Ok(())
    }
}
