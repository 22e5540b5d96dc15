//! Peers as far apart as two containers: mount, pid, user and network namespaces of their own.
//!
//! [`Spawn::separated`](crate::peer::Spawn::separated) starts such a peer, and [`link`] lays a virtual cable between
//! two. The work is done by `unshare` and `nsenter` (util-linux) and `ip` (iproute2).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::{Command, Stdio};

use posthorse_core::{Error, ErrorKind, Result};
use rustix::process::Pid;

use crate::peer::Peer;

/// Whether namespaces can be made here.
///
/// # Errors
/// `Unsupported`, with what the system said: skip the test.
pub fn available() -> Result<()> {
    let mut command = command();
    command.arg("true");
    run(command)
}

/// Whether [`link`] can be called here.
///
/// # Errors
/// `Unsupported`, with what is missing: skip the test.
pub fn link_available() -> Result<()> {
    available()?;
    if !rustix::process::geteuid().is_root() {
        return Err(unsupported("laying a cable between network namespaces", "needs root"));
    }
    let mut version = Command::new("ip");
    version.arg("-V");
    run(version)?;
    // In a namespace of its own, so that nothing is left behind where the kernel has no such device.
    let mut probe = command();
    probe.args(["ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]);
    run(probe)
}

/// One end of a cable: the addresses of a peer in its namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkEnd {
    /// Its IPv4 address.
    pub v4: IpAddr,
    /// Its IPv6 address.
    pub v6: IpAddr,
}

/// Lays a cable between two separated peers: in both it is called `veth0` and is up. Returns the ends' addresses. The
/// cable goes with the namespaces.
///
/// # Errors
/// `Unsupported`, with what `ip` said.
pub fn link(a: &Peer, b: &Peer) -> Result<(LinkEnd, LinkEnd)> {
    let (pid_a, pid_b) = (a.pid().to_string(), b.pid().to_string());
    let mut cable = Command::new("nsenter");
    cable.args(["--target", &pid_a, "--net", "ip", "link", "add", "veth0", "type", "veth"]);
    cable.args(["peer", "name", "veth0", "netns", &pid_b]);
    run(cable)?;
    let end = |number: u8| LinkEnd {
        v4: Ipv4Addr::new(10, 77, 0, number).into(),
        v6: Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, number.into()).into(),
    };
    for (pid, end) in [(&pid_a, end(1)), (&pid_b, end(2))] {
        let (v4, v6) = (format!("{}/24", end.v4), format!("{}/64", end.v6));
        let steps: [&[&str]; 3] = [
            &["addr", "add", &v4, "dev", "veth0"],
            // Without duplicate detection, which would take a second before the address can be used.
            &["addr", "add", &v6, "dev", "veth0", "nodad"],
            &["link", "set", "veth0", "up"],
        ];
        for step in steps {
            let mut ip = Command::new("nsenter");
            ip.args(["--target", pid, "--net", "ip"]).args(step);
            run(ip)?;
        }
    }
    Ok((end(1), end(2)))
}

/// Brings the loopback interface up. For a separated peer to call, in whose network namespace it is down at first.
///
/// # Errors
/// `Unsupported`, with what `ip` said.
pub fn loopback_up() -> Result<()> {
    let mut ip = Command::new("ip");
    ip.args(["link", "set", "lo", "up"]);
    run(ip)
}

/// Hides a folder behind an empty one. For a separated peer to call: it is hidden in its mount namespace alone.
///
/// # Errors
/// `Unsupported`, with what `mount` said.
pub fn hide(folder: &std::path::Path) -> Result<()> {
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "posthorse-test"]).arg(folder);
    run(mount)
}

/// The beginning of a command that runs the rest in fresh namespaces, and is killed together with it.
pub(crate) fn command() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--net"]);
    command.args(["--kill-child=KILL", "--"]);
    command
}

/// The child of a process that has one.
pub(crate) fn only_child(parent: Pid) -> Option<Pid> {
    let parent = parent.as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    Pid::from_raw(children.split_whitespace().next()?.parse().ok()?)
}

fn run(mut command: Command) -> Result<()> {
    let name = format!("{command:?}").replace('"', "");
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| unsupported(&name, &error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(unsupported(&name, String::from_utf8_lossy(&output.stderr).trim()))
}

fn unsupported(what: &str, why: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("{what}: {why}"))
}
