//! How many file descriptors may go to connections that others open.

use rustix::process::{Resource, getrlimit};

/// How many connections may be open to a port whose own limit is `limit`: no more than so many eighths of the descriptors
/// that this process may have (`RLIMIT_NOFILE`, getrlimit(2)).
///
/// Whoever floods one port thus leaves most descriptors to all else. The handshake takes two eighths, one of them for
/// newcomers, the transport `tcp` three, a connector's control port two, and the transport `shm` one, of which each of
/// its peers may cost three descriptors; a connector's own gets that wait one, and the control connections that it keeps
/// another. Each engine and connector of a process has these shares: several of them, or one that is flooded at all ports at
/// once, may run out of descriptors all the same.
pub fn connections(limit: usize, eighths: usize) -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |most| most as usize);
    limit.min(share(descriptors, eighths)).max(1)
}

const fn share(descriptors: usize, eighths: usize) -> usize {
    descriptors / 8 * eighths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_its_limit_or_its_share() {
        assert_eq!(share(1024, 3), 384);
        assert_eq!(connections(3, 2), 3);
        assert_eq!(connections(0, 2), 1);
        let all = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |most| most as usize);
        assert_eq!(connections(usize::MAX, 2), share(all, 2).max(1));
    }
}
