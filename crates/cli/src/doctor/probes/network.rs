//! TCP.

use super::{Probe, size};
use crate::doctor::host::Host;
use crate::doctor::report::{Check, State};

const AREA: &str = "Network";

pub(super) const PROBES: &[Probe] = &[tcp_congestion, tcp_buffers];

/// What a lane of 4 GB/s has under way in a millisecond.
const BUFFER_LEAST: u64 = 4 << 20;

fn tcp_congestion(host: &Host) -> Check {
    match host.text("proc/sys/net/ipv4/tcp_congestion_control") {
        Some(name) => Check::new(AREA, "tcp_congestion", State::Ok, name),
        None => Check::new(AREA, "tcp_congestion", State::Unknown, "the kernel does not say"),
    }
}

fn tcp_buffers(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "tcp_buffers", state, found);
    let most =
        |name| host.text(format!("proc/sys/net/ipv4/{name}"))?.split_whitespace().nth(2)?.parse::<u64>().ok();
    let (Some(received), Some(sent)) = (most("tcp_rmem"), most("tcp_wmem")) else {
        return check(State::Unknown, "the kernel does not say".to_owned());
    };
    let found = format!("{} received, {} sent at most", size(received), size(sent));
    match received.min(sent) < BUFFER_LEAST {
        true => check(State::Limited, found)
            .costs("fewer bytes are under way than a fast link far away holds")
            .mend(
                "sysctl -w net.ipv4.tcp_rmem='4096 131072 33554432' net.ipv4.tcp_wmem='4096 65536 33554432'",
            ),
        false => check(State::Ok, found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::host::tests::fake;

    fn state(probe: Probe, files: &[(&str, &str)]) -> State {
        probe(&fake(files).host).state
    }

    #[test]
    fn congestion_control_is_named() {
        assert_eq!(state(tcp_congestion, &[]), State::Unknown);
        let check = tcp_congestion(&fake(&[("proc/sys/net/ipv4/tcp_congestion_control", "bbr\n")]).host);
        assert_eq!((check.state, &*check.found), (State::Ok, "bbr"));
    }

    #[test]
    fn buffers_are_as_large_as_the_smaller() {
        let with = |sent| {
            let received = ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t33554432\n");
            state(tcp_buffers, &[received, ("proc/sys/net/ipv4/tcp_wmem", sent)])
        };
        assert_eq!(state(tcp_buffers, &[]), State::Unknown);
        assert_eq!((with("4096 16384 4194304"), with("4096 16384 212992")), (State::Ok, State::Limited));
    }
}
